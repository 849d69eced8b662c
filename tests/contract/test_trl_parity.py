"""The shipped presets and TRL's GRPOTrainer compute one loss and one gradient from the same batch.

TRL's ``_compute_loss`` is called as its training loop calls it, on the whole batch of an optimizer step at once. Where
the conventions of the two differ:

- ``cispo``: TRL's ``epsilon_high`` is the bound of the ratio itself, ours, as everywhere, its distance from 1. So our
  ``clip_high=4`` is TRL's ``epsilon_high=5``, the value that its documentation recommends.
- ``gspo``: TRL differentiates the sequence ratio unchanged, ours is GSPO's token form. Under the preset's
  aggregation, where the tokens of a row share one advantage and one weight, the gradients are equal, as shown here.
- ``beta > 0``: TRL 1.16 multiplies k3 by the importance ratio, with its gradient, unless ``use_bias_correction_kl`` is
  False (GRPO's paper, eq. 3 and 4, and ours). What that buys, the gradient of KL(policy, reference) in place of that of
  KL(reference, policy), is our ``kl_estimator="k2"``: equal on the first use of a batch, shown below.
- Splits: TRL averages ``grpo`` and ``dr_grpo`` per micro-batch and divides by the number of micro-batches, which equals
  the whole step only if all micro-batches hold equally many rows; under ``dapo`` and ``cispo`` it divides by the tokens
  of the whole *generation* batch over the number of steps, an average that no single step has. Ours is exact for any
  split (tests/unit/test_objectives.py), so the comparison is made on whole steps.
- Tokens of high entropy: TRL takes the quantile of each micro-batch, and of entropies rounded to float32, so that in
  float64 a token whose entropy *is* the quantile may fall out; here none is, since the quantile lies between two.
- The entropy bonus is a mean over tokens in TRL, whatever the loss type: ours under ``aggregation=token``.
- Advantages are an input here. TRL's are ``(r - mean) / (std + 1e-4)``, ours have 1e-6 and exact zeros.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import TrainingArguments

from scripts.preset_table import TRL
from sota_grpo import keys
from sota_grpo.config import Config, kl_is_unbiased
from sota_grpo.config.spelling import NOT_HERE, THEIRS, walk
from sota_grpo.functional import adapted_entropy_coef, loss_terms, top_entropy_tokens
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from tests.builders import ModelActor, generator, random_rows, tiny_model, tiny_tokenizer
from tests.config.test_config import composed
from tests.contract.peers import loss_of

pytestmark = pytest.mark.bench
trl = pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")

MAX_RESPONSE_TOKENS = 9
# how far the policy moved, so that a good part of the tokens is clipped under each preset's width
DRIFT = {"gspo": 2e-3, "luspo": 5e-3, "cispo": 1.5}
#: TRL's loss_type of our objectives that are no clipped one, and its names of their options.
_OWN_LOSSES = {
    "sapo": {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"},
    "vespo": {
        **{"vespo_k_pos": "k_positive", "vespo_lambda_pos": "lambda_positive"},
        **{"vespo_k_neg": "k_negative", "vespo_lambda_neg": "lambda_negative"},
    },
}


def arguments_of(config: Config) -> dict[str, Any]:
    """What decides the loss in ``trl.GRPOConfig``."""
    ours = config.algorithm
    is_cispo = ours.objective == "cispo"  # TRL's clip is the bound of CISPO's ratio itself
    arguments: dict[str, Any] = {
        "importance_sampling_level": ours.ratio,
        "epsilon": ours.clip_low,
        "epsilon_high": 1 + ours.clip_high if is_cispo else ours.clip_high,
        "delta": ours.dual_clip,
        "entropy_coef": ours.entropy_coef,
    }
    if ours.off_policy_threshold is not None:
        arguments["off_policy_mask_threshold"] = ours.off_policy_threshold
    if ours.top_entropy_quantile < 1:
        arguments["top_entropy_quantile"] = ours.top_entropy_quantile
    if ours.entropy_target is not None:
        arguments |= {"use_adaptive_entropy": True, "entropy_target": ours.entropy_target}
    surrogate = signature(getattr(loss_terms, f"{ours.objective}_surrogate", loss_terms.sapo_surrogate)).parameters
    return arguments | {name: surrogate[of].default for name, of in _OWN_LOSSES.get(ours.objective, {}).items()}


def preset(name: str) -> Config:
    options = {"deepseek_v32": ["algorithm.off_policy_threshold=0.03"], "gmpo": ["algorithm.dual_clip=null"]}
    return composed("grpo_cpu", f"algorithm={name}", *options.get(name, []))  # TRL's GMPO has no such bound


def trainer_for(name: str, config: Config, model, beta: float, tmp_path: Path, **options):
    """TRL's trainer on the tiny model; beta is set afterwards, as it would load a reference model from the hub."""
    from datasets import Dataset
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    trl_arguments = arguments_of(config)
    if name != "gmpo":  # a trainer of its own, without the option
        trl_arguments["loss_type"] = TRL[name]
    arguments, trainer_class = (GMPOConfig, GMPOTrainer) if name == "gmpo" else (trl.GRPOConfig, trl.GRPOTrainer)
    args = arguments(
        output_dir=str(tmp_path),
        max_completion_length=MAX_RESPONSE_TOKENS,
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        **trl_arguments,
        **options,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w3"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.beta = beta
    return trainer


def rows_near(model, name: str) -> list[TensorDict]:
    """Ragged rows whose behaviour log-probs are a drift away from the model's own."""
    stream = generator()
    dtype = next(model.parameters()).dtype
    rows = [row.exclude("proximal_log_probs") for row in random_rows(stream, 24, dtype=dtype)]
    with torch.no_grad():
        current = ModelActor(model)(pad_rows(rows, pad_token_id=0))[keys.LOG_PROBS]
    for row, values in zip(rows, current, strict=True):
        mask = row[keys.ASSISTANT_MASK]
        for key, scale in ((keys.LOG_PROBS, DRIFT.get(name, 0.3)), (keys.REF_LOG_PROBS, 0.4)):
            noise = scale * torch.randn(len(mask), generator=stream, dtype=dtype)
            row.set(key, torch.where(mask, values[: len(mask)] + noise, 0.0))
    return rows


def keep_top_entropy(model, rows: list[TensorDict], share: float) -> list[TensorDict]:
    """The rows, but for the last ones where a token would have the very entropy of the quantile, with their mask."""

    def at(rows: list[TensorDict]) -> float:
        return (1 - share) * (sum(int(row[keys.ASSISTANT_MASK].sum()) for row in rows) - 1)

    while abs(at(rows) - round(at(rows))) < 1e-6:
        rows = rows[:-1]
    batch = pad_rows(rows, pad_token_id=0)
    with torch.no_grad():
        entropy = ModelActor(model)(batch.copy())["entropy"]
    for row, kept in zip(rows, top_entropy_tokens(entropy, batch[keys.ASSISTANT_MASK], share=share), strict=True):
        row.set(keys.OBJECTIVE_MASK, kept[: len(row[keys.FULL_TOKENS])])
    return rows


def trl_inputs(rows: list[TensorDict]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right."""

    def pad(values: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_side=side)

    masks = [row[keys.ASSISTANT_MASK] for row in rows]

    def completion(key) -> torch.Tensor:
        return pad([row[key][mask] for row, mask in zip(rows, masks, strict=True)], "right")

    prompts = [row[keys.FULL_TOKENS][~mask] for row, mask in zip(rows, masks, strict=True)]
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(prompt) for prompt in prompts], "left"),
        "completion_ids": completion(keys.FULL_TOKENS),
        "completion_mask": completion(keys.ASSISTANT_MASK).long(),
        "old_per_token_logps": completion(keys.LOG_PROBS),
        "ref_per_token_logps": completion(keys.REF_LOG_PROBS),
        "advantages": torch.stack([row["advantage"].flatten()[0] for row in rows]),
        "num_items_in_batch": torch.stack([mask.sum() for mask in masks]).sum(),
    }


def value_and_gradient(model, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def require_equal_gradients(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """TRL computes its head in float32, whatever the dtype of the model, and rounds as the largest entries are."""
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-6 * max(1.0, float(ours.abs().max())))


@pytest.mark.parametrize(("name", "beta"), [("grpo", 0.0), *((name, 0.1) for name in TRL)])
def test_preset_equals_trl_in_loss_and_gradient(name, beta, tmp_path) -> None:
    """In float64. LUSPO's sums over tokens are here divided by ``max_tokens``, which is taken out again."""
    model, config = tiny_model().double(), preset(name)
    aggregation = config.algorithm.aggregation
    for _ in range(20):  # of the rows that are drawn some must be clipped, or left out, and some not
        rows = rows_near(model, name)
        if config.algorithm.top_entropy_quantile < 1:
            rows = keep_top_entropy(model, rows, config.algorithm.top_entropy_quantile)
        rows = set_loss_weights(rows, aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
        ours = loss_of(config, ModelActor(model), beta=beta)(pad_rows(rows, pad_token_id=0))
        clips, leaves_out = loss_of(config, ModelActor(model)).surrogate.clipped, config.algorithm.off_policy_threshold
        if (not clips or 0 < ours.clip_fraction < 1) and (leaves_out is None or 0 < ours.off_policy_fraction < 1):
            break
    else:
        pytest.fail("no batch tells the clips apart")
    constant = MAX_RESPONSE_TOKENS if name == "luspo" else 1
    total = constant * (ours.loss_objective + (ours.loss_kl_to_ref if beta else 0.0))
    trainer = trainer_for(name, config, model, beta, tmp_path, use_bias_correction_kl=kl_is_unbiased(config))
    model.eval()
    value, grad = value_and_gradient(model, total)
    their_value, their_grad = value_and_gradient(model, trainer._compute_loss(model, trl_inputs(rows)))
    torch.testing.assert_close(value, their_value.to(value), rtol=1e-6, atol=1e-6)
    require_equal_gradients(grad, their_grad)


def test_k2_has_the_gradient_of_trls_ratio_weighted_k3_on_the_first_use(tmp_path) -> None:
    model, config = tiny_model(), preset("grpo")
    rows = set_loss_weights(rows_near(model, "grpo"), "sequence")
    batch = pad_rows(rows, pad_token_id=0)
    with torch.no_grad():
        batch.set(keys.LOG_PROBS, ModelActor(model)(batch.copy())[keys.LOG_PROBS])
    ours = GRPOLoss(ModelActor(model), kl_estimator="k2", kl_to_ref_coeff=0.5, entropy_bonus=False)(batch)
    _, grad = value_and_gradient(model, ours.loss_objective + ours.loss_kl_to_ref)
    trainer = trainer_for("grpo", config, model, 0.5, tmp_path)
    model.eval()
    inputs = trl_inputs(rows)
    del inputs["old_per_token_logps"]  # on policy: TRL takes the current ones
    _, their_grad = value_and_gradient(model, trainer._compute_loss(model, inputs))
    torch.testing.assert_close(grad, their_grad, rtol=1e-5, atol=1e-5)


def test_the_entropy_bonus_is_adapted_as_trl_adapts_it(tmp_path) -> None:
    """Five optimizer steps of entropies below and above the target: coefficient, loss and gradient of each, float64."""
    model, config = tiny_model().double(), preset("skywork_or1")
    options = {"entropy_coef_delta": 0.25, "entropy_coef_max": 0.4}
    trainer = trainer_for("skywork_or1", config, model, 0.0, tmp_path, **options)
    trainer.current_gradient_accumulation_steps = 1
    rows = set_loss_weights(rows_near(model, "grpo"), "token")
    batch, inputs = pad_rows(rows, pad_token_id=0), trl_inputs(rows)
    loss = GRPOLoss(ModelActor(model), entropy_bonus=True, entropy_coeff=0.0)

    def scaled(factor: float) -> float:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(factor)
            return loss(batch.copy()).entropy.item()

    high, low = scaled(1.0), scaled(4.0)
    scaled(0.25)
    target = trainer.args.entropy_target = (high + low) / 2
    model.train()
    coef, applied, seen = 0.0, 0.0, []
    for factor in (4.0, 1.0, 0.25, 1.0, 4.0):
        scaled(factor)
        loss.entropy_coeff = applied
        ours = loss(batch.copy())
        value, grad = value_and_gradient(model, ours.loss_objective + (ours.loss_entropy if applied else 0.0))
        their_value, their_grad = value_and_gradient(model, trainer._compute_loss(model, inputs))
        torch.testing.assert_close(value, their_value.to(value), rtol=1e-6, atol=1e-6)
        require_equal_gradients(grad, their_grad)
        coef, applied = adapted_entropy_coef(coef, ours.entropy.item(), target=target, delta=0.25, largest=0.4)
        assert trainer.entropy_coef == coef
        seen.append((coef, applied))
    assert seen == [(0.25, 0.25), (0.4, 0.4), (pytest.approx(0.15), 0.0), (0.0, 0.0), (0.25, 0.25)]


def test_every_option_of_trl_is_ours_or_explained() -> None:
    """But those of transformers' trainer, which are many; the ones that people do set are among the explained."""
    own = {item.name for item in fields(trl.GRPOConfig)} - {item.name for item in fields(TrainingArguments)}
    last = {option.rpartition(".")[2] for option, _, _ in walk()}
    left = sorted(own - last - THEIRS.keys() - NOT_HERE.keys())
    assert left == [], left
