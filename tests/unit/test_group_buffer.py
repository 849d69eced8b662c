"""Finished groups: taken oldest first and once each, never overwritten, saved and read back exactly."""

from __future__ import annotations

import random

import pytest
import torch

from sota_grpo import keys
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import Example, Sample
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.source.admission import GroupBuffer
from sota_grpo.training.checkpoint import CheckpointStore
from tests.builders import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def group(group_id: int, *, size: int = 3) -> RowTable:
    """Real rows of random lengths with random rewards."""
    samples = []
    example = Example(f"q{group_id}", "a", {"k": group_id})
    drawn = drawn_entries(group_id, example, range(3, 3 + random.randint(1, 5)))
    for _ in range(size):
        length = random.randint(1, 6)
        ids, versions = torch.randint(3, 30, (length,)), torch.randint(0, 9, (length,))
        samples.append(Sample(ids, torch.randn(length), versions, random.random() < 0.5))
    rows = group_table(drawn, samples, TOKENIZER)
    rows.set(keys.REWARD, torch.rand(size, 1))
    return rows


def same(one: Row, other: Row) -> bool:
    """Equal keys, dtypes, shapes, bits and texts."""
    if one.keys() != other.keys():
        return False
    for path in one:
        left, right = one[path], other[path]
        if isinstance(left, torch.Tensor):
            if left.dtype != right.dtype or left.shape != right.shape or not torch.equal(left, right):
                return False
        elif left != right:
            return False
    return True


def ids(rows: RowTable) -> list[int]:
    return rows.get(keys.GROUP_ID).tolist()


def test_takes_by_version_then_arrival_and_orders_a_batch_by_group_id() -> None:
    buffer = GroupBuffer(5)
    for group_id, version in ((9, 2), (4, 1), (3, 2), (8, 1), (1, 1)):
        buffer.add(group(group_id, size=1), version=version)
    assert ids(buffer.take(2)) == [4, 8]  # the first two of version 1 to arrive
    assert ids(buffer.take(2)) == [1, 9]  # the last of version 1, and of version 2 the first to arrive
    assert ids(buffer.take(1)) == [3]


def test_random_traffic_gives_every_group_once_in_the_order_of_a_plain_list() -> None:
    buffer, waiting, arrived = GroupBuffer(8), [], 0
    for step in range(300):
        if len(waiting) < 8 and (not waiting or random.random() < 0.5):
            version = step // 20 + random.randint(0, 2)
            buffer.add(group(step, size=1), version=version)
            waiting.append((version, arrived, step))
            arrived += 1
        else:
            count = random.randint(1, len(waiting))
            waiting.sort()
            expected = sorted(item[2] for item in waiting[:count])
            del waiting[:count]
            assert ids(buffer.take(count)) == expected
        assert len(buffer) == len(waiting)
        assert buffer.versions.total() == len(waiting)


def test_a_full_buffer_refuses_and_keeps_what_it_has() -> None:
    buffer = GroupBuffer(2)
    for group_id in (0, 1):
        buffer.add(group(group_id), version=0)
    with pytest.raises(RuntimeError, match="All 2 places"):
        buffer.add(group(2), version=0)
    assert ids(buffer.take(2)) == [0, 0, 0, 1, 1, 1]
    buffer.add(group(2), version=0)
    assert ids(buffer.take(1)) == [2, 2, 2]


def test_asking_for_more_than_there_is_says_so() -> None:
    buffer = GroupBuffer(2)
    buffer.add(group(0), version=0)
    with pytest.raises(RuntimeError, match="2 finished groups were asked for and the buffer holds 1"):
        buffer.take(2)


def test_rows_come_out_as_they_went_in() -> None:
    rows = group(0)
    buffer = GroupBuffer(1)
    buffer.add(rows, version=0)
    assert all(same(one, two) for one, two in zip(rows, buffer.take(1), strict=True))


def test_a_saved_buffer_goes_on_as_the_original_would(tmp_path) -> None:
    buffer = GroupBuffer(6)
    for group_id in random.sample(range(100), 6):
        buffer.add(group(group_id), version=random.randint(0, 2))
    buffer.take(1)
    CheckpointStore(tmp_path).save(0, {"buffer": buffer.state_dict()})
    _, state = CheckpointStore(tmp_path).latest()
    other = GroupBuffer(6)
    other.add(group(500), version=0)  # forgotten
    other.load_state_dict(state["buffer"])
    for count in (2, 3):
        rows, again = (one.take(count) for one in (buffer, other))
        assert all(same(one, two) for one, two in zip(rows, again, strict=True))
