"""Ten seeds of random input for everything that takes what strangers write."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.__main__ import apart
from tests.fuzz.targets import TARGETS

SEED = 0  # always the same here; other seeds by `python -m tests.fuzz`, since what they find is a change of its own


@pytest.fixture(scope="module")
def tried() -> dict[str, dict[str, Any] | str]:
    return apart([*TARGETS], 0.0, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_random_input_is_taken_or_refused_with_a_sentence(name: str, tried: dict[str, dict[str, Any] | str]) -> None:
    actual = tried[name]
    assert isinstance(actual, dict), f"python -m tests.fuzz {name} --seed {SEED}\n{actual}"
    assert actual["tried"] > actual["refused"]
