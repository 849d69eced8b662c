"""A surrogate that is declared once, or written in a file, is known to all: options, loss, replay, exporters."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from sota_grpo import keys
from sota_grpo.assembly.compose import anchor_paths, needs_consent
from sota_grpo.assembly.evaluation import find_target
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.errors import UserError
from sota_grpo.functional.loss_terms import SURROGATES, Surrogate
from sota_grpo.migration.verl import Facts, verl_options
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.training.runs import signature
from tests.config.test_config import composed
from tests.unit.test_objectives import scene, total

FACTS = Facts("org/model", "demo", longest_prompt=100, num_train=1000)


def halved(log_prob: torch.Tensor, advantage: torch.Tensor, clip_high: float) -> torch.Tensor:
    return -0.5 * (1 + clip_high) * advantage * log_prob


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SURROGATES, "halved", Surrogate(halved))


@cache
def preset() -> Config:
    return composed("grpo_gsm8k")


def config_of(objective: str = "halved", **options: Any) -> Config:
    return with_options(preset(), {"algorithm.objective": objective, **options})


def test_options_are_judged_by_its_parameters() -> None:
    validate(config_of())
    for options, sentence in (
        ({"algorithm.ratio": "sequence"}, "algorithm.objective=halved, which has no ratio"),
        ({"algorithm.dual_clip": 2.0}, "no effect on algorithm.objective=halved"),
        ({"algorithm.clip_low": 0.1}, "or algorithm.objective=clipped or dppo or gmpo"),
        ({"train.epochs": 2}, "algorithm.objective=halved is on-policy"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            validate(config_of(**options))
    with pytest.raises(ValueError, match="'halved', which has no ratio"):
        GRPOLoss(torch.nn.Identity(), objective="halved", ratio="sequence")
    _, report = verl_options(config_of(), FACTS)
    assert "verl has no such loss" in report.comments["algorithm.objective"]


MINE = """
import torch

def clipped(log_ratio, advantage, clip_low, clip_high, softness=1.0):
    ratio = log_ratio.exp()
    return -softness * (ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)

def onpolicy(log_prob, advantage):
    return -advantage * log_prob

def hungry(log_prob, values):
    return log_prob

def near(log_prob, ref_log_prob):
    return log_prob - ref_log_prob

def above_least(rewards, group_ids, lengths, terms):
    least = torch.full_like(rewards, torch.inf).scatter_reduce(0, group_ids, rewards, "amin")
    return (rewards - least[group_ids]) * lengths + terms["brief"].nan_to_num(10.0)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_surrogate_in_a_file_is_trained_and_its_clip_is_measured(mine: Path) -> None:
    """Loss, gradient and clip fraction are those of the declared one, whose formula is in the file."""
    rows, loss, _ = scene(objective="clipped", entropy_bonus=False)
    actual = {}
    for objective in ("clipped", f"{mine}:clipped"):
        loss.surrogate = surrogate(objective)
        out = loss(pad_rows(rows, pad_token_id=0))
        actual[objective] = out, *torch.autograd.grad(total(out), [loss.actor_network.log_probs])
    (ours, slope), (theirs, other) = actual.values()
    torch.testing.assert_close(ours.loss_objective, theirs.loss_objective)
    torch.testing.assert_close(slope, other)
    assert ours.clip_fraction == theirs.clip_fraction > 0


def test_a_surrogate_may_read_the_entropy_without_its_gradient() -> None:
    """Tokens of low entropy count less, ``-A exp(H) logp``: the slope of each, and none in the entropy."""
    rows, loss, _ = scene(
        objective=lambda log_prob, advantage, entropy: -advantage * entropy.exp() * log_prob, entropy_bonus=False
    )
    batch = pad_rows(rows, pad_token_id=0)
    (value := loss(batch).loss_objective).backward()
    actor, width = loss.actor_network, batch[keys.FULL_TOKENS].shape[1]
    slopes = -batch[keys.LOSS_WEIGHT] * batch[keys.ADVANTAGE].squeeze(-1) * actor.entropy.detach()[:, :width].exp()
    torch.testing.assert_close(actor.log_probs.grad[:, :width], slopes)
    torch.testing.assert_close(value, (slopes * actor.log_probs[:, :width]).sum())
    assert not actor.log_probs.grad[:, width:].any()
    assert actor.entropy.grad is None
    loss.actor_network.forward = lambda td: td.set(keys.LOG_PROBS, actor.log_probs[:, : td[keys.LOG_PROBS].shape[1]])
    with pytest.raises(ValueError, match="reads the entropy; let actor_network write"):
        loss(pad_rows(rows, pad_token_id=0))


def test_a_surrogate_may_read_the_reference_and_then_learns_without_an_advantage_too() -> None:
    """``logp - ref`` alone has the slope 1 on every token, so no row may be left out for its advantage."""
    rows, loss, _ = scene(objective=lambda log_prob, ref_log_prob: log_prob - ref_log_prob, entropy_bonus=False)
    batch = pad_rows(rows, pad_token_id=0)
    mask, weight = batch[keys.ASSISTANT_MASK], batch[keys.LOSS_WEIGHT]
    out = loss(batch.set(keys.ADVANTAGE, torch.zeros_like(batch[keys.ADVANTAGE])))
    gaps = (loss.actor_network.log_probs[:, : mask.shape[1]] - batch[keys.REF_LOG_PROBS]).where(mask, 0.0)
    torch.testing.assert_close(out.loss_objective, (weight * gaps).sum())
    (slopes,) = torch.autograd.grad(out.loss_objective, [loss.actor_network.log_probs])
    torch.testing.assert_close(slopes[:, : mask.shape[1]], weight.to(slopes.dtype))
    assert not loss.advantage_only
    with pytest.raises(KeyError, match="the objective reads ref_log_prob but the batch has no"):
        loss(batch.exclude(keys.REF_LOG_PROBS))


def test_a_loss_that_is_not_one_of_each_token_is_refused() -> None:
    """A loss of a row ``[N]`` would be broadcast over tokens where there are as many tokens as rows."""
    rows, loss, _ = scene(objective=lambda log_prob, advantage: -(advantage * log_prob).sum(-1), entropy_bonus=False)
    batch = pad_rows(rows, pad_token_id=0)
    shape = list(batch[keys.ASSISTANT_MASK].shape)
    with pytest.raises(UserError, match=re.escape(f"of shape [{len(rows)}], but the tokens have {shape}")):
        loss(batch)


def test_a_file_is_judged_before_it_is_run(mine: Path) -> None:
    mine.write_text(MINE + "raise RuntimeError('it was run')")
    validate(config_of(f"{mine}:clipped", **{"algorithm.clip_low": 0.1, "train.epochs": 2}))
    validate(config_of(f"{mine}:near", **{"ref_model.name": "org/other"}))
    for objective, options, sentence in (
        (f"{mine}:onpolicy", {"train.epochs": 2}, "mine.py:onpolicy is on-policy"),
        (f"{mine}:onpolicy", {"algorithm.clip_low": 0.1}, r"clip_low=0.1 has no effect on .*mine.py:onpolicy"),
        (f"{mine}:hungry", {}, "has the parameters values; parameters must be any of log_prob, log_ratio,"),
        (f"{mine}:absent", {}, "defines no function 'absent'; its functions are clipped, onpolicy, hungry, near"),
        (f"{mine.parent}/no.py:clipped", {}, "no.py cannot be read .*; correct algorithm.objective"),
        ("gppo", {}, "gppo is not one of clipped, cispo"),
    ):
        with pytest.raises(UserError, match=sentence):
            validate(config_of(objective, **options))
    verl, report = verl_options(config_of(f"{mine}:clipped"), FACTS)
    assert verl["actor_rollout_ref.actor.policy_loss.loss_mode"] == "vanilla"
    assert "verl has no such loss" in report.comments["algorithm.objective"]
    with pytest.raises(UserError, match=r"mine\.py, line 20: .* cannot be imported \(RuntimeError: it was run"):
        surrogate(f"{mine}:clipped").loss(log_ratio=None)


@pytest.mark.parametrize(("option", "function"), [("objective", "clipped"), ("baseline", "above_least")])
def test_a_run_is_known_by_what_the_file_of_its_function_holds(
    mine: Path, monkeypatch: pytest.MonkeyPatch, option: str, function: str
) -> None:
    monkeypatch.chdir(mine.parent)
    config = composed("grpo_gsm8k", f"algorithm.{option}=mine.py:{function}")
    assert needs_consent(config)[f"algorithm.{option}"] == "run mine.py"
    near = signature(asdict(config))
    anchor_paths(config)
    assert getattr(config.algorithm, option) == f"{mine}:{function}"
    assert signature(asdict(config)) == near
    setattr(config.algorithm, option, f"{mine}:onpolicy")
    assert signature(asdict(config)) != near
    setattr(config.algorithm, option, f"{mine}:{function}")
    mine.write_text(MINE.replace("softness=1.0", "softness=2.0"))
    assert signature(asdict(config)) != near


def test_an_own_estimator_gives_the_advantage_that_the_scale_divides(mine: Path) -> None:
    """By hand: above the least of its group, times its length, and 10 for a missing term; a failed grader has none."""
    rows = []
    for group, reward, length, failed in ((7, 1.0, 1, 0), (4, 3.0, 2, 0), (7, 3.0, 3, 0), (4, 0.0, 1, 1)):
        row = {keys.GROUP_ID: torch.tensor(group), keys.ASSISTANT_MASK: torch.arange(4) >= 4 - length}
        row |= {keys.REWARD: torch.tensor([reward]), keys.REWARD_ERROR: torch.tensor([bool(failed)])}
        brief = {("next", "reward_terms", "brief"): torch.tensor([reward])} if reward == 1 else {}
        rows.append(TensorDict(row | brief))
    table = RowTable.of(rows)
    baseline = f"{mine}:above_least"
    assert GroupAdvantage(baseline, "none")(table).get("advantage").flatten().tolist() == [1.0, 10.0, 16.0, 0.0]
    scaled = GroupAdvantage(baseline, "group_std", eps=0.0)(table.without("advantage").take([0, 2])).get("advantage")
    torch.testing.assert_close(scaled.flatten(), torch.tensor([1.0, 16.0]) / math.sqrt(2))
    for wrong, sentence in (
        (lambda rewards: rewards.median(dim=5), "algorithm.baseline failed: IndexError: Dimension out of range"),
        (lambda rewards: rewards[:1], r"returned \[1\] for 3 responses; .* of shape \[3\]"),
        (lambda rewards: rewards.tolist(), "returned list for 3 responses"),
        (lambda rewards: rewards / 0, r"the advantage inf at index 0, for a response with the reward 1"),
    ):
        with pytest.raises(UserError, match=sentence):
            GroupAdvantage(wrong)(table.without("advantage"))


def test_an_own_estimator_is_checked_before_it_is_run(mine: Path) -> None:
    mine.write_text(MINE + "raise RuntimeError('it was run')")
    validate(with_options(preset(), {"algorithm.baseline": f"{mine}:above_least"}))
    for baseline, sentence in (
        (f"{mine}:hungry", "has the parameters log_prob, values; parameters must be any of rewards, group_ids"),
        (f"{mine.parent}/no.py:median", "no.py cannot be read .*; correct algorithm.baseline"),
        ("median", "algorithm.baseline=median is not one of group_mean"),
    ):
        with pytest.raises(UserError, match=sentence):
            validate(with_options(preset(), {"algorithm.baseline": baseline}))


def test_a_run_is_evaluated_without_the_files_of_its_functions(tmp_path: Path) -> None:
    own = "{objective: '/gone/mine.py:clipped', baseline: '/gone/mine.py:median'}"
    options = f"{{model: {{name: tiny}}, env: {{dataset: arithmetic}}, algorithm: {own}}}"
    (tmp_path / "config.yaml").write_text(options)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_000001.pt").touch()
    assert find_target(str(tmp_path)).steps == 1
