"""A real run that is copied to every sink: everything that docs/logging.md promises arrives there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sota_grpo.recording.metrics import METRICS, declared
from sota_grpo.recording.run_log import ROLLOUT_FIELDS
from tests.e2e.conftest import ROOT, SMALL, command, metrics
from tests.forked import ForkServer
from tests.process_rigs import wait_for
from tests.sink_files import event_files, wandb_config, wandb_history, wandb_run

DOCS = (ROOT / "docs" / "logging.md").read_text()


def pending_future() -> dict[str, list[str]]:
    """What TorchRL's recipe logs, with our metrics of it: the first table of docs/logging.md."""
    table = DOCS.split("<!-- reference metrics -->")[1].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {theirs: [name.strip(" `") for name in ours.split(",")] for theirs, ours in cells}


def test_the_docs_show_the_glossary() -> None:
    table = ["| metric | what it is | unit | of a step's optimizer steps |", "|---|---|---|---|"]
    table += [f"| `{item.name}` | {item.sentence} | {item.unit} | {item.reduction} |" for item in METRICS.values()]
    assert DOCS.split("<!-- glossary -->")[1].strip().splitlines() == table, "\n".join(["This belongs there:", *table])


def test_every_promised_metric_is_declared() -> None:
    names = [name for ours in pending_future().values() for name in ours]
    assert len(pending_future()) == 8
    assert all(declared(name).name == name for name in names)


def test_everything_that_is_measured_reaches_wandb_and_tensorboard(tmp_path: Path, grpo) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    run_dir = tmp_path / "run"
    options = ("engine=scripted", "check.mode=off", "train.export_hf=false", "env.reward_workers=0")
    options += ("policy.kl_coef=0.01", "algorithm.entropy_coef=0.01")
    sinks = (
        "logging.wandb=offline",
        "logging.sinks=[tensorboard]",
        "logging.wandb_kwargs={tags: [one, two], name: mine}",
    )
    done = grpo(run_dir, *SMALL, *options, *sinks)
    assert done.returncode == 0, done.stderr
    written = metrics(run_dir)

    ((_, history),) = wandb_history(run_dir)
    sent = [{name: value for name, value in row.items() if not name.startswith(("_", "samples"))} for row in history]
    measured = [{name: value for name, value in row.items() if value is not None} for row in written]
    assert [row for row in sent if len(row) > 1] == measured
    names = {name for row in measured for name in row}
    assert {name for ours in pending_future().values() for name in ours} <= names
    (table,) = run_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["columns"] == ["step", *ROLLOUT_FIELDS]
    assert wandb_config(run_dir)["policy"] == {"kl_coef": 0.01}
    about = wandb_run(run_dir)
    assert (about.display_name, list(about.tags)) == ("mine", ["one", "two"])

    events = event_files(run_dir / "tensorboard")
    assert set(events.Tags()["scalars"]) == names - {"step"}
    for name in names - {"step"}:
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in measured if name in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected


def test_a_killed_sweep_with_every_copy_and_a_report_is_resumed(tmp_path: Path, fork_server: ForkServer) -> None:
    """W&B offline, then online without a key; TensorBoard; the report: each has the steps of the whole run.

    Run 0 is finished, which the summary says during the sweep, and run 1 is killed.
    """
    for package in ("wandb", "tensorboard"):
        pytest.importorskip(package)
    sweep = ("--multirun", *SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "logging.num_examine=1")
    sweep += (
        "train.total_dialog_turns=96",
        "train.checkpoint_frequency=2",
        "env.num_heldout=8",
        "env.reward_workers=0",
        "logging.wandb_kwargs={project: p}",
    )
    sweep += ("logging.sinks=[tensorboard]", f"hydra.sweep.dir={tmp_path}/sweep", "seed=1,2")
    places = {"NETRC": tmp_path / "netrc", "WANDB_CACHE_DIR": tmp_path / "cache"}
    process_options = {"cwd": tmp_path, "environment": [*((name, str(path)) for name, path in places.items())]}
    process_options["environment"].append(("WANDB_API_KEY", ""))
    first, second = (tmp_path / "sweep" / job for job in "01")

    process = fork_server.start(command(tmp_path, *sweep, "logging.wandb=offline")[1:], **process_options)
    wait_for(lambda: (second / "metrics.jsonl").exists() and len(metrics(second)) >= 3)
    os.kill(process, signal.SIGKILL)
    assert fork_server.finish().code == -signal.SIGKILL
    before = metrics(first)
    states = [run["state"] for run in json.loads((tmp_path / "sweep" / "summary.json").read_text())["runs"]]
    assert (states[0], len(before)) == ("finished", 6)
    again = [*sweep, "logging.wandb=online", "train.resume=auto"]
    done = fork_server.run(command(tmp_path, *again)[1:], **process_options)
    assert done.code == 0, done.stderr
    assert f"The run in {first} is already finished." in done.stdout
    assert metrics(first) == before
    assert f"Continuing {second} after" in done.stderr
    assert done.stderr.count("because no API key was found") == 1

    for run_dir in (first, second):
        rows = {row["step"]: row["entropy"] for row in metrics(run_dir)}
        assert list(rows) == list(range(6))
        assert len(set(rows.values())) == 6
        name, history = wandb_history(run_dir)[-1]  # what W&B had not written when it was killed is lost to it
        assert name == (run_dir / "wandb_run_id.txt").read_text().strip()
        sent = {row["step"]: row["entropy"] for row in history if "entropy" in row}
        assert sent == {step: rows[step] for step in range(2 if run_dir == second else 0, 6)}
        curve = event_files(run_dir / "tensorboard").Scalars("entropy")
        assert {event.step: event.value for event in curve} == pytest.approx(rows, rel=1e-6)
        assert len(curve) == len(rows)
        page = (run_dir / "report.html").read_text(encoding="utf-8")
        shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
        assert (shown["state"], shown["done"]) == ("finished", 6)
        starts = json.loads((run_dir / "run.json").read_text())["starts"]
        assert len(starts) == len(shown["starts"]) == (2 if run_dir == second else 1)
        assert starts[-1]["command"] in shown["starts"][-1]
        assert wandb_config(run_dir)["start"] == starts[-1]
    assert "2 runs, 2 finished" in done.stdout
    assert (tmp_path / "sweep" / "report.html").exists()
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["complete"]
