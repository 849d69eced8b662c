"""The collector of ``grpo.py`` and ``grpo-async.py``: a TorchRL ``BaseCollector``, synchronous or concurrent."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import EventLoop, SteppingEngine, Task, result
from sota_grpo.envs import PromptSource, TaskEnv
from sota_grpo.envs.prompts import GRADE, REFERENCE, SAMPLE, Prompt, Rollouts, StageClock
from sota_grpo.errors import UserError
from sota_grpo.functional import max_groups_admitted
from sota_grpo.rl.records import Sampling, sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import RowTransform, UserTransforms, zero_advantage_rows
from sota_grpo.source.replay_buffer import Group, GroupReplayBuffer, Slots, Timed, require_age
from sota_grpo.source.weight_sync import EngineWeightSync, named_weights
from sota_grpo.stopping import Interrupted
from sota_grpo.workers.base import WorkerLate

try:
    from torchrl.collectors import BaseCollector
except ImportError:  # TorchRL imports vLLM if it is installed; a broken vLLM must not stop a run that does not use it
    sys.modules["vllm"] = None  # type: ignore[assignment]
    from torchrl.collectors import BaseCollector

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # seconds between two polls of should_stop


def _of_tables(transform: Callable[[Any], object]) -> Callable[[RowTable], object]:
    """Return a function that applies ``transform`` to a RowTable in place; another's transform gets TensorDicts."""
    if isinstance(transform, Transform) and not isinstance(transform, (RowTransform, Timed)):
        return UserTransforms([(f"The transform {type(transform).__name__}", transform)])
    return transform


def _refusal(sentence: str) -> Callable[..., Any]:
    """Return a method that raises NotImplementedError, for methods of TorchRL's collectors without a meaning here."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(sentence)

    refused.__doc__ = f"Raise ``NotImplementedError``: {sentence}"
    return refused


class PromptGroupCollector(BaseCollector):
    """A collector that samples and grades whole prompt groups: several responses to each prompt.

    Synchronous use, by iteration, as with TorchRL's collectors::

        collector = PromptGroupCollector(
            env, engine, sampling=Sampling(max_tokens=64), dialog_turns_per_batch=32, postproc=GroupAdvantage()
        )
        for batch in collector:                 # LazyStackedTensorDict, batch_size [32], one row per response
            ...                                 # loss, backward, optimizer
            collector.update_policy_weights_(model)

    Concurrent use, into a replay buffer::

        buffer = GroupReplayBuffer(max_groups=16, num_groups=8, transform=GroupAdvantage())
        collector = PromptGroupCollector(..., max_policy_age=1, replay_buffer=buffer)
        collector.start()
        for batch in buffer:                    # waits until the groups of the batch are finished
            ...
            collector.update_policy_weights_(model)

    **One coroutine per group** samples it, grades it, adds the reference's log-probs, and puts it into the buffer.
    Coroutines run in the thread that drives the engine: the dispatcher thread, or the caller that waits for a batch.
    The wait raises if ``should_stop()`` is true (:class:`Interrupted`), if a group failed, or if no group made progress
    for ``wait_deadline_s`` (``TimeoutError``). The state can be saved after any of these.

    **The age of a token** is the number of weight updates since it was sampled. In a batch it is at most
    ``max_policy_age`` (proof: :func:`sota_grpo.functional.max_groups_admitted`), except with another buffer than a
    GroupReplayBuffer. At most ``(max_policy_age + 1) * num_groups`` groups are in flight, in the buffer or in training
    (*slots*), and a batch waits for the ``num_groups`` groups whose prompts were drawn under the oldest policy
    versions. :meth:`update_policy_weights_` frees the slots of a batch once the engines serve the new weights; without
    a weight update, the request for the next batch frees them.

    **Synchronous collection** equals concurrent collection with ``max_policy_age=0`` bit for bit, also with dynamic
    sampling (:class:`~sota_grpo.source.replay_buffer.Refill`). No group runs during training: all groups of a batch are
    submitted when the caller requests the batch, and replacements of zero-advantage groups once all others are graded.

    **After a resume** finished groups keep their rows, and groups in flight are sampled again under the same ids,
    before any new prompt. Both keep the policy version under which their prompt was drawn, so the age bound holds. A
    batch that was returned counts as trained.

    Args:
        env: draws prompts, tokenises and grades: a :class:`~sota_grpo.envs.TaskEnv` or its ``PromptSource``.
        policy: the engine that samples the responses.
        dialog_turns_per_batch: responses per batch, a positive multiple of ``env.repeats``.
        total_dialog_turns: collection ends after so many responses; -1: never.
        max_policy_age: largest age of a token in a batch, in weight updates; above 0 needs a GroupReplayBuffer.
        replay_buffer: the buffer to fill. With a :class:`~sota_grpo.source.replay_buffer.GroupReplayBuffer` the age
            bound holds in its batches; if its ``sampler`` breaks the bound, that is an error. Any other TorchRL buffer
            is extended batch by batch (iterating yields None), and its sampler decides how old rows become.
        postproc: transform of each batch; with a GroupReplayBuffer, use the buffer's ``transform`` instead.
        weight_sync: sends the learner's weights; without it, pass weights to :meth:`update_policy_weights_`.
        graded_transforms: transforms of each graded group, before zero-advantage groups are discarded and before the
            advantages, such as one that changes ``("next", "reward")`` (in a run: ``env.transforms``). A TorchRL
            ``Transform`` gets the group's rows as TensorDicts, and those that it returns are kept; any other callable,
            and our own transforms, change a ``RowTable`` in place.
        group_transforms: the same for each group that is not discarded, before ``reference``.
        reference: maps a group's rows to a future of the rows with the reference's log-probs; None: no KL term.
        seed: sample ``i`` of group ``g`` is drawn with a seed derived from ``(seed, g, i)``.
        refill: replace zero-advantage groups by new prompts (dynamic sampling, DAPO, arXiv:2503.14476).
        decouple_terms: as of :class:`~sota_grpo.rl.transforms.GroupAdvantage`: a group in which a reward term varies is
            no zero-advantage group.
        max_draws: most rounds of draws per step under ``refill``; then zero-advantage groups complete the batch.
        sleep_engine: synchronous only: put the engine to sleep after sampling a batch; the next weight update wakes it.
        should_stop: polled during the wait for a batch; True ends the wait.
        wait_deadline_s: longest time, in seconds, without progress of any group during the wait for a batch.
        poll: health check of the workers, called during the wait for a batch.
        metrics_extra: returns further metrics for every batch.
        as_table: batches are :class:`~sota_grpo.rl.table.RowTable`; a GroupReplayBuffer has its own ``as_table``.

    Raises:
        ValueError: the batch size, ``max_policy_age`` or the size of the GroupReplayBuffer does not fit, ``env`` has
            transforms, or it is an environment of several turns and ``policy`` an engine of single ones.
        TypeError: ``policy`` is a module, such as a wrapper of TorchRL, and no engine; ``env`` is no PromptSource.
        RuntimeError: ``postproc`` is passed together with a GroupReplayBuffer.
    """

    trajs_per_batch = None
    init_random_frames = 0  # read by TorchRL's trainers

    def __init__(
        self,
        env: PromptSource,
        policy: Engine,
        *,
        sampling: Sampling,
        dialog_turns_per_batch: int,
        total_dialog_turns: int = -1,
        max_policy_age: int = 0,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[Any], Any] | None = None,
        weight_sync: EngineWeightSync | None = None,
        graded_transforms: Sequence[Callable[[Any], object]] = (),
        group_transforms: Sequence[Callable[[Any], object]] = (),
        reference: Callable[[RowTable], Future[RowTable]] | None = None,
        seed: int = 0,
        refill: bool = False,
        decouple_terms: bool = False,
        max_draws: int = 10,
        sleep_engine: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        wait_deadline_s: float = math.inf,
        poll: Callable[[], object] | None = None,
        metrics_extra: Callable[[], Mapping[str, float]] = dict,
        as_table: bool = False,
    ):
        super().__init__()
        if isinstance(policy, nn.Module):
            raise TypeError(
                f"The policy is a {type(policy).__name__}, but a {type(self).__name__} samples with an engine, such as "
                "TransformersEngine(model, ..); TorchRL's wrappers are policies of its LLMCollector."
            )
        if isinstance(env, TransformedEnv):
            raise ValueError(
                f"The environment is a TransformedEnv, but a {type(self).__name__} does not step it, so its transforms "
                "would have no effect; pass env.base_env, and the transforms as graded_transforms=."
            )
        if not isinstance(env, PromptSource):
            raise TypeError(f"The environment is a {type(env).__name__}, which draws no prompt groups; pass a TaskEnv.")
        if dialog_turns_per_batch % env.repeats:
            raise ValueError(
                f"dialog_turns_per_batch={dialog_turns_per_batch} is not divisible by the group size {env.repeats}; "
                f"use {max(1, dialog_turns_per_batch // env.repeats) * env.repeats}."
            )
        if isinstance(env, TaskEnv) and env.multi_turn and isinstance(policy, SteppingEngine):
            raise ValueError(
                f"The environment has several turns (max_steps), but {type(policy).__name__} samples single ones; wrap "
                "it in sota_grpo.envs.dialogs.DialogEngine, or use TorchRL's LLMCollector with DialogRows."
            )
        self.env, self.policy, self.sampling, self.weight_sync = env, policy, sampling, weight_sync
        self.total_frames, self.requested_frames_per_batch = total_dialog_turns, dialog_turns_per_batch
        self.num_groups, self.max_policy_age = dialog_turns_per_batch // env.repeats, max_policy_age
        self.replay_buffer, self.rollouts = replay_buffer, Rollouts(env, policy, poll)
        self.graded_transforms = [*map(_of_tables, graded_transforms)]
        self.group_transforms = [*map(_of_tables, group_transforms)]
        self.refill, self.sleep_engine = refill, sleep_engine
        self._term_weights = env.task.term_weights if decouple_terms else None
        self.should_stop, self.wait_deadline_s, self.metrics_extra = should_stop, wait_deadline_s, metrics_extra
        self._seed, self._reference = seed, reference
        slots = max_groups_admitted(max_policy_age, self.num_groups)
        if max_policy_age and not isinstance(replay_buffer, GroupReplayBuffer):
            raise ValueError(
                f"max_policy_age={max_policy_age} needs a replay buffer that is filled concurrently: pass "
                f"replay_buffer=GroupReplayBuffer({slots}, {self.num_groups}), and call start()."
            )
        if isinstance(replay_buffer, GroupReplayBuffer):
            self._buffer = replay_buffer
            if (replay_buffer.storage.max_size, replay_buffer.batch_size) != (slots, self.num_groups):
                raise ValueError(
                    f"The replay buffer has max_groups={replay_buffer.storage.max_size} and "
                    f"num_groups={replay_buffer.batch_size}; for {self.num_groups} groups per batch and "
                    f"max_policy_age={max_policy_age} use GroupReplayBuffer({slots}, {self.num_groups})."
                )
        else:
            self._buffer = GroupReplayBuffer(slots, self.num_groups, as_table=as_table)
        self._buffer.around_sample, self._buffer.is_over = self._next_batch, self._is_over
        self._postproc: Callable[[Any], Any] | None = None
        if postproc is not None:
            self.set_postproc(postproc)
        sizes = {"num_groups": self.num_groups, "max_policy_age": max_policy_age, "max_draws": max_draws}
        self._slots = Slots(env.stream, self._buffer, **sizes, version=lambda: self.policy.version)
        self._frames, self._iter = 0, -1
        self._concurrent = self._begun = self._closed = False
        self._saved_version: int | None = None  # policy version of the loaded state
        self._to_request: list[Group] = []
        self._metrics: dict[str, float] = {}
        self._changed = threading.Condition()  # its lock guards self._slots
        self._loop, self._clock = EventLoop(policy), StageClock()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------ methods that a TorchRL loop calls

    def __iter__(self) -> Iterator[Any]:
        """Yield batches like :meth:`iterator`; after an exception the state of the collector can still be saved."""
        self._iteration_started = True
        return self.iterator()

    def iterator(self) -> Iterator[Any]:
        """Yield batches, or None with a replay buffer, until ``total_dialog_turns`` are collected or :meth:`close`."""
        while not self._is_over():
            if self.replay_buffer is self._buffer:
                self.release()
                self._wait_for_batch()
                yield None
                continue
            batch = self._buffer.sample()
            if self.replay_buffer is not None:
                self.replay_buffer.extend(batch)
            yield batch if self.replay_buffer is None else None

    def _is_over(self) -> bool:
        return self._closed or 0 <= self.total_frames <= self._frames

    def next_batch(self) -> Any:
        """Wait for the next batch and return it; the first call starts the first groups.

        Raises:
            Interrupted, TimeoutError: a stop was requested, or no group made progress; see the class.
            RuntimeError: the collector is closed, or a token is too old. RunFailed: the ``sampler`` is at fault.
            ValueError, RuntimeError: at the first call, see :meth:`is_ready`.
            Exception: of a group, the engine, ``poll`` or a transform (of a batch: the engine samples it again).
        """
        return self._buffer.sample()

    rollout = next_batch
    reset = _refusal("Prompts are drawn without end; create a new collector to start again.")
    pause = _refusal("Groups in flight cannot be paused; shutdown() ends them, and state_dict() saves their ids.")
    init_updater = set_weight_updater = receive_weights = register_scheme_receiver = _refusal(
        "update_policy_weights_() sends the weights; pass weight_sync= for another scheme."
    )
    get_policy_model = get_model = _refusal(
        "The policy is an engine, not a module; change its weights with update_policy_weights_()."
    )
    enable_profile = _refusal("metrics() has the seconds of each phase; to profile, use the learner or the engine.")
    as_remote = _refusal("The collector runs in the driver; grpo-async.py runs engines, reference and learner on Ray.")

    def start(self, *, dispatch: bool = True) -> None:
        """Start to collect into ``replay_buffer`` in a background thread.

        An error in the thread is raised by the next :meth:`update_policy_weights_` or :meth:`shutdown`, and with a
        GroupReplayBuffer by the next request for a batch. ``dispatch=False`` starts no thread (for tests, only with a
        GroupReplayBuffer): :meth:`handle_events` and :meth:`next_batch` do the work. RuntimeError: there is no replay
        buffer, the collector was started before, collection into a GroupReplayBuffer has begun, or the engine's weights
        are older than the loaded state.
        """
        if self._concurrent or self._thread is not None:
            raise RuntimeError(f"{type(self).__name__}.start() was called before; call it once.")
        if self.replay_buffer is None:
            raise RuntimeError(f"{type(self).__name__}.start() fills a replay buffer; pass replay_buffer=.")
        if self.replay_buffer is not self._buffer:
            if not dispatch:
                raise ValueError("dispatch=False needs a GroupReplayBuffer; fill another buffer by iterating.")
            self._thread = threading.Thread(target=self._fill_plain_buffer, name="collector", daemon=True)
            self._thread.start()
            return
        if self._begun:
            raise RuntimeError(
                "Collection into the GroupReplayBuffer has begun; call start() before is_ready() or a batch."
            )
        self._concurrent = True
        if dispatch:
            self._thread = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)
            self._begin()

    def update_policy_weights_(  # type: ignore[override]
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        version: int | None = None,
    ) -> None:
        """Send weights, wait until the engine samples its next token with them, and free the slots of the last batch.

        Args:
            policy_or_weights: a module, its named tensors, or a TensorDict of them; None: those of ``weight_sync``.
            weights, policy: TorchRL's other names of the first argument.
            worker_ids, model_id: must be None (``model_id`` also ``"policy"``): all engines get the same weights.
            version: version number of the new weights; None: the current one plus 1.

        Raises:
            RuntimeError: no batch was returned since :meth:`start` with a GroupReplayBuffer, or the last update.
            ValueError: there are no weights, or the engine refuses them.
            RunFailed, RuntimeError: the weights were not loaded; see :meth:`EngineWeightSync.send`.
            BaseException: what a group or the background thread raised.
        """
        if self._failure is not None:
            raise self._failure
        if self._concurrent and self._begun and not self._slots.num_taken:
            raise RuntimeError(
                "No batch was returned since start() or the last weight update, but "
                f"max_policy_age={self.max_policy_age} counts updates: update once per batch, and send the first "
                "weights before start()."
            )
        if worker_ids is not None or model_id not in (None, "policy"):
            raise ValueError(
                f"worker_ids is {worker_ids!r} and model_id is {model_id!r}, but all engines serve one policy; leave "
                "both out."
            )
        source = next((value for value in (policy_or_weights, weights, policy) if value is not None), None)
        version = self.policy.version + 1 if version is None else version
        if self.weight_sync is not None:
            self.weight_sync.send(source, version=version)
        elif source is None:
            raise ValueError("No weights to send: pass the model, or create the collector with weight_sync=.")
        else:
            self.policy.update_weights(named_weights(source), version)
        if self._thread is None or self._concurrent:  # else _fill_plain_buffer continues by itself
            self.release()

    def release(self) -> None:
        """Free the slots of the last batch and draw prompts for them at the current version; no-op if they are free."""
        with self._changed:
            fresh = self._slots.release() if self._slots.num_taken else []
        self._submit(fresh)

    def set_postproc(self, postproc: Callable[[Any], Any]) -> None:
        """Apply ``postproc`` to each batch; RuntimeError if one is set already, or with a GroupReplayBuffer."""
        if self._postproc is not None or self.replay_buffer is self._buffer:
            raise RuntimeError(
                "The collector has a postproc already, or its replay_buffer is a GroupReplayBuffer: compose the "
                "transforms before, or use the buffer's append_transform()."
            )
        self._postproc = postproc
        self._buffer.append_transform(postproc)

    def increment_version(self) -> None:
        """Call :meth:`release`; for TorchRL's weight senders, which call this after they have sent weights."""
        self.release()

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """The version of the weights that the engines serve."""
        return self.policy.version

    def get_policy_version(self) -> int:
        """Return :attr:`policy_version`, for callers that cannot read properties."""
        return self.policy_version

    dialog_turns_per_batch = property(lambda self: self.requested_frames_per_batch)
    total_dialog_turns = property(lambda self: self.total_frames)

    def is_running(self) -> bool:
        """Return whether the background thread is running."""
        return self._thread is not None and self._thread.is_alive()

    started = property(is_running)

    def is_initialized(self) -> bool:
        """Return True: the constructor completes the initialization."""
        return True

    def metrics(self) -> dict[str, float]:
        """Return the last batch's seconds per phase, group counts and ``metrics_extra``; {} before the first batch."""
        return dict(self._metrics)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Set the sampling seed; return ``seed + 1``, or ``seed`` if static. RuntimeError if collection has begun."""
        if self._begun:
            raise RuntimeError("set_seed() was called after collection had begun; call it before start() or a batch.")
        self._seed = seed
        return seed if static_seed else seed + 1

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop collecting, drop the groups in flight, and close the engine and a TorchRL env; idempotent.

        Wait up to ``timeout`` seconds for the background thread (None: no limit). The env stays open if ``close_env``
        is False. At the end, raise what a group or that thread raised, if ``raise_on_error``.
        """
        self.close(timeout)
        self.policy.close()
        if close_env and isinstance(self.env, EnvBase) and not self.env.is_closed:
            self.env.close(raise_if_closed=False)
        failure, self._failure = self._failure, None
        if failure is not None and raise_on_error:
            raise failure

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop collecting for good, waiting up to ``timeout`` seconds for the thread; engine and env stay open."""
        self._closed = True
        self._loop.post(lambda: None)
        with self._changed:
            self._changed.notify_all()
        if self.is_running() and self._thread is not threading.current_thread():
            self._thread.join(timeout)  # type: ignore[union-attr]

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the prompt stream's position, ids of groups in flight, finished groups, counts and policy version."""
        with self._changed:
            counts = {"frames": self._frames, "iter": self._iter, "policy_version": self.policy.version}
            return OrderedDict(self._slots.state_dict(), **counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved state before collection begins, else RuntimeError.

        Send the weights of the saved version to the engine before the first batch:
        ``update_policy_weights_(model, version=state_dict["policy_version"])``.

        UserError: the batch size differs, ``max_policy_age`` is larger, or the state needs a replay buffer. ValueError:
        the state is of another prompt stream.
        """
        if self._begun:
            raise RuntimeError(
                "load_state_dict() was called after collection had begun; call it before start() or a batch."
            )
        if state_dict["max_policy_age"] and self.replay_buffer is None:
            raise UserError(
                f"The saved run collected concurrently (max_policy_age={state_dict['max_policy_age']}), but this one "
                "is synchronous and would lose its groups; resume it in the same mode, on as many devices as it had."
            )
        self._slots.load_state_dict(state_dict)
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]
        self._saved_version = state_dict["policy_version"]

    # ------------------------------------------------------------------ a batch

    def _next_batch(self, draw: Callable[[], Any]) -> Any:
        """Wait for the groups of the next batch, sample them with the buffer's ``draw``, and record metrics."""
        began = time.perf_counter()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self.release()
        self._wait_for_batch()
        waited = time.perf_counter() - began
        if self.sleep_engine:
            self.policy.sleep()
        with self._changed:
            self._slots.take()
            refilled, self._slots.refill.num_replaced = self._slots.refill.num_replaced, 0
            busy = self._clock.lap()
            left = {"groups/in_flight": len(self._slots.in_flight), "groups/ready": len(self._buffer.sampler)}
        seconds = {"generate": busy[SAMPLE], "score": max(0.0, waited - busy[SAMPLE])}
        if self._concurrent:  # phases overlap with training and with each other
            seconds |= {"score": busy[GRADE], "wait": waited}
        seconds |= {"ref": busy[REFERENCE]} if busy[REFERENCE] else {}
        try:
            batch = draw()
        except Exception:  # a transform failed: sample these groups again, also in a resumed run
            with self._changed:
                groups = self._slots.take_back()
            self._submit(groups)
            raise
        for transform in self._buffer.transform.modules():
            if isinstance(transform, Timed):
                seconds[transform.phase] = seconds.get(transform.phase, 0.0) + transform.seconds
        rows = RowTable.of(batch[0] if isinstance(batch, tuple) else batch)
        if self._thread is None or self._concurrent:
            # only checked here; what bounds the age is which groups are admitted and in which order they are taken
            require_age(rows, self.policy.version, self.max_policy_age, self._buffer.sampler.sampler)
        self._frames, self._iter = self._frames + len(rows), self._iter + 1
        self._metrics = {f"time/{phase}_s": value for phase, value in seconds.items()} | left
        zero_advantage = rows.get(keys.GROUP_ID)[zero_advantage_rows(rows, self._term_weights)].unique()
        self._metrics |= {"groups/zero_advantage": len(zero_advantage), "groups/refilled": refilled}
        self._metrics |= self.metrics_extra()
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def is_ready(self) -> bool:
        """Start the first groups unless they were started; return whether a batch is ready.

        Raises:
            BaseException: what a group or the engine raised since the start.
            ValueError: ``max_policy_age`` is above 0, but :meth:`start` was not called.
            RuntimeError: the engine's weights are older than the loaded state.
        """
        self._begin()
        with self._changed:
            return self._batch_is_ready()

    def handle_events(self) -> int:
        """After ``start(dispatch=False)``: handle pending events, no engine step; return their number."""
        return self._loop.run_once(steps=False)

    def _begin(self) -> None:
        """On the first call, start the groups that a saved run had in flight, then new ones."""
        if self._begun:
            return
        if self.max_policy_age and not self._concurrent:
            raise ValueError(f"max_policy_age={self.max_policy_age} needs concurrent collection: call start() first.")
        if self._saved_version is not None and self.policy.version < self._saved_version:
            raise RuntimeError(
                f"The loaded state has policy version {self._saved_version}, but the engine has {self.policy.version}: "
                f"before collecting, call update_policy_weights_(model, version={self._saved_version})."
            )
        self._begun = True
        pending = list(self._slots.in_flight.values())
        fresh = self._slots.fill()
        if self._concurrent and self._thread is not None:
            self._thread.start()
        self._submit([*pending, *fresh])

    def _fill_plain_buffer(self) -> None:
        try:
            for _ in self.iterator():
                pass
        except BaseException as failure:  # raised by update_policy_weights_() or shutdown()
            if not self._closed:
                self._failure = failure

    def _submit(self, groups: Sequence[Group]) -> None:
        if not self._concurrent:
            self._to_request += groups
            return
        for group in groups:
            Task(self._collect(group), self._loop.post)

    def _wait_for_batch(self) -> None:
        """Wait until the batch is ready; without a dispatcher thread, run the groups' coroutines meanwhile."""
        self._begin()
        began, counts = time.monotonic(), self._clock.counts
        while True:
            if self.rollouts.poll is not None:
                self.rollouts.poll()
            if self._closed:
                raise RuntimeError("The collector was closed; create a new one.")
            with self._changed:
                if self._batch_is_ready():
                    return
                if self.should_stop():
                    raise Interrupted("a stop was requested during the wait for the next batch.")
                silent = time.monotonic() - max(began, self._loop.active_at)
                if silent > self.wait_deadline_s:
                    raise WorkerLate(
                        f"No group made progress for {silent:.1f} s during the wait for a batch of {self.num_groups} "
                        f"groups: {counts[SAMPLE]} groups are being sampled, {counts[GRADE]} being graded, "
                        f"{counts[REFERENCE]} are at the reference, {len(self._buffer.sampler)} are finished; "
                        "training.log has the messages of the workers."
                    )
                if self._concurrent and self._thread is not None:
                    self._changed.wait(_POLL_S)
                    continue
                if not counts[SAMPLE] + counts[GRADE]:
                    groups, self._to_request = self._to_request, []
                    for group in groups:
                        Task(self._collect(group), self._loop.post)
                self._loop.run_once(_POLL_S)

    def _batch_is_ready(self) -> bool:
        """Return whether the batch is ready; if draws are used up, complete it with zero-advantage groups."""
        if self._failure is not None:
            raise self._failure
        if self._slots.batch_is_ready():
            return True
        if self._slots.refill.num_held and (settled := self._slots.settle()):
            logger.warning(
                "All %d draws of the step are used: %d groups with equal rewards are kept to complete the batch.",
                *(self._slots.refill.num_draws, len(settled)),
            )
            for group, rows in settled:
                self._loop.post(partial(Task, self._collect(group, rows), self._loop.post))
        return False

    async def _collect(self, group: Group, rows: RowTable | None = None) -> None:
        """Sample, grade and finish one group; ``rows``: only finish it, because these are its graded rows.

        The next request for a batch raises its failure; other groups continue.
        """
        try:
            if rows is None:
                seed = sample_seed(self._seed, group.group_id)
                prompt = Prompt(group.group_id, group.example, self.env.repeats, seed)
                rows = (await self.rollouts.group(prompt, self.sampling, self._clock)).rows
                for transform in self.graded_transforms:
                    transform(rows)  # in place
                if self.refill and zero_advantage_rows(rows, self._term_weights).all():
                    with self._changed:
                        fresh = self._slots.discard(group, rows)
                        self._changed.notify_all()
                    self._submit(fresh)
                    return
            for transform in self.group_transforms:
                transform(rows)  # in place
            if self._reference is not None:
                with self._clock.stage(REFERENCE):
                    rows = await result(self._reference(rows))
            with self._changed:
                self._slots.finish(group, rows)  # the rows enter the replay buffer
                self._changed.notify_all()
        except GeneratorExit:  # the collector was deleted
            raise
        except BaseException as failure:
            self._fail(failure)

    def _dispatch(self) -> None:
        while not self._closed:
            try:
                self._loop.run_once()
            except BaseException as failure:  # raised by the engine's step
                self._fail(failure)
                return

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        with self._changed:
            self._changed.notify_all()
