"""Rollout engines behind one protocol, chosen by name; an engine's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

from sota_grpo.engines.base import Engine
from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sota_grpo.engines.scripted import Duration, Script

__all__ = ["ENGINE_NAMES", "SERVERS", "Engine", "make_engine", "resolve_engine_name"]

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


def make_engine(name: str, *, dtype: str = "auto", device: str | None = None, **options: Any) -> Engine:
    """Build the engine called ``name``.

    Args:
        name: ``auto``, ``vllm``, ``transformers``, ``scripted``, ``vllm_server`` or ``sglang_server``.
        dtype: of the engine's weights; ``auto`` is bfloat16 on CUDA and float32 on CPU.
        device: where the transformers engine samples; None: CUDA where there is one. vLLM takes the first visible GPU.
        options: for all engines, ``model_path`` (folder or hub id of the policy), ``eos_token_ids`` (the tokens that
            end a response), ``pad_token_id`` (fills unused cells), ``max_model_len`` (context in tokens; None takes
            what the model allows), ``max_rows`` (most samples in flight at once) and ``trust_remote_code`` (run Python
            code that the model's repository brings along). ``model`` is the policy without adapters where the caller
            has it in memory: transformers copies it, scripted reads its vocabulary, and without it both read
            ``model_path``, as vLLM always does. ``attn_implementation`` is for a model that transformers loads;
            ``script`` and ``duration_s`` for ``ScriptedEngine``; ``gpu_memory_utilization``, ``enforce_eager``,
            ``tensor_parallel_size`` and ``seed`` for ``VLLMEngine`` and servers; ``url``, ``api_key``, ``log_path``,
            ``environment`` and ``timeout_s`` for servers only. An engine ignores the options of the others.

    Raises:
        UserError: see :func:`resolve_engine_name`.
        TypeError: an option that no engine has, or a missing one.
    """
    import torch

    kind = resolve_engine_name(name, device=device)
    known = {parameter for build in _BUILDERS.values() for parameter in signature(build).parameters}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"No engine has the option {unknown[0]}; the options are {', '.join(sorted(known - {'_'}))}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return _BUILDERS[kind](dtype=dtype, device=device, **options)


def _vllm(
    *,
    model_path: str,
    eos_token_ids: Collection[int],
    dtype: str,
    max_model_len: int | None = None,
    max_rows: int = 256,
    gpu_memory_utilization: float = 0.5,
    enforce_eager: bool | None = None,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    trust_remote_code: bool = False,
    **_: Any,
) -> Engine:
    from sota_grpo.engines.vllm_engine import VLLMEngine

    return VLLMEngine(
        model_path,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        dtype=dtype,
        max_rows=max_rows,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        tensor_parallel_size=tensor_parallel_size,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )


def _transformers(
    *,
    model_path: str,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    dtype: Any,
    device: str,
    model: PreTrainedModel | None = None,
    max_model_len: int | None = None,
    max_rows: int = 256,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **_: Any,
) -> Engine:
    import torch

    from sota_grpo.engines.hf import TransformersEngine
    from sota_grpo.policy.load import load_model

    load: dict[str, Any] = {"trust_remote_code": trust_remote_code, "attn_implementation": attn_implementation}
    return TransformersEngine(
        load_model(model_path, dtype=dtype, **load) if model is None else model,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        max_model_len=max_model_len,
        max_rows=max_rows,
        device=device,
        dtype=getattr(torch, dtype),
        copy_model=model is not None,
    )


def _scripted(
    *,
    model_path: str,
    eos_token_ids: Collection[int],
    model: PreTrainedModel | None = None,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    script: Script | None = None,
    duration_s: Duration = 0.0,
    **_: Any,
) -> Engine:
    """A script needs the size of the vocabulary and the context, so of a model on disk only the config is read."""
    from transformers import AutoConfig

    from sota_grpo.engines.scripted import ScriptedEngine

    whole = model.config if model else AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    config = whole.get_text_config()
    return ScriptedEngine(
        script,
        eos_token_id=min(eos_token_ids),
        vocab_size=config.vocab_size,
        duration_s=duration_s,
        max_model_len=max_model_len or config.max_position_embeddings,
    )


def _server(name: str) -> Callable[..., Engine]:
    def build(
        *,
        model_path: str,
        eos_token_ids: Collection[int],
        dtype: str,
        max_model_len: int | None = None,
        max_rows: int = 256,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool | None = None,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        trust_remote_code: bool = False,
        url: str | None = None,
        api_key: str | None = None,
        log_path: str = "server.log",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        **_: Any,
    ) -> Engine:
        from sota_grpo.engines.server_dialect import Deadlines, ServerOptions
        from sota_grpo.engines.server_start import server_engine

        options = ServerOptions(
            model_path,
            eos_token_ids=eos_token_ids,
            dtype=dtype,
            max_model_len=max_model_len,
            max_rows=max_rows,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            trust_remote_code=trust_remote_code,
            url=url,
            api_key=api_key,
            log_path=log_path,
            environment=environment or {},
            deadlines=Deadlines(control=timeout_s),
        )
        return server_engine(name, options)

    return build


_BUILDERS: dict[str, Callable[..., Engine]] = {
    "vllm": _vllm,
    "transformers": _transformers,
    "scripted": _scripted,
    **{name: _server(name) for name in SERVERS},
}
