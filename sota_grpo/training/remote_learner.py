"""A learner in other processes: a worker for each rank, and one facade over all of them in the driver."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import update_wrapper, wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.policy.lora import adapter_pack, packed_weights, weight_slices
from sota_grpo.policy.sharding import gather
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.training.checkpoint import Shards, ShardWriter
from sota_grpo.training.learner import Learner
from sota_grpo.training.planner import LearnerSettings, Planner, Share
from sota_grpo.workers.base import IDLE_METHOD, Start, Worker, WorkerDied, WorkerThread
from sota_grpo.workers.packing import StatePack

P = ParamSpec("P")
Result = TypeVar("Result")


def _on_thread(
    method: Callable[Concatenate[LearnerWorker, P], Result],
) -> Callable[Concatenate[LearnerWorker, P], Future[Result]]:
    """Run the method on the worker's thread: collectives must not overlap, and a CUDA device belongs to a thread."""

    @wraps(method)
    def submit(worker: LearnerWorker, *args: P.args, **by_name: P.kwargs) -> Future[Result]:
        return worker._thread.submit(lambda: method(worker, *args, **by_name))

    return submit


class LearnerWorker:
    """One rank of a :class:`~sota_grpo.training.learner.Learner`, as a worker (:mod:`sota_grpo.workers.base`).

    It needs the same calls, in the same order, as the other ranks. Gathered values (states, weights) are rank 0's
    answers and None on the others. In a collective it waits for every rank, until the deadline of the process group.

    Args:
        make_learner: joins the other ranks and builds this rank's learner
            (:func:`sota_grpo.policy.sharding.join_ranks`, :func:`sota_grpo.policy.sharding.shard`).
    """

    def __init__(self, make_learner: Callable[[], Learner]):
        self._thread = WorkerThread("learner")
        self.learner: Learner = self._thread.submit(make_learner).result()
        self.learner.policy.register_forward_hook(lambda *_: self._thread.progress())
        self._writer = ShardWriter(self.learner.ranks)
        self.learner.before_change = self._writer.wait_copied

    @_on_thread
    def update(self, share: Share) -> dict[str, float | None]:
        """:meth:`Learner.update_share`, with a random stream (adapters' dropout) for this step and this share."""
        learner = self.learner
        torch.manual_seed(sample_seed(learner.seed, learner.version, learner.ranks.share))
        return learner.update_share(share)

    @_on_thread
    def state_dict(self) -> StatePack | None:
        """:meth:`Learner.state_dict`."""

        def whole(tensor: torch.Tensor) -> torch.Tensor | None:
            self._thread.progress()
            return gather(tensor)

        state = self.learner.state_dict(whole)
        return StatePack.of(state) if self.learner.ranks.leads else None

    @_on_thread
    def load_state_dict(self, state: StatePack) -> None:
        """:meth:`Learner.load_state_dict`; each of several ranks copies its own rows out of the pack."""
        self.learner.load_state_dict(state.state(views=self.learner.ranks.size > 1))

    def sees(self, path: str) -> None:
        """Raise UserError unless this file of the driver exists here, in a folder that this process can write to."""
        folder = os.path.dirname(path)
        if not (os.path.isfile(path) and os.access(folder, os.W_OK)):
            raise UserError(
                f"Rank {self.learner.ranks.rank} of the learner, on {platform.node()}, cannot write to {folder}, where "
                "every rank writes its part of each checkpoint; set hydra.run.dir to a folder that all nodes share."
            )

    @_on_thread
    def begin_save(self, folder: str) -> Any:
        """Begin to write this rank's shard of the state; return the values that are no tensors."""
        return self._writer.begin(Path(folder), self.learner.state_dict(lambda tensor: tensor))

    def written(self) -> Future[tuple[str, str]]:
        """:meth:`ShardWriter.written`."""
        return self._writer.written()

    @_on_thread
    def weights(
        self, base: bool, merged: bool, dtype: torch.dtype | None, index: int, most_bytes: int
    ) -> tuple[WeightPack, int] | None:
        """Return a slice of the engines' weights (:func:`sota_grpo.policy.lora.weight_slices`), and their number."""
        model, progress = self.learner.policy.model, self._thread.progress
        slices = weight_slices(model, base=base, dtype=dtype, most_bytes=most_bytes)
        pack = packed_weights(model, base=base, merged=merged, dtype=dtype, names=slices[index], progress=progress)
        return (pack, len(slices)) if self.learner.ranks.leads else None

    @_on_thread
    def adapter(self) -> WeightPack | None:
        """Return the adapter alone, gathered."""
        pack = adapter_pack(self.learner.policy.model)
        return pack if self.learner.ranks.leads else None

    @_on_thread
    def export_hf(self, folder: str) -> None:
        """:meth:`Learner.export_hf`."""
        self.learner.export_hf(Path(folder), self._thread.progress)

    @_on_thread
    def run_method(self, method: str, *args: Any) -> Any:
        """Any other method of the learner."""
        return getattr(self.learner, method)(*args)

    def ping(self) -> float:
        """Seconds since the last forward pass, gathered weight or written slice of what is running; 0 when idle."""
        return max(self._thread.silent_s(), self._writer.silent_s())

    def close(self) -> None:
        """End after what is queued."""
        self._thread.close()
        self._writer.close()


_PACK_BYTES = 256 << 20  # of the weights that rank 0 packs at once
_PINGS_PER_SILENCE = 4
_LONGEST_PING_PAUSE_S = 10.0


class LearnerDied(RunFailed):
    """A rank of the learner died or hangs, so none can continue; the message names it and the cause."""


_COPIES = (keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS)  # the full tokens contain them


def travelling(rows: RowTable | Sequence[Row]) -> RowTable:
    """Return the columns that a learner reads, which no row may lack: no text, no copies, no terms of the reward."""
    table = RowTable.of(rows)
    terms = keys.REWARD_TERMS, keys.TERM_WEIGHTS
    tensors = [name for name, column in table.columns.items() if isinstance(column.values, torch.Tensor)]
    named = table.only(name for name in tensors if name not in _COPIES and name[:-1] not in terms)
    for name, column in named.columns.items():
        if column.rows is not None:
            raise ValueError(f"{name} is missing in {len(named) - len(column.rows)} of {len(named)} rows")
    return named


def _on_each_rank(method: Callable[Concatenate[Any, P], Result]) -> Callable[Concatenate[RemoteLearner, P], Result]:
    """Call the method on every rank and return rank 0's answer; rows travel as one table."""

    def call(remote: RemoteLearner, *args: P.args, **by_name: P.kwargs) -> Result:
        assert not by_name  # a worker's calls have none
        packed = (
            remote._share(travelling(arg)) if isinstance(arg, (RowTable, TensorDictBase, list)) else arg for arg in args
        )
        return remote._call("run_method", method.__name__, *packed)

    return update_wrapper(call, method)


class _Pings:
    """The last ping of each rank: one that does not answer delays no ping of the others."""

    def __init__(self, workers: Sequence[Worker], pause_s: float):
        self._workers, self._pause_s, self._pinged_s = workers, pause_s, float("-inf")
        self._last: dict[int, tuple[Future[Any], float]] = {}  # and when it was sent

    def look(self) -> tuple[dict[int, float], dict[int, Future[Any]]]:
        """Return the seconds since each unanswered ping, and the answers of the other ranks.

        Those are pinged again, at most every ``pause_s``.
        """
        now_s = time.monotonic()
        answered = {index: ping for index, (ping, _) in self._last.items() if ping.done()}
        mute = {index: now_s - since_s for index, (_, since_s) in self._last.items() if index not in answered}
        if now_s - self._pinged_s >= self._pause_s:
            self._pinged_s = now_s
            for index, worker in enumerate(self._workers):
                if index not in mute:
                    self._last[index] = worker.call("ping"), time.monotonic()
        return mute, answered


class RemoteLearner:
    """:class:`~sota_grpo.training.learner.Learner` over the ranks of ``workers``, for loop, gate and checkpoints.

    Calls may come from any thread; every rank gets every call, in one order, because collectives must match, and rank 0
    answers. When a rank dies, or shows no progress for ``silence_s``, the others would wait for it for ever: all are
    killed, and waiting threads raise :class:`LearnerDied`. An exception that all ranks survive is raised as it is.

    Args:
        workers: one per rank, in the order of the ranks; each runs a
            :class:`sota_grpo.training.remote_learner.LearnerWorker`.
        settings: those of the ranks' learners.
        share: makes a large argument travel once, as :meth:`sota_grpo.workers.base.Launcher.share` does.
        silence_s: longest time without progress: one micro-batch, or one optimizer step, or one gathered state.
        start_silence_s: the same while ranks start (:class:`sota_grpo.workers.base.Start`).
        grace_s: after one rank's exception, how long the others may take to answer.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: LearnerSettings,
        *,
        share: Callable[[Any], Any] = lambda value: value,
        silence_s: float = 600.0,
        start_silence_s: float = 600.0,
        grace_s: float = 10.0,
    ):
        self.workers, self.settings, self.version = tuple(workers), settings, 0
        self.pack_bytes, self._share = _PACK_BYTES, share
        self._silence_s, self._start_silence_s, self._grace_s = silence_s, start_silence_s, grace_s
        self._ready = False
        self._planner: Planner | None = None
        self._order = threading.Lock()
        self._look_pause_s = min(silence_s / _PINGS_PER_SILENCE, _LONGEST_PING_PAUSE_S)
        self._pings = _Pings(self.workers, self._look_pause_s)  # of poll()
        self._ending = threading.Lock()
        self._died: LearnerDied | None = None

    def wait_ready(self) -> None:
        """Return when every rank has built its learner; the first call does this by itself.

        Raises:
            LearnerDied: one failed, or the starting ranks were idle for too long.
        """
        if self._ready:
            return
        answers = [worker.call("ping") for worker in self.workers]
        limit_s, began_s = self._start_silence_s, time.monotonic()
        starts = [Start(limit_s, began_s) for _ in answers]
        looks: dict[int, Future[Any]] = {}
        pause_s = min(limit_s / (2 * _PINGS_PER_SILENCE), _LONGEST_PING_PAUSE_S)
        while pending := wait(answers, timeout=pause_s, return_when=FIRST_EXCEPTION).not_done:
            if any(answer.done() and answer.exception() for answer in answers):
                break
            now_s = time.monotonic()
            left = {index: start for index, start in enumerate(starts) if answers[index] in pending}
            for index, start in left.items():
                if index in looks and looks[index].done() and not looks[index].exception():
                    start.answered(looks.pop(index).result(), now_s)
                if index not in looks:
                    looks[index] = self.workers[index].call(IDLE_METHOD)
            for index, start in left.items():
                if why := start.verdict(now_s, left.values()):
                    self._die(index, why)
        for index, answer in enumerate(answers):
            if answer.done() and (error := answer.exception()):
                self._die(index, str(error), error)
        self._ready = True

    def poll(self) -> None:
        """Check that every rank is alive, while something else is waited for.

        Raises:
            LearnerDied: a rank died, or was silent for ``silence_s``.
        """
        self._look(self._pings)

    def _look(self, pings: _Pings) -> None:
        """Kill all ranks if one is dead, or was silent for ``silence_s``."""
        mute, answered = pings.look()
        for index, answer in answered.items():
            if error := answer.exception():
                self._die(index, str(error), error)
        stuck = {index: ping.result() for index, ping in answered.items()}
        if max([*mute.values(), *stuck.values()], default=0.0) > self._silence_s:
            # the ranks that wait for a stopped one are stuck too, but they answer
            suspects = mute or stuck
            what = "does not answer" if mute else "makes no progress"
            self._die(max(suspects, key=suspects.__getitem__), f"it {what}, for {self._silence_s:g} s")

    def update(self, rows: RowTable) -> dict[str, float | None]:
        """:meth:`Learner.update`, timed here; the driver plans it and sends each rank its own rows."""
        began = time.perf_counter()
        if self._planner is None:
            self._planner = self._call("run_method", "step_planner")
        shares = [(share,) for share in self._planner.shares(travelling(rows), self.version)]
        peers = len(self.workers) // len(shares)  # ranks that divide matrices see the same rows
        metrics = self._call_with("update", [rank_share for rank_share in shares for _ in range(peers)])
        self.version += 1
        return metrics | {"time/learn_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        """:meth:`Learner.state_dict`."""
        return self._call("state_dict").state()

    def require_folder(self, folder: Path) -> None:
        """Raise UserError unless every rank can write its shard of a checkpoint below ``folder``."""
        ending = f".{secrets.token_hex(6)}.tmp"  # that of leftovers, if this process is killed here
        with NamedTemporaryFile(dir=folder, prefix=".seen", suffix=ending) as probe:
            self._call("sees", probe.name)

    def begin_save(self, folder: Path) -> tuple[dict[str, Any], Shards]:
        """Return the state without its tensors, which every rank begins to write to ``folder`` while training."""
        return self._call("begin_save", str(folder.absolute())), Shards(folder, self._written)

    def _written(self) -> dict[str, str]:
        """Return the SHA-256 of each rank's file when all are written; raises the error of one that failed."""
        answers = [worker.call("written") for worker in self.workers]
        while pending := [answer for answer in answers if not answer.done()]:
            self._wait(pending)
        for index, answer in enumerate(answers):
            if isinstance(error := answer.exception(), WorkerDied):
                self._die(index, str(error), error)
        return dict(answer.result() for answer in answers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """:meth:`Learner.load_state_dict`; the state may be of any number of ranks, in memory or in files."""
        self._call("load_state_dict", self._share(StatePack.of(state)))
        self.version = state["version"]

    def weights(self, *, base: bool = True, merged: bool = True, dtype: torch.dtype | None = None) -> WeightPack:
        """Return the engines' weights (:func:`sota_grpo.policy.lora.engine_weights`), which rank 0 packs in slices."""
        packs: list[WeightPack] = []
        count = 1
        while len(packs) < count:
            pack, count = self._call("weights", base, merged, dtype, len(packs), self.pack_bytes)
            packs.append(pack)
        return WeightPack(tuple(buffer for pack in packs for buffer in pack.buffers))

    def adapter(self) -> WeightPack:
        """Return the adapter alone."""
        return self._call("adapter")

    measured = _on_each_rank(Learner.measured)
    measured_with_rounding = _on_each_rank(Learner.measured_with_rounding)
    diagnose = _on_each_rank(Learner.diagnose)
    coefficients = _on_each_rank(Learner.coefficients)
    gradient_gap = _on_each_rank(Learner.gradient_gap)
    perturb = _on_each_rank(Learner.perturb)
    restore = _on_each_rank(Learner.restore)
    trainable_names = _on_each_rank(Learner.trainable_names)
    give_back = _on_each_rank(Learner.give_back)

    def export_hf(self, folder: Path) -> None:
        """:meth:`Learner.export_hf`, on the machine of rank 0."""
        self._call("export_hf", str(folder))

    def close(self) -> None:
        """End every rank at once; idempotent."""
        for worker in self.workers:
            worker.kill()

    def _call(self, method: str, *args: Any) -> Any:
        """:meth:`_call_with` with the same arguments."""
        return self._call_with(method, [args] * len(self.workers))

    def _call_with(self, method: str, args: Sequence[tuple[Any, ...]]) -> Any:
        """Call every rank with arguments of its own; return rank 0's answer when all have answered.

        Raises:
            LearnerDied: a rank died or hangs, or failed where the others wait for it.
            Exception: what rank 0 raised, else the first other rank that raised, when all ranks have answered.
        """
        self.wait_ready()
        with self._order:
            answers = [worker.call(method, *arguments) for worker, arguments in zip(self.workers, args, strict=True)]
        self._wait(answers)
        failed = [index for index, answer in enumerate(answers) if answer.done() and answer.exception()]
        if not failed:
            return answers[0].result()
        # the others may wait for the rank that failed, or be about to fail for the same reason
        pending = wait(answers, timeout=self._grace_s).not_done
        errors = {index: answer.exception() for index, answer in enumerate(answers) if answer not in pending}
        died = [index for index, error in errors.items() if isinstance(error, WorkerDied)]
        if died or pending:
            index = (died or failed)[0]
            self._die(index, str(errors[index]) or type(errors[index]).__name__, errors[index])
        raise next(error for error in errors.values() if error)

    def _wait(self, answers: Sequence[Future[Any]]) -> None:
        """Return when all have answered or one has failed; every rank is pinged for progress meanwhile."""
        pings = _Pings(self.workers, self._look_pause_s)
        while wait(answers, timeout=self._look_pause_s, return_when=FIRST_EXCEPTION).not_done:
            if any(answer.done() and answer.exception() for answer in answers):
                return
            self._look(pings)

    def _die(self, index: int, what: str, cause: BaseException | None = None) -> NoReturn:
        """Kill all ranks; other threads, which then see killed ranks, raise the first failure too."""
        with self._ending:
            if self._died is None:
                self._died = LearnerDied(
                    f"The learner ended, because its rank {index} ({self.workers[index].name}) failed: {what}; "
                    "train.resume=auto continues from the last checkpoint."
                )
                self._died.__cause__ = cause
                self.close()
        raise self._died
