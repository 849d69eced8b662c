"""Gradient coefficients: what an objective does with each sampled token.

Whatever the objective, the direction in which a step moves the policy is a weighted sum of the gradients of the tokens'
log-probs, ``-grad loss = sum_t c_t grad log_prob_t`` (an entropy bonus adds its own term). The ``c_t`` say all that is
particular to an algorithm: baseline, clip, weights, corrections and the divergence to the reference are in them.

Source: Shao et al. 2024 (arXiv:2402.03300, section 5.2.1), who write RFT, DPO, PPO and GRPO in this form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sota_grpo import keys
from sota_grpo.rl.objectives import GRPOLoss, GRPOLossOutput, LossTokens, derivative


@dataclass(frozen=True)
class RowCoefficients:
    """The tokens of one row under an objective, all ``[T]`` and padded as the batch was; 0 off the trained tokens."""

    coefficient: Tensor  # -d loss / d log_prob: above 0 a step makes the token more likely
    surrogate: Tensor  # the same of loss_objective alone, without the divergences
    weight: Tensor  # loss_weight
    advantage: Tensor
    clipped: Tensor  # bool: the clip acts (GRPOLossOutput.clip_fraction)

    @staticmethod
    def untrained(length: int, advantage: float) -> RowCoefficients:
        """Those of a row that takes no part in the loss.

        >>> RowCoefficients.untrained(2, 0.5).coefficient.tolist()
        [0.0, 0.0]
        """
        none = torch.zeros(length)
        return RowCoefficients(none, none, none, torch.full((length,), advantage), none.bool())


class CoefficientLoss(GRPOLoss):
    """The objective; after each call ``rows`` has the coefficients of the batch too, by group and sample.

    They are the derivatives that ``backward`` starts from: those of the sum of all ``loss_*`` with respect to the
    log-probs as they come from the policy. Under ``torch.no_grad`` there is no gradient, and they are 0.

    >>> from tensordict import TensorDict
    >>> class Actor(torch.nn.Module):
    ...     def forward(self, td):
    ...         return td.set(("log_probs", "full"), torch.tensor([[-0.5, -0.5, -0.1]], requires_grad=True))
    >>> batch = TensorDict({
    ...     "group_id": torch.tensor([3]), "sample_id": torch.tensor([0]), "advantage": torch.ones(1, 1, 1),
    ...     "tokens": {"full": torch.tensor([[4, 5, 6]])}, "log_probs": {"full": torch.full((1, 3), -0.5)},
    ...     "masks": {"all_assistant_mask": torch.tensor([[False, True, True]])},
    ... }, batch_size=[1])
    >>> loss = CoefficientLoss(Actor(), entropy_bonus=False)
    >>> _ = loss(batch)
    >>> row = loss.rows[3, 0]
    >>> row.coefficient.tolist(), row.clipped.tolist()  # the ratio of the last is above 1.2
    ([0.0, 0.5, 0.0], [False, False, True])
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: dict[tuple[int, int], RowCoefficients] = {}

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        groups, samples = (tensordict.get(key).reshape(-1).tolist() for key in (keys.GROUP_ID, keys.SAMPLE_ID))
        out = super().forward(tensordict)
        tokens, clipped = self._tokens, self._clipped
        terms = [value for name, value in out.items() if name.startswith("loss_")]
        coefficient = derivative(torch.stack(terms).sum(), tokens.log_prob)
        surrogate = derivative(out.loss_objective, tokens.log_prob)
        advantage = tokens.advantage.expand_as(tokens.weight)
        values = (coefficient, surrogate, tokens.weight, advantage, clipped & tokens.mask)
        for name, *row in zip(zip(groups, samples), *(value.detach().cpu() for value in values)):
            self.rows[name] = RowCoefficients(*row)
        del self._tokens, self._clipped  # they hold the graph
        return out

    def _read(self, batch: TensorDictBase) -> LossTokens:
        self._tokens = super()._read(batch)
        return self._tokens

    def _surrogate(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        value, self._clipped = super()._surrogate(tokens)
        return value, self._clipped
