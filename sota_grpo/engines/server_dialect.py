"""What is common to all inference servers that are spoken to over HTTP, and what each says in its own way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from sota_grpo.engines.server_http import HttpClient, ServerError
from sota_grpo.errors import UserError
from sota_grpo.records import GroupRequest, Sample, Sampling


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
class ServerOptions:
    """The server of an engine: how one is started here, or what is asked of the one at ``url``.

    Args:
        model_path: folder or hub id of the model.
        eos_token_ids: the tokens that end a response.
        max_model_len: context in tokens; None takes what the server allows.
        max_rows: most samples in flight at once.
        trust_remote_code: run Python code that the model's repository brings along.
        deadlines: of every wait.
        url: of a server that runs already, which may hold any weights of the model; None starts one. What follows is
            then its own business.
        api_key: of the server at ``url``.
        log_path: what the server prints goes here.
        environment: for the server, on top of this process's (``CUDA_VISIBLE_DEVICES``, ...).
        dtype: of its weights, ``float32``, ``bfloat16`` or ``float16``.
        gpu_memory_utilization: share of the GPU's memory for weights and cache.
        enforce_eager: no CUDA graphs; None: only on CPU.
        tensor_parallel_size: GPUs that hold one copy of the model.
        seed: of the server's own random state; no sample depends on it.
    """

    model_path: str
    eos_token_ids: Collection[int]
    max_model_len: int | None = None
    max_rows: int = 256
    trust_remote_code: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    url: str | None = None
    api_key: str | None = None
    log_path: str | Path = "server.log"
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    seed: int = 0


class Versions:
    """Policy versions as the labels of weights that the server keeps: ``TOKEN:VERSION``, the token new for each engine.

    A label of another engine in an answer means that somebody else has pushed weights into the same server.

    >>> mine = Versions("ab")
    >>> mine.label(3), mine.version("ab:3")
    ('ab:3', 3)
    >>> mine.version("cd:4")
    Traceback (most recent call last):
    ...
    RuntimeError: The server's weights have the label cd:4, which this engine never gave (its own begin with ab:); ...
    """

    def __init__(self, token: str):
        self.token = token

    def label(self, version: int) -> str:
        """What the server is to call weights of ``version``."""
        return f"{self.token}:{version}"

    def version(self, label: str) -> int:
        """The version that ``label`` was made of.

        Raises:
            RuntimeError: it is not one of ours.
        """
        token, _, number = label.rpartition(":")
        if token != self.token:
            raise RuntimeError(
                f"The server's weights have the label {label}, which this engine never gave (its own begin with "
                f"{self.token}:); give every trainer a server of its own."
            )
        return int(number)

    def per_token(self, spans: Iterable[dict[str, Any]], num_tokens: int) -> torch.Tensor:
        """Versions ``[num_tokens]`` int64 from spans ``{version, start, end}`` over the response.

        >>> spans = [{"version": "ab:3", "start": 0, "end": 1}, {"version": "ab:4", "start": 1, "end": 3}]
        >>> Versions("ab").per_token(spans, 3)
        tensor([3, 4, 4])

        Raises:
            ServerError: they cover another number of tokens.
        """
        parts = [torch.full((span["end"] - span["start"],), self.version(span["version"])) for span in spans]
        versions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        if len(versions) != num_tokens:
            raise ServerError(f"The server labelled {len(versions)} tokens of {num_tokens} with their weights.")
        return versions


@dataclass(frozen=True)
class Order:
    """One group as it is sent: what to sample, and what the server is to remember about it.

    Args:
        name: of the request, unique in the server.
        request: the group.
        room: most response tokens.
        sampling: how they are drawn.
        stop_token_ids: the tokens that end a response.
        cache_salt: cached prompts are shared between requests of one salt only; it is new after every push.
        version: of the weights when this was sent.
    """

    name: str
    request: GroupRequest
    room: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    cache_salt: str
    version: int


def refusal(error: ServerError, url: str, advice: str) -> Exception:
    """What to raise for the answer of a server of somebody else: a sentence for whoever can mend it, or ``error``.

    >>> str(refusal(ServerError("POST /pause was answered with status 404", 404), "http://h:1", "upgrade it"))
    'The server at http://h:1 lacks what a trainer needs (POST /pause was answered with status 404); upgrade it.'
    """
    if error.status == 401:
        return UserError(f"The server at {url} refused the key; set engine.api_key to its own.")
    if error.status in (403, 404, 405):
        return UserError(f"The server at {url} lacks what a trainer needs ({error}); {advice}.")
    return error


class Dialect(Protocol):
    """How one kind of server is started and spoken to; every exchange blocks and may raise :class:`ServerError`."""

    name: str
    package: str

    def command(self, options: ServerOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """What starts one on ``port`` of the loopback interface, where everything wants ``key``."""
        ...

    def environment(self, options: ServerOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """What it needs on top of this process's environment."""
        ...

    def connect(self, client: HttpClient, deadlines: Deadlines, label: str) -> int:
        """Check that the server can do all that is needed, label its weights, and return its context in tokens."""
        ...

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for what this server cannot do."""
        ...

    def generate(self, client: HttpClient, order: Order, versions: Versions, timeout_s: float) -> tuple[Sample, ...]:
        """Sample one group; as many samples as were asked for."""
        ...

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        """End the request called ``name``; one that the server does not know is no error."""
        ...

    def push(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Load the safetensors in ``folder``; what is in flight goes on, its next token from the new weights."""
        ...

    def probe(self, client: HttpClient, timeout_s: float) -> None:
        """A small question that only a server whose workers still work can answer."""
        ...

    def sleep(self, client: HttpClient, timeout_s: float) -> None: ...

    def wake(self, client: HttpClient, timeout_s: float) -> None: ...
