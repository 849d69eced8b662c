"""Rollout workers: an engine as a worker that one thread owns, and many of them behind the protocol of one engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

import sota_grpo.workers.packing  # noqa: F401  (groups are pickled as three tensors from here on)
from sota_grpo.engines import EngineOptions, make_engine
from sota_grpo.engines.stepping import SteppingEngine, Streams, response_rooms
from sota_grpo.policy.end_tokens import response_text
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.lora import AdapterPack
from sota_grpo.policy.weight_pack import Checksum, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers.base import OpenCalls, WorkerDied, promised
from sota_grpo.workers.fleet import Fleet

_log = logging.getLogger(__name__)


class RolloutWorker:
    """Drives an engine step by step on a thread of its own, which also builds it: the engine loop.

    Contract. Consumes: requests and weights. Produces: futures of groups and of versions. Waits for: the next call,
    and only while nothing is in flight. Between two steps the loop does all calls that have come, in their order: so
    weights land in the middle of running groups, and after one step at most. Requests that came together begin
    together. What a call raises as ``ValueError`` is its caller's; any other exception of the engine breaks the
    worker: every open future and every later call fails with :class:`WorkerDied` and the cause, and the engine is
    closed. Callbacks of the futures run on the loop's thread and must be quick.

    Args:
        make_engine: builds the engine.
        tokenizer: decodes the responses (``Sample.text``); None leaves that to whoever asked for them.

    Raises:
        Exception: whatever ``make_engine()`` raised.

    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> worker = RolloutWorker(lambda: ScriptedEngine(lambda request, sample, version: [5, 6]))
    >>> output = worker.run(GroupRequest(3, (1, 2), num_samples=1, seed=0), Sampling(max_tokens=8)).result()
    >>> output.group_id, output.samples[0].token_ids.tolist()
    (3, [5, 6, 0])
    >>> worker.close()
    """

    def __init__(self, make_engine: Callable[[], SteppingEngine], tokenizer: Any = None):
        self._tokenizer = tokenizer
        self._inbox: queue.SimpleQueue[tuple[int, Callable[[SteppingEngine], Any]] | None] = queue.SimpleQueue()
        self._calls = OpenCalls("This rollout worker")
        self._base: WeightPack | None = None
        self._since: float | None = None  # when the step or call at hand began; None while there is nothing to do
        started: Future[None] = promised()
        self._thread = threading.Thread(target=self._live, args=(make_engine, started), name="engine-loop", daemon=True)
        self._thread.start()
        started.result()

    def run(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Sample one group; ``ValueError`` where its prompt leaves no room for a response."""
        return self._submit(lambda engine: engine.submit(request, sampling))

    def set_base(self, pack: WeightPack) -> Future[None]:
        """Keep the weights that adapters are merged into from now on (a view of memory that workers may share)."""

        def keep(engine: SteppingEngine) -> None:
            self._base = pack

        return self._submit(keep)

    def update_weights(self, pack: WeightPack | AdapterPack, version: int) -> Future[int]:
        """Push weights under the running groups; the version that the engine serves from the next token on.

        Args:
            pack: all weights, or an adapter on the weights of :meth:`set_base`.
            version: what they are called.
        """

        def push(engine: SteppingEngine) -> int:
            if isinstance(pack, AdapterPack):
                if self._base is None:
                    raise ValueError("An adapter came before the weights that it is an adapter of; call set_base.")
                engine.update_weights(pack.merged(self._base, engine.device), version)
            else:
                engine.update_weights(pack.tensors(), version)
            return engine.version

        return self._submit(push)

    def weight_dtype(self) -> Future[torch.dtype | None]:
        """In which pushed weights may come (:class:`~sota_grpo.engines.Engine`)."""
        return self._submit(lambda engine: engine.weight_dtype)

    def weight_sums(self) -> Future[Mapping[str, Checksum] | None]:
        """:meth:`~sota_grpo.engines.Engine.weight_sums`."""
        return self._submit(lambda engine: engine.weight_sums())

    def sleep(self) -> Future[None]:
        """:meth:`~sota_grpo.engines.Engine.sleep`, with nothing in flight."""
        return self._submit(lambda engine: engine.sleep())

    def wake(self) -> Future[None]:
        """:meth:`~sota_grpo.engines.Engine.wake`."""
        return self._submit(lambda engine: engine.wake())

    def ping(self) -> float:
        """Seconds for which the step or call at hand has been running; 0 when there is nothing to do.

        Raises:
            WorkerDied: the worker is broken or closed.
        """
        if self._calls.dead is not None:
            raise self._calls.dead
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout_s: float = 10.0) -> None:
        """End the loop and close the engine; what is open fails. An engine that hangs is left behind."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._calls.fail(f"is closed; its engine hung for {timeout_s:g} s.")

    def _submit(self, action: Callable[[SteppingEngine], Any]) -> Future[Any]:
        """A call that gets what ``action(engine)`` returns, or what a returned future gets."""
        return self._calls.open(lambda number: self._inbox.put((number, action)))

    def _live(self, make_engine: Callable[[], SteppingEngine], started: Future[None]) -> None:
        try:
            engine = make_engine()
        except BaseException as error:  # the constructor raises it in the thread of the caller
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop(engine)
            self._calls.fail("is closed.")
        except BaseException as error:  # nothing above would see it; the callers do, through their futures
            refusal = WorkerDied(f"The {engine.name} engine failed and cannot go on ({type(error).__name__}: {error}).")
            refusal.add_note("".join(traceback.format_exception(error)).rstrip())
            refusal.__cause__ = error.with_traceback(None)  # its frames would keep the engine's memory
            self._calls.fail(refusal)
        try:
            engine.close()
        except Exception:  # an engine that has failed may fail again, and its caller knows the first cause
            _log.exception("The %s engine could not be closed.", engine.name)

    def _loop(self, engine: SteppingEngine) -> None:
        busy = False
        while True:
            while not busy or not self._inbox.empty():
                self._since = time.monotonic() if busy else None
                if (call := self._inbox.get()) is None:
                    return
                busy, self._since = True, time.monotonic()
                self._do(engine, *call)
            self._since = time.monotonic()
            busy = engine.advance()

    def _do(self, engine: SteppingEngine, number: int, action: Callable[[SteppingEngine], Any]) -> None:
        try:
            result = action(engine)
        except ValueError as error:  # of any other the loop ends, and fails every call
            self._calls.resolve(number, False, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._pass_on, number))
        else:
            self._calls.resolve(number, True, result)

    def _pass_on(self, number: int, done: Future[GroupOutput]) -> None:
        error = done.exception()
        if error is None or isinstance(error, ValueError):
            self._calls.resolve(number, error is None, error or self._decoded(done.result()))

    def _decoded(self, group: GroupOutput) -> GroupOutput:
        if self._tokenizer is None:
            return group
        try:
            texts = [response_text(self._tokenizer, sample.token_ids) for sample in group.samples]
        except Exception:  # the driver decodes what has no text, and there the error ends the run
            return group
        return replace(group, samples=tuple(replace(sample, text=text) for sample, text in zip(group.samples, texts)))


def rollout_worker(options: EngineOptions, num_threads: int | None = None) -> RolloutWorker:
    """Build a rollout worker, whose engine loads its model by itself.

    Args:
        options: of the engine.
        num_threads: CPU threads of this process, for torch; None leaves them.

    Raises:
        UserError: the engine or the model is not there.
    """

    def build() -> SteppingEngine:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return make_engine(options)

    return RolloutWorker(build, load_tokenizer(options.model_path, trust_remote_code=options.trust_remote_code))


class FleetEngine(Streams):
    """What the gate, the evaluation, weight sync and the collector see of the rollout workers.

    Contract. Consumes: requests, one group at a time. Produces: groups, from whichever worker had room. Waits for:
    workers, as long as each shows progress. Unblocked by: the next finished group. When a worker dies or is silent, the
    fleet replaces it, gives the new one the newest weights, and asks again for the groups it had; a push returns when
    every worker that is alive serves the version. A stream that is dropped is sampled to its end all the same. Only the
    workers of a :class:`~sota_grpo.workers.sleeping.SleepingFleet` share devices with the learner, and sleep.

    Args:
        fleet: rollout workers (:class:`~sota_grpo.workers.rollout.RolloutWorker`).
        name: of the engines behind it.
        max_model_len: context in tokens.
        share: makes a large value available to every worker (:meth:`~sota_grpo.workers.base.Launcher.share`).
        deadline_s: longest wait of a push for one worker.
        base: the weights under an adapter, packed once, where the learner publishes its adapter only.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        name: str,
        max_model_len: int,
        share: Callable[[Any], Any],
        deadline_s: float,
        base: Callable[[], WeightPack] | None = None,
    ):
        self.fleet = fleet
        self.name = name
        self.max_model_len = max_model_len
        self.version = 0
        self._share = share
        self.base = base
        self._deadline_s = deadline_s

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """The group, some day; its samples are drawn by the weights that are newest as they are drawn."""
        response_rooms([request], sampling, self.max_model_len)
        return self.fleet.submit(request, sampling)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | AdapterPack, version: int) -> None:
        """Push to every worker, in flight; returns when each one's next token comes from the new weights.

        Args:
            weights: the tensors, or an adapter.
            version: what they are called.

        Raises:
            RuntimeError: a worker serves another version afterwards.
        """
        if isinstance(weights, AdapterPack):
            if self.base is not None:  # a worker that starts later gets it before its first adapter, too
                base, self.base = self._share(self.base()), None
                self._broadcast("set_base", base)
        elif not isinstance(weights, WeightPack):
            weights = WeightPack.of(weights)
        served = self._broadcast("update_weights", self._share(weights), version)
        if wrong := sorted(set(served) - {version}):
            raise RuntimeError(f"Rollout workers serve versions {wrong} after a push of {version}.")
        self.version = version

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """The one that all the engines' matrices have, so that pushed ones may come in it; None where there is none."""
        dtypes = set(self.fleet.broadcast("weight_dtype", deadline_s=self._deadline_s))
        return dtypes.pop() if len(dtypes) == 1 else None

    def weight_sums(self) -> dict[str, Checksum] | None:
        """Those of all workers; of a weight in which they differ, one that no tensor has."""
        answers = self.fleet.broadcast("weight_sums", deadline_s=self._deadline_s)
        if not answers or None in answers:
            return None
        first, *others = answers
        odd = {name for other in others for name, held in other.items() if name in first and held != first[name]}
        return {**first, **{name: first[name]._replace(total=-1) for name in odd}}

    def _broadcast(self, method: str, *args: Any) -> list[Any]:
        return self.fleet.broadcast(method, *args, deadline_s=self._deadline_s, sticky=True)

    def sleep(self) -> None:
        """Return when every engine sleeps; nothing where they have their own devices."""
        self.fleet.sleep(self._deadline_s)

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.fleet.wake(self._deadline_s)

    def close(self) -> None:
        """End the workers; idempotent."""
        self.fleet.close()
