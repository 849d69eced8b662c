"""Policy-gradient surrogates (losses per token, without a reduction), and the registry ``SURROGATES`` of them.

Minimizing a surrogate raises the probability of tokens with a positive advantage. Arguments and results are
``[N, T]``, logarithms in nats: ``log_prob`` of the policy being trained; ``log_ratio = log rho = log_prob -
old_log_prob``; ``mask``, bool, all trainable tokens of each row. An ``advantage`` may be ``[N, 1]``. Replace values
that are not finite in masked slots *before* calling these functions: after an exponential, a NaN stays in the gradient
even if it is masked.

A number outside its range raises ``ValueError``: clip widths must be 0 or more, a dual clip or a cap of the ratio above
1, temperatures, exponents and rates above 0. This module does not import torch, because options are validated first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def clipped_tokens(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return a bool mask of the tokens with ``A != 0`` whose gradient the clip of :func:`clipped_surrogate` sets to 0.

    That is ``rho > 1 + clip_high`` for ``A > 0``, and ``rho < 1 - clip_low`` or ``rho > dual_clip`` for ``A < 0``.

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> clipped_tokens(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2).tolist()
    [True, False, False, True]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return ((log_ratio < lower) | (log_ratio > upper)) & (advantage != 0)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return PPO's clipped loss of each token, optionally with the dual clip.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; with the dual clip, for ``A < 0``, at most ``-dual_clip
    A``. It is computed as ``-A exp(clamp(log rho))``: the gradient is exactly 0 where :func:`clipped_tokens` is True,
    even if ``rho`` overflows, and exactly ``-rho A`` times that of ``log_prob`` elsewhere, the bounds included.
    ``rho = inf`` with ``A < 0`` and no dual clip gives the correct loss ``inf``. A ``clip_low`` of 1 or more never
    clips; ``dual_clip=None``: no bound. ValueError if a clip width is below 0, or ``dual_clip`` is not above 1.

    Sources: Schulman et al. 2017 (arXiv:1707.06347, eq. 7); two widths, Yu et al. 2025 (arXiv:2503.14476, section 3.1);
    dual clip, Ye et al. 2020 (arXiv:1912.09729).

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    >>> [round(x, 4) for x in clipped_surrogate(log_ratio, advantage, 0.2, 0.2).tolist()]
    [-1.2, -0.5, 1.5, 0.8]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)
    return -advantage * _bounded(log_ratio, lower, upper).exp()


def cispo_surrogate(log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, clip_high: float) -> Tensor:
    """Return CISPO's loss of each token: REINFORCE weighted by the clipped, detached ratio.

    ``-sg(min(rho, 1 + clip_high)) A log_prob`` (``sg``: stop gradient). Clipped tokens keep a gradient too.

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
    """Return a bool mask ``[N, T]`` of the tokens with ``A != 0`` whose ratio :func:`cispo_surrogate` clips.

    >>> import torch
    >>> capped_tokens(torch.tensor([3.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 1.0).tolist()
    [True, False]
    """
    _check_width("clip_high", clip_high)
    return (log_ratio > math.log1p(clip_high)) & (advantage != 0)


def sapo_surrogate(
    log_ratio: Tensor, advantage: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return SAPO's loss of each token: a sigmoid of the ratio instead of the clip.

    ``-(4 / tau) sigmoid(tau (rho - 1)) A``, with ``tau_positive`` if ``A > 0``, else ``tau_negative``. Its gradient is
    ``-4 p (1 - p) rho A`` times that of ``log_prob``, with ``p`` the sigmoid; ``4 p (1 - p)`` is 1 at ``rho = 1`` and
    below 1 elsewhere. The ratio is clamped at ``tau (rho - 1) = 50``, so that an overflow has gradient 0 and not NaN.

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
    """Return DPPO's loss of each token: REINFORCE weighted by the ratio, 0 if the *probability* has moved far enough.

    ``-sg(min(rho, ratio_cap)) A log_prob`` where :func:`moved_tokens` is False, 0 elsewhere; ``ratio_cap=None``: no
    cap. The change of the sampled token's probability is a lower bound of the total variation between the policies
    (binary total variation). A rare token, whose ratio is large while its probability hardly moves, is not masked.

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
    """Return a bool mask ``[N, T]`` of the tokens with ``A != 0`` that :func:`dppo_surrogate` masks.

    ``A > 0`` and ``p - p_old > clip_high``, or ``A < 0`` and ``p - p_old < -clip_low``; ``p``: the token's probability.

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
    trainable tokens; ``k`` and ``lambda`` depend on the advantage's sign (0 counts as positive). ``phi(1) = 1``; the
    maximum of ``phi`` is at ``W = k / lambda``. It is computed from ``log W``, so that a long row cannot overflow.

    Source: Shen et al. 2026 (arXiv:2602.10693); the default values are TRL's.

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
    """Return GMPO's loss of each token: the geometric mean of the row's clipped ratios times ``-A``.

    ``-A exp(mean_t c_t)`` with ``c_t = min(log rho_t, clip_high)`` if ``A >= 0``, and ``max(log rho_t, -clip_low)``, at
    most ``log dual_clip`` (None: no bound), if ``A < 0``; the mean is over the row's tokens in ``mask``, the clip
    widths are in nats. A token's loss has a gradient by its own ``log_prob`` only, as in :func:`sequence_log_ratio`; it
    is 0 where :func:`outlying_tokens` is True. A token outside ``mask`` has the loss ``-A`` without a gradient.

    Source: Zhao et al. 2025 (arXiv:2507.20673).

    >>> import torch
    >>> log_ratio, mask = torch.tensor([[0.6, 0.2]]), torch.ones(1, 2, dtype=torch.bool)
    >>> loss = gmpo_surrogate(log_ratio, torch.tensor([[2.0]]), mask, 0.4, 0.4)  # -2 exp((0.4 + 0.2) / 2)
    >>> [round(x, 4) for x in loss.flatten().tolist()]
    [-2.6997, -2.6997]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip, in_nats=True)
    return -advantage * _row_mean(_bounded(log_ratio, lower, upper), mask).exp()


def outlying_tokens(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return a bool mask ``[N, T]`` of the tokens with ``A != 0`` whose log-ratio :func:`gmpo_surrogate` clips.

    >>> import torch
    >>> outlying_tokens(torch.tensor([0.6, -0.6, -0.6]), torch.tensor([1.0, 1.0, -1.0]), 0.4, 0.4).tolist()
    [True, False, True]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip, in_nats=True)
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
    """Declaration of one value of ``algorithm.objective``: its loss, its mask of clipped tokens, and what it supports.

    A function gets those of ``TENSORS`` and ``OPTIONS`` that are its parameters; its other parameters must have a
    default. Tensors are whole padded rows; ``mask`` is True at trained tokens.

    >>> SURROGATES["cispo"].reads("clip_high"), SURROGATES["reinforce"].reads("log_ratio")
    (True, False)
    """

    loss: Callable[..., Tensor]  # returns [N, T]
    clipped: Callable[..., Tensor] | None = None  # returns bool [N, T], the clipped tokens; None: there is no clip
    verl: Mapping[str, str] = field(default_factory=dict)  # verl's loss_mode for this loss, by algorithm.ratio
    ratios: tuple[str, ...] = ("token", "sequence")  # supported values of algorithm.ratio
    weighs_rows: bool = False  # it weights rows by their ratio, so a correction of staleness is refused
    advantage_only: bool = True  # its gradient is 0 if the advantage is 0

    def reads(self, term: str) -> bool:
        """Return whether the loss has a parameter ``term``; a loss with ``log_ratio`` uses importance ratios."""
        return term in signature(self.loss).parameters


#: Tensors that a surrogate may have as parameters, each ``[N, T]`` (the advantage possibly ``[N, 1]``).
TENSORS = ("log_prob", "log_ratio", "advantage", "mask", "entropy", "ref_log_prob")
#: Options that a surrogate may have as parameters, named as in ``algorithm``.
OPTIONS = ("clip_low", "clip_high", "dual_clip")
#: Surrogates by the value of ``algorithm.objective``.
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
    """Return the names of the surrogates whose loss reads ``term``, joined by "or", for messages."""
    return " or ".join(name for name, declared in SURROGATES.items() if declared.reads(term))


def of_terms(function: Callable[..., Tensor], terms: Mapping[str, Any]) -> Tensor:
    """Call ``function`` with the ``terms`` that are its parameters (all if it has ``**kwargs``); return its result."""
    accepted = signature(function).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in accepted.values())
    return function(**{name: value for name, value in terms.items() if takes_any or name in accepted})


def sequence_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return per token the row's mean log-ratio (GSPO), with gradient 1 by that token's ``log_prob`` only.

    ``log s_it = sg(log s_i) + log_prob_t - sg(log_prob_t)``, ``log s_i = mean_t (log_prob_t - old_log_prob_t)`` over
    the row's tokens in ``mask``; 0 without a gradient for all other tokens. If the tokens of a row have one advantage
    and one loss weight ``w_i``, the gradient of the sum of ``w_i s_it A_i``, without a clip, equals that of GSPO, which
    differentiates ``s_i`` itself: ``w_i s_i A_i sum_t grad log_prob_t``. ``old_log_prob`` is detached.

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
    """Return the row's mean for each token in ``mask``, with the gradient of that token's value; 0 elsewhere."""
    masked = values.where(mask, 0.0)
    mean = masked.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean + (masked - masked.detach())).where(mask, 0.0)


def _bounded(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Clamp ``values`` with a gradient of 1 at a bound, where ``torch.clamp`` of torch 2.14 has 0.5 or 0."""
    return upper.where(values > upper, lower.where(values < lower, values))


def _bounds(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    *,
    in_nats: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the bounds between which the log-ratio has a gradient: two tensors of the advantage's shape.

    ``in_nats``: the clip widths are those of the log-ratio (GMPO), not of the ratio.
    """
    _check_width("clip_low", clip_low)
    _check_width("clip_high", clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds the ratio from above and must be greater than 1.")
    if not in_nats:
        clip_low = -math.log1p(-clip_low) if clip_low < 1 else math.inf
        clip_high = math.log1p(clip_high)
    constant = partial(log_ratio.new_full, ())
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    negative = advantage < 0
    lower = constant(-clip_low).where(negative, constant(-math.inf))
    return lower, constant(highest).where(negative, constant(clip_high))


def _check_width(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; a clip width must be 0 or more.")
