"""Every kernel that a step launches, from its operations on the pretended device: bytes, FLOPs, predicted time.

A kernel takes as long as its slower half: the bytes that it must move at the memory's rate, or its operations at the
rate of such products; and never less than a launch. Each operand is read once and each result written once; views and
empty tensors are no kernels. What is elementwise in compiled layers is replaced by what Inductor makes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from benchmarks.roofline_rates import Rates
from sota_grpo.policy import decoder_layer
from sota_grpo.policy.shared_prompt import Tables
from tests.pretended_cuda.tensor import PretendedTensor, tensors_in, watchers

PRODUCT, ATTENTION, GATHER, ELEMENTWISE = "product", "attention", "gather", "elementwise"
FOREACH, MARKED = "foreach", "marked"


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Args:
        name: of the operation.
        kind: ``product``, ``attention``, ``gather``, ``elementwise``, ``foreach`` or ``marked`` (:func:`record`).
        phase: see :func:`phase`.
        bytes: read and written.
        flops: of products and attention.
        rate: operations per second by name of :class:`~benchmarks.roofline_rates.Rates`.
    """

    name: str
    kind: str
    phase: str
    bytes: float
    flops: float = 0.0
    rate: str = ""

    def seconds(self, rates: Rates) -> float:
        work = self.flops / getattr(rates, self.rate) if self.rate else 0.0
        return max(work, self.bytes / rates.memory, rates.launch_s)


class Trace:
    """The kernels of what ran inside :func:`traced`."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def watch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add the kernel of an operation, where anything is launched."""
        name, results = func._schema.name.split("::")[1], _tensors(out)
        read, changed = _operands(func, args, kwargs)
        held = {tensor.lease.serial for tensor in read + changed}
        fresh = [tensor for tensor in results if tensor.lease.serial not in held]
        if name in _NOTHING or not any(tensor.numel() for tensor in fresh + changed):
            return
        kind, sizes, flops, rate = ELEMENTWISE, _sizes(read), 0.0, ""
        written = _sizes([*fresh, *changed])
        if name in _PRODUCTS:
            kind, flops, rate = PRODUCT, *_product(name, args, results[0])
        elif name == "add_gradient":
            kind, flops, rate = PRODUCT, 2.0 * changed[0].numel() * len(read[1]), "half"
        elif name.startswith("packed_attention"):
            kind, flops, rate = ATTENTION, *_attention(args, backward="backward" in name)
        elif name in _GATHERS:  # it reads as much as it writes, and the indices
            kind = GATHER
            sizes[read[0].lease.serial] = sum(map(_size, fresh))
        elif name in _SCATTERS:
            kind = GATHER
            if changed:  # the rows that are named, no others
                target = changed[0].lease.serial
                sizes[target] = written[target] = min(max(map(_size, read[1:])), _size(changed[0]))
        elif name.startswith("_f"):
            kind = FOREACH
        elif _blocks and _blocks[0].inside and name != "unrotate":  # which is no kernel of Inductor's
            return
        self.add(name, kind, sum(sizes.values()) + sum(written.values()), flops=flops, rate=rate)

    def add(self, name: str, kind: str, num_bytes: float, *, flops: float = 0.0, rate: str = "") -> None:
        """Add a kernel by the bytes that it reads and writes."""
        self.kernels.append(Kernel(name, kind, current_phase(), num_bytes, flops, rate))


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    _tracing.append(trace)
    watchers.append(trace.watch)
    try:
        yield trace
    finally:
        watchers.remove(trace.watch)
        _tracing.remove(trace)


@dataclass
class _Blocks:
    """What Inductor makes of a block of joined layers, forward and backward, and whether one is being computed."""

    code: Mapping[str, Mapping[str, float]]  # of ``tests.pretended_cuda.layer_code``
    layers: int  # of that code
    rows: int  # tokens of that code
    inside: bool = False

    def end(self, which: str, layers: int, rows: int, *, inside: bool = False) -> None:
        self.inside = inside
        share, code = layers / self.layers, self.code[which]
        number = round(share * (code["kernels"] + code.get("sums", 0)))
        num_bytes = share * code["gigabytes"] * 1e9 * rows / self.rows
        for trace in _tracing:
            for _ in range(number):
                trace.add("layers by Inductor", ELEMENTWISE, num_bytes / number)


_blocks: list[_Blocks] = []  # at most one


class _Boundary(torch.autograd.Function):
    """Call a function when the backward pass gets here."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reached()
        return grad, None


@contextlib.contextmanager
def compiled_blocks(code: Mapping[str, Mapping[str, float]], layers: int, rows: int) -> Iterator[None]:
    """Count elementwise kernels of joined layers as in Inductor's ``code`` of ``layers`` layers, ``rows`` tokens."""
    real, blocks = decoder_layer._computed_block, _Blocks(code, layers, rows)

    def computed(block: Sequence[Any], hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        size = len(block), hidden.shape[1]
        hidden = _Boundary.apply(hidden, partial(blocks.end, "backward", *size))
        before, blocks.inside = blocks.inside, True  # under checkpointing the backward pass is inside, too
        hidden = real(block, hidden, *others)
        blocks.end("forward", *size, inside=before)
        return _Boundary.apply(hidden, partial(setattr, blocks, "inside", True))

    _blocks.append(blocks)
    try:
        # what is compiled saves its tensors when it is over, so it is computed again as a whole
        with mock.patch.object(decoder_layer, "_computed_block", computed), set_checkpoint_early_stop(False):
            yield
    finally:
        _blocks.remove(blocks)


_tracing: list[Trace] = []
_phase = ["body"]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Kernels inside belong to ``name``; with " forward" or " backward" as the autograd engine is at work."""
    _phase.append(name)
    try:
        yield
    finally:
        _phase.pop()


def current_phase() -> str:
    if _phase[-1] == "optimizer":
        return _phase[-1]
    return _phase[-1] + (" forward" if torch._C._current_graph_task_id() == -1 else " backward")


def record(name: str, reads: Sequence[torch.Tensor | None], writes: Sequence[torch.Tensor | None]) -> None:
    """Add a kernel that is no operation of torch to the traces that are being taken."""
    for trace in _tracing:
        trace.add(name, MARKED, sum(_sizes(reads).values()) + sum(_sizes(writes).values()))


_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
    "is_pinned",
}
_ONLY_WRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
_GATHERS = {"index", "index_select", "gather", "embedding", "take", "nonzero", "masked_select"}
_SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "index_add", "index_copy_", "index_copy", "scatter_"}
_SCATTERS |= {"scatter_add_", "scatter", "scatter_add", "put_", "masked_scatter", "embedding_dense_backward"}
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addmv", "mv", "dot"}


def _tensors(value: Any) -> list[PretendedTensor]:
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, PretendedTensor)]


def _operands(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[PretendedTensor], list[PretendedTensor]]:
    """The tensors that an operation reads, and those that it changes."""
    read, changed = [], []
    for index, argument in enumerate(func._schema.arguments):
        value = _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += value
            if argument.is_out or func._schema.name.split("::")[1] in _ONLY_WRITES:
                continue
        read += value
    return read, changed


def _size(tensor: torch.Tensor) -> int:
    """Bytes of the elements that are different ones in memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else 1
    return count * tensor.element_size()


def _sizes(tensors: Sequence[torch.Tensor | None]) -> dict[int, int]:
    """Bytes of each storage that the tensors touch."""
    measured: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, PretendedTensor):
            serial, size = tensor.lease.serial, _size(tensor)
            measured[serial] = max(measured.get(serial, 0), size)
    return measured


def _product(name: str, args: Sequence[Any], result: torch.Tensor) -> tuple[float, str]:
    """2 m n k; of three operands the first is added."""
    left = args[1] if name.startswith(("addm", "baddbmm")) else args[0]
    return 2.0 * result.numel() * left.shape[-1], "single" if left.dtype.itemsize >= 4 else "half"


def _attention(args: Sequence[Any], *, backward: bool) -> tuple[float, str]:
    """4 per pair and unit of width forward, 14 backward, where scores are computed for queries and again for keys."""
    query, flat, sizes = (args[1], *args[6:8]) if backward else (args[0], *args[3:5])
    starts, query_tiles, _, _ = Tables(flat.inner, sizes).split()
    behind = torch.arange(len(starts)) - starts
    first, end, prompt, prompt_end = query_tiles.unbind(1)
    pairs = int(behind.sum()) + len(behind) + int(((end - first) * (prompt_end - prompt)).sum())
    width = query.shape[1] * query.shape[2]
    return (14.0 if backward else 4.0) * width * pairs, "attention_backward" if backward else "attention"
