"""A replay gives what the run computed; under other algorithms, what runs under those algorithms compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sota_grpo import cli, keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.replay import Step, compared, cosines, open_step, replay, replayed, scored_rows
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import METRICS_FILE, read_replays
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
    "grpo, its steps and epochs, correction": (
        *("algorithm=grpo", KL, "algorithm.correction=sequence"),
        *("train.optim_batch_size=8", "train.epochs=2"),
    ),
    "rloo, KL in the reward": ("algorithm=rloo", KL, "train.kl_coef_in_loss=false"),
    "reinforce_pp, LoRA, dropout": (
        *("algorithm=reinforce_pp", KL, "train_model.lora.enabled=true"),
        *("train_model.lora.dropout=0.2", "train.optim_batch_size=8", "train.micro_batch_tokens=512"),
    ),
    "skywork_or1, tokens of high entropy, dialogs of two turns, min-p": (
        *("algorithm=skywork_or1", "algorithm.entropy_target=9", "algorithm.top_entropy_quantile=0.2"),
        *("env.reasoning=true", "env.max_steps=2", "inference_model.min_p=0.02", "inference_model.temperature=1.5"),
    ),
}


def run(run_dir: Path, *overrides: str) -> Path:
    train(compose("grpo_cpu", [*SMALL, *overrides]), run_dir)
    return run_dir


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A run of two steps with two optimizer steps each, without a reference."""
    return run(tmp_path_factory.mktemp("plain"), "train.optim_batch_size=8", "train.keep_checkpoints=1")


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_gives_the_losses_and_the_gradient_norm_of_the_run(name: str, tmp_path: Path) -> None:
    run_dir = run(tmp_path / "run", *RUNS[name])
    rows = metrics(run_dir)
    assert max(row["grad_norm"] for row in rows) > 0
    for step in (0, 1):
        actual = replayed(run_dir, step)
        assert actual["checkpoint"] == (f"checkpoint_{step:06d}.pt" if step else None)
        figures = actual["figures"]
        assert {"loss/objective", "grad_norm", "advantage"} < set(figures)
        for figure, values in figures.items():
            if figure.startswith("tokens/"):  # a run does not log them
                assert values["stored"] is None
                continue
            assert values["stored"] == rows[step][figure]
            assert values["replayed"] == pytest.approx(values["stored"], rel=1e-6, abs=1e-12), figure
        assert actual["agrees"]
    if "skywork" in name:
        assert [row["entropy_coef"] for row in rows] == [0.0, 0.005]
    if "rloo" in name:  # one optimizer step: the metric is that of the weights before it
        stored = read_step(stored_steps(run_dir)[0])
        masked = zip(stored.measured, stored.rows, strict=True)
        entropies = torch.cat([each[1][row.get(keys.ASSISTANT_MASK)] for each, row in masked])
        assert entropies.mean().item() == pytest.approx(rows[0]["entropy"], rel=1e-5)
    if "LoRA" in name:
        step = open_step(run_dir, 1)
        assert replay(step, step.config).figures == replay(step, step.config).figures  # the first leaves nothing behind


def test_step_0_under_another_preset_is_that_of_a_run_under_it(plain: Path, tmp_path: Path) -> None:
    """Before the first step all runs of a seed have the same responses."""
    other = run(tmp_path, "algorithm=cispo", "train.optim_batch_size=8", "train.total_dialog_turns=16")
    expected = metrics(other)[0]
    actual = replayed(plain, 0, ["algorithm=cispo"])
    for figure in ("advantage", "loss/objective", "grad_norm", "clip_fraction", "ess"):
        assert actual["figures"][figure]["cispo"] == pytest.approx(expected[figure], rel=1e-6, abs=1e-12), figure
    assert actual["agrees"]


def test_a_run_in_half_precision_is_replayed_in_float32_and_distinguished(tmp_path: Path) -> None:
    actual = replayed(run(tmp_path / "run", "train.precision=bf16", "train.total_dialog_turns=16"), 0)
    assert not actual["agrees"]
    norm = actual["figures"]["grad_norm"]
    assert norm["replayed"] == pytest.approx(norm["stored"], rel=0.05)
    verdict, note = actual["notes"]
    assert "does not agree" in verdict
    assert "computed in bf16 with float32 weights on cpu, the replay in float32" in note


def test_a_step_without_its_weights_names_those_that_can_be_replayed(plain: Path) -> None:
    with pytest.raises(UserError, match=r"Step 1 of .* is stored, but the checkpoint .* deleted; .* replayed: 0[.]"):
        replayed(plain, 1)
    with pytest.raises(UserError, match=r"Step 7 of .* is not stored; .* replayed: 0[.]"):
        replayed(plain, 7)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["policy.kl_coef=0.1"], r"policy\.kl_coef=0\.1 needs the reference's log-probs, but step 0 has none"),
        (["algorithm.clip_low=0.2", "algorithm.clip_high=0.2"], "nothing to compare"),
        (["inference_model.temperature=0.5"], "has no effect, because the step's responses"),
        (["algorithm.dynamic_sampling=true"], "has no effect, because the step's responses"),
        (["algorithm=grpo,dapo,grpo"], "has grpo twice"),
        (["algorithm=grpo,run"], "nothing to compare"),
        (["algorithm=dapo,rloo"], r"^rloo: .* makes? several steps"),
        (["algorithm=dapo,gdpo"], r"^gdpo: algorithm\.decouple_terms=true cannot be replayed: step 0 has no weights"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_an_override_that_cannot_matter_is_refused_in_one_sentence(overrides, sentence: str, plain: Path) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        replayed(plain, 0, overrides)
    assert "\n" not in str(refused.value)


SCALED = """
def tripled(log_ratio, advantage, clip_low, clip_high):
    ratio = log_ratio.exp()
    return -3 * (ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
"""


def test_several_algorithms_are_side_by_side(plain: Path, tmp_path: Path) -> None:
    """In one optimizer step, a factor scales the gradient and nothing else; the run's own twin is exact."""
    (tmp_path / "mine.py").write_text(SCALED)
    tripled = f"{tmp_path}/mine.py:tripled"
    actual = replayed(plain, 0, [f"algorithm=run,{tripled},rloo", "train.optim_batch_size=16"])
    cosines, figures = actual["cosines"], actual["figures"]
    names = ["replayed", "run", tripled, "rloo"]
    assert list(cosines) == names
    assert all(list(row) == names and row[name] == 1.0 for name, row in cosines.items())
    assert all(cosines[one][two] == cosines[two][one] for one in names for two in names)
    assert cosines["run"][tripled] == pytest.approx(1, abs=1e-9)
    assert 0.5 < cosines["run"]["rloo"] < 1 - 1e-6
    assert figures["grad_norm"][tripled] == pytest.approx(3 * figures["grad_norm"]["run"], rel=1e-5)
    for name in ("tokens/with_advantage", "clip_fraction"):
        assert figures[name][tripled] == figures[name]["run"]
    assert figures["ess"][tripled] == pytest.approx(figures["ess"]["run"], rel=1e-9)  # its rows are packed otherwise
    assert "every ratio is 1" in actual["notes"][1]
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual


def test_the_gradient_is_the_sum_over_the_optimizer_steps_before_the_clip(plain: Path, tmp_path: Path) -> None:
    """By hand, in one optimizer step of many micro-batches whose norm is clipped: its norm is that of the metric."""
    step = open_step(plain, 0)
    one = with_options(step.config, {"train.optim_batch_size": 16, "train.micro_batch_tokens": 100})
    once = replay(step, with_options(one, {"optimizer.clip_grad_norm": 1e-3}), tmp_path / "once")
    assert once.optimizer_steps == 1
    assert once.gradient.double().norm().item() == pytest.approx(once.figures["grad_norm"], rel=1e-5)
    still = with_options(one, {"train.epochs": 2, "optimizer.lr": 0.0, "optimizer.weight_decay": 0.0})
    twice = replay(step, still, tmp_path / "twice")
    assert twice.optimizer_steps == 2
    torch.testing.assert_close(twice.gradient, 2 * once.gradient, rtol=1e-4, atol=1e-6)


def test_no_room_for_a_gradient_is_a_sentence(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match=r"^Each algorithm's gradient takes 0\.\d GiB, but .*; set TMPDIR"):
        replayed(plain, 0, ["algorithm=dapo"])
    assert replayed(plain, 0)["agrees"]  # alone it keeps none


def test_a_gradient_of_0_has_no_cosine_and_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sota_grpo.assembly.replay._CHUNK", 3)
    one, two = torch.randn(8), torch.randn(8)
    actual = cosines({str(at): vector for at, vector in enumerate((one, two, torch.zeros(8)))})
    exact = torch.nn.functional.cosine_similarity(one.double(), two.double(), dim=0).item()
    assert actual["0"] == {"0": 1.0, "1": pytest.approx(exact, rel=1e-12), "2": None}
    assert set(actual["2"].values()) == {None}


def test_the_command_prints_the_tables_and_leaves_them_in_the_run(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--step", "0"], ["--json", "algorithm=dapo"], ["algorithm=dapo", "--step", "0"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["replay", str(plain), *options])
    printed, errors = capsys.readouterr()
    assert "sota-grpo report" in errors
    assert len(list((plain / "replays").iterdir())) == 1  # of one question the newest, of a replay alone none
    (record,), sentences = read_replays(plain)
    assert not sentences
    figures, table = record["tables"]
    assert figures[0] == ["", "stored", "replayed", "dapo"]
    assert table[0] == ["cosine of gradients", "replayed", "dapo"]
    assert [row[0] for row in table[1:]] == table[0][1:]
    last = printed.rpartition("Step 0, ")[2].splitlines()
    assert all(row[0] in line and row[-1] in line for row, line in zip(figures, last[2:]))
    collected = "dapo: algorithm.dynamic_sampling acts on collection only"
    assert [note.startswith(collected) for note in record["notes"]].count(True) == 1
    shutil.rmtree(plain / "replays")
    (plain / "replays").touch()  # a run that cannot be written is replayed all the same
    with pytest.raises(SystemExit, match="0"):
        cli.main(["replay", str(plain), "--json", "algorithm=dapo"])
    printed, errors = capsys.readouterr()
    assert list(json.loads(printed)["cosines"]) == ["replayed", "dapo"]
    assert "the report will not show this replay" in errors
    (plain / "replays").unlink()


def test_overrides_may_be_anywhere_and_nothing_else_may(monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr("sota_grpo.cli.runs.replay", lambda options: seen.append(options) or 0)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["replay", "RUN", "--step", "2", "--json", "algorithm=dapo"])
    assert (seen[0].run_dir, seen[0].step, seen[0].overrides) == ("RUN", 2, ["algorithm=dapo"])
    for odd in ("--steps=2", "dapo"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["replay", "RUN", "--step", "2", odd])
        assert odd in capsys.readouterr().err


def kl_config(kl_coef: float, *, in_loss: bool) -> Config:
    config = Config()
    config.algorithm.scale = "none"
    config.policy.kl_coef, config.train.kl_coef_in_loss = kl_coef, in_loss
    return config


def kl_step(*, graded: float | None) -> Step:
    """Two siblings; log-probs of the behaviour policy above the reference's by 0.5 and by 1 + 1."""
    rows = []
    for sample, (reward, gaps) in enumerate([(1.0, [0.5]), (0.0, [1.0, 1.0])]):
        mask = torch.arange(1 + len(gaps)) >= 1
        ref, rewards = torch.where(mask, -3.0, 0.0), torch.tensor([reward])
        row: dict[Any, torch.Tensor] = {keys.GROUP_ID: torch.tensor(0), keys.SAMPLE_ID: torch.tensor(sample)}
        row |= {keys.ASSISTANT_MASK: mask, keys.LOG_PROBS: ref + torch.tensor([0.0, *gaps]), keys.REF_LOG_PROBS: ref}
        row |= {keys.ADVANTAGE: torch.tensor([[9.0]]), keys.REWARD: rewards}
        if graded is not None:
            penalty = torch.tensor([-graded * sum(gaps)])
            row |= {keys.GRADED_REWARD: rewards, (*keys.REWARD_TERMS, "kl"): penalty, keys.REWARD: rewards + penalty}
        rows.append(row)
    origin = Origin("cpu", "fp32", 0, 1, torch.zeros(1, dtype=torch.uint8))
    stored = StoredStep(0, {}, RowTable.of(rows), [], [], None, origin)
    return Step(kl_config(graded or 0.3, in_loss=graded is None), stored)


@pytest.mark.parametrize(
    ("graded", "kl_coef", "in_loss", "rewards"),
    [
        (None, 0.1, True, [1.0, 0.0]),
        (None, 0.1, False, [0.95, -0.2]),  # 1 - 0.1 * 0.5, 0 - 0.1 * 2
        (0.2, 0.2, False, [0.9, -0.4]),
        (0.2, 0.1, False, [0.95, -0.2]),
        (0.2, 0.2, True, [1.0, 0.0]),
        (0.2, 0.0, False, [1.0, 0.0]),
    ],
)
def test_the_kl_moves_between_reward_and_loss(
    graded: float | None, kl_coef: float, in_loss: bool, rewards: list[float]
) -> None:
    step = kl_step(graded=graded)
    stored = [float(row.get(keys.REWARD)) for row in step.stored.rows]
    actual = scored_rows(step, kl_config(kl_coef, in_loss=in_loss))
    assert actual.get(keys.REWARD).flatten().tolist() == pytest.approx(rewards)
    half = (rewards[0] - rewards[1]) / 2
    assert actual.get(keys.ADVANTAGE).flatten().tolist() == pytest.approx([half, -half])
    assert [float(row.get(keys.REWARD)) for row in step.stored.rows] == stored  # the stored rows stay as they are
    assert [float(row.get(keys.ADVANTAGE)) for row in step.stored.rows] == [9.0, 9.0]


def test_the_distance_is_relative_and_a_figure_of_one_side_is_infinitely_far() -> None:
    stored = {"loss/objective": 1e-9, "loss/kl": None, "grad_norm": 2.0, "advantage": 0.5}
    for changed, agrees, words in (
        ({}, True, "exactly"),
        ({"grad_norm": 2.0 + 4e-6}, False, "does not agree .* 2.0e-06 (grad_norm)"),
        ({"loss/objective": 1e-7}, True, "agrees .* 2.0e-07 (loss/objective)"),
        ({"loss/kl": 0.0}, False, "only one of the two has loss/kl"),
    ):
        actual, sentence = compared(stored, {**stored, **changed})
        assert actual == agrees
        assert all(word in sentence for word in words.split(" .* "))
