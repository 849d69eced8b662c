"""``sota_grpo.train`` as people use it: in a script and in a notebook. Stopped midway: tests/unit/test_api.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sota_grpo import Result
from tests.e2e.conftest import ROOT, SMALL, metrics, without_clock

NOTEBOOK = ROOT / "docs" / "python.ipynb"
HAS_JUPYTER = all(importlib.util.find_spec(name) is not None for name in ("nbclient", "ipykernel"))
SCRIPT = """
import sota_grpo

LONGEST = 10


def shorter(text):
    return len(text) < LONGEST


def brief(completions, answer, **columns):
    return [float(shorter(text)) for text in completions]


rows = [{{"prompt": f"How much is {{n}} + 1?", "answer": str(n + 1)}} for n in range(40)]
result = sota_grpo.train("grpo_cpu", reward=brief, dataset=rows, overrides={overrides!r}, run_dir={run_dir!r})
print("STEPS", len(result.metrics), result.finished)
"""
NO_HELDOUT = tuple(option for option in SMALL if not option.startswith("env.num_heldout="))  # a tenth of the rows is
OPTIONS = (
    *(*NO_HELDOUT, "engine=transformers", "check.mode=off", "eval.mode=off", "train.export_hf=false"),
    *("train.checkpoint_frequency=1", "logging.report=false", "train.total_dialog_turns=32"),
)


def test_from_python_and_from_the_command_line_it_is_the_same_run(tmp_path: Path, grpo, fork_server) -> None:
    """Same numbers, but for the clock: the rows in a file, the function in a file; a worker grades."""
    (tmp_path / "mine.py").write_text(SCRIPT.format(overrides=[*OPTIONS], run_dir=str(tmp_path / "run")))
    fork_server.run([str(tmp_path / "mine.py")], cwd=tmp_path).require("the script")
    rows = [json.dumps({"prompt": f"How much is {n} + 1?", "answer": str(n + 1)}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(SCRIPT.split("rows =")[0].replace("import sota_grpo", ""))
    table = ("env.dataset=table", f"env.dataset_path={tmp_path / 'rows.jsonl'}", "env.num_heldout=4")
    reward = (f"reward.path={tmp_path / 'reward.py'}", "reward.name=brief")
    done = grpo(tmp_path / "other", *OPTIONS, *table, *reward)
    assert done.returncode == 0, done.stderr
    assert without_clock(metrics(tmp_path / "run")) == without_clock(metrics(tmp_path / "other"))
    result = Result(tmp_path / "run")
    assert (result.metrics["reward_errors"] == 0).all()
    assert all(row["reward"] == float(len(row["response"]) < 10) for _, row in result.rollouts.iterrows())


@pytest.mark.slow
@pytest.mark.skipif(not HAS_JUPYTER, reason="the test extra's jupyter packages are not installed")
def test_the_notebook_runs(tmp_path: Path) -> None:
    import nbformat

    from scripts.execute_notebook import executed

    actual = executed(NOTEBOOK, tmp_path)
    saved = nbformat.read(NOTEBOOK, as_version=4)
    for new, old in zip(actual.cells, saved.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", [])] for cell in (new, old)]
        assert kinds[0] == kinds[1], f"make notebook: {new.source}"
    text = json.dumps(actual)
    assert "held out" in text
    assert NOTEBOOK.stat().st_size < 60_000
    (line,) = [out for cell in actual.cells for out in cell.get("outputs", []) if out.output_type == "display_data"]
    assert line.data["text/plain"].startswith("step 12/12")  # the progress, redrawn in place
