"""The collector and the source: complete groups, in order, of the right age, every prompt once."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardScaling

from sota_grpo import keys
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import RunFailed
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.rl.transforms import GroupAdvantage, OverlongPenalty
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import GroupReplayBuffer, Timed
from tests.training_rigs import make_env, make_scripted

MODEL = torch.nn.Linear(2, 2)


def make_collector(**options) -> PromptGroupCollector:
    env = make_env(num_train=40, num_heldout=1)
    engine = make_scripted(env)
    engine._duration_s = lambda request: random.random() / 100  # groups finish in any order
    options = {"sampling": Sampling(max_tokens=128), "dialog_turns_per_batch": 16, **options}
    return PromptGroupCollector(env, engine, **options)


def column(rows, key) -> list:
    return [int(row[key]) for row in row_list(rows)]


def test_a_collector_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="group size 4; use 16"):
        make_collector(dialog_turns_per_batch=18)
    with pytest.raises(ValueError, match=r"use GroupReplayBuffer\(8, 4\)"):
        make_collector(max_policy_age=1, replay_buffer=GroupReplayBuffer(4, 4))
    with pytest.raises(ValueError, match="call start"):
        make_collector(max_policy_age=1).next_batch()
    env = make_env()
    engine, scaled = make_scripted(env), TransformedEnv(env, RewardScaling(0.0, 9.0, in_keys=[keys.REWARD]))
    several = TaskEnv(env.task, env.tokenizer, num_envs=4, repeats=4, max_steps=2)
    for wrong, policy, sentence in (
        (env, MODEL, "The policy is a Linear, but a PromptGroupCollector samples with an engine"),
        (several, engine, r"several turns \(max_steps\), but ScriptedEngine samples single ones"),
        (scaled, engine, r"its transforms would have no effect; pass env\.base_env"),
        (env.task, engine, "a ArithmeticTask, which draws no prompt groups; pass a TaskEnv"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            PromptGroupCollector(wrong, policy, sampling=Sampling(max_tokens=8), dialog_turns_per_batch=4)
    with pytest.raises(RuntimeError, match="replay_buffer="):
        make_collector().start()
    with pytest.raises(ValueError, match="dispatch=False needs a GroupReplayBuffer"):
        make_collector(replay_buffer=ReplayBuffer(storage=LazyStackStorage(1000))).start(dispatch=False)
    with pytest.raises(RuntimeError, match="a postproc already"):
        make_collector(postproc=GroupAdvantage()).set_postproc(GroupAdvantage())
    begun = make_collector(replay_buffer=GroupReplayBuffer(4, 4))
    assert not begun.is_ready()
    with pytest.raises(RuntimeError, match=r"call start\(\) before is_ready\(\) or a batch"):
        begun.start()
    assert column(begun.next_batch(), keys.SAMPLE_ID) == [0, 1, 2, 3] * 4


def test_the_loop_of_torchrl_pushes_weights_and_versions_follow() -> None:
    collector = make_collector(total_dialog_turns=48, postproc=GroupAdvantage())
    for step, batch in enumerate(collector):
        assert batch.batch_size == (16,)
        assert column(batch, keys.GROUP_ID) == [group for group in range(4 * step, 4 * step + 4) for _ in range(4)]
        assert column(batch, keys.SAMPLE_ID) == [0, 1, 2, 3] * 4
        assert set(column(batch, keys.POLICY_VERSION)) == {step}
        assert all(keys.ADVANTAGE in row.keys(True) for row in batch.unbind(0))
        collector.update_policy_weights_(MODEL)
        assert collector.policy_version == collector.get_policy_version() == step + 1
    counts = {"frames": 48, "batches": 3, "total_frames": 48, "requested_frames_per_batch": 16, "policy_version": 3}
    assert collector.stats() == {**counts, "completed": True}
    assert len(collector) == 3


def test_weights_are_taken_in_each_form_of_torchrl() -> None:
    collector, seen = make_collector(), []
    collector.policy.update_weights = lambda weights, version: seen.append((dict(weights)["weight"], version))
    collector.update_policy_weights_(MODEL)
    collector.update_policy_weights_(TensorDict.from_module(MODEL).data)
    collector.update_policy_weights_(weights=MODEL)
    collector.update_policy_weights_(policy=MODEL)
    assert all(torch.equal(weight, MODEL.weight) and version == 1 for weight, version in seen)
    assert len(seen) == 4
    for options in ({}, {"worker_ids": 1}, {"model_id": "critic"}):
        with pytest.raises(ValueError):
            collector.update_policy_weights_(**options)


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("has_buffer", [False, True])
def test_an_advantage_is_compared_with_the_whole_batch(has_buffer: bool, group_size: int | None) -> None:
    """Also where groups are added to the buffer one by one."""
    transform = GroupAdvantage("batch_mean", "batch_std", group_size=group_size)
    buffer = GroupReplayBuffer(4, 4, transform=transform) if has_buffer else None
    rows = make_collector(replay_buffer=buffer, postproc=None if has_buffer else transform).next_batch()
    rewards = rows[keys.REWARD].flatten()
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(rows[keys.ADVANTAGE].flatten(), expected)


def test_a_group_buffer_gives_batches_beside_the_collector_and_ends_where_it_does() -> None:
    buffer, groups = GroupReplayBuffer(8, 4, transform=GroupAdvantage()), []
    collector = make_collector(total_dialog_turns=64, max_policy_age=1, replay_buffer=buffer)
    collector.start()
    for step, batch in enumerate(buffer):
        assert batch.batch_size == (16,)
        assert min(column(batch, keys.POLICY_VERSION)) >= step - 1
        groups += column(batch, keys.GROUP_ID)
        collector.update_policy_weights_(MODEL)
    collector.shutdown()
    assert sorted(groups) == [group for group in range(16) for _ in range(4)]
    assert not collector.is_running()


@pytest.mark.parametrize("beside", [False, True])
def test_weights_may_be_pushed_before_the_first_batch(beside: bool) -> None:
    collector = make_collector(replay_buffer=GroupReplayBuffer(4, 4) if beside else None)
    collector.update_policy_weights_(MODEL)
    if beside:
        collector.start()
    rows = collector.next_batch()
    assert column(rows, keys.GROUP_ID) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert set(column(rows, keys.POLICY_VERSION)) == {1}
    collector.shutdown()


def test_a_loop_that_pushes_nothing_has_fresh_groups_in_each_batch() -> None:
    buffer = GroupReplayBuffer(4, 4)
    collector, seen = make_collector(total_dialog_turns=48, replay_buffer=buffer), []
    for _ in collector:
        assert len(buffer) == 4
        seen += column(buffer.sample(), keys.GROUP_ID)
        assert len(buffer) == 0
    assert seen == [group for group in range(12) for _ in range(4)]
    assert buffer.write_count == 12


def test_the_age_counts_pushes_so_there_is_one_for_each_batch() -> None:
    collector = make_collector(max_policy_age=1, replay_buffer=GroupReplayBuffer(8, 4))
    collector.start()
    with pytest.raises(RuntimeError, match="update once per batch"):
        collector.update_policy_weights_(MODEL)
    collector.replay_buffer.sample()
    collector.update_policy_weights_(MODEL)
    with pytest.raises(RuntimeError, match="update once per batch"):
        collector.update_policy_weights_(MODEL)
    with pytest.raises(RuntimeError, match="called before"):
        collector.start()
    with pytest.raises(ValueError, match="batches have 4"):
        collector.replay_buffer.sample(1)
    collector.shutdown()


@pytest.mark.timeout(60)
def test_a_collector_that_is_closed_ends_the_wait_for_a_batch() -> None:
    collector = make_collector(max_policy_age=1, replay_buffer=GroupReplayBuffer(8, 4))
    collector.policy._duration_s = lambda request: 30.0
    collector.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collector.next_batch)
        collector.close()
        with pytest.raises(RuntimeError, match="was closed"):
            waiting.result(30)


class NewestFirst(RandomSampler):
    """Chooses the groups drawn last for two batches, then those drawn first."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = itertools.count()

    def sample(self, storage, batch_size):
        ids = torch.tensor([int(storage.get(index)[keys.GROUP_ID].flatten()[0]) for index in range(len(storage))])
        return ids.topk(batch_size, largest=next(self.batches) < 2).indices, {}


@pytest.mark.timeout(60)
def test_the_age_is_asserted_where_a_sampler_of_the_user_chooses() -> None:
    buffer, seen = GroupReplayBuffer(8, 4, sampler=NewestFirst()), []
    collector = make_collector(max_policy_age=1, replay_buffer=buffer)
    collector.start()

    def sampled() -> list[int]:
        while len(buffer) < 8:
            time.sleep(0.001)
        return column(buffer.sample(), keys.GROUP_ID)[::4]

    for _ in range(2):
        seen += sampled()
        collector.update_policy_weights_(MODEL)
    assert seen == [4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(RunFailed, match=r"version 0 in training at version 2.*NewestFirst took that group too late"):
        sampled()
    collector.shutdown()


def test_a_transform_of_torchrl_is_given_tensordicts_of_a_group() -> None:
    scale = RewardScaling(1.0, 2.0, in_keys=[keys.REWARD])
    for where in ("graded_transforms", "group_transforms"):
        plain, scaled = make_collector().next_batch(), make_collector(**{where: [scale]}).next_batch()
        for row, other in zip(plain.unbind(0), scaled.unbind(0), strict=True):
            assert other[keys.REWARD] == 2 * row[keys.REWARD] + 1


def test_a_timed_transform_of_tables_is_given_the_table_of_a_group() -> None:
    seen = []

    class Seen(OverlongPenalty):
        def forward(self, rows):
            seen.append(type(rows))
            return super().forward(rows)

    make_collector(group_transforms=[Timed("score", Seen(10, 9))]).next_batch()
    assert {*seen} == {RowTable}


def test_hooks_are_called_around_each_batch_and_what_has_no_meaning_says_so() -> None:
    collector, seen = make_collector(), []
    collector.pre_collect_hook = lambda: seen.append("before")
    collector.post_collect_hook = lambda batch: seen.append(len(batch))
    collector.rollout()
    assert seen == ["before", 16]
    for name in ("reset", "pause", "init_updater", "get_policy_model", "enable_profile", "as_remote"):
        with pytest.raises(NotImplementedError, match=" "):
            getattr(collector, name)()


def test_a_state_needs_the_weights_of_its_moment() -> None:
    first, second = make_collector(), make_collector()
    for _, _ in zip(range(2), first):
        first.update_policy_weights_(MODEL)
    state = first.state_dict()
    second.load_state_dict(state)
    with pytest.raises(RuntimeError, match="state has policy version 2, but the engine has 0"):
        second.next_batch()
    second.update_policy_weights_(MODEL, version=state["policy_version"])
    assert column(second.next_batch(), keys.GROUP_ID)[::4] == [8, 9, 10, 11]
    assert second.stats()["frames"] == 48
    with pytest.raises(RuntimeError, match="after collection had begun"):
        second.set_seed(1)


@pytest.mark.timeout(60)
def test_a_buffer_of_torchrl_is_filled_while_weights_are_pushed() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=8)
    collector = make_collector(total_dialog_turns=160, replay_buffer=buffer)
    collector.start()
    while collector.is_running():
        collector.update_policy_weights_(MODEL)
        time.sleep(0.01)
    collector.shutdown()
    assert sorted(column(buffer[:], keys.GROUP_ID)) == [group for group in range(40) for _ in range(4)]


def test_a_failure_in_the_thread_is_raised_at_shutdown() -> None:
    collector = make_collector(replay_buffer=ReplayBuffer(storage=LazyStackStorage(100)))
    collector.policy.submit = None
    collector.start()
    collector._thread.join(60)
    with pytest.raises(TypeError):
        collector.shutdown()
