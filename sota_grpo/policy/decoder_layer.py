"""The decoder layer of Qwen2, Qwen3, Llama and Mistral over packed rows, as one compiled function.

transformers' layer multiplies by seven matrices and casts each of them in every micro-batch. Here query, key and value
are one product, gate and up another, and for an optimizer step the matrices are cast once (:class:`HalfWeights`). A
layer computes this function only for packed rows in half precision on a GPU, and if a test shows that it changes
results by rounding only (:func:`join_products`); else transformers' layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from sota_grpo.policy.shared_prompt import Tables, packed_attention, takes_kernels

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Limit of compiled variants (training, scoring, adapter on and off, each precision); above it torch uses eager mode.
COMPILED_VARIANTS = 32
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
#: Matrices whose outputs are computed in one product.
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class Kind(NamedTuple):
    """What is constant in the compiled function; layers of one kind share it."""

    hidden: int
    inner: int  # width of the MLP
    heads: int
    key_heads: int
    width: int
    eps: float
    scale: float
    window: int


class LayerWeights(NamedTuple):
    """Weights of a layer; a matrix is a tuple of parts, in the order of their outputs."""

    qkv: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    qkv_bias: tuple[Tensor, ...]  # empty: none
    norms: tuple[Tensor, ...]  # of the attention's and the MLP's input
    head_norms: tuple[Tensor, ...]  # of query and key; empty: none


def decoder_layer(
    kind: Kind, weights: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor, tables: Tensor, sizes: list[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the hidden states ``[1, L, H]`` after the layer, rounded where transformers' layer rounds under autocast.

    Args:
        hidden: hidden states ``[1, L, H]`` of packed tokens.
        cos, sin: rotary factors ``[1, L, width]``.
        tables, sizes: see :class:`~sota_grpo.policy.shared_prompt.Tables`.
        dtype: of products and attention.
    """
    rows = hidden.flatten(0, 1)
    states = _normed(rows, weights.norms[0], kind.eps).to(dtype)
    bias = _joined(weights.qkv_bias, dtype) if weights.qkv_bias else None
    heads = linear(states, _joined(weights.qkv, dtype), bias).unflatten(-1, (-1, kind.width))
    query, key, value = heads.split([kind.heads, kind.key_heads, kind.key_heads], 1)
    if weights.head_norms:
        query, key = (_normed(each, weight, kind.eps) for each, weight in zip((query, key), weights.head_norms))
    query, key = (_rotated(each, cos[0].unsqueeze(1), sin[0].unsqueeze(1)).to(dtype) for each in (query, key))
    attended, _ = packed_attention(query, key, value, tables, sizes, kind.scale, 0.0, kind.window)
    rows = rows + linear(attended.flatten(1), _joined(weights.out, dtype))
    states = _normed(rows, weights.norms[1], kind.eps).to(dtype)
    gate, up = linear(states, _joined(weights.gate_up, dtype)).chunk(2, -1)
    # a sum of views, which is none itself: the next layer's input must be like the first's
    return rows.unsqueeze(0) + linear(silu(gate) * up, _joined(weights.down, dtype)).unsqueeze(0)


def _joined(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.to(dtype)


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def compile_options() -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for layers: one compilation for rows of any length, rounded as eagerly."""
    how = {"dynamic": True, "options": {"emulate_precision_casts": True}}
    if "recompile_limit" in signature(torch.compile).parameters:
        return {**how, "recompile_limit": COMPILED_VARIANTS}  # for all threads; the setting below only for this one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
    return how


@lru_cache
def _compiled(kind: Kind) -> Callable[..., Tensor]:
    @torch.compiler.assume_constant_result  # else the compiled code gets numbers as arguments
    def constants() -> tuple[Any, ...]:
        return tuple(kind)

    def layer(weights: LayerWeights, hidden: Tensor, *args: Any) -> Tensor:
        known = Kind(*constants())
        sizes = (known.hidden, known.inner, (known.heads + 2 * known.key_heads) * known.width)
        if (hidden.shape[2], weights.down[0].shape[1], sum(map(len, weights.qkv))) != sizes:
            raise ValueError("layers of one kind have matrices of one shape")  # never; it makes these sizes constants
        return decoder_layer(known, weights, hidden, *args)

    return torch.compile(layer, **compile_options())


def _forward(
    self: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: Any = None,
    tables: Tables | None = None,
    **kwargs: Any,
) -> Tensor:
    """Forward of a layer; ``tables`` are given for packed rows on a GPU only."""
    device = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden_states.dtype
    joined: Any = self.joined
    if tables is None or not takes_kernels(hidden_states.device, dtype, joined.kind.width):
        kwargs |= {"position_embeddings": position_embeddings, "tables": tables}
        return type(self).forward(self, hidden_states, *args, **kwargs)
    weights = joined.halves or weights_of(self)
    with torch.autocast(device, enabled=False):
        return joined.compute(weights, hidden_states, *position_embeddings, tables.flat, [*tables.sizes], dtype)


def weights_of(layer: nn.Module) -> LayerWeights:
    """Return the parameters of ``layer``."""
    known: dict[str, Any] = dict(layer.named_modules())

    def weights(names: Sequence[str], what: str = "weight") -> tuple[Tensor, ...]:
        found = [getattr(known[name], what) for name in names if name in known]
        return tuple(tensor for tensor in found if tensor is not None)

    qkv, out, gate_up, down = map(weights, _GROUPS)
    return LayerWeights(qkv, out, gate_up, down, weights(_GROUPS[0], "bias"), weights(_NORMS), weights(_HEAD_NORMS))


class Joined:
    """What a layer computes with: the compiled function of its kind, and half-precision copies of matrices if any."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.compute = kind, _compiled(kind)
        self.halves: LayerWeights | None = None

    def __deepcopy__(self, memo: Any) -> Joined:
        return Joined(self.kind)


def join_products(layers: Sequence[nn.Module], windows: Sequence[int | None]) -> bool:
    """Make ``layers`` compute :func:`decoder_layer`; return False, changing nothing, if one has other parameters.

    ``windows`` has the sliding window of each layer.
    """
    if not all(map(_fits, layers)):
        return False
    for layer, window in zip(layers, windows):
        attention: Any = layer.get_submodule("self_attn")
        query, key = (each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj))
        norm: Any = layer.get_submodule(_NORMS[0])
        hidden, inner = weights_of(layer).down[0].shape
        numbers = (attention.head_dim, norm.variance_epsilon, attention.scaling, window or 0)
        changed: Any = layer
        changed.joined = Joined(Kind(hidden, inner, query, key, *numbers))
        changed.forward = MethodType(_forward, layer)
    return True


def part_products(layers: Sequence[nn.Module]) -> None:
    """Undo :func:`join_products`."""
    for layer in layers:
        del layer.joined, layer.forward


def _fits(layer: nn.Module) -> bool:
    """Whether ``layer`` has exactly the parameters that :class:`LayerWeights` has, in plain linear layers."""
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    names = [name for group in _GROUPS for name in group]
    if sorted(linears) != sorted(names) or any(type(module) is not nn.Linear for module in linears.values()):
        return False
    weights = weights_of(layer)
    tensors = [tensor for part in weights for tensor in part]
    complete = {id(tensor) for tensor in tensors} == {id(tensor) for tensor in layer.parameters()}
    alike = len(weights.norms) == 2 and len(weights.qkv_bias) in (0, 3) and len(weights.head_norms) in (0, 2)
    return complete and alike and len({tensor.requires_grad for tensor in tensors}) == 1


class HalfWeights:
    """Context in which layers compute with half-precision copies of their matrices, cast once.

    Their gradients are added to those of the float32 matrices as soon as they are known: the same numbers as if every
    micro-batch cast them. The matrices must not change in the context.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        self.totals: dict[int, Tensor] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        copies: list[Tensor] = []
        matrices: list[Tensor] = []
        for layer in self.layers:
            weights, halves = weights_of(layer), []
            for parts in weights[:4]:
                rows = [len(part) for part in parts]
                empty = parts[0].new_empty(sum(rows), parts[0].shape[1], dtype=self.dtype)
                half = nn.Parameter(empty, requires_grad=parts[0].requires_grad)
                if half.requires_grad:
                    half.register_post_accumulate_grad_hook(self._adding(parts, rows))
                copies += half.data.split(rows)
                matrices += parts
                halves.append((half,))
            layer.joined.halves = weights._replace(**dict(zip(LayerWeights._fields, halves)))
        torch._foreach_copy_(copies, matrices)

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            layer.joined.halves = None
        self.totals.clear()

    def _adding(self, parts: tuple[Tensor, ...], rows: list[int]) -> Callable[[Tensor], None]:
        def add(half: Tensor) -> None:
            assert half.grad is not None
            total = self.totals.get(id(parts[0]))
            if total is None:
                self.totals[id(parts[0])] = total = half.grad.to(parts[0].dtype)
                for part, gradient in zip(parts, total.split(rows)):
                    part.grad = gradient
            else:
                total.add_(half.grad)
            half.grad = None

        return add
