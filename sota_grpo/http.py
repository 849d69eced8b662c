"""HTTP client for engines, judges, sandboxes and environments; every request has a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import urllib3

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.text import first_line, one_line

_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 400


class ServerError(RunFailed, RuntimeError):
    """A request failed: an error status (``status``), or (``status`` None) an unusable answer or no answer."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class ServerSilent(ServerError):
    """The server did not answer: no connection, a broken one, or (``is_late``) the deadline passed on a connection."""

    def __init__(self, message: str, *, is_late: bool = False):
        super().__init__(message)
        self.is_late = is_late


class HttpClient:
    """A thread-safe client for JSON over HTTP with one server; it follows no redirects, whose target would get the key.

    The constructor does not connect. A request whose connection breaks before the response is sent once more.

    Args:
        url: ``http[s]://HOST:PORT``, with a path prefix if the server has one; else UserError.
        api_key: bearer token sent with every request; None: no token.
        option: name of the option with ``url``, for error messages.
        max_connections: most connections that stay open for later requests; more concurrent requests open further ones.
        max_bytes: size of the largest response that is accepted; None: no limit.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        option: str = "engine.url",
        max_connections: int = 8,
        max_bytes: int | None = None,
    ):
        self.url = url.rstrip("/")
        try:
            address, self._pool = urlsplit(url), urllib3.connection_from_url(self.url, maxsize=max_connections)
        except ValueError:  # such as a port that is no number
            address = urlsplit("")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UserError(f"{option}={one_line(url)} is not the address of a server; write http://HOST:PORT.")
        self.host = address.hostname
        self._prefix, self._max_bytes = address.path.rstrip("/"), max_bytes
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, timeout_s: float) -> Any:
        """Send ``GET path``; return and raise as :meth:`post`."""
        return self._parsed("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Send ``POST path`` with ``body`` as JSON (None: ``{}``); return the response's parsed JSON, else its text.

        It raises as :meth:`request`, and ServerError for a status other than 2xx or invalid JSON declared as JSON.
        """
        return self._parsed("POST", path, b"{}" if body is None else json.dumps(body).encode(), timeout_s)

    def close(self) -> None:
        """Close the idle connections; later requests raise :class:`ServerSilent`. Idempotent."""
        self._pool.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request and return (status, headers, content) of the response, also for an error status.

        ServerSilent: the connection fails, or no complete response within ``timeout_s`` seconds. ServerError: more than
        ``max_bytes``.
        """
        sent = f"{method} {self.url}{path}"
        late = f"{sent} was not answered within {timeout_s:g} s."
        unchanged = {"retries": False, "redirect": False, "preload_content": False}
        options: dict[str, Any] = {"body": body, "headers": self._headers, **unchanged}
        deadline, content = time.monotonic() + timeout_s, bytearray()

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        def urlopen() -> urllib3.BaseHTTPResponse:
            timeout = urllib3.Timeout(connect=_CONNECT_S, total=left())
            return self._pool.urlopen(method, self._prefix + path, timeout=timeout, **options)

        try:
            try:
                response = urlopen()
            except urllib3.exceptions.ProtocolError:
                # A server may close an idle connection as it is used again. Requests may be repeated: generation is
                # seeded, pausing or pushing twice ends in the same state; a judge may charge twice.
                response = urlopen()
            try:
                while piece := response.read1(1 << 16):  # returns what has come: the deadline is for the whole
                    content += piece
                    if self._max_bytes is not None and len(content) > self._max_bytes:
                        raise ServerError(f"{sent} was answered with more than {self._max_bytes} bytes.")
                    if time.monotonic() > deadline:
                        raise ServerSilent(late, is_late=True)
                    if (socket := getattr(response.connection, "sock", None)) is not None:  # None: the server closes it
                        socket.settimeout(left())
            except BaseException:
                response.close()
                raise
            response.release_conn()
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerSilent(late, is_late=True) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = first_line(error).rpartition(": ")[2].rstrip(".")
            raise ServerSilent(f"{sent} found no server, or the connection broke: {cause}.") from error
        return response.status, response.headers, bytes(content)

    def _parsed(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        status, headers, content = self.request(method, path, body, timeout_s=timeout_s)
        sent, text = f"{method} {self.url}{path}", content.decode(errors="replace")
        if not 200 <= status < 300:
            shown = one_line(text.strip(), _SHOWN_CHARACTERS)
            raise ServerError(f"{sent} was answered with status {status}: {shown or 'no text'}", status)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            if "json" not in headers.get("content-type", ""):
                return text
            raise ServerError(f"{sent} was answered with invalid JSON: {first_line(error)}.") from error
