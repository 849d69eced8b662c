"""TorchRL: ``GRPOLoss`` and ``CISPOLoss`` over a distribution of given log-probs, and ``MCAdvantage``.

Its ``GRPOTrainer`` adds the ``loss_*`` entries and divides by the number of micro-batches (trainers/trainers.py:479).
The entropy bonus is off. ``MCAdvantage`` has its settings for one reward per response: ``trajectory_return="sum"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import NotInstalled

_SPLIT = (
    "The loss is a mean over the tokens of a micro-batch, and micro-batches are averaged with equal weights, so a "
    "token of a micro-batch with few tokens weighs more. It is met with gradient_accumulation_steps above 1."
)
_FAR = (
    "A ratio with a negative advantage has no upper bound. The denominator is the inference engine's log-prob, so a "
    "stale or faulty one is met in the first step on a batch. kl_mask_threshold masks far tokens, if it is set; the "
    "trainer's stepper skips a step whose loss is not finite."
)


class Given(nn.Module):
    """An actor whose distribution of the batch has the rows' mask and log-probs."""

    rows: Rows

    def _get_sft_dist(self, batch: TensorDict) -> SimpleNamespace:
        del batch
        return SimpleNamespace(mask=self.rows.mask, log_prob=lambda tokens: self.rows.log_prob)

    get_dist = _get_sft_dist


def make(folder: Path) -> Adapter:
    del folder
    try:
        from torchrl.objectives.llm import GRPOLoss, MCAdvantage
        from torchrl.objectives.llm.grpo import CISPOLoss
    except ImportError as error:
        raise NotInstalled(f"torchrl: {error}") from error

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        actor, total = Given(), rows.log_prob.new_zeros(())
        options = {"entropy_bonus": False, "kl_to_ref_coeff": None if rows.ref is None else 1.0}
        if objective == "cispo":
            module = CISPOLoss(actor, clip_epsilon=(0.999, CISPO_CLIP), **options)
        else:
            module = GRPOLoss(actor, clip_epsilon=CLIP, **options)
        for part in rows.parts(split):
            actor.rows = part
            batch = TensorDict({("tokens", "full"): torch.zeros(part.mask.shape, dtype=torch.int64)}, [len(part.mask)])
            batch["log_probs", "full"] = part.old
            batch["advantage"] = part.advantage[:, None, None].expand(*part.mask.shape, 1)
            if part.ref is not None:
                batch["next", "ref_log_probs", "full"] = part.ref
            out = module(batch)
            total = total + sum(value for name, value in out.items() if name.startswith("loss_")) / len(split)
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        transform = MCAdvantage(grpo_size=group_size, prompt_key="group", trajectory_return="sum")
        found = []
        for row, reward in enumerate(rewards.tolist()):
            step = {"reward": torch.tensor([[reward]]), "done": torch.ones(1, 1, dtype=torch.bool)}
            out = transform.inv(TensorDict({"group": torch.tensor([row // group_size]), "next": step}, [1]))
            if out is not None:
                found.append(out["advantage"].flatten())
        return torch.cat(found)

    return Adapter(
        step,
        weighting={"clipped": "token", "cispo": "token"},
        kl={"k3": kl_of_step(step)},
        kl_in_loss="k3",
        advantages=advantages,
        absent={"dual_clip": "it has no dual clip", "gspo": "it has no GSPO", "kl": "its KL in the loss is k3"},
        unjudged={"uneven_split": "its replay buffer gives batches of one size; see equal_split"},
        notes={
            "cispo": "CISPOLoss differentiates the clipped ratio itself: a token beyond the clip has no gradient, "
            "where the paper's weight is detached and the gradient is that of the log-prob. It is met by every "
            "clipped token of CISPO.",
            "padding_kl": "The KL to the reference is a mean over all slots of the padded batch, masked ones "
            "included as 0, so its weight falls with padding and prompt. It is met with kl_to_ref_coeff or "
            "kl_to_inference_coeff; the surrogate itself is averaged over trained tokens.",
            "equal_split": _SPLIT,
            "kl_split": _SPLIT,
            "far_token": _FAR,
            "overflow": _FAR,
            "equal_rewards": "Mean and standard deviation of equal float32 returns can differ from the return and "
            "from 0 by rounding, which is divided by the standard deviation, at least 1e-6. Returns of 0 and 1 are "
            "exact. keep_return_bounds drops groups at both ends only, so it does not avoid this.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are. The trainer's stepper "
            "skips a step whose loss is not finite, with a warning.",
        },
    )
