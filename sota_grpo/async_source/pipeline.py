"""What happens to a group between its admission and the buffer, on one conductor thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sota_grpo.async_source.refill import Group
from sota_grpo.async_source.slots import Rows
from sota_grpo.batches import finish_group, group_request
from sota_grpo.envs import TaskEnv, prompt_rows
from sota_grpo.records import GroupOutput, GroupRequest, sample_seed

SAMPLE, GRADE, REFERENCE = "sample", "grade", "reference"


@dataclass(frozen=True)
class Services:
    """Who works on a group: each call returns at once, with a future.

    Args:
        sample: samples it.
        grade: writes rewards; None: ``env.begin_grading``.
        reference: adds what the KL term needs; None where there is none.
    """

    sample: Callable[[GroupRequest], Future[GroupOutput]]
    grade: Callable[[Rows], Future[Rows]] | None = None
    reference: Callable[[Rows], Future[Rows]] | None = None


class StageClock:
    """How many groups are in each stage, and for how many seconds each stage had at least one; not thread-safe."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys((SAMPLE, GRADE, REFERENCE), 0)
        self._seconds = dict.fromkeys(self.counts, 0.0)
        self._since = dict.fromkeys(self.counts, 0.0)

    def enter(self, stage: str) -> None:
        if self.counts[stage] == 0:
            self._since[stage] = time.monotonic()
        self.counts[stage] += 1

    def leave(self, stage: str) -> None:
        self.counts[stage] -= 1
        if self.counts[stage] == 0:
            self._seconds[stage] += time.monotonic() - self._since[stage]

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the last lap."""
        now, found = time.monotonic(), self._seconds
        for stage, count in self.counts.items():
            if count:
                found[stage] += now - self._since[stage]
                self._since[stage] = now
        self._seconds = dict.fromkeys(self.counts, 0.0)
        return found


class Pipeline:
    """Moves groups through sampled -> graded -> referenced -> finished as their futures resolve.

    Contract. Consumes: groups given to :meth:`submit`. Produces: calls of ``keeps`` and ``finished`` on the conductor
    thread. Waits for: its inbox. Unblocked by: a future that resolves (its callback only puts it into the inbox), or
    :meth:`close`. When a partner dies, the failure of its future is kept in :attr:`failure` and told to ``failed``;
    the other groups go on.

    Args:
        env: makes the rows of a group and, without ``services.grade``, has them graded.
        seed: of the requests.
        services: who works on a group.
        keeps: told of every graded group; False takes it out here.
        finished: told of every group that came through.
        failed: told that :attr:`failure` was set.
        lock: guards :attr:`clock`.
    """

    def __init__(
        self,
        env: TaskEnv,
        seed: int,
        services: Services,
        *,
        keeps: Callable[[Group, Rows], bool],
        finished: Callable[[Group, Rows], None],
        failed: Callable[[], None],
        lock: Any,
    ):
        self._env, self._seed, self._services = env, seed, services
        self._keeps, self._finished, self._failed = keeps, finished, failed
        self._lock = lock
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.clock = StageClock()
        self.failure: BaseException | None = None
        self.progress_at = time.monotonic()  # when something last resolved

    def submit(self, group: Group) -> None:
        """Ask for the samples of ``group``."""
        with self._lock:
            self.clock.enter(SAMPLE)
        self._ask(group, self._request, self._sampled)

    def resume(self, group: Group, rows: Rows) -> None:
        """Take a graded group that ``keeps`` had refused to the stages that are left."""
        self._inbox.put(lambda: self._to_reference(group, rows))

    def start(self) -> None:
        """Handle the inbox on a thread of its own from now on."""
        self._thread = threading.Thread(target=self._conduct, name="conductor", daemon=True)
        self._thread.start()

    def pump(self, timeout_s: float = 0.0) -> int:
        """Handle on this thread what is in the inbox, waiting up to ``timeout_s`` for the first; how many it was."""
        handled = 0
        try:
            event = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if event is not None:
                    self._handle(event)
                    handled += 1
                event = self._inbox.get_nowait()
        except queue.Empty:
            return handled

    def close(self) -> None:
        """End the conductor; futures that are left resolve into nothing. Idempotent."""
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def _conduct(self) -> None:
        while (event := self._inbox.get()) is not None:
            self._handle(event)

    def _handle(self, event: Callable[[], None]) -> None:
        self.progress_at = time.monotonic()
        try:
            event()
        except BaseException as failure:  # handed to the main thread, which cannot see this one
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
        self._failed()

    def _ask(self, group: Group, ask: Callable[..., Future], then: Callable[[Group, Any], None], *given: Any) -> None:
        try:
            future = ask(*given) if given else ask(group)
        except Exception as failure:  # the same to the caller as a future that fails
            self._fail(failure)
            return
        future.add_done_callback(lambda done: self._inbox.put(lambda: then(group, done.result())))

    def _request(self, group: Group) -> Future[GroupOutput]:
        request = group_request(
            self._env,
            group.group_id,
            group.example,
            num_samples=self._env.repeats,
            seed=sample_seed(self._seed, group.group_id),
        )
        return self._services.sample(request)

    def _sampled(self, group: Group, output: GroupOutput) -> None:
        """The rows are made here and not at admission: a group in flight is a few numbers."""
        env = self._env
        prompts = prompt_rows(group.group_id, group.example, env.prompt_ids(group.example), repeats=1)
        rows = finish_group(prompts, output, env.tokenizer)
        self._move(SAMPLE, GRADE)
        self._ask(group, self._services.grade or env.begin_grading, self._graded, rows)

    def _graded(self, group: Group, rows: Rows) -> None:
        self._move(GRADE, None)
        if self._keeps(group, rows):
            self._to_reference(group, rows)

    def _to_reference(self, group: Group, rows: Rows) -> None:
        if self._services.reference is None:
            self._finished(group, rows)
            return
        self._move(None, REFERENCE)
        self._ask(group, self._services.reference, self._referenced, rows)

    def _referenced(self, group: Group, rows: Rows) -> None:
        self._move(REFERENCE, None)
        self._finished(group, rows)

    def _move(self, before: str | None, after: str | None) -> None:
        with self._lock:
            if before is not None:
                self.clock.leave(before)
            if after is not None:
                self.clock.enter(after)
