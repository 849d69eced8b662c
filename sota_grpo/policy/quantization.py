"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): the frozen weights under an adapter in 4 bits, by bitsandbytes.

The policy is then the model of the *dequantised* weights: the learner computes with them, layer by layer, and engines
and exports are given them with the adapter merged. bitsandbytes is imported when a model is quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sota_grpo.errors import UserError
from sota_grpo.policy.causal import decoder_layers
from sota_grpo.policy.optimizers import require_installed

BLOCK = 64  # weights that share a scale


def quantize(model: PreTrainedModel, kind: str, device: torch.device | None = None) -> PreTrainedModel:
    """Keep every linear layer inside the decoder layers in 4 bits, in place; the rest of the model as it is.

    A block of 64 weights shares a scale, which is kept in 8 bits itself ("double quantisation"): 4.13 bits a weight.
    Products are computed in the dtype that the weights had.

    A row has to be whole blocks: bitsandbytes 0.50 reads other rows with a wrong scale on a CPU.

    Args:
        kind: ``nf4``, whose 16 values are quantiles of a normal distribution, or ``fp4``.
        device: where the model goes, one layer at a time; None: it stays.

    Raises:
        UserError: bitsandbytes is not installed, or a layer has other rows.
    """
    require_installed("bitsandbytes", f"model.quantization={kind}", "model.quantization=null")
    for layer in decoder_layers(model):
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, _in_4_bits(module, kind, device))
    return model if device is None else model.to(device)  # type: ignore[arg-type]


def _in_4_bits(module: nn.Linear, kind: str, device: torch.device | None) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    if module.in_features % BLOCK:
        raise UserError(
            f"model.quantization={kind} keeps a scale for each {BLOCK} weights of a row, and this model has rows of "
            f"{module.in_features}; use model.quantization=null."
        )
    weight = module.weight.detach()
    layer: Any = Linear4bit(
        module.in_features, module.out_features, module.bias is not None, weight.dtype, quant_type=kind, device="meta"
    )
    layer.weight = Params4bit(weight, requires_grad=False, quant_type=kind, module=layer)
    layer.bias = module.bias
    layer.support_avx512bf16_for_cpu = False  # there it would compute otherwise without gradient than with it
    return layer.to(device or weight.device).train(module.training)


def is_quantized(model: nn.Module) -> bool:
    """Whether some weights of ``model`` are in 4 bits."""
    return any(getattr(parameter, "quant_state", None) is not None for parameter in model.parameters())


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that a layer computes with; a weight that is not in 4 bits is itself.

    >>> dequantized(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)
