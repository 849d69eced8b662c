"""Stage 1: every kernel against float64, and whole policies against the CPU."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from benchmarks.trainer_work import PAD
from scripts.proof import Finding, Options
from sota_grpo import keys
from sota_grpo.functional.log_probs import chunked_log_probs
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.sharding import Ranks, shard
from sota_grpo.policy.shared_prompt import Layout, _plain, pack, shared_attention
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.training.learner import Learner

VOCAB = 8192


def synchronised(options: Options) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``|found - expected| / |expected|``; NaN is as far as it gets."""
    gap = float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu())
    return math.inf if math.isnan(gap) else gap


def versions(options: Options) -> Iterator[Finding]:
    """What is here."""
    import transformers

    figures: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if options.device == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        figures |= {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2),
            "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
            "cuda": torch.version.cuda,
        }
    yield Finding("versions", None, figures)


def rates(options: Options) -> Iterator[Finding]:
    """Copies and products: the two ceilings."""
    size = 256 if options.small else 8192
    numbers = torch.randn(2**16 if options.small else 2**30, device=options.device)
    other = torch.empty_like(numbers)
    left, right = (torch.randn(size, size, device=options.device, dtype=torch.bfloat16) for _ in range(2))

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            began = synchronised(options)
            work()
            times.append(synchronised(options) - began)
        return statistics.median(times[3:])

    copy_s, product_s = seconds(lambda: other.copy_(numbers)), seconds(lambda: left @ right)
    yield Finding(
        "ceilings",
        None,
        {"copy_tb_per_s": 2 * 4 * numbers.numel() / copy_s / 1e12, "bf16_tflops": 2 * size**3 / product_s / 1e12},
    )


def layout_of(groups: list[tuple[int, list[int]]], device: str) -> tuple[Layout, int]:
    """The layout of groups, each a prompt length and its responses' lengths; and its packed tokens."""
    rows = [(index, prompt, length) for index, (prompt, responses) in enumerate(groups) for length in responses or [0]]
    width = max(prompt + length for _, prompt, length in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    real, mask = (torch.zeros(len(rows), width, dtype=torch.bool) for _ in range(2))
    for row, (group, prompt, length) in enumerate(rows):
        tokens[row, :prompt] = 100 + group
        real[row, : prompt + length] = True
        mask[row, prompt : prompt + length] = True
    layout = pack(tokens, real, mask).to(torch.device(device))
    return layout, layout.positions.shape[1]


GROUPS = {
    "ragged": [(70, [130, 1, 64, 257]), (128, [33, 33, 33]), (5, [1, 1]), (300, [2])],
    "prompts alone": [(64, []), (129, []), (17, [40])],
    "one response each": [(33, [200]), (90, [31])],
}


def attention(options: Options) -> Iterator[Finding]:
    """The packed attention, forward and backward, against plain attention in float64."""
    heads = [(12, 2, 128), (16, 8, 128), (8, 8, 64), (14, 2, 64)]
    for dtype, close in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)):
        worst: dict[str, float] = {}
        for query_heads, key_heads, width in heads[:1] if options.small else heads:
            for groups in GROUPS.values():
                for window in (None, 50):
                    measured = attention_errors(options, groups, (query_heads, key_heads, width), window, dtype)
                    for part, error in measured.items():
                        worst[part] = max(worst.get(part, 0.0), error)
        passed = all(error < close for error in worst.values())
        yield Finding(f"packed attention, {dtype}", passed, {**worst, "allowed": close})


def attention_errors(
    options: Options, groups: Any, heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> dict[str, float]:
    query_heads, key_heads, width = heads
    layout, length = layout_of(groups, options.device)
    shapes = [(1, count, length, width) for count in (query_heads, key_heads, key_heads)]
    inputs = [torch.randn(shape, device=options.device).to(dtype).requires_grad_() for shape in shapes]
    out, _ = shared_attention(
        torch.nn.Module(), *inputs, None, layout=layout, tables=layout.tables, sliding_window=window
    )
    pull = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, pull)
    exact_layout, _ = layout_of(groups, "cpu")
    exact = [each.detach().cpu().double().requires_grad_() for each in inputs]
    used = window if window and window < exact_layout.longest else None
    expected = _plain(*exact, exact_layout, width**-0.5, used, None).transpose(1, 2)
    wanted = torch.autograd.grad(expected, exact, pull.cpu().double())
    parts = zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), (expected.detach(), *wanted))
    return {name: relative(measured, reference) for name, measured, reference in parts}


def kernels_in_use(options: Options) -> Iterator[Finding]:
    """The profile of one attention call names our kernels."""
    layout, length = layout_of(GROUPS["ragged"], options.device)
    cases = [
        torch.randn(1, count, length, 128, device=options.device).bfloat16().requires_grad_() for count in (12, 2, 2)
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        out, _ = shared_attention(torch.nn.Module(), *cases, None, layout=layout, tables=layout.tables)
        out.sum().backward()
        synchronised(options)
    names = {event.key[:60] for event in seen.key_averages() if event.key.endswith("_tile")}
    yield Finding("kernels of packed attention", options.small or len(names) == 4, {"kernels": sorted(names)})


def head(options: Options) -> Iterator[Finding]:
    """Log-probs, entropies and gradients of the head against the full logits in float64."""
    rows, width, vocab = (33, 32, 700) if options.small else (700, 512, 20_011)
    for dtype, close in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)):
        cases = {
            "plain": {},
            "frozen": {"frozen": True},
            "entropy": {"entropy_grad": True},
            "bias": {"bias": True},
            "softcap": {"softcap": 5.0},
        }
        for name, case in cases.items():
            worst = head_errors(options, (rows, width, vocab), dtype, **case)
            gaps = {"log_prob": worst.pop("log_prob"), "entropy": worst.pop("entropy")}
            # logits are summed and kept in float32 on CUDA; rounded to bfloat16 their log-probs would be 8e-3 off
            exact = 1e-4 if options.device == "cuda" else 10 * close
            passed = max(gaps.values()) < exact and all(error < close for error in worst.values())
            yield Finding(f"head, {name}, {dtype}", passed, {**gaps, **worst, "allowed": close})


def head_errors(
    options: Options,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    frozen: bool = False,
    entropy_grad: bool = False,
    bias: bool = False,
    softcap: float | None = None,
) -> dict[str, float]:
    rows, width, vocab = shape
    hidden = (torch.randn(rows, width, device=options.device) * 2).to(dtype)
    hidden[0] *= 8  # one that is certain
    weight = (torch.randn(vocab, width, device=options.device) * width**-0.5).to(dtype)
    added = torch.randn(vocab, device=options.device, dtype=torch.float32) if bias else None
    targets = torch.randint(0, vocab, (rows,), device=options.device)
    pulls = torch.randn(2, rows, device=options.device)
    pulls[:, 1::5] = 0.0
    leaves = [hidden.requires_grad_(), weight.requires_grad_(not frozen)]
    measured = chunked_log_probs(
        hidden, weight, targets, bias=added, temperature=0.8, softcap=softcap, with_entropy=True,
        entropy_grad=entropy_grad, logits_bytes=60_000 if options.small else 40_000_000,
    )  # fmt: skip
    loss = (pulls[0] * measured[0]).sum()
    loss = loss + (pulls[1] * measured[1]).sum() if entropy_grad and measured[1] is not None else loss
    grads = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = exact[0] @ exact[1].t() + (0 if added is None else added.double())
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    log_p = logits.log_softmax(-1)
    own, entropy = log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    wanted = torch.autograd.grad(
        (pulls[0] * own).sum() + (entropy_grad * pulls[1] * entropy).sum(), exact[: len(grads)]
    )
    assert measured[1] is not None
    return {
        "log_prob": float((measured[0].double() - own).abs().mean()),
        "entropy": float((measured[1].double() - entropy).abs().mean()),
        **{f"d_{name}": relative(a, b) for name, a, b in zip(("hidden", "weight"), grads, wanted)},
    }


def engine_product(options: Options) -> Iterator[Finding]:
    """The embedded engine's product of half-precision batches with float32 sums."""
    left, right = (torch.randn(8, 64, 64, device=options.device).bfloat16() for _ in range(2))
    if options.device == "cpu":
        return
    measured = torch.bmm(left, right, out_dtype=torch.float32)
    yield Finding("bmm, float32 sums", (gap := relative(measured, left.double() @ right.double())) < 1e-5, {"gap": gap})


def model(options: Options, family: str, *, tied: bool) -> torch.nn.Module:
    """Eight layers (two where small) with weights that are not tiny, on the CPU."""
    torch.manual_seed(0)
    size, layers = (64, 2) if options.small else (512, 8)
    extra = {"head_dim": size // 4} if family == "qwen3" else {}
    config = CONFIG_MAPPING[family](
        vocab_size=VOCAB if not options.small else 512, hidden_size=size, intermediate_size=3 * size,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.04, tie_word_embeddings=tied, **extra,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def rows_of(options: Options, groups: int = 4, size: int = 4) -> list[TensorDict]:
    """Ragged rows of random tokens, as a source gives them."""
    vocab, longest = (512, 12) if options.small else (VOCAB, 200)
    stream = torch.Generator().manual_seed(1)
    measured = []
    for group in range(groups):
        length = int(torch.randint(3, longest, (), generator=stream))
        prompt = torch.randint(3, vocab, (length,), generator=stream)
        for sample in range(size):
            response = torch.randint(
                3, vocab, (int(torch.randint(1, longest, (), generator=stream)),), generator=stream
            )
            tokens, is_response = torch.cat([prompt, response]), torch.arange(length + len(response)) >= length
            near = -math.log(vocab) + 0.1 * torch.randn(len(tokens), generator=stream)
            measured.append(
                TensorDict(
                    {
                        keys.FULL_TOKENS: tokens,
                        keys.ATTENTION_MASK: torch.ones_like(is_response),
                        keys.ASSISTANT_MASK: is_response,
                        keys.LOG_PROBS: torch.where(is_response, near, 0.0),
                        keys.ADVANTAGE: torch.randn(1, 1, generator=stream),
                        keys.GROUP_ID: torch.tensor(group),
                        keys.SAMPLE_ID: torch.tensor(sample),
                        keys.TRUNCATED: torch.tensor([False]),
                    }
                )
            )
    return measured


def learner_of(net: torch.nn.Module, precision: str, folder: str, *, ranks: Ranks | None = None, **how: Any) -> Learner:
    """A learner of ``net``; with ``ranks`` sharded over them, whatever their number."""
    policy = CausalPolicy(net, **how)
    if ranks is not None:
        shard(policy, ranks)
    settings = LearnerSettings(
        lr=1e-4, total_steps=10, optim_batch_size=16, micro_batch_tokens=2000, precision=precision
    )
    loss = GRPOLoss(policy, entropy_bonus=False)
    return Learner(policy, loss, settings, pad_token_id=PAD, dump_dir=Path(folder), ranks=ranks)


def flattened(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Two gradients as one vector each, in one order."""
    return [torch.cat([each[name].double().cpu().flatten() for name in exact]) for each in (found, exact)]


def policies(options: Options) -> Iterator[Finding]:
    """Log-probs and gradients of whole policies against the CPU in float32; packed against padded; compiled too.

    In bf16 they may be a quarter further off than bf16 on the CPU is: how far depends on the weights, 2.4 % here.
    """
    for family, tied in (("qwen2", False), ("qwen3", True)):
        net, rows = model(options, family, tied=tied), rows_of(options)
        with tempfile.TemporaryDirectory() as folder:
            cpu = learner_of(copy.deepcopy(net), "fp32", folder)
            exact = cpu.gradient(rows, token_budget=2000)
            log_probs = torch.cat([values for _, values in cpu.scored(rows)])
            mask = torch.cat([row[keys.ASSISTANT_MASK] for row in rows])
            halved = learner_of(copy.deepcopy(net), "bf16", folder)  # what half precision alone does to this policy
            rounded = relative(*flattened(halved.gradient(rows, token_budget=2000), exact))
            shift = float((torch.cat([values for _, values in halved.scored(rows)]) - log_probs)[mask].abs().mean())
            cases = [("fp32", True, False), ("bf16", True, False), ("bf16", True, True), ("bf16", False, False)]
            seen: dict[tuple[bool, bool], torch.Tensor] = {}
            for precision, packed, fused in cases:
                there = copy.deepcopy(net).to(options.device)
                learner = learner_of(there, precision, folder, shared_prompt=packed, fused=fused)
                name = f"{family}, {precision}, {'packed' if packed else 'padded'}{', compiled' if fused else ''}"
                measured = learner.gradient(rows, token_budget=2000)
                own = torch.cat([values for _, values in learner.scored(rows)])
                if precision == "bf16":
                    seen[packed, fused] = own[mask]
                split = learner.gradient_gap(rows, (2000, 1)).relative
                allowed = 1e-4 if precision == "fp32" else 1.25 * rounded
                gap, mean = relative(*flattened(measured, exact)), float((own - log_probs)[mask].abs().mean())
                figures = {"gradient": gap, "log_prob_gap": mean, "split": split, "allowed": allowed}
                landed = learner.policy.shared_prompt == packed
                yield Finding(name, gap < allowed and split < allowed and landed, figures | {"as_asked": landed})
                if packed and not fused:
                    before = [parameter.detach().clone() for parameter in learner.parameters]
                    learner.perturb()
                    learner.restore()
                    same = all(torch.equal(a, b) for a, b in zip(before, learner.parameters))
                    yield Finding(f"{name}: perturb and restore", same, {})
            for name, other in (("padded", (False, False)), ("compiled", (True, True))):
                gap = float((seen[True, False] - seen[other]).abs().mean())
                figures = {"mean_gap": gap, "allowed": 1.25 * shift}
                yield Finding(f"{family}, bf16: packed against {name}", gap < 1.25 * shift, figures)


def repeats(options: Options) -> Iterator[Finding]:
    """The same gradient twice has the same bits."""
    net, rows = model(options, "qwen3", tied=True), rows_of(options)
    with tempfile.TemporaryDirectory() as folder:
        learner = learner_of(
            net.to(options.device), "bf16", folder, fused=options.device == "cuda" and not options.small
        )
        first, again = (learner.gradient(rows, token_budget=2000) for _ in range(2))
    unequal = [name for name, value in first.items() if not torch.equal(value, again[name])]
    yield Finding("a gradient repeats bit for bit", not unequal, {"unequal": unequal[:5]})


CHECKS = [versions, rates, attention, kernels_in_use, head, engine_product, policies, repeats]
