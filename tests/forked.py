"""A process that has imported what every run imports, and forks one child per command: eight seconds are spent once.

A light one has imported what every command line imports, and a child of it ends where it imports one of :data:`HEAVY`.

Each child is a process of its own in everything that a command can change: arguments, working directory, environment,
Hydra, loggers, signals. vLLM is hidden from them, as on a machine where it is not installed. Workers are forked by
:class:`ForkLauncher`. All processes of one run of pytest share one of each kind.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

from sota_grpo.workers.base import ProcessLauncher, serve_child

HEAVY = ("torch", "transformers", "torchrl", "tensordict", "vllm", "ray", "datasets", "wandb", "plotly", "pyarrow")
_OUTPUTS = ("stdout", "stderr")
_CACHES = ("HF_HOME", "HF_DATASETS_CACHE")  # read while libraries are imported
_MESSAGE_BYTES = 1 << 17
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # before a test changes it
_started: list[subprocess.Popen[bytes]] = []  # they end with this process


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def require(self, command: object) -> None:
        """Fail unless the exit code is 0."""
        assert self.code == 0, f"{command}\nexit code {self.code}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}"


def _connect(kind: str) -> socket.socket:
    """To a fork of this test run's process of that kind; it is started if there is none.

    Who binds the name of its socket starts it; all others wait in that socket's queue meanwhile.
    """
    address = f"\0{__name__} {kind} {os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"  # no file
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(ConnectionRefusedError):
            connection.connect(address)
            return connection
        connection.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another was faster
            listener.listen()
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, kind, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=_ENVIRONMENT,
                cwd=Path(__file__).resolve().parents[1],
            )
            _started.append(server)


class _Fork:
    """A connection to a fork of a prepared process, which forks again for each job: one at a time."""

    def __init__(self, kind: str) -> None:
        self._socket = _connect(kind)

    def start(self, job: Mapping[str, Any], files: Sequence[int]) -> int:
        """Fork a process for a job, with these open files; its id."""
        message = json.dumps(job).encode()
        assert len(message) < _MESSAGE_BYTES, "arguments and environment are too long for one message"
        socket.send_fds(self._socket, [message], files)
        return self.answer()

    def answer(self, timeout_s: float | None = None) -> int:
        """The next number: the id of a process that was started, then how it ended; or ``TimeoutError``."""
        self._socket.settimeout(timeout_s)
        answer = self._socket.recv(_MESSAGE_BYTES)
        assert answer, "the prepared process has ended; its own error is above"
        return int(answer)

    def close(self) -> None:
        """End the fork; its child is left to its time limit."""
        self._socket.close()


class ForkServer:
    """Runs commands in forks of a prepared process, one at a time.

    Args:
        folder: for what they print.
        environment: of the commands; whole, but for where libraries keep what they download and convert.
        light: see this file's first lines.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, light: bool = False):
        self._folder, self._environment = folder, environment
        self._fork = _Fork("light" if light else "heavy")

    def run(self, arguments: Sequence[str], **options: Any) -> Done:
        """Run the Python script ``arguments[0]`` with the other arguments, to its end; options as of :meth:`start`."""
        self.start(arguments, **options)
        return self.finish()

    def start(
        self, arguments: Sequence[str], *, cwd: Path, environment: Sequence[tuple[str, str]] = (), timeout_s: int = 300
    ) -> int:
        """Begin to run it; returns the id of its process, for signals. One at a time: :meth:`finish` waits for it."""
        job = {"arguments": list(arguments), "cwd": str(cwd), "environment": {**self._environment, **dict(environment)}}
        job |= {"timeout_s": timeout_s, "path": dict(environment).get("PYTHONPATH", "").split(os.pathsep)}
        with (self._folder / "stdout").open("wb") as stdout, (self._folder / "stderr").open("wb") as stderr:
            return self._fork.start(job, [stdout.fileno(), stderr.fileno()])

    def finish(self) -> Done:
        """Wait for the command that was started."""
        return Done(self._fork.answer(), *((self._folder / name).read_text(errors="replace") for name in _OUTPUTS))

    def close(self) -> None:
        """Give the fork back; a command that is under way is left to its time limit."""
        self._fork.close()


class _ForkedWorker:
    """What :class:`~sota_grpo.workers.base.ProcessWorker` asks of a ``Popen``."""

    def __init__(self, environment: Mapping[str, str], connection: int) -> None:
        self._fork, self._lock = _Fork("heavy"), threading.Lock()
        self._code: int | None = None
        readable, writable = os.pipe()
        job = {"owner": os.getpid(), "path": sys.path, "environment": dict(environment)}
        self.pid = self._fork.start(job, [writable, writable, connection])
        os.close(writable)
        self.stdout = os.fdopen(readable, "rb")

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:  # of several threads
            if self._code is None:
                try:
                    self._code = self._fork.answer(timeout)
                except TimeoutError:
                    raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0) from None
                self._fork.close()
            return self._code


class ForkLauncher(ProcessLauncher):
    """Starts workers in forks of a prepared process, for tests of what they compute.

    They have no subreaper above them, and one hash seed: sets of texts have one order in all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spawner.submit = self._submit  # type: ignore[method-assign, assignment]

    @staticmethod
    def _submit(popen: object, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any):
        started: Future[_ForkedWorker] = Future()
        (connection,) = pass_fds
        started.set_result(_ForkedWorker(env, connection))
        return started


def _become(job: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """In the child: what the job says, and exit as that does."""
    os.setsid()
    os.environ |= {name: value for name, value in job["environment"].items() if name not in _CACHES}
    for name in os.environ.keys() - job["environment"].keys() - {*_CACHES}:
        del os.environ[name]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in enumerate(files[:2], start=1):
        os.dup2(file, descriptor)
        os.close(file)
    if "owner" in job:
        sys.path[:] = job["path"]
        serve_child(files[2], job["owner"])
        os._exit(0)
    sys.path[:0] = filter(None, job["path"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
    signal.alarm(job["timeout_s"])  # ends the child; its workers end with it
    os.chdir(job["cwd"])
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


def _prepare(kind: str) -> None:
    """Import, then leave nothing for a child to look through or copy."""
    gc.disable()
    if kind == "light":
        assert not {*HEAVY} & sys.modules.keys()
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
    gc.freeze()


def _accept(listener: socket.socket) -> None:
    """Fork for each test process that connects, until the one that started this is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork stays a zombie
    forks = []
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        forks.append(os.fork())
        if forks[-1] == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _forked(_serve, connection)
        connection.close()
    for fork in forks:  # those that are left still use the caches
        with suppress(ChildProcessError):
            os.waitpid(fork, 0)


def _forked(live: Callable[..., object], *args: Any) -> NoReturn:
    """The life of a fork: nothing of it comes back to where it was forked."""
    try:
        live(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(connection: socket.socket) -> None:
    """Fork for each job; a child is reaped when the next comes or the client is gone: until then its id is its."""
    with suppress(ConnectionError):  # no client waits for an answer
        while True:
            message, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
            with suppress(ChildProcessError):
                os.wait()
            if not message:
                return
            child = os.fork()
            if child == 0:
                connection.close()
                _forked(_become, json.loads(message), files)
            for file in files:
                os.close(file)
            connection.send(b"%d" % child)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            connection.send(b"%d" % code)


if __name__ == "__main__":
    caches = tempfile.mkdtemp()
    os.environ |= dict.fromkeys(_CACHES, caches)
    _prepare(sys.argv[1])
    _accept(socket.socket(fileno=int(sys.argv[2])))
    shutil.rmtree(caches, ignore_errors=True)
