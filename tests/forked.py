"""A process that has imported what every run imports, and forks one child per command: eight seconds are spent once.

A light one has imported what every command line imports, and a child of it ends where it imports one of :data:`HEAVY`.

Each child is a process of its own in everything that a command can change: arguments, working directory, environment,
Hydra, loggers, signals. vLLM is hidden from them, as on a machine where it is not installed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

HEAVY = ("torch", "transformers", "torchrl", "tensordict", "vllm", "ray", "datasets", "wandb", "plotly", "pyarrow")
_OUTPUTS = ("stdout", "stderr")


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def require(self, command: object) -> None:
        """Fail unless the exit code is 0."""
        assert self.code == 0, f"{command}\nexit code {self.code}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}"


class ForkServer:
    """The process, from the side of the tests."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, light: bool = False):
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["light"] if light else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
            cwd=Path(__file__).resolve().parents[1],
        )

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Sequence[tuple[str, str]] = (),
        timeout_s: int = 300,
    ) -> Done:
        """Run the Python script ``arguments[0]`` with the other arguments, to its end."""
        self.start(arguments, cwd=cwd, environment=environment, timeout_s=timeout_s)
        return self.finish()

    def start(
        self, arguments: Sequence[str], *, cwd: Path, environment: Sequence[tuple[str, str]] = (), timeout_s: int = 300
    ) -> int:
        """Begin to run it; returns the id of its process, for signals. One at a time: :meth:`finish` waits for it."""
        assert self._process.stdin is not None
        job = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
        job |= {"timeout_s": timeout_s, "folder": str(self._folder)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer()

    def finish(self) -> Done:
        """Wait for the command that was started."""
        return Done(self._answer(), *((self._folder / name).read_text(errors="replace") for name in _OUTPUTS))

    def _answer(self) -> int:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the fork server has ended; its own error is above"
        return int(answer)

    def close(self) -> None:
        """End the process; a command that is under way is left to its time limit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _become(job: Mapping[str, Any]) -> NoReturn:
    """In the child: run the script and exit as it does."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
    signal.alarm(job["timeout_s"])  # ends the child; its workers end with it
    os.chdir(job["cwd"])
    os.environ.update(job["environment"])
    sys.path[:0] = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in enumerate(_OUTPUTS, start=1):
        os.dup2(os.open(Path(job["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = job["arguments"]
    code = _exit_code(sys.argv[0])
    # as Python ends, but for half a second in which it frees one by one what was imported
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _exit_code(script: str) -> int:
    """Run a script; the code that it ends with, its words or its traceback printed."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


class _Refuse:
    """Whether a package is there may be asked; to import one ends the process by a way that nothing catches."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in HEAVY else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        os.write(2, f"{spec.name} was imported\n".encode())
        os._exit(99)

    def exec_module(self, module: object) -> None: ...


def _serve() -> None:
    gc.disable()  # while all is imported
    if sys.argv[1:] == ["light"]:
        sys.meta_path.insert(0, _Refuse())  # type: ignore[arg-type]
        import hydra  # noqa: F401

        import sota_grpo.run.entry
    else:
        sys.modules["vllm"] = None  # type: ignore[assignment]
        import datasets  # noqa: F401
        import peft  # noqa: F401

        import sota_grpo.assembly.estimate
        import sota_grpo.assembly.evaluation
        import sota_grpo.report
        import sota_grpo.run.app
        import sota_grpo.run.entry  # noqa: F401
        from sota_grpo.assembly.compose import compose
        from sota_grpo.policy.load import load_model

        # what these read and compile, every run would read and compile again
        compose("grpo_cpu", ["seed=0"])
        load_model("tiny")

    gc.collect()
    gc.enable()
    gc.freeze()  # a child neither looks through nor copies what was imported here
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
