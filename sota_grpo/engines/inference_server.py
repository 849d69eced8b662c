"""An inference server seen from outside: its process, HTTP to it, and how each kind is started and spoken to."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sota_grpo.engines import Deadlines, EngineOptions
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.http import HttpClient, ServerError
from sota_grpo.orphans import LAUNCHER_SAYS, launcher
from sota_grpo.rl.records import GroupRequest, Sample, Sampling
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)
SOCKET_BYTES = len("/sota-grpo-vllm-12345678/") + 36  # below the temporary folder: vLLM names a socket by a UUID
_NO_LOG_PROB = -9000.0  # vLLM writes -9999 where a log-prob is missing, infinite or NaN
Exchange = tuple[str, Any]  # path and body; a body of None is an empty one
_PORT_TRIES = 3
_POLL_S = 0.2
_BURIAL_S = 3.0
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): \S.*")
_LONGEST_ERROR = 300
# What this process says about itself would mislead a server that has processes of its own.
_NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ServerDied(RunFailed, RuntimeError):
    """The server's process has ended; the message has the cause, as far as its log tells it."""


class ServerLate(RunFailed, TimeoutError):
    """The server's process lives, and did not answer in time."""


def refused_key(client: HttpClient) -> UserError:
    """What a status of 401 means."""
    return UserError(f"The server at {client.url} refused the key; set engine.api_key (SOTA_GRPO_API_KEY) to its own.")


@dataclass(frozen=True)
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

    token: str

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
        stop_token_ids: the tokens that end a response, but for ``sampling.ignore_eos``.
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


class Dialect(ABC):
    """How one kind of server is started and spoken to; every exchange blocks and may raise :class:`ServerError`.

    Attributes:
        name: of the engine.
        package: that a server of this kind is started from.
        remedy: what mends a server that lacks something.
        generate_path: where groups are sampled.
        probe_path: a small question that only a server whose workers still work can answer.
        pause, resume: path and body of what freezes everything in flight, and lets it go on.
        relabel: what goes with a new label of the weights.
        takes_uploads: it can be started with what takes weights over HTTP (:mod:`.weight_upload`).
        free_memory, restore_memory: path and body of what frees its GPU memory, and takes it again.
    """

    name: str
    package: str
    remedy: str
    generate_path: str
    probe_path: str
    pause: Exchange
    resume: Exchange
    relabel: Mapping[str, Any] = MappingProxyType({})
    takes_uploads = False
    free_memory: Exchange
    restore_memory: Exchange

    @abstractmethod
    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """What starts one on ``port`` of the loopback interface, where everything wants ``key``."""

    @abstractmethod
    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """What it needs on top of this process's environment."""

    @abstractmethod
    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        """End the request called ``name``; one that the server does not know is no error."""

    @abstractmethod
    def _request(self, order: Order) -> dict[str, Any]:
        """The body that asks for one group."""

    @abstractmethod
    def _samples(self, answer: Any, order: Order, versions: Versions) -> tuple[Sample, ...]:
        """What was answered to it."""

    @abstractmethod
    def _load(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Replace and label the weights of a server that is paused, and was ``idle`` before."""

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:  # noqa: B027
        """Raise ValueError for what this server cannot do."""

    def _check_sampling(self, client: HttpClient, deadlines: Deadlines) -> None:  # noqa: B027
        """Raise UserError where its log-probs are not those of what it samples from."""

    def connect(self, client: HttpClient, deadlines: Deadlines, label: str) -> int:
        """Check that the server can do all that is needed, label its weights, and return its context in tokens.

        Raises:
            UserError: the key is wrong or something is missing; with what mends it.
            ServerError: the server has another fault.
        """
        try:
            context = client.get("/v1/models", timeout_s=deadlines.control)["data"][0]["max_model_len"]
            client.post(*self.resume, timeout_s=deadlines.control)  # a trainer that died may have left it paused
            self._label(client, label, deadlines)
            self._check_sampling(client, deadlines)
        except ServerError as error:
            if error.status == 401:
                raise refused_key(client) from error
            if error.status not in (403, 404, 405):
                raise
            lacks = f"The server at {client.url} lacks what a trainer needs ({error}); {self.remedy}."
            raise UserError(lacks) from error
        return int(context)

    def label_to_build_on(self, client: HttpClient, deadlines: Deadlines) -> str | None:
        """The label of the server's weights, where those that a push leaves out stay; None: a push has to be whole."""
        return None

    def _label(self, client: HttpClient, label: str, deadlines: Deadlines) -> None:
        body = {"new_version": label, **self.relabel}
        client.post("/update_weight_version", body, timeout_s=deadlines.control)

    def generate(self, client: HttpClient, order: Order, versions: Versions, timeout_s: float) -> tuple[Sample, ...]:
        """Sample one group; as many samples as were asked for."""
        answer = client.post(self.generate_path, self._request(order), timeout_s=timeout_s)
        try:
            return self._samples(answer, order, versions)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"POST {client.url}{self.generate_path} was answered in a form this client does not know ({error!r}): "
                f"{str(answer)[:300]}"
            ) from error

    def push(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Load the safetensors in ``folder``; what is in flight goes on, its next token from the new weights."""
        client.post(*self.pause, timeout_s=deadlines.control)
        try:
            self._load(client, folder, label, deadlines, idle=idle)
        except ServerError:
            with contextlib.suppress(ServerError):  # the first error is the cause
                client.post(*self.resume, timeout_s=deadlines.control)
            raise
        client.post(*self.resume, timeout_s=deadlines.control)


def finite_sample(
    token_ids: Sequence[int], log_probs: Sequence[float], versions: torch.Tensor, *, truncated: bool
) -> Sample:
    """A sample as a server told it.

    Raises:
        ServerError: a log-prob is not finite.
    """
    told = torch.tensor(log_probs, dtype=torch.float32)
    if not bool((told.isfinite() & (told > _NO_LOG_PROB)).all()):
        raise ServerError("The server reports no finite log-prob for a token that it sampled.")
    return Sample(torch.tensor(token_ids, dtype=torch.int64), told, versions, truncated)


class ServerProcess:
    """A server and its launcher, in a session of their own: a Ctrl-C meant for this process does not reach them.

    The launcher ends the server when this process ends, however that happens, and deletes ``scratch`` then.

    Args:
        command: what runs the server.
        environment: of the server, on top of this process's.
        log_path: what the server prints is appended to this file.
        scratch: folder that is deleted with the server.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, scratch: Path):
        self.log_path = log_path
        self._ended = False
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        package_root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, [package_root, inherited.get("PYTHONPATH")]))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._launcher = subprocess.Popen(
                [*launcher(scratch), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | {"PYTHONPATH": python_path} | dict(environment),
                start_new_session=True,
            )
        self.pid = self._launcher.pid  # which leads the group of all processes of the server

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Whether the server has ended, or does so in the next ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while not self._ended:
            if self._launcher.poll() is not None:
                self._ended = True
                self._kill_group()  # nothing is left of it, unless the launcher itself was killed
            elif time.monotonic() < deadline:
                time.sleep(_POLL_S)
            else:
                break
        return self._ended

    def _kill_group(self) -> None:
        """Kill all that is left, and wait until the kernel has freed their memory (zombies may stay in a container)."""
        deadline = time.monotonic() + _BURIAL_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            self._launcher.wait()
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)

    def said(self) -> str:
        """The log since this start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def cause(self) -> str:
        """How it ended, as its launcher says, and the first error that it told."""
        lines = self.said().splitlines()
        ended = next((line.partition(": ")[2] for line in lines if line.startswith(LAUNCHER_SAYS)), "")
        # The cause is often told by a process that ended first, far above the last lines; warnings quote errors too.
        errors = (match[0] for line in lines if "WARNING" not in line and (match := _ERROR.search(line)))
        error = one_line(next(errors, ""), _LONGEST_ERROR)
        return ", ".join(filter(None, [ended, error])) or "killed, its launcher too"

    def died(self, doing: str) -> ServerDied:
        """The error to raise when it has ended while ``doing`` something."""
        return ServerDied(f"The inference server ended {doing} ({self.cause()}); what it said is in {self.log_path}.")

    def close(self, *, grace_s: float = 10.0) -> None:
        """End all processes of the server; idempotent."""
        if self.has_ended():
            return
        self._launcher.terminate()
        if not self.has_ended(within_s=grace_s):
            self._kill_group()
            self._ended = True


def start_server(
    dialect: Dialect, options: EngineOptions, scratch: Path, *, on_cpu: bool
) -> tuple[ServerProcess, str, str]:
    """Start a server on a free port of the loopback interface and wait until ``/health`` answers.

    Args:
        dialect: says what runs it, and in which environment.
        options: of the engine; ``log_path``, ``environment`` and ``deadlines.start`` are read here.
        scratch: folder that is deleted with it.
        on_cpu: whether it computes there.

    Returns:
        The process, its url, and the random key that it asks for.

    Raises:
        ServerDied: it ended before it answered.
        ServerLate: it did not answer in time; it was ended then.
    """
    log_path = Path(options.log_path)
    logger.info("An inference server is started; what it says goes to %s.", log_path)
    # A killed server leaves sockets and rendezvous files behind. On a GPU the temporary folder keeps compiled code too.
    leavings = {"TMPDIR" if on_cpu else "VLLM_RPC_BASE_PATH": str(scratch)}
    for attempt in range(1, _PORT_TRIES + 1):
        port, key = _free_port(), secrets.token_urlsafe(32)
        environment = {**leavings, **dialect.environment(options, key, on_cpu=on_cpu), **options.environment}
        command = dialect.command(options, port, key, scratch, on_cpu=on_cpu)
        process = ServerProcess(command, environment, log_path, scratch)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_healthy(process, HttpClient(url, api_key=key), options.deadlines.start)
        except ServerDied:
            if attempt == _PORT_TRIES or "address already in use" not in process.said().lower():
                raise
            logger.warning("Another program took port %d before the server did; trying the next one.", port)
            scratch.mkdir(mode=0o700, exist_ok=True)
            continue
        except BaseException:
            process.close()
            raise
        return process, url, key
    raise AssertionError("unreachable")


def _wait_until_healthy(process: ServerProcess, client: HttpClient, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not process.has_ended():
        try:
            client.get("/health", timeout_s=5.0)
        except ServerError as error:  # not there yet, or there and still loading
            if time.monotonic() > deadline:
                raise ServerLate(
                    f"The inference server was not ready after {start_s:g} s ({str(error).rstrip('.')}); "
                    f"what it said is in {process.log_path}."
                ) from error
            time.sleep(_POLL_S)
        else:
            client.close()
            return
    raise process.died("before it was ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
