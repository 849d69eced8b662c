"""``sota-grpo eval``: a run measured afterwards says what it said itself; models, checkpoints and their responses."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import speedrun
from sota_grpo.cli import main
from tests.e2e.conftest import metrics


def evaluated(folder: Path, *arguments: str) -> dict:
    out = folder / "result.json"
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments, "--out", str(out)])
    assert ended.value.code == 0
    return json.loads(out.read_text())


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_last_evaluation_of_a_run_comes_out_again(run_dir: Path, tmp_path: Path) -> None:
    """Of the exported model, of a checkpoint, and from its responses by ``sota-grpo score``."""
    copy, files = tmp_path / "copy", [tmp_path / f"{name}.jsonl" for name in ("exported", "checkpoint", "scored")]
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("hf"))
    actual = evaluated(tmp_path, str(run_dir), "--responses", str(files[0]))
    evaluated(tmp_path, str(copy), "--responses", str(files[1]))
    first, *_, own = [row for row in metrics(run_dir) if "eval/accuracy" in row]
    assert own["step"] == actual["steps"] == 2
    for part, name in (("greedy", "eval/accuracy"), ("sampled", "eval/avg_at_k")):
        error = {"greedy": "eval/stderr", "sampled": "eval/avg_at_k_stderr"}[part]
        assert (actual[part]["accuracy"], actual[part]["stderr"]) == (own[name], own[error])
    assert (first["eval/accuracy"], first["eval/avg_at_k"]) != (own["eval/accuracy"], own["eval/avg_at_k"])
    with pytest.raises(SystemExit, match="0"):
        main(
            ["score", "--task", "arithmetic", *("--input", str(files[0]), "--output", str(files[2]), "--workers", "1")]
        )
    before, checkpoint, scored = map(rows_of, files)
    assert before == checkpoint == scored
    assert len(before) == 16 * 5
    assert {row["group_id"] for row in before} == set(range(16))


def test_another_task_leaves_the_options_of_the_runs_own_behind(run_dir: Path, tmp_path: Path) -> None:
    actual = evaluated(tmp_path, str(run_dir), "--task", "countdown", "--k", "0", "--num-samples", "4")
    assert actual["task"] == "countdown"
    assert "sampled" not in actual


def test_a_model_is_measured_with_the_preset_of_its_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("engine=transformers", "env.reward_workers=0", "inference_model.max_tokens=32")
    command = ("tiny", *small, "--k", "4", "--num-samples", "8")
    actual = evaluated(tmp_path, *command, "--temperature", "0.5", "--seed", "3")
    assert [actual[name] for name in ("model", "task", "k", "temperature", "seed")] == ["tiny", "arithmetic", 4, 0.5, 3]
    assert list(actual["pass_at_k"]) == ["1", "2", "4"]
    assert actual["pass_at_k"]["1"] == {name: actual["sampled"][name] for name in ("accuracy", "stderr")}
    assert "pass@4" in capsys.readouterr().out


def test_a_gain_is_that_of_the_same_problems(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run against the model that it began with: the gain of its own two evaluations, its error from the pairs."""
    before = tmp_path / "before.json"
    common = ("--k", "0", "engine=transformers", "env.reward_workers=0", "inference_model.max_tokens=48")
    old = evaluated(tmp_path, "tiny", "--num-samples", "16", *common)
    before.write_text(json.dumps(old))
    actual = evaluated(tmp_path, str(run_dir), *common, "--against", str(before))
    gain = actual["against"]["gain"]["accuracy"]
    assert gain["accuracy"] == actual["greedy"]["accuracy"] - old["greedy"]["accuracy"]
    pairs = zip(old["counts"]["accuracy"], actual["counts"]["accuracy"], strict=True)
    differences = [new - first for (first, _), (new, _) in pairs]
    assert gain["stderr"] == pytest.approx(statistics.stdev(differences) / 4)
    assert f"{100 * gain['accuracy']:+.1f} +/- {100 * gain['stderr']:.1f} |" in capsys.readouterr().out
    for other, sentence in (
        (("--num-samples", "8"), "other problems"),
        (("inference_model.max_tokens=40",), "not 40"),
        (("model.quantization=nf4",), "model.quantization=nf4 has no effect: the evaluated model is that of"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(run_dir), *common, *other, "--against", str(before)])
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err


def test_ifevals_own_file_needs_no_training_data(tmp_path: Path) -> None:
    """No hub, no training set; and the benchmark's four accuracies, each with its error."""
    row = {"prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"] * 2, "kwargs": [{}, {}]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"prompt": f"Say {number}."}) + "\n" for number in range(3)))
    options = ("--engine", "transformers", "env.reward_workers=0", "inference_model.max_tokens=8", "device=cpu")
    actual = evaluated(tmp_path, "tiny", "--task", "ifeval", "--k", "0", *options, f"env.eval_path={file}")
    kinds = [f"{level}_{kind}" for level in ("prompt", "instruction") for kind in ("strict", "loose")]
    assert list(actual["counts"]) == ["accuracy", *kinds]
    assert actual["counts"]["instruction_strict"] == [[2 * hits, 2] for hits, _ in actual["counts"]["prompt_strict"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere/at/all"], "There is neither a run (config.yaml) nor a model (config.json) in nowhere/at/all"),
        (["tiny", "--step", "3"], "needs a run, and tiny is not one"),
        (["tiny", "model.name=smollm2"], "model.name=smollm2 has no effect: the evaluated model is tiny; leave it out"),
        (["tiny", "four"], "'four' is not OPTION=VALUE"),
        (["tiny", "--task", "chess"], "env.dataset=chess is not one of"),
        (["tiny", "--out", "nowhere/at/all.json"], "--out nowhere/at/all.json cannot be written"),
        (["tiny", "--responses", "nowhere/at/all.jsonl"], "--responses nowhere/at/all.jsonl cannot be written"),
        (["tiny", "--out", "a.json", "--responses", "./a.json"], "--out and --responses both write a.json; give two"),
        (["tiny", "--against", "pyproject.toml"], "--against pyproject.toml is not a result"),
        (["tiny", "--k", "-1"], "is not a whole number, 0 or more"),
        (["tiny", "--temperature", "0"], "is not a temperature above 0"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *arguments])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert sentence in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("run.json", '{"finished": true}', []),
        ("run.json", '{"finished": true, "num_steps": 2, "reached": 3}', []),
        ("best.json", '{"value": 0.5}', ["--step", "best"]),
        ("before.json", '{"steps": 1, "counts": {}, "problems": "x", "max_tokens": 1}', ["--against", "before.json"]),
    ],
)
def test_a_damaged_file_is_named(
    name: str,
    text: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf", "config.json").write_text("{}")
    Path("config.yaml").write_text("model: {name: tiny}")
    Path(name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["eval", ".", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"sota-grpo: .*{name} is .*damaged.*\n", error)


@pytest.mark.slow
@pytest.mark.vllm
def test_with_vllm_a_greedy_evaluation_is_that_of_the_embedded_engine(tmp_path: Path) -> None:
    """In a process of its own: vLLM keeps what it has set up until its process ends."""
    options = ("--k", "0", "--num-samples", "16", "inference_model.max_tokens=48", "--engine")
    own, other = tmp_path / "own.jsonl", tmp_path / "vllm.jsonl"
    evaluated(tmp_path, "tiny", *options, "transformers", "--responses", str(own))
    program = [sys.executable, "-m", "sota_grpo.cli", "eval", "tiny", *options, "vllm", "--responses", str(other)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    same = sum(
        mine["response"] == theirs["response"] for mine, theirs in zip(rows_of(own), rows_of(other), strict=True)
    )
    assert same >= 14, "two greedy answers of 16 may differ where two tokens are equally likely"


@pytest.mark.slow
def test_kinds_of_instructions_that_no_training_sees_are_measured_after_a_speedrun(run_dir: Path) -> None:
    measured = speedrun.measure_unseen(run_dir)
    assert 0 <= measured["unseen"] < 0.5
    assert measured["unseen_stderr"] < 0.1  # of the 32 prompts that this run holds out
