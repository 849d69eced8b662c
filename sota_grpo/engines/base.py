"""The protocol that every rollout engine honours: groups in, sampled token ids and their log-probs out.

An engine never sees text. It is given token ids and returns the token ids it sampled (token-in token-out), with the
log-probability of each under the distribution it was sampled from (after temperature) and the version of the weights
that produced it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: What the scripted engine says (request, sample, version), and how many seconds a group takes.
Script = Callable[[GroupRequest, int, int], Sequence[int]]
Duration = float | Callable[[GroupRequest], float]


@dataclass(frozen=True)
class Deadlines:
    """How long the engine waits for the server, in seconds.

    Args:
        control: for the answer to anything but generating and loading, also while it generates.
        generate: for one group, waiting for its turn in the server included.
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
        enforce_eager: no CUDA graphs; None: only on a CPU (vLLM and servers).
        tensor_parallel_size: GPUs that hold one copy of the model (vLLM and servers). In vLLM each is a process that
            it spawns: a script whose main module is imported again there needs ``if __name__ == "__main__":``.
        seed: of the engine's own random state; no sample depends on it (vLLM and servers).
        url: of a server that runs already, which may hold any weights of the model; None starts one. What such a
            server is made of is its own business.
        api_key: of the server at ``url``.
        log_path: what a server that is started prints goes here.
        environment: for it, on top of this process's (``CUDA_VISIBLE_DEVICES``, ...).
        deadlines: of every wait for a server.
        script: what the scripted engine says; None: random tokens.
        duration_s: how long it takes.
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
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    log_path: str | Path = "server.log"
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    script: Script | None = None
    duration_s: Duration = 0.0

    def resolved(self) -> EngineOptions:
        """With the ``device`` and ``dtype`` of this machine, and the folder of ``model_path``."""
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
    ones may be rounded to it beforehand; None where they have several, or that is not known. ``close`` is idempotent
    and leaves no process behind.

    All may be called from any thread; what changes a stepwise engine waits for its turn.
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

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def response_rooms(requests: Sequence[GroupRequest], sampling: Sampling, max_model_len: int) -> list[int]:
    """Most response tokens of each request: ``min(max_tokens, max_model_len - prompt tokens)``.

    Raises:
        ValueError: a prompt leaves no room for one token, a prompt is empty, or nothing is to be sampled.

    >>> request = GroupRequest(group_id=0, prompt_ids=(1, 2, 3), num_samples=1, seed=0)
    >>> response_rooms([request], Sampling(max_tokens=8), max_model_len=5)
    [2]
    """
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves nothing to sample; use at least 1.")
    for request in requests:
        if not request.prompt_ids or request.num_samples < 1:
            raise ValueError(
                f"Group {request.group_id} has {len(request.prompt_ids)} prompt tokens and num_samples="
                f"{request.num_samples}; both must be at least 1."
            )
        if len(request.prompt_ids) >= max_model_len:
            raise ValueError(
                f"The prompt of group {request.group_id} has {len(request.prompt_ids)} tokens and the context holds "
                f"max_model_len={max_model_len}: no room for a response; raise max_model_len or drop the prompt."
            )
    return [min(sampling.max_tokens, max_model_len - len(request.prompt_ids)) for request in requests]


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: Mapping[str, str],
    *,
    tied_required: bool,
) -> dict[str, torch.Tensor]:
    """The pushed weights by name, once it is certain that they replace every weight of the model.

    Args:
        weights: named tensors, names as in the ``state_dict()`` of the base model, adapters merged.
        shapes: name and shape of every weight of the model.
        tied: for each tied weight, the name of the weight it shares its values with.
        tied_required: the tied names must be given too (vLLM needs them).

    Raises:
        ValueError: an unknown name, a missing name, a wrong shape, or a tied pair with different values.

    >>> checked_weights([("a", torch.ones(2))], {"a": torch.Size([3])}, {}, tied_required=False)
    Traceback (most recent call last):
    ...
    ValueError: The pushed weight a has shape [2] and the engine's has [3]; push the weights of the same model.
    """
    given = dict(weights)
    if unknown := sorted(given.keys() - shapes.keys()):
        raise ValueError(
            f"{len(unknown)} of {len(given)} pushed weights are unknown to the engine, the first is {unknown[0]}; push "
            "the state_dict() of the base model, adapters merged."
        )
    optional = set() if tied_required else tied.keys()
    if missing := sorted(shapes.keys() - given.keys() - optional):
        hint = ""
        if missing[0] in tied:
            hint = f" ({missing[0]} is tied to {tied[missing[0]]}, yet without it the engine would keep the old one)"
        raise ValueError(
            f"{len(missing)} of {len(shapes)} weights are missing from the push, the first is {missing[0]}{hint}; "
            "push the whole state_dict(), not named_parameters()."
        )
    for name, tensor in given.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"The pushed weight {name} has shape {list(tensor.shape)} and the engine's has {list(shapes[name])}; "
                "push the weights of the same model."
            )
    for name, partner in tied.items():
        if name in given and not _same_values(given[name], given[partner]):
            raise ValueError(f"{name} and {partner} are tied in the engine's model but differ in the push; untie it.")
    return given


def matrix_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all floating-point matrices among ``tensors``; None where they have several.

    >>> matrix, vector = torch.ones(2, 2), torch.ones(2)
    >>> matrix_dtype([matrix, vector.half()]), matrix_dtype([matrix, matrix.half()])
    (torch.float32, None)
    """
    of_matrices = [tensor for tensor in tensors if tensor.ndim > 1 or not tensor.numel()]  # vLLM empties what it packs
    found = {tensor.dtype for tensor in of_matrices if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Each name in the state dict that shares its parameter with an earlier one, and that earlier name.

    >>> embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    >>> head.weight = embed.weight
    >>> tied_names(torch.nn.ModuleDict({"embed": embed, "head": head}))
    {'head.weight': 'embed.weight'}
    """
    first_name: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied[name] = first_name[id(parameter)]
    return tied


def expected_weights(
    model: str | PreTrainedConfig, *, trust_remote_code: bool
) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Names and shapes of a model's ``state_dict()``, and its tied names, without allocating it.

    Args:
        model: its folder, or its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from sota_grpo.policy.load import MODEL_LOCK

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    with MODEL_LOCK, torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tensor.shape for name, tensor in built.state_dict().items()}, tied_names(built)
