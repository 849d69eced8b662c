"""Settings of every test process: random draws that can be had again, threads that sleep while they wait, no network,
a compiler in this process, and an end to what is begun."""

import gc
import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sota_grpo.errors import collect_seldom

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its processes import torch, for kernels of a second


def source_digest() -> str:
    """Of the package and its tests: every change of them draws anew, and who has the same files draws the same."""
    tests = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(path for folder in (tests, tests.parent / "sota_grpo") for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


END = pytest.StashKey[float]()  # on the monotonic clock: no test begins after it
os.environ.setdefault("TEST_SEED", source_digest())  # whatever is set instead gives other draws


def seed_draws(name: str) -> None:
    """``random``, NumPy and torch draw what belongs to this test or file, in whichever process and order it runs."""
    digest = hashlib.sha256(f"{os.environ['TEST_SEED']} {name}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4]))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(digest[:7]))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("as many tests as the time allows")
    group.addoption("--files-by", metavar="SEED", help="take the files in an order drawn from SEED")
    group.addoption(
        "--minutes", type=float, default=math.inf, help="after so many minutes begin no test more, but skip it"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "hypothesis_seed", "") is None:
        config.option.hypothesis_seed = str(int(hashlib.sha256(os.environ["TEST_SEED"].encode()).hexdigest()[:8], 16))
    config.stash[END] = time.monotonic() + 60 * config.getoption("minutes")
    collect_seldom()  # modules and tests are made by the million, and stay


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first: one of them would run alone in the end. Of the others, and of these, with another
    seed others do; the tests of a file stay together, as they stand in it."""
    files, seed = list(dict.fromkeys(item.path for item in items)), config.getoption("files_by")
    ordered = files if seed is None else random.Random(seed).sample(sorted(files), len(files))
    longest = {item.path for item in items if item.get_closest_marker("longest")}
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
    if isinstance(collector, pytest.Module):
        seed_draws(collector.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws, and the fixtures that are made for it; none when the time is over."""
    if time.monotonic() > item.config.stash[END]:
        pytest.skip(f"not reached within {item.config.getoption('minutes'):g} minutes")
    seed_draws(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fixture of several tests draws, whichever of them is the first; that one's draws stay what they are."""
    if fixturedef.scope == "function":
        return (yield)
    seed_draws(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        seed_draws(request._pyfuncitem.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failure says how to draw the same again; and hostile text that a test has logged must travel from the process
    that ran the test to the one that reports."""
    report = yield
    if report.failed:
        report.sections.append(("Random draws", f"TEST_SEED={os.environ['TEST_SEED']}"))
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8")) for name, text in report.sections
    ]
    return report
