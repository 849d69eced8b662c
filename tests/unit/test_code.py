"""Programs of a model: what tests decide, what a sandbox lets them do, and the requests to a SandboxFusion server."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sota_grpo.assembly.compose import needs_consent
from sota_grpo.config import Config
from sota_grpo.errors import UserError
from sota_grpo.rewards import sandbox
from sota_grpo.rewards.extract import last_code_block
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rewards.sandbox import BwrapRunner, FusionRunner, Limits, Ran, make_runner, run_tests, why_no_bwrap
from sota_grpo.rl.task import scorer_of
from sota_grpo.tasks.code import CodeTask
from tests.data_files import write_rows
from tests.process_rigs import wait_for
from tests.unit.fake_judge import FakeJudge, Say

NOWHERE = "http://127.0.0.1:9"
needs_bwrap = pytest.mark.skipif(why_no_bwrap() is not None, reason=why_no_bwrap() or "it works")
RUNNER = BwrapRunner(Limits(wall_s=60.0, cpu_s=30, memory_mb=256))
SHORT = BwrapRunner(Limits(wall_s=0.7, cpu_s=30, memory_mb=256))


def printed(code: str, stdin: str = "") -> str:
    ran = RUNNER.run(code, stdin)
    assert ran.ended, ran
    return ran.stdout


def tried(*lines: str) -> list[str]:
    """What each line of a program raises inside, or done."""
    code = "import os, signal, socket, resource, subprocess\n"
    for line in lines:
        code += f"try:\n    {line}\n    print('done')\nexcept BaseException as error: print(type(error).__name__)\n"
    return printed(code).split()


@needs_bwrap
def test_a_program_sees_neither_files_nor_variables_nor_the_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    ways = [f"open({str(secret)!r})", "open('/etc/passwd')", f"os.listdir({str(Path.cwd())!r})"]
    ways += [f"socket.create_connection({place}, 2)" for place in (("127.0.0.1", 22), ("192.0.2.1", 80))]
    assert "done" not in tried(*ways)
    assert printed("print('é', __name__, input()[::-1])", "abc\n") == "é __main__ cba\n"
    environment = json.loads(printed("import json, os; print(json.dumps(dict(os.environ)))"))
    assert set(environment) <= {"PATH", "HOME", "PWD", "LC_CTYPE"}
    assert printed("import os; print(sorted(os.listdir('/tmp')), os.listdir('/dev/shm'))") == "[] []\n"


@needs_bwrap
def test_a_program_writes_in_its_own_folder_only_and_nothing_stays() -> None:
    places = ["/x", "/usr/x", "/usr/lib/x", "/program.py", "/dev/x", "/dev/shm/x", "/etc/x", "/proc/x"]
    assert "done" not in tried(*(f"open({place!r}, 'w').write('x')" for place in places))
    assert tried("open('/tmp/x', 'w').write('x')") == ["done"]
    assert not Path("/tmp/x").exists() or Path("/tmp/x").read_text() != "x"
    assert tried("open('/tmp/x')") == ["FileNotFoundError"], "another run has another folder"
    assert not RUNNER.run("open('/tmp/x', 'wb').write(b'x' * (17 << 20))", "").ended
    many = "for i in range(40): open(f'/tmp/{i}', 'wb').write(b'x' * (4 << 20))"
    assert tried(many) == ["OSError"], "the folder has a size"


@needs_bwrap
def test_a_program_reaches_no_process_but_its_own_which_end_with_it() -> None:
    threads = "import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()"
    assert printed(threads) == "1\n"
    own = threading.get_native_id()
    assert tried(f"os.kill({own}, 9)") == ["ProcessLookupError"]
    assert tried("resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))") == ["ValueError"]
    name = f"left-{secrets.token_hex(8)}"
    sleeps = f"[sys.executable, '-c', 'import time; time.sleep(1000)', '{name}']"
    left = f"import subprocess, sys; subprocess.Popen({sleeps})"
    assert RUNNER.run(left, "").ended
    wait_for(lambda: not any(name.encode() in line for line in command_lines()))
    bomb = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    assert not RUNNER.run(bomb, "").ended


def command_lines() -> Iterator[bytes]:
    """Of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


@needs_bwrap
@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel counts no processes of root")
def test_a_program_has_a_limit_of_processes() -> None:
    forks = "import os, time\nfor n in range(99):\n    if not os.fork(): time.sleep(99)"
    assert tried(f"exec({forks!r})") == ["BlockingIOError"]


@needs_bwrap
def test_a_program_is_ended_at_its_limits() -> None:
    assert tried("bytearray(1 << 30)") == ["MemoryError"]
    assert not SHORT.run("import time; time.sleep(1000)", "").ended
    assert not BwrapRunner(Limits(wall_s=60.0, cpu_s=1)).run("while True: pass", "").ended
    loud = RUNNER.run("while True: print('x' * 1000)", "")
    assert (len(loud.stdout), loud.ended) == (sandbox.MAX_OUTPUT_BYTES, False)
    quiet = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); time.sleep(1000)"
    assert not SHORT.run(quiet, "").ended, "its output has ended, it has not"


@needs_bwrap
def test_assertions_and_pairs_are_a_test_each() -> None:
    program = "import sys\nprint('noise')\nprint('more', file=sys.stderr)\ndef f(x): return x + 1"
    tests = "import math\nassert f(1) == 2\nassert f(2) == 4, 'no'\nk = 4\nassert f(3) == k\nassert f('x')"
    assert run_tests(RUNNER, program, tests) == [True, False, True, False]
    listed = ["assert f(1) == 2", "def check(g):\n    assert g(0) == 1\ncheck(f)"]
    assert run_tests(RUNNER, program, listed) == [True, True]
    # what is not one plain assertion is tested, too
    assert run_tests(RUNNER, program, "assert f(1) == 2\nfor x in (1, 2):\n    assert f(x) == 2") == [True, False]
    checks = "def one(): assert f(1) == 2\ndef two(): assert f(2) == 4"
    assert run_tests(RUNNER, program, f"{checks}\nassert f\ntwo()\none()") == [True, False, True]
    assert run_tests(RUNNER, program, f"{checks}\nif __name__ == '__main__':\n    one()\n    two()") == [True, False]
    assert run_tests(RUNNER, program, f"{checks}\nboth = [one, two]\nfor check in both: check()") == [True, False]
    assert run_tests(RUNNER, program, "if f(1) != 3:\n    raise ValueError") == [False]
    double = "print(int(input()) * 2)"
    pairs = [{"stdin": "4\n", "stdout": "8"}, {"stdin": "5", "stdout": "11"}, {"stdin": "x", "stdout": ""}]
    assert run_tests(RUNNER, double, pairs) == [True, False, False]
    nothing = [{"stdin": None, "stdout": "[]"}, {"stdout": "[]"}]  # as Parquet has it, and missing
    assert run_tests(RUNNER, "import sys\nprint(sys.stdin.read().split())", nothing) == [True, True]
    for ending in ("exit()", "quit(0)", "exit"):  # which Python's site module defines
        assert run_tests(RUNNER, f"print(8)\n{ending}", [{"stdout": "8"}]) == [True]
    assert run_tests(RUNNER, "print(8)\nexit(1)", [{"stdout": "8"}]) == [False]


class PlainRunner:
    """Runs programs of these tests as a process of its own, where there is no sandbox."""

    def run(self, code: str, stdin: str) -> Ran:
        done = subprocess.run([sys.executable, "-I", "-c", code], input=stdin, capture_output=True, text=True)
        return Ran(done.stdout, done.returncode == 0)


@pytest.mark.parametrize("fault", ["xs[0]", "exit(0) if not xs else 1"])
def test_a_test_at_which_a_program_raises_fails_alone(fault: str) -> None:
    """The share of the tests that pass is the same in whichever order they are."""
    program = f"def first(xs):\n    {fault}\n    return xs[0]"
    raises, *right = "assert first([]) is None", "assert first([1]) == 1", "assert first([2, 3]) == 2"
    assert run_tests(PlainRunner(), program, "\n".join([*right, raises])) == [True, True, False]
    assert run_tests(PlainRunner(), program, "\n".join([raises, *right])) == [False, True, True]


LOOKED_UP = {
    "a string annotation": "from dataclasses import *\n@dataclass\nclass A:\n    x: 'int' = 1\ndef f(): return A().x",
    "annotations as strings": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
        "def f(): return A().x"
    ),
    "pickle": "import pickle\nclass A: x = 1\ndef f(): return pickle.loads(pickle.dumps(A())).x",
    "type hints": (
        "import typing\nclass A:\n    x: 'B'\nclass B: pass\ndef f(): return int(typing.get_type_hints(A)['x'] is B)"
    ),
    "the main module": "import __main__\ndef f(): return __main__.g()\ndef g(): return 1",
    "its own module": "import sys\nx = 1\ndef f(): return sys.modules[__name__].x",
}


@pytest.mark.parametrize("program", LOOKED_UP.values(), ids=LOOKED_UP)
def test_a_programs_classes_are_found_in_its_module(program: str) -> None:
    assert run_tests(PlainRunner(), program, "assert f() == 1") == [True]
    if why_no_bwrap() is None:
        assert run_tests(RUNNER, f"{program}\nprint(f())", [{"stdout": "1"}]) == [True]


def test_the_main_module_has_no_name_of_the_starters() -> None:
    """A program that forgets an import passes nothing, and the marks of its tests are not in a module."""
    names = "sorted(name for name in vars(__import__('__main__')) if not name.startswith('__'))"
    tests = ["assert names == []", "assert sys", "assert os"]
    assert run_tests(PlainRunner(), f"names = {names}", tests) == [True, False, False]
    if why_no_bwrap() is None:
        assert printed(f"print({names})") == "[]\n"


@needs_bwrap
@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit",
        "print('1' * 32)",
        "f = lambda x: 1 / 0",
        "class E:\n    def __eq__(self, o): raise AssertionError\nf = lambda x: E()",
        "import builtins\nbuiltins.exec = builtins.compile = print\ndef f(x): return 7",
        "def f(x):\n    import os\n    os._exit(0)",
        "open('/proc/self/fd/1', 'w').write('passed')",
    ],
)  # fmt: skip
def test_a_program_that_does_not_do_what_is_asked_passes_nothing(program: str) -> None:
    assert run_tests(RUNNER, program, "assert f(1) == 2") == [False]


@pytest.fixture
def fusion() -> Iterator[FakeJudge]:
    """A server that answers as SandboxFusion does; it runs nothing."""
    with FakeJudge() as fake:
        yield fake


def finished(stdout: object, code: int = 0, status: str = "Finished") -> dict:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": ""}
    return {"status": "Success", "message": "", "compile_result": None, "run_result": result, "files": {}}


def test_a_server_is_asked_in_sandbox_fusions_form(fusion: FakeJudge) -> None:
    runner = FusionRunner(f"{fusion.url}/", Limits(wall_s=3.0, memory_mb=100))
    fusion.others["/run_code"] = lambda body: Say(finished("8\n"))
    assert run_tests(runner, "print(8)", [{"stdin": "4", "stdout": "8 \n"}]) == [True]
    request = {"code": "print(8)", "language": "python", "stdin": "4", "compile_timeout": 3.0, "run_timeout": 3.0}
    assert fusion.bodies == [("/run_code", request | {"memory_limit_MB": 100})]
    for answer in (finished("8\n", 1), finished("8\n", 0, "TimeLimitExceeded"), finished(None), finished("9")):
        fusion.others["/run_code"] = lambda body, answer=answer: Say(answer | {"status": "Failed"})
        assert run_tests(runner, "", [{"stdin": "4", "stdout": "8"}]) == [False]
    fusion.others["/run_code"] = lambda body: Say({"status": "Failed", "run_result": None})
    assert runner.run("", "") == Ran("", False)


def test_a_server_that_fails_is_an_error_of_the_grader_and_no_wrong_answer(fusion: FakeJudge) -> None:
    task = CodeTask(sandbox=fusion.url)
    example = task.read_row({"tests": "assert f(1) == 2"}, "here")
    for say in (Say({}, 500), Say({"status": "SandboxError"}), Say([1]), Say({}, 302)):
        fusion.others["/run_code"] = lambda body, say=say: say
        (score,) = guarded_scores(task.score, ["tests"], [("```\nx = 1\n```", example)])
        assert score.error.startswith("OSError: the sandbox server http://127.0.0.1")
    (score,) = guarded_scores(CodeTask(sandbox=NOWHERE).score, ["tests"], [("```\n\n```", example)])
    assert "OSError" in score.error


def test_a_subclass_sets_the_weights_of_its_terms() -> None:
    weights = {"tests": 1.0, "brief": 0.5}
    brief = type("Brief", (CodeTask,), {"term_weights": weights})
    assert brief(sandbox=NOWHERE).term_weights == weights
    assert CodeTask(sandbox=NOWHERE).term_weights == {"tests": 1.0}


def test_what_has_no_sandbox_is_refused_and_a_server_in_an_untrusted_run_needs_consent(monkeypatch) -> None:
    config = Config()
    for place, acts in ((NOWHERE, {"env.sandbox": f"send responses to {NOWHERE}"}), ("bwrap", {})):
        config.env.sandbox = place
        assert needs_consent(config) == acts
    monkeypatch.setattr(sandbox, "why_no_bwrap", lambda: "bubblewrap (bwrap) is not installed")
    for name in ("auto", "bwrap"):
        with pytest.raises(UserError, match=r"bwrap\) is not installed; on Linux install bubblewrap \(apt-get install"):
            CodeTask(sandbox=name)
    with pytest.raises(UserError, match=r"env\.sandbox=docker is not one of auto, bwrap or the URL"):
        make_runner("docker")


def test_the_last_closed_block_outside_the_thinking_is_the_program() -> None:
    assert last_code_block("```python\na\n\n b\n```") == "a\n\n b"
    assert last_code_block("```\na\n```\n```py\nb\n```\n```\nc") == "b"
    assert last_code_block("no ``` block ```") is None
    assert last_code_block("```f``` adds one:\n```python\na\n```") == "a"
    assert last_code_block("1. So:\n   ```python\n   def f():\n\n       return 1\n   ```") == "def f():\n\n    return 1"
    assert last_code_block("  ```\n  a\nb\n  ```") == "  a\nb"
    assert last_code_block("```\n" * 300_001) == ""


@needs_bwrap
def test_the_reward_is_the_share_and_the_gold_program_earns_all(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"f(x) is x + {n}.", "tests": f"assert f(0) == {n}\nassert f(1) == {n + 1}",
         "answer": f"def f(x):\n    return x + {n}"}
        for n in range(6)
    ]  # fmt: skip
    task = CodeTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=2, max_samples=3)
    assert (len(task.train), len(task.heldout)) == (3, 2)
    example = task.train[0]
    score = pickle.loads(pickle.dumps(scorer_of(task)))
    assert score(task.gold_response(example), example).success
    half = score(f"<think>```\n1\n```</think>```python\ndef f(x): return {example.query[-2]}\n```", example)
    assert (half.terms, half.success, half.info) == ({"tests": 0.5}, False, {"num_tests": 2, "num_passed": 1})
    assert score("def f(x): return 1", example).terms == {"tests": 0.0}
    assert task.messages(example)[-1] == {"role": "user", "content": example.query}
