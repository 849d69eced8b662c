"""Talking to an inference server over HTTP: one pool of connections, a deadline on every wait, errors that say what."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import urllib3

from sota_grpo.errors import RunFailed, UserError

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
            said = response.data.decode(errors="replace").strip()[:_SHOWN_CHARACTERS]
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
