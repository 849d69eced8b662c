"""A config as verl's options: nothing is dropped in silence, and what is mapped has an effect."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from sota_grpo.config import Config
from sota_grpo.config.spelling import walk, with_options
from sota_grpo.migration.export import model_card, script_name, write_verl
from sota_grpo.migration.verl import (
    FILES,
    Facts,
    ScriptPath,
    example_columns,
    verl_options,
    verl_reward,
    verl_rows,
    verl_script,
    write_parquet,
)
from sota_grpo.rl.records import Example
from sota_grpo.tasks import make_task
from tests.config.test_config import PRESETS, composed

FACTS = Facts("org/model", "demo", longest_prompt=100, num_train=1000)
# a config in which every option is looked at: several steps, a correction, a reference, an adapter
RICH = (
    *("algorithm.correction=token", "algorithm.dual_clip=3.0", "algorithm.overlong_buffer=16", "policy.kl_coef=0.01"),
    *("train_model.lora.enabled=true", "algorithm.aggregation=constant", "optimizer.warmup_steps=4"),
    *("train.checkpoint_frequency=5", "eval.every=3", "train.epochs=2", "algorithm.dynamic_sampling=true"),
)


def config_of(*overrides: str, name: str = "grpo_gsm8k") -> Config:
    return composed(name, *overrides)


def others(config: Config, option: str) -> list[Config]:
    """The same config with other values of one option."""
    item, value = next((item, value) for name, item, value in walk(config) if name == option)
    kind = str(item.type)
    if "int" in kind and "str" in kind:
        values = [1 << 20]
    elif item.metadata["choices"]:
        values = [choice for choice in item.metadata["choices"] if choice != value]
    elif isinstance(value, bool) or (value is None and "bool" in kind):
        values = [not value]
    elif isinstance(value, (int, float)):
        values = [2 * value + (0 if value else 1)]
    elif value is None and "list" in kind:
        values = [[0, 1]]
    elif value is None and ("int" in kind or "float" in kind):
        values = [4]
    elif option == "logging.wandb_kwargs":
        values = [{"project": "another"}]
    else:
        values = ["another"]
    return [with_options(config, {option: other}) for other in values]


def verl_text(config: Config) -> str:
    options, report = verl_options(config, FACTS)
    return json.dumps([options, report.lines()])


STANDS_ELSEWHERE = ("model.name", "model.size", "engine.url")  # the model is a fact beside the config


@pytest.mark.parametrize("overrides", [(), RICH], ids=["preset", "rich"])
def test_an_option_that_is_mapped_has_an_effect(overrides) -> None:
    config = config_of(*overrides)
    plain = verl_text(config)
    for option in sorted(verl_options(config, FACTS)[1].mapped - {*FILES, *STANDS_ELSEWHERE, "eval.avg_at_k"}):
        assert any(verl_text(other) != plain for other in others(config, option)), option


@pytest.mark.parametrize(("name", "overrides"), [*((name, ()) for name in PRESETS), ("grpo_gsm8k", RICH)])
def test_every_option_is_named_in_the_script(name: str, overrides: tuple[str, ...]) -> None:
    """As an option, in a note, among those without a counterpart, or among those of the files."""
    config = config_of(*overrides, name=name)
    _, report = verl_options(config, FACTS)
    comment = "\n".join(report.lines())
    named = report.mapped | {option for option, _, _ in walk(config) if option in comment}
    assert named == {option for option, _, _ in walk(config)}
    assert not set(report.unsupported()) & report.mapped


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "algorithm=grpo",
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=True actor.policy_loss.loss_mode=vanilla "
            "actor.loss_agg_mode=seq-mean-token-mean actor.clip_ratio_c=3.0 "
            "algorithm.rollout_correction.bypass_mode=True "  # our logp_old is the engine's
            "data.train_batch_size=16 actor.ppo_mini_batch_size=16 "  # 128 responses, 8 of each prompt
            "trainer.total_training_steps=800 trainer.total_epochs=13",  # 62 batches of 16 in 1000 prompts
        ),
        (
            "algorithm=dr_grpo inference_model.max_tokens=512",
            "algorithm.norm_adv_by_std_in_grpo=False actor.loss_agg_mode=seq-mean-token-sum-norm "
            "actor.loss_scale_factor=512",
        ),
        (
            "algorithm=dapo",
            "actor.clip_ratio_high=0.28 actor.loss_agg_mode=token-mean algorithm.filter_groups.enable=True "
            "algorithm.filter_groups.metric=score",
        ),
        ("env.num_envs=128", "rollout.max_num_seqs=128"),
        ("inference_model.max_num_seqs=512", "rollout.max_num_seqs=512"),
        (
            "algorithm=cispo",
            "actor.policy_loss.loss_mode=cispo actor.clip_ratio_low=1.0 actor.clip_ratio_high=4.0",
        ),
        (
            "algorithm=dppo",
            "actor.policy_loss.loss_mode=dppo_tv actor.clip_ratio_c=20.0 actor.clip_ratio_low=0.15",
        ),
        (
            "algorithm=geometric_rejection algorithm.correction_cap=1.25 algorithm.correction_floor=0.5",
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.8_2.0",
        ),
        (
            "policy.kl_coef=0.02 train.kl_coef_in_loss=false",
            "actor.use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02",
        ),
        (
            "optimizer.warmup_steps=6 train.optim_batch_size=32",
            "actor.optim.lr_warmup_steps=2 actor.ppo_mini_batch_size=4",  # 4 optimizer steps an iteration
        ),
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_verl_computes_the_same_under(overrides: str, expected: str) -> None:
    options, _ = verl_options(config_of(*overrides.split()), FACTS)
    short = {name.removeprefix("actor_rollout_ref."): value for name, value in options.items()}
    names = [word.partition("=")[0] for word in expected.split()]
    assert " ".join(f"{name}={short.get(name)}" for name in names) == expected


def arguments_of(script: str, folder: Path, *more: str) -> list[str]:
    """Run a script in bash, with a python3 that prints its arguments; return them."""
    (folder / "run_verl.sh").write_text(script)
    (folder / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "python3").chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    command = ["bash", "run_verl.sh", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return done.stdout.splitlines()


def test_hydra_reads_the_command_line_as_it_was_meant_and_names_of_a_run_are_no_part_of_it(tmp_path: Path) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    name = script_name(tmp_path / 'a3\ntouch PWNED #"""$(touch PWNED)`${oc.env:HOME}')
    assert not set(name) & set("\n\"'$`\\{}()")
    overrides = (*RICH, "algorithm.correction_mode=mask", "train.precision=fp32", "optimizer.eps=1e-5")
    config = config_of(*overrides)
    config.logging.wandb_kwargs = {"name": "$HERE$(touch PWNED)", "project": 'a"; import os; b\\'}
    options, report = verl_options(config, Facts("/models/with space/it's", name, longest_prompt=100, num_train=1000))
    script = verl_script(options, report, ["A heading."])
    module, program, *words_read = arguments_of(script, tmp_path, "trainer.total_epochs=2")
    assert (module, program, words_read.pop()) == ("-m", "verl.trainer.main_ppo", "trainer.total_epochs=2")
    parsed = OverridesParser.create().parse_overrides(words_read)
    actual = {one.input_line.partition("=")[0]: one.value() for one in parsed}
    here = str(tmp_path.resolve())
    for option, value in options.items():
        assert actual.pop(option) == (value.replace("$HERE", here) if isinstance(value, ScriptPath) else value)
    assert actual == {}
    assert not (tmp_path / "PWNED").exists()


def exported(config: Config, folder: Path) -> Path:
    file = folder / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    return file


def test_the_grader_travels(tmp_path: Path) -> None:
    """verl is given the reward of the run, from the columns of the exported data."""
    file = exported(config_of("env.dataset=reasoning", "env.format_weight=0.3"), tmp_path)
    rows = [{"question": "9 * 2?", "answer": "9*2=18\n#### 18"}, {"question": "1 + 1?", "answer": "#### 2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task("reasoning", path=str(tmp_path / "rows.jsonl"), num_heldout=1, format_weight=0.3)
    example = [*task.train, *task.heldout]
    texts = ["<think>a b c</think><answer>18</answer>", "<answer>2</answer>", "18"]

    def reward(text: str, one: Example) -> float:
        return sum(task.term_weights[name] * value for name, value in task.score(text, one).terms.items())

    expected = [[reward(text, one) for text in texts] for one in example]
    score = verl_reward(file)
    for one, wanted in zip(example, expected, strict=True):
        (row,) = verl_rows(task, [one], "train")
        truth, extra = row["reward_model"]["ground_truth"], {**row["extra_info"], "num_turns": None}
        scores = [score(row["data_source"], text, truth, extra) for text in texts]
        assert [actual["score"] for actual in scores] == wanted
    assert len({value for wanted in expected for value in wanted}) > 2


def test_reward_functions_travel_with_the_folder(tmp_path: Path) -> None:
    body = "    return {'score': 2.0 / (solution_str == ground_truth), 'acc': True}"
    (tmp_path / "mine.py").write_text(f"def compute_score(data_source, solution_str, ground_truth):\n{body}\n")
    score = verl_reward(exported(config_of("reward.path=mine.py"), tmp_path))
    columns = example_columns(SimpleNamespace(query="2 + 2?", answer="#### 4", extra={}))
    assert score("gsm8k", "4", "4", columns) == {"score": 2.0, "acc": 1.0}
    assert score("gsm8k", "5", "4", columns) == {"score": 0.0, "acc": 0.0}  # the grader divides by 0


_RIDDLES = """
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import FileTask, text_of

class Riddles(FileTask):
    name, question_columns = "riddles", ("riddle",)

    def read_row(self, row, place):
        return Example(str(row.get("riddle", "")), text_of(row, "solution", place))

    def score(self, response, example):
        right = example.answer in response
        return Score({"correct": float(right)}, success=right)
"""


def test_users_files_travel_with_the_folder_whatever_their_names(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    run_dir.mkdir()
    (tmp_path / "reward.py").write_text(_RIDDLES)
    rows = [{"riddle": f"What comes after {n}?", "solution": str(n + 1)} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {"dataset": f"{tmp_path / 'reward.py'}:Riddles", "dataset_path": str(tmp_path / "rows.jsonl")}
    (run_dir / "config.yaml").write_text(json.dumps({"model": {"name": "tiny"}, "env": env}))
    write_verl(run_dir, out, trust=True)
    (tmp_path / "reward.py").unlink()
    score = verl_reward(out / "config.yaml")
    columns = example_columns(SimpleNamespace(query="What comes after 3?", answer="4", extra={}))
    assert score("riddles", "It is 4.", "4", columns) == {"score": 1.0, "acc": 1.0}


def test_the_table_reads_what_was_written_for_verl(tmp_path: Path) -> None:
    """verl's five columns come back as a table of ours, with the same prompts."""
    task = make_task("arithmetic", num_train=6, num_heldout=2)
    write_parquet(tmp_path / "train.parquet", verl_rows(task, task.train, "train"))
    table = make_task("table", path=str(tmp_path / "train.parquet"), num_heldout=1)
    prompts = [table.messages(example) for example in [*table.train, *table.heldout]]
    wanted = [task.messages(example) for example in task.train]
    assert sorted(prompts, key=str) == sorted([one for i, one in enumerate(wanted) if one not in wanted[:i]], key=str)


def test_the_card_counts_responses_and_shows_the_reward() -> None:
    table = ("env.dataset=table", "env.dataset_path=/home/me/rows.jsonl", "env.num_envs=16", "env.repeats=4")
    functions = ("reward.path=/home/me/mine.py", "reward.name=[near,brief]", "reward.weights=[1.0,0.5]")
    config = composed("grpo_cpu", *table, *functions)
    measured = {"eval/accuracy": 0.0, "eval/stderr": 0.0, "eval/reward": -2.5, "eval/reward_stderr": 0.25}
    trained = [{"step": step, "dialog_turns": count} for step, count in ((0, 24), (1, 64))]
    other = {"step": 1, "eval/accuracy": 0.5}  # of another program, or edited
    card = model_card(config, 1, [{"step": 0, **measured}, *trained, other])
    reward = "| `reward.name` | ['near', 'brief'] |"
    for shown in ("(24 responses)", "| reward |", "-2.5 ± 0.25", "| 1 | - | 50.0 % | - |", reward):
        assert shown in card


def test_a_model_card_has_no_folder_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from sota_grpo.tasks.arithmetic import ArithmeticTask\n\nclass Mine(ArithmeticTask):\n    pass\n")
    models = ("model.name=/home/me/secret/model", "ref_model.name=/home/me/secret/teacher")
    functions = ("reward.path=/home/me/secret/mine.py", "reward.judge.url=http://10.0.0.7:8080")
    rubric = ("reward.judge.rubric=/home/me/secret/rubric.md", f"algorithm.objective={file}:sapo")
    config = composed("grpo_cpu", f"env.dataset={file}:Mine", *models, *functions, *rubric)
    card = model_card(config, 1, [])
    assert not any(private in card for private in (str(tmp_path), "/home/me", "10.0.0.7"))
    assert "| `algorithm.objective` | mine.py:sapo |" in card
