"""A surrogate that is declared once is known to whoever asks: options, objective, replay and exporters."""

from __future__ import annotations

import pytest
import torch

from sota_grpo.assembly.replay import _missing
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.functional.surrogates import SURROGATES, Surrogate
from sota_grpo.migration.data import Facts
from sota_grpo.migration.trl import trl_arguments
from sota_grpo.migration.verl import verl_options
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.objectives import GRPOLoss
from tests.config.test_config import composed
from tests.unit.test_objectives import scene, total


def halved(log_prob: torch.Tensor, advantage: torch.Tensor, clip_high: float) -> torch.Tensor:
    return -0.5 * (1 + clip_high) * advantage * log_prob


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SURROGATES, "halved", Surrogate(halved))


def config_of(*overrides: str):
    return composed("grpo_gsm8k", "algorithm.objective=halved", *overrides)


def test_it_is_trained_by_its_own_formula() -> None:
    """At ``clip_high=1`` it is REINFORCE, in value and gradient, and no clip acts."""
    rows, loss, _ = scene(objective="halved", clip_epsilon=(0.2, 1.0), entropy_bonus=False)
    gradients = {}
    for name in ("halved", "reinforce"):
        loss.objective = name
        found = loss(pad_rows(rows, pad_token_id=0))
        (gradients[name],) = torch.autograd.grad(total(found), [loss.actor_network.log_probs])
        assert found.clip_fraction == 0
    torch.testing.assert_close(gradients["halved"], gradients["reinforce"])
    assert gradients["halved"].abs().sum() > 0


def test_options_are_judged_by_its_parameters() -> None:
    validate(config_of())
    for overrides, sentence in (
        (["algorithm.ratio=sequence"], "algorithm.objective=halved, which has no ratio"),
        (["algorithm.dual_clip=3"], "no effect on algorithm.objective=halved"),
        (["train.epochs=2"], "algorithm.objective=halved is on-policy"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            validate(config_of(*overrides))
    with pytest.raises(ValueError, match="'halved', which has no ratio"):
        GRPOLoss(torch.nn.Identity(), objective="halved", ratio="sequence")
    assert _missing("algorithm.clip_low", config_of()) == "algorithm.objective=clipped"
    assert _missing("algorithm.clip_high", config_of()) is None


def test_exporters_say_that_they_do_not_have_it() -> None:
    verl, of_verl = verl_options(config_of(), Facts("org/model", "demo", longest_prompt=100, num_train=1000))
    trl, of_trl = trl_arguments(config_of())
    assert (verl["actor_rollout_ref.actor.policy_loss.loss_mode"], trl["loss_type"]) == ("vanilla", "grpo")
    for account in (of_verl, of_trl):
        assert "there is no such loss" in account.remarks["algorithm.objective"]
