"""Two real ranks (FSDP2 over gloo, one process each) train, score, save and answer the gate as one rank does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sota_grpo import keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.learning import add_adapter, make_model, make_settings
from sota_grpo.policy import load
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model
from sota_grpo.policy.lora import adapter_pack, add_lora, engine_weights
from sota_grpo.policy.sharding import Ranks
from sota_grpo.recording.metrics import declared
from sota_grpo.rl.planner import row_prompts
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.training.checkpoint import CheckpointError, CheckpointStore
from sota_grpo.training.learner import Learner, NonFiniteStep
from sota_grpo.training.remote_learner import LearnerDied, RemoteLearner
from sota_grpo.workers.base import ProcessLauncher, ProcessWorker, WorkerSpec
from tests.forked import ForkLauncher
from tests.rank_rigs import build_learner, learner_settings, passes_of, ragged_rows
from tests.unit.test_token_tree import rows_of_agents

CLOSE = {"rtol": 0.0, "atol": 1e-5}


LAYOUT = ("reduce_once", "tensor_parallel", "fsdp_size")


@dataclass
class Pair:
    """Two processes, or as many as there are workers, and whatever learner they have at the moment."""

    workers: list[ProcessWorker]
    launcher: ProcessLauncher
    folder: Path

    def learner(self, **options: Any) -> RemoteLearner:
        layout = {name: options.pop(name) for name in LAYOUT if name in options}
        self.ask("build", layout, options)
        kept = {name: value for name, value in options.items() if name in ("precision", "micro_batch_tokens")}
        return RemoteLearner(self.workers, learner_settings(**kept), share=self.launcher.share)

    def one(self, **options: Any) -> Learner:
        return build_learner(Ranks(), str(self.folder), **{n: v for n, v in options.items() if n not in LAYOUT})

    def ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of both ranks."""
        answers = [worker.call(method, *args) for worker in self.workers]
        return [answer.result(timeout=300) for answer in answers]  # the first: of processes that start


@contextmanager
def started(size: int, folder: Path, launcher: ProcessLauncher | None = None) -> Iterator[Pair]:
    launcher = launcher or ForkLauncher()
    place = {"size": size, "init_method": f"file://{folder}/rendezvous", "dump_dir": str(folder)}
    specs = [WorkerSpec("tests.rank_rigs:bench", {"rank": rank, **place}) for rank in range(size)]
    with closing(launcher):
        yield Pair([launcher.start(f"learner-{n}", spec, threads=1) for n, spec in enumerate(specs)], launcher, folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(2, tmp_path_factory.mktemp("ranks"), ProcessLauncher()) as two:  # texts have another hash in each
        yield two


def assert_equal_weights(two: RemoteLearner, one: Learner, **tolerance: float) -> None:
    mine, theirs = dict(two.weights().tensors()), dict(engine_weights(one.policy.model))
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, **(tolerance or CLOSE), msg=lambda text, name=name: name + text)


def measured(metrics: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in metrics.items() if declared(name).unit not in ("s", "tokens/s")}


KINDS = {
    "one row per pass, a sum after each, no clip": {
        "micro_batch_tokens": 1,
        "reduce_once": False,
        "clip_grad_norm": 0.0,
        "checkpointing": True,
    },
    "proximal, two epochs, weights by token": {"epochs": 2, "recompute": True, "aggregation": "token"},
    "lora, proximal, two epochs, checkpointing": {"lora": True, "epochs": 2, "recompute": True, "checkpointing": True},
}


def require_equal_updates(many: RemoteLearner, one: Learner) -> None:
    """6 rows in steps of 5 and 1: shares are uneven, and in the last step a rank has no row; then 5 in one step."""
    before = {name: value.clone() for name, value in engine_weights(one.policy.model)}
    for step in range(2):
        rows = ragged_rows(6 - step)
        actual, expected = measured(many.update(rows)), measured(one.update(rows))
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
    after = dict(engine_weights(one.policy.model))
    assert max(float((value - before[name]).abs().max()) for name, value in after.items()) > 1e-4
    assert_equal_weights(many, one)
    assert many.version == one.version == 2


def require_equal_gate(many: RemoteLearner, one: Learner, rows: list[Any]) -> None:
    torch.testing.assert_close(many.measured(rows), one.measured(rows), **CLOSE)
    assert_equal_figures(many.diagnose(rows), one.diagnose(rows))
    (norm, gap, _), (expected, *_) = (learner.gradient_gap(rows, (1000, 1)) for learner in (many, one))
    assert norm == pytest.approx(expected, rel=1e-5)
    assert gap < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_equal_one_ranks(kind: str, pair: Pair) -> None:
    require_equal_updates(pair.learner(**KINDS[kind]), pair.one(**KINDS[kind]))


def test_agents_episodes_among_other_rows_are_learned_alike(pair: Pair) -> None:
    """Rows that are trees with forks in forks, beside rows without parents and without a support of the sampler."""
    options = {"recompute": True, "kl_coef": 0.0}
    two, one, rows = pair.learner(**options), pair.one(**options), rows_of_agents()
    assert measured(two.update(rows)) == pytest.approx(measured(one.update(rows)), rel=1e-5, abs=1e-5)
    assert_equal_weights(two, one)


@pytest.mark.parametrize("reduce_once", [True, False])
def test_groups_without_an_advantage_are_measured_alike(reduce_once: bool, pair: Pair) -> None:
    """Without a KL term they have no backward pass; in the second step no row has one but the one that must."""
    options = {"kl_coef": 0.0, "optim_batch_size": 10, "micro_batch_tokens": 20}
    two, one = pair.learner(reduce_once=reduce_once, **options), pair.one(**options)
    for silent in ((1,), (0, 1, 2)):
        rows = ragged_rows(10)
        for row in row_list(rows):
            if int(row[keys.GROUP_ID]) in silent:
                row.set(keys.ADVANTAGE, torch.zeros(1, 1))
        actual, expected = measured(two.update(rows)), measured(one.update(rows))
        if len(silent) == 3:  # no token has a gradient
            name = "gradient_share/max_token"
            assert actual.pop(name) is expected.pop(name) is None
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert_equal_weights(two, one)


def test_an_adapter_travels_alone_and_is_merged_with_the_base_that_came_before(pair: Pair) -> None:
    two, one = pair.learner(lora=True), pair.one(lora=True)
    base, adapter = two.weights(merged=False), two.adapter()
    expected = adapter_pack(one.policy.model)
    assert adapter.scales == expected.scales
    for (name, value), (same, wanted) in zip(adapter.tensors(), expected.tensors(), strict=True):
        assert name == same
        assert torch.equal(value, wanted)
    actual, wanted = dict(adapter.merged(base, "cpu")), dict(two.weights().tensors())
    assert list(actual) == list(wanted)
    assert all(torch.allclose(actual[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)
    assert any(not torch.equal(value, actual[name]) for name, value in base.tensors())


def test_gradients_are_summed_once_per_step_where_memory_allows(pair: Pair) -> None:
    rows = row_list(ragged_rows(5, longest=5))
    planner = passes_of(pair.one().policy, learner_settings(), Ranks(0, 2)).step_planner()
    passes = len(planner.micro_batches(range(5), row_prompts(rows), 1)[0])
    assert passes in (3, 4)  # one rank has three rows, or four siblings
    counts = {}
    for once in (True, False):
        pair.learner(reduce_once=once, micro_batch_tokens=1)
        (counts[once], same) = pair.ask("num_reductions", RowTable.of(rows))
        assert counts[once] == same
    assert counts == {True: 3, False: 3 * passes}  # two layers and what is around them


def save(store: CheckpointStore, step: int, learner: Learner | RemoteLearner) -> Path:
    """As a run does."""
    if isinstance(learner, Learner):
        return store.save(step, {"learner": learner.state_dict()})
    rest, shards = learner.begin_save(store.folder(step))
    return store.save(step, {"learner": rest}, shards)


def test_a_resumed_pair_continues_bit_for_bit_under_dropout(pair: Pair, tmp_path: Path) -> None:
    options = {"lora": True, "dropout": 0.4}
    batches = [ragged_rows(7) for _ in range(2)]
    whole = pair.learner(**options)
    whole.update(batches[0])
    store = CheckpointStore(tmp_path)
    rest, shards = whole.begin_save(store.folder(1))
    whole.update(batches[1])  # while the ranks copy and write what was before it
    expected = dict(whole.weights().tensors())
    store.save(1, {"learner": rest}, shards)
    resumed = pair.learner(**options)
    resumed.load_state_dict(store.latest()[1]["learner"])
    resumed.update(batches[1])
    assert all(torch.equal(value, expected[name]) for name, value in resumed.weights().tensors())


def test_a_disk_that_is_full_for_a_rank_ends_no_learner_and_keeps_the_old(pair: Pair, tmp_path: Path) -> None:
    store, two = CheckpointStore(tmp_path), pair.learner()
    rows = ragged_rows(5)
    two.update(rows)
    kept = save(store, 1, two)
    folder = store.folder(2)
    folder.mkdir()
    (folder / "rank_00001.safetensors").touch()  # so that rank 1 cannot make it
    rest, shards = two.begin_save(folder)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written.*File exists.*checkpoint_000001\.pt is the last"
    ):
        store.save(2, {"learner": rest}, shards)
    assert not folder.exists()
    assert [path for _, path in store.paths()] == [kept]
    two.update(rows)
    save(store, 2, two)


def assert_equal_figures(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    """Metrics to rounding; what was not measured by one was not by the other."""
    actual, wanted = ({n: value for n, value in part.items() if value is not None} for part in (found, expected))
    assert actual == pytest.approx(wanted, rel=1e-5, abs=2e-7)
    assert found.keys() == expected.keys()


def test_the_gate_is_answered_alike(pair: Pair) -> None:
    options = {"lora": True, "recompute": True}
    two, one, rows = pair.learner(**options), pair.one(**options), row_list(ragged_rows(7))
    require_equal_gate(two, one, rows)
    torch.testing.assert_close(two.measured(rows[:2]), one.measured(rows[:2]), **CLOSE)  # one rank is without any
    (actual, rounding), (expected, _) = (learner.measured_with_rounding(rows) for learner in (two, one))
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert 0 < rounding.abs().max() < 0.1
    assert_equal_weights(two, one)  # all that changed nothing
    two.perturb(two.trainable_names()[1:])  # as the gate does to find a tensor that the engine did not load
    assert not torch.equal(two.measured(rows), one.measured(rows))
    two.restore()
    assert_equal_weights(two, one)


def test_a_step_that_is_not_finite_stops_both_ranks_with_unchanged_weights(pair: Pair) -> None:
    two, rows = pair.learner(), ragged_rows(5)
    row_list(rows)[3].set(keys.ADVANTAGE, torch.full((1, 1), float("nan")))
    with pytest.raises(NonFiniteStep, match=r"non_finite_step_0\.pt and in the files of the other ranks"):
        two.update(rows)
    assert_equal_weights(two, pair.one(), rtol=0.0, atol=0.0)
    dumps = [torch.load(pair.folder / f"non_finite_step_0{rank}.pt")["batch"] for rank in ("", ".rank_1")]
    assert sum(len(dump["advantage"]) for dump in dumps) == 5
    assert torch.isnan(torch.cat([dump["advantage"] for dump in dumps])).sum() == 1


def test_fp16_scales_and_skips_alike(pair: Pair) -> None:
    two = pair.learner(precision="fp16")
    state = two.state_dict()
    state["scaler"]["scale"] = 2.0**60
    two.load_state_dict(state)
    before = dict(two.weights().tensors())
    actual = two.update(ragged_rows(5))
    assert (actual["skipped_steps"], actual["grad_norm"], actual["optimizer_steps"]) == (1, None, 0)
    assert all(torch.equal(value, before[name]) for name, value in two.weights().tensors())
    state["scaler"]["scale"] = 2.0**10
    two.load_state_dict(state)
    one = pair.one(precision="fp16")
    one.load_state_dict(state)
    rows = ragged_rows(5)
    assert two.update(rows)["grad_norm"] == pytest.approx(one.update(rows)["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("adapter", [[], ["train_model.lora.enabled=true", "train_model.torch_dtype=bfloat16"]])
def test_ranks_of_a_run_have_the_models_own_weights_bit_for_bit(adapter: list[str], pair: Pair) -> None:
    """Rank 0 reads the model, the other is sent its part, and nothing is rounded."""
    config = compose("grpo_cpu", ["train_model.num_devices=2", *adapter])
    pair.learner()  # so that they have met
    pair.ask("load", config)
    learner = RemoteLearner(pair.workers, make_settings(config, "cpu"), share=pair.launcher.share)
    actual, trained = dict(learner.weights().tensors()), learner.state_dict()["model"]
    model = add_adapter(config, make_model(config, torch.device("cpu")))
    expected = dict(engine_weights(model))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    own = {name: value for name, value in CausalPolicy(model).scorer.named_parameters() if value.requires_grad}
    assert trained.keys() == own.keys()
    assert all(torch.equal(trained[name], value) for name, value in own.items())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_without_weights_has_the_same_shape_and_takes_no_memory(rank: int, monkeypatch) -> None:
    real = load_model("tiny")
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    empty = load_model("tiny", weights=False)
    shapes = [{n: (v.shape, v.dtype) for n, v in model.state_dict().items()} for model in (real, empty)]
    assert shapes[0] == shapes[1]
    assert len(list(real.parameters())) == len(list(empty.parameters()))  # tied as it is
    assert sum(value.untyped_storage().nbytes() for value in empty.parameters()) < 1000
    assert CausalPolicy(add_lora(empty, r=rank, alpha=8) if rank else empty).shared_prompt  # it can be put together


def test_a_killed_rank_ends_the_other_and_is_named(pair: Pair) -> None:
    """The last one: the processes do not come back."""
    two = pair.learner()
    two.wait_ready()
    os.kill(pair.workers[1].pid, signal.SIGKILL)
    with pytest.raises(LearnerDied, match=r"rank 1 \(learner-1\).*SIGKILL.*train\.resume=auto"):
        two.update(ragged_rows(5))
    with pytest.raises(LearnerDied):
        two.state_dict()
    for worker in pair.workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
