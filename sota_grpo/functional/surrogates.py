"""Policy-gradient surrogates, one value per token, nothing reduced; each declares beside it what others ask of it.

Each is a loss: its negative gradient raises the probability of tokens with a positive advantage. ``log_ratio`` is
``log_prob - old_log_prob``, the log of ``rho``. An advantage may be given per token ``[N, T]`` or per row ``[N, 1]``.
Where a slot is masked, select finite values *before* these functions: a NaN that enters an exponential leaves a NaN in
the gradient even if the value is dropped later.

Options are judged by these declarations before torch is imported, so nothing here imports it outside of a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def clipped_tokens(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """True where the clip of :func:`clipped_surrogate` is active, that is, where the token's gradient is 0.

    ``rho > 1 + clip_high`` with ``A > 0``, ``rho < 1 - clip_low`` with ``A < 0``, ``rho > dual_clip`` with ``A < 0``.
    A token with ``A = 0`` has no gradient to lose and is not counted.

    Args and errors as in :func:`clipped_surrogate`.

    Returns:
        bool ``[N, T]``.

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> clipped_tokens(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2).tolist()
    [True, False, False, True]
    """
    lower, upper = _log_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return ((log_ratio < lower) | (log_ratio > upper)) & (advantage != 0)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """PPO's clipped loss of each token, optionally with the dual clip.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; with the dual clip, for ``A < 0``, at most
    ``-dual_clip A``. It is computed as ``-A exp(clamp(log rho))`` with the two bounds that the sign of A leaves
    (above for ``A >= 0``, below for ``A < 0``). So the gradient is exactly 0 where :func:`clipped_tokens` is True, also
    where ``rho`` overflows, and exactly ``-rho A`` times that of ``log_prob`` everywhere else, the bounds included.
    ``rho = inf`` with ``A < 0`` and no dual clip gives ``inf``: that is the loss.

    Args:
        log_ratio: ``[N, T]``, nats.
        advantage: ``[N, T]`` or ``[N, 1]``.
        clip_low: the ratio is clipped below ``1 - clip_low``; 1 or more never clips.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        dual_clip: largest ratio that counts for a negative advantage, above 1; None: no bound.

    Returns:
        ``[N, T]``.

    Raises:
        ValueError: if a clip width is negative or ``dual_clip`` is not above 1.

    Sources: Schulman et al. 2017 (arXiv:1707.06347, eq. 7); two widths, Yu et al. 2025 (arXiv:2503.14476, section 3.1);
    dual clip, Ye et al. 2020 (arXiv:1912.09729).

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> [round(x, 4) for x in clipped_surrogate(log_ratio, advantage, 0.2, 0.2).tolist()]
    [-1.2, -0.5, 1.5, 0.8]
    """
    lower, upper = _log_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return -advantage * log_ratio.clamp(lower, upper).exp()


def cispo_surrogate(log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, clip_high: float) -> Tensor:
    """CISPO's loss of each token: REINFORCE weighted by the clipped ratio, which carries no gradient.

    ``-sg(min(rho, 1 + clip_high)) A log_prob``. Every token keeps a gradient, the clipped ones too.

    Args:
        log_prob: ``[N, T]``, nats, of the policy being trained.
        log_ratio: ``[N, T]``, nats.
        advantage: ``[N, T]`` or ``[N, 1]``.
        clip_high: the ratio is clipped above ``1 + clip_high``.

    Returns:
        ``[N, T]``.

    Raises:
        ValueError: if ``clip_high`` is negative.

    Source: MiniMax 2025 (arXiv:2506.13585, eq. 4 and 5, without a lower clip).

    >>> import torch
    >>> log_prob = torch.tensor([-2.0, -2.0], requires_grad=True)
    >>> loss = cispo_surrogate(log_prob, torch.tensor([3.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 1.0)
    >>> loss.sum().backward()
    >>> loss.tolist(), log_prob.grad.tolist()
    ([4.0, -1.0], [-2.0, 0.5])
    """
    _check_width("clip_high", clip_high)
    ratio = log_ratio.detach().exp().clamp(max=1 + clip_high)
    return -ratio * advantage * log_prob


def capped_tokens(log_ratio: Tensor, advantage: Tensor, clip_high: float) -> Tensor:
    """True where :func:`cispo_surrogate` cuts the ratio of a token that has an advantage; bool ``[N, T]``.

    >>> import torch
    >>> capped_tokens(torch.tensor([3.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 1.0).tolist()
    [True, False]
    """
    return (log_ratio > math.log1p(clip_high)) & (advantage != 0)


def reinforce_surrogate(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """REINFORCE's loss of each token, ``-A log_prob``.

    Args:
        log_prob: ``[N, T]``, nats, of the policy being trained.
        advantage: ``[N, T]`` or ``[N, 1]``.

    Returns:
        ``[N, T]``.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8.

    >>> import torch
    >>> reinforce_surrogate(torch.tensor([[-2.0, -1.0]]), torch.tensor([[0.5]])).tolist()
    [[1.0, 0.5]]
    """
    return -advantage * log_prob


@dataclass(frozen=True)
class Surrogate:
    """What is known of a value of ``algorithm.objective``; who has to ask something of one asks here.

    The parameters of its functions say what they read: ``log_prob``, ``log_ratio``, ``advantage``, ``clip_low``,
    ``clip_high``, ``dual_clip``, any of them.

    >>> SURROGATES["cispo"].reads("clip_high"), SURROGATES["reinforce"].reads("log_ratio")
    (True, False)
    """

    loss: Callable[..., Tensor]  # to [N, T]
    clipped: Callable[..., Tensor] | None = None  # to bool [N, T], where the clip acts; None: nowhere
    verl: Mapping[str, str] = field(default_factory=dict)  # its loss_mode of the same loss, by algorithm.ratio
    trl: Mapping[str, str] = field(default_factory=dict)  # its loss_type of the same loss, by algorithm.aggregation

    def reads(self, term: str) -> bool:
        """Whether the loss is a function of ``term``; of ``log_ratio`` where it has an importance ratio."""
        return term in signature(self.loss).parameters


_TRL = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
#: By the value of ``algorithm.objective``.
SURROGATES = {
    "clipped": Surrogate(clipped_surrogate, clipped_tokens, {"token": "vanilla", "sequence": "gspo"}, _TRL),
    "cispo": Surrogate(cispo_surrogate, capped_tokens, {"token": "cispo"}, {"token": "cispo"}),
    "reinforce": Surrogate(reinforce_surrogate, None, {"token": "gpg"}, _TRL),
}


def readers(term: str) -> str:
    """The surrogates that read ``term``, for messages.

    >>> readers("clip_high")
    'clipped or cispo'
    """
    return " or ".join(name for name, one in SURROGATES.items() if one.reads(term))


def of_terms(function: Callable[..., Tensor], terms: Mapping[str, Any]) -> Tensor:
    """Call ``function`` with those of ``terms`` that its parameters name.

    >>> of_terms(lambda y: y, {"x": 1, "y": 2})
    2
    """
    return function(**{name: value for name, value in terms.items() if name in signature(function).parameters})


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """GSPO's log-ratio of the whole response, given to each of its tokens with that token's own gradient.

    The value is ``log s_i = mean_t (log_prob_t - old_log_prob_t)`` over the masked tokens of the row, the same for all
    of them; the gradient is that of the token's own ``log_prob``: ``log s_it = sg(log s_i) + log_prob_t -
    sg(log_prob_t)``. Slots off the mask hold 0, take no part and carry no gradient, whatever they contain.

    Against plain GSPO, whose ratio ``s_i`` is differentiated as it stands (each token receives ``1/|o_i|`` of it): when
    the tokens of a row share one advantage and one loss weight, as under every aggregation of
    :mod:`sota_grpo.functional.weighting`, the gradients are equal, ``w_i s_i A_i sum_t grad log_prob_t``, and the clip
    takes or leaves the row as a whole. They differ only where advantages or weights differ inside a row; there the
    token form credits each token with its own.

    Args:
        log_prob: ``[N, T]``, nats, of the policy being trained.
        old_log_prob: ``[N, T]``, nats, of the policy that the ratio is taken to; its gradient is not followed.
        mask: bool ``[N, T]``, the trainable tokens.

    Returns:
        ``[N, T]``, to be used as the ``log_ratio`` of a surrogate.

    Source: Zheng et al. 2025 (arXiv:2507.18071, eq. 7 and section 4.3, GSPO-token).

    >>> import torch
    >>> log_prob = torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True)
    >>> ratio = sequence_log_ratio(log_prob, torch.tensor([[-1.5, -1.5, 0.0]]), torch.tensor([[True, True, False]]))
    >>> ratio.sum().backward()
    >>> ratio.tolist(), log_prob.grad.tolist()
    ([[0.0, 0.0, 0.0]], [[1.0, 1.0, 0.0]])
    """
    own = log_prob.where(mask, 0.0)
    log_ratio = own.detach() - old_log_prob.detach().where(mask, 0.0)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean + (own - own.detach())).where(mask, 0.0)


def _log_bounds(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The interval in which the log-ratio keeps its gradient: two tensors of the advantage's shape."""
    _check_width("clip_low", clip_low)
    _check_width("clip_high", clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds the ratio from above and must be greater than 1.")

    def constant(value: float) -> Tensor:
        return log_ratio.new_full((), value)

    lowest = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    negative = advantage < 0
    lower = constant(lowest).where(negative, constant(-math.inf))
    upper = constant(highest).where(negative, constant(math.log1p(clip_high)))
    return lower, upper


def _check_width(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; a clip width must be 0 or more.")
