"""The learner: one optimizer step is a function of its rows alone, and a resumed learner is the same learner."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from sota_grpo import keys
from sota_grpo.errors import RunFailed
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.sharding import Ranks
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings, learning_rate_factor, row_prompts
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training.learner import SHARE, TRIMMED_EVERY, Learner, NonFiniteStep
from tests.builders import generator, random_row
from tests.unit.tiny_models import VOCAB, make_model

PAD = 0


def make_rows(
    count: int = 12, *, prompts: tuple[int, int] = (1, 4), longest: int = 8, truncated: bool = False
) -> list[TensorDict]:
    """Ragged rows with random tokens, advantages and behaviour log-probs near those of a random policy."""
    stream, rows = generator(), []
    for index in range(count):
        sizes = (int(torch.randint(least, most + 1, (), generator=stream)) for least, most in (prompts, (1, longest)))
        row = random_row(stream, *sizes, index=index, group_size=4, vocab=VOCAB, spread=(0.2, -3.6))
        row.set(keys.TRUNCATED, torch.tensor([truncated]))
        rows.append(row.exclude("query", "proximal_log_probs", keys.REF_LOG_PROBS))
    return rows


def make_learner(tmp_path: Path, *, lora_dropout: float | None = None, seed: int = 0, **settings) -> Learner:
    torch.manual_seed(seed)
    model = make_model().train()
    if lora_dropout is not None:
        model = add_lora(model, r=2, alpha=4, dropout=lora_dropout)
    policy = CausalPolicy(model)
    chosen = {"lr": 1e-3, "total_steps": 10, "optim_batch_size": 4, **settings}
    loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=None)
    return Learner(policy, loss, LearnerSettings(**chosen), pad_token_id=PAD, dump_dir=tmp_path)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters() if p.requires_grad}


def with_nan() -> list[TensorDict]:
    rows = make_rows(4)
    rows[1].set(keys.ADVANTAGE, torch.full((1, 1), float("nan")))
    return rows


def without_advantage(rows: list[TensorDict]) -> list[TensorDict]:
    return [row.set(keys.ADVANTAGE, torch.zeros(1, 1)) for row in rows]


def mini_batches(learner: Learner, rows: list[TensorDict], epoch: int) -> list[list[TensorDict]]:
    """The rows of each optimizer step of an epoch, in order."""
    order = learner.step_planner().mini_batches(row_prompts(rows), epoch, learner.version)
    return [[rows[index] for index in batch] for batch in order]


def largest_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def scale_of(gradients: dict[str, torch.Tensor]) -> float:
    return max(float(gradient.abs().max()) for gradient in gradients.values())


def test_two_perturbations_are_restored_together(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    before = weights(learner)
    learner.perturb()
    learner.perturb()
    learner.restore()
    assert largest_gap(weights(learner), before) == 0


@pytest.mark.parametrize(
    ("aggregation", "budget", "grouped"),
    [("token", 1, False), ("token", 13, True), ("sequence", 13, False), ("constant", 40, True)],
)
def test_a_gradient_depends_on_no_micro_batch_size_and_its_gap_is_the_distance(
    aggregation: str, budget: int, grouped: bool, tmp_path: Path
) -> None:
    learner = make_learner(tmp_path, aggregation=aggregation, max_response_tokens=16)
    rows = siblings() if grouped else make_rows()
    one, other = (learner.gradient(rows, token_budget=size) for size in (1 << 20, budget))
    assert largest_gap(one, other) < 1e-5 * scale_of(one)
    norm = sum(float(grad.double().square().sum()) for grad in one.values()) ** 0.5
    gap = sum(float((one[name].double() - other[name]).square().sum()) for name in one) ** 0.5 / norm
    actual = learner.gradient_gap(rows, (1 << 20, budget))
    assert actual == (pytest.approx(norm, rel=1e-5), pytest.approx(gap, rel=1e-2), True)
    assert learner.gradient_gap(rows, (budget, budget)).relative == 0


OBJECTIVES = {
    "ppo": {},
    "gspo": {"ratio": "sequence", "clip_epsilon": (3e-4, 4e-4)},
    "dual clip": {"dual_clip": 3.0},
    "cispo": {"objective": "cispo"},
    "mask above the cap": {"correction": "token", "correction_mode": "mask", "correction_cap": 1.0},
    "truncate products": {"correction": "sequence"},
    "sapo": {"objective": "sapo"},
    "dppo": {"objective": "dppo", "clip_epsilon": 1e-3},
    "gmpo": {"objective": "gmpo", "clip_epsilon": 1e-3},
    "vespo": {"objective": "vespo"},
    "reject": {
        "correction": "geometric",
        "correction_mode": "reject",
        "correction_cap": 1.01,
        "correction_floor": 0.99,
    },
    "off-policy": {"off_policy_threshold": 0.0},
}
_GATE = 1 / (1 + math.exp(0.5))  # SAPO's at a ratio of a half
SHARES = {"sapo": 4 * _GATE * (1 - _GATE) / 2, "vespo": 1.0}  # of REINFORCE's gradient


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_clip_takes_part_in_the_compared_gradients(name: str, tmp_path: Path) -> None:
    """All ratios are a half: half of REINFORCE's gradient, or the slope of SAPO's gate; VESPO is given ratios of 1."""
    rows, actual = make_rows(), []
    for options in (OBJECTIVES[name], {"objective": "reinforce"}):
        learner = make_learner(tmp_path)
        learner.loss = GRPOLoss(learner.policy, entropy_bonus=False, **options)
        actual.append(learner.gradient(rows, token_budget=50))
    share = SHARES.get(name, 0.5)
    assert largest_gap(actual[0], {key: grad * share for key, grad in actual[1].items()}) < 1e-5 * scale_of(actual[1])


@pytest.mark.parametrize("name", ["gmpo", "vespo", "dppo", "off-policy", "reject"])
def test_a_term_of_whole_rows_depends_on_no_packing(name: str, tmp_path: Path) -> None:
    """Off the old policy: gradients of rows packed behind shared prompts, of small micro-batches and of padded rows."""
    rows, actual = siblings(longest=8), []
    for row in rows:
        drift = 0.1 * torch.randn(len(row[keys.FULL_TOKENS])) * row[keys.ASSISTANT_MASK]
        row[keys.LOG_PROBS] = torch.where(row[keys.ASSISTANT_MASK], -3.6 + 2 * drift, 0.0)
        row.set(keys.PROXIMAL_LOG_PROBS, row[keys.LOG_PROBS] + drift)
    set_loss_weights(rows, "sequence")
    for shared_prompt, budget in ((True, 1 << 20), (True, 13), (False, 1 << 20)):
        learner = make_learner(tmp_path)
        learner.policy.shared_prompt = shared_prompt
        learner.loss = GRPOLoss(learner.policy, entropy_bonus=False, **OBJECTIVES[name] | {"correction_cap": 1.05})
        learner._dry_run(rows, budget)
        actual.append({key: p.grad.clone() for key, p in learner.policy.named_parameters()})
    assert (scale := scale_of(actual[0])) > 0
    assert largest_gap(actual[0], actual[1]) < 1e-5 * scale
    assert largest_gap(actual[0], actual[2]) < 1e-5 * scale


def out_of_memory_at(calls: set[int], learner: Learner) -> list[int]:
    """Forward passes of training and scoring fail at these calls of their count, which is returned as it grows."""
    made: list[int] = []

    def failing(compute: Callable, batch: TensorDict) -> object:
        made.append(len(made))
        if made[-1] in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nand details")
        return compute(batch)

    learner.loss.forward = partial(failing, learner.loss.forward)
    learner.log_probs = partial(failing, learner.log_probs)
    return made


@pytest.mark.parametrize("failing", [0, 3], ids=["scoring", "training"])
def test_out_of_memory_once_is_as_if_the_micro_batches_had_been_half_as_large(failing: int, tmp_path, caplog) -> None:
    """Two epochs of three optimizer steps of four rows each: later ones were planned with the whole budget."""
    rows, sizes = siblings(), {"epochs": 2, "eps": 1e-3, "recompute": True}
    sizes |= {"aggregation": "constant", "max_response_tokens": 16}
    whole, half = (make_learner(tmp_path, micro_batch_tokens=budget, **sizes) for budget in (26, 13))
    before = weights(half)
    expected = half.update(lazy_stack([row.clone() for row in rows]))
    whole.policy.load_state_dict(make_learner(tmp_path).policy.state_dict())
    made, taken = out_of_memory_at({failing}, whole), out_of_memory_at(set(), half)
    actual = whole.update(lazy_stack([row.clone() for row in rows]))
    scale = largest_gap(before, weights(half))
    assert largest_gap(weights(whole), weights(half)) < 1e-4 * scale
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert whole.optimizer_steps == half.optimizer_steps
    assert "micro-batches of 26 tokens (CUDA out of memory. Tried to allocate 20.00 MiB); it is repeated" in caplog.text
    assert "train.micro_batch_tokens=13, which the rest of the run keeps" in caplog.text
    counts = len(made), len(taken)
    whole.update(lazy_stack([row.clone() for row in rows]))
    half.update(lazy_stack([row.clone() for row in rows]))
    assert len(made) - counts[0] == len(taken) - counts[1]  # the next step is planned with half the budget at once


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_of_memory_again_or_on_several_ranks_ends_the_run_in_a_sentence(ranks: int, tmp_path: Path) -> None:
    learner = make_learner(tmp_path, micro_batch_tokens=26)
    before = weights(learner)
    out_of_memory_at({0, 1} if ranks == 1 else {0}, learner)
    learner.ranks = SimpleNamespace(size=ranks)
    with pytest.raises(RunFailed, match=r"of (13|26) tokens \(CUDA .*=(6|13) with .*gradient_checkpointing=true"):
        learner.within_memory(lambda: learner.loss.forward(None))
    assert learner.halved == (ranks == 1)
    assert largest_gap(before, weights(learner)) == 0


@pytest.mark.parametrize(("budget", "ranks", "expected"), [(26, 1, 13), (20, 1, 20), (26, 2, 26)])
def test_a_resumed_run_has_the_micro_batches_that_were_halved(budget: int, ranks: int, expected: int, tmp_path) -> None:
    """Unless it has others, or several ranks, which would split their own rows among all ranks again."""
    halved = make_learner(tmp_path, micro_batch_tokens=26)
    out_of_memory_at({0}, halved)
    halved.update(lazy_stack(siblings()))
    resumed = make_learner(tmp_path, micro_batch_tokens=budget)
    resumed.ranks = Ranks(size=ranks)
    resumed.load_state_dict(halved.state_dict())
    assert (resumed.settings.micro_batch_tokens, resumed.halved) == (expected, expected == 13)


def test_out_of_memory_in_the_update_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    """AdamW allocates its moments in the first one, when no smaller micro-batch helps any more."""
    learner, fit = make_learner(tmp_path), "optimizer.name=adamw_8bit, train_model.lora.enabled=true or more "
    learner.optimizer.step = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried.\nand details"))
    with pytest.raises(RunFailed, match=rf"lacks memory for the optimizer's update \(CUDA .* Tried\); use {fit}"):
        learner.update(lazy_stack(siblings()))


def test_the_share_of_a_token_is_that_of_its_squared_derivative_in_the_whole_step(tmp_path: Path) -> None:
    """12 tokens, ratios 1 but one of e^1.5, A = -1: (e^1.5)^2 / (11 + e^3); dual clip takes its gradient at e^200."""
    for nats, dual_clip, expected in ((1.5, None, math.exp(3) / (11 + math.exp(3))), (200.0, 3.0, 1 / 11)):
        learner, rows = make_learner(tmp_path, optim_batch_size=12, micro_batch_tokens=7), siblings()
        learner.loss = GRPOLoss(learner.policy, entropy_bonus=False, dual_clip=dual_clip)
        for row, own in learner.scored(rows):
            row.set(keys.LOG_PROBS, own.clone()).set(keys.ADVANTAGE, torch.ones(1, 1))
        rows[3].set(keys.ADVANTAGE, torch.full((1, 1), -1.0))
        rows[3].get(keys.LOG_PROBS)[2] -= nats
        metrics = learner.update(lazy_stack(rows))
        assert metrics[SHARE] == pytest.approx(expected, rel=1e-5)
        assert all(math.isfinite(value) for value in metrics.values() if value is not None)


@pytest.mark.parametrize("size", [4, 6])
def test_later_epochs_mix_whole_groups(size: int, tmp_path: Path) -> None:
    """12 rows in groups of 4. Steps of 4 hold one group each; steps of 6 cut the middle one of each order."""
    learner, rows = make_learner(tmp_path, optim_batch_size=size), siblings()
    position = {id(row): index for index, row in enumerate(rows)}
    orders = [
        [[position[id(row)] for row in step] for step in mini_batches(learner, rows, epoch)] for epoch in range(20)
    ]
    assert orders[0] == [list(range(12))[start : start + size] for start in range(0, 12, size)]
    assert len({str(order) for order in orders}) > 3
    for order in orders:
        flat = [index for step in order for index in step]
        assert {len(step) for step in order} == {size}
        assert sorted(flat[start : start + 4] for start in (0, 4, 8)) == [[*range(at, at + 4)] for at in (0, 4, 8)]
    assert [[position[id(row)] for row in step] for step in mini_batches(learner, rows, 1)] == orders[1]


def siblings(longest: int = 1) -> list[TensorDict]:
    """Rows with one prompt of two tokens for each group."""
    rows = make_rows(prompts=(2, 2), longest=longest)
    for row in rows:
        row[keys.FULL_TOKENS] = row[keys.FULL_TOKENS].where(row[keys.ASSISTANT_MASK], 3 + int(row[keys.GROUP_ID]))
    return rows


@pytest.mark.parametrize("silent", [(), (0, 2), (0, 1, 2)])
def test_groups_without_an_advantage_need_no_backward_pass(silent: tuple[int, ...], tmp_path, monkeypatch) -> None:
    """Weights, losses and diagnostics are what they are when every row has one; a row that learns is always left."""
    rows, actual, learning = siblings(), [], []
    without_advantage([row for row in rows if int(row[keys.GROUP_ID]) in silent])
    for advantage_only in (False, True):
        monkeypatch.setattr(GRPOLoss, "advantage_only", advantage_only)
        learner = make_learner(tmp_path, optim_batch_size=12, weight_decay=0.1, eps=1e-2)  # steps along the gradient
        forward = learner.policy.forward
        seen: list[int] = []
        learner.policy.forward = lambda td, seen=seen, forward=forward: (
            seen.append(len(td) * torch.is_grad_enabled()) or forward(td)
        )
        updates = [learner.update(lazy_stack([row.clone() for row in rows])) for _ in range(2)]
        actual.append((updates, weights(learner)))
        learning.append(sum(seen) // 2)
    assert learning == [12, max(1, 12 - 4 * len(silent))]
    (all_updates, all_weights), (few_updates, few_weights) = actual
    for one, other in zip(all_updates, few_updates):
        assert (one[SHARE] is None) == (other[SHARE] is None) == (len(silent) == 3)  # where no token has a gradient
        left, right = ({k: v for k, v in each.items() if "time" not in k and v is not None} for each in (one, other))
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    assert largest_gap(all_weights, few_weights) < 1e-6


def test_other_terms_learn_from_every_row() -> None:
    for coefficient in ("kl_to_ref_coeff", "entropy_coeff", "kl_to_inference_coeff"):
        assert not GRPOLoss(torch.nn.Identity(), **{"entropy_coeff": 0.0, coefficient: 0.1}).advantage_only
        assert GRPOLoss(torch.nn.Identity(), **{"entropy_coeff": 0.0, coefficient: 0.0}).advantage_only


@pytest.mark.parametrize("reason", [keys.TRUNCATED, keys.REWARD_ERROR])
def test_rows_of_weight_zero_go_through_no_pass(reason: tuple[str, str], tmp_path: Path) -> None:
    learner = make_learner(tmp_path, drop_truncated=reason == keys.TRUNCATED, optim_batch_size=12)
    rows = make_rows(12)
    for row in rows[:5]:
        row.set(reason, torch.tensor([True]))
    padded, seen = learner.padded, []
    learner.padded = lambda part, weights: (
        seen.extend(row[keys.FULL_TOKENS].tolist() for row in part) or padded(part, weights)
    )
    learner.update(lazy_stack(rows))
    assert sorted(seen) == sorted(row[keys.FULL_TOKENS].tolist() for row in rows[5:])


def test_recomputed_log_probs_make_the_first_ratio_one(tmp_path: Path) -> None:
    """With the proximal log-probs in place the behaviour policy's error no longer moves the objective."""
    rows = make_rows()
    learner = make_learner(tmp_path, recompute=True, optim_batch_size=12)
    metrics = learner.update(lazy_stack(rows))
    assert all(parameter.grad is None for parameter in learner.parameters)
    expected = -sum(float(row[keys.ADVANTAGE]) for row in rows) / len(rows)
    assert metrics["loss/objective"] == pytest.approx(expected, rel=1e-4)
    assert metrics["clip_fraction"] == 0


def test_a_step_of_truncated_rows_alone_measures_nothing_and_continues(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, drop_truncated=True)
    metrics = learner.update(lazy_stack(make_rows(4, truncated=True)))
    assert (metrics["loss/objective"], metrics["grad_norm"]) == (0, 0)
    assert all(metrics[name] is None for name in ("ess", "clip_fraction", "mismatch_kl", "kl_approx"))
    mixed = learner.update(lazy_stack(make_rows(4) + make_rows(4, truncated=True)))
    assert 0 < mixed["ess"] < 1  # the mean over the steps that measured it


def test_a_checkpoint_of_another_model_is_a_sentence(tmp_path: Path) -> None:
    state = make_learner(tmp_path, lora_dropout=0.0).state_dict()
    with pytest.raises(Exception, match=r"model\.name"):
        make_learner(tmp_path).load_state_dict(state)


def test_non_finite_step_stops_with_the_batch_and_unchanged_weights(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    before = weights(learner)
    with pytest.raises(NonFiniteStep, match=r"non_finite_step_0\.pt"):
        learner.update(lazy_stack(with_nan()))
    assert largest_gap(before, weights(learner)) == 0
    dumped = torch.load(tmp_path / "non_finite_step_0.pt", weights_only=True)
    assert torch.isnan(dumped["batch"]["advantage"]).any()
    with pytest.raises(NonFiniteStep, match=r"is NaN or infinite .* its batch could not be saved to .*gone"):
        make_learner(tmp_path / "gone").update(lazy_stack(with_nan()))


@pytest.mark.parametrize("trained", ["fp32", "bf16"])
def test_what_half_precision_does_to_log_probs_is_half_minus_float32(trained: str, tmp_path: Path) -> None:
    rows = make_rows(4)
    half, single = (make_learner(tmp_path, precision=precision).measured(rows)[0] for precision in ("bf16", "fp32"))
    learner = make_learner(tmp_path, precision=trained)
    measured, rounding = learner.measured_with_rounding(rows)
    assert torch.equal(measured[0], half if trained == "bf16" else single)
    assert torch.equal(rounding, half - single)
    assert rounding.any()


@pytest.mark.filterwarnings("error")
def test_a_skipped_step_moves_no_schedule_and_no_count(tmp_path: Path) -> None:
    """The first of three steps overflows: warm-up continues as if it had not been, with torch's order of calls kept."""
    learner = make_learner(tmp_path, precision="fp16", schedule="linear", warmup_steps=4)
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-50)
    metrics = learner.update(lazy_stack(make_rows(12)))
    assert metrics["skipped_steps"] == 1
    assert metrics["optimizer_steps"] == learner.optimizer_steps == 2
    assert metrics["lr"] == pytest.approx(1e-3 * 2 / 4)  # the second step of the warm-up
    assert metrics["grad_norm"] > 0
    assert metrics["loss_scale"] == 2.0**10
    resumed = make_learner(tmp_path, precision="fp16", schedule="linear", warmup_steps=4)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("where", ["advantage", "weights"])
def test_fp16_hides_no_nan(where: str, tmp_path: Path) -> None:
    learner, rows = make_learner(tmp_path, precision="fp16"), with_nan() if where == "advantage" else make_rows(4)
    if where == "weights":
        learner.parameters[-1].data.fill_(float("nan"))
    scale = learner.scaler.get_scale()
    with pytest.raises(NonFiniteStep, match="loss/objective"):
        learner.update(lazy_stack(rows))
    assert learner.scaler.get_scale() == scale


def test_a_longer_run_continues_under_its_own_schedule(tmp_path: Path) -> None:
    schedule = {"schedule": "linear", "lr": 1e-3, "optim_batch_size": 12}
    short = make_learner(tmp_path, total_steps=2, **schedule)
    assert [short.update(lazy_stack(make_rows()))["lr"] for _ in range(2)] == [1e-3, 5e-4]
    longer = make_learner(tmp_path, total_steps=4, **schedule)
    longer.load_state_dict(short.state_dict())
    assert [longer.update(lazy_stack(make_rows()))["lr"] for _ in range(2)] == [5e-4, 2.5e-4]


def test_dropout_does_not_enter_the_mismatch(tmp_path: Path) -> None:
    """Behaviour log-probs that the policy itself gave without dropout: mismatch 0, while the ratios do feel it."""
    learner, rows = make_learner(tmp_path, lora_dropout=0.5), make_rows()
    for name, parameter in learner.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    for row, own in learner.scored(rows):
        row.set(keys.LOG_PROBS, own)
    metrics = learner.update(lazy_stack(rows))
    assert metrics["mismatch_kl"] < 1e-9
    assert metrics["ess"] < 0.999


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_token_of_unknown_log_prob_counts_for_nothing(aggregation: str, tmp_path: Path) -> None:
    """The loss that the learner weighs row by row is that of the whole batch, whose weights the loss finds itself.

    In the mismatch one of two sampled tokens is half a nat off, the other is unknown: e^g - 1 - g at g = 1/2.
    """
    learner = make_learner(tmp_path, aggregation=aggregation, max_response_tokens=16, micro_batch_tokens=13)
    rows, how = make_rows(), {"loss_aggregation": aggregation, "max_response_tokens": 16}
    row = {keys.ASSISTANT_MASK: torch.arange(3) > 0, keys.LOG_PROBS: torch.tensor([0.0, -2.5, math.nan])}
    actual = learner._mismatch([row], {0: torch.tensor([0.0, -2.0, -1.0])})
    assert actual == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)
    for row in rows[::3]:
        row[keys.LOG_PROBS][-1] = math.nan
    alone = GRPOLoss(learner.policy, entropy_bonus=False, kl_to_ref_coeff=None, **how)
    expected = float(alone(pad_rows(rows, pad_token_id=PAD)).loss_objective)
    plain = RowTable.of(rows).rows()
    losses, *_ = learner._measured(learner._run(plain, learner._passes(plain, 10**6)), torch.zeros(()))
    assert losses["loss/objective"] == pytest.approx(expected, rel=1e-4)
    weighed = set_loss_weights(rows, aggregation, max_response_tokens=16)
    assert float(learner.loss(pad_rows(weighed, pad_token_id=PAD)).loss_objective) == pytest.approx(expected, rel=1e-4)


def test_learning_rate_schedules() -> None:
    fifth = 0.5 + 0.5 * math.cos(math.pi / 5)
    for name, middle, end in (("constant", 1.0, 1.0), ("linear", 0.8, 0.0), ("cosine", fifth, 0.0)):
        settings = LearnerSettings(lr=1.0, total_steps=12, optim_batch_size=1, warmup_steps=2, schedule=name)
        factors = [learning_rate_factor(step, settings) for step in (0, 1, 2, 4, 12)]
        assert factors == pytest.approx([0.5, 1.0, 1.0, middle, end]), name


def _gradient(learner: Learner, rows: list[TensorDict], budget: int) -> tuple[dict[str, torch.Tensor], dict]:
    """The gradient of one optimizer step, its losses and metrics; the rows mark which of their tokens were kept."""
    plain = RowTable.of(rows).rows()
    losses, metrics, _ = learner._measured(learner._run(plain, learner._passes(plain, budget)), torch.zeros(()))
    for row, shown in zip(rows, plain, strict=True):
        row.set(keys.OBJECTIVE_MASK, shown.get(keys.OBJECTIVE_MASK, torch.zeros_like(row[keys.ASSISTANT_MASK])))
    return {name: p.grad.clone() for name, p in learner.policy.named_parameters()}, losses | metrics


def test_tokens_of_high_entropy_are_those_of_the_whole_optimizer_step(tmp_path: Path) -> None:
    """Neither micro-batches nor order nor padding choose them; the others' gradient is 0, their weights count."""
    learner, rows = make_learner(tmp_path, top_entropy_quantile=0.3), make_rows()
    whole, metrics = _gradient(learner, rows, 1 << 20)
    mask = torch.cat([row[keys.ASSISTANT_MASK] for row in rows])
    kept = torch.cat([row[keys.OBJECTIVE_MASK] for row in rows])
    entropy = learner.measured(rows)[1]
    assert kept.sum() == mask.sum() - math.ceil(0.7 * (mask.sum().item() - 1) - 1e-9)
    assert entropy[kept].min() > entropy[mask & ~kept].max()
    assert metrics["entropy_threshold"] == entropy[kept].min().item()
    scale = max(float(grad.abs().max()) for grad in whole.values())
    order = torch.randperm(len(rows)).tolist()
    for budget, shown in ((1, rows), (13, rows), (1 << 20, [rows[index] for index in order])):
        assert largest_gap(whole, _gradient(learner, shown, budget)[0]) < 1e-5 * scale
    # the same by hand: the sum of the weighted log-probs of the kept tokens alone
    learner.optimizer.zero_grad()
    batch = learner.padded(row_list(set_loss_weights(rows, learner.settings.aggregation)))
    own = learner.policy(batch.copy())[keys.LOG_PROBS]
    ratio = (own - batch[keys.LOG_PROBS]).exp()
    advantage = batch[keys.ADVANTAGE].squeeze(-1)
    value = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    weight = torch.where(batch[keys.OBJECTIVE_MASK], batch[keys.LOSS_WEIGHT], 0.0)
    (loss := (weight * value).sum()).backward()
    assert metrics["loss/objective"] == pytest.approx(loss.item(), abs=1e-4)
    assert largest_gap(whole, {name: p.grad for name, p in learner.policy.named_parameters()}) < 1e-5 * scale


def test_what_is_not_trained_does_not_count_among_the_entropies(tmp_path: Path) -> None:
    """Truncated responses that are dropped, and tokens of unknown log-prob."""
    learner, rows = make_learner(tmp_path, top_entropy_quantile=0.3, drop_truncated=True), make_rows()
    for row in rows[::2]:
        row.set(keys.TRUNCATED, torch.tensor([True]))
    for row in rows:
        row[keys.LOG_PROBS][row[keys.ASSISTANT_MASK].nonzero()[0]] = math.nan
    _gradient(learner, rows, 40)
    assert not any(row[keys.OBJECTIVE_MASK].any() for row in rows[::2])
    known = torch.cat([row[keys.ASSISTANT_MASK] & row[keys.LOG_PROBS].isfinite() for row in rows[1::2]])
    kept = torch.cat([row[keys.OBJECTIVE_MASK] for row in rows[1::2]])
    assert not (kept & ~known).any()
    assert kept.sum() == known.sum() - math.ceil(0.7 * (known.sum().item() - 1) - 1e-9)


def _one_step(learner: Learner, rows: list[TensorDict]) -> dict[str, float | None]:
    plain = RowTable.of(rows).rows()
    return learner._step(plain, learner._passes(plain, learner.settings.micro_batch_tokens))


def test_rows_without_an_advantage_learn_from_a_bonus_that_begins_within_the_step(tmp_path: Path) -> None:
    """A step is planned before its first optimizer step, when the coefficient is still 0."""
    adapts = {"entropy_target": 100.0, "entropy_coef_delta": 0.25, "entropy_coef_max": 0.5, "optim_batch_size": 4}
    rows = make_rows()
    without_advantage(rows[: len(rows) // 2])
    learner, by_hand = make_learner(tmp_path, epochs=2, **adapts), make_learner(tmp_path, epochs=2, **adapts)
    kept = learner.step_planner()
    learner.update(lazy_stack(rows))
    for epoch in range(2):
        for batch in mini_batches(by_hand, rows, epoch):
            _one_step(by_hand, batch)
    assert all(torch.equal(value, weights(by_hand)[name]) for name, value in weights(learner).items())
    assert learner.entropy_coef == 0.5
    assert kept == learner.step_planner()
    assert not kept.advantage_only


def test_the_entropy_bonus_is_adapted_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A bound of a half with steps of a quarter; the target is met always, or never."""
    rows, adapts = make_rows(), {"entropy_coef_delta": 0.25, "entropy_coef_max": 0.5, "optim_batch_size": 2}
    learner = make_learner(tmp_path, entropy_target=100.0, **adapts)
    steps = [_one_step(learner, batch) for batch in mini_batches(learner, rows, 0)[:4]]
    assert [step["entropy_coef"] for step in steps] == [0.0, 0.25, 0.5, 0.5]
    assert "loss/entropy" not in steps[0]
    for step, coef in zip(steps[1:], (0.25, 0.5, 0.5)):  # a mean over rows, near that over tokens
        assert step["loss/entropy"] == pytest.approx(-coef * step["entropy"], rel=0.05)
    kept = deepcopy(learner.state_dict())
    resumed = make_learner(tmp_path, entropy_target=100.0, seed=1, **adapts)
    resumed.load_state_dict(deepcopy(kept))
    assert resumed.loss.entropy_coeff == 0.5
    again = mini_batches(learner, rows, 0)[0]
    assert _one_step(resumed, again) == _one_step(learner, again)
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(learner).items())
    high = make_learner(tmp_path, entropy_target=1e-3, **adapts)
    high.load_state_dict(kept)
    falling = [_one_step(high, batch)["entropy_coef"] for batch in mini_batches(learner, rows, 0)[:4]]
    assert falling == [0.5, 0.0, 0.0, 0.0]
    assert high.entropy_coef == 0.0
    constant = make_learner(tmp_path)
    constant.load_state_dict(kept)
    assert constant.loss.entropy_coeff == 0.0


def test_products_of_few_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's default of 1,024 takes a GiB; a value of one's own stays."""
    for own in ("9", None):
        monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", own or "")
        if own is None:
            monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
        load_model("tiny", weights=False)
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == (own or "64")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system_every_eighth_update(tmp_path: Path) -> None:
    """300 MB in blocks that glibc keeps, because one of fifty is still in use."""
    process, learner = psutil.Process(), make_learner(tmp_path)
    blocks = {index: bytearray([index % 9]) * 60_000 for index in range(5_000)}
    for index in set(blocks) - set(range(0, 5_000, 50)):
        del blocks[index]
    learner.version, before = TRIMMED_EVERY - 2, process.memory_info().rss
    learner.update(lazy_stack(make_rows()))
    kept = process.memory_info().rss
    learner.update(lazy_stack(make_rows()))
    assert (kept > before - 50e6, process.memory_info().rss < before - 200e6) == (True, True)


def test_weights_are_gathered_before_room_is_made_and_an_engine_wakes() -> None:
    """On one device for both, the reserve of the gathering would take memory of all that is sampled next."""
    events: list[str] = []
    engine = SimpleNamespace(name="engine", version=0, wake=lambda: events.append("wake"), weight_sums=lambda: None)
    engine.update_weights = lambda weights, version: (events.append(weights), setattr(engine, "version", version))
    weight_sync = EngineWeightSync(
        lambda: events.append("gather") or "push", engine, lambda: events.append("make room")
    )
    weight_sync.send(version=1)
    assert events == ["gather", "make room", "wake", "push"]
