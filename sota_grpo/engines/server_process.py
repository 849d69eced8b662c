"""An inference server as a child process: started on a free port, ended with this process, its log in a file."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sota_grpo.engines.server_dialect import HttpClient, ServerError
from sota_grpo.errors import RunFailed
from sota_grpo.orphans import LAUNCHER_SAYS, launcher
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)

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

    @property
    def pid(self) -> int:
        """Of the launcher, which leads the group of all processes of the server."""
        return self._launcher.pid

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Whether the server has ended, or does so in the next ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while not self._look() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._ended

    def _look(self) -> bool:
        if not self._ended and self._launcher.poll() is not None:
            self._ended = True
            self._kill_group()  # nothing is left of it, unless the launcher itself was killed
        return self._ended

    def _kill_group(self) -> None:
        """Kill all that is left, and wait until the kernel has freed their memory (zombies may stay in a container)."""
        deadline = time.monotonic() + _BURIAL_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            while time.monotonic() < deadline:
                os.killpg(self._launcher.pid, 0)
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
        errors = (found[0] for line in lines if "WARNING" not in line and (found := _ERROR.search(line)))
        error = one_line(next(errors, ""), _LONGEST_ERROR)
        return ", ".join(filter(None, [ended, error])) or "killed, its launcher too"

    def died(self, doing: str) -> ServerDied:
        """The error to raise when it has ended while ``doing`` something."""
        return ServerDied(f"The inference server ended {doing} ({self.cause()}); what it said is in {self.log_path}.")

    def close(self, *, grace_s: float = 10.0) -> None:
        """End all processes of the server; idempotent."""
        if self._look():
            return
        self._launcher.terminate()
        if not self.has_ended(within_s=grace_s):
            self._kill_group()
            self._ended = True


def start_server(
    make_command: Callable[[int, str], Sequence[str]],
    environment: Callable[[str], Mapping[str, str]],
    *,
    log_path: Path,
    scratch: Path,
    start_s: float,
) -> tuple[ServerProcess, str, str]:
    """Start a server on a free port of the loopback interface and wait until ``/health`` answers.

    Args:
        make_command: from port and key.
        environment: from the key.
        log_path: file for what it prints.
        scratch: folder that is deleted with it.
        start_s: seconds that loading may take.

    Returns:
        The process, its url, and the random key that it asks for.

    Raises:
        ServerDied: it ended before it answered.
        ServerLate: it did not answer in time; it was ended then.
    """
    logger.info("An inference server is started; what it says goes to %s.", log_path)
    for attempt in range(1, _PORT_TRIES + 1):
        port, key = _free_port(), secrets.token_urlsafe(32)
        process = ServerProcess(make_command(port, key), environment(key), log_path, scratch)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_healthy(process, HttpClient(url, api_key=key), start_s)
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
