"""Policy-gradient surrogates, one value per token, nothing reduced; each declares what options and exporters read.

Each is a loss: its negative gradient raises the probability of tokens with a positive advantage. Arguments and results
are ``[N, T]``, in nats where they are logarithms: ``log_prob`` of the policy being trained; ``log_ratio``, the log of
``rho``, ``log_prob - old_log_prob``; the ``mask`` of the trainable tokens, of whole rows. An ``advantage`` may be
``[N, 1]``. Select finite values in masked slots *before* these functions: a NaN that enters an exponential leaves a
NaN in the gradient.

A number out of its range raises ``ValueError``: clip widths are 0 or more, a dual clip or a cap of the ratio above 1,
temperatures, exponents and rates above 0. Options are checked before torch is imported, so this module imports none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def clipped_tokens(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return True where the clip of :func:`clipped_surrogate` takes the gradient of a token that has an advantage.

    ``rho > 1 + clip_high`` with ``A > 0``, ``rho < 1 - clip_low`` with ``A < 0``, ``rho > dual_clip`` with ``A < 0``.

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
    """Return PPO's clipped loss of each token, optionally with the dual clip.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; with the dual clip, for ``A < 0``, at most
    ``-dual_clip A``. It is computed as ``-A exp(clamp(log rho))``, so the gradient is exactly 0 where
    :func:`clipped_tokens` is True, also where ``rho`` overflows, and exactly ``-rho A`` times that of ``log_prob``
    elsewhere, the bounds included. ``rho = inf`` with ``A < 0`` and no dual clip gives ``inf``: that is the loss.

    Args:
        clip_low: the ratio is clipped below ``1 - clip_low``; 1 or more never clips.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        dual_clip: largest ratio that counts for a negative advantage; None: no bound.

    Sources: Schulman et al. 2017 (arXiv:1707.06347, eq. 7); two widths, Yu et al. 2025 (arXiv:2503.14476, section 3.1);
    dual clip, Ye et al. 2020 (arXiv:1912.09729).

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> [round(x, 4) for x in clipped_surrogate(log_ratio, advantage, 0.2, 0.2).tolist()]
    [-1.2, -0.5, 1.5, 0.8]
    """
    lower, upper = _log_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return -advantage * _bounded(log_ratio, lower, upper).exp()


def cispo_surrogate(log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, clip_high: float) -> Tensor:
    """CISPO's loss of each token: REINFORCE weighted by the clipped ratio, which carries no gradient.

    ``-sg(min(rho, 1 + clip_high)) A log_prob``. Every token keeps a gradient, the clipped ones too.

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
    """Return True where :func:`cispo_surrogate` cuts the ratio of a token with an advantage; bool ``[N, T]``.

    >>> import torch
    >>> capped_tokens(torch.tensor([3.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 1.0).tolist()
    [True, False]
    """
    return (log_ratio > math.log1p(clip_high)) & (advantage != 0)


def sapo_surrogate(
    log_ratio: Tensor, advantage: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return SAPO's loss of each token: a sigmoid of the ratio in the place of the clip.

    ``-(4 / tau) sigmoid(tau (rho - 1)) A``, with ``tau_positive`` where ``A > 0`` and ``tau_negative`` elsewhere. Its
    gradient is ``-4 p (1 - p) rho A`` times that of ``log_prob``, ``p`` the sigmoid: ``-A`` at ``rho = 1``, less on
    either side. The ratio is held at ``tau (rho - 1) = 50``, so that one that overflows has the gradient 0 and not NaN.

    Source: Gao et al. 2025 (arXiv:2511.20347).

    >>> import torch
    >>> loss = sapo_surrogate(torch.tensor([1.0, 3.0]).log(), torch.tensor([1.0, -1.0]), 1.0, 2.0)
    >>> [round(x, 4) for x in loss.tolist()]  # -4 sigmoid(0), 2 sigmoid(4)
    [-2.0, 1.964]
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; a temperature must be above 0.")
    positive = advantage > 0
    tau = log_ratio.new_full((), tau_positive).where(positive, log_ratio.new_full((), tau_negative))
    most = (50 / tau).log1p()
    ratio = most.where(log_ratio > most, log_ratio).exp()
    return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantage


def dppo_surrogate(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None = 20.0,
) -> Tensor:
    """DPPO's loss of each token: REINFORCE weighted by the ratio, masked by the change of the *probability*.

    ``-sg(min(rho, ratio_cap)) A log_prob`` where :func:`moved_tokens` is False, 0 elsewhere; no cap is no bound. The
    change of the sampled token's probability bounds the total variation between the policies from below (binary total
    variation): it leaves rare tokens alone, whose ratio is large and whose probability hardly moves.

    Source: Qi et al. 2026 (arXiv:2602.04879, the binary total variation; the cap, section 5.4).

    Probabilities 0.6 from 0.3, a change of 0.3, and 0.02 from 0.01:

    >>> import torch
    >>> log_prob = torch.tensor([0.6, 0.02]).log().requires_grad_()
    >>> dppo_surrogate(log_prob, torch.tensor([2.0, 2.0]).log(), torch.ones(2), 0.2, 0.2).sum().backward()
    >>> log_prob.grad.tolist()
    [0.0, -2.0]
    """
    moved = moved_tokens(log_prob, log_ratio, advantage, clip_low, clip_high)
    if ratio_cap is not None and not ratio_cap > 1:
        raise ValueError(f"ratio_cap is {ratio_cap}; it bounds the ratio from above and must be greater than 1.")
    ratio = log_ratio.detach().exp().clamp(max=ratio_cap if ratio_cap is not None else math.inf)
    return (-ratio * advantage).masked_fill(moved, 0.0) * log_prob


def moved_tokens(log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True where :func:`dppo_surrogate` masks a token that has an advantage; bool ``[N, T]``.

    ``p - p_old > clip_high`` with ``A > 0``, ``p - p_old < -clip_low`` with ``A < 0``.

    >>> import torch
    >>> log_prob = torch.tensor([0.6, 0.02]).log()
    >>> moved_tokens(log_prob, torch.tensor([2.0, 2.0]).log(), torch.ones(2), 0.2, 0.2).tolist()
    [True, False]
    """
    _check_width("clip_low", clip_low)
    _check_width("clip_high", clip_high)
    change = (log_prob.exp() - (log_prob - log_ratio).exp()).detach()
    return ((change > clip_high) & (advantage > 0)) | ((change < -clip_low) & (advantage < 0))


def vespo_surrogate(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """Return VESPO's loss of each token: REINFORCE weighted by a smooth function of the ratio of the whole response.

    ``-sg(phi(W)) A log_prob`` with ``phi(W) = W^k exp(lambda (1 - W))`` and ``W = prod_t rho_t`` over the row's
    trainable tokens; ``k`` and ``lambda`` by the sign of the advantage (0 counts as positive). ``phi(1) = 1``, it is
    largest at ``W = k / lambda``. It is computed from ``log W``, so that a long row cannot overflow.

    Source: Shen et al. 2026 (arXiv:2602.10693); these values are TRL's defaults.

    >>> import torch
    >>> log_ratio, mask = torch.tensor([[2.0, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)  # W is 1
    >>> vespo_surrogate(torch.tensor([[-1.0, -2.0]]), log_ratio, torch.tensor([[3.0]]), mask).tolist()
    [[3.0, 6.0]]
    """
    sides = {"k_positive": k_positive, "lambda_positive": lambda_positive}
    sides |= {"k_negative": k_negative, "lambda_negative": lambda_negative}
    for name, value in sides.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0.")

    def by_sign(positive: float, negative: float) -> Tensor:
        return log_ratio.new_full((), positive).where(advantage >= 0, log_ratio.new_full((), negative))

    total = log_ratio.detach().where(mask, 0.0).sum(-1, keepdim=True)
    log_weight = by_sign(k_positive, k_negative) * total - by_sign(lambda_positive, lambda_negative) * total.expm1()
    return -log_weight.exp() * advantage * log_prob


def gmpo_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return GMPO's loss: the geometric mean of the row's clipped ratios, on each of its tokens.

    ``-A exp(mean_t c_t)`` with ``c_t = min(log rho_t, clip_high)`` where ``A >= 0`` and ``max(log rho_t, -clip_low)``,
    at most ``log dual_clip``, where ``A < 0``: the widths are in nats. Each token has the gradient of its own
    ``log_prob``, 0 where :func:`outlying_tokens` is True, as in :func:`sequence_log_ratio`. ``dual_clip`` is the
    largest ratio of a token that counts for a negative advantage; None: no bound.

    Source: Zhao et al. 2025 (arXiv:2507.20673).

    >>> import torch
    >>> log_ratio, mask = torch.tensor([[0.6, 0.2]]), torch.ones(1, 2, dtype=torch.bool)
    >>> loss = gmpo_surrogate(log_ratio, torch.tensor([[2.0]]), mask, 0.4, 0.4)  # -2 exp((0.4 + 0.2) / 2)
    >>> [round(x, 4) for x in loss.flatten().tolist()]
    [-2.6997, -2.6997]
    """
    lower, upper = _nat_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return -advantage * _row_mean(_bounded(log_ratio, lower, upper), mask).exp()


def outlying_tokens(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return True where :func:`gmpo_surrogate` clips the log-ratio of a token with an advantage; bool ``[N, T]``.

    >>> import torch
    >>> outlying_tokens(torch.tensor([0.6, -0.6, -0.6]), torch.tensor([1.0, 1.0, -1.0]), 0.4, 0.4).tolist()
    [True, False, True]
    """
    lower, upper = _nat_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return ((log_ratio < lower) | (log_ratio > upper)) & (advantage != 0)


def reinforce_surrogate(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return REINFORCE's loss of each token, ``-A log_prob``.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8.

    >>> import torch
    >>> reinforce_surrogate(torch.tensor([[-2.0, -1.0]]), torch.tensor([[0.5]])).tolist()
    [[1.0, 0.5]]
    """
    return -advantage * log_prob


@dataclass(frozen=True)
class Surrogate:
    """All that a value of ``algorithm.objective`` declares.

    The parameters of its functions say what they read: any of ``TENSORS`` and ``OPTIONS``. One that reads the ``mask``
    sees whole rows, whatever the micro-batches.

    >>> SURROGATES["cispo"].reads("clip_high"), SURROGATES["reinforce"].reads("log_ratio")
    (True, False)
    """

    loss: Callable[..., Tensor]  # to [N, T]
    clipped: Callable[..., Tensor] | None = None  # to bool [N, T], where the clip acts; None: nowhere
    verl: Mapping[str, str] = field(default_factory=dict)  # its loss_mode of the same loss, by algorithm.ratio
    ratios: tuple[str, ...] = ("token", "sequence")  # values of algorithm.ratio that it can be given
    weighs_rows: bool = False  # its own weight of a row takes the place of a correction
    advantage_only: bool = True  # its gradient is 0 where the advantage is 0

    def reads(self, term: str) -> bool:
        """Whether the loss is a function of ``term``; of ``log_ratio`` where it has an importance ratio."""
        return term in signature(self.loss).parameters


#: What a surrogate may read of the tokens, each ``[N, T]`` (the advantage possibly ``[N, 1]``) ..
TENSORS = ("log_prob", "log_ratio", "advantage", "mask", "entropy", "ref_log_prob")
#: .. and of the options, under their names in the config.
OPTIONS = ("clip_low", "clip_high", "dual_clip")
#: By the value of ``algorithm.objective``.
SURROGATES = {
    "clipped": Surrogate(clipped_surrogate, clipped_tokens, {"token": "vanilla", "sequence": "gspo"}),
    "cispo": Surrogate(cispo_surrogate, capped_tokens, {"token": "cispo"}),
    "reinforce": Surrogate(reinforce_surrogate, None, {"token": "gpg"}),
    "sapo": Surrogate(sapo_surrogate, None, {"token": "sapo"}),
    "dppo": Surrogate(dppo_surrogate, moved_tokens, {"token": "dppo_tv"}, ratios=("token",)),
    "vespo": Surrogate(vespo_surrogate, None, ratios=("token",), weighs_rows=True),
    "gmpo": Surrogate(gmpo_surrogate, outlying_tokens, {"token": "geo_mean"}, ratios=("token",)),
}


def readers(term: str) -> str:
    """The surrogates that read ``term``, for messages."""
    return " or ".join(name for name, declared in SURROGATES.items() if declared.reads(term))


def of_terms(function: Callable[..., Tensor], terms: Mapping[str, Any]) -> Tensor:
    """Call ``function`` with those of ``terms`` that its parameters name, with all where it takes any."""
    accepted = signature(function).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in accepted.values())
    return function(**{name: value for name, value in terms.items() if takes_any or name in accepted})


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return GSPO's log-ratio of the whole response on each of its tokens, with that token's own gradient.

    ``log s_it = sg(log s_i) + log_prob_t - sg(log_prob_t)``, ``log s_i = mean_t (log_prob_t - old_log_prob_t)`` over
    the masked tokens of the row; 0 without a gradient off the mask. When the tokens of a row share one advantage and
    one loss weight, that is the gradient of plain GSPO, whose ratio ``s_i`` is differentiated as it is: ``w_i s_i A_i
    sum_t grad log_prob_t``. The gradient of ``old_log_prob`` is not followed.

    Source: Zheng et al. 2025 (arXiv:2507.18071, eq. 7 and section 4.3, GSPO-token).

    >>> import torch
    >>> log_prob = torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True)
    >>> ratio = sequence_log_ratio(log_prob, torch.tensor([[-1.5, -1.5, 0.0]]), torch.tensor([[True, True, False]]))
    >>> ratio.sum().backward()
    >>> ratio.tolist(), log_prob.grad.tolist()
    ([[0.0, 0.0, 0.0]], [[1.0, 1.0, 0.0]])
    """
    return _row_mean(log_prob.where(mask, 0.0) - old_log_prob.detach().where(mask, 0.0), mask)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the row's masked tokens, on each of them with the gradient of its own value; 0 off the mask."""
    masked = values.where(mask, 0.0)
    mean = masked.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean + (masked - masked.detach())).where(mask, 0.0)


def _bounded(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """``clamp`` with the gradient 1 at a bound; torch 2.14's has 0.5 or 0 there."""
    return upper.where(values > upper, lower.where(values < lower, values))


def _nat_bounds(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The interval in which GMPO's log-ratio keeps its gradient: two tensors of the advantage's shape."""
    _check_width("clip_low", clip_low)
    _check_width("clip_high", clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds the ratio from above and must be greater than 1.")

    def constant(value: float) -> Tensor:
        return log_ratio.new_full((), value)

    highest = math.inf if dual_clip is None else math.log(dual_clip)
    negative = advantage < 0
    lower = constant(-clip_low).where(negative, constant(-math.inf))
    return lower, constant(highest).where(negative, constant(clip_high))


def _log_bounds(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """The interval in which the log-ratio keeps its gradient: two tensors of the advantage's shape."""
    _check_width("clip_low", clip_low)
    _check_width("clip_high", clip_high)
    low = -math.log1p(-clip_low) if clip_low < 1 else math.inf
    return _nat_bounds(log_ratio, advantage, low, math.log1p(clip_high), dual_clip)


def _check_width(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; a clip width must be 0 or more.")
