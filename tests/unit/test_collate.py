"""Padding, weights and micro-batches of ragged rows."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from sota_grpo import keys
from sota_grpo.rl.collate import pad_rows, set_loss_weights, unpad_rows
from sota_grpo.rl.planner import groups_by_prompt, micro_batches, row_prompts
from sota_grpo.rl.table import row_list
from tests.builders import generator, random_row, random_rows


def worked_rows() -> list[TensorDict]:
    """The three rows of the module's docstring: (2, 2), (1, 3) and (2, 1) prompt and response tokens."""
    stream = generator()
    return [random_row(stream, p, r, index=i) for i, (p, r) in enumerate([(2, 2), (1, 3), (2, 1)])]


def test_the_worked_example() -> None:
    rows = set_loss_weights(worked_rows(), "token")
    batch = pad_rows(rows, pad_token_id=0)
    weights = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 0]]
    torch.testing.assert_close(batch["loss_weight"], torch.tensor(weights) / 6)
    assert batch[keys.ATTENTION_MASK].tolist() == [[True] * 4, [True] * 4, [True, True, True, False]]
    assert batch[keys.TOKEN_VERSION][2].tolist() == [-1, -1, 3, -1]
    rows[2]["group_id"] = rows[0]["group_id"]
    rows[2][keys.FULL_TOKENS][:2] = rows[0][keys.FULL_TOKENS][:2]
    parts = micro_batches(rows, token_budget=8)
    assert [[id(row) for row in part] for part in parts] == [[id(rows[0]), id(rows[2])], [id(rows[1])]]


@pytest.mark.parametrize(("aggregation", "survivors"), [("token", 1 / 5), ("sequence", 1 / 4), ("constant", 1 / 30)])
def test_dropped_rows_weigh_nothing(aggregation, survivors) -> None:
    """Rows of 2, 3 (truncated, or without a grade) and 3 tokens: 5 tokens, 2 rows remain; the divisor 3 * 10 stays."""
    stream, options = generator(), {"max_response_tokens": 10, "drop_truncated": True}
    rows = [random_row(stream, 1, r) for r in (2, 3, 3)]
    for number, row in enumerate(rows):
        row[keys.REWARD_ERROR] = torch.tensor([number == 1])
    set_loss_weights(rows, aggregation, max_response_tokens=10)
    assert not rows[1]["loss_weight"].any()
    assert rows[0]["loss_weight"].max().item() == pytest.approx(survivors)
    for row in rows:
        row.pop(keys.REWARD_ERROR)
    rows[1][keys.TRUNCATED] = torch.tensor([True])
    set_loss_weights(rows, aggregation, **options)
    assert not rows[1]["loss_weight"].any()
    assert rows[0]["loss_weight"].max().item() == pytest.approx(survivors)
    for row in rows:
        row[keys.TRUNCATED] = torch.tensor([True])
    assert not any(row["loss_weight"].any() for row in set_loss_weights(rows, aggregation, **options))
    for row in rows:  # of which none says whether it is truncated
        row.pop(keys.TRUNCATED)
    kept = [row["loss_weight"].clone() for row in set_loss_weights(rows, aggregation, max_response_tokens=10)]
    set_loss_weights(rows, aggregation, **options)
    assert all(torch.equal(row["loss_weight"], weight) for row, weight in zip(rows, kept, strict=True))


def test_padding_keeps_every_value_drops_text_and_can_be_undone() -> None:
    rows = random_rows(generator(), 6)
    batch = pad_rows(lazy_stack(rows, 0), pad_token_id=9)
    assert "query" not in batch
    for row, padded, again in zip(rows, batch.unbind(0), row_list(unpad_rows(batch)), strict=True):
        length = row[keys.FULL_TOKENS].shape[0]
        for key, value in again.items(include_nested=True, leaves_only=True):
            assert torch.equal(value, row[key]), key
            assert torch.equal(padded[key] if value.dim() != 1 else padded[key][:length], value), key
        assert (padded[keys.FULL_TOKENS][length:] == 9).all()
        assert not padded[keys.ATTENTION_MASK][length:].any()


def test_a_key_that_only_some_rows_have_is_refused() -> None:
    rows = random_rows(generator(), 3)
    rows[1] = rows[1].exclude(keys.REF_LOG_PROBS)
    with pytest.raises(ValueError, match=r"ref_log_probs.*missing in 1 of 3 rows.*row 1"):
        pad_rows(rows, pad_token_id=0)
    with pytest.raises(ValueError, match="no rows"):
        pad_rows([], pad_token_id=0)
    with pytest.raises(ValueError, match="token_budget is 0"):
        micro_batches(rows, token_budget=0)
    one, other = random_rows(generator(), 2)
    one[keys.ADVANTAGE] = torch.ones(1, 1)
    other[keys.ADVANTAGE] = torch.ones(len(other[keys.FULL_TOKENS]), 1)
    with pytest.raises(ValueError, match="one number in some rows and one per token in others"):
        pad_rows([one, other], pad_token_id=0)


def test_rows_without_masks_are_named() -> None:
    rows = [row.exclude("masks") for row in random_rows(generator(), 3)]
    for weigh in (lambda: set_loss_weights(rows, "token"), lambda: micro_batches(rows, token_budget=64)):
        with pytest.raises(KeyError, match=r"a row has no tokens\.full or no masks\.all_assistant_mask"):
            weigh()
    with pytest.raises(KeyError, match=r"the batch has no masks\.all_attention_mask"):
        unpad_rows(pad_rows(rows, pad_token_id=9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_value_is_rounded_to_the_dtype_of_the_first_row(dtype) -> None:
    """As of a row without a response, whose log-probs were made like its token ids."""
    rows = random_rows(generator(), 3)
    rows[0][keys.LOG_PROBS] = torch.zeros_like(rows[0][keys.FULL_TOKENS])
    for row in rows[1:]:
        row[keys.LOG_PROBS] = row[keys.LOG_PROBS].to(dtype)
    padded = pad_rows(rows, pad_token_id=0)[keys.LOG_PROBS]
    for row, values in zip(rows[1:], padded[1:]):
        assert torch.equal(values[: len(row[keys.LOG_PROBS])], row[keys.LOG_PROBS])


def sibling_rows(count: int, size: int) -> list[TensorDict]:
    """``count`` groups of ``size`` rows whose prompts are equal, in random order."""
    stream = generator()
    rows = random_rows(stream, count * size, group_size=size)
    for index, row in enumerate(rows):
        prompt = rows[index - index % size][keys.PROMPT_TOKENS]
        row[keys.FULL_TOKENS][: len(prompt)] = prompt
    return [rows[index] for index in torch.randperm(len(rows), generator=stream)]


def test_tokens_make_siblings_and_ids_do_not() -> None:
    """Tool turns belong to the response, and a row without a response is all prompt."""
    one, other, third = sibling_rows(1, 3)
    other[keys.FULL_TOKENS][0] += 1
    third["group_id"] = torch.tensor(7)
    assert [group.rows for group in groups_by_prompt(row_prompts([one, other, third]))] == [(0, 2), (1,)]
    nameless = [row.exclude("group_id") for row in (one, one.clone())]
    assert [group.rows for group in groups_by_prompt(row_prompts(nameless))] == [(0, 1)]
    row, silent = (random_row(generator(), 2, 5) for _ in range(2))
    row[keys.ASSISTANT_MASK][3:5] = False
    silent[keys.ASSISTANT_MASK][:] = False
    groups = groups_by_prompt(row_prompts([row, silent]))
    assert [(group.prompt, group.responses) for group in groups] == [(2, (5,)), (7, (0,))]
    for aggregation, weight in (("token", 1 / 3), ("sequence", 1 / 3), ("constant", 1 / 20)):  # 3 tokens are trained
        set_loss_weights([row, silent], aggregation, max_response_tokens=10)
        torch.testing.assert_close(row["loss_weight"], weight * row[keys.ASSISTANT_MASK])
