"""Load causal language models and tokenizers from a folder or the Hugging Face hub, check them, and export models."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sota_grpo.errors import UserError
from sota_grpo.files import atomic_folder, system_errors
from sota_grpo.policy import model_sizes
from sota_grpo.policy.causal import base_model, end_token_ids, head_width
from sota_grpo.policy.lora import engine_layout, engine_weights
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.smollm2 import SMOLLM2, smollm2_folder
from sota_grpo.policy.tensor_files import write_model
from sota_grpo.text import first_line, sentence

DType = Literal["float32", "bfloat16", "float16"]
TINY = "tiny"
_WEIGHT_FILES = ("*.safetensors", "*.bin")


class ModelNotFoundError(UserError, FileNotFoundError):
    """A model is not found, or its files cannot be loaded; the message says how to fix it."""


def resolve_model_path(name: str, option: str = "model.name") -> str:
    """Return the local folder of the model ``name`` (also of ``"tiny"`` and ``"smollm2"``); a hub id is returned as is.

    The first use of ``smollm2`` on a machine converts the model, which takes half a minute. ModelNotFoundError if
    ``name`` is a path or a folder without a ``config.json``; UserError if a packaged model cannot be used.
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
        raise ModelNotFoundError(model_sizes.NO_MODEL_FOLDER.replace("model.name", option).format(name=name))
    return name


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model ``name``; if it has no padding token, the end-of-sequence token is used.

    The tokenizer stores all end tokens of the model (:func:`sota_grpo.policy.causal.end_token_ids`). For ``name``
    see :func:`resolve_model_path`; ``trust_remote_code`` allows Python code in the model's repository to run. UserError
    if the model is not found (ModelNotFoundError) or its tokenizer cannot be used; the message says why.
    """
    tokenizer = from_pretrained(AutoTokenizer.from_pretrained, name, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:  # masks define padding, ids do not: sharing the id with EOS is harmless
        tokenizer.pad_token = tokenizer.eos_token
    path = resolve_model_path(name)
    try:
        ending: Any = GenerationConfig.from_pretrained(path)
    except OSError:  # not every model has one
        ending = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    end_token_ids(tokenizer, ending)
    return tokenizer


#: Lock for building one model at a time: transformers replaces torch's initialisers meanwhile, for all threads.
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
    option: str = "model.name",
) -> PreTrainedModel:
    """Load a causal language model for training: all dropout rates 0, in training mode, on ``device``.

    The probability ratio of GRPO compares two evaluations of the same weights, so the model must be deterministic.
    Training mode is needed because transformers checkpoints activations only in it.

    Args:
        name: folder or hub id, see :func:`resolve_model_path`.
        attn_implementation: name in transformers (``"sdpa"``, ``"eager"``, ...); None: transformers' default.
        gradient_checkpointing: keep one activation per decoder layer and recompute the others in the backward pass.
        weights: False: repeat one number in no memory (on a CPU) instead, for a rank that receives its shard later
            (:func:`sota_grpo.policy.sharding.shard`).
        load_kwargs: further arguments of ``from_pretrained``; ignored if ``weights`` is False.
        option: the option that messages name.

    UserError if the model is not found (ModelNotFoundError) or not usable with these options, ValueError for another
    ``dtype``; the message says why.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(get_args(DType))}")
    # oneDNN keeps 1,024 products, by size: a GiB where micro-batches differ. It reads this at its first product
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    config = from_pretrained(AutoConfig.from_pretrained, name, option, trust_remote_code=trust_remote_code)
    if weights:
        _require_stored(config, name, option)
    stored, rates = config.dtype, set_dropout(config)
    options: dict[str, Any] = {"config": config, "dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with MODEL_LOCK:
            if weights:
                model = _loaded(name, option, options, load_kwargs or {})
            else:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(**options)
                _fill(model)
    except (ModelNotFoundError, ValueError, ImportError) as error:
        cause, name = error.__cause__ or error, f"model.attn_implementation={attn_implementation}"
        if attn_implementation is None or not (isinstance(cause, ImportError) or "attn_implementation" in str(cause)):
            raise
        raise UserError(f"{name} cannot be used ({first_line(cause).rstrip('.')}); use sdpa, eager or null.") from error
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.stored_dtype, model.stored_dropout = stored, rates  # read by save_hf
    return model.to(device).train()


def _require_stored(config: PretrainedConfig, name: str, option: str) -> None:
    """Refuse weight files that are too small for the folder's ``config.json``: huge random weights would be made."""
    folder, text = Path(resolve_model_path(name)), config.get_text_config()
    shape = [getattr(text, each, None) or 0 for each in ("vocab_size", "intermediate_size", "num_hidden_layers")]
    width = getattr(text, "hidden_size", None) or 0
    stored = sum(path.stat().st_size for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    for described in (*(size * width for size in shape), width * width):
        if 0 < 8 * stored < described:
            raise ModelNotFoundError(
                f"{option}={name}: config.json describes weights of {described} elements or more, but all weight files "
                f"have only {stored} bytes: one of these files is damaged or of another model; download the model anew."
            )


def _loaded(name: str, option: str, options: dict[str, Any], load_kwargs: Mapping[str, Any]) -> Any:
    """Load a model and check its weights: all finite, and none missing, which transformers would fill at random."""
    options |= {**load_kwargs, "output_loading_info": True}
    try:
        model, info = from_pretrained(AutoModelForCausalLM.from_pretrained, name, option, **options)
    except ModelNotFoundError as error:
        if not (load_kwargs and isinstance(error.__cause__, TypeError)):
            raise
        raise UserError(
            f"model.load_kwargs={dict(load_kwargs)} is not accepted by the model ({error.__cause__}); correct it."
        ) from error
    if missing := sorted(info["missing_keys"] & dict(model.named_parameters()).keys()):
        raise UserError(
            f"{option}={name}: its files lack {len(missing)} of the weights of {type(model).__name__}, for example "
            f"{missing[0]}; use a folder with all weights of a causal language model."
        )
    for weight, value in model.named_parameters():
        if value.is_floating_point() and not all(bound.isfinite() for bound in value.detach().aminmax()):
            raise UserError(
                f"{option}={name}: its weight {weight} is not finite in {value.dtype}: its files are damaged, or a "
                "value is too large for that dtype; replace the files, or use float32."
            )
    return model


def _fill(model: nn.Module) -> None:
    """Replace meta tensors by tensors of the same shape that repeat one stored number; tied tensors stay tied."""
    made: dict[int, torch.Tensor] = {}
    for owner in model.modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    if id(value) not in made:
                        number = torch.tensor(0.01).to(value.dtype).expand(value.shape)
                        made[id(value)] = nn.Parameter(number) if isinstance(value, nn.Parameter) else number
                    table[name] = made[id(value)]  # type: ignore[assignment]


def set_dropout(config: PretrainedConfig, rates: Sequence[Mapping[str, float]] = ()) -> list[dict[str, float]]:
    """Set every dropout, layer-drop and router-jitter rate of the configuration, in place; return the previous rates.

    ``rates``: the return value of an earlier call, to restore those rates; by default every rate becomes 0.
    """
    before = []
    text = config.get_text_config()
    for index, section in enumerate([config] if text is config else [config, text]):
        values = vars(section)
        drops = {key: rate for key, rate in values.items() if isinstance(rate, float) and re.search("drop|jitter", key)}
        values.update(rates[index] if rates else dict.fromkeys(drops, 0.0))
        before.append(drops)
    return before


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Enable non-reentrant activation checkpointing; raise UserError if no layer supports it."""
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no layer that supports gradient checkpointing; "
            "set train_model.gradient_checkpointing=false."
        )


def from_pretrained(load: Callable[..., Any], name: str, option: str = "model.name", **options: Any) -> Any:
    """Return ``load(path of the model name, **options)``; turn its errors into sentences on ``option``.

    ModelNotFoundError if ``load`` fails; UserError if the model has Python code that ``trust_remote_code=False`` does
    not allow to run, or its path cannot be resolved. ``load``'s own UserErrors and memory errors are not changed.
    """
    path = resolve_model_path(name, option)
    try:
        return load(path, **options)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # missing, damaged or unsupported by this transformers, whose readers raise anything
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{option}={name} contains Python code; read that code, then set model.trust_remote_code=true."
            ) from error
        cause = first_line(error) if isinstance(error, OSError) else sentence(error)
        raise ModelNotFoundError(
            f"{option}={name} could not be loaded from {path} ({cause.rstrip('.')}); use the folder of a saved model, "
            f"check the network and the hub id, or use {option}=tiny"
        ) from error


def find_architecture(name: str, *, trust_remote_code: bool = False) -> tuple[Architecture, str]:
    """Return the architecture of the model ``name`` and a phrase that names its source; no weights are read.

    Sources, in this order: a local folder, the table of :mod:`sota_grpo.policy.model_sizes`, the hub. UserError if the
    model is not found (ModelNotFoundError) or cannot be trained; the message says why.
    """
    known = model_sizes.architecture_of(name)
    if known is not None and not Path(resolve_model_path(name)).is_dir():
        return known, "table of public models"

    def described(path: str) -> Architecture:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        require_causal(path, config)
        return architecture_from(config, trust_remote_code=trust_remote_code)

    return from_pretrained(described, name), f"config.json of {name}"


def architecture_from(config: Any, *, trust_remote_code: bool = False) -> Architecture:
    """Return the architecture that a transformers config describes; parameters are counted on the meta device."""
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
        head_dim=head_width(text),
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
    """Export weights (LoRA merged, safetensors), configuration, tokenizer and chat template; return ``directory``.

    ``AutoModelForCausalLM.from_pretrained(directory)`` and vLLM can load it. An earlier export is replaced only after
    the new one is complete. For a sharded model every rank must call this; rank 0 writes each weight when it is
    gathered. If transformers stores a model in another form than it computes with, rank 0 holds all weights at once.

    Args:
        model: a causal language model, with or without LoRA; its configuration is changed during the call.
        progress: called for every weight.
        dtype: written dtype of weights in the model's dtype; None: the narrower of that and the loaded files' dtype.

    Raises:
        OSError: writing failed; an earlier export is unchanged.
        ValueError: ``directory`` is not empty and has no ``config.json``, so it is not an export to be replaced.
    """
    inner = base_model(model)
    stored: torch.dtype | None = getattr(inner, "stored_dtype", None)
    written = stored if stored is not None and stored.itemsize < inner.dtype.itemsize else inner.dtype
    written = getattr(torch, dtype) if dtype else written
    target, weights = Path(directory), engine_weights(model, progress=progress)
    first = next(weights, None)
    if first is None:  # this is not rank 0
        return target
    try:
        if target.exists() and any(target.iterdir()) and not (target / "config.json").is_file():
            raise ValueError(f"{target} is not empty and holds no exported model; use another folder or empty it")
        saved = inner.generation_config
        inner.generation_config = GenerationConfig()  # transformers refuses to write some
        stored_dropout = getattr(inner, "stored_dropout", None)
        rates = set_dropout(inner.config, stored_dropout) if stored_dropout else []
        try:
            with atomic_folder(target) as partial, system_errors():
                _write_weights(inner, partial, chain([first], weights), written)
                tokenizer.save_pretrained(partial)
                ending = copy.deepcopy(saved) or GenerationConfig()  # its own end tokens come before training's
                named = ending.eos_token_id if isinstance(ending.eos_token_id, list) else [ending.eos_token_id]
                every = dict.fromkeys([*named, *end_token_ids(tokenizer, ending)])
                ends = [end for end in every if end is not None]
                ending.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
                ending.to_json_file(partial / "generation_config.json")
        finally:
            inner.generation_config = saved
            if rates:
                set_dropout(inner.config, rates)
    finally:
        for _ in weights:  # after a failure too: the other ranks gather with this one
            pass
    return target


def _write_weights(
    model: PreTrainedModel, folder: Path, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    def as_written(stored: torch.dtype) -> torch.dtype:
        return dtype if stored == model.dtype else stored  # weights that the model keeps in float32 stay so

    weights = ((name, weight.to(as_written(weight.dtype))) for name, weight in weights)
    if getattr(model, "_weight_conversions", None) != []:  # None: the model was not loaded by transformers
        model.save_pretrained(folder, state_dict=dict(weights))
    else:
        model.save_pretrained(folder, state_dict={})  # writes the configuration only
        layout = {name: replace(piece, dtype=as_written(piece.dtype)) for name, piece in engine_layout(model).items()}
        write_model(folder, layout, (weight.cpu() for name, weight in weights if name in layout))
    before, now = (f'"dtype": "{kind}"'.replace("torch.", "") for kind in (model.dtype, dtype))
    config = folder / "config.json"
    config.write_text(config.read_text().replace(before, now))


def require_whole(name: str, folder: str | Path, option: str = "model.name") -> None:
    """Raise UserError if a model's ``folder`` has a LoRA adapter, which transformers would load into the model."""
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(
            f"{option}={name} has an adapter_config.json; merge the adapter into its base (merge_and_unload) and "
            "save that, or remove the adapter's files."
        )


def require_causal(name: str, config: PretrainedConfig, option: str = "model.name") -> None:
    """Raise UserError unless ``config`` describes a causal language model with attention and no quantised weights."""
    remote_class = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    text: Any = config.get_text_config()
    what = None
    if config.is_encoder_decoder:
        what = "has an encoder and a decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote_class:
        what = "has no causal language model of text in transformers"
    elif getattr(text, "num_attention_heads", None) is None:
        what = "has no attention"
    if what is not None:
        raise UserError(
            f"{option}={name} ({config.model_type}) {what}; use a causal language model of text with attention."
        )
    quantized = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantized:
        settings = quantized if isinstance(quantized, dict) else vars(quantized)
        raise UserError(
            f"{option}={name} has quantised weights ({settings.get('quant_method')}), which can be neither trained nor "
            "used as a reference; use the original model (model.quantization=nf4 with "
            "train_model.lora.enabled=true keeps it in 4 bits)."
        )


def require_rows(name: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if there is no tokenizer, or a token id that may occur is ``rows`` (embedding size) or more.

    Special tokens that never occur may be out of range, for example the image token of Gemma 3 1B.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    if len(vocabulary) <= len(added):  # transformers makes an empty one if the folder has none
        raise UserError(f"model.name={name} has no tokenizer; put its tokenizer.json next to its config.json.")
    special = {token.content for token in added.values() if token.special}
    written, template = {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token}, str(tokenizer.chat_template)
    lost = [
        token
        for token, number in vocabulary.items()
        if number >= rows and (token not in special or token in written or token in template)
    ]
    if lost:
        raise UserError(
            f"model.name={name}: its tokenizer has {len(lost)} tokens with ids beyond its {rows} embedding rows, for "
            f"example {min(lost)!r}; resize the model (resize_token_embeddings) and save it, or use the tokenizer "
            "that belongs to the model."
        )


_DIGESTED = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", *_WEIGHT_FILES)
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 64 << 20, 256, 64 << 10


def model_digest(name: str) -> str | None:
    """Return a digest of a model's configuration, tokenizer and weights; None if the weights are not on this machine.

    It has 16 hexadecimal digits. Of a file above 64 MiB it covers the length and 256 evenly spread blocks of 64 KiB, of
    a hub id the cached snapshot. Errors as in :func:`resolve_model_path`.
    """
    folder = Path(resolve_model_path(name))
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    if not any(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _DIGESTED for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for block in range(BLOCKS):
                file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
