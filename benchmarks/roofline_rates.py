"""What devices reach in practice: rates that predictions are made with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a device reaches in practice, and its nominal peak.

    Args:
        memory: bytes per second, read and written.
        half, single: operations per second of products in half precision and in float32.
        attention, attention_backward: of :mod:`sota_grpo.policy.attention_kernels`.
        launch_s: least time of a kernel.
        peak: dense bfloat16 operations per second that utilisation is counted against.
    """

    memory: float
    half: float
    single: float
    attention: float
    attention_backward: float
    launch_s: float
    peak: float


DEVICES = {
    # SXM: copies were measured at 3.0 TB/s and a product of 8192^3 at 798 TFLOP/s; in a step of Qwen3-0.6B with 16,384
    # tokens layers' products took 58 ms (746 TFLOP/s), attention of a layer 0.54 ms (350) and backward 1.65 ms (401)
    "h100": Rates(2.7e12, 700e12, 50e12, 350e12, 400e12, 3e-6, 989e12),
}
