"""The frozen reference policy of the KL term, in the three places it can live.

Every class here answers the same call: padded rows in, log-probabilities ``[N, T]`` (float32, 0 off the assistant
mask, no gradient, on the device of the rows) out, and ``close()``, which is idempotent.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Protocol

import torch
from tensordict import TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import DType, load_model
from sota_grpo.policy.lora import adapter_disabled

_IN_KEYS = (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK)
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_PARENT_POLL_S = 0.5
_GOODBYE_S = 2.0


class ReferencePolicy(Protocol):
    """What the KL term needs of a reference."""

    def __call__(self, rows: TensorDictBase) -> torch.Tensor: ...

    def close(self) -> None: ...


class ReferenceWorkerError(RuntimeError):
    """The reference's process died, failed or did not answer in time; the message names it and the cause."""


class FrozenReference:
    """A reference with weights of its own, on a device of its own.

    Args:
        model: taken over: frozen, put in evaluation mode and moved. Use :meth:`copy_of` for a model that still trains.
        device: where it computes; None leaves it where it is.
        temperature: the policy's sampling temperature.
    """

    def __init__(self, model: nn.Module, *, device: torch.device | str | None = None, temperature: float = 1.0) -> None:
        frozen = model.requires_grad_(False).eval().to(device)  # to(None) leaves it where it is
        self._policy: CausalPolicy | None = CausalPolicy(frozen, temperature=temperature, with_entropy=False)

    @classmethod
    def copy_of(
        cls, model: nn.Module, *, device: torch.device | str | None = None, temperature: float = 1.0
    ) -> FrozenReference:
        """Return a reference that keeps what ``model`` computes now, whatever happens to ``model`` later."""
        return cls(copy.deepcopy(model), device=device, temperature=temperature)

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities [N, T] on the device of the rows.

        Raises:
            RuntimeError: the reference was closed.
        """
        if self._policy is None:
            raise RuntimeError("the reference policy was closed and cannot answer any more")
        own_device = next(self._policy.parameters()).device
        tokens, attention_mask, assistant_mask = (rows.get(key) for key in _IN_KEYS)
        with torch.no_grad():
            found, _ = self._policy.log_probs(
                tokens.to(own_device), attention_mask.to(own_device), assistant_mask.to(own_device)
            )
        return found.to(tokens.device)

    def close(self) -> None:
        self._policy = None


class AdapterOffReference:
    """The base model under a LoRA policy: its adapter is off for the length of a call. No weights of its own.

    Args:
        policy: the policy being trained, around a model of :func:`sota_grpo.policy.lora.add_lora`.

    Raises:
        ValueError: the policy's model has no adapter.
    """

    def __init__(self, policy: CausalPolicy) -> None:
        with adapter_disabled(policy.model):
            pass  # refuses a model without an adapter now rather than in the first step
        self._policy: CausalPolicy | None = policy

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities [N, T] of the base model.

        Raises:
            RuntimeError: the reference was closed.
        """
        if self._policy is None:
            raise RuntimeError("the reference policy was closed and cannot answer any more")
        with torch.no_grad(), adapter_disabled(self._policy.model):
            found, _ = self._policy.log_probs(*(rows.get(key) for key in _IN_KEYS))
        return found

    def close(self) -> None:
        self._policy = None


class ProcessReference:
    """A reference in a process of its own, so that it computes while the trainer does something else.

    Contract. Consumes: one batch of padded rows at a time. Produces: its log-probabilities. Waits for: the worker, at
    most ``start_deadline_s`` for the model to load (from construction to the first answer) and ``deadline_s`` for a
    batch. When the worker dies or is late, it is killed and :class:`ReferenceWorkerError` says which and why. When the
    trainer dies, even by SIGKILL, the worker ends itself within a second.

    Args:
        model_name: as :func:`sota_grpo.policy.load.load_model` takes it.
        dtype, attn_implementation, trust_remote_code, device: likewise.
        temperature: the policy's sampling temperature.
        precision: autocast of the worker, ``fp32``, ``bf16`` or ``fp16``; that of the policy makes equal weights equal.
        num_threads: CPU threads of the worker.
        deadline_s: longest wait for one batch.
        start_deadline_s: longest wait for the worker to be ready.
        name: of the process, in messages and in ``ps``.
    """

    def __init__(
        self,
        model_name: str,
        *,
        dtype: DType = "float32",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        device: str = "cpu",
        temperature: float = 1.0,
        precision: str = "fp32",
        num_threads: int = 1,
        deadline_s: float = 600.0,
        start_deadline_s: float = 600.0,
        name: str = "reference",
    ) -> None:
        model_options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
        model_options |= {"trust_remote_code": trust_remote_code, "device": device}
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._deadline_s, self._start_deadline_s = deadline_s, start_deadline_s
        self._started_at = time.monotonic()
        self._ready = self._closed = False
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, os.getpid(), model_name, model_options, temperature, _AUTOCAST[precision], num_threads),
            name=name,
            daemon=True,
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait_ready(self) -> None:
        """Return when the worker has loaded its model; the first call does this by itself.

        Raises:
            ReferenceWorkerError: the model does not load, or not within ``start_deadline_s``.
        """
        self._require_open()
        if not self._ready:
            left_s = self._start_deadline_s - (time.monotonic() - self._started_at)
            self._receive(max(left_s, 0.0), f"did not load its model in {self._start_deadline_s:g} s")
            self._ready = True

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities [N, T] on the device of the rows.

        Raises:
            ReferenceWorkerError: the worker is dead, late, closed, or failed on this batch.
        """
        self.wait_ready()
        tokens, attention_mask, assistant_mask = (rows.get(key) for key in _IN_KEYS)
        arrays = [value.cpu().numpy() for value in (tokens, attention_mask, assistant_mask)]
        try:
            self._connection.send(arrays)
        except OSError as error:
            self._died(error)
        late = f"did not answer a batch of {list(tokens.shape)} in {self._deadline_s:g} s"
        return torch.from_numpy(self._receive(self._deadline_s, late)).to(tokens.device)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):  # it may be dead already; reaping it below is all that is left then
            self._connection.send(None)
        self._process.join(_GOODBYE_S)
        self._kill()

    def _receive(self, deadline_s: float, late: str) -> Any:
        if not wait([self._connection, self._process.sentinel], deadline_s):
            self._fail(late)
        try:
            # A dead worker's pipe need not end: another child of the trainer may hold a copy of it. So never block.
            if not self._connection.poll():
                self._died(None)
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._died(error)
        if kind == "fatal":
            self._fail(f"failed to start: {value}")
        if kind == "error":
            raise ReferenceWorkerError(f"{self._who()} failed on a batch: {value}")
        return value

    def _died(self, cause: BaseException | None) -> NoReturn:
        self._process.join(_GOODBYE_S)
        self._fail(f"died with exit code {self._process.exitcode} (a negative one is the killing signal)", cause)

    def _fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        self._closed = True
        self._kill()
        raise ReferenceWorkerError(f"{self._who()} {what}; the run cannot go on without its reference") from cause

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ReferenceWorkerError(f"{self._who()} was closed and cannot answer any more")

    def _who(self) -> str:
        return f"reference worker {self.name!r} (pid {self._process.pid})"


def _serve(
    connection: Connection,
    parent_pid: int,
    model_name: str,
    model_options: dict[str, Any],
    temperature: float,
    autocast: torch.dtype | None,
    num_threads: int,
) -> None:
    """Answer batches until the other end says None or goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer decides when to end
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    torch.set_num_threads(num_threads)
    try:
        model = load_model(model_name, **model_options).requires_grad_(False).eval()
        policy = CausalPolicy(model, temperature=temperature, with_entropy=False)
    except Exception as error:  # whatever stopped it is for the trainer to report
        connection.send(("fatal", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", None))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            answer = _answer(policy, request, model.device)
        connection.send(answer)


@torch.no_grad()
def _answer(policy: CausalPolicy, arrays: list[Any], device: torch.device) -> tuple[str, Any]:
    try:
        tokens, attention_mask, assistant_mask = (torch.from_numpy(array).to(device) for array in arrays)
        found, _ = policy.log_probs(tokens, attention_mask, assistant_mask)
    except Exception as error:  # one bad batch must not turn into a dead pipe without a reason
        return "error", f"{type(error).__name__}: {error}"
    return "ok", found.cpu().numpy()


def _end_with_parent(parent_pid: int) -> None:
    """End this process when the trainer is gone, even in the middle of a forward pass.

    The end of the pipe alone is not enough: another child of the trainer may hold a copy of its descriptor.
    """
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
