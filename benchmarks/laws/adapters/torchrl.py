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
    )
