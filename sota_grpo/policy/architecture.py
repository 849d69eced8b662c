"""The shape of a model without its weights: from the table of known ones, or from a ``config.json``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sota_grpo import model_sizes
from sota_grpo.model_sizes import Architecture
from sota_grpo.policy.load import MODEL_LOCK, from_pretrained, resolve_model_path


def find_architecture(name: str, *, trust_remote_code: bool = False) -> tuple[Architecture, str]:
    """The shape of the model called ``name``, and where it was found.

    A folder is asked first; a name on the hub is looked up in :mod:`sota_grpo.model_sizes`, whose facts are those of
    the hub, and the hub itself is asked for the rest. No weight is read.

    Raises:
        ModelNotFoundError: no such folder, or a hub that does not answer about a model that is not in the table.

    >>> tiny, place = find_architecture("tiny")
    >>> tiny.hidden, tiny.layers, tiny.parameters, place
    (128, 4, 870528, 'config.json of tiny')
    >>> find_architecture("Qwen/Qwen2.5-3B-Instruct")[1]
    'table of public models'
    """
    known = model_sizes.architecture_of(name)
    if known is not None and not Path(resolve_model_path(name)).is_dir():
        return known, "table of public models"
    config = from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trust_remote_code)
    return architecture_from(config, trust_remote_code=trust_remote_code), f"config.json of {name}"


def architecture_from(config: Any, *, trust_remote_code: bool = False) -> Architecture:
    """The shape that a transformers config describes; its parameters are counted on the meta device.

    What the numbers of an :class:`~sota_grpo.model_sizes.Architecture` do not account for (experts, further biases) is
    its ``other``.

    >>> from transformers import Qwen2Config
    >>> shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    >>> found = architecture_from(Qwen2Config(intermediate_size=96, vocab_size=100, **shape))
    >>> found.head_dim, found.qkv_bias, found.tied, found.other
    (16, True, False, 0)
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    with MODEL_LOCK, torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = {name.rpartition("layers.0.")[2]: weight.shape for name, weight in model.named_parameters()}
    found = Architecture(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocab=text.vocab_size,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        context=getattr(text, "max_position_embeddings", None) or 2048,
        qkv_bias="self_attn.q_proj.bias" in names,
        qk_norm="self_attn.q_norm.weight" in names,
    )
    counted = sum(weight.numel() for weight in model.parameters())
    return replace(found, other=counted - found.parameters)
