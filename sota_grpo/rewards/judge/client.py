"""The client of a judge, the cache of its verdicts, and the grader that adds its verdict as a reward term.

The judge is slow, rate-limited and restarted by others: the run waits for it, trains on no failure of the judge, and
asks no question twice, also after it was killed and resumed. Imports no torch.
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
from sota_grpo.rewards.judge.questions import (
    CLASSIFY,
    Endpoint,
    Material,
    Question,
    Unreadable,
    Verdict,
    WrongForm,
    dialog,
)
from sota_grpo.rl.records import Example, Score, task_of_example, total_reward
from sota_grpo.rl.task import Task
from sota_grpo.text import duration, json_line, one_line
from sota_grpo.workers.base import pending_future, resolve

logger = logging.getLogger(__name__)

TERM = "judge"  # the reward term, after the name of its task in a mixture
CONCURRENCY = 32  # requests at a time
LONGEST_LINE = 1 << 16  # of the cache file
_MOST_BYTES = 1 << 20  # of an answer
_MOST_SAID = 2000  # last characters of the judge's words that are cached
_KEY = re.compile(r"[0-9a-f]{64}")
_LONGEST_PAUSE_S = 30.0
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 60.0
_GOODBYE_S = 5.0
_MOST_WITHOUT = 64  # questions in a row without a verdict
_READINGS = 2  # requests before a judge's words count as unreadable
#: Statuses of a server, or of a proxy before it, that mean "not now" or "not you": no response is to blame.
_NOT_NOW = frozenset((401, 402, 403, 404, 405, 407, 408, 409, 425, 429, 502, 503, 529))


class JudgeGone(RunFailed, RuntimeError):
    """The judge has answered nothing for as long as the run may wait."""


class _Failed(Exception):
    """A request without a usable answer, to be repeated.

    Args:
        may_blame: the question itself may be the reason.
        after_s: seconds that the judge wants to be left alone.
    """

    def __init__(self, reason: str, *, may_blame: bool = True, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.may_blame, self.after_s = may_blame, after_s


class VerdictCache:
    """Verdicts by the key of their question, in an append-only file of JSON lines; for one thread at a time.

    One system call writes a line, so a killed process leaves whole lines and at most one that is cut. Damaged lines are
    ignored. Memory holds the positions of the lines only.

    Args:
        path: of the file; None: an unnamed temporary one.

    Raises:
        UserError: the path is a link or no regular file, or cannot be written.

    >>> path = getfixture("tmp_path") / "judge.jsonl"
    >>> cache = VerdictCache(path)
    >>> cache.put("a" * 64, Verdict(0.5, said="Verdict: 5"))
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
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise UserError(f"The judge's verdicts cannot be kept in {path} ({error.strerror}).") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise UserError(f"The judge's verdicts cannot be kept in {path}: it is no regular file.")
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
            logger.warning("%s: %d lines are no verdicts of a judge, and are ignored.", path, num_odd)

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, key: str) -> Verdict | None:
        """Return the verdict on the question ``key``, or None."""
        position = self._positions.get(bytes.fromhex(key))
        verdict = None if position is None else _verdict_of(os.pread(self._fd, *position))
        return None if verdict is None or verdict[0] != key else verdict[1]

    def put(self, key: str, verdict: Verdict) -> None:
        """Write ``verdict`` to the file.

        Raises:
            OSError: the disk is full.
        """
        row = {"key": key, "value": verdict.value, "error": verdict.error, "said": verdict.said[-_MOST_SAID:]}
        line = json_line({name: value for name, value in row.items() if value not in (None, "")}).encode() + b"\n"
        if os.write(self._fd, line) < len(line):  # the disk is full: end the cut line, so that no other continues it
            os.write(self._fd, b"\n")
            raise OSError(28, "No space left on device")
        self._positions[bytes.fromhex(key)] = (len(line), os.lseek(self._fd, 0, os.SEEK_CUR) - len(line))

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
    """Asks one judge, at most ``concurrency`` questions at a time; one that is open or answered is not asked again.

    Each question is a coroutine on the client's own event loop; a verdict is in the cache before its reader has it. A
    request is repeated, after a random pause or the one that the judge names (``Retry-After``), while

    - the judge does not answer, or answers "not now" (429, 503, ..), for ``gone_s``;
    - an answer fails (500, a time-out, no JSON), ``retries`` times.

    Then the response is to blame if the judge has answered another question since, or answers a small one now: its
    verdict is an error. Otherwise the judge is gone: after ``gone_s`` without any answer every future fails with
    :class:`JudgeGone`, which ends the run, so that nothing is trained on a judge's absence. A question that the judge
    refuses (400, ..) is an error at once; words without a verdict are requested once more, and then are an error.

    Args:
        url: of the judge, with or without a last ``/v1``.
        cache: closed with the client.
        api_key: sent as a bearer token; None: none.
        timeout_s: longest time for one answer.
        first_pause_s: mean pause before the first repetition; it doubles with each, up to 30 s.
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
        self._warned_at: float | None = None  # in this silence
        self._not_before, self._num_without = 0.0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._closing, self._is_open = threading.Lock(), True
        self._thread.start()

    def submit(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Future[Any]:
        """Run a coroutine function on the client's event loop; a future of its result."""
        with self._closing:  # what is submitted before close() is among the tasks that it waits for
            if not self._is_open:
                raise RuntimeError("The judge's client is closed.")
            return asyncio.run_coroutine_threadsafe(function(*args), self._loop)

    async def verdict(self, question: Question) -> Verdict:
        """Return the verdict, for coroutines on this event loop.

        Raises:
            RunFailed: the judge is gone, or the cache cannot be written.
            RuntimeError: the client is closed.
        """
        key = question.key
        task = self._open.get(key)
        known = self._cache.get(key) if task is None else None
        if task is not None or known is not None:
            self._counts["cached"] += 1
        if known is not None:
            return known
        if task is None:
            task = self._open[key] = self._loop.create_task(self._settle_and_keep(question))
        return await asyncio.shield(task)

    def metrics(self) -> dict[str, float]:
        """Return the ``judge/`` metrics since the last call; the latency is a mean."""
        before, self._reported = self._reported, dict(self._counts)
        counts = {name: count - before[name] for name, count in self._reported.items()}
        latency_s, requests = counts.pop("latency_s"), counts["requests"]
        mean = {"judge/latency_s": latency_s / requests} if requests else {}
        return {f"judge/{name}": count for name, count in counts.items()} | mean

    def connect(self) -> None:
        """Check that the judge answers; complete the endpoint with its model, and whether that takes chats.

        Raises:
            UserError: no server, a refused key, or no such endpoint; the message has the fix.
        """
        try:
            status, _, content = self._http.request("GET", "/v1/models", timeout_s=self._timeout_s)
        except ServerError as error:
            raise UserError(
                f"No judge answers at {self.url} ({str(error).rstrip('.')}); start it first, or correct "
                "reward.judge.url."
            ) from None
        if status in (401, 403):
            raise UserError(f"The judge at {self.url} refuses the key; set SOTA_GRPO_JUDGE_KEY to its own.")
        if not self.endpoint.model:
            try:
                model = str(json.loads(content)["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"The judge at {self.url} does not name its model; set reward.judge.model.") from None
            self.endpoint = replace(self.endpoint, model=model)
        if self.endpoint.kind != CLASSIFY:
            return
        faults = []
        for as_text in (False, True):  # a model without a chat template takes a text instead of a chat
            endpoint = replace(self.endpoint, as_text=as_text)
            try:
                fault = self.submit(self._send, endpoint.ping()).result().error
            except _Failed as error:
                fault = str(error)
            if fault is None:
                self.endpoint = endpoint
                return
            faults.append(fault)
        raise UserError(f"The judge at {self.url} has no /classify: {faults[0]}; try another reward.judge.kind.")

    def close(self) -> None:
        """Fail the questions that wait, and give open requests, which are paid, 5 s to finish; idempotent."""
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
            if verdict.is_final:
                try:
                    self._cache.put(question.key, verdict)
                except OSError as error:
                    reason = f"The judge's verdicts cannot be kept ({error.strerror}); free disk space."
                    raise RunFailed(reason) from error
            return verdict
        finally:
            del self._open[question.key]

    async def _settle(self, question: Question) -> Verdict:
        """Repeat the request until there is a verdict."""
        first_at = last_at = math.nan  # of failures: the first and the one before
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
                await self._pause(pause_s * random.uniform(0.5, 1.5))  # what failed together does not return together
                continue
            self._num_without = 0 if verdict.error is None else self._num_without + 1
            if self._num_without >= _MOST_WITHOUT:  # its credit is used up, or it cannot judge
                self._gone = JudgeGone(
                    f"The judge at {self.url} has given no verdict on {self._num_without} questions in a row (the "
                    f"last: {verdict.error}); mend it, or the rubric."
                )
                raise self._gone
            return verdict
        raise AssertionError("unreachable")

    async def _is_to_blame(self, num_failed: int, first_at: float, last_at: float) -> bool:
        """Return whether a question is the reason of its failures: others are answered between them.

        Args:
            first_at: time of its first failure; an answer since then may have been sent before the judge went.
            last_at: time of the failure before this one, or NaN.
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
        """Warn about a judge that is silent; raise where it was silent for too long."""
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        silent_s = now - self._silent_since
        left_s = self._gone_s - silent_s
        if left_s <= 0:
            self._gone = JudgeGone(
                f"The judge at {self.url} has not answered for {duration(silent_s)} ({reason}), and nothing is trained "
                "without it; when it is back, train.resume=auto continues, and repeats no question that it answered."
            )
            raise self._gone
        if silent_s > _WARN_AFTER_S and (self._warned_at is None or now - self._warned_at >= _WARN_EVERY_S):
            self._warned_at = now
            logger.warning(
                "The judge at %s has not answered for %s (%s); %d questions wait, for %s more at most.",
                *(self.url, duration(silent_s), reason, len(self._open), duration(left_s)),
            )

    async def _pause(self, seconds: float) -> None:
        """Sleep; raise where this is closed, or the judge is gone."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        if self._gone is not None:
            raise self._gone
        if self._closed.is_set():
            raise RuntimeError("The judge is closed and takes no request.")

    async def _send(self, question: Question) -> Verdict:
        """Send one request, from a daemon thread: an open request keeps no process alive."""
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
            verdict = question.read(answer)
        except Unreadable:
            self._note_answer()
            raise
        except (WrongForm, ValueError, RecursionError) as error:
            raise _Failed(f"its answer cannot be read ({type(error).__name__}: {one_line(str(error), 100)})") from None
        self._note_answer()
        return verdict

    def _note_answer(self) -> None:
        if self._warned_at is not None:
            logger.info("The judge at %s answers again.", self.url)
        self._answered_at, self._silent_since, self._warned_at = time.monotonic(), None, None


def _seconds(after: str | None) -> float:
    """Return the seconds of ``Retry-After``, a number or a date; 0 where it is neither."""
    with suppress(InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(after) if after else 0.0
    return 0.0


@dataclass(frozen=True)
class Rules:
    """The questions about the responses to one task.

    Args:
        shows_reference: the judge sees the right answer.
        success_above: a reward above it is a success; None: the task decides.
    """

    term: str = TERM
    weight: float = 1.0
    rubric: str = ""
    shows_reference: bool = False
    success_above: float | None = None


class JudgedGrader:
    """The scores of another grader, with the judge's verdict as a further term.

    Both work concurrently, the judge from the driver's process: an outage costs no reward worker its deadline. A
    response without a verdict has failed, as one whose grader fails. Where the judge is gone, the futures fail.

    Args:
        grader: of the task's own terms; closed with this.
        judge: closed with this.
        task: of the responses, for their prompts and the weights of its own terms.
        rules: by the name of a task in a mixture, those that are judged; of a single task, under None.

    Attributes:
        term_weights: of all terms, the task's own and the judge's.
    """

    def __init__(self, grader: Grader, judge: JudgeClient, task: Task, rules: Mapping[str | None, Rules]) -> None:
        self.grader, self.judge, self._task, self._rules = grader, judge, task, rules
        self.term_weights = {**task.term_weights, **{rule.term: rule.weight for rule in rules.values()}}
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """A future of one score per pair."""
        verdicts = self.judge.submit(self._verdicts, pairs)
        return self.judge.submit(self._joined, pairs, self.grader.scores(pairs), verdicts)

    async def _verdicts(self, pairs: Sequence[tuple[str, Example]]) -> list[Verdict | None]:
        """Return the verdict on each response; None where its task is not judged."""

        async def verdict(text: str, example: Example) -> Verdict | None:
            rules = self._rules.get(task_of_example(example.extra))
            if rules is None:
                return None
            turns = (getattr(text, "record", None) or {}).get("messages")  # of a dialog with tools
            reference = (example.answer or None) if rules.shows_reference else None
            material = Material(self._task.messages(example), str(text) if turns is None else dialog(turns), reference)
            return await self.judge.verdict(replace(self.judge.endpoint, rubric=rules.rubric).question(material))

        return await asyncio.gather(*(verdict(*pair) for pair in pairs))

    async def _joined(
        self, pairs: Sequence[tuple[str, Example]], scores: Future[list[Score]], verdicts: Future[list[Verdict | None]]
    ) -> list[Score]:
        both = await asyncio.gather(asyncio.wrap_future(scores), asyncio.wrap_future(verdicts))
        return list(map(self._with_verdict, pairs, *both))

    def _with_verdict(self, pair: tuple[str, Example], score: Score, verdict: Verdict | None) -> Score:
        weights, example = self.term_weights, pair[1]
        if score.error is not None:  # the grader has logged it
            return failed_score(weights, score.error, example)
        score = replace(score, terms=dict.fromkeys(weights) | dict(score.terms))
        if verdict is None:
            return score
        if verdict.error is not None:
            return self._failures.add(failed_score(weights, verdict.error, example))
        rules = self._rules[task_of_example(example.extra)]
        terms = {**score.terms, rules.term: verdict.value}
        info = {**score.info, TERM: verdict.said} if verdict.said else score.info
        above = rules.success_above
        success = score.success if above is None else total_reward(terms, weights) > above
        return replace(score, terms=terms, info=info, success=success)

    def metrics(self) -> dict[str, float]:
        """Return the ``judge/`` metrics since the last call."""
        return self.judge.metrics()

    def close(self) -> None:
        """Close the grader, then the judge; idempotent."""
        self.grader.close()
        self.judge.close()
