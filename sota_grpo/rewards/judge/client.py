"""Asks a judge: many at a time, each until it is answered, can be blamed for its own failure, or the judge is given up;
and keeps its verdicts, so that a resumed run pays for no answer twice.

The judge is slow, rate-limited and restarted by others; the run waits for it, and trains on no failure of its.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import queue
import random
import re
import stat
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.rewards.grading import done
from sota_grpo.rewards.judge.questions import CLASSIFY, Endpoint, Question, Unreadable, Verdict, WrongForm, tokens_of
from sota_grpo.text import duration, json_line, one_line
from sota_grpo.workers.base import promised, resolve

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # of an answer
CONCURRENCY = 32  # requests at a time
LONGEST_LINE = 1 << 16  # of the file of verdicts
_MOST_SAID = 2000  # characters of what a judge said that are kept, its end
_KEY = re.compile(r"[0-9a-f]{64}")
_LONGEST_PAUSE_S = 30.0
_TELL_AFTER_S, _TELL_EVERY_S = 10.0, 60.0
_GOODBYE_S = 5.0
_MOST_WITHOUT = 64  # questions in a row without a verdict
_READINGS = 2  # answers that are asked for before a judge's words count as unreadable
#: Answers of a server, or of a proxy before it, that say "not now", or "not you": no response is to blame.
_NOT_NOW = frozenset((401, 402, 403, 404, 405, 407, 408, 409, 425, 429, 502, 503, 529))
_OF_THE_QUESTION = frozenset(range(400, 500)) - _NOT_NOW
_COUNTED = ("requests", "cached", "retries", "latency_s", "prompt_tokens", "completion_tokens")


class JudgeGone(RunFailed, RuntimeError):
    """The judge has answered nothing for as long as the run may wait."""


class _Failed(Exception):
    """An answer that says nothing; the next one may."""

    after_s = 0.0


class _NotNow(_Failed):
    """The judge does not answer, or not now; ``after_s`` is for how long not, where that was said."""


class _Refused(Exception):
    """The judge does not take this question."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long an answer is waited for, and how often it is asked for again.

    Args:
        timeout_s: longest time for one answer.
        retries: further attempts after failures that may be a question's own fault.
        gone_s: the run ends after so long without any answer.
        first_pause_s: before the first further attempt, on average; it doubles with each, up to 30 s.
    """

    timeout_s: float = 300.0
    retries: int = 5
    gone_s: float = 600.0
    first_pause_s: float = 1.0


class VerdictCache:
    """Verdicts by the key of their question, in a file of JSON lines that is only ever appended to; for any thread.

    A line is written with one call of the system, so a process that is killed leaves whole lines and at most one cut
    short. What is no verdict is passed over. The verdicts themselves stay in the file: memory holds their positions.

    Args:
        path: of the file; None: one without a name, gone with this object.

    Raises:
        UserError: the path is a link, or no regular file, or cannot be written.

    >>> path = getfixture("tmp_path") / "judge.jsonl"
    >>> cache = VerdictCache(path)
    >>> cache.put("a" * 64, Verdict(0.5, said="Verdict: 5"))
    >>> cache.close()
    >>> size = path.open("a").write('{"key": "cut sh')
    >>> VerdictCache(path).get("a" * 64)
    Verdict(value=0.5, error=None, said='Verdict: 5', is_final=True)
    """

    def __init__(self, path: Path | None) -> None:
        self._lock, self._places = threading.Lock(), dict[bytes, tuple[int, int]]()  # of lines: length and position
        if path is None:
            with tempfile.TemporaryFile() as unnamed:
                self._fd = os.dup(unnamed.fileno())
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise UserError(f"The judge's answers cannot be kept in {path} ({error.strerror}).") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise UserError(f"The judge's answers cannot be kept in {path}: it is no regular file.")
        at, num_odd, ends_whole = 0, 0, True
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            while line := file.readline(LONGEST_LINE):
                verdict = _verdict_of(line) if (ends_whole and line.endswith(b"\n")) else None
                if verdict is not None:
                    self._places[bytes.fromhex(verdict[0])] = (len(line), at)
                else:
                    num_odd += 1
                at += len(line)
                ends_whole = line.endswith(b"\n")
        if not ends_whole:
            os.write(self._fd, b"\n")
        if num_odd:
            logger.warning("%s: %d pieces are no verdicts of a judge, and are passed over.", path, num_odd)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Verdict | None:
        """The verdict on the question called ``key``; None where it was not asked yet."""
        with self._lock:
            place = self._places.get(bytes.fromhex(key))
        verdict = None if place is None else _verdict_of(os.pread(self._fd, *place))
        return None if verdict is None or verdict[0] != key else verdict[1]

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep ``verdict``; it is in the file when this returns.

        Raises:
            OSError: the disk is full.
        """
        row = {"key": key, "value": verdict.value, "error": verdict.error, "said": verdict.said[-_MOST_SAID:]}
        line = json_line({name: value for name, value in row.items() if value not in (None, "")}).encode() + b"\n"
        with self._lock:
            written = os.write(self._fd, line)
            if written < len(line):  # the disk is full: what was begun is no line, and none goes on from it
                os.write(self._fd, b"\n")
                raise OSError(28, "No space left on device")
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            self._places[bytes.fromhex(key)] = (len(line), end - len(line))

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def _verdict_of(line: bytes) -> tuple[str, Verdict] | None:
    """Key and verdict of a line of the cache; None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _KEY.fullmatch(str(row.get("key"))):
        return None
    value: Any = row.get("value")
    error, said = row.get("error"), row.get("said", "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    if not isinstance(said, str) or (not is_number and not isinstance(error, str)):
        return None
    return row["key"], Verdict(float(value), said=said) if is_number else Verdict(None, error, said)


class JudgeClient:
    """Questions to one judge, at most ``concurrency`` at a time; one that is open, or was answered, is not asked again.

    Contract. Consumes: questions. Produces: a future of a verdict for each, which is kept before the future has it.
    Waits for: the judge. A question is asked again, after a pause that doubles and is drawn from around it (or that the
    judge names, ``Retry-After``), while

    - the judge does not answer, or says "not now" (429, 503, ..), for ``gone_s``;
    - an answer fails (500, a time out, no JSON), ``retries`` times.

    Then its response is to blame where the judge has answered another question since, or answers a small one now: its
    verdict is an error. Otherwise the judge is gone: after ``gone_s`` without any answer every future fails with
    :class:`JudgeGone`, which ends the run, so that nothing is trained on a judge's absence. A question that the judge
    refuses (400, ..) is an error at once; words without a verdict are asked for once more, and then are one.

    Args:
        url: of the judge, with or without a last ``/v1``.
        cache: closed with this.
        api_key: sent as a bearer token; None: none.
    """

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        cache: VerdictCache,
        *,
        api_key: str | None = None,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        self.endpoint, self._cache, self._retry, self._concurrency = endpoint, cache, retry, concurrency
        self._http = HttpClient(
            url.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            option="reward.judge.url",
            max_connections=concurrency,
            max_bytes=MOST_BYTES,
        )
        self.url = self._http.url
        self._counts, self._lock = dict.fromkeys(_COUNTED, 0.0), threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Question, Future[Verdict]] | None] = queue.SimpleQueue()
        self._open, self._threads = dict[str, Future[Verdict]](), list[threading.Thread]()
        self._closed = threading.Event()
        self._gone: JudgeGone | None = None
        self._answered_at = self._told_at = -1.0
        self._silent_since: float | None = None  # the first failure after the last answer
        self._not_before, self._num_without = 0.0, 0

    def ask(self, question: Question) -> Future[Verdict]:
        """A future of the verdict; it fails where the judge is gone, its verdict cannot be kept, or this is closed."""
        if self._closed.is_set():
            raise RuntimeError("The judge was asked, and is closed.")
        key, verdict = question.key, promised()
        with self._lock:
            pending = self._open.get(key)
            known = self._cache.get(key) if pending is None else None
            if pending is not None or known is not None:
                self._counts["cached"] += 1
                return pending or done(known)
            self._open[key] = verdict
            if len(self._threads) < min(len(self._open), self._concurrency):
                thread = threading.Thread(target=self._work, name=f"judge-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._waiting.put((question, verdict))
        return verdict

    def take_counts(self) -> dict[str, float]:
        """What was asked since the last call; ``latency_s`` is the time of all ``requests``, which were answered."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(_COUNTED, 0.0)
        return counts

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def close(self) -> None:
        """Ask nothing more; what was not asked fails, what was is waited for a moment: it is paid. Idempotent."""
        self._closed.set()
        with self._lock:
            threads = [*self._threads]
        for _ in threads:
            self._waiting.put(None)
        deadline = time.monotonic() + _GOODBYE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._http.close()
        self._cache.close()

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            resolve(waiting[1], partial(self._settle_and_keep, waiting[0]))

    def _settle_and_keep(self, question: Question) -> Verdict:
        key = question.key
        try:
            verdict = self._settle(question)
            if verdict.is_final:
                self._cache.put(key, verdict)
        except OSError as error:
            raise RunFailed(f"The judge's answers cannot be kept ({error.strerror}); free disk space.") from error
        finally:
            with self._lock:
                del self._open[key]
        return verdict

    def _settle(self, question: Question) -> Verdict:
        """Ask until there is a verdict."""
        first_at = last_at = math.nan  # of failures: the first and the one before
        num_failed = num_unreadable = 0
        for attempt in itertools.count():
            self._await_pause()
            if attempt:
                self._add(retries=1)
            try:
                verdict = self._send(question)
            except Unreadable as error:
                num_unreadable += 1
                if num_unreadable < _READINGS:
                    continue
                verdict = Verdict(None, f"Unreadable: {error}")
            except _Refused as error:
                verdict = Verdict(None, f"JudgeError: {error}", is_final=False)
            except _Failed as error:
                num_failed += not isinstance(error, _NotNow)
                now = time.monotonic()
                first_at = now if math.isnan(first_at) else first_at
                if self._is_to_blame(num_failed, first_at, last_at):
                    return Verdict(None, f"JudgeError: {error}", is_final=False)
                last_at = now
                self._require_retry(str(error))
                if error.after_s:
                    with self._lock:
                        self._not_before = max(self._not_before, now + min(error.after_s, self._retry.gone_s))
                pause_s = min(_LONGEST_PAUSE_S, self._retry.first_pause_s * 2 ** min(attempt, 16))
                self._closed.wait(pause_s * random.uniform(0.5, 1.5))  # what failed together does not return together
                continue
            self._note_verdict(verdict.error)
            return verdict
        raise AssertionError("unreachable")

    def _is_to_blame(self, num_failed: int, first_at: float, last_at: float) -> bool:
        """Whether a question that failed so often is the reason itself: others are answered between its failures.

        Args:
            first_at: when it failed first; an answer since then may have been on its way as the judge went.
            last_at: when it failed before this time, or NaN.
        """
        is_spent = num_failed > self._retry.retries
        if not is_spent and time.monotonic() - first_at <= self._retry.gone_s:
            return False
        if self._answered_at > last_at:
            return True
        if is_spent:
            with suppress(_Failed, _Refused, Unreadable):
                self._send(self.endpoint.ping())
                return True
        return False

    def _note_verdict(self, fault: str | None) -> None:
        """Give a judge up that answers, but never with a verdict: its credit is used up, or it cannot judge."""
        with self._lock:
            self._num_without = 0 if fault is None else self._num_without + 1
            if self._num_without >= _MOST_WITHOUT:
                self._gone = JudgeGone(
                    f"The judge at {self.url} has given no verdict on {self._num_without} questions in a row (the "
                    f"last: {fault}); mend it, or the rubric."
                )
                raise self._gone

    def _await_pause(self) -> None:
        """Return when the judge may be asked again, by what it said."""
        while True:
            if self._gone is not None:
                raise self._gone
            if self._closed.wait(max(0.0, min(self._not_before - time.monotonic(), 1.0))):
                raise RuntimeError("The judge was asked, and is closed.")
            if time.monotonic() >= self._not_before:
                return

    def _require_retry(self, reason: str) -> None:
        """Tell who is waited for; raise when it is too long."""
        now = time.monotonic()
        with self._lock:
            self._silent_since = now if self._silent_since is None else self._silent_since
            silent_s, num_open = now - self._silent_since, len(self._open)
            was_told = self._told_at >= self._silent_since
            tell = silent_s > _TELL_AFTER_S and not (was_told and now - self._told_at < _TELL_EVERY_S)
            self._told_at = now if tell else self._told_at
        left = self._retry.gone_s - silent_s
        if left <= 0:
            self._gone = JudgeGone(
                f"The judge at {self.url} has not answered for {duration(silent_s)} ({reason}), and nothing is trained "
                "without it; when it is back, train.resume=auto continues, and asks nothing again that it answered."
            )
            raise self._gone
        if tell:
            logger.warning(
                "The judge at %s has not answered for %s (%s); %d questions wait, for %s more at most.",
                *(self.url, duration(silent_s), reason, num_open, duration(left)),
            )

    def _was_answered(self) -> None:
        now = time.monotonic()
        with self._lock:
            was_told = self._silent_since is not None and self._told_at >= self._silent_since
            self._answered_at, self._silent_since = now, None
        if was_told:
            logger.info("The judge at %s answers again.", self.url)

    def _send(self, question: Question) -> Verdict:
        """One attempt."""
        began = time.monotonic()
        body = json.dumps(question.body).encode()
        try:
            status, headers, content = self._http.request("POST", question.path, body, timeout_s=self._retry.timeout_s)
        except ServerError as error:
            is_there = not isinstance(error, ServerSilent) or error.is_late
            raise (_Failed if is_there else _NotNow)(str(error).rstrip(".")) from None
        said = one_line(content[:400].decode(errors="replace").strip(), 200)
        if status in _NOT_NOW:
            not_now = _NotNow(f"it answers {status}: {said}")
            not_now.after_s = _seconds(headers.get("Retry-After"))
            raise not_now
        if status in _OF_THE_QUESTION:
            self._was_answered()
            raise _Refused(f"it answers {status}: {said}")
        if not 200 <= status < 300:
            raise _Failed(f"it answers {status}: {said}")
        try:
            parsed = json.loads(content)
            prompt, completion = tokens_of(parsed)
            latency_s = time.monotonic() - began
            self._add(requests=1, latency_s=latency_s, prompt_tokens=prompt, completion_tokens=completion)
            verdict = question.read(parsed)
        except Unreadable:
            self._was_answered()
            raise
        except (WrongForm, ValueError, RecursionError) as error:
            raise _Failed(f"its answer cannot be read ({type(error).__name__}: {one_line(str(error), 100)})") from None
        self._was_answered()
        return verdict

    def connect(self) -> None:
        """See that the judge is there, and fill in what only it knows: its model's name, and whether that takes turns.

        Raises:
            UserError: nobody is there, the key is not taken, or it has no such endpoint; with what mends it.
        """
        try:
            status, _, content = self._http.request("GET", "/v1/models", timeout_s=self._retry.timeout_s)
        except ServerError as error:
            raise UserError(
                f"No judge answers at {self.url} ({str(error).rstrip('.')}); start it first, or mend reward.judge.url."
            ) from None
        if status in (401, 403):
            raise UserError(f"The judge at {self.url} does not take the key; set SOTA_GRPO_JUDGE_KEY to its own.")
        if not self.endpoint.model:
            try:
                model = str(json.loads(content)["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"The judge at {self.url} does not name its model; give reward.judge.model.") from None
            self.endpoint = replace(self.endpoint, model=model)
        if self.endpoint.kind != CLASSIFY:
            return
        said = ""
        for as_text in (False, True):  # a model without a chat template takes one text, not turns
            endpoint = replace(self.endpoint, as_text=as_text)
            try:
                self._send(endpoint.ping())
            except (_Failed, _Refused) as error:
                said = said or str(error)
            else:
                self.endpoint = endpoint
                return
        raise UserError(f"The judge at {self.url} does not answer /classify: {said}; try another reward.judge.kind.")


def _seconds(after: str | None) -> float:
    """``Retry-After``: a number of seconds, or a date."""
    with suppress(InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(after) if after else 0.0
    return 0.0
