"""The pretended device answers as CUDA does: what it refuses, what it counts, what it computes in place of CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sota_grpo.policy.shared_prompt import pack, shared_attention
from tests.pretended_cuda.counters import host_traffic

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        (lambda here, there: here + there, "two devices"),
        (lambda here, there: there.add_(here), "two devices"),
        (lambda here, there: torch.cat([here, there]), "two devices"),
        (lambda here, there: here @ there, "two devices"),
        (lambda here, there: torch.where(there > 0, here, 0.0), "two devices"),
        (lambda here, there: there[here.long()], "two devices"),
        (lambda here, there: here.gather(0, there.long()), "two devices"),
        (lambda here, there: here.scatter_(0, here.long(), there), "two devices"),
        (lambda here, there: torch.stack([here.sum(), there.sum()]), "two devices"),
        (lambda here, there: here.masked_fill_(there > 0, 1.0), "two devices"),
        (lambda here, there: here.normal_(generator=torch.Generator()), "'cuda' device type for generator"),
        (lambda here, there: torch.zeros(1, device="cuda:1"), "invalid device ordinal"),
    ],
)
def test_operands_of_two_devices_are_refused(mixed: Callable, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        mixed(torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2))


def test_waits_and_copies_are_counted_by_their_line() -> None:
    here, there = torch.arange(4.0, device="cuda"), torch.arange(4.0)
    with host_traffic() as nothing:
        torch.where(here > 1, here, 0.0).sum().cpu  # noqa: B018  computes, and fetches nothing
        there.pin_memory().to("cuda", non_blocking=True)
        here.to("cpu", non_blocking=True)
    assert (nothing.waits.total(), nothing.copies.total()) == (0, 0), str(nothing)
    with host_traffic() as counted:
        float(here.sum())
        here[here > 1]
        here.cpu()
        there.to("cuda")
        torch.tensor([1, 2], device="cuda")
        torch.cuda.synchronize()
    assert (counted.waits.total(), counted.copies.total()) == (4, 2), str(counted)
    assert all("test_tensors.py" in place for _, place in counted.waits + counted.copies), str(counted)


def test_memory_is_that_of_the_storages() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = torch.zeros(1 << 18, device="cuda")  # 1 MiB
    view = held[10:]
    other = held * 2
    assert torch.cuda.memory_allocated() - before == 2 << 20
    del held, other
    assert torch.cuda.memory_allocated() - before == 1 << 20
    assert torch.cuda.max_memory_allocated() - before == 2 << 20
    assert torch.cuda.memory_reserved() - before >= 2 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
    del view
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 2.0)])
def test_the_attention_of_packed_rows_is_that_of_the_plain_form(window: int, softcap: float) -> None:
    """A prompt of 3 tokens with responses of 2 and 4, and one alone: forward and backward."""
    torch.manual_seed(0)
    tokens = torch.tensor([[5, 6, 7, 1, 2, 0, 0], [5, 6, 7, 1, 1, 1, 1], [8, 9, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[False, False, False, True, True, True, True]] * 2 + [[False] * 7]) & (tokens > 0)
    layout = pack(tokens, tokens > 0, mask)
    shapes = [(1, heads, len(layout.tokens), 8) for heads in (4, 2, 2)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    plain = [leaf.detach().cpu().float().requires_grad_() for leaf in leaves]
    options = {"sliding_window": window or None, "softcap": softcap or None}
    there = layout.to(CUDA)
    out, _ = shared_attention(torch.nn.Identity(), *leaves, None, layout=there, tables=there.tables, **options)
    expected, _ = shared_attention(torch.nn.Identity(), *plain, None, layout=layout, tables=layout.tables, **options)
    pull = torch.randn(expected.shape)
    out.backward(pull.to("cuda", torch.bfloat16))
    expected.backward(pull)
    for actual, right in zip((out, *(leaf.grad for leaf in leaves)), (expected, *(leaf.grad for leaf in plain))):
        gap = (actual.cpu().float() - right).norm() / right.norm()
        assert gap < 2**-7, gap  # one rounding of the result to 8 bits, and one of the probabilities
