"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685, eq. 3): ``W x + (alpha / r) B A x`` with ``B = 0`` at the start.

Also QLoRA (Dettmers et al. 2023, arXiv:2305.14314): ``W`` in 4 bits, by bitsandbytes. The learner computes with
*dequantised* weights, layer by layer. Engines load merged weights; merging does not change the training weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sota_grpo.errors import UserError
from sota_grpo.policy.causal import base_model, decoder_layers
from sota_grpo.policy.optimizers import require_installed
from sota_grpo.policy.sharding import divided, gather, replicated
from sota_grpo.policy.tensor_files import Piece
from sota_grpo.policy.weight_pack import WeightPack, padded, rounded, rounded_dtype

if TYPE_CHECKING:  # peft imports bitsandbytes, which takes a second: only for runs with an adapter
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

BLOCK = 64  # weights in 4 bits that share a scale


def add_lora(
    model: PreTrainedModel, *, r: int, alpha: int, dropout: float = 0.0, target_modules: Sequence[str] | None = None
) -> PeftModel:
    """Freeze ``model`` and add a trainable LoRA adapter of rank ``r`` and scale ``alpha / r`` to its linear layers.

    The LM head and the embedding get no adapter, because log-probabilities read the head's weight directly.

    Args:
        model: a causal language model; its layers are wrapped in place.
        dropout: probability, in [0, 1), of dropping an input of ``A`` in training mode.
        target_modules: last name components of the layers that get an adapter, such as ``q_proj``; None: all.

    Raises:
        ValueError: ``r`` is below 1, or ``dropout`` is out of range.
        UserError: ``target_modules`` is empty, or a name in it is no linear layer or the LM head.
    """
    if r < 1:
        raise ValueError(f"the LoRA rank is {r}; it must be at least 1")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"the LoRA dropout is {dropout}; it must be in [0, 1)")
    from peft import LoraConfig, get_peft_model

    if target_modules is not None:
        head = model.get_output_embeddings()
        layers = ((name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))
        linear = dict.fromkeys(name.rpartition(".")[2] for name, module in layers if module is not head)
        if not target_modules:
            raise UserError(
                f"train_model.lora.target_modules=[] names no layer; use some of {', '.join(linear)}, or null for all."
            )
        if missing := [name for name in target_modules if name not in linear]:
            raise UserError(
                f"train_model.lora.target_modules has {', '.join(missing)}, which cannot have an adapter; use some of "
                f"{', '.join(linear)}."
            )
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if target_modules is None else list(target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    in_4_bits: Any = any(getattr(parameter, "quant_state", None) is not None for parameter in model.parameters())
    model.is_loaded_in_4bit = in_4_bits  # peft reads it to choose 4-bit layers
    return get_peft_model(model, config)


def quantize(model: PreTrainedModel, kind: str, device: torch.device | None = None) -> PreTrainedModel:
    """Quantise every linear layer inside the decoder layers to 4 bits, in place; return ``model``.

    64 weights share a scale, which is itself stored in 8 bits: 4.13 bits a weight. Products are computed in the dtype
    that the weights had. UserError if bitsandbytes is not installed, or if a layer's number of inputs is not a multiple
    of 64, for which bitsandbytes 0.50 uses wrong scales on a CPU.

    Args:
        kind: ``nf4``, whose 16 values are quantiles of a normal distribution, or ``fp4``.
        device: device to which the model is moved, one layer at a time; None: it is not moved.
    """
    require_installed("bitsandbytes", f"model.quantization={kind}", "model.quantization=null")
    from bitsandbytes.nn import Linear4bit, Params4bit

    for layer in decoder_layers(model):
        for name, module in list(layer.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            width, weight = module.in_features, module.weight.detach()
            if width % BLOCK:
                raise UserError(
                    f"model.quantization={kind} stores a scale for each {BLOCK} weights of a row, and this model has "
                    f"rows of {width}, which is no multiple of {BLOCK}; use model.quantization=null."
                )
            options: Any = {"quant_type": kind, "device": "meta"}
            small: Any = Linear4bit(width, module.out_features, module.bias is not None, weight.dtype, **options)
            small.weight = Params4bit(weight, requires_grad=False, quant_type=kind, module=small)
            small.bias = module.bias
            small.support_avx512bf16_for_cpu = False  # else results with and without gradient would differ
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, small.to(device or weight.device).train(module.training))
    return model if device is None else model.to(device)  # type: ignore[arg-type]


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as the layer computes with it: dequantised if it is in 4 bits, else as is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def engine_weights(
    model: nn.Module,
    *,
    base: bool = True,
    merged: bool = True,
    dtype: torch.dtype | None = None,
    names: Set[str] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, weight)`` for a rollout engine: transformers' names, LoRA merged, detached.

    Do not write into the weights: they may be the model's memory. A merged weight is ``W + (alpha / r) B A``, computed
    in float32 and rounded to the dtype of ``W``. A tied ``lm_head.weight`` is yielded too, because engines that process
    weights while loading would otherwise keep the old head. For a sharded model every rank must exhaust the iterator;
    only rank 0 receives weights (on CPU).

    Args:
        base: False: leave out parameters that are frozen and have no adapter.
        merged: False: yield the base weights without the adapter, for :meth:`WeightPack.merged`.
        dtype: the engine's dtype, to which wider matrices are cast before they are gathered or moved; None: no cast.
        names: names of the weights to yield; None: all. ``progress`` is called for each.
    """
    inner = base_model(model)
    uses = Counter(id(value) for value in inner.state_dict(keep_vars=True).values())
    tied: dict[int, torch.Tensor | None] = {}  # gathered once, by all ranks alike
    for name, value, layer in _parts(inner, base):
        if names is not None and name not in names:
            continue
        weight = dequantized(value) if layer is None or not merged else _merged(layer, value)
        whole = tied[id(value)] if id(value) in tied else gather(rounded(weight, dtype))
        if uses[id(value)] > 1:
            tied[id(value)] = whole
        progress()
        if whole is not None:
            yield name, whole.detach()


def packed_weights(
    model: nn.Module,
    *,
    base: bool = True,
    dtype: torch.dtype | None = None,
    names: Set[str] | None = None,
    **options: Any,
) -> WeightPack:
    """Copy the weights of :func:`engine_weights`, which has the same arguments, into a new :class:`WeightPack`.

    If the model is sharded, all ranks must call this, and only rank 0's pack has weights.
    """
    values = (value for name, value, _ in _parts(base_model(model), base) if names is None or name in names)
    room = sum(_room(value, dtype) for value in values)
    return WeightPack.of(engine_weights(model, base=base, dtype=dtype, names=names, **options), room=room)


def _room(value: torch.Tensor, dtype: torch.dtype | None) -> int:
    state = getattr(value, "quant_state", None)  # of a 4-bit weight, whose tensor has the shape of its bytes
    if state is not None:
        value = torch.empty(state.shape, dtype=state.dtype, device="meta")
    return padded(value.numel() * rounded_dtype(value, dtype).itemsize)


def weight_slices(
    model: nn.Module, *, base: bool = True, dtype: torch.dtype | None = None, most_bytes: int
) -> list[set[str]]:
    """Split :func:`engine_weights`' names into sets of up to ``most_bytes``, or of one weight; tied ones together."""
    slices: list[set[str]] = [set()]
    homes: dict[int, set[str]] = {}
    room = 0
    for name, value, _ in _parts(base_model(model), base):
        if id(value) not in homes:
            if slices[-1] and room + _room(value, dtype) > most_bytes:
                slices.append(set())
                room = 0
            room += _room(value, dtype)
            homes[id(value)] = slices[-1]
        homes[id(value)].add(name)
    return slices


def engine_layout(model: nn.Module) -> dict[str, Piece]:
    """Return dtype and shape of each weight of :func:`engine_weights` by name; a tied weight has its first name."""
    first: dict[int, tuple[str, Piece]] = {}
    for name, value, _ in _parts(base_model(model), base=True):
        if id(value) not in first:
            first[id(value)] = name, Piece.of(dequantized(value))
    return dict(first.values())


def _is_adapted(module: nn.Module) -> TypeGuard[LoraLayer]:
    """Return whether peft has added LoRA matrices to this layer."""
    return hasattr(module, "lora_A") and hasattr(module, "active_adapters")


def _parts(inner: PreTrainedModel, base: bool) -> Iterator[tuple[str, torch.Tensor, LoraLayer | None]]:
    """Yield (name, this rank's tensor, its LoRA layer to be merged or None) for :func:`engine_weights`."""
    adapted = {name: module for name, module in inner.named_modules() if _is_adapted(module)}
    trainable = {name for name, value in inner.named_parameters(remove_duplicate=False) if value.requires_grad}
    for name, value in inner.state_dict(keep_vars=True).items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        owner, inside_adapter, leaf = name.partition(".base_layer.")
        if not inside_adapter:
            if base or name in trainable:
                yield name, value, None
        elif leaf == "weight":
            yield f"{owner}.{leaf}", value, adapted[owner]
        elif base and not leaf.startswith("weight."):  # that is quantisation state
            yield f"{owner}.{leaf}", value, None


@torch.no_grad()
def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    weight = dequantized(weight)
    merged = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for adapter in layer.active_adapters:
        if isinstance(weight, DTensor) and weight.device_mesh.ndim > 1:  # every rank gathers both factors for a moment
            first, second = (replicated(factors[adapter].weight) for factors in (layer.lora_A, layer.lora_B))
            delta = divided((second @ first) * layer.scaling[adapter], weight)
        else:
            delta = layer.get_delta_weight(adapter)
        merged = merged + delta.to(merged.dtype)
    return merged.to(weight.dtype)


def adapter_pack(model: nn.Module) -> WeightPack:
    """Return the LoRA adapter of ``model`` without the base weights; ValueError unless it has one active adapter.

    If the model is sharded, all ranks must call this, and only rank 0's pack has tensors.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    scales: dict[str, float] = {}
    for name, module in base_model(model).named_modules():
        if _is_adapted(module):
            (adapter,) = module.active_adapters
            scales[f"{name}.weight"] = float(module.scaling[adapter])
            factors: list[Any] = [module.lora_A[adapter], module.lora_B[adapter]]
            first, second = (gather(factor.weight) for factor in factors)
            if first is not None and second is not None:
                if getattr(module, "fan_in_fan_out", False):  # its weight is stored transposed: (B A)^T = A^T B^T
                    first, second = second.T, first.T
                tensors += [(f"{name}.weight:A", first), (f"{name}.weight:B", second)]
    if not scales:
        raise ValueError(f"{type(model).__name__} has no adapter; push its weights instead")
    return replace(WeightPack.of(tensors), scales=scales)
