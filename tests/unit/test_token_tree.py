"""Trees of tokens: every sampled token is in the tree once, and is computed after exactly the tokens before it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import PreTrainedModel

from sota_grpo import keys
from sota_grpo.envs.token_tree import TokenTree
from sota_grpo.policy.causal import ENTROPY, CausalPolicy
from sota_grpo.policy.sharding import Ranks
from sota_grpo.rl.collate import drawn_entries, group_table, pad_rows
from sota_grpo.rl.planner import row_prompts
from sota_grpo.rl.records import Example, Sample, SamplingSupport
from sota_grpo.rl.table import RowTable
from sota_grpo.training.remote_learner import travelling
from tests.rank_rigs import learner_settings, passes_of
from tests.unit.tiny_models import make_model

# of a request: the earlier one that it continues (-1: none), how many of its tokens it keeps, its own, and the response
OWN, SAID = st.lists(st.integers(3, 6), min_size=1, max_size=4), st.lists(st.integers(3, 9), max_size=5)
REQUESTS = st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 20), OWN, SAID), min_size=1, max_size=7)


def grown(requests: list, *, supports: bool = False) -> tuple[TokenTree, list[tuple[list[int], int, float]]]:
    """A tree, and (tokens before it, token, log-prob) of every sampled token."""
    tree, ends, sampled, number = TokenTree(), [], [], 0
    for earlier, kept, own, said in requests:
        base = tree.path(ends[earlier % len(ends)])[:kept] if ends and earlier >= 0 else []
        prompt, count = [*base, *own], len(said)
        log_probs = -torch.arange(number + 1.0, number + count + 1)
        number += count
        response = Sample(torch.tensor(said, dtype=torch.int64), log_probs, torch.full((count,), number), False)
        if supports:
            ids = torch.tensor([id for token in said for id in (token, 10)], dtype=torch.int32)
            response = replace(response, support=SamplingSupport(ids, torch.full((count,), 2, dtype=torch.int32)))
        end = tree.add_prompt(prompt)
        assert tree.path(end) == prompt
        ends.append(tree.add_response(end, response))
        sampled += [([*prompt, *said[:at]], said[at], float(log_probs[at])) for at in range(count)]
    return tree, sampled


def row_of(tree: TokenTree, common: int, row: int = 0) -> TensorDict:
    prompt = tree.prompt[:common] or [3]
    sample = replace(tree.sample(len(prompt) if tree.num_sampled else 0), text="")
    return group_table(drawn_entries(row, Example("q", "a"), prompt), [sample], None)


@given(REQUESTS, st.integers(0, 9))
def test_every_sampled_token_is_in_the_tree_once_after_its_own_context(requests, common) -> None:
    tree, sampled = grown(requests)
    common = min(common, len(tree.prompt))
    out, prompt = tree.sample(common), tree.prompt[:common]
    tokens, parents = [*prompt, *out.token_ids.tolist()], [*range(-1, common - 1), *out.parents.tolist()]
    found = []
    for at in range(common, len(tokens)):
        assert parents[at] < at
        if out.assistant_mask[at - common]:
            before, node = [], parents[at]
            while node >= 0:
                before.append(tokens[node])
                node = parents[node]
            found.append((before[::-1], tokens[at], float(out.log_probs[at - common])))
        else:  # no token is computed that leads to no sampled one
            assert at in parents
    assert sorted(found) == sorted(sampled)
    assert int(out.assistant_mask.sum()) == tree.num_sampled == len(sampled)


@cache
def models(family: str) -> tuple[PreTrainedModel, list[CausalPolicy]]:
    """A model, and policies of the same weights: one packs rows, one pads them."""
    model = make_model(family).double()
    return model, [CausalPolicy(copy.deepcopy(model), shared_prompt=packs) for packs in (True, False)]


@pytest.mark.parametrize(("family", "supports"), [("qwen2", True), ("mistral", False)])  # the latter has windows
@settings(max_examples=8)
@given(trees=st.lists(REQUESTS, min_size=1, max_size=3))
def test_log_probs_and_gradients_are_those_of_each_context_alone(family, supports, trees) -> None:
    model, policies = models(family)
    grown_trees = [grown(requests, supports=supports) for requests in trees]
    grown_trees = [(tree, sampled) for tree, sampled in grown_trees if sampled]
    if not grown_trees:
        return
    tables = [row_of(tree, len(tree.prompt), row) for row, (tree, _) in enumerate(grown_trees)]
    rows = pad_rows([row for table in tables for row in table.rows()], pad_token_id=0)
    expected = {}  # by log-prob, which names a sampled token
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for number, (_, sampled) in enumerate(grown_trees):
        for before, token, name in sampled:
            logits = model(torch.tensor([before])).logits[0, -1]
            if supports:
                log_prob = logits[token] - logits[[token, 10]].logsumexp(0)
            else:
                log_prob = logits.log_softmax(-1)[token]
            expected[number, name] = log_prob.item()
            total = total + name * log_prob
    total.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for policy in policies:
        policy.zero_grad()
        out = policy(rows)
        for number, (names, values) in enumerate(zip(rows[keys.LOG_PROBS], out[keys.LOG_PROBS])):
            for at in rows[keys.ASSISTANT_MASK][number].nonzero().flatten().tolist():
                assert values[at].item() == pytest.approx(expected[number, float(names[at])], abs=2e-6)
        assert bool((out[ENTROPY] >= 0).all())
        (out[keys.LOG_PROBS] * rows[keys.LOG_PROBS]).sum().backward()
        for name, value in gradient.items():
            assert float((policy.model.get_parameter(name).grad - value).norm()) <= 1e-5 * (1 + float(value.norm()))


@given(REQUESTS)
def test_the_planner_counts_the_tokens_that_are_computed(requests) -> None:
    tree, sampled = grown(requests)
    if not sampled:
        return
    table = row_of(tree, len(tree.prompt))
    layout = models("qwen2")[1][0].layout(pad_rows(table.rows(), pad_token_id=0))
    (prompt,) = row_prompts(table)
    assert prompt.length + prompt.response == len(layout.tokens)
    assert prompt.sampled == len(sampled)


def test_a_fork_computes_what_its_branches_have_in_common_once() -> None:
    tree, _ = grown([(-1, 1, [5, 6], [7, 8]), (0, 4, [3], [7, 8]), (0, 4, [4], [7, 8])])
    layout = models("qwen2")[1][0].layout(pad_rows(row_of(tree, 2).rows(), pad_token_id=0))
    assert layout.tokens.tolist() == [5, 6, 7, 8, 3, 7, 8, 4, 7, 8]
    assert len(layout.blocks) == 1
    silent, _ = grown([(-1, 1, [5, 6], [])])
    assert (silent.prompt, len(silent.sample(0).token_ids)) == ([], 0)


def test_rows_of_agents_are_padded_with_others_and_with_those_that_said_nothing() -> None:
    tree, _ = grown([(-1, 1, [3, 4], [5, 6]), (0, 2, [3], [7])], supports=True)
    silent = TokenTree().sample(0)
    line, _ = grown([(-1, 1, [3, 4], [5])], supports=True)
    plain = replace(line.sample(2), parents=None, text="")
    drawn = drawn_entries(1, Example("q", "a"), [3, 4])
    tables = [row_of(tree, 2), group_table(drawn, [replace(silent, text="")], None), group_table(drawn, [plain], None)]
    rows = pad_rows([row for table in tables for row in table.rows()], pad_token_id=0)
    assert rows[keys.PARENTS].tolist()[1:] == [[-1, 0, *[-1] * 4], [-1, 0, 1, *[-1] * 3]]
    assert int(rows[keys.SUPPORT_COUNTS][1].sum()) == 0
    with pytest.raises(ValueError, match="first parent is after the prompt"):
        group_table(drawn_entries(1, Example("q", "a"), [3]), [replace(tree.sample(2), text="")], None)


def rows_of_agents() -> RowTable:
    """Rows of three agents' samples, one of a single turn and one without a turn, and three of another task."""
    forked = [(-1, 1, [3, 4], [5, 6]), (0, 4, [3], [7, 8]), (1, 6, [4], [9]), (0, 4, [5], [6]), (2, 9, [3], [4, 5])]
    trees = [grown(forked[:number], supports=True)[0] for number in (5, 4, 3, 1)]
    drawn = drawn_entries(0, Example("q", "a"), [3, 4])
    silent = group_table(drawn, [replace(TokenTree().sample(0), text="")], None)
    lines = group_table(drawn_entries(1, Example("r", "b"), [3, 4]), [replace(trees[3].sample(2), text="")] * 3, None)
    rows = RowTable.cat([*(row_of(tree, 2) for tree in trees), silent, lines.without(keys.PARENTS)])
    rows.set(keys.ADVANTAGE, torch.randn(len(rows), 1))
    rows.set(keys.REF_LOG_PROBS, [torch.zeros(number) for number in rows.lengths(keys.FULL_TOKENS)])
    return rows


def test_rows_of_agents_and_others_travel_to_ranks() -> None:
    """Some rows have no parents or no support; a pickled share is padded as its rows are."""
    rows = rows_of_agents()
    ragged = {key for key, column in rows.columns.items() if column.rows is not None}
    assert ragged == {keys.PARENTS, keys.SUPPORT_IDS, keys.SUPPORT_COUNTS}
    planner = passes_of(CausalPolicy(make_model()), learner_settings(recompute=True), Ranks(0, 2)).step_planner()
    shares = pickle.loads(pickle.dumps(planner.shares(travelling(rows), 0), protocol=5))
    assert sorted({position for share in shares for position in share.positions}) == list(range(len(rows)))
    for share in shares:
        assert share.lengths == [len(row[keys.FULL_TOKENS]) for row in rows.rows()]
        expected = pad_rows([rows[position] for position in share.positions], pad_token_id=0)
        padded = pad_rows(share.rows.rows(), pad_token_id=0)
        for name, value in expected.items(True, True):
            assert torch.equal(padded[name], value), name
