"""liger-kernel's fused head in the place of ours: the other choice of ``train_model.log_probs``."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from sota_grpo.errors import UserError

_NEVER = -100  # a target that means none; ours are all real


def require_liger(*, softcap: float | None, has_bias: bool) -> None:
    """Say at once why the fused head cannot be used.

    Raises:
        UserError: liger-kernel is not installed, or the model's head is more than a plain matrix.
    """
    if find_spec("liger_kernel") is None:
        raise UserError(
            "train_model.log_probs=liger needs liger-kernel: `pip install 'sota-grpo[liger]'`, or set tiled."
        )
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if hopper and find_spec("cutlass") is None:
        raise UserError(
            "train_model.log_probs=liger on a Hopper GPU needs `pip install 'liger-kernel[cutedsl]'`, or set tiled."
        )
    if softcap is not None or has_bias:
        extra = "a bias" if has_bias else "capped logits"
        raise UserError(f"train_model.log_probs=liger cannot compute {extra}, which this model has; set tiled.")


def liger_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`sota_grpo.functional.log_probs.chunked_log_probs` as liger-kernel computes it.

    On Hopper GPUs it is one fused kernel per direction, for bfloat16 alone (``nvidia-cutlass-dsl`` has to be
    installed); on all others chunks of 512 rows and all V columns in plain torch, rounded to the dtype of ``hidden``.
    It differentiates by hidden and weight, both always.

    Args:
        hidden: ``[M, H]``, the states that predict the targets.
        weight: ``[V, H]``, the output embedding; another dtype is converted to that of ``hidden``.
        targets: int64 ``[M]``, ids in ``[0, V)``.
        temperature: the logits are divided by it.
        with_entropy: also return the entropy of every row.
        entropy_grad: let the gradient through the entropy.

    Returns:
        log-probs ``[M]`` and entropy ``[M]`` (None unless asked for), in nats, as float32.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as FusedHead

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if len(hidden) == 0:  # it refuses them
        nothing = hidden.sum(1).float()
        return nothing, nothing.detach() if with_entropy else None
    found = FusedHead.apply(hidden, weight.to(hidden.dtype), targets, temperature, _NEVER, 1, with_entropy)
    nll, entropy = found if with_entropy else (found, None)
    if entropy is not None:
        entropy = entropy.float() if entropy_grad else entropy.detach().float()
    return -nll, entropy
