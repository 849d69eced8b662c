"""The mathematics: pure functions of tensors. No TensorDict, config, logger, device choice or random state here.

>>> import torch
>>> from sota_grpo.functional import group_advantages, row_weights
>>> group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), scale="none").tolist()
[0.5, -0.5]
>>> row_weights(torch.tensor([1, 3]), "token").tolist()
[0.25, 0.25]
"""

from sota_grpo.functional.advantages import constant_groups, group_advantages
from sota_grpo.functional.corrections import importance_weights
from sota_grpo.functional.diagnostics import effective_sample_size, masked_mean, mismatch_kl, token_entropy
from sota_grpo.functional.divergences import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3
from sota_grpo.functional.log_probs import chunked_log_probs
from sota_grpo.functional.staleness import max_groups_admitted
from sota_grpo.functional.surrogates import (
    cispo_surrogate,
    clipped_surrogate,
    clipped_tokens,
    reinforce_surrogate,
    sequence_log_ratio,
)
from sota_grpo.functional.weighting import loss_weights, row_weights, soft_overlong_penalty

__all__ = [
    "KL_ESTIMATORS",
    "chunked_log_probs",
    "cispo_surrogate",
    "clipped_surrogate",
    "clipped_tokens",
    "constant_groups",
    "effective_sample_size",
    "group_advantages",
    "importance_weights",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "loss_weights",
    "masked_mean",
    "max_groups_admitted",
    "mismatch_kl",
    "reinforce_surrogate",
    "row_weights",
    "sequence_log_ratio",
    "soft_overlong_penalty",
    "token_entropy",
]
