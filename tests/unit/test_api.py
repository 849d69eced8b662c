"""``sota_grpo.train``: the run of the scripts in a user's own process."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import sota_grpo
from sota_grpo.recording import run_log
from sota_grpo.run import api
from tests.process_rigs import workers

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(24)]
SMALL = [
    *("engine=scripted", "check.mode=off", "eval.mode=off", "logging.report=false", "train.export_hf=false"),
    *("train.checkpoint_frequency=1", "env.num_envs=8", "env.repeats=4", "inference_model.max_tokens=8"),
    *("train.dialog_turns_per_batch=8", "train.optim_batch_size=8", "train.total_dialog_turns=32"),
]


def _length() -> Callable[..., list[float]]:
    """A function that travels as code: its grader need not import this module, and torch with it."""

    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    return length


length = _length()


def trained(run_dir: Path, *overrides: str, **arguments: Any) -> sota_grpo.Result:
    arguments = {"reward": length, "dataset": ROWS, **arguments}
    return sota_grpo.train("grpo_cpu", overrides=[*SMALL, *overrides], run_dir=run_dir, **arguments)


def test_what_the_package_offers_is_there() -> None:
    assert {"Result", "RunFailed", "UserError", "train"} <= set(dir(sota_grpo))
    assert sota_grpo.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = sota_grpo.trian


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> sota_grpo.Result:
    """A run without an interrupt."""
    return trained(tmp_path_factory.mktemp("straight") / "run")


def test_rows_and_a_function_of_mine_make_a_run(straight: sota_grpo.Result) -> None:
    assert straight.run_dir.name == "run"
    assert straight.finished
    assert list(straight.metrics.index) == [0, 1, 2, 3]
    prompts = {row["prompt"] for row in ROWS}
    assert set(straight.rollouts["query"]) <= prompts
    for _, row in straight.rollouts.iterrows():
        assert row["reward_terms"] == {"length": float(len(row["response"]))}
    assert (straight.config["env"]["dataset"], straight.config["reward"]["name"]) == ("table", "length")
    assert Path(straight.config["env"]["dataset_path"]).is_relative_to(straight.run_dir)


def test_the_process_is_left_as_it_was_found(tmp_path: Path) -> None:
    logger, threads = logging.getLogger("sota_grpo"), torch.get_num_threads()
    handlers, level, signals = list(logger.handlers), logger.level, signal.getsignal(signal.SIGINT)
    folder, arguments, numbers = os.getcwd(), list(sys.argv), random.getstate()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(tmp_path / "run", "train.total_dialog_turns=8")
    assert torch.equal(torch.rand(3), expected)
    assert random.getstate() == numbers
    assert (list(logger.handlers), logger.level, signal.getsignal(signal.SIGINT)) == (handlers, level, signals)
    assert (os.getcwd(), sys.argv, torch.get_num_threads()) == (folder, arguments, threads)
    assert workers(os.getpid()) == {}


def test_sentences_are_shown_unless_the_caller_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logger, root = logging.getLogger("sota_grpo"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with api._own_console():
        logger.info("seen")
        logger.info("for the file", extra={"file_only": True})
    logger.info("after it")
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(io.StringIO())])
    with api._own_console():
        logger.warning("shown by the caller's own")
    assert stream.getvalue() == "seen\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"overrides": ["env.repeat=4"]}, "env.repeat"),
        ({"overrides": "env.repeats=4"}, "overrides is or has an object of type str; give a list of texts"),
        ({"overrides": ["hydra.run.dir=here"]}, r"hydra\.run\.dir has no effect here; give run_dir"),
        ({"dataset": ROWS[:1]}, "leaves none for training"),
        ({"reward": lambda completions, levels: [1.0]}, "parameters levels, but the data has the columns answer"),
    ],
)
def test_mistakes_are_one_sentence_of_a_user_error(tmp_path: Path, arguments: dict, sentence: str) -> None:
    arguments = {"config_name": "grpo_cpu", "dataset": ROWS, "run_dir": tmp_path / "run", **arguments}
    with pytest.raises(sota_grpo.UserError, match=sentence):
        sota_grpo.train(**arguments)


def test_an_interrupted_run_is_saved_closed_and_continued(straight, tmp_path: Path, monkeypatch) -> None:
    written, started = run_log.StepLog.write, dict[int, str]()

    def write(self: Any, step: int, *rest: Any) -> None:
        written(self, step, *rest)
        if step == 1:
            started.update(workers(os.getpid()))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_log.StepLog, "write", write)
    with pytest.raises(KeyboardInterrupt, match=r"train\.resume=auto continues .*sota_grpo\.Result\('.*run'\)"):
        trained(tmp_path / "run")
    assert started
    assert workers(os.getpid()) == {}
    assert list(sota_grpo.Result(tmp_path / "run").metrics.index) == [0, 1]
    monkeypatch.setattr(run_log.StepLog, "write", written)
    with pytest.raises(sota_grpo.UserError, match="started with another config"):
        trained(tmp_path / "run", "train.resume=auto", dataset=ROWS[1:])
    result = trained(tmp_path / "run", "train.resume=auto")
    assert list(result.metrics.index) == [0, 1, 2, 3]
    assert result.metrics["grad_norm"].tolist() == straight.metrics["grad_norm"].tolist()
    again = trained(tmp_path / "run", "train.resume=auto")  # it is finished: nothing is done twice
    assert len(again.metrics) == 4


def launched(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> list[Path]:
    """The directories of runs that do nothing but note them."""
    started: list[Path] = []

    def launch(config: Any, run_dir: Path, inputs: Any) -> bool:
        started.append(run_dir)
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").touch()
        inputs.run_dir = run_dir
        return stopped

    monkeypatch.setattr(api, "launch", launch)
    return started


def test_an_interrupt_after_the_last_step_is_raised_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a loop over seeds would go on."""
    launched(monkeypatch, stopped=True)
    with pytest.raises(KeyboardInterrupt, match=r"the run is finished; sota_grpo\.Result\('.*run'\) has its metrics"):
        trained(tmp_path / "run")


def test_a_run_may_be_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    started = launched(monkeypatch, stopped=False)
    assert sota_grpo.train("grpo_cpu", run_dir="~/run").run_dir == tmp_path / "run"
    assert started == [tmp_path / "run"]
    assert sota_grpo.Result("~/run").run_dir == tmp_path / "run"


def test_a_directory_of_its_own_for_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2026, 1, 31, 23, 59, 59)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "datetime", Clock)
    assert api._fresh_dir() == Path("outputs/2026-01-31/23-59-59")
    api._fresh_dir().mkdir(parents=True)
    assert api._fresh_dir() == Path("outputs/2026-02-01/00-00-00")


def test_it_trains_in_any_thread(tmp_path: Path) -> None:
    """Only the main thread may install signal handlers."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trained, tmp_path / "run", "train.total_dialog_turns=8").result(120).finished
