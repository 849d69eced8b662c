"""A package that is installed beside this one adds a task, which the command line knows by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sota_grpo.assembly.compose import compose
from sota_grpo.errors import UserError
from sota_grpo.plugins import Registry
from sota_grpo.recording.sinks import require_sinks
from tests.e2e.conftest import SMALL, metrics

METADATA = "Metadata-Version: 2.1\nName: riddles\nVersion: 1\n"
ENTRY_POINTS = """
[sota_grpo.tasks]
riddles = riddles:RiddlesTask
broken = riddles:Missing
table = riddles:RiddlesTask
[sota_grpo.sinks]
lines = riddles:Lines
"""
MODULE = '''
from sota_grpo.recording.sinks import CopySink
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import chat


class Lines(CopySink):
    label, option = "The lines", "lines"

    @classmethod
    def from_config(cls, config, run_dir):
        sink = cls()
        sink.path = run_dir / "lines.txt"
        return sink

    def _write(self, step, values):
        with self.path.open("a") as file:
            print(step, "reward" in values, file=file)

    def _write_samples(self, step, rows): ...

    def _finish(self, exit_code): ...


class RiddlesTask:
    """Say the number that is asked for."""

    name, term_weights = "riddles", {"correct": 1.0}

    def __init__(self, *, num_train: int = 16, num_heldout: int = 8) -> None:
        made = [Example(f"Ann has {number} pens. How many pens has Ann?", str(number)) for number in range(1, 200)]
        self.train, self.heldout = made[:num_train], made[num_train : num_train + num_heldout]

    def messages(self, example):
        return chat(None, example.query)

    def score(self, response, example):
        correct = float(example.answer in response)
        return Score({"correct": correct}, correct == 1.0)

    def gold_response(self, example):
        return example.answer

    def read_row(self, row, place):
        return Example(row.get("question", ""), str(row["answer"]))
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the package as pip leaves it there."""
    site = tmp_path / "site"
    (site / "riddles-1.dist-info").mkdir(parents=True)
    (site / "riddles.py").write_text(MODULE)
    for name, text in (("METADATA", METADATA), ("entry_points.txt", ENTRY_POINTS)):
        (site / "riddles-1.dist-info" / name).write_text(text)
    return site


def test_a_task_of_a_package_trains(installed: Path, tmp_path: Path, grpo) -> None:
    options = ("env.dataset=riddles", "env.max_samples=16", "train.total_dialog_turns=32", "logging.sinks=[lines]")
    options += ("train.export_hf=false", "logging.report=false")
    done = grpo(tmp_path / "run", *SMALL, *options, env={"PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr
    assert {"0 True", "1 True"} <= {*(tmp_path / "run" / "lines.txt").read_text().splitlines()}
    assert len([row for row in metrics(tmp_path / "run") if row.get("reward") is not None]) == 2


def test_a_sink_that_no_package_has_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"logging.sinks=nowhere: no installed package"):
        require_sinks(compose("grpo_cpu", ["logging.sinks=[nowhere]"]))


def test_names_of_ours_stay_ours_and_a_broken_package_is_a_sentence(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    tasks: Registry[object] = Registry("sota_grpo.tasks", {"table": "sota_grpo.tasks.table:TableTask"})
    assert sorted(tasks) == ["broken", "riddles", "table"]
    assert (tasks["table"].__name__, tasks["riddles"].__name__) == ("TableTask", "RiddlesTask")  # type: ignore[attr-defined]
    assert "nothing" not in tasks
    with pytest.raises(UserError, match=r"broken .sota_grpo.tasks. of the package riddles names riddles:Missing"):
        tasks["broken"]
