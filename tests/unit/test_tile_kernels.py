"""The kernels of the log-probs compute what the plain form does: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sota_grpo.functional import log_probs
from sota_grpo.functional.log_probs import chunked_log_probs

M, H, V = 9, 6, 300
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton reads when it is imported
pytest.importorskip("triton", reason="needs Triton, which liger-kernel brings along")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests below run in this process")
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("run by test_in_the_interpreter")
    if INTERPRETED:
        monkeypatch.setattr(log_probs, "_takes_kernels", lambda hidden, bias, softcap: hidden.dtype != torch.float64)
    return "cpu" if INTERPRETED else "cuda"


def measured(hidden, weight, targets, pulls, tile: int, *, entropy_grad: bool, frozen: bool) -> list[torch.Tensor]:
    """Log-probs, entropy and the gradients of hidden states and weight."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    found = chunked_log_probs(
        hidden, weight, targets, temperature=0.7, logits_bytes=4 * tile, with_entropy=True, entropy_grad=entropy_grad
    )
    sum((pull * x).sum() for pull, x in zip(pulls[: 1 + entropy_grad], found)).backward()
    return [*(x.detach() for x in found), hidden.grad, *([] if frozen else [weight.grad])]


@pytest.mark.parametrize(
    ("dtype", "close", "tile", "entropy_grad", "frozen"),
    [
        (torch.float32, 2e-5, 300, False, False),
        (torch.float32, 2e-5, 300, True, False),
        (torch.float32, 2e-5, 100_000, False, True),
        (torch.float32, 2e-5, 100_000, True, False),
        (torch.bfloat16, 1e-2, 300, False, True),
        (torch.bfloat16, 1e-2, 300, True, False),
        (torch.bfloat16, 1e-2, 100_000, False, False),
    ],
)
def test_values_and_gradients(
    device: str, dtype: torch.dtype, close: float, tile: int, entropy_grad: bool, frozen: bool, monkeypatch
) -> None:
    """In tiles of a few rows and columns, and in one; some logits are sharp. In float32 against float64, and in
    bfloat16 against the plain form, whose products are rounded alike."""
    hidden, weight = (torch.randn(shape).to(device, dtype) for shape in ((M, H), (V, H)))
    hidden[0] *= 20
    targets, pulls = torch.randint(0, V, (M,), device=device), torch.randn(2, M, device=device)
    how = {"entropy_grad": entropy_grad, "frozen": frozen}
    found = measured(hidden, weight, targets, pulls, tile, **how)
    if dtype == torch.float32:
        expected = measured(hidden.double(), weight.double(), targets, pulls.double(), tile, **how)
    else:
        monkeypatch.setattr(log_probs, "_takes_kernels", lambda hidden, bias, softcap: False)
        expected = measured(hidden, weight, targets, pulls, tile, **how)
    for value, reference in zip(found, expected, strict=True):
        assert (value.double() - reference.double()).norm() <= close * reference.double().norm()
