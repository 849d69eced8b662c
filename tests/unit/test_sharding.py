"""Ranks make equally many passes, what travels arrives, no rank is waited for in vain.

Two real ranks: ``tests/contract/test_fsdp_ranks.py``.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sota_grpo import keys
from sota_grpo.functional.flops import ModelShape
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.weight_pack import StatePack, WeightPack
from sota_grpo.rl.planner import groups_by_prompt, micro_batches, row_prompts
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.training import remote_learner
from sota_grpo.training.remote_learner import LearnerDied, LearnerWorker, RemoteLearner, travelling
from sota_grpo.workers.base import WorkerDied
from tests.rank_rigs import build_learner, learner_settings, passes_of, ragged_rows
from tests.unit.tiny_models import VOCAB, make_model


@pytest.mark.parametrize("count", [1, 2, 13])
@pytest.mark.parametrize("shared", [True, False])
def test_ranks_make_equally_many_passes_over_every_row_once(count: int, shared: bool) -> None:
    policy, rows = CausalPolicy(make_model(), shared_prompt=shared), row_list(ragged_rows(count))
    settings, prompts = learner_settings(), row_prompts(rows)
    planner = passes_of(policy, settings, Ranks(0, 3)).step_planner()
    parts = planner.micro_batches(range(count), prompts, 30)
    assert len({len(part) for part in parts}) == 1
    assert sorted(index for part in parts for micro, real in part if real for index in micro) == list(range(count))
    shortest = min(row[keys.FULL_TOKENS].shape[0] for row in rows)
    for micro, real in itertools.chain(*parts):
        longest = max(rows[index][keys.FULL_TOKENS].shape[0] for index in micro)
        packed = sum(group.size[0] for group in groups_by_prompt(row_prompts(rows), micro))
        assert (packed if shared else len(micro) * longest) <= 30
        assert real or (len(micro), longest) == (1, shortest)
    alone = passes_of(policy, settings, None).step_planner().micro_batches(range(count), prompts, 30)
    expected = micro_batches(rows, token_budget=30, shared_prompt=shared)
    assert [[rows[index] for index in micro] for micro, _ in alone[0]] == expected


def test_each_rank_is_sent_the_rows_that_it_computes_and_no_others() -> None:
    """24 rows, 3 ranks, 2 epochs, steps of 12: every step's tokens weigh 1 together, over all shares."""
    rows = RowTable.of(ragged_rows(24))
    rows.set("place", torch.arange(24))
    policy = CausalPolicy(make_model())
    for epochs in (1, 2):
        settings = learner_settings(epochs=epochs, optim_batch_size=12, aggregation="token")
        shares = passes_of(policy, settings, Ranks(0, 3)).step_planner().shares(rows, version=4)
        for step in range(2 * epochs):
            weights: Counter[int] = Counter()
            for share in shares:
                for one in share.steps[step]:
                    for index, weight in zip(one.rows, one.weights):
                        weights[share.positions[index]] += weight
            sampled = {place: rows.sums(keys.ASSISTANT_MASK)[place].item() for place in weights}
            assert len(weights) >= 12  # a row that keeps a rank in step weighs nothing
            assert sum(weights[place] * count for place, count in sampled.items()) == pytest.approx(1)
        for share in shares:
            assert share.rows.get("place").tolist() == share.positions
            used = {index for step in share.steps for one in step for index in one.rows}
            assert used == set(range(len(share.rows)))
        if epochs == 1:
            assert sum(len(share.rows) for share in shares) < 24 + 3 * 2  # each once, but for what keeps in step


@pytest.mark.parametrize("options", [{}, {"recompute": True, "epochs": 2}, {"aggregation": "token"}])
def test_a_share_that_travelled_is_learned_like_the_whole(options: dict[str, Any], tmp_path) -> None:
    rows = ragged_rows(11)
    whole, sent = (build_learner(Ranks(), str(tmp_path), **options) for _ in range(2))
    (share,) = sent.step_planner().shares(travelling(rows), 0)
    actual = sent.update_share(pickle.loads(pickle.dumps(share, protocol=5)))
    expected = whole.update(rows)
    assert actual | {"time/learn_s": 0} == expected | {"time/learn_s": 0}
    torch.testing.assert_close(list(sent.parameters), list(whole.parameters), rtol=0, atol=0)


@pytest.mark.parametrize("lora", [False, True])
def test_the_shape_is_the_models(lora: bool) -> None:
    """Two layers of width 16: q and o 16 x 16, k and v 8 x 16, three of 32 x 16; adapters of rank 3 on all seven."""
    model = make_model()
    model = add_lora(model, r=3, alpha=6) if lora else model
    layer = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 32 * 16
    adapters = 3 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 32))
    trained, frozen = (2 * adapters, 2 * layer) if lora else (2 * layer, 0)
    actual = passes_of(CausalPolicy(model), learner_settings(), None).shape
    assert actual == ModelShape(trained, frozen, 2 * 16, VOCAB * 16, not lora)


def test_ranks_keep_no_half_precision_copy_of_every_layer() -> None:
    """Autocast's cache would keep one of each layer that is gathered and given back, until the pass ends."""
    policy = CausalPolicy(make_model())
    for size in (1, 2):
        with passes_of(policy, learner_settings(precision="bf16"), Ranks(0, size)).autocast():
            assert torch.is_autocast_cache_enabled() == (size == 1)


def test_rows_arrive_without_their_text_and_a_state_as_it_was() -> None:
    rows = row_list(ragged_rows(9))
    actual = pickle.loads(pickle.dumps(travelling(rows), protocol=5))
    for mine, theirs in zip(rows, actual, strict=True):
        names = {name for name, value in mine.items(True, True) if isinstance(value, torch.Tensor)}
        assert set(theirs) == names == set(mine.keys(True, True)) - {keys.RESPONSE_TEXT}
        torch.testing.assert_close(dict(theirs), {name: mine[name] for name in theirs}, rtol=0, atol=0)
    state = {
        "model": {"w": torch.randn(3, 2), "h": torch.randn(4).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99), "lr": None}]},
    }
    actual = pickle.loads(pickle.dumps(StatePack.of(state), protocol=5)).state()
    torch.testing.assert_close(actual, state, rtol=0, atol=0)
    assert actual["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


class Rank:
    """A worker whose answers the test gives: ``answers[method]`` is called on a thread of its own, if it may wait."""

    def __init__(self, number: int, **answers: Any) -> None:
        self.name = f"learner-{number}"
        self.answers: dict[str, Any] = {"ping": lambda: 0.0, **answers}
        self.killed = threading.Event()
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any) -> Future[Any]:
        method, *args = args if method == "run_method" else (method, *args)
        self.calls.append((method, *args))
        future: Future[Any] = Future()

        def answer() -> None:
            try:
                future.set_result(self.never() if self.killed.is_set() else self.answers[method]())
            except Exception as error:
                future.set_exception(error)

        if method == "ping" and self.answers[method] != self.never:
            answer()  # never mute, however busy the machine is
        else:
            threading.Thread(target=answer, daemon=True).start()
        return future

    def kill(self) -> None:
        self.killed.set()

    def never(self) -> None:
        """The answer of a rank that waits until it is killed."""
        self.killed.wait()
        raise WorkerDied(f"{self.name} was killed")


def facade(*ranks: Rank, **changes: float) -> RemoteLearner:
    options = {"silence_s": 0.4, "start_s": 1.0, "grace_s": 0.2, **changes}
    return RemoteLearner(ranks, learner_settings(), **options)


def test_a_model_goes_to_the_folder_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a running Ray cluster works where `ray start` was called."""
    monkeypatch.chdir(tmp_path)
    rank = Rank(0, export_hf=lambda: None)
    facade(rank).export_hf(Path("run/hf"))
    assert ("export_hf", str(tmp_path / "run" / "hf")) in rank.calls


def failing(error: Exception) -> Mock:
    return Mock(side_effect=error)


def test_a_rank_that_does_not_answer_is_named_though_the_others_are_stuck_too() -> None:
    ranks = [Rank(number) for number in range(3)]
    remote = facade(*ranks)
    remote.wait_ready()
    began = time.monotonic()
    for rank in ranks:
        rank.answers["perturb"] = rank.never
    for stuck in (ranks[0], ranks[2]):
        stuck.answers["ping"] = lambda: time.monotonic() - began
    ranks[1].answers["ping"] = ranks[1].never
    with pytest.raises(LearnerDied, match=r"rank 1 \(learner-1\).*does not answer"):
        remote.perturb()
    assert all(rank.killed.is_set() for rank in ranks)


@pytest.mark.parametrize("gone", ["died", "mute"])
def test_a_rank_that_dies_while_something_else_is_waited_for_is_noticed(gone: str) -> None:
    """Its node may have been that of the engines too, so that no batch comes, and no call to the learner."""
    ranks = [Rank(number) for number in range(2)]
    remote = facade(*ranks)
    remote.wait_ready()
    dead = failing(WorkerDied("learner-1 (pid 7) is gone: its node has died"))
    ranks[1].answers["ping"] = dead if gone == "died" else ranks[1].never
    with pytest.raises(LearnerDied, match=r"rank 1 .*(its node has died|does not answer).*train\.resume=auto"):
        wait_for_samples(remote)
    assert all(rank.killed.is_set() for rank in ranks)


def wait_for_samples(remote: RemoteLearner) -> None:
    while True:  # pytest's own limit ends it
        remote.poll()
        time.sleep(0.01)


class Clocked:
    """Two ranks whose pings the test answers, at times that it sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(remote_learner, "time", SimpleNamespace(monotonic=lambda: 1e4 + self.now_s))
        self.pings: list[list[Future[Any]]] = [[], []]
        self.workers = [SimpleNamespace(name=f"learner-{n}", call=self._call(n), kill=lambda: None) for n in (0, 1)]
        self.remote = facade(*self.workers, silence_s=600.0)

    def _call(self, number: int) -> Any:
        return lambda method: self.pings[number].append(Future()) or self.pings[number][-1]

    def poll(self, now_s: float) -> None:
        self.now_s = now_s
        self.remote.poll()


def test_a_rank_that_does_not_answer_does_not_hide_that_another_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the second look, ten seconds after the first, and not when the first rank's 600 s are over."""
    ranks = Clocked(monkeypatch)
    ranks.poll(0.0)
    ranks.pings[1][0].set_result(0.0)
    ranks.poll(9.9)
    assert [len(pings) for pings in ranks.pings] == [1, 1]
    ranks.poll(10.0)
    assert [len(pings) for pings in ranks.pings] == [1, 2]  # a look at a time for each
    ranks.pings[1][1].set_exception(WorkerDied("its node has died"))
    with pytest.raises(LearnerDied, match=r"rank 1 .*its node has died"):
        ranks.poll(10.1)


def test_ranks_that_live_are_left_alone_however_rarely_they_are_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Clocked(monkeypatch)
    ranks.poll(0.0)
    for pings in ranks.pings:
        pings[0].set_result(0.0)
    ranks.poll(5000.0)  # a long step was between
    ranks.pings[0][1].set_result(0.0)
    ranks.poll(5599.0)
    ranks.pings[1][1].set_result(0.0)  # late, but within silence_s
    ranks.pings[0][2].set_result(0.0)
    ranks.poll(5602.0)
    ranks.poll(5609.0)
    assert [len(pings) for pings in ranks.pings] == [4, 3]
    ranks.pings[0][3].set_result(0.0)
    ranks.poll(6202.0)  # rank 1 has owed an answer since 5602: 600 s, no longer
    with pytest.raises(LearnerDied, match=r"rank 1 .*does not answer for 600 s"):
        ranks.poll(6202.1)


@pytest.mark.parametrize("first", ["checkpoint", "samples", "none"])
def test_a_call_to_a_dead_learner_names_the_rank_that_failed_first(first: str, tmp_path: Path) -> None:
    """A checkpoint's thread and the one that waits for samples: who notices kills all, and the other sees this."""
    answers = {"begin_save": lambda: {}, "written": lambda: ("rank", "digest")}
    ranks = [Rank(number, **answers) for number in range(3)]
    remote = facade(*ranks)
    _, shards = remote.begin_save(tmp_path)
    began, failed = time.monotonic(), ranks[2].answers
    failed["written"] = ranks[2].never
    if first == "checkpoint":  # poll() asks who lives, not who makes progress
        failed["ping"], message = lambda: time.monotonic() - began, "makes no progress"
    elif first == "samples":  # its write hangs as well
        failed["ping"], message = failing(WorkerDied("its node has died")), "its node has died"
    else:
        failed["written"], message = failing(WorkerDied("SIGKILL")), "SIGKILL"
    with ThreadPoolExecutor(1) as checkpoint:
        written = checkpoint.submit(shards.written)
        with pytest.raises(LearnerDied, match=f"rank 2 .*{message}") as caught:
            wait_for_samples(remote)
        assert written.exception() is caught.value
    assert all(rank.killed.is_set() for rank in ranks)


def test_slow_ranks_that_make_progress_are_waited_for() -> None:
    pack = WeightPack.of([("w", torch.ones(1))])
    ranks = [Rank(0, weights=lambda: time.sleep(1.0) or (pack, 1)), Rank(1, weights=lambda: time.sleep(0.8))]
    assert facade(*ranks).weights().buffers == pack.buffers
    assert not any(rank.killed.is_set() for rank in ranks)


def test_an_error_ends_all_ranks_unless_all_survive_it_and_the_dead_rank_is_named() -> None:
    ranks = [Rank(0, restore=failing(ValueError("rank 0's"))), Rank(1, restore=lambda: None)]
    with pytest.raises(ValueError, match="rank 0's"):
        facade(*ranks).restore()
    assert not any(rank.killed.is_set() for rank in ranks)

    def late() -> None:
        time.sleep(0.1)
        raise WorkerDied("learner-1 was ended by SIGKILL")

    ranks[1].answers["restore"] = late  # rank 0 notices first
    with pytest.raises(LearnerDied, match=r"rank 1 .*SIGKILL"):
        facade(*ranks).restore()
    ranks = [Rank(0), Rank(1, restore=failing(ValueError("a row without a prompt")))]
    ranks[0].answers["restore"] = ranks[0].never
    with pytest.raises(LearnerDied, match=r"rank 1 .*a row without a prompt.*train\.resume=auto"):
        facade(*ranks).restore()
    assert all(rank.killed.is_set() for rank in ranks)


@pytest.mark.parametrize("message", ["no such model", "was not ready after"])
def test_a_rank_that_does_not_start_is_a_sentence(message: str) -> None:
    ranks = [Rank(0), Rank(1)]
    broken = failing(WorkerDied("learner-1 could not be constructed: no such model"))
    ranks[1].answers["ping"] = broken if message == "no such model" else ranks[1].never
    with pytest.raises(LearnerDied, match=rf"rank 1 \(learner-1\).*{message}"):
        facade(*ranks, start_s=0.3).update(ragged_rows(2))
    assert all(rank.killed.is_set() for rank in ranks)


def test_every_rank_is_given_the_calls_of_all_threads_in_one_order() -> None:
    class Slow(Rank):
        def call(self, method: str, *args: Any) -> Future[Any]:
            time.sleep(0.002 * random.random())
            return super().call(method, *args)

    ranks = [Slow(number, perturb=lambda: None, restore=lambda: None) for number in range(3)]
    remote = facade(*ranks)
    calls = [remote.perturb, remote.restore] * 25
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda call: call(), calls))
    orders = [[call for call in rank.calls if call[0] != "ping"] for rank in ranks]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 50


def test_a_rank_shows_progress_while_it_gathers_its_state(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a large model takes longer than a rank may be silent."""
    worker = LearnerWorker(lambda: build_learner(Ranks(), str(tmp_path)))
    (share,) = worker.learner.step_planner().shares(RowTable.of(ragged_rows(5)), 0)
    worker.update(share).result()
    ticks = []
    monkeypatch.setattr(worker._thread, "progress", lambda: ticks.append(None))
    state = worker.state_dict().result().state()
    moments = [name for entry in state["optimizer"]["state"].values() for name in entry]
    assert len(ticks) >= len(state["model"]) + len(moments)
    worker.close()
