"""Prompts are drawn exactly once and resumably; a row carries exactly what was sampled."""

from __future__ import annotations

import json
import random

import pytest
import torch

from sota_grpo import keys
from sota_grpo.envs import PromptStream
from sota_grpo.recording.run_log import rollout_rows
from sota_grpo.rl.collate import drawn_entries, finish_rows, group_table, last_turn, prompt_rows
from sota_grpo.rl.records import Example, Sample, Score
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import graded_texts, write_scores
from tests.unit.test_envs import char_tokenizer

SEED = random.randrange(1 << 30)


def examples(count: int) -> list[Example]:
    return [Example(f"{index} + 1?", str(index + 1)) for index in range(count)]


def test_an_epoch_draws_every_example_once_and_group_ids_never_repeat() -> None:
    stream = PromptStream(examples(7), seed=SEED)
    drawn = [stream.draw(7) for _ in range(3)]
    assert [group_id for epoch in drawn for group_id, _ in epoch] == list(range(21))
    orders = [[example.query for _, example in epoch] for epoch in drawn]
    assert all(sorted(order) == sorted(example.query for example in stream.examples) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize("before", [0, 1, 5, 6, 13])
def test_resume_equals_uninterrupted(before: int) -> None:
    stream = PromptStream(examples(5), seed=SEED)
    stream.draw(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(examples(5), seed=SEED)
    resumed.draw(3)
    resumed.load_state_dict(state)
    assert resumed.draw(12) == stream.draw(12)
    assert resumed.state_dict() == stream.state_dict()


def test_another_seed_is_another_order_and_a_foreign_state_is_refused() -> None:
    stream, other = PromptStream(examples(40), seed=SEED), PromptStream(examples(40), seed=SEED + 1)
    assert [e.query for _, e in stream.draw(40)] != [e.query for _, e in other.draw(40)]
    changed = [*examples(40)[:-1], Example("another", "question")]
    for foreign, reason in (
        (other, f"has seed={SEED}, but this stream has seed={SEED + 1}"),
        (PromptStream(examples(39), seed=SEED), "has num_examples=40, but this stream has num_examples=39"),
        (PromptStream(changed, seed=SEED), "has prompts=.*resume with the dataset, the seed and the shuffle of"),
        (PromptStream(examples(40), seed=SEED, shuffle=False), "has shuffle=True, but this stream has shuffle=False"),
    ):
        with pytest.raises(ValueError, match=reason):
            foreign.load_state_dict(stream.state_dict())
    without = {name: value for name, value in stream.state_dict().items() if name != "shuffle"}  # saved before
    PromptStream(examples(40), seed=SEED).load_state_dict(without)
    with pytest.raises(ValueError, match="no examples"):
        PromptStream([])


def test_finished_rows_worked_out_by_hand() -> None:
    """One turn; and two turns around a user's, whose log-probs and versions in the sample are nonsense."""
    tokenizer = char_tokenizer()
    first, reply, second = (tokenizer(text)["input_ids"] for text in ("2", "no", "3!"))
    alone, ids = [*first, 1, 9], [*first, 1, *reply, *second, 1]
    mask = [True, True, False, False, True, True, True]
    log_probs = torch.tensor([-0.5, -0.25, float("nan"), 9.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    dialog = Sample(torch.tensor(ids), log_probs, torch.tensor([8, 8, 2, 99, 9, 9, 9]), False, torch.tensor(mask))
    sample = Sample(torch.tensor(alone), torch.tensor([-0.5, -0.25, -1.0]), torch.tensor([7, 7, 8]), truncated=True)
    (prompt,) = prompt_rows(5, Example("1+1?", "#### 2", {"steps": 1}), [4, 6], repeats=1)
    rows = finish_rows(prompt, [dialog, sample], tokenizer)
    both = {keys.PROMPT_TOKENS: [4, 6], keys.GROUP_ID: 5, keys.DONE: [True]}
    expected: list[dict] = [
        {
            keys.FULL_TOKENS: [4, 6, *ids],
            keys.RESPONSE_TOKENS: ids,
            keys.ATTENTION_MASK: [True] * 9,
            keys.ASSISTANT_MASK: [False, False, *mask],
            keys.LOG_PROBS: [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -3.0],
            keys.TOKEN_VERSION: [-1, -1, 8, 8, -1, -1, 9, 9, 9],
            **{keys.POLICY_VERSION: 8, keys.SAMPLE_ID: 0, keys.TERMINATED: [True], keys.TRUNCATED: [False]},
        },
        {
            keys.FULL_TOKENS: [4, 6, *alone],
            keys.RESPONSE_TOKENS: alone,
            keys.ATTENTION_MASK: [True] * 5,
            keys.ASSISTANT_MASK: [False, False, True, True, True],
            keys.LOG_PROBS: [0.0, 0.0, -0.5, -0.25, -1.0],
            keys.TOKEN_VERSION: [-1, -1, 7, 7, 8],
            **{keys.POLICY_VERSION: 7, keys.SAMPLE_ID: 1, keys.TERMINATED: [False], keys.TRUNCATED: [True]},
        },
    ]
    types = {keys.FULL_TOKENS: torch.int64, keys.LOG_PROBS: torch.float32, keys.TOKEN_VERSION: torch.int64}
    for row, own in zip(rows, expected, strict=True):
        assert {key: row.get(key).tolist() for key in own | both} == own | both
        assert {key: row.get(key).dtype for key in types} == types
        assert [row[key] for key in (keys.QUERY, keys.ANSWER, keys.EXTRA)] == ["1+1?", "#### 2", '{"steps": 1}']
    assert [row[keys.RESPONSE_TEXT] for row in rows] == ["3!", tokenizer.decode([alone[0], 9])]
    assert last_turn(dialog).tolist() == [*second, 1]


def test_what_is_written_into_a_row_leaves_its_siblings_and_its_prompt_alone() -> None:
    (prompt,) = prompt_rows(0, Example("q", "a"), [4, 6], repeats=1)
    sample = Sample(torch.tensor([5]), torch.tensor([-1.0]), torch.tensor([0]), truncated=True)
    rows = finish_rows(prompt, [sample] * 3, char_tokenizer())
    untouched = [row.clone() for row in rows]
    own = [keys.SAMPLE_ID, keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.LOG_PROBS]
    own += [keys.TOKEN_VERSION, keys.POLICY_VERSION, keys.DONE, keys.TERMINATED, keys.TRUNCATED]
    for key in own:
        rows[1].get(key).fill_(7)
    rows[1].set(keys.REWARD, torch.ones(1))
    for index in (0, 2):
        assert all(torch.equal(rows[index].get(key), untouched[index].get(key)) for key in own)
        assert keys.REWARD not in rows[index].keys(True)
    assert set(prompt.keys()) == {keys.QUERY, keys.ANSWER, keys.EXTRA, keys.GROUP_ID, keys.SAMPLE_ID, "tokens"}
    assert prompt.get(keys.PROMPT_TOKENS).tolist() == [4, 6]


def test_every_row_keeps_its_own_prompt_and_example_among_rows_of_other_groups() -> None:
    tokenizer, rows = char_tokenizer(), []
    problems = [Example("1+1?", "2", {"k": 0}), Example("1+1?", "2", {"k": 1}), Example("2+2?", "4")]
    for group_id, example in enumerate(problems):
        drawn = drawn_entries(group_id, example, tokenizer(example.query)["input_ids"] + [5] * group_id)
        responses = [torch.randint(4, 20, (count,)) for count in (2, 3)]
        samples = [Sample(ids, -torch.rand(len(ids)), 0 * ids, truncated=False) for ids in responses]
        rows += group_table(drawn, samples, tokenizer).rows()
    mixed = random.sample(rows, len(rows))
    for row, (text, example) in zip(mixed, graded_texts(mixed), strict=True):
        assert example == problems[int(row["group_id"])]
        assert text == row[keys.RESPONSE_TEXT]
    table = RowTable.of(mixed)
    table.set(keys.ADVANTAGE, torch.zeros(len(mixed), 1, 1))
    infos = [{"at": index // 2} for index in range(len(mixed))]  # two of each
    write_scores(table, [Score({"right": 1.0}, True, info=info) for info in infos], {"right": 2.0})
    logged = rollout_rows(table, tokenizer)
    assert [plain["reward_info"] for plain in logged] == infos
    for plain, row in zip(logged, mixed, strict=True):
        assert plain["prompt"] == tokenizer.decode(row[keys.PROMPT_TOKENS].tolist())
        assert plain["query"] == problems[plain["group_id"]].query
        assert (plain["sample_id"], plain["response"]) == (int(row["sample_id"]), row[keys.RESPONSE_TEXT])
