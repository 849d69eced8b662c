"""vLLM's own C++ norms for its CPU engine, which computes them in plain torch otherwise (vLLM 0.32).

For a small model plain torch's are a fifth of the time of decoding. The kernels are registered as vLLM provides for,
as implementations of its operations (``vllm.ir``) beside the native ones, which still serve what kernels do not take.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "sota_grpo_cpu"


def cpu_norms() -> dict[str, list[str]]:
    """Register the kernels, once in a process, and give the engine's argument ``ir_op_priority`` that prefers them.

    Empty where this build of vLLM lacks them.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not all(hasattr(torch.ops._C, name) for name in ("rms_norm", "fused_add_rms_norm")):
        return {}
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
        register = ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_both, inplace=True)
        register(_fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whole rows that lie one after another, and a weight of their dtype."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _takes_both(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = x_residual.dtype == x.dtype and x_residual.is_contiguous()
    return same and _takes(x, weight, epsilon, variance_size)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
