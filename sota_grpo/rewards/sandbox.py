"""Sandboxes for programs that a model wrote: bubblewrap, or a SandboxFusion server. Output has a bounded size."""

from __future__ import annotations

import ast
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from sota_grpo.errors import UserError
from sota_grpo.http import HttpClient, ServerError

MAX_OUTPUT_BYTES = 1 << 20
_BWRAP = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
_SETTLE_S = 5.0  # after its deadline, until a sandbox that was killed is gone
# the first program of a sandbox: limits that cannot be raised in it, then the program as a main module
_START = """
import resource, sys
limits = {{"AS": {memory}, "CPU": {cpu}, "FSIZE": {file}, "CORE": 0, "NOFILE": 64, "NPROC": {tasks}}}
for name, most in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
with open("/program.py", encoding="utf-8", errors="surrogateescape") as file:
    source = file.read()
exec(compile(source, "/program.py", "exec"), {{"__name__": "__main__"}})
"""
# runs a program, then tests on its definitions, and prints the marks of those that pass; other output is discarded
_TESTING = """
import json, os, sys
job = json.loads(sys.stdin.read())
marks = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "program"}
steps = [(mark, compile(step, "test", "exec")) for mark, step in job.pop("steps")]
run, write, leave = exec, os.write, os._exit  # before the program can replace them
try:
    run(compile(job.pop("code"), "program", "exec"), space)
    for mark, step in steps:
        try:
            run(step, space)
        except:  # a test that raises fails, and no other
            continue
        write(marks, (mark + "\\n").encode())
finally:
    leave(0)
"""


class Ran(NamedTuple):
    """A program's output, and whether it ended by itself without an error."""

    stdout: str
    ended: bool


class Runner(Protocol):
    """Runs a Python program on an input; raises ``OSError`` where the sandbox itself fails."""

    def run(self, code: str, stdin: str) -> Ran: ...


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    wall_s: float = 8.0
    cpu_s: int = 6
    memory_mb: int = 512
    file_mb: int = 16
    tasks: int = 32  # processes and threads; Linux 5.14 counts those of the sandbox only, and no kernel limits root's


@dataclass(frozen=True)
class BwrapRunner:
    """bubblewrap: no network, a read-only root with Python and the system's libraries, a ``/tmp`` in memory, limits."""

    limits: Limits = Limits()

    def run(self, code: str, stdin: str) -> Ran:
        with tempfile.TemporaryFile() as entered, tempfile.TemporaryFile() as program:
            for file, text in ((entered, stdin), (program, code)):
                file.write(text.encode("utf-8", "surrogatepass"))
                file.seek(0)
            process = subprocess.Popen(
                self._command(program.fileno()),
                stdin=entered,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(program.fileno(),),
                start_new_session=True,
                env={},
            )
            assert process.stdout is not None
            try:
                printed, whole = _read(process.stdout, time.monotonic() + self.limits.wall_s)
                ended = whole and process.wait(_SETTLE_S) == 0
            except subprocess.TimeoutExpired:
                ended = False
            finally:  # with the first process of its namespace all others die
                process.kill()
                process.wait()
                process.stdout.close()
        return Ran(printed.decode("utf-8", "replace"), ended)

    def _command(self, program: int) -> list[str]:
        memory, file = self.limits.memory_mb << 20, self.limits.file_mb << 20
        start = _START.format(memory=memory, cpu=max(1, self.limits.cpu_s), file=file, tasks=self.limits.tasks)
        words = [_BWRAP or "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        words += ["--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp", "--hostname", "sandbox"]
        for name in _libraries():
            words += ["--ro-bind", name, name]
        for name in ("/bin", "/lib", "/lib32", "/lib64"):  # links of today's distributions, folders of others
            if os.path.islink(name):
                words += ["--symlink", os.readlink(name), name]
        words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        words += ["--size", str(memory // 4), "--tmpfs", "/tmp"]
        words += ["--ro-bind-data", str(program), "/program.py", "--remount-ro", "/"]
        return [*words, "--chdir", "/tmp", os.path.realpath(sys.executable), "-I", "-S", "-c", start]


@dataclass(frozen=True)
class FusionRunner:
    """A server with SandboxFusion's ``POST /run_code``, whose own limits apply, too."""

    url: str
    limits: Limits = Limits()

    def run(self, code: str, stdin: str) -> Ran:
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": self.limits.wall_s,
            "run_timeout": self.limits.wall_s,
            "memory_limit_MB": self.limits.memory_mb,
        }
        server = HttpClient(self.url, option="env.sandbox", max_bytes=8 * MAX_OUTPUT_BYTES)
        try:
            content = server.post("/run_code", body, timeout_s=self.limits.wall_s + _SETTLE_S)
        except ServerError as error:
            raise OSError(f"the sandbox {self.url} failed ({error})") from error
        finally:
            server.close()
        if not isinstance(content, dict) or content.get("status") == "SandboxError":
            raise OSError(f"the sandbox {self.url} failed")
        result = content.get("run_result")
        result = result if isinstance(result, dict) else {}
        ended = result.get("status") == "Finished" and result.get("return_code") == 0
        return Ran(str(result.get("stdout") or "")[:MAX_OUTPUT_BYTES], ended)


def is_url(sandbox: str) -> bool:
    """Whether ``env.sandbox`` names a server."""
    return sandbox.startswith(("http://", "https://"))


def make_runner(sandbox: str, limits: Limits = Limits()) -> Runner:
    """The runner that ``env.sandbox`` names: ``auto`` and ``bwrap`` are bubblewrap, a URL is a SandboxFusion server.

    Raises:
        UserError: bubblewrap is missing or does not work here, or ``sandbox`` is another word.
    """
    if is_url(sandbox):
        return FusionRunner(sandbox, limits)
    if sandbox not in ("auto", "bwrap"):
        raise UserError(f"env.sandbox={sandbox} is not one of auto, bwrap or the URL of a SandboxFusion server.")
    reason = why_no_bwrap()
    if reason is not None:
        raise UserError(
            f"Programs of the model run in a sandbox only, and {reason}; install bubblewrap (apt-get install "
            "bubblewrap) where user namespaces are allowed, or set env.sandbox=URL of a SandboxFusion server."
        )
    return BwrapRunner(limits)


@cache
def why_no_bwrap() -> str | None:
    """Why bubblewrap cannot be used here, None where it runs a program."""
    if sys.platform != "linux":
        return f"bubblewrap is not used on {sys.platform}"
    if _BWRAP is None:
        return "bubblewrap (bwrap) is not installed"
    token = secrets.token_hex(8)
    try:
        ran = BwrapRunner(Limits(wall_s=30.0)).run(f"print({token!r})", "")
    except OSError as error:
        return f"bubblewrap does not start ({error.strerror})"
    return None if ran == Ran(f"{token}\n", True) else "bubblewrap does not work here (user namespaces may be off)"


def run_tests(runner: Runner, program: str, tests: str | Sequence[Any]) -> list[bool]:
    """Which tests a program passes; one that raises fails alone, one that does not end fails the following, too.

    Args:
        tests: Python code whose assertions at the top level are a test each (one test where it has none), or a list of
            such code and of ``{"stdin", "stdout"}`` pairs. A pair passes where the program prints the output, white
            space at the ends of lines and of the whole aside.

    Raises:
        OSError: the sandbox itself fails.
        SyntaxError: tests that are no Python.
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    results: list[bool] = []
    for test in [tests] if isinstance(tests, str) else tests:
        if isinstance(test, Mapping):
            ran = runner.run(program, str(test.get("stdin", "")))
            results.append(ran.ended and lines(ran.stdout) == lines(str(test["stdout"])))
            continue
        # All assertions in one run. A program cannot guess the marks, but one that searches its process for them finds
        # them, and an object that equals everything passes every comparison: only outputs of pairs are compared outside
        body = ast.parse(test).body
        counted = [node for node in body if isinstance(node, ast.Assert)] or body[-1:]
        marks = {id(node): secrets.token_hex(16) for node in counted}
        steps = [(marks.get(id(node), ""), ast.unparse(node)) for node in body]
        printed = runner.run(_TESTING, json.dumps({"code": program, "steps": steps})).stdout.split()
        results += [mark in printed for mark in marks.values()]
    return results


def _read(stream: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """The output, and whether it ended before the deadline and within the bound."""
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(output) <= MAX_OUTPUT_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return bytes(output), False
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return bytes(output), True
            output += piece
    return bytes(output[:MAX_OUTPUT_BYTES]), False


@cache
def _libraries() -> list[str]:
    """Folders of Python and of the system's libraries; no site-packages."""
    candidates = ["/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin", "/etc/ld.so.cache", sys.base_prefix]
    candidates += [name for name in ("/lib", "/lib64") if not os.path.islink(name)]
    folders: list[str] = []
    for name in candidates:
        if Path(name).exists() and not any(Path(name).is_relative_to(other) for other in folders):
            folders.append(name)
    return folders
