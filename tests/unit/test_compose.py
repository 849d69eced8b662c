"""A config composed outside Hydra's own entry: equal to the script's, and every mistake one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from sota_grpo.assembly.compose import anchor_paths, compose, load_config, preset_names
from sota_grpo.config import register
from sota_grpo.config.spelling import NOT_HERE, THEIR_VALUES, THEIRS, walk
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.run.entry import CONFIG_DIR


@pytest.mark.parametrize("name", ["grpo_cpu", "smollm_speedrun"])
def test_a_preset_is_what_hydra_composes(name: str) -> None:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        expected = OmegaConf.to_object(hydra_compose(name, overrides=["seed=3", "algorithm=dapo"]))
    assert compose(name, ["seed=3", "algorithm=dapo", "hydra.run.dir=anywhere"]) == expected


def test_a_hydra_at_work_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose("grpo_cpu")
        assert hydra_compose("mine").answer == 42
        with pytest.raises(UserError):
            compose("grpo_cpu", ["nothing=1"])
        assert hydra_compose("mine").answer == 42
    assert not GlobalHydra.instance().is_initialized()


def test_a_group_precedes_the_options_in_it_whatever_their_order(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mode: sync")
    overrides = ["algorithm.clip_high=0.9", "algorithm=dapo"]
    actual = [load_config(tmp_path, order) for order in (overrides, overrides[::-1])] + [compose("grpo_cpu", overrides)]
    assert [(config.algorithm.name, config.algorithm.clip_high) for config in actual] == [("dapo", 0.9)] * 3


def test_what_a_config_names_here_it_names_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.jsonl", "reward.py", "model/config.json", "tiny/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    overrides = [
        "model.name=model",
        "ref_model.name=model",
        "env.dataset_path=train.jsonl",
        "env.eval_path=org/table",
        "reward.path=./reward.py",
    ]
    config = compose("grpo_cpu", overrides)
    embedded = compose("grpo_cpu", ["model.name=tiny", "ref_model.name=tiny"])
    monkeypatch.chdir(tmp_path)
    anchor_paths(config)
    anchor_paths(embedded)
    assert (config.model.name, config.env.dataset_path) == (str(tmp_path / "model"), str(tmp_path / "train.jsonl"))
    assert (config.env.eval_path, config.reward.path) == ("org/table", str(tmp_path / "reward.py"))
    assert config.ref_model.name == config.model.name
    assert (embedded.model.name, embedded.ref_model.name) == ("tiny", "tiny")


def test_a_run_that_was_moved_finds_what_was_passed_to_it(tmp_path: Path) -> None:
    (tmp_path / "now" / "inputs").mkdir(parents=True)
    (tmp_path / "now" / "inputs" / "train.jsonl").touch()
    before = tmp_path / "before"
    paths = f"dataset_path: {before}/inputs/train.jsonl, eval_path: {before}/inputs/eval.jsonl"
    (tmp_path / "now" / "config.yaml").write_text(f"env: {{{paths}}}\nreward: {{path: {before}/train.jsonl}}")
    config = load_config(tmp_path / "now", trust=True)
    assert config.env.dataset_path == str(tmp_path / "now" / "inputs" / "train.jsonl")
    assert config.env.eval_path == f"{before}/inputs/eval.jsonl"  # it is not there either
    assert config.reward.path == f"{before}/train.jsonl"  # it was not passed


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("++foo=1", "There is no option foo."),
        ("beta=0.04", "There is no option beta; here it is policy.kl_coef."),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "here it is algorithm.clip_low and algorithm.clip_high."),
        ("env.dataset_path=a=b", "write OPTION=VALUE; a value that contains =, { or [ needs quotes."),
        ("grpo_cpu", "grpo_cpu is a preset; give it as --config-name grpo_cpu."),
        ("env.repeats=4,8", "env.repeats=4,8"),
        ("env.repeats=${nobody}", "nobody"),
        ("+=[]", "The override +=[] has no option name; write OPTION=VALUE."),
    ],
)
def test_a_mistyped_override_is_reported_in_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        compose("grpo_cpu", [override])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    hidden = refused.value.__suppress_context__ or refused.value.__context__ is None
    assert hidden, "Hydra's own page of errors is not shown above it"


def test_a_config_of_another_kind_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not of a run: .*; use one of grpo_cpu, "):
        compose("algorithm/dapo")
    for mixture, sentence in (
        ("{a: {dataset: [gsm8k]}}", r"env.mixture.a.dataset=\['gsm8k'\] is not one of"),
        ("{'a[0]': {dataset: gsm8k}}", r"env.mixture.a\[0\]: the name of a task"),
    ):
        (tmp_path / "config.yaml").write_text(f"env: {{mixture: {mixture}}}")
        with pytest.raises(UserError, match=sentence):
            validate(load_config(tmp_path))


def test_hints_name_options_that_there_are() -> None:
    ours = {option for option, _, _ in walk()} | {"algorithm", "engine", "hydra.run.dir"}
    for theirs, hint in [*THEIRS.items(), *THEIR_VALUES.items()]:
        named = re.findall(r"[a-z_.]+(?==)|[a-z_]+\.[a-z_.1-2]+", hint)
        assert set(named) <= ours, (theirs, hint)
        assert named, theirs
    both = ours & {name for name in [*THEIRS, *NOT_HERE] if "." not in name}
    assert not both, "an option of ours must not be explained away"
    assert not THEIRS.keys() & NOT_HERE.keys()
    presets = {one.removeprefix("algorithm=") for one in THEIR_VALUES.values() if one.startswith("algorithm=")}
    assert presets <= {*preset_names(CONFIG_DIR / "algorithm")}
