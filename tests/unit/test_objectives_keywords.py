"""What GRPOLoss accepts, what it refuses, and what it says."""

from __future__ import annotations

import inspect

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from sota_grpo import keys
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from tests.builders import TableActor, generator, random_rows


def scene(**options) -> tuple[TensorDict, GRPOLoss]:
    stream = generator()
    rows = [row.exclude("proximal_log_probs") for row in random_rows(stream, 6)]
    return pad_rows(rows, pad_token_id=0), GRPOLoss(TableActor(rows, stream), **{"entropy_bonus": False} | options)


def test_takes_every_keyword_of_torchrl_with_its_default() -> None:
    theirs = inspect.signature(TorchRLGRPOLoss).parameters
    ours = inspect.signature(GRPOLoss).parameters
    for name, parameter in theirs.items():
        if name not in ("actor_network", "kwargs"):
            assert ours[name].default == parameter.default, name


def test_a_misspelt_keyword_fails() -> None:
    with pytest.raises(TypeError, match="clip_epsilom"):
        GRPOLoss(nn.Identity(), clip_epsilom=0.2)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("samples_mc_entropy", 4),
        ("gamma", 0.99),
        ("reduction", "sum"),
        ("clip_value", 0.2),
        ("ref_log_prob_padding_side", "right"),
        ("ref_log_prob_padding_value", 1.0),
        ("dual_clip", 3.0),
        ("objective", "ppo"),
        ("ratio", "sequence"),
        ("kl_estimator", "k4"),
        ("loss_aggregation", "mean"),
        ("correction", "geometric"),
    ],
)
def test_a_keyword_without_effect_or_choice_is_refused_by_name(keyword, value) -> None:
    others = {"objective": "reinforce"} if keyword in ("dual_clip", "ratio") else {}
    with pytest.raises(ValueError, match=rf"{keyword} is .*{value}"):
        GRPOLoss(nn.Identity(), **{keyword: value} | others)


def test_two_aggregations_are_refused() -> None:
    with pytest.raises(ValueError, match="give one"):
        GRPOLoss(nn.Identity(), aggregation="prompt_mean", loss_aggregation="token")


@pytest.mark.parametrize(
    ("options", "aggregation"),
    [
        ({}, "token"),
        ({"aggregation": "token_mean"}, "token"),
        ({"aggregation": "prompt_mean"}, "sequence"),
        ({"loss_aggregation": "sequence"}, "sequence"),
        ({"loss_aggregation": "constant", "max_response_tokens": 9}, "constant"),
    ],
)
def test_weights_are_derived_from_the_mask_where_the_batch_has_none(options, aggregation) -> None:
    batch, loss = scene(**options)
    derived = loss(batch).loss_objective
    rows = list(batch.unbind(0))
    given = torch.stack([row["loss_weight"] for row in set_loss_weights(rows, aggregation, max_response_tokens=9)])
    plain = GRPOLoss(loss.actor_network, entropy_bonus=False)
    torch.testing.assert_close(plain(batch.set("loss_weight", given)).loss_objective, derived)


@pytest.mark.parametrize("options", [{"aggregation": "none"}, {"reduction": "none"}])
def test_none_gives_the_loss_of_each_token(options) -> None:
    batch, loss = scene(**options)
    per_token = loss(batch).loss_objective
    mask = batch[keys.ASSISTANT_MASK]
    assert per_token.shape == (*mask.shape, 1)
    assert not per_token[~mask].any()
    mean = GRPOLoss(loss.actor_network, entropy_bonus=False)(batch).loss_objective
    torch.testing.assert_close(per_token.sum() / mask.sum(), mean)


def test_kl_mask_leaves_drifted_tokens_out_of_loss_and_normaliser() -> None:
    batch, loss = scene(kl_mask_threshold=0.05)
    out = loss(batch)
    drift = 0.5 * (loss.actor_network(batch.copy())[keys.LOG_PROBS] - batch[keys.LOG_PROBS]).square()
    kept = batch[keys.ASSISTANT_MASK] & (drift <= 0.05)
    assert 0 < kept.sum() < batch[keys.ASSISTANT_MASK].sum()
    same = GRPOLoss(loss.actor_network, entropy_bonus=False)(batch.set(keys.ASSISTANT_MASK, kept))
    torch.testing.assert_close(out.loss_objective, same.loss_objective)


def test_set_keys_is_honoured() -> None:
    batch, loss = scene(kl_to_ref_coeff=0.1)
    before = loss(batch)
    renamed = {"advantage": "adv", "sample_log_prob": "old", "ref_log_probs": ("ref", "lp"), "mask": "trained"}
    moved = {"adv": keys.ADVANTAGE, "old": keys.LOG_PROBS, ("ref", "lp"): keys.REF_LOG_PROBS}
    for new, old in (moved | {"trained": keys.ASSISTANT_MASK}).items():
        batch.set(new, batch.get(old))
        del batch[old]
    loss.set_keys(**renamed)
    after = loss(batch)
    assert after.loss_objective == before.loss_objective
    assert after.loss_kl_to_ref == before.loss_kl_to_ref
    with pytest.raises(ValueError, match="not an accepted"):
        loss.set_keys(advantages="adv")


@pytest.mark.parametrize(
    ("options", "missing", "error", "message"),
    [
        ({"kl_to_ref_coeff": 0.1}, keys.REF_LOG_PROBS, KeyError, "ReferenceKL"),
        ({"correction": "token"}, None, KeyError, "recompute the log-probs"),
        ({}, keys.ADVANTAGE, KeyError, "no advantage"),
        ({"masking_strategy": "generic"}, None, ValueError, "prompt tokens"),
    ],
)
def test_a_missing_entry_is_named(options, missing, error, message) -> None:
    batch, loss = scene(**options)
    if missing is not None:
        del batch[missing]
    with pytest.raises(error, match=message):
        loss(batch)


def test_an_entropy_bonus_needs_a_differentiable_entropy() -> None:
    batch, loss = scene(entropy_bonus=True)
    assert loss(batch).loss_entropy.requires_grad
    loss.actor_network.entropy.requires_grad_(False)
    with pytest.raises(ValueError, match="without a gradient"):
        loss(batch)


def test_quantities_that_were_not_measured_are_absent() -> None:
    batch, loss = scene()
    del batch[keys.REF_LOG_PROBS]
    names = set(loss(batch).to_tensordict().keys())
    assert not names & {"kl_to_ref", "loss_kl_to_ref", "loss_entropy", "correction_fraction"}


def test_half_precision_log_probs_are_widened() -> None:
    batch, loss = scene()
    loss.actor_network.to(torch.bfloat16)
    assert loss(batch).loss_objective.dtype == torch.float32


def test_torchrl_advantage_shapes_are_read_alike() -> None:
    batch, loss = scene()
    advantage, width = batch["advantage"], batch[keys.FULL_TOKENS].shape[1]
    expected = loss(batch).loss_objective
    for shaped in (advantage.flatten(), advantage.squeeze(-1), advantage.expand(-1, width, 1)):
        assert loss(batch.set("advantage", shaped)).loss_objective == expected
