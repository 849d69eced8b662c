"""Which directory a command works in."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sota_grpo.errors import UserError
from sota_grpo.training import runs
from sota_grpo.training.runs import (
    CHECKPOINTS,
    FILES,
    FREE_OPTIONS,
    RUN_FILE,
    RunDir,
    RunRefused,
    drop_empty,
    open_run,
    read_record,
    require_free,
    signature,
)

CONFIG = {
    "seed": 1,
    "engine": {"name": "scripted"},
    "optimizer": {"schedule": "constant"},
    "train": {"resume": None, "epochs": 1, "total_dialog_turns": 64},
    "logging": {"level": "info"},
}
OTHER = {**CONFIG, "seed": 2}
STEPS = 4


def run_at(root: Path, day: str, clock: str) -> Path:
    return root / "outputs" / day / clock


def opened(run_dir: Path, resume: str | None, config: dict = CONFIG, num_steps: int = STEPS) -> RunDir:
    return open_run(run_dir, config, resume, num_steps=num_steps)


def started(
    run_dir: Path, config: dict = CONFIG, *, saved_at: int | None = None, at: int = 1000, finished: bool = False
) -> Path:
    """A run that was killed, or finished; ``at`` and ``saved_at`` are when it was started and last saved."""
    with opened(run_dir, None, config) as place:
        place.start("seed: 1\n")
        if finished:
            place.finish()
    os.utime(run_dir / RUN_FILE, (at, at))
    if saved_at is not None:
        (run_dir / CHECKPOINTS).mkdir()
        path = run_dir / CHECKPOINTS / "checkpoint_000001.pt"
        path.touch()
        os.utime(path, (saved_at, saved_at))
    return run_dir


def with_option(section: str, option: str, value: object, config: dict = CONFIG) -> dict:
    return {**config, section: {**config.get(section, {}), option: value}}


def test_an_option_that_changes_nothing_that_is_computed_is_free() -> None:
    for name in (*FREE_OPTIONS, "logging.level"):
        section, _, option = name.partition(".")
        assert signature(with_option(section, option, 1)) == signature(with_option(section, option, 2)), name

    for section, option in (("train", "epochs"), ("eval", "every"), ("train", "optim_batch_size")):
        assert signature(with_option(section, option, 1)) != signature(with_option(section, option, 2)), option
    # the length is signed where the learning rate depends on it
    for schedule, same in (("constant", True), ("linear", False), ("cosine", False)):
        config = with_option("optimizer", "schedule", schedule)
        longer = with_option("train", "total_dialog_turns", 128, config)
        assert (signature(config) == signature(longer)) is same, schedule


def test_the_engine_is_resolved_for_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes the GPU, so on a machine that has both ``device=cpu`` turns auto into transformers."""
    monkeypatch.setattr("sota_grpo.engines.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device, engine in (("cpu", "transformers"), ("cuda", "vllm")):
        config = {**CONFIG, "device": device}
        auto, named = (signature(with_option("engine", "name", name, config)) for name in ("auto", engine))
        assert auto == named, device


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return run_at(tmp_path, "2026-01-01", "10-00-00")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return run_at(tmp_path, "2026-01-02", "09-00-00")


def taken(own: Path, resume: str | None, config: dict = CONFIG, num_steps: int = STEPS) -> tuple[Path, bool, bool]:
    """Which directory a command takes, and whether its run is resumed, and finished."""
    with opened(own, resume, config, num_steps) as place:
        return place.path, place.resumed, place.finished


def refused(match: str, own: Path, resume: str | None, *more: Any) -> None:
    with pytest.raises(UserError, match=match):
        opened(own, resume, *more)


def test_a_fresh_command_starts_in_its_own_directory_and_one_that_fails_leaves_no_run(old: Path, fresh: Path) -> None:
    assert taken(old, None) == (old, False, False)  # never started: the assembly or the gate failed
    assert not (old / RUN_FILE).exists()
    assert not taken(old, None, OTHER)[1]
    assert taken(fresh, "auto")[0] == fresh
    assert (started(old) / "config.yaml").read_text() == "seed: 1\n"
    refused("already holds a run", old, None)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "checkpoints/checkpoint_001000.pt"])
def test_a_directory_with_files_of_another_program_is_refused(name: str, resume: str | None, tmp_path: Path) -> None:
    """A new run begins its logs at step 0, and deletes checkpoints of later steps."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"step": 7, "loss": 0.5}\n')
    refused(rf"has {name}, but no run\.json.*choose another hydra\.run\.dir", tmp_path, resume)
    path.write_text("")  # left by a start that failed
    if name.endswith(".jsonl"):
        taken(tmp_path, resume)


def test_a_failure_file_that_cannot_be_deleted_is_a_sentence(old: Path) -> None:
    (old / "failure.json").mkdir(parents=True)
    with opened(old, None) as place, pytest.raises(UserError, match="2026-01-01"):
        place.start("seed: 1\n")


@pytest.mark.parametrize(
    "runs",  # the second is to be resumed
    [
        [{"at": 1}, {"at": 2}, {"at": 3, "finished": True}, {"at": 4, "config": OTHER}],
        [{"at": 1, "saved_at": 10}, {"at": 2, "saved_at": 12}, {"at": 3, "saved_at": 11}, {"at": 4}],
    ],
    ids=["the newest unfinished run of the same config", "the run that saved last, not newer ones without progress"],
)
def test_auto_takes(runs: list[dict[str, Any]], tmp_path: Path, fresh: Path) -> None:
    paths = [run_at(tmp_path, "2026-01-01", f"1{n}-00-00") for n in range(4)]
    for path, options in zip(paths, runs, strict=True):
        started(path, **options)
    (fresh / ".hydra").mkdir(parents=True)
    assert taken(fresh, "auto") == (paths[1], True, False)
    assert not fresh.exists()


def test_auto_leaves_a_run_that_is_alive_alone(tmp_path: Path, old: Path, fresh: Path) -> None:
    started(old, saved_at=1)
    alive = started(run_at(tmp_path, "2026-01-01", "11-00-00"), saved_at=2)
    with opened(alive, "auto"), opened(fresh, "auto") as place:
        assert place.path == old
        assert taken(fresh, "auto") == (fresh, False, False)
    assert taken(fresh, "auto")[0] == alive


@pytest.mark.parametrize("resume", ["auto", "its name", "its own directory"])
def test_a_run_is_continued_without_leftovers_and_not_through_links(
    resume: str, tmp_path: Path, old: Path, fresh: Path
) -> None:
    started(old)
    command = (old if resume == "its own directory" else fresh, str(old) if resume == "its name" else "auto")
    (old / ".metrics.jsonl.0123abcd.tmp").write_text("half")
    assert taken(*command)[0] == old
    assert not [*old.glob("*.tmp")]
    (tmp_path / "victim").write_text("mine")
    for name in ("rollouts.jsonl", ".lock"):
        (old / name).unlink(missing_ok=True)
        (old / name).symlink_to(tmp_path / "victim")
        refused(rf"{name}: it is a link that leaves the run directory", *command)
        (old / name).unlink()
    assert (tmp_path / "victim").read_text() == "mine"


def test_auto_passes_over_a_run_file_of_another_program(old: Path, fresh: Path) -> None:
    old.mkdir(parents=True)
    for text in ("{}", "[]", "null", "not json", '{"signature": 3}'):
        (old / RUN_FILE).write_text(text)
        assert taken(fresh, "auto") == (fresh, False, False)
        refused("another config", old, "auto")


def test_auto_looks_only_beside_directories_named_by_the_clock(tmp_path: Path, old: Path, fresh: Path) -> None:
    started(tmp_path / "a" / "x", saved_at=1)
    started(tmp_path / "outputs" / "archive" / "old", saved_at=9)
    started(old, saved_at=1)
    assert taken(fresh, "auto")[0] == old
    for mine in (tmp_path / "a" / "y", tmp_path / "b" / "y", run_at(tmp_path, "2026-01-01", "mine")):
        assert taken(mine, "auto") == (mine, False, False)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without `flock`."""
    lacking = Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
    monkeypatch.setattr(runs.fcntl, "flock", lacking)
    refused(r"locks no files \(Function not implemented\).*mount it with flock, or set hydra", tmp_path / "run", None)


def test_a_named_run_must_be_there_and_of_the_same_config(tmp_path: Path, old: Path, fresh: Path) -> None:
    nowhere = tmp_path / "nowhere"
    refused(r"there is no run in .*, or start a run there with hydra\.run\.dir=", fresh, str(nowhere))
    assert not nowhere.exists()
    started(old)
    refused("another config", fresh, str(old), OTHER)
    assert taken(fresh, str(old)) == (old, True, False)


def test_a_run_may_be_named_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ``~`` of OPTION=~/.. alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    started(tmp_path / "runs" / "a")
    require_free(tmp_path / "fresh", "~/runs/a")
    assert taken(tmp_path / "fresh", "~/runs/a")[0] == tmp_path / "runs" / "a"


def test_a_run_that_is_alive_is_refused_by_name_and_in_its_own_directory(old: Path, fresh: Path) -> None:
    started(old)
    with opened(old, "auto"):
        for own, resume in ((old, "auto"), (old, None), (fresh, str(old))):
            refused("Another process uses", own, resume)
    taken(old, "auto")


def test_a_killed_process_frees_its_run_whatever_it_left_behind(tmp_path: Path) -> None:
    """The process dies by SIGKILL; a worker that it had forked lives on."""
    code = (
        "import os, signal, sys, time; from pathlib import Path; from sota_grpo.training.runs import open_run\n"
        f"place = open_run(Path(sys.argv[1]), {CONFIG!r}, None, num_steps=4); place.start('')\n"
        "if not os.fork(): print(os.getpid(), flush=True); time.sleep(60); os._exit(0)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        refused("Another process uses", tmp_path / "run", "auto")
        process.kill()
        process.wait()
        try:
            assert taken(tmp_path / "run", "auto")[1]
        finally:
            os.kill(worker, 9)


def test_a_finished_run_is_finished_until_more_turns_are_requested_and_none_becomes_shorter(
    old: Path, fresh: Path
) -> None:
    started(old, finished=True)
    for command in ((old, "auto"), (fresh, str(old))):
        assert taken(*command) == (old, True, True)
        assert taken(*command, num_steps=STEPS + 1) == (old, True, False)
    with opened(fresh, str(old), num_steps=STEPS + 1) as place:
        place.start("")
    record = read_record(old)
    assert record is not None
    assert (record["num_steps"], record["finished"]) == (STEPS + 1, False)
    refused("started for 5 steps, but this command sets 3", fresh, str(old), CONFIG, STEPS - 1)
    assert taken(fresh, "auto", num_steps=STEPS - 1)[0] == fresh


def test_a_run_under_a_schedule_becomes_longer_where_it_is_named(old: Path, fresh: Path) -> None:
    config = with_option("optimizer", "schedule", "linear")
    with opened(old, None, config) as place:
        place.start(json.dumps(config))
        place.finish()
    longer = with_option("train", "total_dialog_turns", 128, config)
    for own, resume in ((fresh, str(old)), (old, "auto")):
        with opened(own, resume, longer, 2 * STEPS) as place:
            assert (place.path, place.finished, place.shorter) == (old, False, STEPS)
    with opened(fresh, "auto", longer, 2 * STEPS) as place:
        assert (place.path, place.shorter) == (fresh, None)  # it is no run of this config
    two_epochs = with_option("train", "epochs", 2, longer)
    refused(r"another config\. Different: train\.epochs", fresh, str(old), two_epochs, 2 * STEPS)


def test_a_longer_run_that_a_full_disk_stops_between_its_files_is_started_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_option("optimizer", "schedule", "linear")
    with opened(tmp_path, None, config) as place:
        place.start(json.dumps(config))
    longer = with_option("train", "total_dialog_turns", 128, config)
    with opened(tmp_path, "auto", longer, 2 * STEPS) as place, monkeypatch.context() as patch:
        left = [runs.write_text]  # room for one file
        patch.setattr(runs, "write_text", lambda path, text: left.pop()(path, text) if left else os.read(-1, 1))
        with pytest.raises(UserError, match="cannot be written"):
            place.start(json.dumps(longer))
    assert taken(tmp_path, "auto", longer, 2 * STEPS)[1]


def test_what_was_made_for_a_command_is_gone_and_what_was_there_is_not(tmp_path: Path, old: Path, fresh: Path) -> None:
    for folder in (fresh, old):
        (folder / ".hydra").mkdir(parents=True)
    (old / "training.log").touch()
    drop_empty(old)
    drop_empty(fresh)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["2026-01-01"]
    assert (old / ".hydra").is_dir()


def test_a_file_counts_by_what_it_holds(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    names = (*(str(tmp_path / n) for n in "abc"), "org/table")
    for section, _, option in (name.partition(".") for name in FILES):
        a, b, c, hub = (signature(with_option(section, option, name)) for name in names)
        assert a == b != c != hub != a, option


def test_a_refusal_names_what_differs(tmp_path: Path) -> None:
    with opened(tmp_path, None) as place:
        place.start("seed: 1\ntrain: {epochs: 1, total_dialog_turns: 64}\nlogging: {level: warning}\n")
    for match, config in (
        (
            r"another config\. Different: seed, train\.epochs\. Give the options of",
            with_option("train", "epochs", 2, OTHER),
        ),
        ("Different: the content of a file, a Python input or the engine", {**CONFIG, "passed": {"train": "0"}}),
        (r"Different: env\.mixture\.a\.weight\. Give", with_option("env", "mixture", {"a": {"weight": 1}})),
    ):
        refused(match, tmp_path, "auto", config)
    (tmp_path / "config.yaml").unlink()
    refused(r"another config, and its config\.yaml is missing or empty; choose another", tmp_path, "auto", OTHER)


def test_a_run_continues_with_the_models_that_it_was_started_with(tmp_path: Path) -> None:
    models = {"model.name": "aa", "ref_model.name": None}
    with opened(tmp_path, None) as place:
        place.require_models(models)
        place.start("seed: 1\n")
    with opened(tmp_path, "auto") as place:
        place.require_models(models | {"ref_model.name": "bb"})  # was not known
        with pytest.raises(RunRefused, match=r"other files of model.name .digest aa, now cc.; restore"):
            place.require_models({"model.name": "cc"})


def test_an_error_to_which_the_system_gave_no_reason_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot be written \(quota\);"), runs.writing_in(Path("run")):
        raise OSError("quota")
