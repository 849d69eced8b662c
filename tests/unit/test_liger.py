"""liger-kernel's head against ours; on a CPU it computes in chunks of plain torch."""

from __future__ import annotations

import pytest
import torch

from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import chunked_log_probs
from sota_grpo.policy.causal import CausalPolicy, liger_log_probs, require_liger
from tests.unit.tiny_models import make_model

pytest.importorskip("liger_kernel", reason="needs the liger extra")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_it_gives_the_log_probs_entropies_and_gradients_of_ours(temperature: float, entropy_grad: bool) -> None:
    hidden, weight = torch.randn(700, 24), torch.randn(301, 24)
    targets, pull, other = torch.randint(301, (700,)), torch.randn(700), torch.randn(700)
    actual = []
    for compute in (chunked_log_probs, liger_log_probs):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"temperature": temperature, "with_entropy": True, "entropy_grad": entropy_grad}
        log_probs, entropy = compute(h, w, targets, **options)
        assert entropy is not None
        assert entropy.requires_grad == entropy_grad
        ((log_probs * pull).sum() + ((entropy * other).sum() if entropy_grad else 0)).backward()
        actual.append((log_probs.detach(), entropy.detach(), h.grad, w.grad))
    for ours, its in zip(*actual):
        torch.testing.assert_close(its, ours, rtol=2e-4, atol=2e-4)


def test_no_token_is_no_log_prob() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    log_probs, entropy = liger_log_probs(hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert entropy is None


def test_a_head_that_it_cannot_compute_is_refused() -> None:
    with pytest.raises(UserError, match="capped logits"):
        CausalPolicy(make_model("gemma2", final_logit_softcapping=30.0), liger=True)
    with pytest.raises(UserError, match="a bias"):
        require_liger(softcap=None, has_bias=True)
