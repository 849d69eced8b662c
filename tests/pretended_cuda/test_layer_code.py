"""What the compiler makes of decoder layers and the loss for an H100 does not grow: kernels, products and bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.pretended_cuda import guard


@pytest.mark.slow
@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
@pytest.mark.parametrize(
    ("shape", "layers", "kernels", "gigabytes"),
    [("qwen3-0.6b", 4, 30, 8.4), ("qwen2.5-1.5b", 1, 12, 4.2)],
)
def test_layers_have_few_kernels_and_bytes(shape: str, layers: int, kernels: int, gigabytes: float) -> None:
    """16,384 packed tokens, weights cast to bfloat16 once per step; transformers' layers have 32 and 37 kernels."""
    command = [sys.executable, "-m", "tests.pretended_cuda.layer_code", "--shape", shape, "--layers", str(layers)]
    done = subprocess.run(command, cwd=guard.ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    forward, backward, loss = (
        json.loads(done.stdout.splitlines()[-1])[name] for name in ("forward", "backward", "loss")
    )
    assert (forward["products"], backward["products"]) == (4 * layers, 4 * layers)
    # backward: attention, rotary positions, and four products that are added to sums of gradients
    assert (forward["operators"], backward["operators"]) == (layers, 6 * layers)
    assert 0 < forward["kernels"] + backward["kernels"] <= kernels
    assert 0 < forward["gigabytes"] + backward["gigabytes"] <= gigabytes
    assert loss.keys() == {"kernels", "gigabytes"}
    assert 0 < loss["kernels"] <= 5  # one by one they are a hundred
