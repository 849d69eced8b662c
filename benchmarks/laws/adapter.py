"""What a law needs of a trainer: its loss of an optimizer step, its KL estimators and its advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

#: Settings of all trainers: clip widths of the ratio, its bound for negative advantages, and CISPO's clip above 1.
CLIP, DUAL_CLIP, CISPO_CLIP = 0.2, 3.0, 0.28


@dataclass(frozen=True)
class Rows:
    """Responses of one optimizer step. All log-probs are in nats, ``[N, T]``; the advantage is ``[N]``."""

    log_prob: Tensor  # under the policy being trained
    old: Tensor  # the denominator of the ratio
    advantage: Tensor
    mask: Tensor  # bool, tokens that are trained; False for padding and for tokens that a tool inserted
    ref: Tensor | None = None  # under the reference; None: no KL in the loss

    def __getitem__(self, index: slice | Tensor) -> Rows:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: value[index] for name, value in values.items() if value is not None})

    @property
    def response(self) -> Tensor:
        """Bool ``[N, T]``, everything but the padding at the end: the last trained token and all before it."""
        return self.mask.flip(-1).cummax(-1).values.flip(-1) if self.mask.numel() else self.mask

    def parts(self, split: Sequence[int]) -> list[Rows]:
        """The micro-batches of ``split`` rows each, in order."""
        starts = [sum(split[:index]) for index in range(len(split))]
        return [self[slice(start, start + size)] for start, size in zip(starts, split, strict=True)]


#: ``step(rows, objective, split)``: the sum over the micro-batches of what the trainer calls ``backward`` on, with all
#: divisions that it does until the optimizer step. With ``rows.ref``, KL in the loss with coefficient 1 is included.
Step = Callable[[Rows, str, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Adapter:
    """How one trainer is called. ``absent`` explains what a trainer does not have; ``notes`` judge laws that fail.

    Attributes:
        step: see :data:`Step`; the objectives are those of ``weighting``.
        weighting: of each objective that the trainer has (``clipped``, ``dual_clip``, ``cispo``, ``gspo``): ``token``
            (mean over all tokens of the step) or ``sequence`` (mean over responses of means over tokens).
        default: the objective of the trainer's own GRPO, its dual clip included if it is on by default.
        kl: estimators of single tokens ``[n]``, by name (``k1``, ``k2``, ``k3``).
        kl_in_loss: the one of ``kl`` whose gradient trains, None: KL is not in the loss.
        advantages: ``(rewards [N], group size)`` to advantages ``[N]``; the groups are contiguous.
        absent: reason why an objective, an estimator or a law does not apply, by its name.
        unjudged: reason why a law is not judged, by its name.
        unmet: laws that do not hold for inputs that the trainer's own loop never has.
        notes: for each law that does not hold what happens, when it is met, and what avoids it.
    """

    step: Step
    weighting: Mapping[str, str]
    default: str = "clipped"
    kl: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    kl_in_loss: str | None = None
    advantages: Callable[[Tensor, int], Tensor] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    unjudged: Mapping[str, str] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def kl_of_step(step: Step, objective: str = "clipped") -> Callable[[Tensor, Tensor], Tensor]:
    """The KL of single tokens of a trainer that computes it inside its loss: steps of one token, advantage 0."""

    def kl(log_prob: Tensor, ref: Tensor) -> Tensor:
        def one(new: Tensor, reference: Tensor) -> Tensor:
            new, reference = new.reshape(1, 1), reference.reshape(1, 1)
            mask = torch.ones_like(new, dtype=torch.bool)
            return step(Rows(new, new.detach(), new.new_zeros(1), mask, reference), objective, [1])

        return torch.stack([one(*pair).reshape(()) for pair in zip(log_prob, ref, strict=True)])

    return kl
