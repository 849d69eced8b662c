"""Triton's kernels, of packed attention and of log-probs, against the plain forms: on a GPU, else interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sota_grpo.functional import log_probs
from sota_grpo.functional.log_probs import chunked_log_probs
from sota_grpo.policy import shared_prompt
from sota_grpo.policy.shared_prompt import Layout, _plain, pack, packed_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton reads when it is imported
pytest.importorskip("triton", reason="needs Triton, which the bench extra installs")


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
    """The interpreter has tiles and pieces so small that a few tokens have several of each."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("run by test_in_the_interpreter")
    if INTERPRETED:
        from sota_grpo.policy import attention_kernels

        monkeypatch.setattr(attention_kernels, "TILE", 32)
        monkeypatch.setattr(shared_prompt, "TILE", 32)
        monkeypatch.setattr(shared_prompt, "PIECE", 24)
        monkeypatch.setattr(log_probs, "_takes_kernels", lambda hidden, bias, softcap: hidden.dtype != torch.float64)
    return "cpu" if INTERPRETED else "cuda"


def layout_of(groups: list[tuple[int, list[int]]]) -> Layout:
    """Of prompts of these lengths with responses of those; no responses: a prompt alone."""
    rows = [(group, prompt, length) for group, (prompt, sizes) in enumerate(groups) for length in sizes or [0]]
    group, prompt, length = torch.tensor(rows).T[:, :, None]
    place = torch.arange(int((prompt + length).max()))
    real = place < prompt + length
    return pack((5 + group).expand(real.shape), real, real & (place >= prompt))


GROUPS = {
    "several tiles and pieces": [(37, [33, 9, 2, 1])],
    "short ones, and a prompt alone": [(3, [5, 4, 9]), (34, []), (1, [1])],
}


@pytest.mark.parametrize(
    ("case", "heads", "window", "softcap"),
    [
        ("several tiles and pieces", (4, 2, 16), 11, 2.0),
        ("several tiles and pieces", (3, 1, 24), 0, 0.0),
        ("short ones, and a prompt alone", (3, 1, 24), 11, 2.0),
    ],
)
def test_attention(device: str, case: str, heads: tuple[int, int, int], window: int, softcap: float) -> None:
    """In float32 (bfloat16 on a GPU) against plain attention in float64; on a GPU twice, with the same bits."""
    layout, (queries, keys, width) = layout_of(GROUPS[case]), heads
    length, dtype = len(layout.tokens), torch.float32 if INTERPRETED else torch.bfloat16
    inputs = [torch.randn(length, count, width).to(device, dtype).requires_grad_() for count in (queries, keys, keys)]
    pull = torch.randn(length, queries, width).to(device, dtype)
    tables = layout.to(torch.device(device)).tables
    actual = []
    for _ in range(1 if INTERPRETED else 2):
        out = packed_attention(*inputs, tables.flat, [*tables.sizes], [width**-0.5, softcap, window])
        actual.append((out.detach(), *torch.autograd.grad(out, inputs, pull)))
    assert all(map(torch.equal, actual[0], actual[-1]))
    exact = [each.detach().cpu().double().transpose(0, 1)[None].requires_grad_() for each in inputs]
    expected = _plain(*exact, layout, width**-0.5, window or None, softcap or None).transpose(1, 2)[0]
    gradients = torch.autograd.grad(expected, exact, pull.cpu().double())
    right = [expected.detach(), *(each[0].transpose(0, 1) for each in gradients)]
    for value, reference in zip(actual[0], right):
        gap = (value.cpu().double() - reference).norm() / reference.norm()
        assert gap < (1e-6 if INTERPRETED else 5e-3), gap


@pytest.mark.parametrize(("heads", "normed"), [((4, 2, 16), True), ((3, 1, 24), False)])
def test_gradients_of_norms_and_rotary_positions(device: str, heads: tuple[int, int, int], normed: bool) -> None:
    """By formulas that round alike, and in float32 torch's own; 37 tokens are three programs."""
    from sota_grpo.policy import attention_kernels
    from tests.pretended_cuda import kernels

    (queries, keys, width), dtype = heads, torch.float32 if INTERPRETED else torch.bfloat16
    states, *pulls = (
        torch.randn(37, count, width).to(device, dtype) for count in (queries + 2 * keys, queries, keys, keys)
    )
    norms, (cos, sin) = [torch.rand(width, device=device) for _ in range(2 * normed)], torch.randn(2, 37, width)
    factors = (states, norms, cos.to(device), sin.to(device))
    actual, expected = (module.unrotate(pulls, *factors, 1e-2) for module in (attention_kernels, kernels))
    for leaf in (states, *norms):
        leaf.requires_grad_()
    turned = shared_prompt.rotated_heads(*factors, queries, 1e-2)
    gradients = torch.autograd.grad(turned, (states, *norms), torch.cat(pulls[:2], 1))
    gradients[0][:, queries + keys :] = pulls[2]
    by_norms = torch.stack(gradients[1:]) if normed else expected[1]
    for value, reference, exact in zip(actual, expected, (gradients[0], by_norms)):
        assert value.shape == reference.shape == exact.shape
        assert (value - reference).norm() <= (1e-6 if INTERPRETED else 5e-3) * reference.norm()
        assert (value - exact).norm() <= (1e-6 if INTERPRETED else 5e-3) * exact.norm()


def measured(hidden, weight, targets, pulls, tile: int, *, entropy_grad: bool, frozen: bool) -> list[torch.Tensor]:
    """Log-probs, entropy and the gradients of hidden states and weight."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    actual = chunked_log_probs(
        hidden, weight, targets, temperature=0.7, logits_bytes=4 * tile, with_entropy=True, entropy_grad=entropy_grad
    )
    sum((pull * x).sum() for pull, x in zip(pulls[: 1 + entropy_grad], actual)).backward()
    return [*(x.detach() for x in actual), hidden.grad, *([] if frozen else [weight.grad])]


@pytest.mark.parametrize(
    ("dtype", "close", "tile", "entropy_grad", "frozen"),
    [
        (torch.float32, 2e-5, 300, True, False),
        (torch.float32, 2e-5, 100_000, False, True),
        (torch.bfloat16, 1e-2, 300, False, True),
        (torch.bfloat16, 1e-2, 100_000, False, False),
    ],
)
def test_log_probs(
    device: str, dtype: torch.dtype, close: float, tile: int, entropy_grad: bool, frozen: bool, monkeypatch
) -> None:
    """Some logits are sharp. float32 against float64, bfloat16 against the plain form, which rounds products alike."""
    hidden, weight = (torch.randn(rows, 6).to(device, dtype) for rows in (9, 300))
    hidden[0] *= 20
    targets, pulls = torch.randint(0, 300, (9,), device=device), torch.randn(2, 9, device=device)
    how = {"entropy_grad": entropy_grad, "frozen": frozen}
    actual = measured(hidden, weight, targets, pulls, tile, **how)
    if dtype == torch.float32:
        expected = measured(hidden.double(), weight.double(), targets, pulls.double(), tile, **how)
    else:
        monkeypatch.setattr(log_probs, "_takes_kernels", lambda hidden, bias, softcap: False)
        expected = measured(hidden, weight, targets, pulls, tile, **how)
    for value, reference in zip(actual, expected, strict=True):
        assert (value.double() - reference.double()).norm() <= close * reference.double().norm()


DEVICES = {90: 227 * 1024, 80: 163 * 1024, 89: 99 * 1024}  # shared memory of a program, by compute capability
INTEGERS = ("query_row", "key_row", "value_row", "length", "window")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("capability", "width"), [(90, 128), (80, 128), (89, 256)])
def test_they_compile_and_fit_where_they_are_said_to_fit(capability: int, width: int) -> None:
    """For GPUs that are not here: Triton's own compiler takes more than its interpreter does, types of branches too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sota_grpo.policy import attention_kernels as kernels

    memory, target = DEVICES[capability], GPUTarget("cuda", capability, 32)
    launch = kernels.launch_for(width, memory)
    bf16 = ("query", "key", "value", "grad", "out", "by_query", "by_key", "by_value")
    types = dict.fromkeys(bf16, "*bf16") | dict.fromkeys(INTEGERS, "i32") | {"starts": "*i32", "tiles": "*i32"}
    types |= dict.fromkeys(("lse", "delta", "key_sums", "value_sums"), "*fp32")
    types |= dict.fromkeys(("factor", "cap", "scale", "eps"), "fp32") | {"states": "*bf16"}
    types |= dict.fromkeys(("query_norm", "key_norm", "cos", "sin", "sums"), "*fp32")
    heads = {"HEADS": 4, "KEY_HEADS": 2, "NORMED": True, "WIDTH": width, "PADDED": width}
    names = kernels._unrotate_tile.arg_names
    signature = {name: "constexpr" if name in heads else types[name] for name in names}
    constants_of = {(names.index(name),): value for name, value in heads.items()}
    triton.compile(ASTSource(kernels._unrotate_tile, signature, constants_of), target=target)
    for kernel, blocks in (
        (kernels._forward_tile, launch.forward),
        (kernels._by_query_tile, launch.by_query),
        (kernels._by_key_tile, launch.by_key),
    ):
        query = torch.empty(1, 4, width)
        _, constants = kernels._arguments(query, query[:, :2], query[:, :2], (1.0, 0.0, 1.0), blocks)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        constants_of = {(names.index(name),): value for name, value in constants.items()}
        made = triton.compile(ASTSource(kernel, signature, constants_of), target=target, options=options)
        assert made.metadata.shared <= memory, (kernel, blocks)
