"""Terms of the loss of every token: surrogates (``SURROGATES``), KL, correction weights, masks and loss weights.

Nothing here reduces: a loss is ``sum(loss_weight * term)``. Arguments and results are ``[N, T]``, logarithms in nats:
``log_prob`` of the policy being trained; ``log_ratio = log rho = log_prob - old_log_prob``; ``mask``, bool, all
trainable tokens of each row. An ``advantage`` may be ``[N, 1]``. Replace values that are not finite in masked slots
*before* calling these functions: after an exponential, a NaN stays in the gradient even if it is masked. This module
does not import torch, because options are validated first.

**Surrogates**: minimizing one raises the probability of tokens with a positive advantage. A number outside its range
raises ``ValueError``: clip widths must be 0 or more, a dual clip or a cap of the ratio above 1, temperatures, exponents
and rates above 0.

**KL estimators** use only the sampled token's log-probs; with ``d = log_prob - ref_log_prob`` and tokens sampled from
the policy:

====  ======================  ==================================  ======================================================
name  value                   mean of the value                   mean of the gradient, as a term of the loss
====  ======================  ==================================  ======================================================
k1    ``d``                   ``KL(policy, ref)``                 0: no effect in a loss, use it in the reward
k2    ``d^2 / 2``             ``KL(policy, ref)`` + O(d^3)        that of ``KL(policy, ref)``, exactly
k3    ``exp(-d) + d - 1``     ``KL(policy, ref)``                 that of ``KL(ref, policy)``, the *forward* divergence
====  ======================  ==================================  ======================================================

The gradients of one token are ``1``, ``d`` and ``1 - exp(-d)`` times that of ``log_prob``. The last column follows from
``E[grad log_prob] = 0``, ``grad KL(policy, ref) = E[d grad log_prob]`` and ``E[exp(-d) grad log_prob] =
-grad KL(ref, policy)``. For small ``d`` k2 and k3 agree; k3's gradient grows exponentially for a token
that is much likelier under the reference, and saturates at 1 for one that is much less likely.

Sources: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); k3 in the loss, Shao et al. 2024
(arXiv:2402.03300, eq. 4); gradients, Tang and Munos 2025 (arXiv:2506.09477).

**Correction weights** are the ratio of the proximal policy (the denominator of the loss's ratio) to the behaviour
policy (which sampled); "inside" means ``floor <= w <= cap``:

============  ====================================  ====================================================================
mode          weight                                source
============  ====================================  ====================================================================
``truncate``  ``min(max(w, floor), cap)``           Ionides 2008, "Truncated importance sampling", J. Comput. Graph.
                                                    Stat. 17; Espeholt et al. 2018 (arXiv:1802.01561, section 4.1)
``mask``      ``w`` inside, 0 outside               IcePop, Ling Team 2025 (arXiv:2510.18855)
``reject``    1 inside, 0 outside                   verl's rollout correction (for the geometric mean of a row:
                                                    ``seq_mean_k1``)
============  ====================================  ====================================================================

**Loss weights** of an optimizer step: with ``loss = sum_it w_it x_it`` the gradients of micro-batches and ranks add up
to those of the step. Three rows of 2, 0 and 4 trainable tokens and ``max_response_tokens=8``:

===========  ======  ======  ======  ===============================================
aggregation  row 0   row 1   row 2   reading
===========  ======  ======  ======  ===============================================
token        1/6     0       1/6     mean over the 6 trainable tokens
sequence     1/4     0       1/8     mean over the 2 rows that have any, of row means
constant     1/24    0       1/24    sum over tokens / (3 rows * 8 tokens)
===========  ======  ======  ======  ===============================================

A row without trainable tokens counts only under ``constant``, whose divisor does not depend on the responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
_ROUNDING = 1e-9  # tolerance of a rank: a product such as 0.8 * 5 may be computed slightly above 4


def clipped_tokens(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    *,
    in_nats: bool = False,
) -> Tensor:
    """Return a bool mask of the tokens with ``A != 0`` whose gradient the clip of :func:`clipped_surrogate` sets to 0.

    That is ``rho > 1 + clip_high`` for ``A > 0``, and ``rho < 1 - clip_low`` or ``rho > dual_clip`` for ``A < 0``; or,
    ``in_nats``, the same of :func:`gmpo_surrogate`, whose clip widths are those of ``log rho``.

    >>> import torch
    >>> log_ratio = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    >>> clipped_tokens(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2).tolist()
    [True, False, False, True]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip, in_nats=in_nats)
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
    return -advantage * _clamped(log_ratio, *_bounds(log_ratio, advantage, clip_low, clip_high, dual_clip)).exp()


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
    _require_widths(clip_high=clip_high)
    ratio = log_ratio.detach().exp().clamp(max=1 + clip_high)
    return -ratio * advantage * log_prob


def capped_tokens(log_ratio: Tensor, advantage: Tensor, clip_high: float) -> Tensor:
    """Return a bool mask ``[N, T]`` of the tokens with ``A != 0`` whose ratio :func:`cispo_surrogate` clips.

    >>> import torch
    >>> capped_tokens(torch.tensor([3.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 1.0).tolist()
    [True, False]
    """
    _require_widths(clip_high=clip_high)
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
    _require_above(0, "a temperature must be above 0", tau_positive=tau_positive, tau_negative=tau_negative)
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
    _require_above(1, "it bounds the ratio from above and must be greater than 1", ratio_cap=ratio_cap)
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
    _require_widths(clip_low=clip_low, clip_high=clip_high)
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
    _require_above(0, "it must be above 0", k_positive=k_positive, lambda_positive=lambda_positive)
    _require_above(0, "it must be above 0", k_negative=k_negative, lambda_negative=lambda_negative)

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
    is 0 where the tokens are clipped. A token outside ``mask`` has the loss ``-A`` without a gradient.

    Source: Zhao et al. 2025 (arXiv:2507.20673).

    >>> import torch
    >>> log_ratio, mask = torch.tensor([[0.6, 0.2]]), torch.ones(1, 2, dtype=torch.bool)
    >>> loss = gmpo_surrogate(log_ratio, torch.tensor([[2.0]]), mask, 0.4, 0.4)  # -2 exp((0.4 + 0.2) / 2)
    >>> [round(x, 4) for x in loss.flatten().tolist()]
    [-2.6997, -2.6997]
    """
    lower, upper = _bounds(log_ratio, advantage, clip_low, clip_high, dual_clip, in_nats=True)
    return -advantage * _row_mean(_clamped(log_ratio, lower, upper), mask).exp()


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
    "gmpo": Surrogate(gmpo_surrogate, partial(clipped_tokens, in_nats=True), {"token": "geo_mean"}, ratios=("token",)),
}


def readers(term: str) -> str:
    """Return the names of the surrogates whose loss reads ``term``, joined by "or", for messages."""
    return " or ".join(name for name, declared in SURROGATES.items() if declared.reads(term))


def of_terms(function: Callable[..., Tensor], terms: Mapping[str, Any]) -> Tensor:
    """Call ``function`` with the ``terms`` that are its parameters (all if it has ``**kwargs``); return its result."""
    parameters = signature(function).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    return function(**{name: value for name, value in terms.items() if takes_any or name in parameters})


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


def _clamped(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
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
    _require_widths(clip_low=clip_low, clip_high=clip_high)
    _require_above(1, "it bounds the ratio from above and must be greater than 1", dual_clip=dual_clip)
    if not in_nats:
        clip_low = -math.log1p(-clip_low) if clip_low < 1 else math.inf
        clip_high = math.log1p(clip_high)
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    negative = advantage < 0
    lower = log_ratio.new_full(negative.shape, -math.inf).masked_fill_(negative, -clip_low)
    upper = log_ratio.new_full(negative.shape, clip_high).masked_fill_(negative, highest)
    return lower, upper


def _require_widths(**widths: float) -> None:
    for name, value in widths.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; a clip width must be 0 or more.")


def _require_above(bound: float, what: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > bound:
            raise ValueError(f"{name} is {value}; {what}.")


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``log_prob - ref_log_prob``, of either sign; its mean over the policy's tokens is ``KL(policy, ref)``.

    >>> import torch
    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return log_prob - ref_log_prob


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``(log_prob - ref_log_prob)^2 / 2``, never negative; its mean gradient is that of ``KL(policy, ref)``.

    >>> import torch
    >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return 0.5 * (log_prob - ref_log_prob).square()


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``exp(ref - log_prob) - (ref - log_prob) - 1``, never negative; the KL term of GRPO.

    Its mean over the policy's tokens is ``KL(policy, ref)``. ``expm1`` keeps digits that small log-ratios would lose.

    >>> import torch
    >>> round(kl_k3(torch.tensor([-1.0]), torch.tensor([-3.0])).item(), 4)  # exp(-2) + 2 - 1
    1.1353
    """
    difference = ref_log_prob - log_prob
    return difference.expm1() - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["truncate", "mask", "reject"],
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Return the correction weight of every token ``[N, T]``: proximal over behaviour probability, bounded, detached.

    With ``log_ratio = proximal_log_prob - behaviour_log_prob``, the weight is ``exp(log_ratio_t)`` per token
    (``token``); or, for all trainable tokens of a row, the *product* ``exp(sum_t log_ratio_t)`` (``sequence``) or the
    *geometric mean* ``exp(mean_t log_ratio_t)`` (``geometric``) of the ratios. The weight is 0 where the mask is False.

    Token weights are biased but of low variance. The product, before it is bounded, is the unbiased weight of a whole
    response, but varies widely in long rows. The geometric mean varies little; it measures how off-policy the row is.

    Args:
        log_ratio: ``[N, T]``, nats; values where the mask is False are ignored.
        mask: bool ``[N, T]``, the trainable tokens.
        level: ``token``, ``sequence`` or ``geometric``, else ``ValueError``.
        mode: treatment of weights outside the bounds, see the module's table; another name raises ``ValueError``.
        cap, floor: largest and smallest weight (0: no lower bound); ``ValueError`` unless ``0 <= floor < cap``.

    Source: decoupled proximal policy, Hilton et al. 2021 (arXiv:2110.00641, section 3); see the module's table.

    >>> import torch
    >>> log_ratio = torch.tensor([[4.0, 0.5, 9.0]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> importance_weights(log_ratio, mask, level="token", mode="truncate", cap=3.0).tolist()
    [[3.0, 0.5, 0.0]]
    >>> importance_weights(log_ratio, mask, level="sequence", mode="truncate", cap=3.0).tolist()  # 4 * 0.5
    [[2.0, 2.0, 0.0]]
    """
    if mode not in ("truncate", "mask", "reject"):
        raise ValueError(f"mode is {mode!r}; choose truncate, mask or reject.")
    _require_above(0, "it bounds the weights from above and must be greater than 0", cap=cap)
    if not 0 <= floor < cap:
        raise ValueError(f"floor is {floor} and cap is {cap}; the bounds of the weights must satisfy 0 <= floor < cap.")
    weight = raw_weights(log_ratio, mask, level=level)
    if mode == "truncate":
        weight = weight.clamp(floor, cap)
    else:
        inside = (weight >= floor) & (weight <= cap)
        weight = (weight if mode == "mask" else weight.new_ones(weight.shape)).where(inside, 0.0)
    return weight.where(mask, 0.0)


def raw_weights(log_ratio: Tensor, mask: Tensor, *, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """Return the weights of :func:`importance_weights` without bounds; ValueError for an unknown level.

    Where the mask is False, the weight is 1 (``token``) or that of the row.
    """
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level is {level!r}; choose token, sequence or geometric.")
    log_weight = log_ratio.detach().where(mask, 0.0)
    if level != "token":
        total = log_weight.sum(-1, keepdim=True)
        count = mask.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_weight = (total / count).expand_as(log_weight)
    return log_weight.exp()


def off_policy_tokens(
    log_prob: Tensor, behaviour: Tensor, advantage: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Return a bool mask ``[N, T]`` of the tokens to drop from the loss: trainable, with ``A < 0``, in off-policy rows.

    A row is off-policy if ``mean_t (behaviour_t - log_prob_t) > threshold``, the mean over its trainable tokens. With
    ``A < 0`` the policy has then already moved away from a bad response.

    Args:
        log_prob: ``[N, T]``, nats, log-probs of the policy being trained; detached.
        behaviour: ``[N, T]``, nats, log-probs of the policy that sampled.
        advantage: ``[N, T]`` or ``[N, 1]``.
        mask: bool ``[N, T]``, all trainable tokens of each row.
        threshold: nats per token; ``ValueError`` below 0.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556, eq. 9 by TRL's count, off-policy sequence masking).

    >>> import torch
    >>> log_prob, behaviour = torch.tensor([[-3.0, -1.0], [-3.0, -1.0]]), torch.full((2, 2), -1.0)
    >>> mask, advantage = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[-1.0], [1.0]])
    >>> off_policy_tokens(log_prob, behaviour, advantage, mask, threshold=0.5).tolist()  # the mean is 1
    [[True, True], [False, False]]
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it must be 0 or more.")
    gap = (behaviour - log_prob.detach()).where(mask, 0.0)
    mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean > threshold) & (advantage < 0) & mask


def top_entropy_tokens(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Return a bool mask of the fraction ``share`` of the trained tokens with the highest entropy.

    These have ``H_t >= tau``, with ``tau`` the quantile ``1 - share`` of ``H`` over the ``n`` tokens of ``mask``: the
    value of ascending rank ``ceil((1 - share) (n - 1))``, counted from 0. Ties may make the fraction larger.

    Args:
        entropy: ``[N, T]`` or ``[n]``, nats; values where the mask is False are ignored.
        mask: bool, all trained tokens of an optimizer step; ``entropy``, ``mask`` and the result have one shape.
        share: fraction above 0 and up to 1 (all tokens), else ``ValueError``; 0.2 in the paper.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), rho and tau of its objective; the rank is
    that of a linear quantile, as in TRL's ``top_entropy_quantile``.

    >>> import torch
    >>> entropy = torch.tensor([[0.1, 2.0, 0.3], [0.0, 1.0, 9.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> top_entropy_tokens(entropy, mask, share=0.4).tolist()  # (1 - 0.4) * 4 = 2.4, rank 3
    [[False, True, False], [False, True, False]]
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; the fraction of tokens must be above 0 and at most 1.")
    values = entropy[mask]
    if len(values) == 0:
        return mask & False
    rank = math.ceil((1 - share) * (len(values) - 1) - _ROUNDING)
    return (entropy >= values.sort().values[rank]) & mask


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, largest: float
) -> tuple[float, float]:
    """Return the entropy bonus's adapted coefficient ``c'``, and its weight ``alpha`` in the next step's loss.

    ``c' = min(c + delta, c_max)`` if ``H <= H*``, else ``max(c - delta, 0)``; ``alpha = c' 1[H <= H*]``: the bonus acts
    only while the mean entropy ``H`` of a step is too low. ``coef`` is ``c``, ``largest`` is ``c_max``, ``entropy`` is
    ``H`` and ``target`` is ``H*``, both in nats.

    Source: He et al. 2025, "Skywork Open Reasoner 1" (arXiv:2505.22312), adaptive entropy control. The paper uses
    the entropy of the same step; here and in TRL 1.16 (``use_adaptive_entropy``) it is the previous step's, which is
    already known.

    >>> adapted_entropy_coef(0.25, 0.1, target=0.2, delta=0.125, largest=1.0)
    (0.375, 0.375)
    >>> adapted_entropy_coef(0.25, 0.3, target=0.2, delta=0.125, largest=1.0)
    (0.125, 0.0)
    """
    low = entropy <= target
    moved = min(coef + delta, largest) if low else max(coef - delta, 0.0)
    return moved, moved if low else 0.0


def row_weights(lengths: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the loss weight of a trainable token of each row, float32 ``[N]``; a row's tokens have equal weights.

    With ``|o_i|`` the length of row i: ``token`` is ``1 / sum_j |o_j|``; ``sequence`` is ``1 / (M |o_i|)``, M the count
    of rows with ``|o_i| > 0``; ``constant`` is ``1 / (N max_response_tokens)``. Rows of length 0 get 0.

    Args:
        lengths: int64 ``[N]``, number of trainable tokens of each row of the whole optimizer step.
        max_response_tokens: maximum tokens of one response; read by ``constant`` only.

    Raises:
        ValueError: other shapes, an unknown aggregation, or ``constant`` without a positive ``max_response_tokens``.

    Sources: sequence, Shao et al. 2024 (arXiv:2402.03300, eq. 3); token, Yu et al. 2025 (arXiv:2503.14476, section
    3.3); constant, Liu et al. 2025 (arXiv:2503.20783, section 3.2).

    >>> import torch
    >>> row_weights(torch.tensor([2, 0, 4]), "sequence").tolist()
    [0.25, 0.0, 0.125]
    """
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [N], one per row, but it is {list(lengths.shape)}.")
    counts = lengths.double()
    if aggregation == "token":
        divisor = counts.sum().expand_as(counts)
    elif aggregation == "sequence":
        divisor = (counts > 0).sum() * counts
    elif aggregation != "constant":
        raise ValueError(f"aggregation is {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}.")
    elif max_response_tokens is None or max_response_tokens < 1:
        raise ValueError(
            f"max_response_tokens is {max_response_tokens}; aggregation 'constant' divides by it, "
            "so set it to the maximum tokens of one response."
        )
    else:
        divisor = counts.new_full(counts.shape, float(len(counts) * max_response_tokens))
    return divisor.reciprocal().where(lengths > 0, 0.0).float()


def loss_weights(mask: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the loss weight of each token of a step, ``[N, T]``: its row's :func:`row_weights`; 0 outside ``mask``.

    >>> import torch
    >>> loss_weights(torch.tensor([[False, True, True], [True, False, False]]), "sequence").tolist()
    [[0.0, 0.25, 0.25], [0.5, 0.0, 0.0]]
    """
    weights = row_weights(mask.sum(-1), aggregation, max_response_tokens=max_response_tokens)
    return weights.unsqueeze(-1).where(mask, 0.0)
