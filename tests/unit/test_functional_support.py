"""Laws of sota_grpo.functional.log_probs.support_log_probs: values and gradients by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sota_grpo.functional import SupportSets, support_log_probs

M, H, V = 11, 5, 14


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((M, H), (V, H), (V,)))
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def random_sets() -> tuple[list[list[int]], Tensor, SupportSets]:
    """Sets of 1 to V tokens in no order, the first of one token and the last of all; a token out of each."""
    sizes = [1, *torch.randint(1, V + 1, (M - 2,)).tolist(), V]
    sets = [torch.randperm(V)[:size].tolist() for size in sizes]
    targets = torch.tensor([kept[int(torch.randint(len(kept), ()))] for kept in sets])
    ids = torch.tensor([token for kept in sets for token in kept], dtype=torch.int32)
    return sets, targets, SupportSets.of(ids, torch.tensor(sizes), targets)


def by_hand(hidden: Tensor, weight: Tensor, bias: Tensor, sets: list[list[int]], targets: Tensor, temperature, softcap):
    """Log-prob of each token and entropy, position by position, from whole rows of logits."""
    actual = []
    for state, kept, target in zip(hidden, sets, targets.tolist()):
        logits = weight @ state + bias
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        outside = torch.tensor([token not in kept for token in range(V)])
        log_q = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
        actual.append(torch.stack([log_q[target], -sum(log_q[token].exp() * log_q[token] for token in kept)]))
    return torch.stack(actual).unbind(1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("logits_bytes", [1, 3000, None])
def test_values_and_gradients_are_those_of_masked_logits(softcap: float | None, logits_bytes: int | None):
    arguments = problem()
    sets, targets, index = random_sets()
    pulls = torch.randn(2, M, dtype=torch.float64)
    options = {"bias": arguments[2], "temperature": 0.7, "softcap": softcap, "logits_bytes": logits_bytes}
    actual = support_log_probs(*arguments[:2], index, with_entropy=True, entropy_grad=True, **options)
    expected = by_hand(*arguments, sets, targets, 0.7, softcap)
    torch.testing.assert_close(torch.stack(actual), torch.stack(expected), rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((torch.stack(pair) * pulls).sum(), arguments) for pair in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_set_of_one_token_has_a_log_prob_an_entropy_and_gradients_of_exactly_0():
    hidden, weight, bias = problem(torch.float32)
    targets = torch.randint(V, (M,))
    index = SupportSets.of(targets.int(), torch.ones(M), targets)
    with torch.no_grad():
        hidden *= 1e4  # logits of any size
    actual = support_log_probs(hidden, weight, index, bias=bias, with_entropy=True, entropy_grad=True)
    assert all(bool((values == 0).all()) for values in actual)
    for gradient in torch.autograd.grad(sum(actual).sum(), (hidden, weight, bias)):
        assert bool((gradient == 0).all())


def test_logits_that_differ_by_thousands_stay_finite_and_no_positions_are_no_error():
    hidden = torch.tensor([[3e4], [-3e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    index = SupportSets.of(torch.tensor([0, 2, 1, 2, 0]), torch.tensor([2, 3]), torch.tensor([2, 2]))
    actual = support_log_probs(hidden, weight, index, with_entropy=True, entropy_grad=True)
    assert actual[0].tolist() == [-6e4, 0.0]
    assert actual[1].tolist() == [0.0, 0.0]
    gradients = torch.autograd.grad(sum(actual).sum(), (hidden, weight))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    nothing = SupportSets.of(*[torch.zeros(0, dtype=torch.int64)] * 3)
    log_probs, entropy = support_log_probs(hidden[:0], weight, nothing, with_entropy=True)
    assert len(log_probs) == len(entropy) == 0


def test_tokens_outside_of_all_sets_are_neither_read_nor_moved():
    hidden, weight, _ = problem()
    index = SupportSets.of(torch.tensor([3, 5] * M), torch.full((M,), 2), torch.full((M,), 5))
    with torch.no_grad():
        weight[torch.tensor([token for token in range(V) if token not in (3, 5)])] = torch.nan
    log_probs, _ = support_log_probs(hidden, weight, index)
    log_probs.sum().backward()
    assert bool(hidden.grad.isfinite().all())
    assert weight.grad.abs().sum(1).nonzero().squeeze(1).tolist() == [3, 5]


def test_half_precision_rounds_its_inputs_only():
    hidden, weight, _ = (each.detach() for each in problem(torch.float32))
    _, _, index = random_sets()
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = support_log_probs(hidden, weight, index)
    expected, _ = support_log_probs(hidden.bfloat16().double(), weight.bfloat16().double(), index)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "counts", "targets", "sentence"),
    [
        ([1, 2, 3], [2, 1], [2, 4], r"1 of 2 sampled tokens are missing or repeated .* token 4"),
        ([1, 1, 3], [2, 1], [1, 3], r"1 of 2 .* token 1"),
        ([1, 2, 3], [2, 2], [1, 3], r"3 token ids .* add up to 4"),
    ],
)
def test_sets_that_are_not_those_of_their_tokens_are_refused(ids, counts, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        SupportSets.of(torch.tensor(ids), torch.tensor(counts), torch.tensor(targets))
