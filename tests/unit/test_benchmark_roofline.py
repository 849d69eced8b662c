"""The roofline counts the operations that are counted by hand, and what the compiler makes of layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.roofline import layer_code
from sota_grpo.functional.flops import Load, ModelShape, backward_flops, forward_flops
from tests.pretended_cuda import guard

SHAPE = ["--shape", "tiny", "--tokens", "320", "--prompt", "64", "--response", "64", "--group", "4"]


@pytest.mark.slow
@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
def test_the_roofline_of_a_tiny_step() -> None:
    """One prompt of 64 tokens and 4 responses of 64: 320 positions, 256 predicted."""
    command = [sys.executable, "-m", "benchmarks.roofline", *SHAPE, "--json"]
    root = Path(__file__).resolve().parents[2]
    plain, compiled, whole = (
        json.loads(subprocess.run([*command, *more], cwd=root, capture_output=True, text=True, check=True).stdout)
        for more in (["--checkpointing", "--eager"], ["--checkpointing"], [])
    )
    # tiny: 4 layers of width 128, 4 heads of 32 and 2 of keys, 384 inside, 4096 words
    matrices = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    pairs = 64 * 65 // 2 + 4 * (64 * 64 + 64 * 65 // 2)
    shape, load = ModelShape(matrices, 0, 4 * 128, 4096 * 128), Load(320, pairs, 256)
    once = forward_flops(shape, load) + backward_flops(shape, load)
    assert plain["useful_tflop"] == pytest.approx(once / 1e12)
    # checkpointing computes the layers again, but for the last product of each, whose result the backward pass does not
    # read; the head keeps its probabilities; attention computes scores twice (2 a pair each) and their gradients once
    # more (2 a pair), for queries and for keys
    again = forward_flops(shape, load) - 2 * 256 * 4096 * 128 - 4 * 2 * 128 * 384 * 320 + 6 * 4 * 128 * pairs
    assert total(plain, "tflop") == pytest.approx((once + again) / 1e12)
    # a compiled layer is computed again as a whole
    assert total(compiled, "tflop") == pytest.approx((once + again + 4 * 2 * 128 * 384 * 320) / 1e12)
    assert total(compiled, "kernels", "product half") == total(plain, "kernels", "product half") + 4
    for kind in ("attention", "foreach", "marked"):
        assert total(compiled, "kernels", kind) == total(plain, "kernels", kind) > 0
        assert total(compiled, "gb", kind) == total(plain, "gb", kind)
    layer = json.loads(layer_code("tiny", checkpointing=True))
    forward, backward = (layer[name]["kernels"] + layer[name].get("sums", 0) for name in ("forward", "backward"))
    named = {part["phase"]: part["kernels"] for part in compiled["slowest"] if part["name"] == "layers by Inductor"}
    assert named == {"body forward": 4 * forward, "body backward": 4 * (forward + backward)}
    assert 0 < total(compiled, "gb", "elementwise") < 0.7 * total(plain, "gb", "elementwise")
    assert whole["recomputed_tflop"] < compiled["recomputed_tflop"]  # nothing is recomputed but attention's scores
    assert 0 < total(whole, "gb", "elementwise") < total(compiled, "gb", "elementwise")  # in blocks of four layers
    assert plain["host_waits"] > 0


def total(found: dict[str, Any], what: str, kind: str | None = None) -> float:
    return sum(part[what] for part in found["parts"] if kind in (None, part["kind"]))
