"""What runs beside an inference server: the launcher that ends it with the trainer, and the check of its key.

Standard library only. The launcher is run as a file, so that a process which only watches does not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hmac
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it too; a command line would show it to every user of the machine
LAUNCHER_SAYS = "[launcher] server process "
_LOOK_EVERY_S = 0.2
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Run a server until it ends, SIGTERM comes, or the process ``--parent`` is gone, even by SIGKILL.

    Whichever it is: the server is asked to end and given 5 seconds, ``--scratch`` is deleted, and this whole process
    group, the launcher included, is killed. So no process of the server outlives the trainer.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True, help="process that this one belongs to")
    parser.add_argument("--scratch", required=True, help="folder that is deleted at the end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the server's command")
    given = parser.parse_args(argv)
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    server = subprocess.Popen(given.command[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_launcher())
    while server.poll() is None and not asked_to_end and os.getppid() == given.parent:
        time.sleep(_LOOK_EVERY_S)
    if server.poll() is None:
        _say("asked to end" if asked_to_end else f"process {given.parent} is gone", server)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
    else:
        _say(_how_it_ended(server.returncode), server)
    shutil.rmtree(given.scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _how_it_ended(returncode: int) -> str:
    """In words.

    >>> _how_it_ended(-9), _how_it_ended(1)
    ('killed by signal 9', 'ended with exit code 1')
    """
    return f"killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"


def _say(what: str, server: subprocess.Popen[bytes]) -> None:
    print(f"\n{LAUNCHER_SAYS}{server.pid}: {what}", flush=True)


def _die_with_launcher() -> Callable[[], None] | None:
    """On Linux: a function for the child that has the kernel kill it when the launcher dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: the child may only call it

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask_kernel


class RequireKey:
    """ASGI middleware: every path but ``/health`` needs the key of the environment variable ``VLLM_API_KEY``.

    vLLM's own check covers ``/v1`` and ``/inference`` only, which leaves pausing, pushing weights and running methods
    of the workers open to every user of the machine.

    Raises:
        RuntimeError: the variable is not set.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set; the server would be open to every user of this machine.")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"This path needs the server's API key."})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


if __name__ == "__main__":
    main()
