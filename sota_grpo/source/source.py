"""From a prompt to graded samples, and the source of the loop's batches, in step with the learner or beside it.

:class:`Rollouts` is the one way of training, the gate, every evaluation, and TorchRL's own loops.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Inbox, completed
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.rl.collate import drawn_entries, group_table, last_turn
from sota_grpo.rl.records import (
    Example,
    GroupOutput,
    GroupRequest,
    Sample,
    SampledText,
    Sampling,
    Score,
    rewarded,
    sample_seed,
)
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_scores
from sota_grpo.source.admission import Group, Slots, num_zero_advantage_groups, require_age, zero_advantage_rows
from sota_grpo.stopping import Interrupted
from sota_grpo.workers.base import WorkerLate, resolve

Post = Callable[[Callable[[], object]], object]
Move = Callable[[str | None, str | None], None]
SAMPLE, GRADE, REFERENCE = "sample", "grade", "reference"

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting main thread looks at should_stop


@dataclass(frozen=True)
class Prompt:
    """What is asked for: ``num_samples`` responses to ``example``, from the random streams of ``seed``."""

    group_id: int
    example: Example
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Graded:
    """A group that was sampled and graded.

    Args:
        prompt: what was asked for.
        samples: as the engine gave them.
        rows: one per sample, rewards written.
        scores: what the grader said of each.
    """

    prompt: Prompt
    samples: Sequence[Sample]
    rows: RowTable
    scores: Sequence[Score]


class StageClock:
    """How many groups are in each stage, and for how many seconds each stage had at least one.

    >>> clock = StageClock()
    >>> clock.move(None, SAMPLE), clock.move(SAMPLE, GRADE), clock.counts
    (None, None, {'sample': 0, 'grade': 1, 'reference': 0})
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys((SAMPLE, GRADE, REFERENCE), 0)
        self._seconds = dict.fromkeys(self.counts, 0.0)
        self._since = dict.fromkeys(self.counts, 0.0)
        self._lock = threading.Lock()

    def move(self, before: str | None, after: str | None) -> None:
        """A group left ``before`` and entered ``after``; None is outside."""
        now = time.monotonic()
        with self._lock:
            if before is not None:
                self.counts[before] -= 1
                if self.counts[before] == 0:
                    self._seconds[before] += now - self._since[before]
            if after is not None:
                if self.counts[after] == 0:
                    self._since[after] = now
                self.counts[after] += 1

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the last lap."""
        now = time.monotonic()
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self.counts, 0.0)
            for stage, count in self.counts.items():
                if count:
                    seconds[stage] += now - self._since[stage]
                    self._since[stage] = now
        return seconds


class Rollouts:
    """Asks an engine for a prompt's samples, makes their rows, and has them graded.

    Contract. Consumes: prompts. Produces: futures of graded groups. Waits for: nothing; the engine and ``env.grader``
    resolve what they were asked for. A group is graded while the engine still samples others. A failure of either is
    that of the group's future; a grader that fails at a response is no failure (``Score.error``).

    Args:
        env: tokenises, and has the grader.
        engine: samples the responses.
        attend: called now and then by whoever has the learner and waits for groups.

    Example: ``for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=64)): group.rows``.
    """

    def __init__(self, env: TaskEnv, engine: Engine, attend: Callable[[], object] | None = None):
        self.env, self.engine, self.attend = env, engine, attend

    def request(self, prompt: Prompt) -> GroupRequest:
        """What the engine is asked, with the example where a dialog needs that between its turns."""
        known = prompt.example if self.env.multi_turn else None
        return GroupRequest(
            prompt.group_id, self.env.prompt_ids(prompt.example), prompt.num_samples, prompt.seed, known
        )

    def begin(self, prompt: Prompt, sampling: Sampling, post: Post, clock: StageClock | None = None) -> Future[Graded]:
        """Ask for one group; cancelled, the future takes along what the engine was asked for.

        Args:
            prompt: of the group.
            sampling: how a response is drawn; the task may bound its length further.
            post: has what follows a future done, on the caller's thread (:meth:`.Inbox.post`).
            clock: is told of the stages.

        Raises:
            ValueError: the prompt leaves no room for a response.
        """
        sampled = self.engine.submit(self.request(prompt), self._limited(prompt, sampling))
        graded: Future[Graded] = Future()
        graded.add_done_callback(lambda graded: sampled.cancel() if graded.cancelled() else None)
        move = (clock or StageClock()).move
        move(None, SAMPLE)
        sampled.add_done_callback(lambda _: post(partial(self._sampled, prompt, sampled, graded, post, move)))
        return graded

    def _limited(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """With the token limit of the prompt's task, where that is lower."""
        limit = getattr(self.env.task, "max_tokens", lambda _: sampling.max_tokens)(prompt.example)
        return replace(sampling, max_tokens=min(limit, sampling.max_tokens))

    def _sampled(
        self, prompt: Prompt, sampled: Future[GroupOutput], graded: Future[Graded], post: Post, move: Move
    ) -> None:
        """The rows are made here and not at the beginning: a group in flight is a few numbers."""
        move(SAMPLE, GRADE)
        try:
            output = sampled.result()
            samples, prompt_ids = output.samples, output.prompt_ids or self.env.prompt_ids(prompt.example)
            drawn = drawn_entries(prompt.group_id, prompt.example, prompt_ids)
            rows = group_table(drawn, samples, self.env.tokenizer)
            if not bool(rows.flat(keys.LOG_PROBS).isfinite().all()):
                # the loss leaves out tokens whose log-prob is not known, which an engine of ours has to know
                raise UnusableValues(
                    f"the engine gave a log-prob that is not finite for a token of group {prompt.group_id}; check its "
                    "weights and its sampling options."
                )
            texts = zip(rows.get(keys.RESPONSE_TEXT), samples)
            said = [SampledText(text, last_turn(one).int().numpy().tobytes(), one.record) for text, one in texts]
            scores = self.env.grader.scores([(text, prompt.example) for text in said])
            group = partial(Graded, prompt, samples, rows)
            scores.add_done_callback(lambda _: post(partial(self._graded, group, scores, graded, move)))
        except BaseException as error:  # it belongs to whoever reads the future
            move(GRADE, None)
            if graded.set_running_or_notify_cancel():
                graded.set_exception(error)

    def _graded(
        self, group: Callable[[list[Score]], Graded], scores: Future[list[Score]], graded: Future[Graded], move: Move
    ) -> None:
        move(GRADE, None)
        if graded.set_running_or_notify_cancel():
            resolve(graded, lambda: self._written(group([*map(rewarded, scores.result())])))

    def _written(self, group: Graded) -> Graded:
        write_scores(group.rows, group.scores, self.env.task.term_weights)
        return group

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Each group as soon as it is graded, driving the engine; nothing is asked for before the first is.

        What is left when the iterator is dropped is cancelled.
        """
        inbox = Inbox(self.engine, self.attend)
        return completed(inbox, [partial(self.begin, prompt, sampling, inbox.post) for prompt in prompts])


class RolloutSource:
    """Batches of complete groups, none older than ``max_policy_age``.

    Contract. Consumes: prompts of ``env.stream``, and groups as engine, grader and ``reference`` finish them.
    Each is sampled, graded, taken to the reference and finished as its futures resolve, by the thread that drives the
    engine: the dispatcher, or whoever waits. A callback of a future only puts something into that thread's inbox.
    Produces: ``num_groups`` groups per :meth:`next_batch`, in the order drawn. Waits for: the ``num_groups`` groups
    with the oldest admission version, unfinished ones included. Unblocked by: the last of them; ``should_stop`` (it
    raises :class:`Interrupted` and nothing has changed); a failed future (its exception is raised); nothing resolved
    for ``wait_deadline_s`` (``TimeoutError``). When a partner dies: whoever resolves the future asks again or fails it;
    a failure ends the run, and the state can still be saved.

    **The age of a token** is bounded by the four rules of :func:`sota_grpo.functional.max_groups_admitted`: a group
    holds one of ``(max_policy_age + 1) * num_groups`` slots from its admission until :meth:`release` of its batch,
    which is called after the publish; the batch has the oldest by admission version; a discarded group gives up its
    slot at once. The bound is asserted on every row.

    **Synchronous**: nothing happens beside the learner: groups are asked for when a batch is, all together; those that
    replace zero-advantage ones (rewards all equal) once all others are graded, together again. Whoever waits drives the
    engine. With ``max_policy_age=0`` all slots are taken at every step, so the batches are the same with workers,
    dynamic sampling included (see :class:`~sota_grpo.source.admission.Refill`).

    **After a resume** the bound holds by the same proof. Finished groups come back with their rows, groups in flight
    are asked for again under the same ids, before any new prompt, and both keep the admission version that they had.
    So the groups, their slots and their order are those of a run without interruption, in which the engines happened
    to begin the unfinished groups anew: their tokens are then sampled by later versions than the one they are ordered
    by, which makes them younger than the proof needs. A batch that was given out and not released counts as trained.

    Args:
        rollouts: of the task's environment and the engine.
        sampling: how a response is drawn.
        num_groups: groups per batch.
        max_policy_age: oldest policy, in published versions, whose tokens may be in a batch.
        synchronous: see above; the age is then 0.
        sleep_engine: if synchronous, free the engine's device once a batch is sampled; the next publish wakes it.
        group_transforms: change each group that is graded and kept in place, before ``reference``.
        reference: asks for what the KL term needs, group by group as they are graded; None where there is none.
        transforms: ``(phase, transform)``, applied in order to the whole batch.
        seed: sample ``i`` of group ``g`` is drawn from the stream derived from ``(seed, g, i)``.
        refill: replace groups whose rewards are all equal by fresh ones (dynamic sampling, DAPO, arXiv:2503.14476).
        max_draws: most rounds of draws per step under ``refill``; then zero-advantage groups complete the batch.
        should_stop: asked while waiting.
        wait_deadline_s: longest wait in which nothing resolves.
        metrics_extra: further metrics, asked for with every batch.
        threaded: if not synchronous, False leaves the dispatcher's work to :meth:`handle_events` and whoever waits.

    Raises:
        ValueError: an age below 0, or no group per batch.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        sampling: Sampling,
        *,
        num_groups: int,
        max_policy_age: int = 0,
        synchronous: bool = False,
        sleep_engine: bool = False,
        group_transforms: Sequence[Transform] = (),
        reference: Callable[[RowTable], Future[RowTable]] | None = None,
        transforms: Sequence[tuple[str, Transform]] = (),
        seed: int = 0,
        refill: bool = False,
        max_draws: int = 10,
        should_stop: Callable[[], bool] = lambda: False,
        wait_deadline_s: float = math.inf,
        metrics_extra: Callable[[], Mapping[str, float]] = dict,
        threaded: bool = True,
    ):
        self.env, self.engine, self.transforms = rollouts.env, rollouts.engine, tuple(transforms)
        self.group_transforms = tuple(group_transforms)
        self.num_groups, self.max_policy_age = num_groups, 0 if synchronous else max_policy_age
        self.synchronous, self.sleep_engine, self.refill = synchronous, sleep_engine, refill
        self.should_stop, self.wait_deadline_s, self.metrics_extra = should_stop, wait_deadline_s, metrics_extra
        self.threaded = threaded and not synchronous
        self._rollouts, self._sampling, self._seed, self._reference = rollouts, sampling, seed, reference
        self._slots = Slots(
            self.env.stream,
            num_groups=num_groups,
            max_policy_age=self.max_policy_age,
            version=lambda: self.engine.version,
            max_draws=max_draws,
        )
        self._begun = self._waiting = False
        self._unasked: list[Group] = []
        self._metrics: dict[str, float] = {}
        self._changed = threading.Condition()  # its lock guards the slots
        self._inbox, self._clock = Inbox(rollouts.engine), StageClock()
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)
        self._closed = False
        self._failure: BaseException | None = None
        self._progress_at = time.monotonic()  # when something last resolved

    def next_batch(self, version: int) -> RowTable:
        """The next batch for the learner that stands at ``version``; the first call admits the first groups.

        Raises:
            Interrupted: ``should_stop`` while waiting.
            TimeoutError: nothing resolved for ``wait_deadline_s``.
            UnusableValues: a transform found rewards that cannot be used; the batch will be asked for again.
            RuntimeError: a token is older than ``max_policy_age`` versions, or the batch before was not released.
        """
        self._slots.require_released()
        began = time.perf_counter()
        self._begin()
        self._wait()
        waited = time.perf_counter() - began
        if self.sleep_engine:
            self.engine.sleep()
        with self._changed:
            rows = self._slots.take()
            refilled, self._slots.refill.num_replaced = self._slots.refill.num_replaced, 0
            busy = self._clock.lap()
            left = {"groups/in_flight": len(self._slots.in_flight), "groups/ready": len(self._slots.buffer)}
        require_age(rows, version, self.max_policy_age)
        seconds = {"generate": busy[SAMPLE], "score": max(0.0, waited - busy[SAMPLE])}
        if not self.synchronous:  # the phases overlap with learning, and with each other
            seconds |= {"score": busy[GRADE], "wait": waited}
        seconds |= {"ref": busy[REFERENCE]} if busy[REFERENCE] else {}
        try:
            for phase, transform in self.transforms:
                began = time.perf_counter()
                rows = transform(rows)
                seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
        except UnusableValues:  # what is saved now asks for these groups again
            with self._changed:
                groups = self._slots.take_back()
            self._submit(groups)
            raise
        zero_advantage = num_zero_advantage_groups(rows)
        self._metrics = {f"time/{phase}_s": value for phase, value in seconds.items()} | left
        self._metrics |= {"groups/zero_advantage": zero_advantage, "groups/refilled": refilled, **self.metrics_extra()}
        return rows

    def release(self, batch: RowTable) -> None:
        """Free the slots of ``batch``, after the engines hold the weights that were trained on it."""
        with self._changed:
            fresh = self._slots.release()
        self._submit(fresh)

    def metrics(self) -> dict[str, float]:
        """Seconds per phase and group counts of the last batch."""
        return dict(self._metrics)

    def is_ready(self) -> bool:
        """Whether :meth:`next_batch` would return at once; asking admits the first groups, as it does."""
        self._begin()
        with self._changed:
            return self._is_ready()

    def handle_events(self) -> int:
        """Do what has come (``threaded=False``), without a step of the engine; the number of events handled."""
        return self._inbox.drain()

    def close(self) -> None:
        """End the dispatcher; what is in flight is forgotten. Idempotent."""
        self._closed = True
        self._post(lambda: None)
        if self._dispatcher.is_alive() and self._dispatcher is not threading.current_thread():
            self._dispatcher.join(timeout=10.0)

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts, groups in flight by id, finished groups with their rows; at any moment."""
        with self._changed:
            return self._slots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; nothing is asked for before the next :meth:`next_batch`.

        Raises:
            RuntimeError: groups are in flight already.
            UserError: the state is of another batch size, or of a larger ``max_policy_age``.
        """
        if self.synchronous and state.get("max_policy_age", 0):
            raise UserError(
                "The saved run had workers beside its learner, whose groups this one, which takes turns, would lose; "
                "resume it in the same mode, on as many devices as it had."
            )
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
            self._dispatcher.start()
        self._submit([*pending, *fresh])

    def _submit(self, groups: Sequence[Group]) -> None:
        if self.synchronous:
            self._unasked += groups
            return
        for group in groups:
            self._sample(group)

    def _ask_together(self) -> None:
        """Ask for what was left to do, once nothing else is sampled or graded."""
        counts = self._clock.counts
        if self._unasked and not counts[SAMPLE] + counts[GRADE]:
            groups, self._unasked = self._unasked, []
            for group in groups:
                self._sample(group)

    def _wait(self) -> None:
        """Return when the batch is ready."""
        began = time.monotonic()
        while True:
            if self._rollouts.attend is not None:
                self._rollouts.attend()
            with self._changed:
                self._waiting = True
                try:
                    if self._is_ready():
                        return
                    if self.should_stop():
                        raise Interrupted("a stop was asked for while the next batch was waited for.")
                    self._require_progress(began)
                    if self.threaded:
                        self._changed.wait(_POLL_S)
                    else:
                        self._ask_together()
                        self._inbox.run_once(_POLL_S)
                finally:
                    self._waiting = False

    def _is_ready(self) -> bool:
        """Whether the batch is ready; zero-advantage groups that it waits for go on to their last stages."""
        if self._failure is not None:
            raise self._failure
        if self._slots.batch_is_ready():
            return True
        kept = self._slots.settle()
        if kept:
            logger.warning(
                "The step's %d draws are spent: %d groups whose rewards are all equal stay and carry no gradient.",
                *(self._slots.refill.num_draws, len(kept)),
            )
        for group, rows in kept:
            self._post(partial(self._to_reference, group, rows))
        return False

    def _require_progress(self, began: float) -> None:
        silent = time.monotonic() - max(began, self._progress_at)
        if silent <= self.wait_deadline_s:
            return
        counts = self._clock.counts
        raise WorkerLate(
            f"Nothing resolved for {silent:.1f} s while a batch of {self.num_groups} groups was waited for: "
            f"{counts[SAMPLE]} groups are being sampled, {counts[GRADE]} graded, {counts[REFERENCE]} are at the "
            f"reference, {len(self._slots.buffer)} are finished; training.log says what the workers said."
        )

    def _sample(self, group: Group) -> None:
        seed = sample_seed(self._seed, group.group_id)
        prompt = Prompt(group.group_id, group.example, self.env.group_size(group.example), seed)
        begin = partial(self._rollouts.begin, prompt, self._sampling, self._post, self._clock)
        self._ask(begin, partial(self._graded, group))

    def _graded(self, group: Group, graded: Graded) -> None:
        if not self.refill or not zero_advantage_rows(graded.rows).all():
            self._to_reference(group, graded.rows)
            return
        with self._changed:
            fresh = self._slots.discard(group, graded.rows)
            self._notify_if_due()
        self._submit(fresh)

    def _to_reference(self, group: Group, rows: RowTable) -> None:
        for transform in self.group_transforms:
            transform(rows)  # in place
        if self._reference is None:
            self._finish(group, rows)
            return
        self._clock.move(None, REFERENCE)
        self._ask(partial(self._reference, rows), partial(self._referenced, group))

    def _referenced(self, group: Group, rows: RowTable) -> None:
        self._clock.move(REFERENCE, None)
        self._finish(group, rows)

    def _finish(self, group: Group, rows: RowTable) -> None:
        with self._changed:
            self._slots.finish(group, rows)
            self._notify_if_due()

    def _notify_if_due(self) -> None:
        if self._waiting and self._is_ready():
            self._changed.notify_all()

    def _dispatch(self) -> None:
        while not self._closed:
            try:
                self._inbox.run_once()
            except BaseException as failure:  # of the engine's step
                self._fail(failure)
                return

    def _post(self, action: Callable[[], object]) -> None:
        self._inbox.post(partial(self._handle, action))

    def _handle(self, action: Callable[[], object]) -> None:
        self._progress_at = time.monotonic()
        try:
            action()
        except BaseException as failure:  # handed to the main thread, which cannot see this one
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        """The other groups go on."""
        self._failure = self._failure or failure
        with self._changed:
            self._changed.notify_all()

    def _ask(self, ask: Callable[[], Future[Any]], then: Callable[[Any], object]) -> None:
        try:
            future = ask()
        except Exception as failure:  # the same to the caller as a future that fails
            self._fail(failure)
            return
        future.add_done_callback(lambda done: self._post(lambda: then(done.result())))
