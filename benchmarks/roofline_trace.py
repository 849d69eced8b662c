"""Every kernel that a step launches, from its operations on the pretended device: bytes, FLOPs, predicted time.

A kernel takes as long as its slower half: the bytes that it must move at the memory's rate, or its operations at the
rate of such products; and never less than a launch. Each operand is read once and each result written once; views and
empty tensors are no kernels. :mod:`benchmarks.roofline_fusion` joins them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.roofline_rates import Rates
from sota_grpo.policy.shared_prompt import Tables
from tests.pretended_cuda.tensor import PretendedTensor, tensors_in, watchers

Value = tuple[int, int]
PRODUCT, ATTENTION, GATHER, ELEMENTWISE = "product", "attention", "gather", "elementwise"
FOREACH, MARKED = "foreach", "marked"


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Args:
        name: of the operation.
        kind: ``product``, ``attention``, ``gather``, ``elementwise``, ``foreach`` or ``marked`` (:func:`record`).
        phase: see :func:`phase`.
        reads: bytes by value: a storage, and how often it had been written as a whole.
        writes: bytes by value.
        flops: of products and attention.
        rate: operations per second by name of :class:`~benchmarks.roofline_rates.Rates`.
        joins: elementwise, writes whole values, and runs in what is compiled (:func:`compiled`): it can be one with its
            neighbours of the same graph.
        graph: counts the compiled graphs.
        region: kernels of one :func:`one_kernel` are one.
    """

    name: str
    kind: str
    phase: str
    reads: dict[Value, int]
    writes: dict[Value, int]
    flops: float = 0.0
    rate: str = ""
    joins: bool = False
    region: int | None = None
    graph: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    def seconds(self, rates: Rates) -> float:
        work = self.flops / getattr(rates, self.rate) if self.rate else 0.0
        return max(work, self.bytes / rates.memory, rates.launch_s)


class Trace:
    """The kernels of what ran inside :func:`traced`."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._written: Counter[int] = Counter()

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
        self.add(name, kind, sizes, written, whole=_whole([*fresh, *changed]), flops=flops, rate=rate)

    def add(
        self,
        name: str,
        kind: str,
        reads: Mapping[int, int],
        writes: Mapping[int, int],
        *,
        whole: bool = False,
        flops: float = 0.0,
        rate: str = "",
    ) -> None:
        """Add a kernel by the bytes that it reads and writes of each storage."""
        before = {(serial, self._written[serial]): size for serial, size in reads.items()}
        self._written.update(writes.keys())
        after = {(serial, self._written[serial]): size for serial, size in writes.items()}
        region = _regions[-1] if _regions else None
        joins = kind == ELEMENTWISE and whole and _compiled.inside
        self.kernels.append(
            Kernel(name, kind, current_phase(), before, after, flops, rate, joins, region, _compiled.graph)
        )


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
class _Compiled:
    """Whether what runs now is compiled, and which graph it is."""

    inside: bool = False
    graph: int = 0

    def begin(self, *unused: Any) -> None:
        self.inside, self.graph = True, self.graph + 1

    def end(self, *unused: Any) -> None:
        self.inside = False

    def end_forward(self, *unused: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else it is computed again for the backward pass
            self.end()


_compiled = _Compiled()


def compiled(layers: Sequence[torch.nn.Module]) -> None:
    """Take each of ``layers``, forward and backward, for a graph that is compiled by itself."""
    for layer in layers:
        layer.register_forward_pre_hook(_compiled.begin)
        layer.register_full_backward_pre_hook(_compiled.begin)
    layers[-1].register_forward_hook(_compiled.end_forward)
    layers[0].register_full_backward_hook(_compiled.end)


_tracing: list[Trace] = []
_regions: list[int] = []
_next_region = 0
_phase = ["body"]


@contextlib.contextmanager
def one_kernel() -> Iterator[None]:
    """What runs inside is one kernel: it reads what comes from outside once and writes what is used outside once."""
    global _next_region
    _next_region += 1
    _regions.append(_next_region)
    try:
        yield
    finally:
        _regions.pop()


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
        trace.add(name, MARKED, _sizes(reads), _sizes(writes))


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


def _whole(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each is all of its storage, so that nothing of what was there before remains."""
    return all(_size(tensor) >= tensor.untyped_storage().nbytes() for tensor in tensors)


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
