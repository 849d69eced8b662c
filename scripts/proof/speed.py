"""Stage 3: the learner's speed at the shapes of published models, its profile, and others beside it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import trainer
from benchmarks.trainer_work import Case
from scripts.proof import Finding, Options

KEPT = ("step_s", "packed_tokens_per_s", "mfu", "peak_gib", "packed_tokens", "launches", "kernels_ms", "idle")


def _run(options: Options, against: list[str], profiled: bool = False, **how: object) -> Iterator[Finding]:
    small: dict[str, object] = {}
    if options.small:
        small = {"shape": "tiny", "tokens": 600, "prompt": 40, "response": 30}
    if options.small and "trl" in against:  # an interpreter takes seconds for each of its kernels
        small |= {"tokens": 60, "prompt": 10, "response": 4, "group": 4}
    precision = "bf16" if options.device == "cuda" else "fp32"
    case = Case(**{"device": options.device, "precision": precision, **how, **small})  # type: ignore[arg-type]
    repeat = 1 if options.small else 5
    for result in trainer.run(case, against=against, measure_peak=options.small, repeat=repeat, profiled=profiled):
        shape_options = {name: value for name, value in how.items() if name != "shape"}
        named = f"{case.shape} {shape_options} {result['who']}"
        yield Finding(named, None, {name: result[name] for name in KEPT if name in result})


GSM8K = {"tokens": 32768, "prompt": 128, "response": 256, "ragged": 0.8, "group": 16}


def layers(options: Options) -> Iterator[Finding]:
    """Joined layers beside transformers' compiled ones, Qwen3-0.6B; an H100 gave the latter 210 and 225 ms."""
    yield from _run(options, ["transformers"], profiled=True, shape="qwen3-0.6b")
    yield from _run(options, ["transformers"], shape="qwen3-0.6b", micro_tokens=4096)
    yield from _run(options, [], shape="qwen3-0.6b", **GSM8K)


def large_model(options: Options) -> Iterator[Finding]:
    """Qwen2.5-1.5B; an H100 gave transformers' layers 356 ms."""
    yield from _run(options, ["transformers"], shape="qwen2.5-1.5b")
    yield from _run(options, [], shape="qwen2.5-1.5b", checkpointing=True)


def micro_batches(options: Options) -> Iterator[Finding]:
    """Larger micro-batches; parameters in bfloat16."""
    yield from _run(options, [], shape="qwen3-0.6b", tokens=40960)
    yield from _run(options, [], shape="qwen3-0.6b", dtype="bfloat16")


def beside_trl(options: Options) -> Iterator[Finding]:
    """TRL on rows of 1,024 + 1,024 tokens and of GSM8K's lengths; an H100 gave ours 217, 218 and 362 ms."""
    yield from _run(options, ["trl"], shape="qwen3-0.6b")
    yield from _run(options, ["trl"], shape="qwen3-0.6b", **GSM8K)
    yield from _run(options, ["trl"], shape="qwen2.5-1.5b")


CHECKS = [layers, large_model, beside_trl, micro_batches]
