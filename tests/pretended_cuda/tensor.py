"""Tensors that say ``cuda:0`` over CPU data, and what every operation with one of them passes through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.pretended_cuda.counters import Lease, note_copy, note_wait
from tests.pretended_cuda.kernels import STAND_INS

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DEFAULT_GENERATOR = torch.Generator(device="cuda")  # of the device, beside the CPU's own

# what makes the host wait, because the shape or the value of the result is needed at once
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.allclose.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# beside the pointwise ones: operations that read a CPU tensor without dimensions as a number
TAKES_NUMBERS = INDEXING | {
    aten.fill.Tensor,
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.index_fill.int_Tensor,
    aten.index_fill_.int_Tensor,
}


# torch has its own kernels for these, which end in CUDA's: the factories hand an empty tensor to their out= form, and
# copy_ is called below the level of subclasses by torch.tensor
OVERRULED = (
    *("copy_", "arange", "arange.start", "arange.start_step", "range", "range.step", "linspace", "logspace"),
    *("eye", "eye.m", "randperm", "randperm.generator"),
)


class PretendedTensor(Tensor):
    """CPU data ``inner`` under the device ``cuda:0``."""

    inner: Tensor
    lease: Lease

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedTensor:
        with torch._C._InferenceMode(inner.is_inference()):  # a view of a tensor from outside the mode is from outside
            return Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=CUDA,
            )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner
        self.lease = Lease.on(inner)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, types, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, PretendedTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise NotImplementedError("a pretended tensor's data can only be replaced by one like it")
        self.inner, self.lease = value.inner, value.lease

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = PretendedTensor(self.inner.clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True  # what nn.Parameter's isinstance asks
            if self.grad is not None:
                copied.grad = self.grad.clone()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        parts = (self.inner.detach().clone(), self.dtype, str(CUDA), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, parts

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
                "first."
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr() or id(self.lease)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __repr__(self, **options: Any) -> str:
        return f"{self.inner!r} on cuda:0"


def answer_for_cuda() -> list[torch.library.Library]:
    """Send every operation of the CUDA backend to :func:`run`: factories and copies, before there is a tensor.

    Returns:
        What holds the registrations: they end when it is collected.
    """

    def answer(func: Any, *args: Any, **kwargs: Any) -> Any:
        return run(func, (), args, kwargs)

    every, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(answer, "CUDA")
    for name in OVERRULED:
        some.impl(name, functools.partial(answer, _operation(name)), "CUDA")
    return [every, some]


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


class Numbers:
    """How the device computes: on CPU tensors. Another one may be in :data:`numbers` (see :mod:`shapes`)."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on what the tensors of the device hold; factories have ``device=`` the CPU."""
        compute = STAND_INS.get(func.name(), func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _random(compute, args, kwargs)
        return compute(*args, **kwargs)

    def converted(self, inner: Tensor, options: dict[str, Any]) -> Tensor:
        """A copy on the device, of something there or on the CPU; ``options`` are those of ``_to_copy``."""
        return aten._to_copy.default(inner, **options, device=CPU)

    def fetched(self, inner: Tensor, options: dict[str, Any], device: torch.device) -> Tensor:
        """A copy on another device."""
        return aten._to_copy.default(inner, **options, device=device)

    def copied_into(self, target: Tensor, source: Tensor) -> None:
        """``target.copy_(source)``."""
        aten.copy_.default(target, source)


numbers: list[Numbers] = [Numbers()]  # the last one computes
watchers: list[Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]] = []  # told of every operation and result
_TRANSPARENT = (PretendedTensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)


def run(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One operation, on the device that its operands or its ``device=`` name.

    Raises:
        RuntimeError: the operands are on two devices and CUDA would not take that.
    """
    if any(kind.__torch_dispatch__ not in _TRANSPARENT for kind in types):
        return NotImplemented  # a subclass around these, as DTensor, unpacks itself first
    if _is_composite(func):
        return func.decompose(*args, **kwargs)
    out = _run(func, args, kwargs)
    for watcher in watchers:
        watcher(func, args, kwargs, out)
    return out


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    device = None if device is None else _checked(torch.device(device))
    if func is aten._to_copy.default:
        return _copied(args[0], device, kwargs)
    if func is aten.copy_.default:
        return _copied_into(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    held = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, PretendedTensor)}
    if held:
        _require_one_device(func, args, tensors)
        if func in WAITING or (func in INDEXING and _has_mask(args[1])):
            note_wait(str(func))
    inner_args, inner_kwargs = _unwrapped(tuple(args)), _unwrapped(kwargs)
    if not (held if device is None else device.type == "cuda"):
        return func(*inner_args, **inner_kwargs)
    if device is not None:
        inner_kwargs["device"] = CPU
        if inner_kwargs.pop("pin_memory", False):
            raise RuntimeError("Only dense CPU tensors can be pinned")
    return _wrapped(numbers[-1].compute(func, inner_args, inner_kwargs), held)


_composite: dict[Any, bool] = {}


def _is_composite(func: Any) -> bool:
    """Whether it is made of other operations only: under inference mode such ones come here whole."""
    if func not in _composite:
        key = "CompositeImplicitAutograd"
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
        _composite[func] = has_kernel and func._can_decompose()
    return _composite[func]


def _checked(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return device


def _copied(source: Tensor, device: torch.device | None, options: Mapping[str, Any]) -> Tensor:
    """``_to_copy``: a change of dtype, of device, or of both."""
    here = isinstance(source, PretendedTensor)
    to_device = here if device is None else device.type == "cuda"
    inner = source.inner if isinstance(source, PretendedTensor) else source
    non_blocking = options.get("non_blocking", False)
    rest = {name: value for name, value in options.items() if name not in ("device", "pin_memory", "non_blocking")}
    if to_device and not here and inner.device.type == "cpu":
        _note_upload(inner)
    if to_device:
        return PretendedTensor(numbers[-1].converted(inner, rest))
    if not here:
        return aten._to_copy.default(source, **options)
    if not non_blocking:
        note_wait("copy to the host")
    out = numbers[-1].fetched(inner, rest, device or CPU)
    return out.pin_memory() if options.get("pin_memory") or non_blocking else out  # CUDA pins what is yet to come


def _copied_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    there, here = (isinstance(tensor, PretendedTensor) for tensor in (target, source))
    if there and not here and source.device.type == "cpu":
        _note_upload(source)
    if here and not there and not (non_blocking and target.is_pinned()):
        note_wait("copy to the host")
    numbers[-1].copied_into(_unwrapped(target), _unwrapped(source))
    return target


def _note_upload(source: Tensor) -> None:
    if source.numel() and not source.is_pinned():
        note_copy("copy to the device")


def _require_one_device(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Refuse CPU operands as CUDA does; numbers, indices and lists of copies are welcome there."""
    strangers = [t for t in tensors if not isinstance(t, PretendedTensor) and t.device.type == "cpu"]
    if not strangers or func is aten._foreach_copy_.default:
        return
    own = isinstance(args[0], (PretendedTensor, list, tuple))
    if own and (func in TAKES_NUMBERS or torch.Tag.pointwise in func.tags or func._schema.name.startswith("aten::_f")):
        if func in INDEXING:
            indices = [index for index in args[1] if index is not None and not isinstance(index, PretendedTensor)]
            for _ in indices:
                note_copy("index to the device")
            strangers = [tensor for tensor in strangers if not any(tensor is index for index in indices)]
        strangers = [tensor for tensor in strangers if tensor.dim()]
    elif torch.Tag.pointwise in func.tags and torch.Tag.inplace not in func.tags:
        strangers = [tensor for tensor in strangers if tensor.dim()]
    if strangers:
        shapes = [list(tensor.shape) for tensor in strangers]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
            f"on the CPU {shapes})"
        )


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _random(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw from a generator of the device: the CPU's kernels know only their own, which takes over its state."""
    source = kwargs.get("generator")
    if source is not None and source.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    generator, before = source or DEFAULT_GENERATOR, torch.get_rng_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return compute(*args, **({**kwargs, "generator": None} if source else kwargs))
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in arguments: they are nested lists, tuples and dicts at most."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def _unwrapped(value: Any) -> Any:
    if isinstance(value, PretendedTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(item) for item in value)
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    return value


def _wrapped(value: Any, held: Mapping[int, PretendedTensor]) -> Any:
    """Results of the device; what an operation has changed in place is the very tensor that it was given."""
    if isinstance(value, Tensor):
        known = held.get(id(value))
        if known is None:
            return PretendedTensor(value)
        if known.shape != value.shape or known.stride() != value.stride():
            raise NotImplementedError("the pretended device does not reshape a tensor in place")
        return known
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(item, held) for item in value)
    return value
