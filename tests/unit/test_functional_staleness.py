"""The number of slots that bounds the policy age; that it does: tests/unit/test_source.py."""

from __future__ import annotations

import pytest

from sota_grpo.functional import max_groups_admitted


def test_numbers_by_hand_and_errors() -> None:
    assert [max_groups_admitted(a, 8) for a in (0, 1, 4)] == [8, 16, 40]
    with pytest.raises(ValueError, match="max_policy_age is -1"):
        max_groups_admitted(-1, 8)
    with pytest.raises(ValueError, match="groups_per_step is 0"):
        max_groups_admitted(0, 0)
