"""A replay gives what the run computed; under another algorithm, what a run under that algorithm computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from sota_grpo import cli, keys
from sota_grpo.assembly.compare import compared
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.replay import (
    Replay,
    Step,
    _advantages,
    _clip,
    equal_ratios,
    open_step,
    replay,
    replayed,
    scored_rows,
    worst_distance,
)
from sota_grpo.cli.replay import as_text
from sota_grpo.config import Config
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.run_files import METRICS_FILE
from sota_grpo.recording.run_log import TRAINING_LOG
from sota_grpo.recording.stored_steps import Origin, StoredStep, read_step, stored_steps
from sota_grpo.rl.table import RowTable
from sota_grpo.run.app import train

SMALL = (
    *("engine=transformers", "check.mode=off", "eval.mode=off", "train.export_hf=false", "logging.report=false"),
    *("env.num_envs=16", "env.repeats=4", "env.difficulty=1", "env.reward_workers=0"),
    *("env.max_samples=256", "env.num_heldout=32"),
    *("train.dialog_turns_per_batch=16", "train.optim_batch_size=16", "train.total_dialog_turns=32"),
    *("train.checkpoint_frequency=1", "inference_model.max_tokens=40", "optimizer.lr=1e-3"),
)
KL = "policy.kl_coef=0.05"
RUNS = {
    "grpo, its steps and epochs": ("algorithm=grpo", KL, "train.optim_batch_size=8", "train.epochs=2"),
    "dr_grpo, entropy": ("algorithm=dr_grpo", "algorithm.entropy_coef=0.01", "algorithm.drop_truncated=true"),
    "dapo, penalty": ("algorithm=dapo", "algorithm.overlong_buffer=24", "algorithm.dynamic_sampling_max_draws=2"),
    "top-p, KL": ("algorithm=grpo", KL, "inference_model.top_p=0.9", "inference_model.temperature=1.5"),
    "cispo, correction": ("algorithm=cispo", "algorithm.correction=sequence", "train.optim_batch_size=8"),
    "rloo, KL in the reward": ("algorithm=rloo", KL, "train.kl_coef_in_loss=false"),
    "reinforce_pp, LoRA, dropout": (
        *("algorithm=reinforce_pp", KL, "train_model.lora.enabled=true"),
        *("train_model.lora.dropout=0.2", "train.optim_batch_size=8", "train.micro_batch_tokens=512"),
    ),
    "skywork_or1, tokens of high entropy": (
        *("algorithm=skywork_or1", "algorithm.entropy_target=9", "algorithm.entropy_coef_delta=0.05"),
        "algorithm.top_entropy_quantile=0.2",
    ),
    "dialogs of two turns, min-p": (
        *("algorithm=grpo", "env.reasoning=true", "env.max_steps=2", "train.optim_batch_size=4"),
        *("inference_model.min_p=0.02", "inference_model.temperature=1.5"),
    ),
}
#: Their terms are in the loss of another one: entropy in skywork_or1, kept sets in min-p, dapo's objective is grpo's.
WHOLE = ("dr_grpo, entropy", "dapo, penalty", "top-p, KL")


def run(run_dir: Path, *overrides: str) -> Path:
    train(compose("grpo_cpu", [*SMALL, *overrides]), run_dir)
    return run_dir


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A run of two steps with two optimizer steps each, without a reference."""
    return run(tmp_path_factory.mktemp("plain"), "train.optim_batch_size=8", "train.keep_checkpoints=1")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in WHOLE else ()) for name in RUNS])
def test_a_replay_gives_the_losses_and_the_gradient_norm_of_the_run(name: str, tmp_path: Path) -> None:
    run_dir = run(tmp_path / "run", *RUNS[name])
    rows = metrics(run_dir)
    assert max(row["grad_norm"] for row in rows) > 0
    for step in (0, 1):
        found = replayed(run_dir, step)
        assert found["checkpoint"] == (f"checkpoint_{step:06d}.pt" if step else None)
        figures = found["figures"]
        assert {"loss/objective", "grad_norm", "advantage"} < set(figures)
        for figure, values in figures.items():
            assert values["stored"] == rows[step][figure]
            assert values["replayed"] == pytest.approx(values["stored"], rel=1e-6, abs=1e-12), figure
        assert found["agrees"]
    if "skywork" in name:
        assert [row["entropy_coef"] for row in rows] == [0.0, 0.05]
        found = compared(run_dir, 1, ["run", "grpo"])["algorithms"]
        assert found["grpo"]["masked"] == 0 < found["run"]["masked"]  # what the run left out is not in the stored rows
        losses = found["run"]["losses"]
        assert losses == {name: pytest.approx(rows[1][name], rel=1e-6) for name in ("loss/objective", "loss/entropy")}
    if "LoRA" in name:
        step = open_step(run_dir, 1)
        assert replay(step, step.config).figures == replay(step, step.config).figures  # the first leaves nothing behind


@pytest.mark.parametrize("preset", [pytest.param("reinforce_pp", marks=pytest.mark.slow), "cispo"])
def test_step_0_under_another_preset_is_that_of_a_run_under_it(preset: str, plain: Path, tmp_path: Path) -> None:
    """Before the first step all runs of a seed have the same responses."""
    other = run(
        *(tmp_path / "other", f"algorithm={preset}", "train.optim_batch_size=8"),
        "train.total_dialog_turns=16",
    )
    expected = metrics(other)[0]
    found = replayed(plain, 0, [f"algorithm={preset}"])
    for figure in ("advantage", "loss/objective", "grad_norm", "clip_fraction", "ess"):
        values = found["figures"][figure]
        assert values["other"] == pytest.approx(expected[figure], rel=1e-6, abs=1e-12), figure
        assert values["other_difference"] == values["other"] - values["replayed"]
    assert found["agrees"]


def test_what_stands_in_the_step_is_what_the_run_saw(plain: Path) -> None:
    tokenizer = load_tokenizer("tiny")
    for path, row in zip(stored_steps(plain), metrics(plain), strict=True):
        stored = read_step(path)
        assert dict(stored.metrics) == {name: value for name, value in row.items() if name != "step"}
        said = [
            (own - behaviour, entropy)
            for sample in stored.samples
            for own, behaviour, entropy, assistant in zip(
                *(sample[name] for name in ("policy_log_probs", "log_probs", "entropy", "assistant")), strict=True
            )
            if assistant
        ]
        assert len(said) == round(row["response_tokens/mean"] * 16)
        assert max(abs(gap) for gap, _ in said) < 1e-4  # synchronous, the behaviour policy is that before the step
        assert min(entropy for _, entropy in said) >= 0
        for sample, row_td in zip(stored.samples, stored.rows, strict=True):
            assert "".join(sample["pieces"]) == tokenizer.decode(row_td.get(keys.RESPONSE_TOKENS))
            assert len(sample["pieces"]) == sample["response_tokens"]


def test_the_entropy_of_a_step_is_the_mean_over_its_tokens(tmp_path: Path) -> None:
    """With one optimizer step the metric is that of the weights before the step."""
    run_dir = run(tmp_path / "run", "train.total_dialog_turns=16")
    (path,) = stored_steps(run_dir)
    stored = read_step(path)
    entropies = torch.cat(
        [row[1][row_td.get(keys.ASSISTANT_MASK)] for row, row_td in zip(stored.measured, stored.rows, strict=True)]
    )
    assert entropies.mean().item() == pytest.approx(metrics(run_dir)[0]["entropy"], rel=1e-5)


def test_a_run_in_half_precision_is_replayed_in_float32_and_told_apart(tmp_path: Path) -> None:
    found = replayed(run(tmp_path / "run", "train.precision=bf16", "train.total_dialog_turns=16"), 0)
    assert not found["agrees"]
    norm = found["figures"]["grad_norm"]
    assert norm["replayed"] == pytest.approx(norm["stored"], rel=0.05)
    assert "computed in bf16 with float32 weights on cpu, the replay in float32" in found["notes"][0]
    assert "does not agree" in as_text(found)


def test_a_step_without_its_weights_names_those_that_can_be_replayed(plain: Path) -> None:
    with pytest.raises(UserError, match=r"Step 1 of .* is stored, and the checkpoint .* is gone; .* replayed: 0\.$"):
        replayed(plain, 1)
    with pytest.raises(UserError, match=r"Step 7 of .* is not stored; .* replayed: 0 \(train\.checkpoint_frequency=1 "):
        replayed(plain, 7)
    with pytest.raises(UserError, match="There is no run in"):
        replayed(plain / "nowhere", 0)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["policy.kl_coef=0.1"], r"policy\.kl_coef=0\.1 needs the reference's log-probs, and step 0 has none"),
        (["algorithm.kl_estimator=k2"], "needs the reference's log-probs"),
        (["algorithm=grpo"], "The run had algorithm=grpo itself"),
        (["algorithm.clip_low=0.2", "algorithm.clip_high=0.2"], "nothing to compare"),
        (["inference_model.temperature=0.5"], "cannot change a step whose responses"),
        (["algorithm.dynamic_sampling=true"], "cannot change a step whose responses"),
        (["optimizer.lr=1e-5"], "cannot change a step"),
        (["engine=scripted"], "cannot change a step"),
        (["algorithm.correction_cap=3"], r"has no effect without algorithm\.correction\."),
        (["algorithm=cispo", "algorithm.clip_low=0.1"], r"without algorithm\.objective=clipped or dppo or gmpo\."),
        (["train.kl_coef_in_loss=false"], r"has no effect without policy\.kl_coef"),
        (["algorithm=rloo"], "makes? several steps"),
        (["algorithm=unheard"], "the presets are"),
        (["algorithm.clip_hihg=0.3"], "clip_hihg"),
        (["algorithm.clip_high=high"], "clip_high|high"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_an_override_that_cannot_matter_is_refused_in_one_sentence(overrides, sentence: str, plain: Path) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        replayed(plain, 0, overrides)
    assert "\n" not in str(refused.value)


def test_a_smaller_micro_batch_is_no_comparison(plain: Path) -> None:
    found = replayed(plain, 0, ["train.micro_batch_tokens=200"])
    assert "clip" not in found
    assert found["figures"]["grad_norm"]["replayed"] == pytest.approx(found["figures"]["grad_norm"]["stored"], rel=1e-4)


def test_a_wider_clip_takes_fewer_gradients(plain: Path) -> None:
    """Two optimizer steps per step: in the second the ratio is no longer 1, and a narrow clip finds it."""
    narrow = replayed(plain, 0, ["algorithm.clip_low=1e-7", "algorithm.clip_high=1e-7"])
    assert (narrow["advantages"]["changed"], narrow["advantages"]["largest"]) == (0, None)
    clip = narrow["clip"]
    assert clip["other"] - clip["replayed"] == clip["newly"] - clip["no_longer"] > 0
    stored = read_step(stored_steps(plain)[0])
    assert clip["tokens"] == sum(int(row.get(keys.ASSISTANT_MASK).sum()) for row in stored.rows)
    text = as_text(narrow)
    assert f"{clip['newly']} newly, {clip['no_longer']} no longer" in text
    assert "algorithm.clip_low=1e-7 al.." in text


def test_ratios_that_are_all_one_are_said() -> None:
    def said(ess: float, steps: int) -> str:
        return " ".join(equal_ratios(Replay({"ess": ess}, torch.zeros(1), {}, steps)))

    assert "every ratio is 1 (effective sample size 1.000000)" in said(1 - 1e-9, 1)
    assert not said(1.0, 2)
    assert not said(0.999, 1)


def test_what_a_preset_does_while_collecting_is_named_and_left(plain: Path) -> None:
    found = replayed(plain, 0, ["algorithm=dapo"])
    assert "algorithm.dynamic_sampling" in found["notes"][-1]


def test_the_figures_are_json_and_nothing_is_written(plain: Path) -> None:
    def files() -> dict[Path, int]:
        """All but the log, which has a handler in this process, since the run was made in it."""
        return {path: path.stat().st_mtime_ns for path in plain.rglob("*") if path.name != TRAINING_LOG}

    before = files()
    found = json.loads(json.dumps(replayed(plain, None, ["algorithm=dr_grpo"]), allow_nan=False))
    assert found["step"] == 0  # the last whose checkpoint is there
    assert files() == before


@pytest.mark.parametrize("command", [["algorithm=dapo", "--step", "2"], ["--step", "2", "--json", "algorithm=dapo"]])
def test_overrides_stand_anywhere(command: list[str], monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(cli.replay, "run", lambda options: seen.append(options) or 0)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["replay", "RUN", *command])
    assert (seen[0].run_dir, seen[0].step, seen[0].overrides) == ("RUN", 2, ["algorithm=dapo"])


@pytest.mark.parametrize("odd", ["--steps=2", "-x", "dapo"])
def test_what_is_no_override_is_refused(odd: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["replay", "RUN", "--step", "2", odd])
    assert odd in capsys.readouterr().err


def kl_step(*, graded: float | None) -> Step:
    """Two siblings; log-probs of the behaviour policy above the reference's by 0.5 and by 1 + 1."""
    rows = []
    for sample, (reward, gaps) in enumerate([(1.0, [0.5]), (0.0, [1.0, 1.0])]):
        length = 1 + len(gaps)
        mask = torch.arange(length) >= 1
        ref = torch.where(mask, -3.0, 0.0)
        following = {"reward": torch.tensor([reward]), "ref_log_probs": {"full": ref}}
        if graded is not None:
            penalty = torch.tensor([-graded * sum(gaps)])
            following["graded_reward"] = torch.tensor([reward])
            following["reward_terms"] = {"kl": penalty}
            following["reward"] = following["reward"] + penalty
        rows.append(
            TensorDict(
                {
                    "group_id": torch.tensor(0),
                    "sample_id": torch.tensor(sample),
                    "masks": {"all_assistant_mask": mask},
                    "log_probs": {"full": ref + torch.tensor([0.0, *gaps])},
                    "advantage": torch.tensor([[9.0]]),
                    "next": following,
                }
            )
        )
    config = Config()
    config.algorithm.scale = "none"
    config.policy.kl_coef, config.train.kl_coef_in_loss = graded or 0.3, graded is None
    origin = Origin("cpu", "fp32", 0, 1, torch.zeros(1, dtype=torch.uint8))
    return Step(config, StoredStep(0, {}, RowTable.of(rows), [], [], None, origin))


def asked(kl_coef: float, *, in_loss: bool) -> Config:
    config = Config()
    config.algorithm.scale = "none"
    config.policy.kl_coef, config.train.kl_coef_in_loss = kl_coef, in_loss
    return config


@pytest.mark.parametrize(
    ("graded", "config", "rewards"),
    [
        (None, asked(0.1, in_loss=True), [1.0, 0.0]),
        (None, asked(0.1, in_loss=False), [0.95, -0.2]),  # 1 - 0.1 * 0.5, 0 - 0.1 * 2
        (0.2, asked(0.2, in_loss=False), [0.9, -0.4]),
        (0.2, asked(0.1, in_loss=False), [0.95, -0.2]),
        (0.2, asked(0.2, in_loss=True), [1.0, 0.0]),
        (0.2, asked(0.0, in_loss=False), [1.0, 0.0]),
    ],
)
def test_the_kl_moves_between_reward_and_loss(graded: float | None, config: Config, rewards: list[float]) -> None:
    step = kl_step(graded=graded)
    stored = [float(row.get(keys.REWARD)) for row in step.stored.rows]
    found = scored_rows(step, config)
    assert found.get(keys.REWARD).flatten().tolist() == pytest.approx(rewards)
    half = (rewards[0] - rewards[1]) / 2
    assert found.get(keys.ADVANTAGE).flatten().tolist() == pytest.approx([half, -half])
    assert [float(row.get(keys.REWARD)) for row in step.stored.rows] == stored  # the stored rows stay as they are
    assert [float(row.get(keys.ADVANTAGE)) for row in step.stored.rows] == [9.0, 9.0]


def outcome(advantages: list[float], clipped: dict) -> Replay:
    flags = {name: [torch.tensor(use).bool() for use in uses] for name, uses in clipped.items()}
    return Replay({}, torch.tensor(advantages), flags, 1)


def test_changes_by_hand() -> None:
    step = kl_step(graded=None)
    own = outcome([1.0, -1.0], {(0, 0): [[0, 1], [1, 1]], (0, 1): [[0, 0, 0]]})
    other = outcome([1.0, 0.5], {(0, 0): [[0, 0], [1, 0]], (0, 1): [[0, 1, 0]]})
    changed = _advantages(step, own, other)
    assert (changed["changed"], changed["samples"]) == (1, 2)
    assert changed["largest"] == {"group_id": 0, "sample_id": 1, "replayed": -1.0, "other": 0.5}
    assert _clip(own, other) == {"tokens": 7, "replayed": 3, "other": 2, "newly": 1, "no_longer": 2}
    fewer = outcome([1.0, 0.5], {(0, 0): [[0, 0], [1, 0]]})  # the other row takes no part
    assert _clip(own, fewer) == {"tokens": 7, "replayed": 3, "other": 1, "newly": None, "no_longer": None}


def test_the_distance_is_relative_and_a_figure_of_one_side_is_infinitely_far() -> None:
    stored = {"loss/objective": 1e-9, "loss/kl": None, "grad_norm": 2.0, "advantage": 0.5}
    assert worst_distance(stored, dict(stored)) == ("grad_norm", 0.0)
    name, distance = worst_distance(stored, {**stored, "grad_norm": 2.0 + 4e-6})
    assert (name, distance) == ("grad_norm", pytest.approx(2e-6))
    name, distance = worst_distance(stored, {**stored, "loss/objective": 1e-7})
    assert (name, distance) == ("loss/objective", pytest.approx(1.98e-7))
    assert worst_distance(stored, {**stored, "loss/kl": 0.0}) == ("loss/kl", math.inf)
