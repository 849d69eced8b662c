"""Finished groups: taken oldest first and once each, never overwritten, saved and read back exactly."""

from __future__ import annotations

import pickle
import random
from collections import Counter

import pytest
import torch
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement

from sota_grpo import keys
from sota_grpo.errors import RunFailed
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import Example, Sample
from sota_grpo.rl.table import RowTable
from sota_grpo.source.replay_buffer import GroupReplayBuffer
from sota_grpo.training.checkpoint import CheckpointStore
from tests.builders import tiny_tokenizer
from tests.unit.test_row_table import same

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


def put(buffer: GroupReplayBuffer, rows: RowTable, version: int) -> None:
    """A group that was admitted under ``version``, whatever versions its tokens have."""
    buffer.writer.admitted = lambda group_id: version
    buffer.extend(rows)


def ids(rows: RowTable) -> list[int]:
    return rows.get(keys.GROUP_ID).tolist()


def test_random_traffic_gives_every_group_once_in_the_order_of_a_plain_list() -> None:
    """By admission version, then by arrival; the groups of a batch by their ids."""
    buffer, waiting, arrived = GroupReplayBuffer(8, 1, as_table=True), [], 0
    for step in range(100):
        if len(waiting) < 8 and (not waiting or random.random() < 0.5):
            version = step // 20 + random.randint(0, 2)
            put(buffer, group(step, size=1), version)
            waiting.append((version, arrived, step))
            arrived += 1
        else:
            count = random.randint(1, len(waiting))
            waiting.sort()
            expected = sorted(item[2] for item in waiting[:count])
            del waiting[:count]
            assert ids(buffer.sample(count)) == expected
        assert len(buffer.sampler) == len(waiting)
        assert buffer.sampler.versions.total() == len(waiting)


def test_a_full_buffer_or_a_sample_that_fails_changes_nothing() -> None:
    buffer = GroupReplayBuffer(2, 1, as_table=True)
    buffer.extend(RowTable.cat([group(0), group(1)]))
    with pytest.raises(RuntimeError, match="holds 2 groups"):
        buffer.extend(group(2))
    assert ids(buffer.sample(2)) == [0, 0, 0, 1, 1, 1]
    buffer.extend(group(2))  # in the place of the first
    with pytest.raises(RuntimeError, match="2 groups were requested"):
        buffer.sample(2)
    assert ids(buffer.sample()) == [2, 2, 2]


def test_without_a_collector_iterating_ends_with_the_last_whole_batch() -> None:
    buffer = GroupReplayBuffer(5, 2, as_table=True)
    for group_id in range(5):
        buffer.extend(group(group_id, size=1))
    assert len({one for rows in buffer for one in ids(rows)}) == 4
    assert len(buffer) == 1
    with pytest.raises(RuntimeError, match="2 groups were requested, but the buffer holds 1 finished"):
        buffer.sample()
    buffer.empty()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        buffer.sample()


@pytest.mark.parametrize("version", [None, "0a5e"])
def test_rows_without_a_number_of_their_policy_are_first_in_first_out(version: str | None) -> None:
    """As those of TorchRL's environments, whose versions may be texts."""
    buffer = GroupReplayBuffer(3, 1, as_table=True)
    for group_id in (5, 3, 4):
        row = {keys.GROUP_ID: torch.tensor(group_id)} | ({} if version is None else {keys.POLICY_VERSION: version})
        buffer.extend(RowTable.of([row, row]))
    assert [ids(buffer.sample()) for _ in range(3)] == [[5, 5], [3, 3], [4, 4]]
    with pytest.raises(KeyError, match="the rows have no group_id"):
        buffer.extend(RowTable.of([{keys.POLICY_VERSION: torch.tensor(1)}]))


class BestGroups(RandomSampler):
    """Chooses the groups of the highest reward, by what a storage of TorchRL gives."""

    def sample(self, storage, batch_size):
        rewards = [float(storage.get(index)[keys.REWARD].mean()) for index in range(len(storage))]
        return torch.tensor(rewards).topk(batch_size).indices, {}


def test_a_sampler_of_the_user_chooses_and_each_group_comes_once() -> None:
    buffer = GroupReplayBuffer(4, 2, as_table=True, sampler=BestGroups())
    for group_id, reward in enumerate((0.1, 0.9, 0.2, 0.8)):
        rows = group(group_id, size=2)
        rows.set(keys.REWARD, torch.full((2, 1), reward))
        buffer.extend(rows)
    assert [ids(buffer.sample()), ids(buffer.sample())] == [[1, 1, 3, 3], [0, 0, 2, 2]]


@pytest.mark.parametrize("chosen", [[0, 0], [2, 0], [-1, 1], [0.5, 1], [0]], ids=str)
def test_a_mistaken_sampler_fails_the_run_and_every_group_stays(chosen) -> None:
    sampler = BestGroups()
    sampler.sample = lambda storage, batch_size: (torch.tensor(chosen), {})
    buffer = GroupReplayBuffer(4, 2, sampler=sampler)
    buffer.extend(RowTable.cat([group(0), group(1)]))
    with pytest.raises(RunFailed, match=r"BestGroups chose the groups .*; return 2 different indices below 2"):
        buffer.sample()
    assert len(buffer) == len(buffer.sampler) == 2


def test_torchrls_sampler_without_replacement_gives_each_group_once() -> None:
    buffer = GroupReplayBuffer(6, 2, as_table=True, sampler=SamplerWithoutReplacement(drop_last=True))
    arriving, seen = iter(range(12)), []
    for held in (3, 5, 6, 4, 2, 2):  # any number of finished groups
        while len(buffer) < held:
            buffer.extend(group(next(arriving)))
        seen += ids(buffer.sample())
    seen += [one for batch in buffer for one in ids(batch)]
    assert set(Counter(seen).values()) == {3}  # rows of a group


def test_what_would_be_lost_is_refused_and_a_buffer_can_be_pickled() -> None:
    buffer = GroupReplayBuffer(4, 2)
    buffer.extend(RowTable.cat([group(0), group(1)]))
    for write in (buffer.set_at_, buffer.set_, buffer.update_, buffer.write_all):
        with pytest.raises(NotImplementedError, match="copies"):
            write("reward", 0.0)
    again = pickle.loads(pickle.dumps(buffer))
    same(again.sample(), buffer.sample())


def test_a_saved_buffer_continues_as_the_original_would(tmp_path) -> None:
    buffer, other = (GroupReplayBuffer(6, 1, as_table=True) for _ in range(2))
    for group_id in random.sample(range(100), 6):
        put(buffer, group(group_id), random.randint(0, 2))
    buffer.sample(1)
    CheckpointStore(tmp_path).save(0, {"buffer": buffer.state_dict()})
    _, state = CheckpointStore(tmp_path).latest()
    put(other, group(500), 0)  # forgotten
    other.load_state_dict(state["buffer"])
    for count in (2, 3):
        same(buffer.sample(count), other.sample(count))
