"""A table of rows is its rows one by one: what goes in comes out, whatever each row has and however long it is."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from sota_grpo import keys
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import Example, Sample, SamplingSupport
from sota_grpo.rl.table import Column, RowTable, _plain_rows, in_place, row_list
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.training.remote_learner import travelling
from tests.builders import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def random_row(length: int) -> dict:
    """Sequences of its own length, scalars, texts, and by chance what other rows lack."""
    row = {
        keys.FULL_TOKENS: torch.randint(9, (length,)),
        keys.ASSISTANT_MASK: torch.rand(length) < 0.5,
        keys.LOG_PROBS: torch.randn(length),
        keys.GROUP_ID: torch.tensor(random.randrange(9)),
        keys.REWARD: torch.randn(1),
        keys.ADVANTAGE: torch.randn(1, 1),
        keys.QUERY: random.choice(["", "a?", "\ud7ff é"]),
    }
    if random.random() < 0.5:
        row[keys.DIALOG] = "{}"
    if random.random() < 0.5:
        row[*keys.REWARD_TERMS, "right"] = torch.randn(1)
    if random.random() < 0.5:
        row[keys.SUPPORT_IDS] = torch.randint(9, (random.randrange(4),), dtype=torch.int32)
    return row


def random_rows() -> list[dict]:
    """Some of them empty, all of one length at times."""
    length = random.randrange(4)
    alike = random.random() < 0.3
    return [random_row(length if alike else random.randrange(6)) for _ in range(random.randint(1, 6))]


def same(rows, others) -> None:
    """Equal keys, dtypes, shapes, bits and texts."""
    assert len(rows) == len(others)
    for one, other in zip(_plain_rows(rows), _plain_rows(others), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape), key
                assert torch.equal(value, other[key]), key
            else:
                assert value == other[key]


@pytest.mark.parametrize("_", range(8))
def test_tables_are_cut_joined_saved_sent_and_stacked_as_their_rows_are(_: int) -> None:
    parts = [random_rows() for _ in range(3)]
    rows = [row for part in parts for row in part]
    whole = RowTable.cat([RowTable.of(part) for part in parts])
    same(whole, rows)
    same(RowTable.of(rows), rows)
    places = [random.randrange(len(rows)) for _ in range(random.randrange(9))]
    same(whole.take(places), [rows[place] for place in places])
    cuts = whole.split(map(len, parts))
    for part, cut in zip(parts, cuts, strict=True):
        same(cut, part)
    same(RowTable.cat(cuts[::-1]), [row for part in parts[::-1] for row in part])
    same(RowTable.of_state(whole.state_dict()), rows)
    same(pickle.loads(pickle.dumps(whole, protocol=5)), rows)
    stacked = whole.stack()
    same(row_list(stacked), rows)
    same(RowTable.of(stacked), rows)
    lengths = [int(row[keys.ASSISTANT_MASK].sum()) for row in rows]
    assert whole.sums(keys.ASSISTANT_MASK).tolist() == lengths
    again = pickle.loads(pickle.dumps(whole.state_dict()))  # cut and joined once more
    same(RowTable.cat([RowTable.of_state(again), whole]), rows + rows)


def test_nothing_is_a_table_too_with_or_without_columns() -> None:
    empty, none = RowTable.cat([]), RowTable.of(random_rows()).take([])
    for table in (empty, none):
        assert len(table) == len(RowTable.of_state(table.state_dict())) == len(RowTable.of([])) == 0
    same(RowTable.cat([empty, RowTable.of([{"x": torch.ones(2)}])]), [{"x": torch.ones(2)}])
    assert [list(none.cells(key)) for key in none.columns] == [[]] * len(none.columns)
    assert none.sums(keys.ASSISTANT_MASK).tolist() == none.lengths(keys.GROUP_ID) == []


def test_a_column_is_a_tensor_of_all_where_all_taken_rows_have_it_in_one_length() -> None:
    table = RowTable(2, {"x": Column(torch.ones(1, 1), None, [1]), "y": Column(torch.ones(3), [1, 2])})
    with pytest.raises(ValueError, match="x is missing in 1 of 2 rows"):
        table.get("x")
    with pytest.raises(ValueError, match="y differs in length between rows"):
        table.get("y")
    assert table.get("z", 4) == 4
    table = RowTable.of([{"x": torch.ones(1)}, {"y": 1}, {"x": torch.zeros(1)}])
    assert table[2:].get("x").tolist() == [[0.0]]
    ragged = RowTable.of([{"x": torch.ones(2)}, {"x": torch.zeros(2)}, {"x": torch.ones(3)}])
    assert ragged[:2].get("x").tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_what_is_written_to_a_table_is_written_to_the_rows_that_it_was_made_of() -> None:
    @in_place
    def write(table: RowTable) -> None:
        table.set("y", [None, torch.ones(1)])
        table.set("text", ["a", "b"])

    rows = [TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]
    write(lazy_stack(rows))
    assert "y" not in rows[0].keys()  # noqa: SIM118
    assert (rows[1]["y"].tolist(), rows[0]["text"]) == ([1.0], "a")
    with pytest.raises(ValueError, match="y is missing in 1 of 2 rows; use a lazy stack"):
        write(TensorDict({"x": torch.zeros(2, 1)}, [2]))


@pytest.mark.parametrize("values", [[None, None], [None, torch.ones(1)]], ids=["no row", "one row"])
def test_writing_replaces_the_values_of_rows_that_do_not_get_one(values: list) -> None:
    @in_place
    def write(table: RowTable) -> None:
        table.set(("next", "y"), values)

    rows = [TensorDict({"next": {"y": torch.zeros(1), "z": torch.zeros(1)}}) for _ in range(2)]
    table = RowTable.of(rows)
    for batch in (table, lazy_stack(rows)):
        assert [row.get(("next", "y")) for row in RowTable.of(write(batch))] == values
        assert RowTable.of(batch).has(("next", "z"))
    if values == [None, None]:
        dense = write(TensorDict({"next": {"y": torch.zeros(2, 1)}}, [2]))
        assert not RowTable.of(dense).columns


def test_a_group_is_its_samples_whatever_each_of_them_has() -> None:
    """A response without a token, one that its worker decoded, sampling supports, a record, tokens of others."""
    ids = [torch.tensor([4, 5]), torch.zeros(0, dtype=torch.int64), torch.tensor([6, 7])]
    kept = SamplingSupport(torch.tensor([4, 5, 9], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    dialog = {"record": {"a": 1}, "assistant_mask": torch.tensor([False, True])}
    extra = ({"support": kept}, {"text": "said by a worker"}, dialog)
    samples = [Sample(a, -torch.ones(len(a)), torch.full((len(a),), 3), False, **own) for a, own in zip(ids, extra)]
    drawn = drawn_entries(7, Example("a?", "b"), [8, 9])
    rows = group_table(drawn, samples, TOKENIZER).rows()
    for index, sample in enumerate(samples):
        (alone,) = group_table(drawn, [sample], TOKENIZER).rows()
        same([rows[index]], [alone | {keys.SAMPLE_ID: torch.tensor(index)}])
    assert [int(row[keys.POLICY_VERSION]) for row in rows] == [3, -1, 3]
    assert rows[1][keys.RESPONSE_TEXT] == "said by a worker"
    assert rows[0][keys.SUPPORT_COUNTS].tolist() == [0, 0, 1, 2]
    assert [keys.SUPPORT_COUNTS in row for row in rows] == [True, False, False]
    assert [keys.DIALOG in row for row in rows] == [False, False, True]


def test_a_row_alone_is_that_row_and_a_view_of_the_table_and_rows_are_counted_where_they_lie() -> None:
    rows = [row for _ in range(4) for row in random_rows()]
    table = RowTable.of(rows)
    index = random.randrange(len(rows))
    same([table[index], table[index - len(rows)]], [rows[index]] * 2)
    table[index][keys.REWARD].fill_(7.0)
    assert table.get(keys.REWARD)[index].tolist() == [7.0]
    masks = [torch.ones(count, dtype=torch.bool, device="meta") for count in (2, 3)]
    assert RowTable.of([{keys.ASSISTANT_MASK: mask} for mask in masks]).sums(keys.ASSISTANT_MASK).device.type == "meta"


def test_entries_that_are_unlike_stay_as_they_are() -> None:
    """In dtype, in the number of dimensions, in more than their length, a tensor beside a text; once more when read."""
    unlike = [
        [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.tensor(1)],
        [torch.ones(1, 3), torch.ones(1, 4), torch.ones(2, 4)],
        [torch.ones(1, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)],
        ["a", torch.ones(1), "b"],
    ]
    for values in unlike:
        rows = [{"x": value, "y": torch.tensor(index)} for index, value in enumerate(values)]
        table = RowTable.of(rows)
        same(table, rows)
        same(RowTable.cat([table[:1], table[1:]]), rows)
        same(RowTable.of_state(table.state_dict()), rows)
        if values[0] is not unlike[2][0]:  # numpy, by which a column travels, has no bfloat16
            same(pickle.loads(pickle.dumps(table, protocol=5)), rows)


@pytest.mark.parametrize("damage", [{"rows": [0, 99]}, {"rows": [0]}, {"rows": [1, 0]}, {"shapes": [[3], [4]]}])
def test_a_damaged_column_is_refused(damage: dict[str, list]) -> None:
    state = RowTable.of([{"x": torch.ones(2)}, {"x": torch.ones(3)}]).state_dict()
    state["columns"][0] |= {name: torch.tensor(values) for name, values in damage.items()}
    with pytest.raises(ValueError, match="x"):
        RowTable.of_state(state)


def batches(rows: list[TensorDict]) -> dict[str, TensorDict]:
    """The same four rows as TorchRL may have them; ``hidden`` is ragged and unknown here."""
    ones = [row.unsqueeze(0) for row in rows]
    even = [row.exclude("hidden", "masks") for row in rows]
    root = TensorDict({keys.GROUP_ID: torch.stack([row[keys.GROUP_ID] for row in rows])}, [len(rows)])
    return {
        "list": rows,
        "stack": lazy_stack(rows),
        "[N, 1]": lazy_stack(ones),
        "[2, 2], the first dimension last": lazy_stack([lazy_stack(even[:2]), lazy_stack(even[2:])], 1),
        "a ragged step": root.set("next", lazy_stack([row["next"] for row in rows])),
    }


@pytest.mark.parametrize("form", ["list", "stack", "[N, 1]", "[2, 2], the first dimension last", "a ragged step"])
def test_transforms_write_to_batches_of_every_form(form: str) -> None:
    rows = []
    for index, reward in enumerate([1.0, 0.0, 0.0, 0.0]):
        mask = torch.ones(2 + index, dtype=torch.bool)
        rows.append(TensorDict({keys.GROUP_ID: torch.tensor(7), keys.ASSISTANT_MASK: mask}))
        rows[-1]["hidden"] = torch.ones(2 + index, 3)
        rows[-1]["next"] = TensorDict({"reward": torch.tensor([reward]), "ragged": torch.ones(1 + index)})
    batch = batches(rows)[form]
    in_place(GroupAdvantage(scale="none")._write)(batch)
    advantages = [row[keys.ADVANTAGE] for row in RowTable.of(batch)]
    assert {each.shape for each in advantages} == {(1, 1)}
    assert [each.item() for each in advantages] == [0.75, -0.25, -0.25, -0.25]  # the first row is first in each form


def test_ranks_are_given_no_rows_of_which_some_lack_an_entry() -> None:
    """All but those that have a default, as a support that no token of the row needs."""
    rows = [{keys.FULL_TOKENS: torch.ones(2), keys.SUPPORT_IDS: torch.ones(1)}, {keys.FULL_TOKENS: torch.ones(1)}]
    assert len(travelling(rows)) == 2
    rows[0][keys.REF_LOG_PROBS] = torch.ones(2)
    with pytest.raises(ValueError, match=r"ref_log_probs.*is missing in 1 of 2 rows"):
        travelling(rows)
