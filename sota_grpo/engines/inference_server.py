"""The process of an inference server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sota_grpo.errors import RunFailed
from sota_grpo.orphans import LAUNCHER_SAYS, launcher
from sota_grpo.text import one_line

_POLL_S = 0.2
_KILL_S = 3.0
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): \S.*")
_LONGEST_ERROR = 300
# These describe this process and would mislead a server that has processes of its own.
_NOT_INHERITED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ServerDied(RunFailed, RuntimeError):
    """The server's process has ended; the message has the cause that its log shows."""


class ServerLate(RunFailed, TimeoutError):
    """The server's process is alive and did not answer in time."""


class ServerProcess:
    """A server and its launcher, in a session of their own: Ctrl-C in this terminal does not reach them.

    When this process ends, even by SIGKILL, the launcher ends the server and deletes ``scratch``.

    Args:
        environment: of the server, on top of this process's.
        log_path: the server's output is appended to this file.
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
        self.pid = self._launcher.pid  # leads the group of all processes of the server

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Whether the server has ended, or ends in the next ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while not self._ended:
            if self._launcher.poll() is not None:
                self._ended = True
                self._kill_group()  # leaves nothing to do, unless the launcher itself was killed
            elif time.monotonic() < deadline:
                time.sleep(_POLL_S)
            else:
                break
        return self._ended

    def _kill_group(self) -> None:
        """Kill the rest of the group and wait until its memory is freed (zombies may stay in a container)."""
        deadline = time.monotonic() + _KILL_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            self._launcher.wait()
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)

    def said(self) -> str:
        """Return the log since this start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def died(self, doing: str) -> ServerDied:
        """Return the error to raise when the server has ended while ``doing`` something."""
        lines = self.said().splitlines()
        ended = next((line.partition(": ")[2] for line in lines if line.startswith(LAUNCHER_SAYS)), "")
        # The cause is often logged by a process that ended first, far above the last lines; warnings quote errors too.
        errors = (match[0] for line in lines if "WARNING" not in line and (match := _ERROR.search(line)))
        error = one_line(next(errors, ""), _LONGEST_ERROR)
        cause = ", ".join(filter(None, [ended, error])) or "killed, its launcher too"
        return ServerDied(f"The inference server ended {doing} ({cause}); see its output in {self.log_path}.")

    def close(self, *, grace_s: float = 10.0) -> None:
        """End all processes of the server."""
        if self.has_ended():
            return
        self._launcher.terminate()
        if not self.has_ended(within_s=grace_s):
            self._kill_group()
            self._ended = True
