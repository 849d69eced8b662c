"""The client of a judge server, the cache of its verdicts, and the grader that adds the verdict as a reward term.

A judge is slow, rate-limited, and may be restarted. The run waits for an unavailable judge, never trains on an outage,
and requests no verdict that it already has, even after it was killed and resumed. Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from sota_grpo.rewards.grading import FailureLog, Grader, failed_score
from sota_grpo.rewards.judge.questions import CLASSIFY, Endpoint, Material, Question, Unreadable, Verdict, dialog
from sota_grpo.rl.records import TASK, Example, Score, total_reward
from sota_grpo.rl.task import Task
from sota_grpo.text import duration, json_line, one_line, os_reason
from sota_grpo.workers.base import pending_future, resolve

logger = logging.getLogger(__name__)

TERM = "judge"  # the reward term, after the name of its task in a mixture
CONCURRENCY = 32  # concurrent requests
LONGEST_LINE = 1 << 16  # bytes of a line of the cache file
_MOST_BYTES = 1 << 20  # bytes of the body of an HTTP response
_MOST_SAID = 2000  # characters of the judge's text that are cached, the last ones
_KEY = re.compile(r"[0-9a-f]{64}")
_LONGEST_PAUSE_S = 30.0
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 60.0
_GOODBYE_S = 5.0
_MOST_WITHOUT = 64  # questions in a row without a verdict
_READINGS = 2  # requests until a judge's text counts as unreadable
#: HTTP statuses of a busy server or proxy, or of a rejected key: the response that is judged is not the cause.
_NOT_NOW = frozenset((401, 402, 403, 404, 405, 407, 408, 409, 425, 429, 502, 503, 529))


class JudgeGone(RunFailed, RuntimeError):
    """The judge has been unavailable for longer than a run may wait, or gave no verdict on 64 questions in a row."""


class _Failed(Exception):
    """A request got no usable answer, perhaps because of its question (``may_blame``); repeat it after ``after_s``."""

    def __init__(self, reason: str, *, may_blame: bool = True, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.may_blame, self.after_s = may_blame, after_s


class VerdictCache:
    """A cache of verdicts by question key, in an append-only JSON Lines file; not thread-safe.

    Each line is written by one system call, so a killed process leaves at most one incomplete line. Damaged lines are
    ignored, with one warning. Memory holds only the offsets. ``path`` is created if it is missing; None: an unnamed
    temporary file. UserError if ``path`` is a symbolic link, not a regular file, or not writable.

    >>> path = getfixture("tmp_path") / "judge.jsonl"
    >>> cache = VerdictCache(path)
    >>> kept = cache.put("a" * 64, Verdict(0.5, said="Verdict: 5"))
    >>> cache.close()
    >>> size = path.open("a").write('{"key": "cut sh')
    >>> VerdictCache(path).get("a" * 64)
    Verdict(value=0.5, error=None, said='Verdict: 5', is_final=True)
    """

    def __init__(self, path: Path | None) -> None:
        self._positions = dict[bytes, tuple[int, int]]()  # length and offset of each line
        if path is None:
            with tempfile.TemporaryFile() as unnamed:
                self._fd = os.dup(unnamed.fileno())
            return
        fault = f"Cannot write the judge's verdicts to {path}"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise UserError(f"{fault} ({os_reason(error)}); make it a writable file, no link.") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise UserError(f"{fault}: it is not a regular file; remove it.")
        offset, num_odd, line = 0, 0, b"\n"
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                verdict = _verdict_of(line) if line.endswith(b"\n") else None
                if verdict is not None:
                    self._positions[bytes.fromhex(verdict[0])] = (len(line), offset)
                num_odd += verdict is None
                offset += len(line)
        if not line.endswith(b"\n"):
            os.write(self._fd, b"\n")
        if num_odd:
            logger.warning("%s: %d lines are not valid verdicts of a judge and are ignored.", path, num_odd)

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, key: str) -> Verdict | None:
        """Return the cached verdict for the question key ``key`` (64 hex digits), or None."""
        position = self._positions.get(bytes.fromhex(key))
        verdict = None if position is None else _verdict_of(os.pread(self._fd, *position))
        return None if verdict is None or verdict[0] != key else verdict[1]

    def put(self, key: str, verdict: Verdict) -> Verdict:
        """Append ``verdict``, its text cut to the last 2,000 characters, and return it so; OSError if that fails."""
        verdict = replace(verdict, said=verdict.said[-_MOST_SAID:])
        row = {"key": key, "value": verdict.value, "error": verdict.error, "said": verdict.said}
        line = json_line({name: value for name, value in row.items() if value not in (None, "")}).encode() + b"\n"
        if os.write(self._fd, line) < len(line):  # the disk is full: end the cut line, so that no other continues it
            os.write(self._fd, b"\n")
            raise OSError(28, "No space left on device")
        self._positions[bytes.fromhex(key)] = (len(line), os.lseek(self._fd, 0, os.SEEK_CUR) - len(line))
        return verdict

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _verdict_of(line: bytes) -> tuple[str, Verdict] | None:
    """Return key and verdict of a line of the cache; None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _KEY.fullmatch(str(row.get("key"))):
        return None
    value: Any = row.get("value")
    error, text = row.get("error"), row.get("said", "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    if not isinstance(text, str) or (not is_number and not isinstance(error, str)):
        return None
    return row["key"], Verdict(float(value), said=text) if is_number else Verdict(None, error, text)


class JudgeClient:
    """Sends questions to a judge, at most ``concurrency`` at a time; a pending or answered question is not sent again.

    Each question is a coroutine on the client's own event loop. Its verdict, except the error of a failed request, is
    cached before it is returned. A failed request is repeated, after a random pause or that of ``Retry-After``,

    - for up to ``gone_s`` if the judge does not answer, is busy (429, 503, ..) or refuses all requests (401, 404, ..);
    - up to ``retries`` times if the answer is unusable (500, a time-out, invalid JSON).

    After that, the client finds out whether the question or the judge is the cause. The question is, and gets an
    error, if the judge has answered another question since the last try. After ``retries`` the client also sends a
    minimal question: if the judge answers it, the first question gets an error. Otherwise the request is repeated.

    If the judge rejects a question (400, 413, 422, ..), the question gets an error at once. It also gets one after two
    answers whose text has no verdict. After 64 such questions in a row, or ``gone_s`` without any answer, all futures
    fail with :class:`JudgeGone`.

    Args:
        url: base URL of the judge, with or without a trailing ``/v1``; UserError if it is not an http(s) address.
        cache: verdicts so far; :meth:`close` closes it.
        timeout_s: time limit of one request.
        first_pause_s: mean pause before the first retry; doubled with every retry, up to 30 s.
    """

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        cache: VerdictCache,
        *,
        api_key: str | None = None,
        concurrency: int = CONCURRENCY,
        timeout_s: float = 300.0,
        retries: int = 5,
        gone_s: float = 600.0,
        first_pause_s: float = 1.0,
    ) -> None:
        self.endpoint, self._cache, self._timeout_s, self._retries = endpoint, cache, timeout_s, retries
        self._gone_s, self._first_pause_s = gone_s, first_pause_s
        self._http = HttpClient(
            url.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            option="reward.judge.url",
            max_connections=concurrency,
            max_bytes=_MOST_BYTES,
        )
        self.url = self._http.url
        names = ("requests", "cached", "retries", "latency_s", "prompt_tokens", "completion_tokens")
        self._counts, self._reported = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        self._slots, self._closed = asyncio.Semaphore(concurrency), asyncio.Event()
        self._open = dict[str, asyncio.Task[Verdict]]()
        self._gone: JudgeGone | None = None
        self._answered_at = -1.0
        self._silent_since: float | None = None  # the first failure after the last answer
        self._warned_at: float | None = None  # about the failures since then
        self._not_before, self._num_without = 0.0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._closing, self._is_open = threading.Lock(), True
        self._thread.start()

    def submit(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Future[Any]:
        """Start ``function(*args)`` on the client's event loop; return its future. RuntimeError if closed."""
        with self._closing:  # close() waits for every task that was submitted before it
            if not self._is_open:
                raise RuntimeError("The judge's client is closed.")
            return asyncio.run_coroutine_threadsafe(function(*args), self._loop)

    async def verdict(self, question: Question) -> Verdict:
        """Return the verdict on a question; await it on the client's event loop (:meth:`submit`).

        RunFailed if the judge is gone or the cache cannot be written; RuntimeError if the client is closed.
        """
        task = self._open.get(question.key)
        known = self._cache.get(question.key) if task is None else None
        self._counts["cached"] += task is not None or known is not None
        if known is not None:
            return known
        if task is None:
            task = self._open[question.key] = self._loop.create_task(self._settle_and_keep(question))
        return await asyncio.shield(task)

    def metrics(self) -> dict[str, float]:
        """Return the ``judge/`` metrics since the last call: counts, and after requests the mean latency in seconds."""
        before, self._reported = self._reported, dict(self._counts)
        counts = {name: count - before[name] for name, count in self._reported.items()}
        latency_s, requests = counts.pop("latency_s"), counts["requests"]
        mean = {"judge/latency_s": latency_s / requests} if requests else {}
        return {f"judge/{name}": count for name, count in counts.items()} | mean

    def connect(self) -> None:
        """Check that the judge answers; set an empty ``model`` of the endpoint, and ``as_text`` if the judge needs it.

        For ``classify`` one or two questions are sent, too. UserError if the judge cannot be used, with the fix.
        """
        try:
            status, _, content = self._http.request("GET", "/v1/models", timeout_s=self._timeout_s)
        except ServerError as error:
            fault = f"No judge answers at {self.url} ({str(error).rstrip('.')})"
            raise UserError(f"{fault}; start it first, or correct reward.judge.url.") from None
        if status in (401, 403):
            raise UserError(f"The judge at {self.url} rejects the key; set SOTA_GRPO_JUDGE_KEY to one that it accepts.")
        if not self.endpoint.model:
            try:
                model = str(json.loads(content)["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"The judge at {self.url} lists no model; set reward.judge.model.") from None
            self.endpoint = replace(self.endpoint, model=model)
        if self.endpoint.kind != CLASSIFY:
            return
        faults = []
        for as_text in (False, True):  # a model without a chat template needs plain text
            endpoint = replace(self.endpoint, as_text=as_text)
            try:
                fault = self.submit(self._send, endpoint.ping()).result().error
            except _Failed as error:
                fault = str(error)
            if fault is None:
                self.endpoint = endpoint
                return
            faults.append(fault)
        raise UserError(f"The judge at {self.url} fails at /classify: {faults[0]}; try another reward.judge.kind.")

    def close(self) -> None:
        """Fail unsent questions, wait up to 5 s for sent ones (they cost money), and close the cache; idempotent."""
        with self._closing:
            if not self._is_open:
                return
            self._is_open = False
            finished = asyncio.run_coroutine_threadsafe(self._finish(), self._loop)
        finished.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._http.close()
        self._cache.close()

    async def _finish(self) -> None:
        self._closed.set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=_GOODBYE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _settle_and_keep(self, question: Question) -> Verdict:
        try:
            async with self._slots:
                verdict = await self._settle(question)
            return self._cache.put(question.key, verdict) if verdict.is_final else verdict
        except OSError as error:
            raise RunFailed(f"Cannot write the judge's verdicts ({os_reason(error)}); free disk space.") from error
        finally:
            del self._open[question.key]

    async def _settle(self, question: Question) -> Verdict:
        """Send the question until there is a verdict, possibly an error."""
        first_at = last_at = math.nan  # times of the first failure and of the latest
        num_failed = num_unreadable = 0
        for attempt in itertools.count():
            await self._pause(0.0)
            while (wait_s := self._not_before - time.monotonic()) > 0:
                await self._pause(min(wait_s, 1.0))
            self._counts["retries"] += attempt > 0
            try:
                verdict = await self._send(question)
            except Unreadable as error:
                num_unreadable += 1
                if num_unreadable < _READINGS:
                    continue
                verdict = Verdict(None, f"Unreadable: {error}")
            except _Failed as error:
                num_failed += error.may_blame
                now = time.monotonic()
                first_at = now if math.isnan(first_at) else first_at
                if await self._is_to_blame(num_failed, first_at, last_at):
                    return Verdict(None, f"JudgeError: {error}", is_final=False)
                last_at = now
                self._require_patience(str(error))
                if error.after_s:
                    self._not_before = max(self._not_before, now + min(error.after_s, self._gone_s))
                pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(attempt, 16))
                await self._pause(pause_s * random.uniform(0.5, 1.5))  # unlike that of other failed requests
                continue
            self._num_without = 0 if verdict.error is None else self._num_without + 1
            if self._num_without >= _MOST_WITHOUT:  # its credit is used up, or it cannot judge
                self._gone = JudgeGone(
                    f"The judge at {self.url} has given no verdict on {self._num_without} questions in a row (the "
                    f"last: {str(verdict.error).rstrip('.')}); check its credit and model, or change the rubric."
                )
                raise self._gone
            return verdict
        raise AssertionError("unreachable")

    async def _is_to_blame(self, num_failed: int, first_at: float, last_at: float) -> bool:
        """Return whether a question itself causes its failures, that is whether the judge answers others meanwhile.

        ``first_at`` is the time of its first failure, ``last_at`` that of the failure before this one, or NaN.
        """
        is_spent = num_failed > self._retries
        if not is_spent and time.monotonic() - first_at <= self._gone_s:
            return False
        if self._answered_at > last_at:
            return True
        if is_spent:
            with suppress(_Failed, Unreadable):
                return (await self._send(self.endpoint.ping())).error is None
        return False

    def _require_patience(self, reason: str) -> None:
        """Warn if the judge has not answered for 10 s; raise JudgeGone after ``gone_s``."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        silent_s = now - self._silent_since
        left_s = self._gone_s - silent_s
        if left_s <= 0:
            self._gone = JudgeGone(
                f"The judge at {self.url} has given no usable answer for {duration(silent_s)} ({reason}), so the run "
                "ends; restart the judge, then continue with train.resume=auto: answered questions are not sent again."
            )
            raise self._gone
        if silent_s > _WARN_AFTER_S and (self._warned_at is None or now - self._warned_at >= _WARN_EVERY_S):
            self._warned_at = now
            logger.warning(
                "No usable answer of the judge at %s for %s (%s); %d questions wait; unless it answers, the run ends "
                "in %s.",
                *(self.url, duration(silent_s), reason, len(self._open), duration(left_s)),
            )

    async def _pause(self, seconds: float) -> None:
        """Sleep; raise if the client is closed or the judge is gone."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        if self._gone is not None:
            raise self._gone
        if self._closed.is_set():
            raise RuntimeError("The judge's client was closed before the question was answered.")

    async def _send(self, question: Question) -> Verdict:
        """Send one request, from a daemon thread, so that a pending request does not keep the process alive."""
        began, response = time.monotonic(), pending_future()
        body = json.dumps(question.body).encode()
        post = partial(self._http.request, "POST", question.path, body, timeout_s=self._timeout_s)
        threading.Thread(target=resolve, args=(response, post), name="judge-request", daemon=True).start()
        try:
            status, headers, content = await asyncio.wrap_future(response)
        except ServerError as error:
            is_there = not isinstance(error, ServerSilent) or error.is_late
            raise _Failed(str(error).rstrip("."), may_blame=is_there) from None
        fault = f"it answers {status}: {one_line(content[:400].decode(errors='replace').strip(), 200)}"
        if status in _NOT_NOW:
            raise _Failed(fault, may_blame=False, after_s=_seconds(headers.get("Retry-After")))
        if 400 <= status < 500:
            self._note_answer()
            return Verdict(None, f"JudgeError: {fault}", is_final=False)
        if not 200 <= status < 300:
            raise _Failed(fault)
        try:
            answer = json.loads(content)
            usage = answer.get("usage") if isinstance(answer, dict) else None
            for name in ("prompt_tokens", "completion_tokens"):
                count = usage.get(name) if isinstance(usage, dict) else 0
                self._counts[name] += max(0, count) if isinstance(count, int) else 0
            self._counts["requests"] += 1
            self._counts["latency_s"] += time.monotonic() - began
            verdict = question.parse(answer)
        except Unreadable:
            self._note_answer()
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {one_line(str(error), 100).rstrip('.')}"
            raise _Failed(f"the judge's answer cannot be read ({why})") from None
        self._note_answer()
        return verdict

    def _note_answer(self) -> None:
        if self._warned_at is not None:
            logger.info("The judge at %s answers again.", self.url)
        self._answered_at, self._silent_since, self._warned_at = time.monotonic(), None, None


def _seconds(after: str | None) -> float:
    """Return the seconds of a ``Retry-After`` header (a number or a date), or 0 if it is neither."""
    with suppress(InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(after) if after else 0.0
    return 0.0


@dataclass(frozen=True)
class Rules:
    """How a judge scores the responses to one task."""

    term: str = TERM  # name of the reward term of the judge's score
    weight: float = 1.0  # of the term in the reward
    rubric: str = ""  # criteria for the judge (kind=chat)
    shows_reference: bool = False  # send the reference answer to the judge (kind=chat)
    success_above: float | None = None  # a response with a larger total reward is a success; None: the task decides


class JudgedGrader:
    """A :class:`~sota_grpo.rewards.grading.Grader` that adds the judge's verdict as a term to another grader's scores.

    Grader and judge work concurrently. The driver process sends the judge's requests, so an outage cannot make a reward
    worker time out. A response that the judge cannot score gets :func:`~sota_grpo.rewards.grading.failed_score`. If the
    judge is unavailable for too long, the futures fail with :class:`JudgeGone`. ``rules`` are by the name of each
    judged task of a mixture, or by None for a single task. ``term_weights`` are those of all terms.
    """

    def __init__(self, grader: Grader, judge: JudgeClient, task: Task, rules: Mapping[str | None, Rules]) -> None:
        self.grader, self.judge, self._task, self._rules = grader, judge, task, rules
        self.term_weights = {**task.term_weights, **{rule.term: rule.weight for rule in rules.values()}}
        self._failures, self.metrics = FailureLog(), judge.metrics

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """Return a future of one score per ``(response, example)`` pair, in order; RuntimeError if closed."""
        questions = [self._question(*pair) for pair in pairs]  # here: a SystemExit would end the client's loop
        verdicts = [one and self.judge.submit(self.judge.verdict, one) for one in questions]
        return self.judge.submit(self._joined, pairs, self.grader.scores(pairs), verdicts)

    def _question(self, text: str, example: Example) -> Question | None:
        rules = self._rules.get(example.extra.get(TASK))
        if rules is None:
            return None
        turns = (getattr(text, "record", None) or {}).get("messages")  # of a dialog with tools
        reference = (example.answer or None) if rules.shows_reference else None
        material = Material(self._task.messages(example), str(text) if turns is None else dialog(turns), reference)
        return replace(self.judge.endpoint, rubric=rules.rubric).question(material)

    async def _joined(
        self,
        pairs: Sequence[tuple[str, Example]],
        scores: Future[list[Score]],
        verdicts: Sequence[Future[Any] | None],  # None: the response's task is not judged
    ) -> list[Score]:
        own = await asyncio.wrap_future(scores)
        judged = [None if one is None else await asyncio.wrap_future(one) for one in verdicts]
        return list(map(self._with_verdict, [example for _, example in pairs], own, judged))

    def _with_verdict(self, example: Example, score: Score, verdict: Verdict | None) -> Score:
        weights = self.term_weights
        if score.error is not None:  # the grader has logged it
            return failed_score(weights, score.error, example)
        score = replace(score, terms=dict.fromkeys(weights) | dict(score.terms))
        if verdict is None:
            return score
        if verdict.error is not None:
            return self._failures.add(failed_score(weights, verdict.error, example))
        rules = self._rules[example.extra.get(TASK)]
        terms = {**score.terms, rules.term: verdict.value}
        info = {**score.info, TERM: verdict.said} if verdict.said else score.info
        above = rules.success_above
        success = score.success if above is None else total_reward(terms, weights) > above
        return replace(score, terms=terms, info=info, success=success)

    def close(self) -> None:
        """Close the grader, then the judge; idempotent."""
        self.grader.close()
        self.judge.close()
