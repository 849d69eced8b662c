"""This repository: the loss module of the presets, with the weights that the learner sets once per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, Adapter, Rows
from sota_grpo import keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.learning import make_loss
from sota_grpo.functional import KL_ESTIMATORS
from sota_grpo.rl.collate import set_loss_weights
from sota_grpo.rl.transforms import GroupAdvantage

PRESETS = {
    "clipped": ["algorithm=grpo", "algorithm.dual_clip=null"],
    "dual_clip": ["algorithm=grpo"],
    "cispo": ["algorithm=cispo", f"algorithm.clip_high={CISPO_CLIP}"],
    "gspo": ["algorithm=gspo", "algorithm.dual_clip=null", f"algorithm.clip_low={CLIP}", f"algorithm.clip_high={CLIP}"],
}


class Given(nn.Module):
    """A policy whose log-probs are those of the batch's entry ``given``."""

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set(keys.LOG_PROBS, batch["given"])


def make(folder: Path) -> Adapter:
    del folder
    configs = {name: compose("grpo_cpu", options) for name, options in PRESETS.items()}
    for config in configs.values():
        config.train.kl_coef_in_loss = True

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        config = configs[objective]
        config.policy.kl_coef = 0.0 if rows.ref is None else 1.0
        loss = make_loss(config, Given())
        tokens = torch.zeros(rows.mask.shape, dtype=torch.int64)
        entries = {keys.FULL_TOKENS: tokens, keys.ASSISTANT_MASK: rows.mask, keys.LOG_PROBS: rows.old}
        entries |= {keys.ADVANTAGE: rows.advantage.reshape(-1, 1, 1), "given": rows.log_prob}
        if rows.ref is not None:
            entries[keys.REF_LOG_PROBS] = rows.ref
        batch = set_loss_weights(TensorDict({}, [len(tokens)]).update(entries), config.algorithm.aggregation)
        total = rows.log_prob.new_zeros(())
        for part in batch.split(list(split)):
            out = loss(part)
            total = total + out.loss_objective + (0.0 if out.loss_kl_to_ref is None else out.loss_kl_to_ref)
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        ids = torch.arange(len(rewards)) // group_size
        rows = TensorDict({"next": {"reward": rewards.reshape(-1, 1)}, "group_id": ids}, [len(rewards)])
        return GroupAdvantage()(rows)[keys.ADVANTAGE]

    def kl(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda log_prob, ref: KL_ESTIMATORS[name](log_prob, ref)

    return Adapter(
        step,
        weighting={name: config.algorithm.aggregation for name, config in configs.items()},
        default="dual_clip",
        kl={name: kl(name) for name in ("k1", "k2", "k3")},
        kl_in_loss=configs["dual_clip"].algorithm.kl_estimator,
        advantages=advantages,
    )
