"""The command line: what it makes of its arguments, and what it says and returns however a run ends."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

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

    def run(train: Callable[[Config, Path], int], *arguments: str, mode: str = "sync") -> int:
        monkeypatch.setattr(sota_grpo.run.app, "train", train)
        places = (f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'sweep'}")
        monkeypatch.setattr(sys, "argv", ["grpo.py", "--config-name", "grpo_cpu", *arguments, *places])
        with pytest.raises(SystemExit) as ended:
            entry.entry(mode)
        return ended.value.code

    return run


def noting(found: list[Config]) -> Callable[..., int]:
    """A fake training that records its config and does all steps."""

    def train(config: Config, run_dir: Path, passed: object, on_locked: Callable[[Path], None]) -> int:
        on_locked(run_dir)
        found.append(config)
        return num_steps(config)

    return train


def raising(error: BaseException) -> Callable[..., int]:
    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
        raise error

    return train


def test_overrides_may_be_on_both_sides_of_an_option(command, tmp_path: Path) -> None:
    actual: list[Config] = []
    train = noting(actual)
    assert command(train, "seed=3", "--multirun", "env.repeats=4,8", mode="async") == 0
    assert [(config.mode, config.seed, config.env.repeats) for config in actual] == [("async", 3, 4), ("async", 3, 8)]
    assert read_json(tmp_path / "sweep" / SWEEP_FILE)["complete"]
    assert command(train, "mode=sync", mode="async") == 0
    assert actual[-1].mode == "sync"


def test_a_directory_may_be_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra does not read a value that begins with ``~``."""
    monkeypatch.setenv("HOME", "/home/me")
    arguments = ["hydra.run.dir=~/runs/a", "train.resume=~/b", "env.system_prompt='~/c'", "hydra.run.dir=d/~/e"]
    assert entry.below_home(arguments) == [
        "hydra.run.dir=/home/me/runs/a",
        "train.resume=/home/me/b",
        *arguments[2:],
    ]


def test_a_refused_command_leaves_the_options_of_the_run_that_is_there(command, tmp_path: Path) -> None:
    def train(config: Config, run_dir: Path, passed: object, on_locked: Callable[[Path], None]) -> int:
        on_locked(run_dir)
        (run_dir / "run.json").write_text("{}")
        return num_steps(config)

    noted = tmp_path / "run" / ".hydra"
    assert command(train, "seed=3") == 0
    before = {path.name: path.read_text() for path in noted.iterdir()}
    assert before.keys() == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "seed=3" in before["overrides.yaml"]
    assert command(train, "seed=4", "optimizer.lr=0.5") == 2
    assert command(train, "seed=5", "train.resume=auto") == 0
    assert {path.name: path.read_text() for path in noted.iterdir()} == before


def test_only_the_process_with_the_lock_writes_to_a_directory(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commands that start in one second, the second is refused after its checks; a sweep may be, before them."""
    monkeypatch.setattr(sota_grpo.run, "preflight", lambda *_: None)
    with open_run(tmp_path / "run", {"train": {}}, None, num_steps=1):
        assert command(train, "seed=4") == 2
    with open_run(tmp_path / "sweep" / "0", {"train": {}}, None, num_steps=1):
        assert command(raising(UserError("Mend it.")), "--multirun", "seed=4") == 2
    for folder in ("run", "sweep/0"):
        assert [path.name for path in (tmp_path / folder).iterdir()] == [".lock"]


def test_a_run_that_is_named_continues_with_its_own_config(command, tmp_path: Path) -> None:
    """Only what the command gives is another; the preset and the script that the run was started with need not be."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "run.json").write_text("{}")
    own = "{mode: async, model: {name: tiny}, env: {dataset: arithmetic, repeats: 16}, eval: {every: 7}}"
    (tmp_path / "before" / "config.yaml").write_text(own)
    actual: list[Config] = []
    assert command(noting(actual), f"train.resume={tmp_path / 'before'}", "train.total_dialog_turns=4096") == 0
    (config,) = actual
    assert (config.mode, config.env.repeats, config.eval.every, config.optimizer.lr) == ("async", 16, 7, 1e-6)
    assert config.train.total_dialog_turns == 4096
    assert not (tmp_path / "run").exists()  # that Hydra made for this command


def test_a_run_is_announced_and_its_start_is_watched(command, caplog: pytest.LogCaptureFixture) -> None:
    logger, before = logging.getLogger("sota_grpo"), logging.getLogger("sota_grpo").handlers[:]
    watched = []

    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
        watched.extend(handler for handler in logger.handlers if isinstance(handler, Heartbeat))
        return num_steps(config)

    with caplog.at_level(logging.INFO, logger="sota_grpo"):
        assert command(train) == 0
    assert len(watched) == 1
    assert logger.handlers == before
    assert caplog.messages[0].startswith("Policy tiny, task arithmetic (mode=sync, engine=auto, device=cpu): ")


@pytest.mark.parametrize(("error", "code"), [(UserError("Mend it."), 2), (RunFailed("It died."), 1)])
def test_what_ends_a_run_is_one_sentence(error: Exception, code: int, command, capsys: pytest.CaptureFixture) -> None:
    assert command(raising(error)) == code
    assert capsys.readouterr().err == f"grpo.py: {error}\n"


@pytest.mark.parametrize("how", ["between two steps", "at once"])
def test_an_interrupt_ends_the_whole_sweep(how: str, command, capsys: pytest.CaptureFixture) -> None:
    calls = []

    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
        calls.append(run_dir)
        if how == "at once":
            raise KeyboardInterrupt
        return 1

    assert command(train, "--multirun", "seed=1,2") == 130
    assert len(calls) == 1
    kept = "finished runs are kept, train.resume=auto resumes the others"
    output = capsys.readouterr()
    assert f"grpo.py: interrupted; {kept if how == 'at once' else CONTINUES}.\n" in output.err
    assert "1 run, 1 stopped" in output.out


def test_an_interrupt_after_the_last_step_of_a_run_ends_the_sweep_too(command, capsys: pytest.CaptureFixture) -> None:
    """The run is evaluated, exported and finished; as the only run of a command it has succeeded."""
    calls = []

    def train(config: Config, run_dir: Path, inputs: PythonInputs, **_: object) -> int:
        calls.append(run_dir)
        inputs.stopped = True
        return num_steps(config)

    assert command(train, "--multirun", "seed=1,2") == 130
    assert len(calls) == 1
    kept = "finished runs are kept, train.resume=auto resumes the others"
    assert f"grpo.py: interrupted; {kept}.\n" in capsys.readouterr().err
    assert command(train, "seed=3") == 0


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_run_says_whether_it_can_continue(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    def fail(name: str, **_: object) -> None:
        raise ValueError("no room\n  for the cache")

    monkeypatch.setattr(sampling, "make_engine", fail)
    monkeypatch.setattr(sampling, "resolve_engine_name", lambda name, device: name)
    config = Config(device="cpu")
    config.model.name = "tiny"
    tokenizer = load_tokenizer("tiny")
    config.engine.name = "vllm"
    with pytest.raises(RunFailed, match=r"^engine=vllm cannot start \(ValueError: no room for the cache\); correct"):
        sampling.start_engine(config, "cpu", tokenizer, None, tmp_path)
    broken = ModuleNotFoundError("No module named 'cbor2'")
    monkeypatch.setattr(sampling, "make_engine", lambda *_, **__: (_ for _ in ()).throw(broken))
    with pytest.raises(RunFailed, match=r"'cbor2'\); install vLLM again, or use engine=transformers\.$"):
        sampling.start_engine(config, "cpu", tokenizer, None, tmp_path)
    monkeypatch.setattr(sampling, "make_engine", fail)
    config.engine.name = "transformers"  # ours: what it raises is a bug, and keeps its traceback
    with pytest.raises(ValueError, match="no room"):
        sampling.start_engine(config, "cpu", tokenizer, None, tmp_path)


# --- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UserError("Mend it."), 2, "Mend it."),
        (ZeroDivisionError("a bug\nin a run"), 1, "ZeroDivisionError: a bug"),
    ],
    ids=["mistake", "bug"],
)
def test_a_run_that_fails_leaves_its_reason_and_the_others_continue(
    error: Exception, code: int, reason: str, command, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    trained = []

    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
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
    assert [(run["overrides"]["seed"], run["state"]) for run in summary["runs"]][:1] == [("1", "failed")]
    assert not read_json(tmp_path / "sweep" / SWEEP_FILE)["complete"]


def test_a_run_that_is_refused_leaves_another_runs_directory_alone(command, tmp_path: Path) -> None:
    assert command(raising(RunRefused("That is another run's.")), "--multirun", "seed=1") == 2
    assert read_json(tmp_path / "sweep" / "0" / FAILURE_FILE) is None


def test_a_sweeper_gets_what_a_run_measured_and_each_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracy first; a run that failed gives nothing, which a sweeper counts as a failure."""
    from sota_grpo.run.entry import Jobs

    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
        if config.seed == 2:
            raise RunFailed("It died.")
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.75, "reward": 0.5}\n')
        return num_steps(config)

    monkeypatch.setattr(sota_grpo.run.app, "train", train)
    jobs = Jobs(["--multirun"], "grpo.py")
    actual = []
    for seed in (1, 2):
        config = OmegaConf.structured(Config(seed=seed, device="cpu"))
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        actual.append(jobs._one_of_a_sweep(config, run_dir, tmp_path, ("mode=sync", f"seed={seed}")))
        assert capsys.readouterr().err.startswith(f"Run {seed} of the sweep: mode=sync, seed={seed}\n")
    assert actual == [0.75, None]
