"""A learner in other processes: a worker process per rank, and :class:`RemoteLearner`, their proxy in the driver."""

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

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.policy.lora import adapter_pack, packed_weights, weight_slices
from sota_grpo.policy.sharding import gather
from sota_grpo.policy.weight_pack import StatePack, WeightPack
from sota_grpo.rl.collate import OPTIONAL
from sota_grpo.rl.planner import LearnerSettings, Planner, Share
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.training.checkpoint import Shards, ShardWriter
from sota_grpo.training.learner import Learner
from sota_grpo.workers.base import Worker, WorkerDied, WorkerThread

P = ParamSpec("P")
Result = TypeVar("Result")


def _on_thread(
    method: Callable[Concatenate[LearnerWorker, P], Result],
) -> Callable[Concatenate[LearnerWorker, P], Future[Result]]:
    """Decorator: run the method on the worker's only thread, so that collectives never overlap; return its future."""

    @wraps(method)
    def submit(worker: LearnerWorker, *args: P.args, **by_name: P.kwargs) -> Future[Result]:
        return worker._thread.submit(lambda: method(worker, *args, **by_name))

    return submit


class LearnerWorker:
    """Worker (:mod:`sota_grpo.workers.base`) with one rank of a :class:`~sota_grpo.training.learner.Learner`.

    All ranks must receive the same calls in the same order. Calls of the learner run on one thread and return futures.
    Gathered values (states, weights) are None except on rank 0. A collective waits up to the process group's timeout.

    Args:
        make_learner: joins the process group and builds this rank's learner
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
        """Seed torch (for dropout) by seed, version and data-parallel rank; return ``Learner.update_share(share)``."""
        learner = self.learner
        torch.manual_seed(sample_seed(learner.seed, learner.version, learner.ranks.share))
        return learner.update_share(share)

    @_on_thread
    def state_dict(self) -> StatePack | None:
        """Return the learner's gathered state, packed into one buffer; None on ranks other than 0."""

        def whole(tensor: torch.Tensor) -> torch.Tensor | None:
            self._thread.progress()
            return gather(tensor)

        state = self.learner.state_dict(whole)
        return StatePack.of(state) if self.learner.ranks.leads else None

    @_on_thread
    def load_state_dict(self, state: StatePack) -> None:
        """Call :meth:`Learner.load_state_dict`; each of several ranks copies only its shard from the pack."""
        self.learner.load_state_dict(state.state(views=self.learner.ranks.size > 1))

    def sees(self, path: str) -> None:
        """Raise UserError unless the driver's file ``path`` exists here, in a folder that this process can write to."""
        folder = os.path.dirname(path)
        if not (os.path.isfile(path) and os.access(folder, os.W_OK)):
            raise UserError(
                f"Rank {self.learner.ranks.rank} of the learner, on {platform.node()}, does not see or cannot write to "
                f"{folder}, where every rank writes its shard of a checkpoint; set hydra.run.dir to a folder that all "
                "nodes share."
            )

    @_on_thread
    def begin_save(self, folder: str) -> Any:
        """Start to write this rank's shard to a new file in ``folder``; return the learner's state without tensors."""
        return self._writer.begin(Path(folder), self.learner.state_dict(lambda tensor: tensor))

    def written(self) -> Future[tuple[str, str]]:
        """Return a future of (file name, SHA-256) of the file that the last :meth:`begin_save` writes."""
        return self._writer.written

    @_on_thread
    def weights(
        self, base: bool, merged: bool, dtype: torch.dtype | None, index: int, most_bytes: int
    ) -> tuple[WeightPack, int] | None:
        """Gather a slice of the engine weights on rank 0; return (its pack, number of slices), None on other ranks.

        All ranks must call this. ``index``: the slice's, from 0. ``base``, ``dtype`` and ``most_bytes``: see
        :func:`~sota_grpo.policy.lora.weight_slices`. ``merged``: see :func:`~sota_grpo.policy.lora.engine_weights`.
        """
        model, progress = self.learner.policy.model, self._thread.progress
        slices = weight_slices(model, base=base, dtype=dtype, most_bytes=most_bytes)
        pack = packed_weights(model, base=base, merged=merged, dtype=dtype, names=slices[index], progress=progress)
        return (pack, len(slices)) if self.learner.ranks.leads else None

    @_on_thread
    def adapter(self) -> WeightPack | None:
        """Return the gathered LoRA adapter, None on ranks other than 0; ValueError if the model has none."""
        pack = adapter_pack(self.learner.policy.model)
        return pack if self.learner.ranks.leads else None

    @_on_thread
    def export_hf(self, folder: str) -> None:
        """Call :meth:`Learner.export_hf`: rank 0 saves model and tokenizer to ``folder``."""
        self.learner.export_hf(Path(folder), self._thread.progress)

    @_on_thread
    def run_method(self, method: str, *args: Any) -> Any:
        """Return the result of ``learner.<method>(*args)``."""
        return getattr(self.learner, method)(*args)

    def ping(self) -> float:
        """Return the seconds without progress (a forward pass, a tensor) of the running call or write; 0 if idle."""
        return max(self._thread.silent_s(), self._writer.thread.silent_s())

    def close(self) -> None:
        """Let the threads end after the queued calls and writes; do not wait."""
        self._thread.close()
        self._writer.thread.close()


Pings = dict[int, tuple[Future[Any], float]]  # rank: its last ping, and when that was sent
_PACK_BYTES = 256 << 20  # size of the slices in which rank 0 packs weights
_PINGS_PER_SILENCE = 4
_LONGEST_PING_PAUSE_S = 10.0


class LearnerDied(RunFailed):
    """A rank of the learner failed, so training cannot continue; the message has the rank and the cause."""


def travelling(rows: RowTable | Sequence[Row]) -> RowTable:
    """Return a table of the tensor columns but reward terms, prompts and responses.

    ValueError if some rows lack a column without a default in :func:`~sota_grpo.rl.collate.pad_rows`: the ranks would
    compute different losses.
    """
    table = RowTable.of(rows)
    left_out = (keys.REWARD_TERMS, keys.TERM_WEIGHTS, keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS)
    tensors = [name for name, column in table.columns.items() if isinstance(column.values, torch.Tensor)]
    named = table.only(name for name in tensors if name not in left_out and name[:-1] not in left_out)
    for name, column in named.columns.items():
        if column.rows is not None and name not in OPTIONAL:
            raise ValueError(
                f"{name} is missing in {len(named) - len(column.rows)} of {len(named)} rows; write it to all."
            )
    return named


def _on_each_rank(
    method: Callable[Concatenate[Any, P], Result], *, of_rows: bool = False
) -> Callable[Concatenate[RemoteLearner, P], Result]:
    """Return a method that calls this Learner method on every rank and returns rank 0's result.

    ``of_rows``: the first argument is rows, which are sent as one table.
    """

    def call(remote: RemoteLearner, *args: P.args, **by_name: P.kwargs) -> Result:
        assert not by_name  # a worker's calls have none
        rows = [remote._share(travelling(arg)) for arg in args[:of_rows]]  # type: ignore[arg-type]
        return remote._call("run_method", method.__name__, *rows, *args[of_rows:])

    return update_wrapper(call, method)


class RemoteLearner:
    """Proxy with the main methods of :class:`~sota_grpo.training.learner.Learner` over rank processes ``workers``.

    Every call, from any thread, goes to all ranks in one order, because collectives must match, and returns rank 0's
    result. A rank's exception is raised if all ranks answer within ``grace_s`` after it. If not, or if a rank dies or
    makes no progress for ``silence_s``, all ranks are killed, and pending and later calls raise :class:`LearnerDied`.

    Args:
        workers: one :class:`sota_grpo.training.remote_learner.LearnerWorker` process per rank, in rank order.
        share: stores a large argument once for all ranks (:meth:`sota_grpo.workers.base.Launcher.share`).
        silence_s: longest time without progress; must exceed that of a micro-batch, an update or a gathered tensor.
        start_s: longest time until all ranks have built their learners.
        grace_s: how long the other ranks may take to answer after one rank raised.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: LearnerSettings,
        *,
        share: Callable[[Any], Any] = lambda value: value,
        silence_s: float = 600.0,
        start_s: float = 600.0,
        grace_s: float = 10.0,
    ):
        self.workers, self.settings, self.version = tuple(workers), settings, 0
        self.pack_bytes, self._share = _PACK_BYTES, share
        self._silence_s, self._start_s, self._grace_s = silence_s, start_s, grace_s
        self._ready = False
        self._planner: Planner | None = None
        self._order = threading.Lock()
        self._pause_s = min(silence_s / _PINGS_PER_SILENCE, _LONGEST_PING_PAUSE_S)
        self._pings: Pings = {}  # of poll()
        self._ending = threading.Lock()
        self._died: LearnerDied | None = None

    def wait_ready(self) -> None:
        """Wait until every rank has built its learner, as other calls do first; LearnerDied if one cannot start."""
        if self._ready:
            return
        answers = [worker.call("ping") for worker in self.workers]
        pending = wait(answers, timeout=self._start_s, return_when=FIRST_EXCEPTION).not_done
        for index, answer in enumerate(answers):
            if answer.done() and (error := answer.exception()):
                self._die(index, str(error), error)
        for index, answer in enumerate(answers):
            if answer in pending:
                self._die(index, f"it was not ready after {self._start_s:g} s")
        self._ready = True

    def poll(self, pings: Pings | None = None) -> None:
        """Kill all ranks and raise LearnerDied if one died or made no progress for ``silence_s``; ping all others.

        Call this while waiting elsewhere. ``pings``: those of one wait; None: those of all calls from elsewhere.
        """
        pings, now_s = self._pings if pings is None else pings, time.monotonic()
        mute, stuck = {}, {}  # seconds without an answer; of those that answer, without progress
        for index, worker in enumerate(self.workers):
            ping, since_s = pings.get(index, (None, float("-inf")))
            if ping is not None and not ping.done():
                mute[index] = now_s - since_s
                continue
            if ping is not None and (error := ping.exception()):
                self._die(index, str(error), error)
            if ping is not None:
                stuck[index] = ping.result()
            if now_s - since_s >= self._pause_s:
                pings[index] = worker.call("ping"), now_s
        if max([*mute.values(), *stuck.values()], default=0.0) > self._silence_s:
            # ranks that wait for a stopped rank make no progress either, but they answer pings
            suspects = mute or stuck
            what = "does not answer" if mute else "makes no progress"
            self._die(max(suspects, key=suspects.__getitem__), f"it {what} for {self._silence_s:g} s")

    def update(self, rows: RowTable) -> dict[str, float | None]:
        """Do a training step; see :meth:`Learner.update`. ValueError if a tensor column is missing in some rows."""
        began = time.perf_counter()
        if self._planner is None:
            self._planner = self._call("run_method", "step_planner")
        shares = [(share,) for share in self._planner.shares(travelling(rows), self.version)]
        peers = len(self.workers) // len(shares)  # ranks that divide matrices see the same rows
        metrics = self._call_with("update", [rank_share for rank_share in shares for _ in range(peers)])
        self.version += 1
        return metrics | {"time/learn_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`Learner.state_dict` with whole tensors."""
        return self._call("state_dict").state()

    def require_folder(self, folder: Path) -> None:
        """Raise UserError unless every rank sees a temporary file in the driver's ``folder`` and can write there."""
        ending = f".{secrets.token_hex(6)}.tmp"  # deleted as a leftover if this process is killed here
        with NamedTemporaryFile(dir=folder, prefix=".seen", suffix=ending) as probe:
            self._call("sees", probe.name)

    def begin_save(self, folder: Path) -> tuple[dict[str, Any], Shards]:
        """Start to write every rank's tensors to ``folder``; return (state without tensors, unfinished files)."""
        return self._call("begin_save", str(folder.absolute())), Shards(folder, self._written)

    def _written(self) -> dict[str, str]:
        """Wait for every rank's file; return {file name: SHA-256}, or raise the error of a failed write."""
        answers = [worker.call("written") for worker in self.workers]
        while pending := [answer for answer in answers if not answer.done()]:
            self._wait(pending)
        for index, answer in enumerate(answers):
            if isinstance(error := answer.exception(), WorkerDied):
                self._die(index, str(error), error)
        return dict(answer.result() for answer in answers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`, saved with any number of ranks; see :meth:`Learner.load_state_dict`."""
        self._call("load_state_dict", self._share(StatePack.of(state)))
        self.version = state["version"]

    def weights(self, *, base: bool = True, merged: bool = True, dtype: torch.dtype | None = None) -> WeightPack:
        """Return the weights for engines (:func:`sota_grpo.policy.lora.engine_weights`), gathered slice by slice."""
        packs: list[WeightPack] = []
        count = 1
        while len(packs) < count:
            pack, count = self._call("weights", base, merged, dtype, len(packs), self.pack_bytes)
            packs.append(pack)
        return WeightPack(tuple(buffer for pack in packs for buffer in pack.buffers))

    def adapter(self) -> WeightPack:
        """Return the LoRA adapter; ValueError if the model has none."""
        return self._call("adapter")

    measured = _on_each_rank(Learner.measured, of_rows=True)
    measured_with_rounding = _on_each_rank(Learner.measured_with_rounding, of_rows=True)
    diagnose = _on_each_rank(Learner.diagnose, of_rows=True)
    coefficients = _on_each_rank(Learner.coefficients, of_rows=True)
    gradient_gap = _on_each_rank(Learner.gradient_gap, of_rows=True)
    perturb = _on_each_rank(Learner.perturb)
    restore = _on_each_rank(Learner.restore)
    trainable_names = _on_each_rank(Learner.trainable_names)
    give_back = _on_each_rank(Learner.give_back)

    def export_hf(self, folder: Path) -> None:
        """Save model (LoRA merged) and tokenizer in Hugging Face format to ``folder`` on the machine of rank 0."""
        self._call("export_hf", str(folder.absolute()))  # a rank may have another working directory

    def close(self) -> None:
        """Kill all rank processes without waiting for running calls; idempotent."""
        for worker in self.workers:
            worker.kill()

    def _call(self, method: str, *args: Any) -> Any:
        return self._call_with(method, [args] * len(self.workers))

    def _call_with(self, method: str, args: Sequence[tuple[Any, ...]]) -> Any:
        """Call ``method`` on rank ``i`` with ``args[i]``; wait for all; return rank 0's result, or raise."""
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
        """Wait until all ``answers`` are complete or one has failed; meanwhile ping every rank for progress."""
        pings: Pings = {}
        while wait(answers, timeout=self._pause_s, return_when=FIRST_EXCEPTION).not_done:
            if any(answer.done() and answer.exception() for answer in answers):
                return
            self.poll(pings)

    def _die(self, index: int, what: str, cause: BaseException | None = None) -> NoReturn:
        """Kill all ranks and raise LearnerDied; other threads then raise the same first failure."""
        with self._ending:
            if self._died is None:
                self._died = LearnerDied(
                    f"The learner stopped: its rank {index} ({self.workers[index].name}) failed: {what.rstrip('.')}; "
                    "train.resume=auto continues from the last checkpoint."
                )
                self._died.__cause__ = cause
                self.close()
        raise self._died
