"""The device without numbers: floats have a shape only, so that models of any size go through their whole step.

Integers and masks that come from the host keep their values, since they decide shapes (layouts, indices), and so does
what has few elements. What would be read from a float without a value is an answer that lets a step continue: 0 for a
number, true for a condition, every element for a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.pretended_cuda.tensor import INDEXING, Numbers, aten, numbers, tensors_in

META = torch.device("meta")
FEW = 4096  # elements


class Shapes(Numbers):
    """See the module."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if not tensors:
            made = func(*args, **{**kwargs, "device": META})
            return made if _is_large(made) else super().compute(func, args, kwargs)
        if all(not tensor.is_meta for tensor in tensors):
            actual = super().compute(func, args, kwargs)
            return _bare(actual) if isinstance(actual, Tensor) else actual
        if func in ANSWERS:
            return ANSWERS[func](*args)
        if func in INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        args, kwargs = _on_meta(args), _on_meta({name: value for name, value in kwargs.items() if name != "device"})
        if func.namespace == "sota_grpo":  # they declare the shapes of their results
            return func(*args, **kwargs)
        return super().compute(func, args, kwargs)

    def converted(self, inner: Tensor, options: dict[str, Any]) -> Tensor:
        return _bare(aten._to_copy.default(inner, **options, device=inner.device))

    def fetched(self, inner: Tensor, options: dict[str, Any], device: torch.device) -> Tensor:
        actual = torch.ones(inner.shape, dtype=options.get("dtype") or inner.dtype) if inner.is_meta else inner
        return aten._to_copy.default(actual, **options, device=device)

    def copied_into(self, target: Tensor, source: Tensor) -> None:
        if source.is_meta or target.is_meta:
            torch.broadcast_to(torch.empty_like(source, device=META), target.shape)
        else:
            super().copied_into(target, source)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Tensors that are made meanwhile have no numbers if they are floats; they may not be used afterwards."""
    numbers.append(Shapes())
    try:
        yield
    finally:
        numbers.pop()


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.numel() > FEW


def _bare(tensor: Tensor) -> Tensor:
    """A large float without its numbers; anything else as it is."""
    return torch.empty_like(tensor, device=META) if _is_large(tensor) and not tensor.is_meta else tensor


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else torch.empty_like(value, device=META)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    return value


def _every(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=torch.bool)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the indices of their true elements."""
    actual: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            actual.append(index)
        else:
            known = _every(index) if index.is_meta else index
            actual += known.nonzero().unbind(1)
    return actual


def _scalar(tensor: Tensor) -> bool | int | float:
    return tensor.dtype == torch.bool or torch.zeros((), dtype=tensor.dtype).item()


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda left, right: left.shape == right.shape,
    aten.allclose.default: lambda left, right, *tolerances: left.shape == right.shape,
    aten.nonzero.default: lambda tensor: _every(tensor).nonzero(),
    aten.masked_select.default: lambda tensor, mask: torch.empty_like(tensor).flatten(),
}
