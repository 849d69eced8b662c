"""The collector and the source: complete groups, in order, of the right age, every prompt once."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import LazyStackedTensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer

from sota_grpo import keys
from sota_grpo.collectors import RolloutCollector, SyncSource
from sota_grpo.records import Sampling
from sota_grpo.transforms import GroupAdvantage
from tests.l3_parts import make_env, make_scripted


def make_collector(**options) -> RolloutCollector:
    env = make_env()
    engine = make_scripted(env)
    engine._duration_s = lambda request: random.random() / 100  # groups finish in any order
    return RolloutCollector(env, engine, sampling=Sampling(max_tokens=128), **{"dialog_turns_per_batch": 16, **options})


def column(rows, key) -> list:
    return [int(row.get(key)) for row in rows.unbind(0)]


def test_batches_hold_whole_groups_in_the_order_drawn() -> None:
    batches = list(make_collector(total_dialog_turns=48))
    assert [batch.batch_size[0] for batch in batches] == [16, 16, 16]
    assert [group for batch in batches for group in column(batch, keys.GROUP_ID)] == [
        g for g in range(12) for _ in range(4)
    ]
    assert column(batches[0], keys.SAMPLE_ID) == [0, 1, 2, 3] * 4


def test_rewards_are_those_of_the_script() -> None:
    (rows,) = make_collector(total_dialog_turns=16)
    for row in rows.unbind(0):
        group, sample = int(row[keys.GROUP_ID]), int(row[keys.SAMPLE_ID])
        right = group % 3 == 0 or (group + sample) % 2 == 0
        assert float(row[keys.REWARD]) == float(right)
        assert bool(row[keys.SUCCESS]) == right


def test_a_collection_that_splits_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group size 4; use 16"):
        make_collector(dialog_turns_per_batch=18)


def test_resumed_collector_continues_with_the_next_prompt() -> None:
    whole, first, second = make_collector(), make_collector(), make_collector()
    expected = [row[keys.QUERY] for row in whole.collect(3) + whole.collect(5)]
    head = [row[keys.QUERY] for row in first.collect(3)]
    second.load_state_dict(first.state_dict())
    assert head + [row[keys.QUERY] for row in second.collect(5)] == expected


def test_start_fills_a_replay_buffer_and_shutdown_stops_it() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=8)
    collector = make_collector(total_dialog_turns=48, replay_buffer=buffer)
    collector.start()
    collector._thread.join(60)
    collector.shutdown()
    assert len(buffer) == 48
    assert buffer.sample().batch_size == (8,)


def test_a_failure_in_the_thread_is_raised_at_shutdown() -> None:
    collector = make_collector(replay_buffer=ReplayBuffer(storage=LazyStackStorage(100)))
    collector.engine.generate = None
    collector.start()
    collector._thread.join(60)
    with pytest.raises(TypeError):
        collector.shutdown()


def test_start_without_a_buffer_says_so() -> None:
    with pytest.raises(RuntimeError, match="replay_buffer="):
        make_collector().start()


def test_an_old_token_is_refused() -> None:
    source = SyncSource(make_collector(), [], num_groups=4)
    assert source.next_batch(0).batch_size == (16,)
    with pytest.raises(RuntimeError, match="policy version 0 arrived at version 1"):
        source.next_batch(1)


def test_advantages_are_those_of_each_group() -> None:
    rows = SyncSource(make_collector(), [("score", GroupAdvantage())], num_groups=4).next_batch(0)
    assert isinstance(rows, LazyStackedTensorDict)
    for start in range(0, 16, 4):
        rewards = torch.tensor([float(row[keys.REWARD]) for row in rows[start : start + 4].unbind(0)])
        found = torch.tensor([float(row[keys.ADVANTAGE]) for row in rows[start : start + 4].unbind(0)])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(found, torch.where(rewards.std() > 0, expected, 0.0))


def test_refill_replaces_groups_without_signal_and_counts_them() -> None:
    """Groups 0, 3, 6, ... are always right: six groups with signal are 1 2 4 5 7 8, three of nine had none."""
    source = SyncSource(make_collector(), [], num_groups=6, refill=True)
    rows = source.next_batch(0)
    assert sorted(set(column(rows, keys.GROUP_ID))) == [1, 2, 4, 5, 7, 8]
    assert source.metrics()["groups/refilled"] == 3
    assert source.metrics()["groups/zero_signal"] == 0


def test_refill_gives_up_after_its_bound_and_keeps_the_batch_whole(caplog: pytest.LogCaptureFixture) -> None:
    source = SyncSource(make_collector(), [], num_groups=6, refill=True, max_draws=1)
    rows = source.next_batch(0)
    assert rows.batch_size == (24,)
    assert "no gradient" in caplog.text


def test_without_refill_constant_groups_stay_and_are_counted() -> None:
    source = SyncSource(make_collector(), [], num_groups=6)
    assert sorted(set(column(source.next_batch(0), keys.GROUP_ID))) == list(range(6))
    assert source.metrics()["groups/zero_signal"] == 2
