"""The source of the loop when collection and learning run at the same time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from sota_grpo.envs import TaskEnv, prompt_rows
from sota_grpo.rl.collate import row_list
from sota_grpo.rl.records import GroupOutput, GroupRequest, sample_seed
from sota_grpo.source.admission import Group, Rows, Slots
from sota_grpo.source.batches import apply_transforms, constant_rows, finish_group, group_request, require_age
from sota_grpo.stopping import Interrupted
from sota_grpo.workers.base import WorkerLate

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


logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting main thread looks at should_stop


def never() -> bool:
    """Nobody asks to stop."""
    return False


class AsyncSource:
    """Batches of complete groups, none older than ``max_policy_age``, sampled while the learner learns.

    Contract. Consumes: prompts of ``env.stream``, and groups as ``sample``, ``grade`` and ``reference`` finish them.
    Produces: ``num_groups`` groups per :meth:`next_batch`, in the order drawn. Waits for: the ``num_groups`` groups
    with the oldest admission version, unfinished ones included. Unblocked by: the last of them; ``should_stop`` (it
    raises :class:`Interrupted` and nothing has changed); a failed future (its exception is raised); nothing resolved
    for ``wait_deadline_s`` (``TimeoutError``). When a partner dies: whoever resolves the future asks again or fails it;
    a failure ends the run, and the state can still be saved.

    **The age of a token** is bounded by the four rules of :func:`sota_grpo.functional.max_groups_admitted`: a group
    holds one of ``(max_policy_age + 1) * num_groups`` slots from its admission until :meth:`release` of its batch,
    which is called after the publish; the batch has the oldest by admission version; a discarded group gives up its
    slot at once. The bound is asserted on every row.

    **After a resume** the bound holds by the same proof. Finished groups come back with their rows, groups in flight
    are asked for again under the same ids, before any new prompt, and both keep the admission version that they had.
    So the groups, their slots and their order are those of a run without interruption, in which the engines happened
    to begin the unfinished groups anew: their tokens are then sampled by later versions than the one they are ordered
    by, which makes them younger than the proof needs. A batch that was given out and not released counts as trained.

    With ``max_policy_age=0`` all slots are taken at every turn, so the batches are those of
    :class:`sota_grpo.source.collectors.SyncSource`, dynamic sampling included (see :class:`.refill.Refill`).

    Args:
        env: draws, tokenises and, without ``grade``, has graded.
        sample: asks the engines for one group; thread-safe and quick.
        num_groups: groups per batch.
        max_policy_age: oldest policy, in published versions, whose tokens may be in a batch; 0 is lockstep.
        version: the version that every engine serves at least.
        grade: asks for the rewards of a group's rows; None: ``env.begin_grading``.
        reference: asks for what the KL term needs, group by group as they are graded; None where there is none.
        transforms: ``(phase, transform)``, applied in order to the whole batch.
        seed: sample ``i`` of group ``g`` is drawn from the stream derived from ``(seed, g, i)``.
        refill: replace groups whose rewards are all equal by fresh ones (dynamic sampling, arXiv:2503.14476).
        max_draws: most rounds of draws per turn under ``refill``; then the batch is completed with flat groups.
        should_stop: asked while waiting.
        wait_deadline_s: longest wait in which nothing resolves.
        metrics_extra: further metrics, asked for with every batch.
        threaded: False leaves the conductor's work to :meth:`pump` and to a waiting :meth:`next_batch`.

    Raises:
        ValueError: an age below 0, or no group per batch.
    """

    def __init__(
        self,
        env: TaskEnv,
        sample: Callable[[GroupRequest], Future[GroupOutput]],
        *,
        num_groups: int,
        max_policy_age: int,
        version: Callable[[], int],
        grade: Callable[[Rows], Future[Rows]] | None = None,
        reference: Callable[[Rows], Future[Rows]] | None = None,
        transforms: Sequence[tuple[str, Transform]] = (),
        seed: int = 0,
        refill: bool = False,
        max_draws: int = 10,
        should_stop: Callable[[], bool] = never,
        wait_deadline_s: float = 1800.0,
        metrics_extra: Callable[[], Mapping[str, float]] = dict,
        threaded: bool = True,
    ):
        self.env, self.transforms = env, tuple(transforms)
        self.num_groups, self.max_policy_age = num_groups, max_policy_age
        self.refill = refill
        self.should_stop, self.wait_deadline_s, self.metrics_extra = should_stop, wait_deadline_s, metrics_extra
        self.threaded = threaded
        self._slots = Slots(
            env.stream, num_groups=num_groups, max_policy_age=max_policy_age, version=version, max_draws=max_draws
        )
        self._begun = self._waiting = False
        self._metrics: dict[str, float] = {}
        self._changed = threading.Condition()  # its lock guards the slots
        self._pipeline = Pipeline(
            env,
            seed,
            Services(sample, grade, reference),
            keeps=self._keep,
            finished=self._finish,
            failed=self._tell,
            lock=self._changed,
        )

    def next_batch(self, version: int) -> TensorDictBase:
        """The next batch for the learner that stands at ``version``; the first call admits the first groups.

        Raises:
            Interrupted: ``should_stop`` while waiting.
            TimeoutError: nothing resolved for ``wait_deadline_s``.
            RuntimeError: a token is older than ``max_policy_age`` versions, or the batch before was not released.
        """
        self._slots.require_released()
        began = time.perf_counter()
        self._begin()
        self._wait()
        waited = time.perf_counter() - began
        with self._changed:
            rows = self._slots.take()
            refilled, self._slots.refill.num_replaced = self._slots.refill.num_replaced, 0
            busy = self._pipeline.clock.lap()
            left = {"groups/in_flight": len(self._slots.in_flight), "groups/ready": len(self._slots.buffer)}
        require_age(row_list(rows), version, self.max_policy_age)
        seconds = {"wait": waited, "generate": busy[SAMPLE], "score": busy[GRADE]}
        seconds |= {"ref": busy[REFERENCE]} if busy[REFERENCE] else {}
        rows = apply_transforms(self.transforms, rows, seconds)
        flat = sum(constant_rows(row_list(rows))) // self.env.repeats
        self._metrics = {f"time/{phase}_s": value for phase, value in seconds.items()} | left
        self._metrics |= {"groups/zero_signal": flat, "groups/refilled": refilled, **self.metrics_extra()}
        return rows

    def release(self, batch: TensorDictBase) -> None:
        """Free the slots of ``batch``, after the engines hold the weights that were trained on it."""
        with self._changed:
            fresh = self._slots.release()
        self._submit(fresh)

    def metrics(self) -> dict[str, float]:
        """Seconds per phase and group counts of the last batch."""
        return dict(self._metrics)

    def stands(self) -> bool:
        """Whether :meth:`next_batch` would return at once; asking admits the first groups, as it does."""
        self._begin()
        with self._changed:
            return self._stands()

    def pump(self) -> int:
        """Do what the conductor thread would do now (``threaded=False``); the number of events handled."""
        return self._pipeline.pump()

    def close(self) -> None:
        """End the conductor; what is in flight is forgotten. Idempotent."""
        self._pipeline.close()

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts, groups in flight by id, finished groups with their rows; at any moment."""
        with self._changed:
            return self._slots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; nothing is asked for before the next :meth:`next_batch`.

        Raises:
            RuntimeError: groups are in flight already.
            ValueError: the state is of another batch size, or of a larger ``max_policy_age``.
        """
        if self._begun:
            raise RuntimeError("load_state_dict() was called after next_batch(); load before the first batch.")
        self._slots.load_state_dict(state)

    def _begin(self) -> None:
        """Admit the first groups: those that a saved run had in flight, then new ones."""
        if self._begun:
            return
        self._begun = True
        pending = list(self._slots.in_flight.values())
        fresh = self._slots.fill()
        if self.threaded:
            self._pipeline.start()
        self._submit([*pending, *fresh])

    def _submit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._pipeline.submit(group)

    def _wait(self) -> None:
        """Return when the batch stands."""
        began = time.monotonic()
        with self._changed:
            self._waiting = True
            try:
                while not self._stands():
                    if self.should_stop():
                        raise Interrupted("a stop was asked for while the next batch was waited for.")
                    self._require_progress(began)
                    if self.threaded:
                        self._changed.wait(_POLL_S)
                    else:
                        self._pipeline.pump(_POLL_S)
            finally:
                self._waiting = False

    def _stands(self) -> bool:
        """Whether the batch stands; flat groups that it waits for go on to their last stages."""
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        if self._slots.batch_stands():
            return True
        kept = self._slots.settle()
        if kept:
            logger.warning(
                "The turn's %d draws are spent: %d groups whose rewards are all equal stay and carry no gradient.",
                *(self._slots.refill.num_draws, len(kept)),
            )
        for group, rows in kept:
            self._pipeline.resume(group, rows)
        return False

    def _require_progress(self, began: float) -> None:
        silent = time.monotonic() - max(began, self._pipeline.progress_at)
        if silent <= self.wait_deadline_s:
            return
        counts = self._pipeline.clock.counts
        raise WorkerLate(
            f"Nothing resolved for {silent:.1f} s while a batch of {self.num_groups} groups was waited for: "
            f"{counts[SAMPLE]} groups are being sampled, {counts[GRADE]} graded, {counts[REFERENCE]} are at the "
            f"reference, {len(self._slots.buffer)} are finished; training.log says what the workers said."
        )

    def _keep(self, group: Group, rows: Rows) -> bool:
        if not self.refill or not all(constant_rows(rows)):
            return True
        with self._changed:
            fresh = self._slots.flat(group, rows)
            self._notify_if_due()
        self._submit(fresh)
        return False

    def _finish(self, group: Group, rows: Rows) -> None:
        with self._changed:
            self._slots.finish(group, rows)
            self._notify_if_due()

    def _notify_if_due(self) -> None:
        if self._waiting and self._stands():
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
