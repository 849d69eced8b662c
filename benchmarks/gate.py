"""What the gate says of right runs and of wrong ones: ``python -m benchmarks.gate``.

A run's parts are put together once per dtype; then, for every seed, other prompts are sampled and the gate's checks are
made as they are (those that need samples), and again with one mistake at a time:

- ``temperature``: the trainer divides its logits by 0.8 times the temperature that is sampled with;
- ``layer``: one decoder layer of the trainer, another for every seed, is not the engine's: 1 % of its weights have
  another sign, which is a fifth of its norm;
- ``system``: the trainer's prompts lack the system turn of the chat template;
- ``top_p``: the engine keeps 0.9 of the mass, and the trainer does not know;
- ``stale``: that layer is left out of the gate's own push.

The first three are on the trainer's side, where a seed costs a few forward passes and no new engine: which of the two
is wrong changes the sign of a gap and little else. Every case ends at the first check that refuses it, as a run does.
``--layers 4 8`` asks the same of random weights, in the shape of the preset's model with so many decoder layers: a
bound that comes from the rounding of the policy at hand must hold for any.

The table has how many seeds were refused, and how near the figures came to their bounds, which are 1: a right run must
stay below and has the greatest of all seeds; a mistake must have one figure above and has the smallest of these.

Measured with vLLM on a CPU in bfloat16, on 8 responses of 64 to 128 tokens; ``healthy`` is the largest of all seeds,
the others are the smallest:

=============================================  =======  =========  ==============  ===============  =========
figure (what is allowed)                       healthy  one layer  no system turn  T 0.8 against 1  top-p 0.9
=============================================  =======  =========  ==============  ===============  =========
mean gap / rounding (4), SmolLM2                 1.6       6.0          5.0             9.5            3.3
mean square / mean square (16), SmolLM2          2.8       40           27              66             7.9
mean gap / rounding, embedded policy             1.9       20           -               22             5.8
the same, random weights of 4 to 30 layers       1.3       6.5          -               4.7            1.5
slope (0.05), SmolLM2                           0.002       -           -              0.185            -
slope, all others                               0.009       -           -              0.176            -
1 - mean ratio (0.02), SmolLM2                  0.005       -           -               -             0.089
the same, random weights (0.02 to 0.05)         0.010       -           -               -             0.091
=============================================  =======  =========  ==============  ===============  =========

One layer: 1 % of its weights have another sign. SmolLM2-135M-Instruct: 10 seeds (``python -m benchmarks.gate``), the
embedded policy: 4, random weights: 2 for each of several depths, widths and vocabularies. Their rounding was 0.03 nats,
0.001, and 0.03 to 0.12.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from transformers import AutoConfig, AutoModelForCausalLM

from sota_grpo import keys
from sota_grpo.assembly.build import build
from sota_grpo.assembly.compose import compose
from sota_grpo.config import Config, model_name
from sota_grpo.config.validators import validate
from sota_grpo.functional import kl_k3
from sota_grpo.policy.causal import base_model
from sota_grpo.policy.load import load_tokenizer, resolve_model_path, save_hf
from sota_grpo.rl.table import RowTable
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training import gate
from sota_grpo.training.gate import (
    MARGIN,
    RATIO,
    SLOPE,
    Check,
    TrainingComponents,
    allowed_gaps,
    mean_ratio,
    temperature_slope,
)

DTYPES = {
    "fp32": ["train.precision=fp32", "inference_model.torch_dtype=float32"],
    "bf16": ["train.precision=bf16", "inference_model.torch_dtype=bfloat16"],
}
CASES = ("healthy", "temperature", "layer", "system", "top_p", "stale")
AGREEMENT = (
    gate.engine_and_trainer_have_one_temperature,
    gate.engine_and_trainer_agree,
    gate.first_ratio_is_one,
)
PER_TOKEN = (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.LOG_PROBS)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when no right run was refused and every wrong one was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", default="smollm_ifeval")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with, where the ones before it are done")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="random models of so many layers instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure of every seed")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    options = parser.parse_args(argv)
    out, measured = sys.stdout, []
    logging.getLogger("sota_grpo.training.gate").setLevel(logging.CRITICAL)  # its warnings are what is counted here
    for layers, dtype in itertools.product(options.layers or [None], options.dtypes):
        config = compose(options.config_name, [*options.overrides, *DTYPES[dtype]])
        validate(config)
        config.logging.wandb = "disabled"
        with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
            if layers is not None:
                config.model.name = random_model(model_name(config), layers, Path(folder))
            for one in measure(config, range(options.first, options.seeds), options.cases):
                measured.append({"dtype": dtype if layers is None else f"{dtype}, {layers} layers", **one})
                print(line(measured[-1]), file=out, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(measured, indent=1))
    print(table(measured))
    return int(any((one["case"] == "healthy") == (one["refused"] is not None) for one in measured))


def random_model(name: str, layers: int, folder: Path) -> str:
    """Random weights in the shape of model ``name`` with ``layers`` decoder layers, its tokenizer, in ``folder``."""
    shape = AutoConfig.from_pretrained(resolve_model_path(name))
    shape.num_hidden_layers = layers
    torch.manual_seed(layers)
    save_hf(AutoModelForCausalLM.from_config(shape, dtype=torch.float32), load_tokenizer(name), folder)
    return str(folder)


def measure(config: Config, seeds: Sequence[int], cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every case of every seed: the check that refused it (None: none did), its sentences, figures and seconds."""
    with tempfile.TemporaryDirectory() as folder, closing(build(config, Path(folder))) as parts:
        parts.weight_sync.send(version=parts.learner.version)
        for seed in seeds:
            components = replace(parts, rows=RowTable(0, {}))
            first = 4 * seed % max(1, len(components.task.train) - 4)
            components.task = SimpleNamespace(train=list(components.task.train[first : first + 4]))  # type: ignore[assignment]
            components.seed = seed
            components.rows = gate.graded_rows(components)
            for case in cases:
                began = time.perf_counter()
                with CHANGES[case](components, seed) as (changed, checks):
                    made = judged(changed, checks)
                    figures = {} if case == "stale" else shares(changed)
                refused = next((check.name for check in made if not check.passed), None)
                sentences = {check.name: check.sentence for check in made}
                seconds = {check.name: check.seconds for check in made} | {"case": time.perf_counter() - began}
                yield {
                    "seed": seed, "case": case, "refused": refused, "figures": figures, "said": sentences,
                    "seconds": seconds,
                }  # fmt: skip


def judged(components: TrainingComponents, checks: Sequence[Callable[[TrainingComponents], Check]]) -> list[Check]:
    """The outcomes up to the first that refuses, with their seconds."""
    made: list[Check] = []
    for check in checks:
        began = time.perf_counter()
        made.append(replace(check(components), seconds=0.0))
        made[-1] = replace(made[-1], seconds=time.perf_counter() - began)
        if not made[-1].passed:
            break
    return made


def shares(components: TrainingComponents) -> dict[str, float]:
    """How near each figure of the rows is to its bound, which is 1."""
    gaps, allowed = components.gaps, allowed_gaps(components)
    slope, ratio = temperature_slope(gaps, *components.measured), mean_ratio(gaps)
    return {
        "temperature": abs(slope.value) / (SLOPE + MARGIN * slope.error),
        "gap": float(gaps.abs().mean()) / allowed.gap,
        "kl": 2 * float(kl_k3(torch.zeros_like(gaps), gaps).mean()) / allowed.square,
        "mean ratio": abs(ratio.value - 1) / (RATIO + MARGIN * ratio.error),
    }


Changed = Iterator[tuple[TrainingComponents, Sequence[Callable[[TrainingComponents], Check]]]]


@contextmanager
def healthy(components: TrainingComponents, seed: int) -> Changed:
    yield components, [check for check in gate.CHECKS if check not in gate.WITHOUT_SAMPLES]


@contextmanager
def temperature(components: TrainingComponents, seed: int) -> Changed:
    scorer = _policy(components).scorer
    own = scorer.temperature
    scorer.temperature = 0.8 * own
    try:
        yield replace(components), AGREEMENT
    finally:
        scorer.temperature = own


@contextmanager
def layer(components: TrainingComponents, seed: int) -> Changed:
    learner, prefix = components.learner, f"layers.{_layer(components, seed)}."
    learner.perturb([name for name in learner.trainable_names() if prefix not in name])
    try:
        yield replace(components), AGREEMENT
    finally:
        learner.restore()


@contextmanager
def system(components: TrainingComponents, seed: int) -> Changed:
    yield (
        replace(
            components, rows=[_without_system_turn(row, components.rollouts.env.tokenizer) for row in components.rows]
        ),
        AGREEMENT,
    )


@contextmanager
def top_p(components: TrainingComponents, seed: int) -> Changed:
    changed = replace(components, sampling=replace(components.sampling, top_p=0.9), rows=RowTable(0, {}))
    changed.rows = gate.graded_rows(changed).without(keys.SUPPORT_IDS, keys.SUPPORT_COUNTS)
    yield changed, AGREEMENT


@contextmanager
def stale(components: TrainingComponents, seed: int) -> Changed:
    """The push of the gate leaves one layer as it was; afterwards the engine has the right weights again."""
    push, prefix = components.weight_sync, f"layers.{_layer(components, seed)}."
    old = {name: weight.clone() for name, weight in push.policy_weights() if prefix in name}
    weights = lambda: [(name, old.get(name, weight)) for name, weight in push.policy_weights()]  # noqa: E731
    yield (
        replace(components, weight_sync=EngineWeightSync(weights, push.engine, push.make_room)),
        [gate.pushed_weights_landed],
    )


CHANGES = {one.__name__: one for one in (healthy, temperature, layer, system, top_p, stale)}


def _policy(components: TrainingComponents) -> Any:
    return components.learner.policy  # type: ignore[attr-defined]


def _layer(components: TrainingComponents, seed: int) -> int:
    """Another layer for every seed, spread over all."""
    return 7 * seed % len(base_model(_policy(components).model).get_decoder().layers)


def _without_system_turn(row: TensorDictBase, tokenizer: Any) -> TensorDictBase:
    """The row without what precedes the second turn of its prompt."""
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    turns = (row.get(keys.FULL_TOKENS) == begin).nonzero().flatten()
    cut = row.copy()
    for key in PER_TOKEN:
        cut.set(key, row.get(key)[int(turns[1]) :])
    return cut


def line(one: dict[str, Any]) -> str:
    """What is printed of a case as soon as it is known."""
    figures = ", ".join(f"{name} {share:.2f}" for name, share in one["figures"].items())
    verdict = f"refused: {one['refused']}" if one["refused"] else "passed"
    seconds = one["seconds"]["case"]
    return f"{one['dtype']} seed {one['seed']} {one['case']:<11} {seconds:5.1f} s  {verdict}" + (
        f" ({figures})" if figures else ""
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line per dtype and case."""
    wide = 2 + max(len(one["dtype"]) for one in found)
    lines = [f"{'dtype':<{wide}}{'case':<13}{'refused':<10}{'nearest to its bound':<22}seconds of the checks"]
    for dtype in dict.fromkeys(one["dtype"] for one in found):
        for case in dict.fromkeys(one["case"] for one in found):
            of = [one for one in found if (one["dtype"], one["case"]) == (dtype, case)]
            refused = f"{sum(one['refused'] is not None for one in of)} of {len(of)}"
            greatest = [max(one["figures"].items(), key=lambda item: item[1]) for one in of if one["figures"]]
            pick = max if case == "healthy" else min
            name, share = pick(greatest, key=lambda item: item[1]) if greatest else ("", float("nan"))
            near = f"{share:.2f} ({name})" if greatest else "-"
            seconds = sum(sum(s for name, s in one["seconds"].items() if name != "case") for one in of) / len(of)
            lines.append(f"{dtype:<{wide}}{case:<13}{refused:<10}{near:<22}{seconds:.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
