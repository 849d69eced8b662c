"""What is said of the runs of a sweep, and which sweep a command continues."""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sota_grpo.cli.runs import add_command
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.recording.run_files import LOCK_FILE, RUN_FILE, is_held, note_failure
from sota_grpo.sweeps import as_json, as_text, continued, note_command, read_sweep, write_summary

STEPS = 12


def make_run(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    rewards: Sequence[float] = (0.5,),
    accuracy: float | None = None,
    began: bool = True,
    finished: bool = True,
) -> Path:
    """A run directory as a command leaves it; each step takes 2 s, the evaluation 5 s."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {json.dumps(one)}\n" for one in overrides))
    if began:
        (folder / RUN_FILE).write_text(json.dumps({"signature": "x", "num_steps": STEPS, "finished": finished}))
    rows = [{"step": step, "reward": one, "lr": step / 10, "time/step_s": 2.0} for step, one in enumerate(rewards)]
    rows += [] if accuracy is None else [evaluation(len(rewards), accuracy)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluation(step: int, accuracy: float) -> dict:
    return {"step": step, "eval/accuracy": accuracy, "eval/stderr": 0.03, "time/eval_s": 5.0}


def test_steps_are_averaged_over_the_last_ten_and_evaluations_and_counters_are_the_last(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "0", rewards=range(STEPS), accuracy=0.75)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation(STEPS, 0.25)) + '\n{"step": 99, "rew')  # a kill tore the last line
    (run,) = read_sweep(tmp_path).runs
    assert run.metrics["reward"] == 6.5  # of 2 .. 11
    assert run.metrics["lr"] == 1.1
    assert (run.metrics["eval/accuracy"], run.metrics["eval/stderr"]) == (0.25, 0.03)
    assert (run.steps, run.num_steps, run.seconds) == (STEPS, STEPS, 34.0)


def test_every_way_to_end_has_its_state_and_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "0")
    make_run(tmp_path / "1", finished=False)
    note_failure(make_run(tmp_path / "2", finished=False), RunFailed("The disk\n is full."))
    make_run(tmp_path / "3", began=False, rewards=())
    note_failure(make_run(tmp_path / "4", began=False, rewards=()), ValueError("odd shape\nand a page"))
    make_run(tmp_path / "5", finished=False)
    with (tmp_path / "5" / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        actual = [f"{run.state} {run.note}" for run in read_sweep(tmp_path).runs]
        assert is_held(tmp_path / "5")
    assert not is_held(tmp_path / "5")
    assert actual[:3] == ["finished ", "stopped ", "failed The disk is full."]
    assert actual[3:] == ["stopped before its first step", "failed ValueError: odd shape", "running "]


def test_what_differs_is_a_column_and_runs_are_in_the_order_of_their_numbers_or_of_a_metric(
    tmp_path: Path,
) -> None:
    for number, accuracy in ((10, 0.25), (2, None), (1, 0.75), (3, 0.5)):
        overrides = ["mode=sync", f"optimizer.lr={number}e-6", *(["+a=1"] if number == 2 else [])]
        make_run(tmp_path / str(number), overrides, accuracy=accuracy)
    sweep = read_sweep(tmp_path)
    assert [run.name for run in sweep.runs] == ["1", "2", "3", "10"]
    assert sweep.varied == ["optimizer.lr", "a"]
    assert [run.overrides.get("a") for run in sweep.runs] == [None, "1", None, None]
    assert [run.name for run in read_sweep(tmp_path, "eval/accuracy").ranked] == ["1", "3", "10", "2"]
    assert [run.name for run in read_sweep(tmp_path, ascending=True).ranked] == ["10", "3", "1", "2"]


def test_seeds_of_a_setting_are_averaged_over_the_runs_that_are_finished(tmp_path: Path) -> None:
    for lr, seed, accuracy in ((1, 0, 0.4), (1, 1, 0.6), (2, 0, 0.7), (2, 1, 0.8), (2, 2, 0.9)):
        overrides = [f"optimizer.lr={lr}", f"seed={seed}"]
        make_run(tmp_path / f"{lr}{seed}", overrides, accuracy=accuracy, finished=seed != 2)
    two, one = read_sweep(tmp_path).settings
    assert (one["overrides"], one["runs"], one["finished"]) == ({"optimizer.lr": "1"}, 2, 2)
    assert one["means"]["eval/accuracy"] == pytest.approx({"mean": 0.5, "stderr": 0.1})
    assert (two["overrides"], two["runs"], two["finished"]) == ({"optimizer.lr": "2"}, 3, 2)
    assert two["means"]["eval/accuracy"] == pytest.approx({"mean": 0.75, "stderr": 0.05})
    make_run(tmp_path / "few" / "0", ["optimizer.lr=1", "seed=0"])
    make_run(tmp_path / "few" / "1", ["optimizer.lr=2", "seed=1"])
    assert read_sweep(tmp_path / "few").settings == []
    for seed in range(3):  # the later two began after an interrupt
        resumed = ["train.resume=auto", "logging.report=false"] if seed else []
        make_run(tmp_path / "resumed" / str(seed), [f"seed={seed}", *resumed], rewards=[seed])
    sweep = read_sweep(tmp_path / "resumed")
    assert sweep.varied == ["seed"]
    assert [(one["runs"], one["means"]["reward"]["mean"]) for one in sweep.settings] == [(3, 1.0)]


def test_the_table_says_it_all_and_takes_no_value_for_markup(tmp_path: Path) -> None:
    make_run(tmp_path / "0", ["train_model.devices=[0,1]"], rewards=[0.25] * STEPS, accuracy=0.5)
    make_run(tmp_path / "1", ["train_model.devices=[red]"], rewards=[], began=False)
    note_failure(tmp_path / "1", UserError("Not a device."))
    lines = as_text(read_sweep(tmp_path)).splitlines()
    assert lines[0] == f"{tmp_path}: 2 runs, 1 finished, 1 failed; sorted by eval/accuracy."
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    header = ["run", "train_model.devices", "reward", "accuracy", "steps", "state", "time"]
    assert [row for row in cells if not set("".join(row)) <= set("-+")] == [
        header,
        ["0", "[0,1]", "0.25", "50.0 +/- 3.0 %", "12", "finished", "0:29"],
        ["1", "[red]", "-", "-", "0", "failed", "0:00"],
    ]
    assert lines[-1] == "run 1 failed: Not a device."


def test_the_summary_is_written_beside_the_runs(tmp_path: Path) -> None:
    for seed, accuracy in ((0, 0.4), (1, 0.6)):
        make_run(tmp_path / str(seed), [f"seed={seed}", "model.name=a|b"], accuracy=accuracy)
    write_summary(tmp_path)
    plain = json.loads((tmp_path / "summary.json").read_text())
    assert plain == as_json(read_sweep(tmp_path))
    assert [run["run"] for run in plain["runs"]] == ["1", "0"]
    (setting,) = plain["settings"]
    assert setting["means"]["eval/accuracy"] == {"mean": pytest.approx(0.5), "stderr": pytest.approx(0.1)}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in as_text(read_sweep(tmp_path)).splitlines()]
    assert ["1", "1", "0.5", "60.0 +/- 3.0 %", "1 of 12", "finished", "0:07"] in rows
    assert ["2", "0.5 +/- 0", "50.0 +/- 10.0 %"] in rows


@pytest.mark.parametrize(("make", "match"), [(False, "There is no run in"), (True, "is one run")])
def test_a_folder_without_runs_is_one_sentence(make: bool, match: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x") if make else tmp_path
    with pytest.raises(UserError, match=match):
        read_sweep(folder)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    options = parser.parse_args(["sweep", *arguments])
    return options.run(options)


def test_the_command_prints_the_newest_sweep_in_any_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^There is no sweep in multirun/, the default; give the directory of a sweep"):
        command()
    for day, reward, accuracy in ((1, 0.1, 0.5), (2, 0.2, None)):
        make_run(Path(f"multirun/2026-01-0{day}/10-00-00/0"), ["a='b,c'"], rewards=[reward], accuracy=accuracy)
    assert command() == 0
    assert capsys.readouterr().out.startswith("multirun/2026-01-02/10-00-00: 1 run, 1 finished; sorted by reward.")
    assert command("multirun/2026-01-01/10-00-00", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["metrics"]["reward"] == 0.1
    make_run(Path("multirun/2026-01-03/10-00-00/0"), ["a=d"], rewards=[0.3])
    assert command("multirun", "--json", "--sort", "reward", "--ascending") == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run"][9] for row in rows] == ["1", "2", "3"]
    assert [row["overrides"]["a"] for row in rows] == ["'b,c'", "'b,c'", "d"]
    with pytest.raises(UserError, match="no run measured it; did you mean reward"):
        command("multirun", "--sort", "rewards")


SWEEP = ["mode=sync", "optimizer.lr=1,2", "train.resume=auto", "--multirun"]


OTHERS = (
    ["mode=sync", "optimizer.lr=1,2", "--multirun"],  # does not ask
    ["mode=sync", "optimizer.lr=1,2", "train.resume=auto"],  # is no sweep
    ["mode=sync", "optimizer.lr=2,1", "train.resume=auto", "--multirun"],  # its runs have other numbers
    ["hydra.sweep.dir=mine", *SWEEP],
)


def test_auto_continues_the_newest_sweep_of_the_same_command_that_is_not_alive_or_complete(tmp_path: Path) -> None:
    folders = [tmp_path / "2026-01-01" / f"{hour}-00-00" for hour in (10, 11, 12, 13)]
    for folder, arguments in zip(folders, [SWEEP] * 3 + [["mode=sync", "optimizer.lr=1,2,3", "--multirun"]]):
        make_run(folder / "0", finished=False)
        note_command(folder, arguments, complete=folder == folders[1])
    free = [*SWEEP[:2], "logging.wandb=offline", *SWEEP[2:]]  # changes nothing that is computed
    for arguments in (SWEEP, free):
        assert continued(arguments, tmp_path) == [f"hydra.sweep.dir={folders[2]}", *arguments]
    for arguments in OTHERS:
        assert continued(arguments, tmp_path) == arguments
    with (folders[2] / "0" / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert continued(SWEEP, tmp_path)[0] == f"hydra.sweep.dir={folders[0]}"
    for folder in (folders[2], folders[0]):
        note_command(folder, SWEEP, complete=True)
    assert continued(SWEEP, tmp_path) == SWEEP
