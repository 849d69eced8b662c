"""Turns from which nothing can be learned are told, once, and good ones are not."""

from __future__ import annotations

import logging

import pytest

from sota_grpo.recording.step_log import SignalWatch


def warnings(caplog: pytest.LogCaptureFixture, total: int, advantages: list[float], failed: float = 0.0) -> list[str]:
    watch = SignalWatch(total)
    with caplog.at_level(logging.WARNING):
        for step, advantage in enumerate(advantages):
            turn = {"advantage": advantage, "reward": 0.25, "reward_errors": failed, "dialog_turns": 8.0 * (step + 1)}
            watch.look(step, turn)
    return [record.getMessage() for record in caplog.records]


def test_three_turns_in_a_row_without_a_signal_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = warnings(caplog, 20, [0.5, 0.0, 0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0])
    assert len(told) == 1
    assert told[0].startswith("In 3 steps in a row every group's rewards were equal (mean 0.25)")


def test_two_are_not_but_where_the_run_has_no_more(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, 20, [0.0, 0.0, 0.1, 0.0, 0.0]) == []
    assert len(warnings(caplog, 2, [0.0, 0.0])) == 1


@pytest.mark.parametrize(("failed", "count"), [(8.0, 1), (7.0, 0)])
def test_a_grader_that_fails_at_every_response_is_told(
    caplog: pytest.LogCaptureFixture, failed: float, count: int
) -> None:
    told = warnings(caplog, 20, [0.5, 0.5], failed)
    assert len(told) == count
    assert all(sentence.startswith("The grader failed at all 8 responses of step 1") for sentence in told)
