"""The metrics of a batch, against numbers worked out by hand; steps that teach nothing are told, once."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from sota_grpo.recording.metrics import declared
from sota_grpo.recording.step_log import ZeroAdvantageWatch, batch_metrics
from sota_grpo.rl.table import RowTable


def row(prompt: int, response: int, reward: float, advantage: float, version: int, cut: bool) -> TensorDict:
    length = prompt + response
    return TensorDict(
        {
            "tokens": {"prompt": torch.zeros(prompt, dtype=torch.long)},
            "masks": {"all_assistant_mask": torch.arange(length) >= prompt},
            "advantage": torch.tensor([[advantage]]),
            "next": {
                "reward": torch.tensor([reward]),
                "reward_terms": {"correct": torch.tensor([reward]), "std": torch.tensor([7.0])},
                "success": torch.tensor([reward > 0.5]),
                "reward_error": torch.tensor([cut]),
                "reward_timeout": torch.tensor([cut]),
                "reward_info": NonTensorData(json.dumps({"acc": reward, "pred": "x"} if prompt == 3 else {})),
                "truncated": torch.tensor([cut]),
                "policy_version": torch.tensor(version),
            },
        }
    )


def test_four_rows() -> None:
    rows = [row(3, 2, 1.0, 0.5, 4, False), row(3, 4, 0.0, -0.5, 5, True)]
    rows += [row(5, 6, 1.0, 0.0, 5, False), row(5, 8, 1.0, 0.0, 5, False)]
    for entry in rows:
        del entry["next", "reward_terms", "std"]
    rows[3]["masks", "all_assistant_mask"] = torch.tensor([0] * 5 + [1] * 3 + [0] * 2 + [1] * 5).bool()  # two turns
    found = batch_metrics(RowTable.of(rows), version=5)
    expected = {
        "reward": 0.75,
        "reward/std": 3**0.5 / 4,  # of 1 0 1 1
        "reward/correct": 0.75,
        "success": 0.75,
        "reward_errors": 1,
        "reward_timeouts": 1,
        "grader/acc": 0.5,  # of the two rows that have it; text is no metric
        "advantage": 0.25,
        "truncated": 0.25,
        "response_tokens/mean": 5,
        "response_tokens/max": 8,
        "prompt_tokens/mean": 4,
        "turns/mean": 1.25,
        "turn_tokens/mean": 4,
        "policy_age/mean": 0.25,
        "policy_age/max": 1,
    }
    assert found == pytest.approx(expected)
    assert all(declared(name) for name in found)


def test_a_term_that_would_hide_another_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="std"):
        batch_metrics(RowTable.of([row(1, 1, 1.0, 0.0, 0, False)]), version=0)


def warnings(caplog: pytest.LogCaptureFixture, total: int, advantages: list[float], failed: float = 0.0) -> list[str]:
    watch = ZeroAdvantageWatch(total)
    with caplog.at_level(logging.WARNING):
        for step, advantage in enumerate(advantages):
            row = {"advantage": advantage, "reward": 0.25, "reward_errors": failed, "dialog_turns": 8.0 * (step + 1)}
            watch.look(step, row)
    return [record.getMessage() for record in caplog.records]


def test_three_steps_in_a_row_of_zero_advantage_groups_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
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
