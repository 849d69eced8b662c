"""Estimators of the divergence from a reference policy, one value per token, nothing reduced.

All three look at the sampled token only; with ``d = log_prob - ref_log_prob`` and tokens drawn from the policy:

====  ======================  ==================================  ======================================================
name  value                   mean of the value                   mean of the gradient, when it stands in the loss
====  ======================  ==================================  ======================================================
k1    ``d``                   ``KL(policy, ref)``                 0: it pulls nowhere, use it in the reward only
k2    ``d^2 / 2``             ``KL(policy, ref)`` + O(d^3)        that of ``KL(policy, ref)``, exactly
k3    ``exp(-d) + d - 1``     ``KL(policy, ref)``                 that of ``KL(ref, policy)``, the *forward* divergence
====  ======================  ==================================  ======================================================

The gradients of one token are ``1``, ``d`` and ``1 - exp(-d)`` times that of ``log_prob``. The last column follows from
``E[grad log_prob] = 0``, ``grad KL(policy, ref) = E[d grad log_prob]`` and ``E[exp(-d) grad log_prob] =
-grad KL(ref, policy)``. For small ``d`` k2 and k3 agree; for a token much likelier under the reference k3's pull grows
exponentially, for one much less likely it saturates at 1.

Sources: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); k3 in the loss, Shao et al. 2024
(arXiv:2402.03300, eq. 4); gradients, Tang and Munos 2025 (arXiv:2506.09477).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """The log-ratio itself, ``log_prob - ref_log_prob``: unbiased, of either sign.

    Both arguments and the result are ``[N, T]``, in nats.

    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return log_prob - ref_log_prob


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Half the squared log-ratio, ``(log_prob - ref_log_prob)^2 / 2``: never negative, unbiased as a gradient.

    Both arguments and the result are ``[N, T]``, in nats.

    >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return 0.5 * (log_prob - ref_log_prob).square()


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """``exp(ref - log_prob) - (ref - log_prob) - 1``: never negative, unbiased as a value, the form in GRPO's paper.

    Both arguments and the result are ``[N, T]``, in nats. Written with ``expm1``, so that a log-ratio of 1e-3 keeps
    its digits in float32.

    >>> round(kl_k3(torch.tensor([-1.0]), torch.tensor([-3.0])).item(), 4)  # exp(-2) + 2 - 1
    1.1353
    """
    difference = ref_log_prob - log_prob
    return torch.expm1(difference) - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
