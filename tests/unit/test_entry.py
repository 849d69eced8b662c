"""The command line: what it makes of its arguments, and what it says and returns however a run ends."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

import sota_grpo.run.app
from sota_grpo.assembly import sampling
from sota_grpo.assembly.python_inputs import PythonInputs
from sota_grpo.config import Config, num_steps
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.progress import Heartbeat
from sota_grpo.recording.run_files import FAILURE_FILE, read_json
from sota_grpo.run import entry
from sota_grpo.run.app import CONTINUES, train
from sota_grpo.sweeps import SWEEP_FILE
from sota_grpo.training.runs import RunRefused, open_run


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command line in this process with ``train`` in place of the real one; returns the exit code."""
    monkeypatch.setattr(entry, "quiet_console", lambda: None)

    def run(train: Callable[..., int], *arguments: str, mode: str = "sync") -> int:
        monkeypatch.setattr(sota_grpo.run.app, "train", train)
        places = (f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'sweep'}")
        monkeypatch.setattr(sys, "argv", ["grpo.py", "--config-name", "grpo_cpu", *arguments, *places])
        with pytest.raises(SystemExit) as ended:
            entry.entry(mode)
        return ended.value.code

    return run


def does(effect: Callable[[Config, Path], object]) -> Callable[..., int]:
    """A fake training that has this effect and does all steps."""

    def train(config: Config, run_dir: Path, *_: object, on_locked: Callable[[Path], None]) -> int:
        on_locked(run_dir)
        effect(config, run_dir)
        return num_steps(config)

    return train


def test_overrides_may_be_on_both_sides_of_an_option(command, tmp_path: Path) -> None:
    actual: list[Config] = []
    train = does(lambda config, _: actual.append(config))
    assert command(train, "seed=3", "--multirun", "env.repeats=4,8", mode="async") == 0
    assert [(config.mode, config.seed, config.env.repeats) for config in actual] == [("async", 3, 4), ("async", 3, 8)]
    assert read_json(tmp_path / "sweep" / SWEEP_FILE)["complete"]
    assert command(train, "mode=sync", mode="async") == 0
    assert actual[-1].mode == "sync"


def test_a_refused_command_leaves_the_options_of_the_run_that_is_there(command, tmp_path: Path) -> None:
    train, noted = does(lambda _, run_dir: (run_dir / "run.json").write_text("{}")), tmp_path / "run" / ".hydra"
    assert command(train, "seed=3") == 0
    before = {path.name: path.read_text() for path in noted.iterdir()}
    assert before.keys() == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "seed=3" in before["overrides.yaml"]
    assert command(train, "seed=4", "optimizer.lr=0.5") == 2
    assert command(train, "seed=5", "train.resume=auto") == 0
    assert {path.name: path.read_text() for path in noted.iterdir()} == before


def test_only_the_process_with_the_lock_writes_to_a_directory(command, tmp_path: Path, monkeypatch) -> None:
    """Of two commands that start in one second, the second is refused after its checks; a sweep may be, before them."""
    monkeypatch.setattr(sota_grpo.run, "preflight", lambda *_: None)
    with open_run(tmp_path / "run", {"train": {}}, None, num_steps=1):
        assert command(train, "seed=4") == 2
    with open_run(tmp_path / "sweep" / "0", {"train": {}}, None, num_steps=1):
        assert command(Mock(side_effect=UserError("Mend it.")), "--multirun", "seed=4") == 2
    for folder in ("run", "sweep/0"):
        assert [path.name for path in (tmp_path / folder).iterdir()] == [".lock"]


def test_a_run_that_is_named_continues_with_its_own_config(command, tmp_path: Path) -> None:
    """Only what the command gives is another; the preset and the script that the run was started with need not be."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "run.json").write_text("{}")
    own = "{mode: async, model: {name: tiny}, env: {dataset: arithmetic, repeats: 16}, eval: {every: 7}}"
    (tmp_path / "before" / "config.yaml").write_text(own)
    actual: list[Config] = []
    assert (
        command(
            does(lambda config, _: actual.append(config)),
            f"train.resume={tmp_path / 'before'}",
            "train.total_dialog_turns=4096",
        )
        == 0
    )
    (config,) = actual
    assert (config.mode, config.env.repeats, config.eval.every, config.optimizer.lr) == ("async", 16, 7, 1e-6)
    assert config.train.total_dialog_turns == 4096
    assert not (tmp_path / "run").exists()  # that Hydra made for this command


def test_a_run_is_announced_and_its_start_is_watched(command, caplog: pytest.LogCaptureFixture) -> None:
    logger, watched = logging.getLogger("sota_grpo"), []
    before = logger.handlers[:]
    with caplog.at_level(logging.INFO, logger="sota_grpo"):
        assert command(does(lambda *_: watched.extend(logger.handlers))) == 0
    assert sum(isinstance(handler, Heartbeat) for handler in watched) == 1
    assert logger.handlers == before
    assert caplog.messages[0].startswith("Policy tiny, task arithmetic (mode=sync, engine=auto, device=cpu): ")


@pytest.mark.parametrize(("error", "code"), [(UserError("Mend it."), 2), (RunFailed("It died."), 1)])
def test_what_ends_a_run_is_one_sentence(error: Exception, code: int, command, capsys: pytest.CaptureFixture) -> None:
    assert command(Mock(side_effect=error)) == code
    assert capsys.readouterr().err == f"grpo.py: {error}\n"


def test_a_bug_keeps_its_traceback(command) -> None:
    """An OSError of the program is not taken for a directory that the user chose badly."""
    with pytest.raises(OSError, match="deep inside"):
        command(Mock(side_effect=OSError("deep inside")))


@pytest.mark.parametrize("how", ["between two steps", "at once", "after the last step"])
def test_an_interrupt_ends_the_whole_sweep(how: str, command, capsys: pytest.CaptureFixture) -> None:
    """After the last step the run is finished, its export too; as the only run of a command it has succeeded."""
    calls = []

    def train(config: Config, run_dir: Path, inputs: PythonInputs, **_: object) -> int:
        calls.append(run_dir)
        if how == "at once":
            raise KeyboardInterrupt
        inputs.stopped = how == "after the last step"
        return num_steps(config) if inputs.stopped else 1

    assert command(train, "--multirun", "seed=1,2") == 130
    assert len(calls) == 1
    kept = "finished runs are kept, train.resume=auto resumes the others"
    output = capsys.readouterr()
    assert f"grpo.py: interrupted; {CONTINUES if how == 'between two steps' else kept}.\n" in output.err
    if how == "after the last step":
        assert command(train, "seed=3") == 0
    else:
        assert "1 run, 1 stopped" in output.out


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_run_says_whether_it_can_continue(saved: bool, tmp_path: Path, monkeypatch) -> None:
    def build(*_: object, **__: object) -> None:
        if saved:
            (tmp_path / "checkpoints").mkdir()
            (tmp_path / "checkpoints" / "checkpoint_000004.pt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sota_grpo.run.app, "build", build)
    config = Config(device="cpu")
    config.model.name = "tiny"
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config, tmp_path)
    assert str(stopped.value) == (CONTINUES if saved else "")


def test_vllm_that_does_not_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = ValueError("no room\n  for the cache")
    monkeypatch.setattr(sampling, "resolve_engine_name", lambda name, device: name)
    config, tokenizer = Config(device="cpu"), load_tokenizer("tiny")
    config.model.name = "tiny"
    for name, error, raised, sentence in (
        ("vllm", full, RunFailed, r"^engine=vllm cannot start \(ValueError: no room for the cache\); correct"),
        (
            *("vllm", ModuleNotFoundError("No module named 'cbor2'"), RunFailed),
            r"'cbor2'\); install vLLM again, or use engine=transformers\.$",
        ),
        ("transformers", full, ValueError, "no room"),  # ours: what it raises is a bug, and keeps its traceback
    ):
        config.engine.name = name
        monkeypatch.setattr(sampling, "make_engine", Mock(side_effect=error))
        with pytest.raises(raised, match=sentence):
            sampling.start_engine(config, "cpu", tokenizer, None, tmp_path)


# --- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [(UserError("Mend it."), 2, "Mend it."), (ZeroDivisionError("a bug\nin a run"), 1, "ZeroDivisionError: a bug")],
    ids=["mistake", "bug"],
)
def test_a_run_that_fails_leaves_its_reason_and_others_continue(error, code, reason, command, tmp_path, capsys) -> None:
    trained = []

    def train(config: Config, *_: object, **__: object) -> int:
        if config.seed == 1:
            raise error
        trained.append(config.seed)
        return num_steps(config)

    assert command(train, "--multirun", "seed=1,2") == code
    assert trained == [2]
    assert read_json(tmp_path / "sweep" / "0" / FAILURE_FILE)["reason"] == reason
    output = capsys.readouterr()
    assert f"run 0 failed: {reason}" in output.out.splitlines()
    assert output.err.count("Traceback") == (1 if isinstance(error, ZeroDivisionError) else 0)
    summary = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert (summary["runs"][0]["overrides"]["seed"], summary["runs"][0]["state"]) == ("1", "failed")
    assert not read_json(tmp_path / "sweep" / SWEEP_FILE)["complete"]


def test_a_run_that_is_refused_leaves_another_runs_directory_alone(command, tmp_path: Path) -> None:
    assert command(Mock(side_effect=RunRefused("That is another run's.")), "--multirun", "seed=1") == 2
    assert read_json(tmp_path / "sweep" / "0" / FAILURE_FILE) is None


def test_two_sweeps_of_one_second_do_not_share_a_directory(tmp_path: Path) -> None:
    entry.Jobs(["-m", "seed=1,2"], "grpo.py")._open_sweep(tmp_path)
    with pytest.raises(UserError, match=r"Another sweep has begun in .*; start this one again"):
        entry.Jobs(["-m", "seed=1,2"], "grpo.py")._open_sweep(tmp_path)
    entry.Jobs(["-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}"], "grpo.py")._open_sweep(tmp_path)  # a resumed sweep


def test_a_sweeper_gets_what_a_run_measured_and_each_run_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    """Accuracy first; a run that failed gives nothing, which a sweeper counts as a failure."""

    def train(config: Config, run_dir: Path, *_: object, **__: object) -> int:
        if config.seed == 2:
            raise RunFailed("It died.")
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.75, "reward": 0.5}\n')
        return num_steps(config)

    monkeypatch.setattr(sota_grpo.run.app, "train", train)
    jobs = entry.Jobs(["--multirun"], "grpo.py")
    for seed, measured in ((1, 0.75), (2, None)):
        config = OmegaConf.structured(Config(seed=seed, device="cpu"))
        (tmp_path / str(seed)).mkdir()
        options = ("mode=sync", f"seed={seed}")
        assert jobs._one_of_a_sweep(config, tmp_path / str(seed), tmp_path, options) == measured
        assert capsys.readouterr().err.startswith(f"Run {seed} of the sweep: mode=sync, seed={seed}\n")
