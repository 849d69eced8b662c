"""The command line that ``sota-grpo export --to verl`` writes, composed over verl's config where it is there.

What begins with + is added to verl's config.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from sota_grpo.migration.verl import VERSION, Facts, Report, verl_options, verl_script
from tests.config.test_config import ALGORITHMS, PRESETS, composed
from tests.unit.test_migration import arguments_of

pytestmark = pytest.mark.bench

FACTS = Facts("/models/with space/it's", "10-00-00", longest_prompt=100, num_train=1000)
VARIANTS = {
    "plain": (),
    "adapter": ("train_model.lora.enabled=true", "train.precision=fp32", "optimizer.eps=1e-5"),
    "corrected": ("algorithm.correction=sequence", "algorithm.correction_mode=mask", "policy.kl_coef=0.1",
                  "train.kl_coef_in_loss=false", "algorithm.overlong_buffer=16", "train.epochs=2"),
    "logged": ("logging.wandb=online",),
}  # fmt: skip

#: Every preset, every algorithm, and every variant of the two algorithms that it treats differently.
CASES = dict.fromkeys((
    *((name, "grpo", "plain") for name in PRESETS),
    *(("grpo_gsm8k", algorithm, "plain") for algorithm in ALGORITHMS),
    *(("grpo_gsm8k", algorithm, variant) for algorithm in ("grpo", "rloo") for variant in VARIANTS),
))  # fmt: skip


def verls_config() -> Path:
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def command_lines() -> list[tuple[dict[str, Any], Report]]:
    """As few as give each option each value that a case gives it; the report is the last case's."""
    values: dict[str, list[Any]] = {}
    for name, algorithm, variant in CASES:
        overrides = (f"algorithm={algorithm}", *VARIANTS[variant])
        if algorithm == "rloo" and variant == "corrected":
            overrides = (*overrides, "train.epochs=1")
        options, report = verl_options(composed(name, *overrides), FACTS)
        for option, value in options.items():
            given = values.setdefault(option, [])
            if not any(type(value) is type(other) and value == other for other in given):
                given.append(value)
    lines = range(max(map(len, values.values())))
    return [({option: each[line % len(each)] for option, each in values.items()}, report) for line in lines]


def test_verl_takes_every_option_and_value_that_is_exported(tmp_path: Path) -> None:
    import hydra

    folder = verls_config()
    for options, report in command_lines():
        words = arguments_of(verl_script(options, report, [VERSION]), tmp_path)
        with hydra.initialize_config_dir(str(folder), version_base=None):
            actual = hydra.compose("ppo_trainer", overrides=words[2:])
        for option, value in options.items():
            if not (isinstance(value, str) and value.startswith("$HERE")):
                read = OmegaConf.select(actual, option.lstrip("+"))
                assert (OmegaConf.to_container(read) if OmegaConf.is_config(read) else read) == value, option
