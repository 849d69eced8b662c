"""Rollout workers: an engine as a worker, and many of them behind the protocol of one engine."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch

import sota_grpo.workers.packing  # noqa: F401  (groups are pickled as three tensors from here on)
from sota_grpo.engines import EngineOptions, make_engine
from sota_grpo.engines.stepping import SteppingEngine, Streams, Task, response_rooms, result
from sota_grpo.policy.end_tokens import response_text
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.weight_pack import Checksum, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers.base import Result, WorkerDied, pending_future
from sota_grpo.workers.fleet import Fleet

_log = logging.getLogger(__name__)


class RolloutWorker:
    """An engine as a worker: its host does all calls that have come, in their order, between two steps.

    So weights are loaded in the middle of running groups, after one step at most, and requests that came together begin
    together. What a call raises as ``ValueError`` is its caller's; any other exception of the engine breaks the worker:
    every open future and every later call fails with :class:`WorkerDied` and the cause, and the engine is closed.

    Args:
        engine: owned by this.
        tokenizer: decodes the responses (``Sample.text``); None leaves that to the caller.

    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> worker = RolloutWorker(ScriptedEngine(lambda request, sample, version: [5, 6]))
    >>> group = worker.run(GroupRequest(3, (1, 2), num_samples=1, seed=0), Sampling(max_tokens=8))
    >>> while worker.advance():
    ...     pass
    >>> group.result().group_id, group.result().samples[0].token_ids.tolist()
    (3, [5, 6, 0])
    >>> worker.close()
    """

    def __init__(self, engine: SteppingEngine, tokenizer: Any = None):
        self._engine, self._tokenizer = engine, tokenizer
        self._end: Future[NoReturn] = pending_future()  # why no call is answered any more

    def run(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Sample one group; ``ValueError`` where its prompt leaves no room for a response."""
        return Task(self._sample(request, sampling))

    async def _sample(self, request: GroupRequest, sampling: Sampling) -> GroupOutput:
        submitted = self._do(lambda: self._engine.submit(request, sampling))
        try:
            group = await result(submitted)
        except ValueError:
            raise
        except Exception:  # the engine lost it, as it failed or was closed
            return await result(self._end)
        if self._tokenizer is None:
            return group
        try:
            texts = [response_text(self._tokenizer, sample.token_ids) for sample in group.samples]
        except Exception:  # the driver decodes what has no text, and there the error ends the run
            return group
        return replace(group, samples=tuple(replace(sample, text=text) for sample, text in zip(group.samples, texts)))

    def advance(self) -> bool:
        """Make one step of the engine; False where nothing is in flight."""
        try:
            return not self._end.done() and self._engine.advance()
        except BaseException as error:  # the host would end; the callers see it through their futures
            self._break(error)
            return False

    def set_base(self, pack: WeightPack) -> None:
        """Keep the weights that adapters are merged into from now on (a view of memory that workers may share)."""
        self._engine.base = pack.tensors

    def update_weights(self, pack: WeightPack, version: int) -> int:
        """Push weights under the running groups; returns the version that the engine serves from the next token on.

        Args:
            pack: all weights, or an adapter on the weights of :meth:`set_base`.
            version: of the weights.
        """

        def push() -> int:
            engine = self._engine
            engine.update_weights(pack if engine.takes_adapters else engine.whole(pack), version)
            return self._engine.version

        return self._do(push)

    def weight_dtype(self) -> torch.dtype | None:
        """The dtype in which pushed weights may come (:class:`~sota_grpo.engines.Engine`)."""
        return self._engine.weight_dtype

    def weight_sums(self) -> Mapping[str, Checksum] | None:
        """:meth:`~sota_grpo.engines.Engine.weight_sums`."""
        return self._do(self._engine.weight_sums)

    def sleep(self) -> None:
        """:meth:`~sota_grpo.engines.Engine.sleep`, with nothing in flight."""
        self._do(self._engine.sleep)

    def wake(self) -> None:
        """:meth:`~sota_grpo.engines.Engine.wake`."""
        self._do(self._engine.wake)

    def close(self) -> None:
        """Close the engine; open futures fail. Idempotent."""
        if not self._end.done():
            self._finish(WorkerDied("This rollout worker is closed."))

    def _do(self, action: Callable[[], Result]) -> Result:
        if self._end.done():
            self._end.result()
        try:
            return action()
        except ValueError:
            raise
        except BaseException as error:
            self._break(error)
            return self._end.result()

    def _break(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}"
        refusal = WorkerDied(f"The {self._engine.name} engine failed and cannot continue ({cause}).")
        refusal.add_note("".join(traceback.format_exception(error)).rstrip())
        refusal.__cause__ = error.with_traceback(None)  # its frames would keep the engine's memory
        self._finish(refusal)

    def _finish(self, why: WorkerDied) -> None:
        self._end.set_exception(why)
        try:
            self._engine.close()
        except Exception:  # an engine that has failed may fail again, and its caller knows the first cause
            _log.exception("The %s engine could not be closed.", self._engine.name)


def rollout_worker(options: EngineOptions, num_threads: int | None = None) -> RolloutWorker:
    """Build a rollout worker, whose engine loads its model by itself.

    Args:
        options: of the engine.
        num_threads: CPU threads of this process, for torch; None leaves them.

    Raises:
        UserError: the engine or the model is not there.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    tokenizer = load_tokenizer(options.model_path, trust_remote_code=options.trust_remote_code)
    return RolloutWorker(make_engine(options), tokenizer)


class FleetEngine(Streams):
    """The rollout workers as one engine.

    Contract. Consumes: requests, one group at a time. Produces: groups, from any worker that had room. Waits for:
    workers, as long as each shows progress. When a worker dies or is silent, the fleet replaces it, gives the new one
    the newest weights, and samples its groups again; a push returns when every live worker serves the version. A group
    whose stream is dropped is still sampled to its end.

    Args:
        fleet: of :class:`RolloutWorker`.
        name: of the engines.
        max_model_len: context in tokens.
        share: :meth:`~sota_grpo.workers.base.Launcher.share`.
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
        """A future of the group, sampled by the newest weights at each token."""
        response_rooms([request], sampling, self.max_model_len)
        return self.fleet.submit(request, sampling)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Push to every worker, under running groups; returns when each one's next token comes from the new weights.

        Raises:
            RuntimeError: a worker serves another version afterwards.
        """
        if not isinstance(weights, WeightPack):
            weights = WeightPack.of(weights)
        if weights.scales and self.base is not None:  # sticky: a worker that starts later gets it before its adapter
            base, self.base = self._share(self.base()), None
            self._broadcast("set_base", base)
        served = self._broadcast("update_weights", self._share(weights), version)
        if wrong := sorted(set(served) - {version}):
            raise RuntimeError(f"Rollout workers serve versions {wrong} after a push of {version}.")
        self.version = version

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype of all the engines' matrices, for pushed weights; None where they have several."""
        dtypes = set(self.fleet.broadcast("weight_dtype", deadline_s=self._deadline_s))
        return dtypes.pop() if len(dtypes) == 1 else None

    def weight_sums(self) -> dict[str, Checksum] | None:
        """The checksums of all workers; of a weight in which they differ, one that no tensor has."""
        answers = self.fleet.broadcast("weight_sums", deadline_s=self._deadline_s)
        if not answers or None in answers:
            return None
        first, *others = answers
        odd = {name for other in others for name, held in other.items() if name in first and held != first[name]}
        return {**first, **{name: first[name]._replace(total=-1) for name in odd}}

    def _broadcast(self, method: str, *args: Any) -> list[Any]:
        return self.fleet.broadcast(method, *args, deadline_s=self._deadline_s, sticky=True)

    def sleep(self) -> None:
        """Return when every engine sleeps; no-op where they have their own devices."""
        self.fleet.sleep(self._deadline_s)

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.fleet.wake(self._deadline_s)

    def close(self) -> None:
        """End the workers; idempotent."""
        self.fleet.close()
