"""The config cannot lie: typed, documented, validated, read."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from sota_grpo import validators
from sota_grpo.config import Config, register, walk
from sota_grpo.validators import ConfigError, validate

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "config").glob("*.yaml"))
ALGORITHMS = sorted(path.stem for path in (ROOT / "config" / "algorithm").glob("*.yaml"))


def composed(name: str = "grpo_cpu", *overrides: str) -> Config:
    register()
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return OmegaConf.to_object(compose(name, overrides=list(overrides)))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_composes_and_keeps_the_rules(name: str) -> None:
    validate(composed(name))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_stay_short(name: str) -> None:
    assert len((ROOT / "config" / f"{name}.yaml").read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_composes_under_its_own_name(name: str) -> None:
    config = composed("grpo_cpu", f"algorithm={name}")
    validate(config)
    assert config.algorithm.name == name


def test_the_seven_named_algorithms_are_there() -> None:
    assert set(ALGORITHMS) == {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"}


@pytest.mark.parametrize(
    "override",
    [
        "env.dataset=arithmetic",
        "env.num_envs=16",
        "env.repeats=4",
        "model.name=tiny",
        "optimizer.lr=2e-5",
        "optimizer.weight_decay=0.01",
        "train.total_dialog_turns=1024",
        "train.optim_batch_size=64",
        "train.checkpoint_frequency=5",
        "policy.kl_coef=0.01",
        "inference_model.gpu_memory_utilization=0.4",
        "train_model.num_devices=1",
        "ref_model.devices=[2]",
        "inference_model.devices=[4]",
    ],
)
def test_reference_keys_work(override: str) -> None:
    key, value = override.split("=")
    found = OmegaConf.select(OmegaConf.structured(composed("grpo_gsm8k", override)), key)
    assert found == OmegaConf.create({"x": OmegaConf.from_dotlist([f"x={value}"]).x}).x


@pytest.mark.parametrize("override", ["env.num_env=8", "trian.epochs=2", "algorithm.clip=0.2"])
def test_unknown_keys_fail(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match=override.split("=")[0].split(".")[-1]):
        composed("grpo_cpu", override)


def test_wrong_types_fail() -> None:
    with pytest.raises(Exception, match="many"):
        composed("grpo_cpu", "env.num_envs=many")


def test_every_field_says_what_it_changes() -> None:
    for name, item, _ in walk():
        assert len(item.metadata["help"].split()) >= 1, name


def test_every_field_is_read_by_the_assembly() -> None:
    """A field that no code reads fails here: its name must be an attribute access in the rooms that see the config."""
    read: set[str] = set()
    for path in [ROOT / "sota_grpo" / "app.py", *(ROOT / "sota_grpo" / "assembly").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    unread = [name for name, _, _ in walk() if name.split(".")[-1] not in read]
    # ``mode`` picks the entry's rules and ``algorithm.name`` labels the run; both are written to the logs as they are
    assert set(unread) <= {"mode"}, unread


BROKEN = [
    ("every_choice_is_one_of_its_values", ["check.mode=maybe"], "strict"),
    ("every_amount_is_positive", ["train.epochs=0"], "train.epochs"),
    ("every_coefficient_is_not_negative", ["policy.kl_coef=-1"], "policy.kl_coef"),
    ("probabilities_are_shares", ["inference_model.gpu_memory_utilization=2"], "gpu_memory_utilization"),
    ("a_collection_is_made_of_whole_groups", ["env.repeats=3"], "env.repeats=3"),
    (
        "a_collection_is_made_of_whole_optimizer_steps",
        ["train.optim_batch_size=96"],
        "train.optim_batch_size=128",
    ),
    ("the_run_has_at_least_one_turn", ["train.total_dialog_turns=64"], "total_dialog_turns=128"),
    ("sampling_is_the_policys_own_distribution", ["inference_model.top_p=0.9"], "top_p=1.0"),
    ("a_group_baseline_has_siblings", ["env.repeats=1"], "env.repeats=2"),
    (
        "dynamic_sampling_has_group_signal",
        ["env.repeats=1", "algorithm=dapo", "algorithm.baseline=none", "algorithm.scale=none"],
        "dynamic_sampling",
    ),
    ("overlong_buffer_fits_the_response", ["algorithm.overlong_buffer=100"], "max_tokens=96"),
    ("devices_are_counted_or_named", ["ref_model.num_devices=1", "ref_model.devices=[0]"], "ref_model"),
    ("the_kl_in_the_loss_has_a_gradient", ["policy.kl_coef=0.1", "algorithm.kl_estimator=k1"], "k2 or k3"),
    ("lockstep_has_no_age", ["train.max_policy_age=1"], "max_policy_age=1"),
    ("difficulty_is_one_to_four", ["env.difficulty=5"], "env.difficulty=5"),
]


@pytest.mark.parametrize(("rule", "overrides", "expected"), BROKEN, ids=[case[0] for case in BROKEN])
def test_each_rule_says_values_and_fix(rule: str, overrides: list[str], expected: str) -> None:
    config = composed("grpo_cpu", *overrides)
    sentence = getattr(validators, rule)(config)
    assert sentence is not None
    assert expected in sentence
    assert re.search(r"[.]$", sentence)
    with pytest.raises(ConfigError):
        validate(config)


def test_every_rule_is_tested() -> None:
    assert {case[0] for case in BROKEN} == {rule.__name__ for rule in validators.RULES}


def test_rules_edit_nothing() -> None:
    config = composed("grpo_cpu")
    before = replace(config)
    validate(config)
    assert config == before
