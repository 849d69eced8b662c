"""An inference server seen from outside: its process, and HTTP to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.orphans import LAUNCHER_SAYS, launcher
from sota_grpo.text import one_line

SOCKET_BYTES = len("/sota-grpo-judge-12345678/") + 36  # below the temporary folder: vLLM names a socket by a UUID
_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 400
_POLL_S = 0.2
_BURIAL_S = 3.0
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): \S.*")
_LONGEST_ERROR = 300
# What this process says about itself would mislead a server that has processes of its own.
_NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ServerError(RunFailed, RuntimeError):
    """The server answered with an error, or with something that cannot be right; ``status`` is the HTTP one."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class ServerSilent(ServerError):
    """The server gave no answer: it is not there, it hung up, or the deadline passed."""


class ServerDied(RunFailed, RuntimeError):
    """The server's process has ended; the message has the cause, as far as its log tells it."""


class ServerLate(RunFailed, TimeoutError):
    """The server's process lives, and did not answer in time."""


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
        self.url, self.host = url.rstrip("/"), parts.hostname
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
        sent = f"{method} {self.url}{path}"
        options: dict[str, Any] = {
            "body": body,
            "headers": self._headers,
            "timeout": urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
            "retries": False,
            "redirect": False,  # the key goes nowhere else
        }
        try:
            try:
                response = self._pool.urlopen(method, self._prefix + path, **options)
            except urllib3.exceptions.ProtocolError:
                # A server closes idle connections, also in the moment in which one is used again. All our requests may
                # be repeated: seeds make generation repeatable, and pausing or pushing twice ends in the same state.
                response = self._pool.urlopen(method, self._prefix + path, **options)
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerSilent(f"The server is silent: {sent} was not answered within {timeout_s:g} s.") from None
        except urllib3.exceptions.HTTPError as error:
            raise ServerSilent(f"{sent} found no server, or it hung up: {error}.") from error
        if not 200 <= response.status < 300:
            said = one_line(response.data.decode(errors="replace").strip(), _SHOWN_CHARACTERS)
            raise ServerError(f"{sent} was answered with status {response.status}: {said}", response.status)
        if "json" not in response.headers.get("content-type", ""):
            return response.data.decode(errors="replace")
        try:
            return json.loads(response.data)
        except ValueError as error:
            raise ServerError(f"{sent} was answered with broken JSON: {error}.") from error


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
