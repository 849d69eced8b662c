"""Token weights survive any cut; micro-batches keep their budget and their groups, ranks get even shares."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from sota_grpo.functional import loss_weights, max_groups_admitted, row_weights
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.rl.planner import EVEN_ENOUGH, PromptGroup, balanced_shares, fill, rank_shares

AGGREGATIONS = ("token", "sequence", "constant")
SHAPE = ModelShape(440_000_000, 0, 28 * 2048, 155_000_000)


def random_mask() -> Tensor:
    mask = torch.rand(7, 11) < 0.5
    mask[2] = False
    mask[0, 0] = True
    return mask


def test_the_table_of_the_module() -> None:
    lengths = torch.tensor([2, 0, 4])
    torch.testing.assert_close(row_weights(lengths, "token"), torch.tensor([1 / 6, 0, 1 / 6]))
    torch.testing.assert_close(row_weights(lengths, "sequence"), torch.tensor([1 / 4, 0, 1 / 8]))
    constant = row_weights(lengths, "constant", max_response_tokens=8)
    torch.testing.assert_close(constant, torch.tensor([1 / 24, 0, 1 / 24]))
    assert constant.dtype == torch.float32


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_order_padding_and_split_change_nothing(aggregation: str) -> None:
    mask, x = random_mask(), torch.randn(7, 11)
    weights = loss_weights(mask, aggregation, max_response_tokens=11)
    order = torch.randperm(7)
    assert torch.equal(loss_weights(mask[order], aggregation, max_response_tokens=11), weights[order])
    padded = torch.nn.functional.pad(mask, (0, 5))
    assert torch.equal(loss_weights(padded, aggregation, max_response_tokens=11)[:, :11], weights)
    whole = (weights * x).double().sum()
    for size in (1, 2, 3):
        parts = sum((w * v).double().sum() for w, v in zip(weights.split(size), x.split(size)))
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_bad_input_is_refused_in_a_sentence() -> None:
    one = torch.tensor([1])
    for function, arguments, sentence in (
        (row_weights, (one, "mean"), "aggregation is 'mean'; choose one of token, sequence, constant"),
        (row_weights, (one, "constant"), "max_response_tokens is None"),
        (row_weights, (torch.ones(1, 2), "token"), r"lengths must be \[N\], one per row, but it is \[1, 2\]"),
        (max_groups_admitted, (-1, 8), "max_policy_age is -1"),
        (max_groups_admitted, (0, 0), "groups_per_step is 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            function(*arguments)


def random_groups(count: int, *, size: int | None = None, typical: int = 300) -> list[PromptGroup]:
    """Ragged groups over shuffled places; lengths are log-normal, cut at eight times the typical one."""
    sizes = [size or random.randint(1, 12) for _ in range(count)]
    places = random.sample(range(sum(sizes)), sum(sizes))
    groups = []
    for rows in sizes:
        lengths = (int(random.lognormvariate(math.log(typical), 0.8)) + 1 for _ in range(rows))
        responses = tuple(min(length, 8 * typical) for length in lengths)
        groups.append(PromptGroup(tuple(places.pop() for _ in range(rows)), random.randint(1, 2 * typical), responses))
    return groups


def cost(group: PromptGroup) -> int:
    return step_flops(SHAPE, shared_load(group.prompt, group.responses))


def rows_of(pieces: list[PromptGroup]) -> list[int]:
    return [row for piece in pieces for row in piece.rows]


def require_same_rows(pieces: list[PromptGroup], groups: list[PromptGroup]) -> None:
    """Each row once, with its own lengths."""
    mine, theirs = (
        sorted((row, each.prompt, length) for each in many for row, length in zip(each.rows, each.responses))
        for many in (pieces, groups)
    )
    assert mine == theirs


def weight(batch: list[PromptGroup], slots_per_token: int) -> float:
    longest = max(piece.prompt + max(piece.responses) for piece in batch)
    return max(sum(piece.size[0] for piece in batch), len(rows_of(batch)) * longest / slots_per_token)


@pytest.mark.parametrize("slots_per_token", [1, 4, 64])
@pytest.mark.parametrize("budget", [1, 500, 2000, 30_000])
def test_micro_batches_keep_the_budget_and_lose_no_row(budget: int, slots_per_token: int) -> None:
    for _ in range(8):
        groups = random_groups(random.randint(0, 12))
        batches = fill(groups, token_budget=budget, slots_per_token=slots_per_token)
        pieces = [piece for batch in batches for piece in batch]
        require_same_rows(pieces, groups)
        weights = [weight(batch, slots_per_token) for batch in batches]
        assert all(w <= budget or len(rows_of(batch)) == 1 for w, batch in zip(weights, batches))
        assert weights == sorted(weights, reverse=True)
        assert batches == fill(groups, token_budget=budget, slots_per_token=slots_per_token)


def test_a_group_within_the_budget_is_never_cut_and_two_batches_never_fit_into_one() -> None:
    """What first fit promises, so that more than half of the budget is used on average."""
    for _ in range(10):
        groups = random_groups(8)
        pieces = [piece for batch in fill(groups, token_budget=3000) for piece in batch]
        for group in groups:
            whole = group.size[0] <= 3000
            assert whole == any(sorted(piece.rows) == sorted(group.rows) for piece in pieces)
        tokens = sizes(fill(random_groups(10, typical=100), token_budget=4000))
        assert all(a + b > 4000 for a, b in itertools.combinations(tokens, 2))


def sizes(batches: list[list[PromptGroup]]) -> list[int]:
    return [sum(piece.size[0] for piece in batch) for batch in batches]


def test_a_group_above_the_budget_is_cut_evenly_into_the_fewest_parts() -> None:
    """Prompt 1,024 and 8 responses of 1,024 in 8,192: 5,120 twice, not 8,192 and 2,048."""
    groups = [PromptGroup(tuple(range(8 * i, 8 * i + 8)), 1024, (1024,) * 8) for i in range(4)]
    assert sizes(fill(groups[:1], token_budget=8192)) == [5120, 5120]
    assert sizes(fill(groups[:1], token_budget=4096)) == [4096, 4096, 3072]
    assert fill(groups[:1], token_budget=groups[0].size[0]) == [groups[:1]]
    # where full parts make fewer: they leave 4 x 2,048, one micro-batch more; even ones would be 8
    assert sizes(fill(groups, token_budget=8192)) == [8192] * 5
    for _ in range(10):
        (group,) = random_groups(1, size=12)
        batches = fill([group], token_budget=2000)
        lengths = [sum(sum(piece.responses) for piece in batch) for batch in batches]
        assert max(lengths) - min(lengths) <= max(group.responses)


def test_slots_bound_the_padding_of_short_rows_beside_a_long_one() -> None:
    """One row of 800 tokens and 400 of 2: they would pad 401 * 800 slots, and 8 * 1600 are allowed."""
    groups = [PromptGroup((0,), 400, (400,)), *(PromptGroup((row,), 1, (1,)) for row in range(1, 401))]
    batches = fill(groups, token_budget=1600, slots_per_token=8)
    assert len(fill(groups, token_budget=1600, slots_per_token=1000)) == 1
    assert [len(rows_of(batch)) for batch in batches] == [16, 385]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_share_every_row_once_and_no_worse_than_whole_groups(num_ranks: int) -> None:
    for _ in range(10):
        groups = random_groups(random.randint(0, 12))
        shares = rank_shares(groups, num_ranks, cost)
        pieces = [piece for share in shares for piece in share]
        assert len(shares) == num_ranks
        require_same_rows(pieces, groups)
        assert shares == rank_shares(groups, num_ranks, cost)
        whole = balanced_shares([cost(group) for group in groups], num_ranks)
        worst = max(sum(map(cost, share)) for share in shares)
        assert worst <= max(sum(cost(groups[index]) for index in share) for share in whole)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_are_even_up_to_one_row(num_ranks: int) -> None:
    for _ in range(10):
        groups = random_groups(random.randint(1, 20), typical=random.choice([3, 50, 600]))
        mean = sum(map(cost, groups)) / num_ranks
        row = max(cost(group.subset([member])) for group in groups for member in range(len(group.rows)))
        loads = [sum(map(cost, share)) for share in rank_shares(groups, num_ranks, cost)]
        assert max(loads) <= 1.0001 * max(EVEN_ENOUGH * mean, min(loads) + row + 0.01 * mean)


def test_groups_stay_whole_where_they_balance() -> None:
    for _ in range(8):
        groups = random_groups(64, size=8)
        pieces = [piece for share in rank_shares(groups, 4, cost) for piece in share]
        assert sorted(pieces, key=lambda piece: piece.rows) == sorted(groups, key=lambda group: group.rows)


def test_one_group_is_cut_for_its_ranks() -> None:
    """Four equal responses behind one prompt, four ranks: one response each, the prompt four times."""
    shares = rank_shares([PromptGroup((0, 1, 2, 3), 10, (100,) * 4)], 4, cost)
    assert [[piece.size[0] for piece in share] for share in shares] == [[110]] * 4
    # of prompt 1 and responses of 1, 2, 5 and 5, the longest rows that fit into half of 15 (the prompt counts twice)
    shares = rank_shares([PromptGroup((0, 1, 2, 3), 1, (1, 2, 5, 5))], 2, lambda group: group.size[0])
    assert sorted([sorted(piece.responses) for piece in share] for share in shares) == [[[1, 5]], [[2, 5]]]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 8])
def test_no_share_exceeds_another_by_more_than_the_largest_cost(num_shares: int) -> None:
    for _ in range(50):
        costs = [random.randint(1, 4000) for _ in range(random.randint(0, 40))]
        shares = balanced_shares(costs, num_shares)
        assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
        loads = [sum(costs[index] for index in share) for share in shares]
        assert max(loads) - min(loads) <= max(costs, default=0)
        assert shares == balanced_shares(costs, num_shares)


def test_shares_are_within_a_third_of_the_best_ones() -> None:
    """Against every way to share out (Graham's bound)."""
    for _ in range(20):
        costs = [random.randint(1, 30) for _ in range(7)]
        best = sum(costs)
        for way in itertools.product(range(3), repeat=len(costs)):
            loads = [sum(cost for cost, share in zip(costs, way) if share == one) for one in range(3)]
            best = min(best, max(loads))
        actual = max(sum(costs[index] for index in share) for share in balanced_shares(costs, 3))
        assert actual <= (4 / 3 - 1 / 9) * best + 1e-9
