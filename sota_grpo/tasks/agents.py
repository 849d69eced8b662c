"""Run a user's agent (``env.agent``) in an environment worker: a Python function, or a command line.

A function ``run(row, base_url, api_key)``, which may be ``async``, gets the dataset row and the address and key of the
run's server, and returns the reward: a number, or a dict with ``reward`` and further results (32,768 characters in
all). A command gets the row in a JSON file, whose path is its last argument, and address and key in the environment
variables of OpenAI's and Anthropic's clients; the last line that it prints is the result, as JSON. Does not import
torch.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import file_reference, load_python
from sota_grpo.rewards.functions import plain
from sota_grpo.text import one_line
from sota_grpo.workers.instances import InstanceLost

AGENT = "agent"
SESSIONS = "sessions"  # the value of the option with which outside programs run the episodes
OPTION = f"env.{AGENT}"
_MOST_CHARS = 1 << 15  # of a result, less than a worker returns
_LOADS = threading.Lock()


class Agent:
    """Runs a user's agent for one episode: :meth:`reset` takes the dataset row, :meth:`call` runs the agent.

    The constructor executes the file of ``value``, which is ``FILE.py:NAME`` or a command line, and adds 127.0.0.1 to
    ``NO_PROXY`` of this process. UserError if the agent cannot be used, ValueError or IndexError for a malformed or
    empty command line.
    """

    schemas: tuple[dict[str, Any], ...] = ()  # an agent brings its own tools

    def __init__(self, value: str) -> None:
        self._value, self._row = value, dict[str, Any]()
        with _LOADS:  # episodes begin on several threads
            hosts = (os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "").split(",")
            if "127.0.0.1" not in hosts:  # the server is on this machine
                os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join([*filter(None, hosts), "127.0.0.1"])
            self._run = _function(value) if file_reference(value) else None
        if self._run is None and shutil.which(shlex.split(value)[0]) is None:
            raise UserError(f"{OPTION}={value} is neither FILE.py:NAME nor a command on the PATH; correct it.")
        self._process: subprocess.Popen[bytes] | None = None

    def reset(self, **row: Any) -> None:
        self._row = row

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run the agent with the ``arguments`` base_url and api_key; return its result (``async``: an awaitable of it).

        InstanceLost if a command fails or its last line is not JSON; exceptions of a function propagate.
        """
        if self._run is not None:
            made = self._run(self._row, **arguments)
            return _awaited(made) if inspect.isawaitable(made) else _result(made)
        return _result(self._command(**arguments))

    def _command(self, base_url: str, api_key: str) -> Any:
        with tempfile.TemporaryDirectory(prefix="sota_grpo_agent_") as folder:
            row = Path(folder) / "row.json"
            row.write_text(json.dumps(self._row), encoding="utf-8")
            address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
            address["ANTHROPIC_BASE_URL"] = base_url.removesuffix("/v1")
            inherited = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"}
            # not pipes, which a child in the background may keep open
            files = Path(folder) / "stdout", Path(folder) / "stderr"
            with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
                self._process = process = subprocess.Popen(
                    [*shlex.split(self._value), str(row)],
                    env={**inherited, **address},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            try:
                process.wait()
            finally:
                self.kill()  # children that are still running
                self._process = None  # the process id may be reused
            last, last_error = (file.read_text("utf-8", "replace").strip().rpartition("\n")[2] for file in files)
        if process.returncode != 0:
            why = one_line(last_error, 200)
            raise InstanceLost(f"the agent ended with status {process.returncode}; its last line on stderr is {why!r}")
        try:
            return json.loads(last)
        except ValueError:
            shown = one_line(last, 80)
            raise InstanceLost(f"the agent's last line is not JSON: {shown!r}; print the reward as JSON") from None

    def kill(self) -> None:
        """Kill the process group of the running command, if there is one; thread-safe."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


async def _awaited(made: Awaitable[Any]) -> Any:
    return _result(await made)


def _result(made: Any) -> Any:
    """Return a scalar of NumPy or torch as a number, and a dict as JSON types (:func:`~.functions.plain`).

    Of a dict, ``reward``, then numbers, then other entries are kept as far as they have room.
    """
    if not isinstance(made, Mapping):
        return made.item() if hasattr(made, "item") else made
    entries, kept, left = plain(made), dict[str, Any](), _MOST_CHARS
    for name in sorted(entries, key=lambda name: (name != "reward", not isinstance(entries[name], (int, float)))):
        size = len(json.dumps([name, entries[name]]))
        if size <= left:
            kept[name], left = entries[name], left - size
    return kept


@lru_cache(maxsize=1)
def _function(value: str) -> Any:
    path, name = file_reference(value) or (Path(value), "")
    members = load_python(path, f"{OPTION}={value}", UserError)
    if not callable(members.get(name)):
        raise UserError(f"{OPTION}={value}: the file does not define a function {name}; correct the name.")
    return members[name]
