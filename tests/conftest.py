"""Settings of every test process: random draws that can be had again, threads that sleep while they wait, no network,
a compiler in this process, and an end to what is begun."""

import functools
import gc
import hashlib
import itertools
import logging
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from sota_grpo.errors import collect_garbage_rarely

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its processes import torch, for kernels of a second

#: What a test draws follows from its own name and this, from no file: a change draws nothing anew elsewhere. Any other
#: text gives other draws.
os.environ.setdefault("TEST_SEED", "0")
END = pytest.StashKey[float]()  # on the monotonic clock: no test begins after it
OF_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|forked|(process|rank|worker)_rigs|fake_\w+|vllm|\w+Launcher|typed|workshop|browser)\b"
    r"|\bos\.(fork|kill)\b|\bworkers_fork\b"
)
HASH_SEED = os.environ.get("PYTHONHASHSEED")  # of this process; those that tests start have others, as users' have
AGAIN_S = 1200  # for one test in a process of its own; by itself it has its own time limit


def seed_draws(name: str) -> bytes:
    """``random``, NumPy and torch draw what belongs to this test or file, in whichever process and order it runs."""
    import torch  # not where tests are only handed out

    digest = hashlib.sha256(f"{os.environ['TEST_SEED']} {name}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4]))
    torch.manual_seed(int.from_bytes(digest[:7]))
    return digest


def seed_test(item: pytest.Item) -> None:
    """Its draws and, in a way of its own that forgets earlier failures, Hypothesis's."""
    digest = seed_draws(item.nodeid)
    function = getattr(item, "function", None)
    if hasattr(function, "hypothesis"):
        sys.modules["hypothesis"].seed(digest)(function)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("as many tests as the time allows")
    group.addoption("--files-by", metavar="SEED", help="take the files in an order drawn from SEED")
    group.addoption(
        "--minutes", type=float, default=math.inf, help="after so many minutes begin no test more, but skip it"
    )
    group.addoption(
        "--processes-again",
        action="store_true",
        help="run a failed test of processes once more, in a fresh process; if it passes there, the run does not fail",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "hypothesis_profile", "") is None:
        config.option.hypothesis_profile = "ci"  # no database, no time limit of an example
    config.stash[END] = time.monotonic() + 60 * config.getoption("minutes")
    collect_garbage_rarely()  # modules and tests are made by the million, and stay
    # ignored under nohup, and in the background of a script, which tests and their processes would inherit
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_of_processes(item.path):
        item.add_marker("processes")


@functools.cache
def is_of_processes(path: Path) -> bool:
    """Whether a file of tests starts, signals or ends processes, or speaks to servers: it says so somewhere."""
    return path.parent.name in ("bench", "e2e") or OF_PROCESSES.search(path.read_text()) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first: one of them would run alone in the end. With a seed, files come in its order. The
    tests of a file stay together, as they are in it."""
    files, seed = list(dict.fromkeys(item.path for item in items)), config.getoption("files_by")
    ordered = files if seed is None else random.Random(seed).sample(sorted(files), len(files))
    longest = {item.path for item in items if seed is None and item.get_closest_marker("longest")}
    turns = {path: (path not in longest, turn) for turn, path in enumerate(ordered)}
    items.sort(key=lambda item: turns[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected and imported stays, so that no collection of a test walks through it."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # a run in this process would thaw all of it, and each later one walk through it


def pytest_unconfigure(config: pytest.Config, thaw: Callable[[], None] = gc.unfreeze) -> None:
    thaw()  # what is never freed, nanobind calls a leak


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What a file draws while it is imported."""
    os.environ.pop("PYTHONHASHSEED", None)
    if isinstance(collector, pytest.Module):
        seed_draws(collector.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws, and the fixtures that are made for it, and what it logs; none when the time is over."""
    longest = item.get_closest_marker("longest")
    needed, left = longest.args[0] if longest else 0, (item.config.stash[END] - time.monotonic()) / 60
    if left < needed:
        given = f"within {item.config.getoption('minutes'):g} minutes"
        pytest.skip(
            f"not reached {given}" if left < 0 else f"may take {needed} minutes, of which fewer are left {given}"
        )
    logging.getLogger("sota_grpo").setLevel(logging.NOTSET)  # a run in this process leaves its own
    seed_test(item)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fixture of several tests draws, whichever of them is the first; that one's draws stay what they are."""
    if fixturedef.scope == "function":
        return (yield)
    seed_draws(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        seed_test(request._pyfuncitem)


@pytest.fixture(scope="module")
def workers_fork() -> Iterator[None]:
    """Each environment worker is a fork of a process that has imported what it imports."""
    from tests.forked import ForkLauncher

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sota_grpo.workers.instances.ProcessLauncher", ForkLauncher)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failure says how to draw the same again; and hostile text that a test has logged must travel from the process
    that ran the test to the one that reports."""
    report = yield
    if report.failed:
        seeds = [f"TEST_SEED={os.environ['TEST_SEED']}", *([f"PYTHONHASHSEED={HASH_SEED}"] if HASH_SEED else [])]
        report.sections.append(("Repeat it by", shlex.join([*seeds, "python", "-m", "pytest", item.nodeid])))
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8")) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Once as ever; then, of processes and failed, in a fresh process, where that is requested."""
    if not (item.config.getoption("processes_again") and item.get_closest_marker("processes")):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if failed := [report for report in reports if report.failed]:
        run_again(item, failed)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def run_again(item: pytest.Item, failed: list[pytest.TestReport]) -> None:
    """A test of processes that failed, in a fresh process; where it passes there, ``failed`` are no failures."""
    if hasattr(item.config.hook, "pytest_timeout_cancel_timer"):
        item.config.hook.pytest_timeout_cancel_timer(item=item)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", item.nodeid]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, cwd=item.config.rootpath, env=environment, start_new_session=True, **streams
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(AGAIN_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        tail = output.read()[-4000:]
    passed = process.wait() == 0 and "1 passed" in tail  # a test that is skipped there has shown nothing
    for report in failed:
        report.again = "passed" if passed else "failed"
        report.sections.append(("Once more, in a fresh process", tail))
        report.outcome = "passed" if passed else "failed"


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    return ("flaky", "R", "FLAKY") if getattr(report, "again", None) == "passed" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """At the very end, which tests of processes had a second try; of those that passed then, why not at first."""
    yield
    reports = itertools.chain.from_iterable(
        terminalreporter.stats.get(name, []) for name in ("flaky", "failed", "error")
    )
    tried = [report for report in reports if hasattr(report, "again")]
    for report in tried:
        if report.again == "passed":
            terminalreporter.write_sep("_", f"{report.nodeid} at first")
            for name, text in [("", report.longreprtext), *report.sections]:
                terminalreporter.write_line(f"--- {name} ---\n{text}" if name else text)
    if tried:
        terminalreporter.write_sep("=", "tests of processes that failed and were run again, to be mended")
    for report in tried:
        terminalreporter.write_line(f"{report.nodeid} ({report.when}): failed, then {report.again} in a fresh process")
