"""What a rollout engine is: the protocol that all honour, what they are built from, and the kinds there are, by name.

An engine never sees text. It is given token ids and returns the token ids it sampled (token-in token-out), with the
log-probability of each under the distribution it was sampled from (after temperature) and the version of the weights
that produced it. Torch and an engine are imported when one is asked for.
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

#: What the scripted engine says (request, sample, version), and how many seconds a group takes.
Script = Callable[[GroupRequest, int, int], Sequence[int]]
Duration = float | Callable[[GroupRequest], float]


@dataclass(frozen=True)
class Deadlines:
    """How long the engine waits for the server, in seconds.

    Args:
        control: for the answer to anything but generating and loading, also while it generates.
        generate: for one group, waiting in the server's queue included.
        push: until new weights are loaded.
        start: until a server that is started here is ready.
    """

    control: float = 120.0
    generate: float = 7200.0
    push: float = 600.0
    start: float = 600.0


@dataclass(frozen=True)
class EngineOptions:
    """From what an engine is built; each engine reads what concerns it.

    Args:
        model_path: folder or hub id of the policy, ``tiny`` or ``smollm2``.
        engine: ``auto``, ``vllm``, ``transformers``, ``scripted``, ``vllm_server`` or ``sglang_server``.
        eos_token_ids: the tokens that end a response.
        pad_token_id: fills unused cells (transformers).
        model: the policy without adapters where the caller has it in memory: transformers copies it, scripted reads
            its vocabulary; without it both read ``model_path``, as all others always do.
        dtype: of the engine's weights, ``float32``, ``bfloat16`` or ``float16``; ``auto`` is bfloat16 on CUDA, float32
            on a CPU.
        device: where transformers samples; None: CUDA where there is one. vLLM takes the first visible GPU.
        max_model_len: context in tokens; None takes what the model or the server allows.
        max_rows: most samples in flight at once.
        trust_remote_code: run Python code that the model's repository brings along.
        attn_implementation: of a model that transformers loads.
        gpu_memory_utilization: share of the GPU's memory for weights and cache (vLLM and servers; unused on a CPU).
        tensor_parallel_size: GPUs that hold one copy of the model (vLLM and servers). In vLLM each is a process that
            it spawns: a script whose main module is imported again there needs ``if __name__ == "__main__":``.
        seed: of the engine's own random state; no sample depends on it (vLLM and servers).
        url: of a server that runs already, which may hold any weights of the model; None starts one. What such a
            server is made of is its own business.
        api_key: of the server at ``url``.
        log_path: what a server that is started prints goes here.
        shared_folder: in which a server on another machine, at ``url``, reads pushed weights.
        environment: of a server, on top of this process's (``CUDA_VISIBLE_DEVICES``, ...); vLLM here sets it.
        deadlines: of every wait for a server.
        script: what the scripted engine says; None: random tokens.
        duration_s: how long it takes.
        stop: texts that end a response, beside the end tokens (:class:`sota_grpo.engines.stepping.StopStrings`).
        adapter_rank: of the LoRA adapters that vLLM is given instead of whole weights; 0: it is given these.
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
        """With the ``device`` and ``dtype`` of this machine, and the folder of ``model_path``."""
        import torch

        from sota_grpo.policy.load import resolve_model_path  # brings transformers

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        automatic = "bfloat16" if device.startswith("cuda") else "float32"
        dtype = automatic if self.dtype == "auto" else self.dtype
        return replace(self, device=device, dtype=dtype, model_path=resolve_model_path(self.model_path))


@runtime_checkable
class Engine(Protocol):
    """What samples groups: an engine in this process, a server, or many workers behind one front.

    ``submit`` takes one group in and returns at once; groups of equal ids may be in flight together. A prompt that
    leaves no room for one token raises ``ValueError`` there. A future that is cancelled takes its group along where the
    engine is stepwise.
    ``generate`` gives the groups of one call as they finish (:class:`~sota_grpo.engines.stepping.Streams`).

    A ``stepwise`` engine samples only while somebody calls ``advance``, which takes in what was submitted, moves
    everything in flight on by about one token and resolves what ended; it returns False where there was nothing to do.
    Requests that were submitted between two steps begin together. Where an engine is not stepwise, ``advance`` does
    nothing.

    ``update_weights`` returns when the next sampled token of everything in flight comes from the new weights;
    ``version`` then equals the version given. ``weight_dtype`` is the one that all its matrices have, so that pushed
    ones may be rounded to it beforehand; None where they have several, or that is not known. ``weight_sums`` has a
    checksum of every weight as it is held, by its name in a push, but for those that it keeps in another form; None
    where it tells none.
    ``close`` is idempotent and leaves no process behind.

    All may be called from any thread; what changes a stepwise engine waits for its lock.
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
class Kind:
    """What the rest of the program has to know of an engine: all that a new one declares, beside its own module.

    Args:
        builder: ``module:function``, of this folder where the module has no dot; called with resolved
            ``EngineOptions``.
        memory: whose formula says what it holds: ``vllm`` (a share of the device), ``transformers``, or ``none``.
        server: samples in a process of its own, started here or reached by ``engine.url``.
        expandable_segments: takes memory that torch can grow, on a GPU.
        takes_kwargs: is vLLM, whose further arguments are ``inference_model.engine_kwargs``.
        tells_kept: says from which tokens each was drawn where sampling is truncated (``Sample.kept``).
        max_temperature: the largest that it samples at; None: any.
        verl: what it calls it; None: it has no such engine.
    """

    builder: str
    memory: str
    server: bool = False
    expandable_segments: bool = True
    takes_kwargs: bool = False
    tells_kept: bool = False
    max_temperature: float | None = None
    verl: str | None = None


#: By the name that ``engine.name=`` takes; each of ours has a preset in ``config/engine/``, and packages add theirs as
#: entry points of "sota_grpo.engines".
_OWN: Mapping[str, Kind] = {
    "vllm": Kind(
        "vllm_engine:VLLMEngine",
        "vllm",
        takes_kwargs=True,
        tells_kept=True,
        max_temperature=2.0,
        verl="vllm",
    ),
    "transformers": Kind("transformers_engine:transformers_engine", "transformers", tells_kept=True),
    "scripted": Kind("scripted:scripted_engine", "none"),
    "vllm_server": Kind(
        "server_engine:server_engine",
        "vllm",
        server=True,
        takes_kwargs=True,
        max_temperature=2.0,
        verl="vllm",
    ),
    "sglang_server": Kind("server_engine:server_engine", "vllm", server=True, expandable_segments=False, verl="sglang"),
}
ENGINES: Registry[Kind] = Registry("sota_grpo.engines", _OWN)


def is_server(name: str) -> bool:
    """Whether the engine samples in a process of its own; ``auto`` never does.

    >>> is_server("vllm_server"), is_server("auto")
    (True, False)
    """
    return name in ENGINES and ENGINES[name].server


def temperature_fault(engine: str, temperature: float, option: str = "inference_model.temperature") -> str | None:
    """Return a sentence where ``engine`` does not sample at ``temperature``, which is the value of ``option``.

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
    """Packages that the installed vLLM requires and that are missing: its installation was not finished.

    Those that text models do not need may be missing. vLLM is not imported, which takes seconds.
    """
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            needed = [one for one in map(Requirement, requires(package) or []) if one.name not in _NOT_FOR_TEXT]
            names = [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
            return [name for name in names if next(iter(distributions(name=name)), None) is None]
    return []


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
    options = replace(options.resolved(), engine=name)
    module = module if "." in module else f"{__name__}.{module}"
    engine: SteppingEngine = getattr(import_module(module), builder)(options)
    if options.stop:
        from sota_grpo.engines.stepping import StopStrings
        from sota_grpo.policy.load import load_tokenizer

        tokenizer = load_tokenizer(options.model_path, trust_remote_code=options.trust_remote_code)
        engine.stops = StopStrings(tokenizer, options.stop)
    return engine
