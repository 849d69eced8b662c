"""Run programs that a model wrote in a sandbox: bubblewrap, or a SandboxFusion server. Output size is bounded."""

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
from sota_grpo.text import os_reason

MAX_OUTPUT_BYTES = 1 << 20
_BWRAP = shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")
_SETTLE_S = 5.0  # time for a killed sandbox to end after its deadline
# Both run the model's code in a module of sys.modules, because dataclasses, pickle and typing look it up. Their own
# names are in a function, so that code which lacks an import fails.
# _START runs in the sandbox: sets limits that the program cannot raise, adds the functions that Python's site module
# defines, then runs the program as main module
_START = """
def start():
    import builtins, resource, sys
    builtins.exit = builtins.quit = sys.exit
    limits = {{"AS": {memory}, "CPU": {cpu}, "FSIZE": {file}, "CORE": 0, "NOFILE": 64, "NPROC": {tasks}}}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    with open("/program.py", encoding="utf-8", errors="surrogateescape") as file:
        return compile(file.read(), "/program.py", "exec")
exec(globals().pop("start")())
"""
# _TESTING runs a program, then its tests, and prints the marks of the tests that pass; other output is discarded
_TESTING = """
def start():
    import json, os, sys
    job = json.loads(sys.stdin.read())
    marks = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    program = sys.modules["program"] = sys.modules["__main__"] = type(sys)("program")
    space = vars(program)
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
globals().pop("start")()
"""


class Ran(NamedTuple):
    """A program's output, cut to 2**20 bytes or characters; ``ended``: it exited with status 0, within the limits."""

    stdout: str
    ended: bool


class Runner(Protocol):
    """Interface of sandboxes: ``run`` runs Python ``code`` with the input ``stdin``; OSError if the sandbox fails."""

    def run(self, code: str, stdin: str) -> Ran: ...


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program, in s and MiB; a SandboxFusion server gets only ``wall_s`` and ``memory_mb``."""

    wall_s: float = 8.0
    cpu_s: int = 6  # of each process
    memory_mb: int = 512  # of each process, with bubblewrap
    file_mb: int = 16  # of each file that the program writes
    tasks: int = 32  # processes and threads; Linux 5.14 counts those of the sandbox only, and no kernel limits root's


@dataclass(frozen=True)
class BwrapRunner:
    """A :class:`Runner` in bubblewrap: no network, read-only root, Python without site-packages, ``/tmp`` in memory."""

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
            finally:  # all processes of the namespace die with its first one
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
        for name in ("/bin", "/lib", "/lib32", "/lib64"):  # symbolic links in current distributions, folders in others
            if os.path.islink(name):
                words += ["--symlink", os.readlink(name), name]
        words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        words += ["--size", str(memory // 4), "--tmpfs", "/tmp"]
        words += ["--ro-bind-data", str(program), "/program.py", "--remount-ro", "/"]
        return [*words, "--chdir", "/tmp", os.path.realpath(sys.executable), "-I", "-S", "-c", start]


@dataclass(frozen=True)
class FusionRunner:
    """A :class:`Runner` on a SandboxFusion server, which gets two of the limits; ``run``: UserError for a bad URL."""

    url: str
    limits: Limits = Limits()

    def run(self, code: str, stdin: str) -> Ran:
        body = {"code": code, "language": "python", "stdin": stdin, "memory_limit_MB": self.limits.memory_mb}
        body |= {"compile_timeout": self.limits.wall_s, "run_timeout": self.limits.wall_s}
        server = HttpClient(self.url, option="env.sandbox", max_bytes=8 * MAX_OUTPUT_BYTES)
        try:
            content = server.post("/run_code", body, timeout_s=self.limits.wall_s + _SETTLE_S)
        except ServerError as error:
            raise OSError(f"the sandbox server {self.url} failed ({str(error).rstrip('.')})") from error
        finally:
            server.close()
        if not isinstance(content, dict) or content.get("status") == "SandboxError":
            raise OSError(f"the sandbox server {self.url} returned no result of the program")
        result = content["run_result"] if isinstance(content.get("run_result"), dict) else {}
        ended = result.get("status") == "Finished" and result.get("return_code") == 0
        return Ran(str(result.get("stdout") or "")[:MAX_OUTPUT_BYTES], ended)


def is_url(sandbox: str) -> bool:
    """Return whether the value of ``env.sandbox`` is the URL of a server."""
    return sandbox.lower().startswith(("http://", "https://"))


def make_runner(sandbox: str, limits: Limits = Limits()) -> Runner:
    """Return the runner for ``env.sandbox``: ``auto``, ``bwrap`` or a SandboxFusion URL; UserError if unusable."""
    if is_url(sandbox):
        return FusionRunner(sandbox, limits)
    if sandbox not in ("auto", "bwrap"):
        raise UserError(f"env.sandbox={sandbox} is not one of auto, bwrap or the URL of a SandboxFusion server.")
    reason = why_no_bwrap()
    if reason is not None:
        raise UserError(
            f"Programs of the model run only in a sandbox, but {reason}; on Linux install bubblewrap (apt-get install "
            "bubblewrap) and allow user namespaces, or set env.sandbox to the URL of a SandboxFusion server."
        )
    return BwrapRunner(limits)


@cache
def why_no_bwrap() -> str | None:
    """Return why bubblewrap cannot be used on this machine, None if it can; the first call runs a test program."""
    if sys.platform != "linux":
        return f"bubblewrap is not used on {sys.platform}"
    if _BWRAP is None:
        return "bubblewrap (bwrap) is not installed"
    token = secrets.token_hex(8)
    try:
        ran = BwrapRunner(Limits(wall_s=30.0)).run(f"print({token!r})", "")
    except OSError as error:
        return f"bubblewrap does not start ({os_reason(error)})"
    return None if ran == Ran(f"{token}\n", True) else "bubblewrap does not work here (user namespaces may be off)"


def parse_tests(code: str) -> list[tuple[str, bool]]:
    """Return the statements of a test's code in order, each with whether it is counted as a test.

    These are the statements that assert, or use a function or class of ``code`` that does (a loop with assertions is
    one test); without any, a last statement that is a call or contains ``raise``. Statements under
    ``if __name__ == "__main__"`` count as top-level. SyntaxError if it is not Python.

    >>> code = "def check(f):\\n    assert f(1)\\nfor x in (2, 3): assert f(x)\\nk = 4\\ncheck(f)"
    >>> [line.partition(":")[0] for line, is_test in parse_tests(code) if is_test]
    ['for x in (2, 3)', 'check(f)']
    """
    body: list[ast.stmt] = []
    for node in ast.parse(code).body:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        body += node.body if is_main else [node]  # type: ignore[attr-defined]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    asserting = {"AssertionError"}
    tests: list[ast.stmt] = []
    for node in body:
        parts = list(ast.walk(node))
        if any(isinstance(part, ast.Assert) or (isinstance(part, ast.Name) and part.id in asserting) for part in parts):
            if isinstance(node, definitions):
                asserting.add(node.name)
                continue
            tests.append(node)
            if isinstance(node, ast.Assign):  # what uses the instance or the list of functions is a test, too
                names = [part for target in node.targets for part in ast.walk(target)]
                asserting |= {part.id for part in names if isinstance(part, ast.Name)}
    for node in body[-1:] if not tests else ():
        is_call = isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call)
        raises = any(isinstance(part, ast.Raise) for part in ast.walk(node)) and not isinstance(node, definitions)
        tests = [node] if is_call or raises else []
    return [(ast.unparse(node), node in tests) for node in body]


def run_tests(runner: Runner, program: str, tests: str | Sequence[Any]) -> list[bool]:
    """Return for each test, in order, whether the program passes it.

    ``tests`` is Python code, whose tests :func:`parse_tests` finds, or a list of such code and of
    ``{"stdin", "stdout"}`` pairs, in which ``stdin`` may be missing or None. An endless assertion fails, and so do all
    later ones of the same code. A pair passes if the program prints ``stdout``, within the limits
    and with exit status 0; white space after each line and around the output is ignored. OSError if the sandbox itself
    fails, SyntaxError or UnicodeEncodeError for invalid tests, KeyError for a pair without ``stdout``.
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    results: list[bool] = []
    for test in [tests] if isinstance(tests, str) else tests:
        if isinstance(test, Mapping):
            stdin = test.get("stdin")  # Parquet has None for a missing one
            ran = runner.run(program, "" if stdin is None else str(stdin))
            results.append(ran.ended and lines(ran.stdout) == lines(str(test["stdout"])))
            continue
        # All assertions in one run. A program cannot guess the marks, but it could find them in its process, and an
        # object that equals everything passes every comparison: only the outputs of pairs are compared outside
        steps = [(secrets.token_hex(16) if is_test else "", step) for step, is_test in parse_tests(test)]
        printed = runner.run(_TESTING, json.dumps({"code": program, "steps": steps})).stdout.split()
        results += [mark in printed for mark, _ in steps if mark]
    return results


def _read(stream: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """Return the output, and whether it ended before the deadline and within MAX_OUTPUT_BYTES."""
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
    """Return the folders of Python and of the system's libraries, without site-packages."""
    candidates = ["/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin", "/etc/ld.so.cache", sys.base_prefix]
    candidates += [name for name in ("/lib", "/lib64") if not os.path.islink(name)]
    folders: list[str] = []
    for name in candidates:
        if Path(name).exists() and not any(Path(name).is_relative_to(other) for other in folders):
            folders.append(name)
    return folders
