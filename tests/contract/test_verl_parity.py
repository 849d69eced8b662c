"""The shipped presets and verl's own functions compute one loss, one gradient and one advantage from the same numbers.

verl's functions are called with the options that ``sota-grpo export --to verl`` writes. Where the conventions differ:

- Whitening (``reinforce_plus_plus``, ``.._baseline``): verl's mean and variance are over tokens, ours over responses;
  it adds 1e-8 to the variance, we 1e-6 to the standard deviation. Equal where all responses have one token.
- ``cispo``: verl clips from below as well; the export gives a bound of 0, where it never is.
- A rejected response leaves verl's divisor, too; ours divides by all of them. The divisor is given here.
- ``sapo``, ``geo_mean`` weigh by sequence whatever ``loss_agg_mode`` says, as the presets do.
- Ratios are clamped to exp(-20) .. exp(20) there.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from scripts.preset_table import VERL
from sota_grpo import keys
from sota_grpo.config import Config
from sota_grpo.config.mixture import longest_response
from sota_grpo.config.spelling import with_options
from sota_grpo.functional import decoupled_rewards, group_advantages, importance_weights
from sota_grpo.functional.loss_terms import raw_weights
from sota_grpo.migration.verl import ACTOR, Facts, verl_options
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from tests.builders import TableActor, generator, random_rows
from tests.config.test_config import composed
from tests.contract.peers import loss_of

pytestmark = pytest.mark.bench
core = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl and what it imports are benchmark-only dependencies: see the Makefile"
)

FACTS = Facts("tiny", "demo", longest_prompt=100, num_train=8192)
CORRECTION = "algorithm.rollout_correction"
SHIFT = {"gspo": 2e-3, "dppo": 0.8}  # how far the policy moved, so that a part of the tokens is clipped
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@cache
def exported(name: str) -> tuple[Config, dict[str, Any]]:
    config = composed("grpo_cpu", f"algorithm={name}")
    if name == "geometric_rejection":  # bounds that the drift of these rows crosses
        config.algorithm.correction_cap, config.algorithm.correction_floor = 1.25, 0.8
    if name in ("gspo", "gmpo"):  # verl bounds no ratio of a negative advantage there, which the export notes
        config.algorithm.dual_clip = None
    return config, verl_options(config, FACTS)[0]


def actor_config(options: dict[str, Any], num_rows: int, num_tokens: int) -> Any:
    from verl.workers.config import ActorConfig

    fields = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
    overrides = {name: options[f"{ACTOR}.{name}"] for name in fields if f"{ACTOR}.{name}" in options}
    config = ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, ppo_mini_batch_size=2, **overrides)
    config.global_batch_info.update(global_batch_size=num_rows, batch_num_tokens=num_tokens, dp_size=1)
    config.global_batch_info["loss_scale_factor"] = options.get(f"{ACTOR}.loss_scale_factor")
    return config


def their_correction(options: dict[str, Any], gap: torch.Tensor, mask: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Weights of the tokens, if there are any, and the mask without what is rejected."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    weights = None
    if f"{CORRECTION}.rollout_is" in options:
        bounds = options[f"{CORRECTION}.rollout_is_threshold"]
        weights, _ = helper.compute_rollout_correction_weights(gap, mask, options[f"{CORRECTION}.rollout_is"], bounds)
    if f"{CORRECTION}.rollout_rs" in options:
        bounds = options[f"{CORRECTION}.rollout_rs_threshold"]
        mask, _ = helper.compute_rollout_rejection_mask(gap, mask, options[f"{CORRECTION}.rollout_rs"], bounds)
    return weights, mask


@pytest.mark.parametrize("name", list(VERL))
def test_preset_equals_verl_in_loss_and_gradient(name: str) -> None:
    config, options = exported(name)
    stream = generator()
    rows = random_rows(stream, 24, dtype=torch.float64)
    corrected = config.algorithm.correction != "none"
    rows = rows if corrected else [row.exclude("proximal_log_probs") for row in rows]
    set_loss_weights(rows, config.algorithm.aggregation, max_response_tokens=longest_response(config))
    actor = TableActor(rows, stream, shift=SHIFT.get(name, 0.4))
    batch = pad_rows(rows, pad_token_id=0)
    actual = loss_of(config, actor)(batch)
    if loss_of(config, actor).surrogate.clipped and name != "cispo":
        assert 0 < actual.clip_fraction < 1, "a batch without clipped tokens would not tell the clips apart"
    (grad,) = torch.autograd.grad(actual.loss_objective, actor.log_probs)

    mask = batch[keys.ASSISTANT_MASK].double()
    old = batch[keys.PROXIMAL_LOG_PROBS if corrected else keys.LOG_PROBS]
    weights, kept = their_correction(options, old - batch[keys.LOG_PROBS], mask)
    if corrected:
        assert 0 < actual.correction_fraction < 1
    loss_mode, mode = options[f"{ACTOR}.policy_loss.loss_mode"], options[f"{ACTOR}.loss_agg_mode"]
    assert loss_mode == VERL[name][0]
    log_prob, advantage = actor(batch.copy())[keys.LOG_PROBS], batch["advantage"].squeeze(-1)
    theirs, _ = core.get_policy_loss_fn(loss_mode)(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantage.expand_as(old),
        response_mask=kept,
        loss_agg_mode=mode,
        config=actor_config(options, len(rows), int(mask.sum())),
        rollout_is_weights=weights,
    )
    torch.testing.assert_close(actual.loss_objective, theirs, **CLOSE)
    torch.testing.assert_close(grad, torch.autograd.grad(theirs, actor.log_probs)[0], **CLOSE)


@pytest.mark.parametrize(
    ("level", "mode"),
    [*product(("token", "sequence"), ("truncate", "mask", "reject")), ("geometric", "reject")],
)
def test_correction_equals_verls(level: str, mode: str) -> None:
    """Of every level and mode that verl has."""
    floor = 0.0 if mode == "truncate" else 0.6
    chosen = {"correction": level, "correction_mode": mode, "correction_cap": 1.3, "correction_floor": floor}
    config = with_options(exported("grpo")[0], {f"algorithm.{name}": value for name, value in chosen.items()})
    options = verl_options(config, FACTS)[0]
    gap, mask = 0.5 * torch.randn(40, 6, dtype=torch.float64), torch.rand(40, 6) < 0.7
    mask[:, 0] = True
    actual = importance_weights(gap, mask, level=level, mode=mode, cap=1.3, floor=floor)
    weights, kept = their_correction(options, gap, mask.double())
    torch.testing.assert_close(actual, (kept if weights is None else weights * mask).double(), **CLOSE)
    assert raw_weights(gap, mask, level=level).max() > 1.3


@pytest.mark.parametrize("name", [name for name in VERL if name != "gdpo"])
def test_advantage_equals_verls(name: str) -> None:
    config, options = exported(name)
    estimator = options["algorithm.adv_estimator"]
    assert estimator == VERL[name][1]
    tokens = 1 if estimator.startswith("reinforce") else 7
    lengths = torch.randint(1, tokens + 1, (24,))
    mask = (torch.arange(tokens) < lengths.unsqueeze(-1)).double()
    rewards, ids = torch.rand(24, dtype=torch.float64), torch.arange(24) // 4
    at_the_end = torch.zeros(24, tokens, dtype=torch.float64).scatter_(1, lengths.unsqueeze(-1) - 1, rewards[:, None])
    from verl.trainer.config import AlgoConfig

    settings = AlgoConfig(norm_adv_by_std_in_grpo=options["algorithm.norm_adv_by_std_in_grpo"])
    theirs, _ = core.get_adv_estimator_fn(estimator)(
        token_level_rewards=at_the_end.clone(),
        response_mask=mask,
        index=np.array([str(group) for group in ids.tolist()]),
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
        config=settings,
    )
    algorithm: Any = config.algorithm
    actual = group_advantages(rewards, ids, baseline=algorithm.baseline, scale=algorithm.scale, lengths=lengths)
    close = {"rtol": 1e-5, "atol": 1e-5} if estimator.startswith("reinforce") else CLOSE  # eps is elsewhere
    torch.testing.assert_close(actual.unsqueeze(-1) * mask, theirs.double() * mask, **close)


def test_decoupled_terms_equal_verls() -> None:
    """The export leaves them out: verl's grader would have to give the terms by name, ours gives their sum."""
    from verl.trainer.config import AlgoConfig

    terms, ids, ones = torch.rand(24, 2), torch.arange(24) // 4, torch.ones(24, 1)
    settings = AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
    theirs, _ = core.get_adv_estimator_fn(VERL["gdpo"][1])(
        token_level_rewards=ones,
        response_mask=ones,
        index=np.array([str(group) for group in ids.tolist()]),
        config=settings,
        non_tensor_batch={"a": terms[:, 0].numpy(), "b": terms[:, 1].numpy()},
        batch={"prompts": ones, "attention_mask": torch.ones(24, 2, dtype=torch.int64)},
    )
    algorithm: Any = exported("gdpo")[0].algorithm
    rewards = decoupled_rewards(terms, torch.tensor([1.0, 0.5]), ids)
    actual = group_advantages(rewards, ids, baseline=algorithm.baseline, scale=algorithm.scale)
    torch.testing.assert_close(actual, theirs.squeeze(-1).double(), rtol=1e-5, atol=1e-5)
