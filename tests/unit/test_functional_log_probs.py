"""Invariants of sota_grpo.functional.log_probs: exact values and gradients, no tensor of M * V elements, no waste."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sota_grpo.functional import chunked_log_probs
from sota_grpo.functional import log_probs as functional_log_probs

M, H, V = 13, 6, 17
PRODUCT = 2 * M * V * H  # floating-point operations of one matrix product over all logits


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor, tile: int = 20, **options: Any) -> Any:
    """Log-probs and entropies in tiles of so many float64 logits, with the second buffer that the entropy needs."""
    return chunked_log_probs(hidden, weight, targets, logits_bytes=2 * 8 * tile, with_entropy=True, **options)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((M, H), (V, H), (V,)))
    targets = torch.randint(0, V, (M,))
    targets[1] = targets[0]
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def full(
    hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, temperature: float = 1.0, softcap: Any = None
) -> Any:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p = logits.log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def exactly(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, pull: Any = 1.0) -> Any:
    """Log-probs and entropies from full logits in float64, and the gradients of ``pull`` times the log-probs."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    values = full(*leaves, None, targets, temperature)
    return values, torch.autograd.grad((pull * values[0]).sum(), leaves)


def gradients_of(pulls: Tensor, values: Any, leaves: Any) -> tuple[Tensor, ...]:
    """The gradients that ``pulls`` of log-probs, and of entropies if there are two, give to the leaves."""
    return torch.autograd.grad(sum((pull * x).sum() for pull, x in zip(pulls, values)), leaves)


class Meter(TorchDispatchMode):
    """Most elements of any tensor that an operator returns, and the operations of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[1]
        return result


@pytest.mark.parametrize(
    ("tile", "temperature", "softcap", "with_bias"),  # logits of one tile: 1 x 1, 2 x 2, 4 x 5, 8 x 9, all at once
    [
        (1, 1.0, None, True),
        (4, 0.6, 1.5, False),
        (20, 0.6, None, True),
        (77, 1.0, None, False),
        (10_000, 0.6, 1.5, True),
    ],
)
def test_values_and_gradients_equal_the_full_logits(tile, temperature, softcap, with_bias) -> None:
    hidden, weight, bias, targets = problem()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    bias, pulls = bias if with_bias else None, torch.randn(2, M, dtype=torch.float64)
    options = {"bias": bias, "temperature": temperature, "softcap": softcap}
    actual = tiled(hidden, weight, targets, tile, entropy_grad=True, **options)
    expected = full(hidden, weight, bias, targets, temperature, softcap)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    ours, theirs = (gradients_of(pulls, values, leaves) for values in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("tile", [20, 10_000])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "weight and bias"])
@pytest.mark.parametrize(("softcap", "entropy_grad"), [(None, False), (None, True), (1.5, False)])
def test_a_frozen_input_changes_no_other_gradient(frozen, tile, softcap, entropy_grad) -> None:
    hidden, weight, bias, targets = problem()
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    pulls = torch.randn(1 + entropy_grad, M, dtype=torch.float64)
    wanted = gradients_of(pulls, full(hidden, weight, bias, targets, 0.7, softcap), [*leaves.values()])
    for name in frozen.split(" and "):
        leaves[name].requires_grad_(False)
    options = {"bias": bias, "temperature": 0.7, "softcap": softcap, "entropy_grad": entropy_grad}
    actual = tiled(hidden, weight, targets, tile, **options)
    sum((pull * x).sum() for pull, x in zip(pulls, actual)).backward()
    for (name, leaf), gradient in zip(leaves.items(), wanted):
        if name in frozen.split(" and "):
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-11)


def flops_of(pull: Tensor, weight: Tensor) -> tuple[int, int]:
    """Matrix-product operations of the forward and of the backward pass, for gradients of the log-probs ``pull``."""
    hidden, _, _, targets = problem()
    with Meter() as forward:
        actual, _ = tiled(hidden, weight, targets)
    with Meter() as backward:
        actual.backward(pull)
    return forward.flops, backward.flops


def test_a_frozen_head_costs_two_products_a_trained_one_four_and_rows_without_a_gradient_none() -> None:
    _, weight, _, _ = problem()
    pull = torch.randn(M, dtype=torch.float64)
    assert flops_of(pull, weight) == (PRODUCT, 3 * PRODUCT)
    assert flops_of(pull, weight.detach()) == (2 * PRODUCT, 0)
    pull[torch.randperm(M)[:5]] = 0
    assert flops_of(pull, weight) == (PRODUCT, 3 * (M - 5) * PRODUCT // M)
    assert flops_of(0 * pull, weight) == (PRODUCT, 0)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_rows_without_a_gradient_change_nothing(entropy_grad: bool) -> None:
    hidden, weight, bias, targets = problem()
    pulls, idle = torch.randn(1 + entropy_grad, M, dtype=torch.float64), torch.randperm(M)[:5]
    pulls[:, idle] = 0
    pulls[0, idle[0]] = float(entropy_grad)  # a gradient by one of the two is a gradient
    actual = tiled(hidden, weight, targets, bias=bias, entropy_grad=entropy_grad)
    both = (actual, full(hidden, weight, bias, targets))
    ours, theirs = (gradients_of(pulls, values, (hidden, weight, bias)) for values in both)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
    assert (ours[0][idle[1:]] == 0).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_nan_in_a_row_without_a_gradient_reaches_no_other(frozen: bool) -> None:
    hidden, weight, _, targets = problem()
    weight.requires_grad_(not frozen)
    broken = hidden.detach().clone()
    broken[3] = math.nan
    pull = torch.randn(M, dtype=torch.float64).index_fill_(0, torch.tensor([3]), 0)
    actual = []
    for states in (hidden, broken.requires_grad_()):
        leaves = [states] if frozen else [states, weight]
        log_probs, _ = tiled(states, weight, targets)
        actual.append(torch.autograd.grad(log_probs, leaves, pull))
    assert all(map(torch.equal, *actual))


@pytest.mark.parametrize("tile", [20, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_everything_keeps_its_digits_at_logits_of_some_thousands(tile: int, temperature: float) -> None:
    hidden, weight = (torch.randint(-40, 40, shape).float() for shape in ((M, H), (V, H)))  # exact products
    targets = (hidden @ weight.t()).argmax(1)
    weight = torch.cat((weight, *2 * [weight[targets[:4]]]))  # log 3 where three lead, which is no round number
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs, entropy = tiled(hidden, weight, targets, tile // 2, temperature=temperature, entropy_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = full(*exact, None, targets, temperature)
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(sum(x.sum() for x in expected), exact)
    for gradient, reference in zip(torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight)), wanted):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=2e-4)  # states and weights reach 40


def test_bfloat16_gradients_are_rounded_once_however_many_tiles_add_to_them() -> None:
    hidden, weight = (torch.randn(n, H).bfloat16().requires_grad_() for n in (2000, 5))
    targets = torch.randint(0, 5, (2000,))
    actual, _ = chunked_log_probs(hidden, weight, targets, logits_bytes=150)  # 25 logits
    _, wanted = exactly(hidden, weight, targets)
    for gradient, reference in zip(torch.autograd.grad(actual.sum(), (hidden, weight)), wanted):
        assert (gradient.double() - reference).norm() < 0.006 * reference.norm()


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_multiplies_in_its_dtype_as_a_linear_layer_does(frozen: bool) -> None:
    hidden, weight, _, targets = problem(torch.float32)
    weight.requires_grad_(not frozen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = chunked_log_probs(hidden, weight, targets, logits_bytes=400)
        logits = torch.nn.functional.linear(hidden, weight)
        actual.sum().backward()
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(actual, logits.float().log_softmax(-1)[torch.arange(M), targets])
    assert {x.grad.dtype for x in (hidden, weight) if x.requires_grad} == {torch.float32}
    _, (wanted, _) = exactly(hidden, weight, targets)
    assert (hidden.grad.double() - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_is_one_whichever_policy_computes_twice(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = problem(dtype)
    with torch.no_grad():
        first, _ = chunked_log_probs(hidden, weight, targets, logits_bytes=400, with_entropy=True)
    for head in (weight, weight.detach()):
        again, _ = chunked_log_probs(hidden, head, targets, logits_bytes=400, with_entropy=True)
        assert torch.equal(first, again)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_confident_token_keeps_its_gradient_in_bfloat16(frozen: bool) -> None:
    """``1 - p`` is about 0.0009, and bfloat16 has no number between 0.996 and 1."""
    hidden, weight = torch.randn(1, H), torch.randn(V, H)
    lead = (hidden @ weight.t()).logsumexp(-1) + 7
    weight[3] = lead * hidden / hidden.square().sum()
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(not frozen)
    actual, _ = chunked_log_probs(hidden, weight, torch.tensor([3]), logits_bytes=400)
    (gradient,) = torch.autograd.grad(actual, hidden)
    _, (wanted, _) = exactly(hidden, weight, torch.tensor([3]))
    assert (gradient - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_under_autocast_keeps_the_precision_of_the_forward(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = problem(dtype)
    actual, _ = chunked_log_probs(hidden, weight, targets, logits_bytes=400)
    expected = torch.autograd.grad(actual.sum(), (hidden, weight), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(actual.sum(), (hidden, weight))
        again, _ = chunked_log_probs(hidden, weight, targets, logits_bytes=400)
    assert all(torch.equal(a, b) for a, b in zip(inside, expected))
    assert torch.equal(again, actual) == (dtype == torch.float64)  # which autocast leaves as it is


def largest_tensors(log_probs_of: Any, rows: int) -> tuple[int, int]:
    """Most elements saved for the backward pass, and of any tensor made in either pass."""
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    targets, saved = torch.randint(0, 300, (rows,)), [0]

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with Meter() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            log_probs, entropy = log_probs_of(hidden, weight, targets)
        (log_probs.sum() + entropy.sum()).backward()
    return max(saved), largest.numel


def test_no_tensor_grows_with_rows_times_vocabulary() -> None:
    options = {"logits_bytes": 2 * 4 * 900, "with_entropy": True, "entropy_grad": True}
    saved, made = largest_tensors(partial(chunked_log_probs, **options), 200)
    assert saved == 300 * 4  # the weight itself
    assert made == 2 * 900  # two buffers for one tile of logits
    plain = largest_tensors(lambda hidden, weight, targets: full(hidden, weight, None, targets), 200)
    assert plain == (200 * 300, 200 * 300)  # the measure sees what it should see


def test_no_rows_is_no_work_and_a_zero_gradient() -> None:
    weight = torch.randn(V, H, requires_grad=True)
    actual, _ = chunked_log_probs(torch.zeros(0, H), weight, torch.zeros(0, dtype=torch.int64))
    assert actual.shape == (0,)
    actual.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(V, H))


def test_bad_input_is_refused_in_a_sentence() -> None:
    hidden, weight, bias, targets = problem()
    for options, sentence in (
        ({"targets": targets[1:]}, r"they are \[13, 6\], \[17, 6\], \[12\] and None"),
        ({"bias": bias[1:]}, r"and \[16\]"),
        ({"temperature": 0}, "temperature is 0"),
        ({"softcap": -1}, "softcap is -1"),
        ({"logits_bytes": 0}, "logits_bytes is 0"),
        ({"entropy_grad": True}, "needs with_entropy=True"),
    ):
        with pytest.raises(ValueError, match=sentence):
            chunked_log_probs(hidden, weight, **{"targets": targets, **options})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.bfloat16, 0.03)])
def test_a_gpu_computes_the_same(dtype: torch.dtype, close: float, frozen: bool) -> None:
    hidden, weight, _, targets = (x.detach().cuda() for x in problem(dtype))
    leaves = [x.requires_grad_() for x in (hidden, weight)[: 1 if frozen else 2]]
    actual, entropy = chunked_log_probs(hidden, weight, targets, logits_bytes=400, with_entropy=True)
    expected, wanted = exactly(hidden, weight, targets)
    torch.testing.assert_close((actual.double(), entropy.double()), expected, rtol=0, atol=3 * close)
    for gradient, reference in zip(torch.autograd.grad(actual.sum(), leaves), wanted):
        assert (gradient.double() - reference).norm() < close * reference.norm()


@pytest.mark.parametrize("kept", [0, 2**20])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_of_the_weight_in_half_precision_changes_no_bit(frozen: bool, kept: int, monkeypatch) -> None:
    """And the products are the copy's: another copy gives other values. One in float32 is ignored."""
    monkeypatch.setattr(functional_log_probs, "max_saved_bytes", lambda device: kept)
    hidden, weight = torch.randn(20, 24), torch.randn(301, 24).requires_grad_(not frozen)
    targets, outcomes = torch.randint(0, 301, (20,)), []
    for copy in (None, weight.detach().bfloat16(), weight.detach() + 1, torch.zeros(301, 24, dtype=torch.bfloat16)):
        leaves = [hidden.bfloat16().requires_grad_(), *([] if frozen else [weight])]
        actual, _ = chunked_log_probs(leaves[0], weight, targets, logits_bytes=9000, copy=copy)
        outcomes.append([actual.detach(), *torch.autograd.grad(actual.sum(), leaves)])
    for others in outcomes[1:3]:
        assert all(map(torch.equal, outcomes[0], others))
    assert not torch.equal(outcomes[0][0], outcomes[3][0])


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.bfloat16, 1.5e-2)])
def test_kept_tiles_give_the_gradient_of_recomputed_ones(dtype: torch.dtype, close: float, monkeypatch) -> None:
    """Against the full logits in float64, for targets that repeat, a certain row and rows without a pull."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 24), torch.randn(301, 24) * 24**-0.5
    hidden[0] *= 4
    targets, pull = torch.randint(0, 301, (40,)), torch.randn(40, dtype=torch.float64)
    targets[5:9], pull[1::5] = targets[4], 0.0
    leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    _, expected = exactly(*leaves, targets, 0.7, pull)
    made = []
    monkeypatch.setattr(functional_log_probs, "max_saved_bytes", lambda device: 2**20)
    pulled = functional_log_probs._pull_saved
    monkeypatch.setattr(functional_log_probs, "_pull_saved", lambda *args: made.append(len(args)) or pulled(*args))
    actual, _ = chunked_log_probs(*leaves, targets, temperature=0.7, logits_bytes=20_000, with_entropy=True)
    gradients = torch.autograd.grad(actual, leaves, pull.to(actual.dtype))
    assert made
    for one, right in zip(gradients, expected):
        assert (one.double() - right).norm() < close * right.norm()
