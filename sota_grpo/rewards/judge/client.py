"""Asks a judge: many at a time, each until it is answered, can be blamed for its own failure, or the judge is given up.

The judge is slow, rate-limited and restarted by somebody else; the run waits for it, and trains on no failure of its.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import queue
import random
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.rewards.judge import CLASSIFY
from sota_grpo.rewards.judge.cache import Verdict, VerdictCache
from sota_grpo.rewards.judge.questions import PATHS, Endpoint, Question, Unreadable, WrongForm, tokens_of
from sota_grpo.text import duration, one_line
from sota_grpo.workers.base import promised, resolve

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20  # of an answer
CONCURRENCY = 32  # requests at a time
_LONGEST_PAUSE_S = 30.0
_TELL_AFTER_S, _TELL_EVERY_S = 10.0, 60.0
_GOODBYE_S = 5.0
_MOST_WITHOUT = 64  # questions in a row without a verdict
_READINGS = 2  # answers that are asked for before a judge's words count as unreadable
#: Answers of a server, or of what stands before it, that say "not now", or "not you": no response is to blame.
_NOT_NOW = frozenset((401, 402, 403, 404, 405, 407, 408, 409, 425, 429, 502, 503, 529))
_OF_THE_QUESTION = frozenset(range(400, 500)) - _NOT_NOW


class JudgeGone(RunFailed, RuntimeError):
    """The judge has answered nothing for as long as the run may wait."""


class _NotNow(Exception):
    """Nobody answers, or not now; ``after_s`` is for how long not, where that was said."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _Failed(Exception):
    """An answer that says nothing; the next one may."""


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


@dataclass
class Counts:
    """What was asked since the counts were last taken."""

    requests: int = 0  # answered, and so paid for
    cached: int = 0
    retries: int = 0
    latency_s: float = 0.0  # of those answered, together
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeClient:
    """Questions to one judge, at most ``concurrency`` at a time; one that is open, or was answered, is not asked again.

    Contract. Consumes: questions. Produces: a future of a verdict for each, which is kept before the future has it.
    Waits for: the judge. A question is asked again, after a pause that doubles and is drawn from around it (or that the
    judge names, ``Retry-After``), while

    - nobody answers, or says "not now" (429, 503, ..), for ``gone_s``;
    - an answer fails (500, a time out, no JSON), ``retries`` times.

    Then its response is to blame where the judge has answered another question since, or answers a small one now: its
    verdict is an error. Otherwise the judge is gone: after ``gone_s`` without any answer every future fails with
    :class:`JudgeGone`, which ends the run, so that nothing is trained on a judge's absence. A question that the judge
    refuses (400, ..) is an error at once; words without a verdict are asked for once more, and then are one.

    Args:
        url: of the judge, with or without a last ``/v1``.
        endpoint: what it is asked.
        cache: keeps its verdicts; closed with this.
        api_key: sent as a bearer token; None: none.
        concurrency: most questions that are asked at a time.
        retry: see there.

    Raises:
        UserError: the url is not one of a server.
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
        self.counts, self._lock = Counts(), threading.Lock()
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
                self.counts.cached += 1
                return pending or done(known)
            self._open[key] = verdict
            if len(self._threads) < min(len(self._open), self._concurrency):
                thread = threading.Thread(target=self._work, name=f"judge-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._waiting.put((question, verdict))
        return verdict

    def take_counts(self) -> Counts:
        """What was asked since the last call."""
        with self._lock:
            taken, self.counts = self.counts, Counts()
        return taken

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

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
            question, verdict = waiting
            resolve(verdict, partial(self._settle_and_keep, question))

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
            after_s = 0.0
            self._await_pause()
            if attempt:
                self._add(retries=1)
            try:
                verdict = self._send(question)
            except Unreadable as error:
                num_unreadable += 1
                if num_unreadable == _READINGS:
                    self._note_verdict(f"Unreadable: {error}")
                    return Verdict(None, f"Unreadable: {error}")
                continue
            except _Refused as error:
                self._note_verdict(str(error))
                return Verdict(None, f"JudgeError: {error}", is_final=False)
            except (_NotNow, _Failed) as error:
                num_failed += isinstance(error, _Failed)
                after_s = getattr(error, "after_s", 0.0)
                now = time.monotonic()
                first_at = now if math.isnan(first_at) else first_at
                if self._is_to_blame(num_failed, first_at, last_at):
                    return Verdict(None, f"JudgeError: {error}", is_final=False)
                last_at = now
                self._require_retry(str(error))
            else:
                self._note_verdict(None)
                return verdict
            self._pause(attempt, after_s)
        raise AssertionError("unreachable")

    def _is_to_blame(self, num_failed: int, first_at: float, last_at: float) -> bool:
        """Whether a question that failed so often is the reason itself: others are answered between its failures.

        Args:
            first_at: when it failed first; an answer since then may have been on its way as the judge went.
            last_at: when it failed before this time, or NaN.
        """
        late = time.monotonic() - first_at > self._retry.gone_s
        if num_failed <= self._retry.retries and not late:
            return False
        if self._answered_at > last_at:
            return True
        if num_failed <= self._retry.retries:
            return False
        with suppress(_NotNow, _Failed, _Refused, Unreadable):
            self._send(self.endpoint.ping())
            return True
        return False

    def _note_verdict(self, fault: str | None) -> None:
        """Give the judge up that answers, and never with a verdict: its credit is used up, or it cannot judge."""
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

    def _pause(self, attempt: int, after_s: float) -> None:
        if after_s:
            with self._lock:
                limit = time.monotonic() + min(after_s, self._retry.gone_s)
                self._not_before = max(self._not_before, limit)
        pause_s = min(_LONGEST_PAUSE_S, self._retry.first_pause_s * 2 ** min(attempt, 16))
        self._closed.wait(pause_s * random.uniform(0.5, 1.5))  # those that failed together do not come back together

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
            raise _NotNow(f"it answers {status}: {said}", _seconds(headers.get("Retry-After")))
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
        kind, model = self.endpoint.kind, self.endpoint.model
        try:
            status, _, content = self._http.request("GET", "/v1/models", timeout_s=self._retry.timeout_s)
        except ServerError as error:
            raise UserError(
                f"No judge answers at {self.url} ({str(error).rstrip('.')}); start it first, or mend reward.judge.url."
            ) from None
        if status in (401, 403):
            raise UserError(f"The judge at {self.url} does not take the key; set SOTA_GRPO_JUDGE_KEY to its own.")
        if not model:
            try:
                model = str(json.loads(content)["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f"The judge at {self.url} does not name its model; give reward.judge.model.") from None
            self.endpoint = replace(self.endpoint, model=model)
        if kind == CLASSIFY:
            self._choose_form()

    def _choose_form(self) -> None:
        """A model without a chat template takes one text, not turns."""
        said = ""
        for endpoint in (replace(self.endpoint, as_text=False), replace(self.endpoint, as_text=True)):
            try:
                self._send(endpoint.ping())
            except (_NotNow, _Failed, _Refused) as error:
                said = said or str(error)
            else:
                self.endpoint = endpoint
                return
        path = PATHS[self.endpoint.kind]
        raise UserError(f"The judge at {self.url} does not answer {path}: {said}; another reward.judge.kind may fit.")


def done(value: Any) -> Future[Any]:
    """A future that has its result."""
    future = promised()
    future.set_result(value)
    return future


def _seconds(after: str | None) -> float:
    """``Retry-After``: a number of seconds, or a date.

    >>> _seconds("7"), _seconds("Thu, 01 Jan 1970 00:00:00 GMT"), _seconds("soon"), _seconds(None)
    (7, 0, 0.0, 0.0)
    """
    with suppress(InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(after) if after else 0.0
    return 0.0
