"""A real run that is copied to W&B and TensorBoard: everything that docs/logging.md promises arrives there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sota_grpo.recording.metrics import METRICS, declared
from sota_grpo.recording.run_log import ROLLOUT_FIELDS
from tests.e2e.conftest import ROOT, SMALL, metrics
from tests.sink_files import event_files, wandb_config, wandb_history, wandb_run

DOCS = (ROOT / "docs" / "logging.md").read_text()


def promised() -> dict[str, list[str]]:
    """What TorchRL's recipe logs, with our metrics of it: the first table of docs/logging.md."""
    table = DOCS.split("<!-- reference metrics -->")[1].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {theirs: [name.strip(" `") for name in ours.split(",")] for theirs, ours in cells}


def test_the_docs_show_the_glossary() -> None:
    table = ["| metric | what it is | unit | of a step's optimizer steps |", "|---|---|---|---|"]
    table += [f"| `{item.name}` | {item.sentence} | {item.unit} | {item.reduction} |" for item in METRICS.values()]
    assert DOCS.split("<!-- glossary -->")[1].strip().splitlines() == table, "\n".join(["This belongs there:", *table])


def test_every_promised_metric_is_declared() -> None:
    names = [name for ours in promised().values() for name in ours]
    assert len(promised()) == 8
    assert all(declared(name).name == name for name in names)


def test_everything_that_is_measured_reaches_wandb_and_tensorboard(tmp_path: Path, grpo) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    run_dir = tmp_path / "run"
    options = ("engine=scripted", "check.mode=off", "train.export_hf=false")
    options += ("policy.kl_coef=0.01", "algorithm.entropy_coef=0.01")
    sinks = ("logging.wandb=offline", "logging.tensorboard=true", "logging.tags=[one,two]", "logging.run_name=mine")
    done = grpo(run_dir, *SMALL, *options, *sinks)
    assert done.returncode == 0, done.stderr
    written = metrics(run_dir)

    ((_, history),) = wandb_history(run_dir)
    sent = [{name: value for name, value in row.items() if not name.startswith(("_", "samples"))} for row in history]
    measured = [{name: value for name, value in row.items() if value is not None} for row in written]
    assert [row for row in sent if len(row) > 1] == measured
    names = {name for row in measured for name in row}
    assert {name for ours in promised().values() for name in ours} <= names
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
