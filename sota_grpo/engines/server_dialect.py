"""What is common to all inference servers that are spoken to over HTTP, and what each says in its own way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import urllib3

from sota_grpo.engines.base import Deadlines, EngineOptions
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.rl.records import GroupRequest, Sample, Sampling
from sota_grpo.text import one_line

_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 400


class ServerError(RunFailed, RuntimeError):
    """The server answered with an error, or with something that cannot be right; ``status`` is the HTTP one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class ServerSilent(ServerError):
    """The server gave no answer: it is not there, it hung up, or the deadline passed."""


class HttpClient:
    """JSON over HTTP to one server; for use from several threads.

    Args:
        url: ``http://HOST:PORT``, with a path in front of the server's own where a proxy needs one.
        api_key: sent as a bearer token with every request; None: none.
        max_connections: most requests at the same time; the connections are kept open.

    Raises:
        UserError: the url is not one of a server.

    >>> HttpClient("localhost:8000")
    Traceback (most recent call last):
    ...
    sota_grpo.errors.UserError: engine.url=localhost:8000 is not the address of a server; write http://HOST:PORT.
    """

    def __init__(self, url: str, *, api_key: str | None = None, max_connections: int = 8):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"engine.url={url} is not the address of a server; write http://HOST:PORT.")
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pool = urllib3.connection_from_url(self.url, maxsize=max_connections)

    def get(self, path: str, *, timeout_s: float) -> Any:
        """The parsed answer of ``GET path``; see :meth:`post` for the errors."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """The parsed answer of ``POST path`` with ``body`` as JSON; text where the answer is not JSON.

        Raises:
            ServerSilent: no connection, a broken one, or no answer within ``timeout_s`` seconds.
            ServerError: any status but 2xx.
        """
        return self._ask("POST", path, b"{}" if body is None else json.dumps(body).encode(), timeout_s)

    def close(self) -> None:
        """Close the idle connections; idempotent."""
        self._pool.close()

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        asked = f"{method} {self.url}{path}"
        try:
            response = self._request(method, path, body, timeout_s)
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerSilent(f"The server is silent: {asked} was not answered within {timeout_s:g} s.") from None
        except urllib3.exceptions.HTTPError as error:
            raise ServerSilent(f"{asked} found no server, or it hung up: {error}.") from error
        if not 200 <= response.status < 300:
            said = one_line(response.data.decode(errors="replace").strip(), _SHOWN_CHARACTERS)
            raise ServerError(f"{asked} was answered with status {response.status}: {said}", response.status)
        if "json" not in response.headers.get("content-type", ""):
            return response.data.decode(errors="replace")
        try:
            return json.loads(response.data)
        except ValueError as error:
            raise ServerError(f"{asked} was answered with broken JSON: {error}.") from error

    def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> urllib3.response.BaseHTTPResponse:
        options: dict[str, Any] = {
            "body": body,
            "headers": self._headers,
            "timeout": urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
            "retries": False,
            "redirect": False,  # the key goes nowhere else
        }
        try:
            return self._pool.urlopen(method, self._prefix + path, **options)
        except urllib3.exceptions.ProtocolError:
            # A server closes idle connections, also in the moment in which one is used again. All our requests may
            # be repeated: seeds make generation repeatable, and pausing or pushing twice ends in the same state.
            return self._pool.urlopen(method, self._prefix + path, **options)


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

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """What starts one on ``port`` of the loopback interface, where everything wants ``key``."""
        ...

    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
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
