"""The decoder layer of Qwen2, Qwen3, Llama and Mistral over packed rows, as one compiled function with fewer products.

transformers' layer multiplies by seven matrices and casts each of them in every micro-batch. In a *joined layer*
(:func:`join_products`) query, key and value are one product, gate and up another, and each matrix is cast once per
optimizer step (:class:`HalfWeights`). It does so only for packed rows in half precision on a GPU; for all other rows it
calls transformers' forward. Hooks on modules inside a joined layer are not called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation

from sota_grpo.policy.shared_prompt import HeadAttention, Layout, SummingLinear, Tables, takes_kernels

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Limit of compiled variants (training, scoring, adapter on and off, each precision); above it torch uses eager mode.
COMPILED_VARIANTS = 32
#: Most layers of one compiled function: with more, Python does less per micro-batch and more to compile it.
BLOCK = 4
_MODULES = {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
#: Matrices whose outputs are computed in one product.
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class LayerShape(NamedTuple):
    """Sizes and constants of a decoder layer, which its compiled code contains as constants."""

    hidden: int  # hidden size
    inner: int  # width of the MLP
    heads: int  # query heads
    key_heads: int
    width: int  # of a head
    eps: float  # of the RMS norms
    scale: float  # factor of the attention scores
    window: int  # sliding window in tokens; 0: none


class LayerWeights(NamedTuple):
    """Weights of a decoder layer; the matrices of a tuple are joined, in this order, for one product."""

    qkv: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    qkv_bias: tuple[Tensor, ...]  # empty: none
    norms: tuple[Tensor, ...]  # of the attention's and the MLP's input
    head_norms: tuple[Tensor, ...]  # of query and key; empty: none
    totals: tuple[Tensor, ...] = ()  # float32 sums to which products add the gradients of the four; empty: none


def decoder_layer(
    shape: LayerShape,
    weights: LayerWeights,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    tables: Tensor,
    sizes: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the hidden states ``[1, L, H]`` after the layer, rounded where transformers' layer rounds under autocast.

    Args:
        hidden: hidden states ``[1, L, H]`` of packed tokens, before the layer.
        cos, sin: rotary factors ``[1, L, width]``.
        tables, sizes: ``flat`` and ``sizes`` of :class:`~sota_grpo.policy.shared_prompt.Tables`.
        dtype: dtype of matrix products and attention; the result has that of ``hidden``.
    """
    rows = hidden.flatten(0, 1)
    states = _normed(rows, weights.norms[0], shape.eps).to(dtype)
    bias = [_joined(weights.qkv_bias, dtype)] if weights.qkv_bias else []
    heads = _product(states, weights, 0, dtype, *bias).unflatten(-1, (-1, shape.width))
    numbers = (shape.heads, shape.eps, shape.scale, shape.window)
    attended = HeadAttention.apply(heads, cos[0], sin[0], tables, sizes, *numbers, *weights.head_norms)
    rows = rows + _product(attended.flatten(1), weights, 1, dtype)
    states = _normed(rows, weights.norms[1], shape.eps).to(dtype)
    gate, up = _product(states, weights, 2, dtype).chunk(2, -1)
    # not a view, like the first layer's input: if it were one, layers would be compiled twice
    return rows.unsqueeze(0) + _product(silu(gate) * up, weights, 3, dtype).unsqueeze(0)


def _product(states: Tensor, weights: LayerWeights, index: int, dtype: torch.dtype, *bias: Tensor) -> Tensor:
    group: Any = weights[index]
    if weights.totals:
        return SummingLinear.apply(states, _joined(group, dtype), weights.totals[index], *bias)
    return linear(states, _joined(group, dtype), *bias)


def _joined(group: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    whole = group[0] if len(group) == 1 else torch.cat(group)
    return whole.to(dtype)


def _normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = states.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


def compile_options() -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for layers: one graph for rows of any length, rounding as in eager mode."""
    how = {"dynamic": True, "options": {"emulate_precision_casts": True}}
    if "recompile_limit" in signature(torch.compile).parameters:
        return {**how, "recompile_limit": COMPILED_VARIANTS}  # for all threads; the setting below only for this one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
    return how


def _computed(layers: list[tuple[str, LayerWeights]], hidden: Tensor, *args: Any) -> Tensor:
    """Call :func:`decoder_layer` for each :class:`LayerShape` as JSON: torch.compile takes a string as a constant."""
    for text, weights in layers:
        shape = LayerShape(*_numbers(text))
        sizes = (shape.hidden, shape.inner, (shape.heads + 2 * shape.key_heads) * shape.width)
        if (hidden.shape[2], weights.down[0].shape[1], sum(map(len, weights.qkv))) != sizes:  # so they are constants
            raise ValueError(f"The layer's matrices do not have the sizes of its LayerShape {text}.")
        hidden = decoder_layer(shape, weights, hidden, *args)
    return hidden


@torch.compiler.assume_constant_result
def _numbers(text: str) -> tuple[Any, ...]:
    return tuple(json.loads(text))


@lru_cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, **compile_options())


def _forward(
    self: Any,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: Any = None,
    layout: Layout | None = None,
    tables: Tables | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a joined layer, in place of transformers' forward; ``tables``: None unless rows are packed, on a GPU."""
    dtype = _product_dtype(hidden_states)
    if tables is not None and takes_kernels(hidden_states.device, dtype, self.joined.shape.width):
        with torch.autocast(hidden_states.device.type, enabled=False):
            return _computed_block([self], hidden_states, position_embeddings, layout, tables, dtype)
    kwargs |= {"position_embeddings": position_embeddings, "layout": layout, "tables": tables}
    compiled = _compiled if self.joined.compiles else lambda function: function
    return compiled(type(self).forward)(self, hidden_states, *args, **kwargs)


def hidden_in_blocks(decoder: Any, layout: Layout, tables: Tables) -> Tensor | None:
    """Return the last hidden states ``[1, L, H]`` of packed tokens, with one compiled call for each block of layers.

    None if layers have to be called one by one: if they are not joined, their activations are checkpointed, FSDP
    gathers their parameters, or :data:`FAMILIES` lacks the decoder. Hooks on layers and the last norm are not called.
    """
    layers = [*getattr(decoder, "layers", ())]
    if type(decoder).__module__ not in _MODULES or not hasattr(layers[0], "joined"):
        return None
    if isinstance(layers[0], FSDPModule) or (layers[0].gradient_checkpointing and decoder.training):
        return None
    hidden = decoder.embed_tokens(layout.tokens.unsqueeze(0))
    device, dtype = hidden.device, _product_dtype(hidden)
    if not takes_kernels(device, dtype, layers[0].joined.shape.width):
        return None
    rotary, size = decoder.rotary_emb(hidden, layout.positions), block_size(len(layers))
    with torch.autocast(device.type, enabled=False):
        for first in range(0, len(layers), size):
            hidden = _computed_block(layers[first : first + size], hidden, rotary, layout, tables, dtype)
    norm = decoder.norm  # computed by one kernel; on a CPU its bits are those of transformers' norm
    return torch.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def block_size(layers: int) -> int:
    """Return the largest divisor of ``layers`` up to BLOCK: so many equal layers are one compiled function.

    >>> [block_size(layers) for layers in (28, 30, 31)]
    [4, 3, 1]
    """
    return max(size for size in range(1, BLOCK + 1) if layers % size == 0)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _computed_block(
    layers: Sequence[Any], hidden: Tensor, rotary: Sequence[Tensor], layout: Layout | None, tables: Tables, dtype: Any
) -> Tensor:
    if layout is not None:
        layout.windows.extend([layer.joined.shape.window or None for layer in layers])
    weights = [(layer.joined.text, layer.joined.halves or weights_of(layer)) for layer in layers]
    computed = _compiled(_computed) if layers[0].joined.compiles else _computed
    return computed(weights, hidden, *rotary, tables.flat, [*tables.sizes], dtype)


def weights_of(layer: nn.Module) -> LayerWeights:
    """Return the parameters of a decoder layer, grouped by product."""
    known: dict[str, Any] = dict(layer.named_modules())

    def weights(names: Sequence[str], what: str = "weight") -> tuple[Tensor, ...]:
        tensors = [getattr(known[name], what) for name in names if name in known]
        return tuple(tensor for tensor in tensors if tensor is not None)

    qkv, out, gate_up, down = map(weights, _GROUPS)
    return LayerWeights(qkv, out, gate_up, down, weights(_GROUPS[0], "bias"), weights(_NORMS), weights(_HEAD_NORMS))


class Joined:
    """State of a joined layer: shape, whether it is compiled, and ``halves``, set while in :class:`HalfWeights`."""

    def __init__(self, shape: LayerShape, compiles: bool = True) -> None:
        self.shape, self.compiles = shape, compiles
        self.text = json.dumps(shape)
        self.halves: LayerWeights | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # a deep copy, such as an engine's for decoding, is not compiled
        return Joined, (self.shape, False)


def join_products(layers: Sequence[nn.Module], windows: Sequence[int | None]) -> None:
    """Make ``layers``, in place, call :func:`decoder_layer` for packed half-precision rows on a GPU.

    :func:`fits` must be True for each layer. ``windows``: one sliding window per layer, in tokens; None: no window.
    """
    for layer, window in zip(layers, windows, strict=True):
        changed: Any = layer
        attention, norm = changed.self_attn, changed.input_layernorm
        query, key = (each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj))
        hidden, inner = weights_of(layer).down[0].shape
        numbers = (attention.head_dim, norm.variance_epsilon, attention.scaling, window or 0)
        changed.joined = Joined(LayerShape(hidden, inner, query, key, *numbers))
        changed.forward = partial(_forward, layer)


def fits(layer: nn.Module) -> bool:
    """Return whether ``layer`` is transformers' layer of one of :data:`FAMILIES`, with SiLU, no LoRA, not quantised."""
    modules: dict[str, Any] = dict(layer.named_modules())
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    names = [name for group in _GROUPS for name in group]
    if sorted(linears) != sorted(names) or any(type(module) is not nn.Linear for module in linears.values()):
        return False
    others = [module for name, module in modules.items() if name not in linears and name != "mlp.act_fn"]
    if not isinstance(getattr(modules["mlp"], "act_fn", None), SiLUActivation):
        return False
    if {type(module).__module__ for module in others} - _MODULES:
        return False
    weights = weights_of(layer)
    if {id(tensor) for group in weights for tensor in group} != {id(tensor) for tensor in layer.parameters()}:
        return False
    return len(weights.norms) == 2 and len(weights.qkv_bias) in (0, 3) and len(weights.head_norms) in (0, 2)


class HalfWeights:
    """Context in which joined layers compute with copies of their matrices in ``dtype``, cast once at its start.

    So does ``scorer`` with ``head``, the output embedding. In the context, matrices must not change and their gradients
    must not be reset. A layer with both trained and frozen matrices has no copies. Parameters get their gradients at
    the context's end: products add those of copied matrices to float32 sums, and one kernel per backward pass adds
    those of all other parameters of the layers. Without ``summed``, for a single backward pass, there are no sums.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, summed: bool, scorer: Any, head: Tensor) -> None:
        self.layers, self.dtype, self.summed, self.scorer, self.head = layers, dtype, summed, scorer, head
        small = [parameter for layer in layers for group in weights_of(layer)[4:] for parameter in group]
        self.small = [parameter for parameter in small if parameter.requires_grad]
        self.sums: list[Tensor | None] = [None] * len(self.small)  # of their gradients
        self.hooks: list[Any] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        copies: list[Tensor] = []
        matrices: list[Tensor] = []
        changed: list[tuple[Joined, LayerWeights]] = []
        for layer in self.layers:
            weights, halves, totals = weights_of(layer), [], []
            if len({tensor.requires_grad for group in weights[:4] for tensor in group}) > 1:
                continue
            for group in weights[:4]:
                rows = [len(matrix) for matrix in group]
                empty = group[0].new_empty(sum(rows), group[0].shape[1], dtype=self.dtype)
                half = nn.Parameter(empty, requires_grad=group[0].requires_grad)
                if half.requires_grad and self.summed:
                    total = torch.zeros_like(half, dtype=group[0].dtype)
                    totals.append(nn.Parameter(total, requires_grad=False))  # a parameter: its shape is static
                copies += half.data.split(rows)
                matrices += group
                halves.append((half,))
            copied = dict(zip(LayerWeights._fields, halves))
            changed.append((layer.joined, weights._replace(**copied, totals=tuple(totals))))
        if copies:
            torch._foreach_copy_(copies, matrices)
        self.scorer.half_head = torch.empty_like(self.head, dtype=self.dtype).copy_(self.head)
        for joined, halved in changed:  # last: a failed allocation leaves no layer with empty copies
            joined.halves = halved
        if self.small:
            self.hooks.append(self.small[0].register_post_accumulate_grad_hook(self._after_backward))

    def __exit__(self, *error: object) -> None:
        self._add_small()
        learned = not self.small or any(total is not None for total in self.sums)  # there was a backward pass
        for layer in self.layers:
            halves, layer.joined.halves = layer.joined.halves, None
            totals = [total.data for total in halves.totals if learned] if halves else []
            gradients = totals or [half.grad for (half,) in halves[:4]] if halves else []
            for group, gradient in zip(weights_of(layer), gradients):
                pieces = [] if gradient is None else gradient.to(group[0].dtype).split([*map(len, group)])
                for matrix, own in zip(group, pieces):
                    matrix.grad = own if matrix.grad is None else matrix.grad.add_(own)
        self.scorer.half_head = None
        for parameter, total in zip(self.small, self.sums):
            parameter.grad = total
        self.sums = [None] * len(self.small)
        for hook in self.hooks:
            hook.remove()

    def _after_backward(self, parameter: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._add_small)

    @torch.no_grad()
    def _add_small(self) -> None:
        gradients = [parameter.grad for parameter in self.small]
        pairs = [(total, new) for total, new in zip(self.sums, gradients) if total is not None and new is not None]
        if pairs:
            torch._foreach_add_(*map(list, zip(*pairs)))
        self.sums = [gradient if total is None else total for total, gradient in zip(self.sums, gradients)]
        for parameter in self.small:
            parameter.grad = None
