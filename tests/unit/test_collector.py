"""The collector and the source: complete groups, in order, of the right age, every prompt once."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from sota_grpo import keys
from sota_grpo.rewards.grading import Grader, LocalGrader
from sota_grpo.rl.records import Example, Sampling, Score
from sota_grpo.rl.table import row_list
from sota_grpo.source.collector import RolloutCollector
from sota_grpo.source.source import Prompt, Rollouts, RolloutSource
from tests.l3_parts import make_env, make_scripted


def make_collector(grader: Grader | None = None, **options) -> RolloutCollector:
    env = make_env(grader=grader)
    engine = make_scripted(env)
    engine._duration_s = lambda request: random.random() / 100  # groups finish in any order
    return RolloutCollector(env, engine, sampling=Sampling(max_tokens=128), **{"dialog_turns_per_batch": 16, **options})


def make_source(**options) -> RolloutSource:
    collector = make_collector()
    return RolloutSource(collector.rollouts, collector.sampling, num_groups=6, synchronous=True, **options)


def column(rows, key) -> list:
    return [int(row[key]) for row in row_list(rows)]


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


class LateGrader:
    """Answers when it has been asked for ``num_groups`` groups, the last one first, from another thread."""

    def __init__(self, num_groups: int, delay_s: float = 0.0) -> None:
        task = make_env().task
        self._here, self._num_groups, self._delay_s = LocalGrader(task.score, task.term_weights), num_groups, delay_s
        self.open: list[tuple[Future[list[Score]], list[tuple[str, Example]]]] = []

    def scores(self, asked: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        self.open.append((Future(), list(asked)))
        if len(self.open) == self._num_groups:
            threading.Timer(self._delay_s, self._answer).start()
        return self.open[-1][0]

    def _answer(self) -> None:
        for future, asked in reversed(self.open):
            future.set_result(self._here.scores(asked).result())

    def close(self) -> None:
        """Nothing to end."""


def plain(row: TensorDictBase) -> dict[str, object]:
    return {str(key): value.tolist() if hasattr(value, "tolist") else value for key, value in row.items(True, True)}


@pytest.mark.timeout(60)
def test_rows_are_the_same_wherever_and_whenever_they_are_graded() -> None:
    """Nobody waits for a score while the engine still generates: this grader answers after the last group only."""
    late, here = make_collector(LateGrader(num_groups=12)), make_collector()
    assert list(map(plain, late.collect(12))) == list(map(plain, here.collect(12)))


def test_a_request_has_its_example_where_the_dialog_goes_on() -> None:
    for multi_turn in (False, True):
        env = make_env(multi_turn=multi_turn)
        example = env.task.train[3]
        request = Rollouts(env, make_scripted(env)).request(Prompt(7, example, num_samples=2, seed=5))
        assert (request.group_id, request.num_samples, request.seed) == (7, 2, 5)
        assert request.prompt_ids == env.prompt_ids(example)
        assert request.example == (example if multi_turn else None)


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
    collector.engine.submit = None
    collector.start()
    collector._thread.join(60)
    with pytest.raises(TypeError):
        collector.shutdown()


def test_start_without_a_buffer_says_so() -> None:
    with pytest.raises(RuntimeError, match="replay_buffer="):
        make_collector().start()


def test_refill_replaces_zero_advantage_groups_and_counts_them() -> None:
    """Groups 0, 3, 6, ... are always right: the six others are 1 2 4 5 7 8, three of nine have zero advantage."""
    source = make_source(refill=True)
    rows = source.next_batch(0)
    assert sorted(set(column(rows, keys.GROUP_ID))) == [1, 2, 4, 5, 7, 8]
    assert source.metrics()["groups/refilled"] == 3
    assert source.metrics()["groups/zero_advantage"] == 0


def test_without_refill_zero_advantage_groups_stay_and_are_counted() -> None:
    source = make_source()
    assert sorted(set(column(source.next_batch(0), keys.GROUP_ID))) == list(range(6))
    assert source.metrics()["groups/zero_advantage"] == 2
