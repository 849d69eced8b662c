"""Export of the trained policy as a plain transformers folder."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from sota_grpo.files import atomic_folder
from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.packed import base_model


def save_hf(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: str | os.PathLike[str]) -> Path:
    """Write weights (LoRA merged, safetensors), configuration, tokenizer and chat template to ``directory``.

    ``AutoModelForCausalLM.from_pretrained(directory)`` and vLLM load it. The folder is written beside the old one
    and takes its place when it is complete. Of a sharded model every rank takes part, and rank 0 writes.

    Args:
        model: a causal language model, with or without LoRA; not changed.
        tokenizer: the tokenizer the model was trained with.
        directory: the folder; an earlier export there is replaced.

    Raises:
        OSError: the file system refused; an earlier export is still there.
        ValueError: ``directory`` holds something that is not an export (no ``config.json``), so is not replaced.
    """
    target = Path(directory)
    weights = dict(engine_weights(model))  # before anything can fail: other ranks may be taking part
    if not weights:  # another rank's
        return target
    if target.exists() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ValueError(f"{target} is not empty and holds no exported model; name another folder or empty it")
    with atomic_folder(target) as partial:
        base_model(model).save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
    return target
