"""Decoder layers compiled for CUDA: norms, rotary positions, gated activations and residuals as few kernels.

In eager mode these read and write the float32 residual stream many times, which takes as long as the matrix products.
The attention stays as it is, outside: it reads the layout of the packed rows, which is another in every micro-batch.
"""

from __future__ import annotations

import functools
from inspect import signature

import torch
from transformers import AttentionInterface, PreTrainedModel

from sota_grpo.policy.shared_attention import SHARED_ATTENTION, shared_attention

# Compiled once for training, scoring, adapter on and off, each precision; beyond this torch goes back to eager.
VARIANTS = 32
OPTIONS = {"emulate_precision_casts": True}  # round where eager does, so that both give the same log-probs


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers: what transformers itself keeps together when it spreads a model over devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def fuse_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers of ``model`` in place, at their first call: half a minute, for rows of any length.

    One compilation serves all layers. Copies of the model (``copy.deepcopy``) are not compiled. Results differ from
    eager mode by rounding.
    """
    _leave_attention_out()
    limit: dict[str, int] = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        limit = {"recompile_limit": VARIANTS}  # in any thread; the setting below holds in this one only
    else:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, options=OPTIONS, **limit)


@functools.cache
def _leave_attention_out() -> None:
    AttentionInterface.register(SHARED_ATTENTION, torch.compiler.disable(shared_attention))
