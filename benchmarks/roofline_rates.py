"""What devices reach in practice: rates that predictions are made with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a device reaches in practice, and its nominal peak.

    Args:
        memory: bytes per second, read and written.
        half, single: operations per second of products in half precision and in float32.
        attention, attention_backward: of the flash kernels.
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
    # SXM: copies were measured at 3.0 TB/s and a product of 8192^3 at 798 TFLOP/s; smaller ones reach less
    "h100": Rates(2.7e12, 620e12, 50e12, 380e12, 280e12, 3e-6, 989e12),
}
