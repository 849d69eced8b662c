"""Laws of sota_grpo.functional.log_probs: exact values and gradients, and no tensor of M * V elements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sota_grpo.functional import chunked_log_probs, token_entropy

M, H, V = 13, 6, 17
CHUNKS = (1, 4, 5, 13, 100)


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    print("torch.manual_seed", torch.seed())


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((M, H), (V, H), (V,)))
    targets = torch.randint(0, V, (M,))
    targets[1] = targets[0]
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def full(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    return logits.log_softmax(-1)[torch.arange(len(targets)), targets], token_entropy(logits)


def test_by_the_plain_loop() -> None:
    hidden, weight, bias, targets = problem()
    found, entropy = chunked_log_probs(hidden, weight, targets, bias=bias, temperature=0.7, chunk=4, with_entropy=True)
    for m in range(M):
        logits = [
            (sum(hidden[m, h].item() * weight[v, h].item() for h in range(H)) + bias[v].item()) / 0.7 for v in range(V)
        ]
        total = sum(math.exp(z) for z in logits)
        p = [math.exp(z) / total for z in logits]
        assert found[m].item() == pytest.approx(math.log(p[targets[m]]), rel=1e-10)
        assert entropy[m].item() == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-10)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_full_logits(chunk: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, targets = problem()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    bias = bias if with_bias else None
    found = chunked_log_probs(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk=chunk, with_entropy=True, entropy_grad=True
    )
    expected = full(hidden, weight, bias, targets, temperature)
    pulls = torch.randn(2, M, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(sum((pull * x).sum() for pull, x in zip(pulls, pair)), leaves) for pair in (found, expected)
    ]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradcheck(entropy_grad: bool) -> None:
    hidden, weight, bias, targets = problem()

    def values(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        pair = chunked_log_probs(
            hidden, weight, targets, bias=bias, temperature=1.3, chunk=5, with_entropy=True, entropy_grad=entropy_grad
        )
        return pair if entropy_grad else pair[0]

    assert torch.autograd.gradcheck(values, (hidden, weight, bias))


def test_entropy_is_a_detached_diagnostic_unless_asked_for() -> None:
    hidden, weight, _, targets = problem()
    log_probs, none = chunked_log_probs(hidden, weight, targets)
    assert none is None
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=True)
    assert not entropy.requires_grad
    assert log_probs.requires_grad


def test_the_entropy_alone_can_be_differentiated() -> None:
    hidden, weight, _, targets = problem()
    _, entropy = chunked_log_probs(hidden, weight, targets, chunk=3, with_entropy=True, entropy_grad=True)
    found = torch.autograd.grad(entropy.sum(), hidden)
    expected = torch.autograd.grad(token_entropy(hidden @ weight.t()).sum(), hidden)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _, targets = problem()
    expected = torch.autograd.grad(chunked_log_probs(hidden, weight, targets)[0].sum(), (hidden, weight))
    still, other = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    still.requires_grad_(False)
    chunked_log_probs(hidden, weight, targets, chunk=4)[0].sum().backward()
    assert still.grad is None
    torch.testing.assert_close(other.grad, expected[1] if frozen == "hidden" else expected[0])


def test_a_tied_embedding_adds_both_gradients() -> None:
    _, weight, _, targets = problem()
    inputs = torch.randint(0, V, (M,))
    found = torch.autograd.grad(chunked_log_probs(weight[inputs], weight, targets, chunk=4)[0].sum(), weight)
    expected = torch.autograd.grad(full(weight[inputs], weight, None, targets, 1.0)[0].sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_large_logits_stay_finite_in_float32() -> None:
    hidden, weight, _, targets = (x.detach() for x in problem(torch.float32))
    hidden = (1000 * hidden).requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, chunk=4, with_entropy=True, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    expected = full(hidden.detach().double(), weight.double(), None, targets, 1.0)
    torch.testing.assert_close(log_probs.detach().double(), expected[0], rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(entropy.detach().double(), expected[1], rtol=1e-2, atol=1e-2)
    assert hidden.grad.isfinite().all()


def test_bfloat16_logits_have_float32_log_probs() -> None:
    hidden, weight, _, targets = problem(torch.bfloat16)
    found, entropy = chunked_log_probs(hidden, weight, targets, chunk=5, with_entropy=True)
    assert found.dtype == entropy.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = full(*exact, None, targets, 1.0)
    torch.testing.assert_close(found.double(), expected[0], rtol=0, atol=0.1)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=0.1)
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    assert {g.dtype for g in gradients} == {torch.bfloat16}
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected[0].sum(), exact)):
        assert (gradient.double() - wanted).norm() < 0.03 * wanted.norm()


def test_autocast_multiplies_in_its_dtype_as_a_linear_layer_does() -> None:
    hidden, weight, _, targets = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_log_probs(hidden, weight, targets, chunk=5)
        logits = torch.nn.functional.linear(hidden, weight)
        found.sum().backward()
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(found, logits.float().log_softmax(-1)[torch.arange(M), targets])
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    exact = hidden.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(full(exact, weight.detach().double(), None, targets, 1.0)[0].sum(), exact)
    assert (hidden.grad.double() - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_under_autocast_keeps_the_precision_of_the_forward(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = problem(dtype)
    found, _ = chunked_log_probs(hidden, weight, targets, chunk=5)
    expected = torch.autograd.grad(found.sum(), (hidden, weight), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(inside, expected))


def test_autocast_leaves_float64_as_it_is() -> None:
    hidden, weight, _, targets = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_log_probs(hidden, weight, targets)
    assert torch.equal(found, chunked_log_probs(hidden, weight, targets)[0])


class LargestTensor(TorchDispatchMode):
    """Most elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def largest_tensors(log_probs_of: Any, rows: int) -> tuple[int, int]:
    """Most elements saved for the backward pass, and of any tensor made in either pass."""
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    targets, saved = torch.randint(0, 300, (rows,)), [0]

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            log_probs, entropy = log_probs_of(hidden, weight, targets)
        (log_probs.sum() + entropy.sum()).backward()
    return max(saved), largest.numel


def test_no_tensor_grows_with_rows_times_vocabulary() -> None:
    def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return chunked_log_probs(hidden, weight, targets, chunk=8, with_entropy=True, entropy_grad=True)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return full(hidden, weight, None, targets, 1.0)

    saved, made = largest_tensors(chunked, 200)
    assert saved == 300 * 4  # the weight itself
    assert made == 8 * 300  # one chunk of logits
    assert largest_tensors(plain, 200) == (200 * 300, 200 * 300)  # the measure sees what it should see


def test_no_rows_is_no_work_and_a_zero_gradient() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    found, _ = chunked_log_probs(torch.zeros(0, H), weight, torch.zeros(0, dtype=torch.int64))
    assert found.shape == (0,)
    found.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(V, H))


def test_bad_input_is_refused_in_a_sentence() -> None:
    hidden, weight, bias, targets = problem()
    with pytest.raises(ValueError, match=r"they are \[13, 6\], \[17, 6\], \[12\] and None"):
        chunked_log_probs(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match=r"and \[16\]"):
        chunked_log_probs(hidden, weight, targets, bias=bias[1:])
    with pytest.raises(ValueError, match="temperature is 0"):
        chunked_log_probs(hidden, weight, targets, temperature=0)
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_log_probs(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match="needs with_entropy=True"):
        chunked_log_probs(hidden, weight, targets, entropy_grad=True)
