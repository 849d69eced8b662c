"""Accuracy and its error, against the plain formula."""

from __future__ import annotations

import math
import random

import pytest

from sota_grpo.evaluate import Accuracy


def test_standard_error_of_a_share_is_the_binomial_one() -> None:
    dice = random.Random()
    outcomes = [float(dice.random() < 0.3) for _ in range(400)]
    found = Accuracy.of(outcomes)
    share = sum(outcomes) / 400
    assert found.mean == pytest.approx(share)
    assert found.stderr == pytest.approx(math.sqrt(share * (1 - share) / 399))
