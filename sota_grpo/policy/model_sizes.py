"""Models of ``model.size``, and a table of the architectures of common public models.

The table copies each model's ``config.json``, so that ``sota-grpo estimate`` needs neither the hub nor weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError

_MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "4B": "Qwen/Qwen3-4B",  # Qwen2.5 has no model of this size
}
SIZES = tuple(_MODELS)
NO_MODEL_FOLDER = (
    "model.name={name} is not a folder with a config.json; give the folder of a saved model, a hub id such as "
    "Qwen/Qwen2.5-3B, or model.name=tiny"
)


def rotary_limit(config: Any) -> int | None:
    """Return up to which row length, in tokens, rotary positions do not depend on other rows; None: any length.

    transformers chooses the frequencies of ``longrope`` (Phi-3, Phi-4-mini) and ``dynamic`` by the longest row of a
    batch: if that is longer, they change for all of its rows. ``config`` is that of the decoder.

    >>> from types import SimpleNamespace
    >>> long = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    >>> rotary_limit(SimpleNamespace(rope_parameters=long, max_position_embeddings=131072))
    4096
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    limits = {
        "longrope": lambda rope: rope.get("original_max_position_embeddings"),
        "dynamic": lambda rope: getattr(config, "max_position_embeddings", None),
    }
    each = [ropes, *(rope for rope in ropes.values() if isinstance(rope, Mapping))]  # or one for each type of layer
    found = [limits[kind](rope) for rope in each if (kind := rope.get("rope_type")) in limits]
    return min(filter(None, found), default=None)


@dataclass(frozen=True)
class Architecture:
    """Sizes and parameter counts of a dense decoder with gated MLPs and RMS norms, for estimates of its memory.

    >>> qwen = architecture_of("Qwen/Qwen2.5-0.5B-Instruct")
    >>> qwen.parameters, qwen.head_weights
    (494032768, 136134656)
    """

    hidden: int  # width of the residual stream
    layers: int
    heads: int  # query heads of a layer
    kv_heads: int  # key and value heads of a layer
    head_dim: int
    intermediate: int  # width of the MLP
    vocab: int  # rows of the embedding
    tied: bool  # head and embedding are one matrix
    context: int  # maximum number of positions
    qkv_bias: bool = False  # queries, keys and values have a bias (Qwen2)
    qk_norm: bool = False  # queries and keys are normalized per head (Qwen3)
    other: int = 0  # further parameters, spread over the layers

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one decoder layer: q, k, v, o, gate, up, down."""
        wide, narrow = self.query_width, self.kv_width
        attention = ((self.hidden, wide), (self.hidden, narrow), (self.hidden, narrow), (wide, self.hidden))
        mlp = ((self.hidden, self.intermediate), (self.hidden, self.intermediate), (self.intermediate, self.hidden))
        return attention + mlp

    @property
    def layer_matrices(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linear_layers)

    @property
    def layer_parameters(self) -> int:
        biases = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matrices + biases + norms + self.other // self.layers

    @property
    def head_weights(self) -> int:
        """Number of weights of the head; the embedding has as many."""
        return self.vocab * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embedding and head together; tied ones count once."""
        return self.head_weights * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Number of all parameters; tied ones count once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of a LoRA adapter of ``rank`` on every linear layer except the head."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linear_layers)


# hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, context
_SHAPES = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 64, 4864, 151_936, True, 32_768),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 128, 8960, 151_936, True, 32_768),
    "qwen2.5-3b": (2048, 36, 16, 2, 128, 11_008, 151_936, True, 32_768),
    "qwen2.5-7b": (3584, 28, 28, 4, 128, 18_944, 152_064, False, 32_768),
    "qwen2.5-14b": (5120, 48, 40, 8, 128, 13_824, 152_064, False, 32_768),
    "qwen2.5-32b": (5120, 64, 40, 8, 128, 27_648, 152_064, False, 32_768),
    "qwen2.5-72b": (8192, 80, 64, 8, 128, 29_568, 152_064, False, 32_768),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151_936, True, 40_960),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151_936, True, 40_960),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151_936, True, 40_960),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12_288, 151_936, False, 40_960),
    "qwen3-14b": (5120, 40, 40, 8, 128, 17_408, 151_936, False, 40_960),
    "llama-2-7b": (4096, 32, 32, 32, 128, 11_008, 32_000, False, 4096),
    "llama-2-13b": (5120, 40, 40, 40, 128, 13_824, 32_000, False, 4096),
    "llama-3-8b": (4096, 32, 32, 8, 128, 14_336, 128_256, False, 8192),
    "llama-3.1-8b": (4096, 32, 32, 8, 128, 14_336, 128_256, False, 131_072),
    "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128_256, True, 131_072),
    "llama-3.2-3b": (3072, 28, 24, 8, 128, 8192, 128_256, True, 131_072),
}
_VARIANT = re.compile(r"(^meta-(?=llama))|(-(instruct|base|chat|hf|it))+$")  # variants of one architecture


def architecture_of(name: str) -> Architecture | None:
    """Return the architecture of a hub model, or of its -Instruct and similar variants; None if the table lacks it.

    >>> architecture_of("meta-llama/Llama-2-7b-chat-hf").parameters
    6738415616
    """
    name = _VARIANT.sub("", name.rpartition("/")[2].lower())
    shape = _SHAPES.get(re.sub(r"^(qwen2\.5)-(math|coder)", r"\1", name))
    if shape is None:
        return None
    known = Architecture(*shape, qkv_bias=name.startswith("qwen2"), qk_norm=name.startswith("qwen3"))
    return replace(known, context=4096) if "-math-" in name else known


def model_of_size(size: str) -> str:
    """Return the hub id of the model with about ``size`` parameters; UserError if ``size`` is not in ``SIZES``."""
    name = _MODELS.get(size)
    if name is None:
        raise UserError(f"model.size={size} is not one of {', '.join(SIZES)}; for another model set model.name.")
    return name


def missing_folder(name: str, option: str = "model.name") -> str | None:
    """Return an error sentence about ``option`` if ``name`` is a path without a saved model; else None."""
    there = not is_a_path(name) or (Path(name).expanduser() / "config.json").is_file()
    return None if there else NO_MODEL_FOLDER.replace("model.name", option).format(name=name)


def is_on_the_hub(name: str) -> bool:
    """Return whether ``name`` looks like a hub id, ``owner/model``, and is not a local path."""
    return "/" in name and not is_a_path(name)


def is_a_path(name: str) -> bool:
    """Return whether ``name`` is a path and not a hub id; a plain name such as ``tiny`` is neither."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and Path(name).exists())


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def require_dense(name: str, config: Mapping[str, Any]) -> None:
    """Raise UserError if a model's ``config.json`` describes a mixture of experts.

    Engine and learner choose experts independently, and rounding makes them differ. Training needs the engine's routing
    replayed in the learner (R3, Ma et al. 2025, arXiv:2510.11370) and a load-balancing loss (Fedus et al. 2021,
    arXiv:2101.03961, eq. 4).
    """
    for key, value in config.items():
        if isinstance(value, Mapping):  # the text config of a multimodal model
            require_dense(name, value)
        elif key in _EXPERTS and value not in (None, 0, 1):
            raise UserError(
                f"model.name={name} is a mixture of experts ({key}={value}), which needs the engine's routing "
                "replayed in the learner (R3) and a load-balancing loss: not supported, so use a dense model."
            )
