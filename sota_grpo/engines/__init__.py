"""Rollout engines: their protocol, their options, and the table of engines by name.

An engine never sees text. It takes token ids and returns the token ids it sampled (token-in token-out), with the
log-probability of each under the distribution it was sampled from (after temperature) and the version of the weights
that produced it. Torch and an engine's own library are imported only when an engine is built.
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

#: The scripted engine's response (request, sample, version), and the seconds that a group takes.
Script = Callable[[GroupRequest, int, int], Sequence[int]]
Duration = float | Callable[[GroupRequest], float]


@dataclass(frozen=True)
class Deadlines:
    """Longest waits for a server, in seconds.

    Args:
        control: for any response but those of generating and loading, also while it generates.
        generate: for one group, including its time in the server's queue.
        push: until new weights are loaded.
        start: until a server that is started here is ready.
    """

    control: float = 120.0
    generate: float = 7200.0
    push: float = 600.0
    start: float = 600.0


@dataclass(frozen=True)
class EngineOptions:
    """Options of all engines; each reads those that apply to it.

    Args:
        model_path: folder or hub id of the policy, ``tiny`` or ``smollm2``.
        engine: ``auto``, ``vllm``, ``transformers``, ``scripted``, ``vllm_server`` or ``sglang_server``.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells (transformers).
        model: the policy without adapters if the caller has it in memory: transformers copies it, scripted reads its
            vocabulary; None: both read ``model_path``, as all others always do.
        dtype: of the engine's weights, ``float32``, ``bfloat16`` or ``float16``; ``auto`` is bfloat16 on CUDA, float32
            on a CPU.
        device: where transformers samples; None: CUDA if there is one. vLLM takes the first visible GPU.
        max_model_len: context in tokens; None takes what the model or the server allows.
        max_rows: most samples in flight at once.
        trust_remote_code: run Python code from the model's repository.
        attn_implementation: of a model that transformers loads.
        gpu_memory_utilization: share of the GPU's memory for weights and cache (vLLM and servers; unused on a CPU).
        tensor_parallel_size: GPUs that hold one copy of the model (vLLM and servers). vLLM spawns a process for each: a
            script whose main module is imported again there needs ``if __name__ == "__main__":``.
        seed: of the engine's own random state, on which no sample depends (vLLM and servers).
        url: of a running server, which may hold any weights of the model; None starts one.
        api_key: of the server at ``url``.
        log_path: output of a server that is started.
        shared_folder: in which a server on another machine, at ``url``, reads pushed weights.
        environment: variables of a server, on top of this process's; vLLM in this process sets them here.
        deadlines: of every wait for a server.
        script: responses of the scripted engine; None: random tokens.
        duration_s: seconds that a group of the scripted engine takes.
        stop: texts that end a response besides the end tokens (:class:`sota_grpo.engines.stepping.StopStrings`).
        adapter_rank: of LoRA adapters that are pushed to vLLM instead of whole weights; 0: whole weights.
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
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    seed: int = 0
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    log_path: str | Path = "server.log"
    shared_folder: str | Path = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    script: Script | None = None
    duration_s: Duration = 0.0
    stop: Sequence[str] = ()
    adapter_rank: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def resolved(self) -> EngineOptions:
        """Return options with the ``device`` and ``dtype`` of this machine and the folder of ``model_path``."""
        import torch

        from sota_grpo.policy.load import resolve_model_path  # brings transformers

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        automatic = "bfloat16" if device.startswith("cuda") else "float32"
        dtype = automatic if self.dtype == "auto" else self.dtype
        return replace(self, device=device, dtype=dtype, model_path=resolve_model_path(self.model_path))


@runtime_checkable
class Engine(Protocol):
    """Samples groups: an engine in this process, a server, or many workers behind one front.

    ``submit`` takes one group and returns at once; groups of equal ids may be in flight together. It raises
    ``ValueError`` for a prompt that leaves no room for one token. Cancelling its future drops the group if the engine
    is stepwise. ``generate`` yields the groups of one call as they finish.

    A ``stepwise`` engine samples only in ``advance``, which starts submitted groups, advances everything in flight by
    about one token and resolves what ended; it returns False if there was nothing to do. Requests that were submitted
    between two steps begin together. Of other engines ``advance`` is a no-op.

    ``update_weights`` takes all weights, or the :class:`~sota_grpo.policy.weight_pack.WeightPack` of an adapter, which
    is merged into the weights ``base()``. It returns when the next sampled token of everything in flight comes from the
    new weights; ``version`` then equals the pushed version. ``weight_dtype`` is the dtype of all its matrices, to which
    pushed ones may be rounded beforehand; None if they have several, or it is unknown. ``weight_sums`` returns a
    checksum of every weight by its name in a push, except those that the engine keeps in another form; None if it
    cannot report any. ``close`` is idempotent and leaves no process behind.

    All may be called from any thread; state changes of a stepwise engine wait for its lock.
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

    def weight_sums(self) -> Mapping[str, Checksum] | None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineSpec:
    """An engine's entry in :data:`ENGINES`: everything that other rooms need to know of it.

    Args:
        builder: ``module:function``, of this folder if the module has no dot; called with resolved ``EngineOptions``.
        memory: the formula of its memory: ``vllm`` (a share of the device), ``transformers``, or ``none``.
        server: samples in a process of its own, started here or reached by ``engine.url``.
        expandable_segments: works in memory that torch can grow, on a GPU.
        takes_kwargs: takes vLLM's further arguments, ``inference_model.engine_kwargs``.
        reports_support: reports from which tokens each was drawn where sampling is truncated (``Sample.support``).
        max_temperature: the largest that it samples at; None: any.
        verl: its name there; None: verl has no such engine.
    """

    builder: str
    memory: str
    server: bool = False
    expandable_segments: bool = True
    takes_kwargs: bool = False
    reports_support: bool = False
    max_temperature: float | None = None
    verl: str | None = None


#: By the name that ``engine.name=`` takes; each of ours has a preset in ``config/engine/``, and packages add theirs as
#: entry points of "sota_grpo.engines".
ENGINES: Registry[EngineSpec] = Registry(
    "sota_grpo.engines",
    {
        "vllm": EngineSpec(
            "vllm_engine:VLLMEngine", "vllm", takes_kwargs=True, reports_support=True, max_temperature=2.0, verl="vllm"
        ),
        "transformers": EngineSpec("transformers_engine:transformers_engine", "transformers", reports_support=True),
        "scripted": EngineSpec("scripted:scripted_engine", "none"),
        "vllm_server": EngineSpec(
            "server_engine:server_engine", "vllm", server=True, takes_kwargs=True, max_temperature=2.0, verl="vllm"
        ),
        "sglang_server": EngineSpec(
            "server_engine:server_engine", "vllm", server=True, expandable_segments=False, verl="sglang"
        ),
    },
)


def is_server(name: str) -> bool:
    """Whether the engine samples in a process of its own; ``auto`` never does.

    >>> is_server("vllm_server"), is_server("auto")
    (True, False)
    """
    return name in ENGINES and ENGINES[name].server


def temperature_fault(engine: str, temperature: float, option: str = "inference_model.temperature") -> str | None:
    """Return a sentence if ``engine`` does not sample at ``temperature``, the value of ``option``; else None.

    >>> temperature_fault("vllm", 3.0)[:82]
    'inference_model.temperature=3.0 is above 2.0, the most that engine=vllm samples at'
    >>> temperature_fault("auto", 3.0), temperature_fault("vllm", 2.0)
    (None, None)
    """
    most = ENGINES[engine].max_temperature if engine in ENGINES else None
    if most is None or temperature <= most:
        return None
    return (
        f"{option}={temperature} is above {most}, the most that engine={engine} samples at; use {most}, or "
        "engine=transformers."
    )


@lru_cache(maxsize=1)
def vllm_lacks() -> list[str]:
    """Return the missing packages of an unfinished installation of vLLM, except those that text models do not need.

    vLLM is not imported, which takes seconds.
    """
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            needed = map(Requirement, requires(package) or [])
            names = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
            return [name for name in names if name not in _NOT_FOR_TEXT and not any(distributions(name=name))]
    return []


def resolve_engine_name(name: str, *, device: str | None = None) -> str:
    """Return ``name`` after checks; ``auto`` is vllm if it is installed and can compute on ``device``.

    vLLM takes the GPU if there is one, so ``device="cpu"`` on such a machine excludes it.

    Raises:
        UserError: the name is unknown, or it is vllm, which is not installed or cannot compute on ``device``.

    >>> resolve_engine_name("scripted")
    'scripted'
    """
    import torch

    has_vllm = find_spec("vllm") is not None
    if name == "auto" and has_vllm and (absent := vllm_lacks()):
        logger.warning(
            "vLLM is installed without %s, which it needs: engine=auto takes transformers; install vLLM again.",
            " and ".join(absent[:3]),
        )
        return "transformers"
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
            "engine=vllm takes this machine's GPU in spite of device=cpu; use engine=transformers or device=cuda."
        )
    return name


def make_engine(options: EngineOptions) -> SteppingEngine:
    """Build the engine ``options.engine``.

    Raises:
        UserError: see :func:`resolve_engine_name`; or the model is missing.
    """
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
