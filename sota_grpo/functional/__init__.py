"""The mathematics: pure functions of tensors, without TensorDict, config, logger, device choice or random state.

A function is imported at its first use, because options are validated with ``SURROGATES`` before torch is imported.

>>> import torch
>>> from sota_grpo.functional import group_advantages, row_weights
>>> group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), scale="none").tolist()
[0.5, -0.5]
>>> row_weights(torch.tensor([1, 3]), "token").tolist()
[0.25, 0.25]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "advantages": (
        *("decoupled_rewards", "distilled_advantages", "group_advantages", "soft_overlong_penalty"),
        "zero_advantage_mask",
    ),
    "log_probs": ("SupportSets", "chunked_log_probs", "support_log_probs"),
    "staleness": ("max_groups_admitted",),
    "loss_terms": (
        *("SURROGATES", "Surrogate", "cispo_surrogate", "clipped_surrogate", "clipped_tokens", "reinforce_surrogate"),
        *("dppo_surrogate", "gmpo_surrogate", "sapo_surrogate", "sequence_log_ratio", "vespo_surrogate"),
        *("KL_ESTIMATORS", "importance_weights", "kl_k1", "kl_k2", "kl_k3", "off_policy_tokens"),
        *("adapted_entropy_coef", "top_entropy_tokens", "loss_weights", "row_weights"),
    ),
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
