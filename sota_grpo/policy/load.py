"""Causal language models with their tokenizers: from a folder, the hub, ``tiny`` or ``smollm2``, and to a folder."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sota_grpo.errors import UserError
from sota_grpo.files import atomic_folder
from sota_grpo.policy import model_sizes
from sota_grpo.policy.causal import base_model
from sota_grpo.policy.end_tokens import end_token_ids
from sota_grpo.policy.lora import engine_layout, engine_weights
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.smollm2 import SMOLLM2, smollm2_folder
from sota_grpo.policy.tensor_files import write_model
from sota_grpo.policy.trainable import require_causal
from sota_grpo.text import first_line, sentence

DType = Literal["float32", "bfloat16", "float16"]
TINY = "tiny"
_WEIGHT_FILES = ("*.safetensors", "*.bin")


class ModelNotFoundError(UserError, FileNotFoundError):
    """The model is neither a folder here nor reachable on the hub; the message says what to do."""


def resolve_model_path(name: str) -> str:
    """Return what transformers can load: the packaged folder for ``"tiny"``, a local folder, or a hub id as it is.

    ``"smollm2"`` is a local folder too, which its first use makes (:mod:`sota_grpo.policy.smollm2`).

    Raises:
        ModelNotFoundError: ``name`` is written as a path and no model folder is there.
        UserError: ``smollm2`` is not installed, or cannot be converted.

    >>> resolve_model_path("Qwen/Qwen2.5-3B")
    'Qwen/Qwen2.5-3B'
    >>> resolve_model_path("./no/such/folder")
    Traceback (most recent call last):
    ...
    sota_grpo.policy.load.ModelNotFoundError: model.name=./no/such/folder is not a folder with a config.json; give the \
folder of a saved model, a hub id such as Qwen/Qwen2.5-3B, or model.name=tiny
    """
    if name == TINY:
        folder = Path(str(files("sota_grpo"))) / "assets" / TINY
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"the packaged policy is missing from {folder}; reinstall sota-grpo")
        return str(folder)
    if name == SMOLLM2:
        return str(smollm2_folder())
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists() or model_sizes.is_a_path(name):
        raise ModelNotFoundError(model_sizes.NO_MODEL_FOLDER.format(name=name))
    return name


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``name``; without a padding token it pads with its end-of-sequence token.

    It knows all end tokens of the model (:func:`sota_grpo.policy.end_tokens.end_token_ids`).

    Args:
        name: as in :func:`resolve_model_path`.
        trust_remote_code: run Python code that the model's repository brings along.

    Raises:
        ModelNotFoundError: missing folder, or a hub that does not answer.
    """
    tokenizer = from_pretrained(AutoTokenizer.from_pretrained, name, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        # Padding is told by masks, never by ids, so sharing the id with EOS is harmless.
        tokenizer.pad_token = tokenizer.eos_token
    end_token_ids(tokenizer, _generation_config(name, trust_remote_code))
    return tokenizer


def _generation_config(name: str, trust_remote_code: bool) -> GenerationConfig | PretrainedConfig:
    """The model's own, or what its config says where it has none."""
    path = resolve_model_path(name)
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # not every model has one
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()


#: transformers replaces torch's initialisers while it builds a model, for all threads: one model at a time.
MODEL_LOCK = threading.Lock()


def load_model(
    name: str,
    *,
    dtype: DType = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    device: torch.device | str = "cpu",
    weights: bool = True,
    load_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a causal language model for training: every dropout at 0, in training mode, on ``device``.

    The probability ratio of GRPO compares two evaluations of the same weights, so the model must be deterministic.
    transformers checkpoints activations in training mode only; with every dropout rate at 0 that mode computes the
    same function as evaluation mode, and both wishes hold.

    Args:
        name: as in :func:`resolve_model_path`.
        dtype: of the parameters.
        attn_implementation: as transformers names it (``"sdpa"``, ``"eager"``, ...); None takes its default.
        trust_remote_code: run Python code that the model's repository brings along.
        gradient_checkpointing: keep one activation per decoder layer and recompute the rest in the backward pass.
        device: where the parameters go.
        weights: False reads none: every number of a parameter is the same one, which takes no memory, for a rank that
            is sent its part of them (:func:`sota_grpo.policy.sharding.shard`).
        load_kwargs: further arguments of ``from_pretrained``, where weights are read.

    Raises:
        UserError: ``load_kwargs`` has one that the model does not take; weights that are missing or not finite; or a
            model that cannot checkpoint activations.
        ModelNotFoundError: missing folder, damaged folder, or a hub that does not answer.
        ValueError: an unknown ``dtype``.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype is {dtype!r}, but the parameters can be one of {', '.join(get_args(DType))}")
    config = from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=trust_remote_code)
    if weights:
        _require_stored(config, name)
    stored = config.dtype, silence_dropout(config)
    options: dict[str, Any] = {"config": config, "dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with MODEL_LOCK:
        if weights:
            model = _loaded(name, options, load_kwargs or {})
        else:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(**options)
            _fill(model)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.stored_dtype, model.stored_dropout = stored  # read by save_hf
    return model.to(device).train()


def _require_stored(config: PretrainedConfig, name: str) -> None:
    """Check that a folder's weight files could hold the model of its ``config.json``: what they lack would be made.

    Raises:
        ModelNotFoundError: even with one bit per parameter they could not.
    """
    folder, text = Path(resolve_model_path(name)), config.get_text_config()
    shape = [getattr(text, each, None) or 0 for each in ("vocab_size", "intermediate_size", "num_hidden_layers")]
    width = getattr(text, "hidden_size", None) or 0
    stored = sum(path.stat().st_size for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    for described in (*(size * width for size in shape), width * width):
        if 0 < 8 * stored < described:
            raise ModelNotFoundError(
                f"model.name={name}: its config.json describes a model with a tensor of {described} elements, and its "
                f"weight files have {stored} bytes together; one of them is damaged, or another model's."
            )


def _loaded(name: str, options: dict[str, Any], load_kwargs: Mapping[str, Any]) -> Any:
    """The model of the folder's weights alone, all of them numbers: transformers draws those that the files lack.

    Raises:
        UserError: ``load_kwargs`` has an argument that the model does not take, or weights are missing or not finite.
        ModelNotFoundError: as :func:`from_pretrained`.
    """
    options |= {**load_kwargs, "output_loading_info": True}
    try:
        model, info = from_pretrained(AutoModelForCausalLM.from_pretrained, name, **options)
    except ModelNotFoundError as error:
        if not (load_kwargs and isinstance(error.__cause__, TypeError)):
            raise
        raise UserError(f"model.load_kwargs={dict(load_kwargs)} does not fit this model: {error.__cause__}.") from error
    if missing := sorted(info["missing_keys"] & dict(model.named_parameters()).keys()):
        raise UserError(
            f"model.name={name}: its files lack {len(missing)} of the weights of {type(model).__name__}, for example "
            f"{missing[0]}; give the folder of a whole causal language model."
        )
    for weight, value in model.named_parameters():
        if value.is_floating_point() and not all(bound.isfinite() for bound in value.detach().aminmax()):
            raise UserError(
                f"model.name={name}: its weight {weight} is not finite; its files are damaged, replace them."
            )
    return model


def _fill(model: nn.Module) -> None:
    """Replace tensors on the meta device by ones of the same shape that repeat one number; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    for owner in model.modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    if id(value) not in made:
                        one = torch.tensor(0.01).to(value.dtype).expand(value.shape)
                        made[id(value)] = nn.Parameter(one) if isinstance(value, nn.Parameter) else one
                    table[name] = made[id(value)]  # type: ignore[assignment]


def silence_dropout(config: PretrainedConfig) -> list[dict[str, float]]:
    """Set every dropout, layer-drop and router-jitter rate of the configuration to 0, nested text part included.

    Returns:
        What they were, for :func:`_set_rates`.

    >>> from transformers import GPT2Config
    >>> config = GPT2Config(attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3)
    >>> rates = silence_dropout(config)
    >>> config.attn_pdrop, config.resid_pdrop, config.embd_pdrop, rates[0]["resid_pdrop"]
    (0.0, 0.0, 0.0, 0.2)
    """
    words = ("drop", "jitter")
    rates = [
        {
            key: rate
            for key, rate in vars(each).items()
            if isinstance(rate, float) and any(word in key for word in words)
        }
        for each in _parts(config)
    ]
    _set_rates(config, [dict.fromkeys(own, 0.0) for own in rates])
    return rates


def _set_rates(config: PretrainedConfig, rates: Sequence[Mapping[str, float]]) -> None:
    for each, own in zip(_parts(config), rates):
        vars(each).update(own)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    return list({id(each): each for each in (config, config.get_text_config())}.values())


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Switch on non-reentrant activation checkpointing; it acts while the model is in training mode.

    Raises:
        UserError: the model has no layer that supports it, so memory would silently not fall.
    """
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no layer that supports gradient checkpointing; "
            "set train_model.gradient_checkpointing=false."
        )


def from_pretrained(load: Callable[..., Any], name: str, **options: Any) -> Any:
    """What ``load`` makes of the model called ``name``: the caller's mistakes and the hub's silence as one sentence.

    Raises:
        ModelNotFoundError: missing folder, damaged folder, or a hub that does not answer.
    """
    path = resolve_model_path(name)
    try:
        return load(path, **options)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # not there, damaged, or unknown to this transformers: its readers raise anything
        if "trust_remote_code" in str(error):
            raise UserError(
                f"model.name={name} brings Python code of its own; read it, and set model.trust_remote_code=true."
            ) from error
        said = first_line(error) if isinstance(error, OSError) else sentence(error)
        raise ModelNotFoundError(
            f"model.name={name} could not be loaded from {path} ({said}); give the folder of a saved model, check the "
            "network and the hub id, or use model.name=tiny"
        ) from error


def find_architecture(name: str, *, trust_remote_code: bool = False) -> tuple[Architecture, str]:
    """The shape of the model called ``name``, and where it was found.

    A folder is asked first; a name on the hub is looked up in :mod:`sota_grpo.policy.model_sizes`, whose facts are
    those of the hub, and the hub itself is asked for the rest. No weight is read.

    Raises:
        ModelNotFoundError: no such folder, or a hub that does not answer about a model that is not in the table.
        UserError: it is no causal language model, or its weights are quantised.

    >>> tiny, place = find_architecture("tiny")
    >>> tiny.hidden, tiny.layers, tiny.parameters, place
    (128, 4, 870528, 'config.json of tiny')
    >>> find_architecture("Qwen/Qwen2.5-3B-Instruct")[1]
    'table of public models'
    """
    known = model_sizes.architecture_of(name)
    if known is not None and not Path(resolve_model_path(name)).is_dir():
        return known, "table of public models"
    return from_pretrained(_described, name, trust_remote_code=trust_remote_code), f"config.json of {name}"


def _described(path: str, trust_remote_code: bool) -> Architecture:
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    require_causal(path, config)
    return architecture_from(config, trust_remote_code=trust_remote_code)


def architecture_from(config: Any, *, trust_remote_code: bool = False) -> Architecture:
    """The shape that a transformers config describes; its parameters are counted on the meta device.

    What the numbers of an :class:`~sota_grpo.policy.model_sizes.Architecture` do not account for (experts, further
    biases) is its ``other``.

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
    architecture = Architecture(
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
    return replace(architecture, other=counted - architecture.parameters)


def save_hf(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | os.PathLike[str],
    progress: Callable[[], object] = lambda: None,
    *,
    dtype: DType | None = None,
) -> Path:
    """Write weights (LoRA merged, safetensors), configuration, tokenizer and chat template to ``directory``.

    ``AutoModelForCausalLM.from_pretrained(directory)`` and vLLM load it. The folder is written beside the old one
    and takes its place when it is complete. Of a sharded model every rank takes part, and rank 0 writes each weight as
    it is gathered. Where transformers stores a model in another form than it computes with, it writes that itself, and
    rank 0 has all weights at once.

    Args:
        model: a causal language model, with or without LoRA; not changed.
        tokenizer: the tokenizer the model was trained with.
        directory: the folder; an earlier export there is replaced.
        progress: called for every weight.
        dtype: of the weights as written; None: that of the files that :func:`load_model` read, or the model's own if
            that is narrower.

    Raises:
        OSError: the file system refused; an earlier export is still there.
        ValueError: ``directory`` holds something that is not an export (no ``config.json``), so is not replaced.
    """
    inner = base_model(model)
    written = getattr(torch, dtype) if dtype else _export_dtype(inner)
    target, weights = Path(directory), engine_weights(model, progress=progress)
    first = next(weights, None)
    if first is None:  # another rank's
        return target
    try:
        if target.exists() and any(target.iterdir()) and not (target / "config.json").is_file():
            raise ValueError(f"{target} is not empty and holds no exported model; name another folder or empty it")
        own, inner.generation_config = inner.generation_config, GenerationConfig()  # some that it reads are not written
        dropout = getattr(inner, "stored_dropout", [])
        _set_rates(inner.config, dropout)
        try:
            with atomic_folder(target) as partial:
                _write_weights(inner, partial, chain([first], weights), written)
                tokenizer.save_pretrained(partial)
                _ending(own, tokenizer).to_json_file(partial / "generation_config.json")
        finally:
            inner.generation_config = own
            _set_rates(inner.config, [dict.fromkeys(rates, 0.0) for rates in dropout])
    finally:
        for _ in weights:  # whatever failed: the other ranks are taking part
            pass
    return target


def _ending(own: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The model's own, with every end token of training behind its own."""
    made = copy.deepcopy(own) or GenerationConfig()
    named = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    ends = [each for each in dict.fromkeys([*named, *end_token_ids(tokenizer, made)]) if each is not None]
    made.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return made


def _export_dtype(model: PreTrainedModel) -> torch.dtype:
    stored: torch.dtype | None = getattr(model, "stored_dtype", None)
    return stored if stored is not None and stored.itemsize < model.dtype.itemsize else model.dtype


def _write_weights(
    model: PreTrainedModel, folder: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    def as_written(own: torch.dtype) -> torch.dtype:
        return dtype if own == model.dtype else own  # what a model keeps in float32 on purpose stays so

    weights = ((name, weight.to(as_written(weight.dtype))) for name, weight in weights)
    if getattr(model, "_weight_conversions", None) != []:  # transformers' own; None: it was not loaded by it
        model.save_pretrained(folder, state_dict=dict(weights))
    else:
        model.save_pretrained(folder, state_dict={})  # its configuration
        layout = {name: replace(kept, dtype=as_written(kept.dtype)) for name, kept in engine_layout(model).items()}
        write_model(folder, layout, (weight.cpu() for name, weight in weights if name in layout))
    before, now = (f'"dtype": "{one}"'.replace("torch.", "") for one in (model.dtype, dtype))
    config = folder / "config.json"
    config.write_text(config.read_text().replace(before, now))
