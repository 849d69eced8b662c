"""Which directory a command works in."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

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


# --- what makes two runs the same -------------------------------------------------------------------------------------


def test_an_option_that_changes_nothing_that_is_computed_is_free() -> None:
    for name in (*FREE_OPTIONS, "logging.level"):
        section, _, option = name.partition(".")
        assert signature(with_option(section, option, 1)) == signature(with_option(section, option, 2)), name

    for section, option in (("train", "epochs"), ("eval", "every"), ("train", "optim_batch_size")):
        assert signature(with_option(section, option, 1)) != signature(with_option(section, option, 2)), option


def test_the_length_is_signed_where_the_learning_rate_depends_on_it() -> None:
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


# --- a directory of one's own -----------------------------------------------------------------------------------------


def test_a_fresh_command_starts_in_its_own_directory(tmp_path: Path) -> None:
    run_dir = run_at(tmp_path, "2026-01-01", "10-00-00")
    with opened(run_dir, None) as place:
        assert (place.path, place.resumed, place.finished) == (run_dir, False, False)
        place.start("seed: 1\n")
    assert (run_dir / "config.yaml").read_text() == "seed: 1\n"
    with pytest.raises(UserError, match="already holds a run"):
        opened(run_dir, None)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "checkpoints/checkpoint_001000.pt"])
def test_a_directory_with_files_of_another_program_is_refused(name: str, resume: str | None, tmp_path: Path) -> None:
    """A new run begins its logs at step 0, and deletes checkpoints of later steps."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"step": 7, "loss": 0.5}\n')
    with pytest.raises(RunRefused, match=rf"has {name}, but no run\.json.*choose another hydra\.run\.dir"):
        opened(tmp_path, resume)
    path.write_text("")  # left by a start that failed
    if name.endswith(".jsonl"):
        opened(tmp_path, resume).close()


def test_a_failure_file_that_cannot_be_deleted_is_a_sentence(tmp_path: Path) -> None:
    run_dir = run_at(tmp_path, "2026-01-01", "10-00-00")
    (run_dir / "failure.json").mkdir(parents=True)
    with opened(run_dir, None) as place, pytest.raises(UserError, match="2026-01-01"):
        place.start("seed: 1\n")


def test_a_first_start_that_fails_leaves_no_run(tmp_path: Path) -> None:
    run_dir = run_at(tmp_path, "2026-01-01", "10-00-00")
    opened(run_dir, None).close()  # never started: the assembly or the gate failed
    assert not (run_dir / RUN_FILE).exists()
    with opened(run_dir, None, OTHER) as corrected:
        assert not corrected.resumed
    with opened(run_at(tmp_path, "2026-01-02", "10-00-00"), "auto") as place:
        assert place.path != run_dir


# --- auto -------------------------------------------------------------------------------------------------------------


def test_auto_takes_the_newest_unfinished_run_of_the_same_config(tmp_path: Path) -> None:
    runs = [run_at(tmp_path, "2026-01-01", f"1{n}-00-00") for n in range(4)]
    for age, run_dir in enumerate(runs):
        config = OTHER if run_dir == runs[3] else CONFIG
        started(run_dir, config, at=1000 + age, finished=run_dir == runs[2])
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    (fresh / ".hydra").mkdir(parents=True)
    with opened(fresh, "auto") as place:
        assert (place.path, place.resumed, place.finished) == (runs[1], True, False)
    assert not fresh.exists()


def test_auto_prefers_the_run_that_saved_last_to_newer_ones_without_progress(tmp_path: Path) -> None:
    day = "2026-01-01"
    started(run_at(tmp_path, day, "10-00-00"), at=1, saved_at=10)
    best = started(run_at(tmp_path, day, "11-00-00"), at=2, saved_at=12)
    started(run_at(tmp_path, day, "12-00-00"), at=3, saved_at=11)
    started(run_at(tmp_path, day, "13-00-00"), at=4)
    with opened(run_at(tmp_path, "2026-01-02", "09-00-00"), "auto") as place:
        assert place.path == best


def test_auto_leaves_a_run_that_is_alive_alone(tmp_path: Path) -> None:
    old = started(run_at(tmp_path, "2026-01-01", "10-00-00"), saved_at=1)
    alive = started(run_at(tmp_path, "2026-01-01", "11-00-00"), saved_at=2)
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    with opened(alive, "auto"), opened(fresh, "auto") as place:
        assert place.path == old
        with opened(fresh, "auto") as third:
            assert (third.path, third.resumed) == (fresh, False)
    with opened(fresh, "auto") as place:
        assert place.path == alive


@pytest.mark.parametrize("resume", ["auto", "its name", "its own directory"])
def test_a_run_is_continued_without_leftovers_and_not_through_links(resume: str, tmp_path: Path) -> None:
    run_dir, fresh = started(run_at(tmp_path, "2026-01-01", "10-00-00")), run_at(tmp_path, "2026-01-02", "09-00-00")
    own = run_dir if resume == "its own directory" else fresh
    said = str(run_dir) if resume == "its name" else "auto"
    (run_dir / ".metrics.jsonl.0123abcd.tmp").write_text("half")
    with opened(own, said) as place:
        assert place.path == run_dir
    assert not [*run_dir.glob("*.tmp")]
    (tmp_path / "victim").write_text("mine")
    for name in ("rollouts.jsonl", ".lock"):
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).symlink_to(tmp_path / "victim")
        with pytest.raises(UserError, match=rf"{name}: it is a link that leaves the run directory"):
            opened(own, said)
        (run_dir / name).unlink()
    assert (tmp_path / "victim").read_text() == "mine"


def test_auto_passes_over_a_run_file_of_another_program(tmp_path: Path) -> None:
    foreign, fresh = run_at(tmp_path, "2026-01-01", "10-00-00"), run_at(tmp_path, "2026-01-02", "09-00-00")
    foreign.mkdir(parents=True)
    for text in ("{}", "[]", "null", "not json", '{"signature": 3}'):
        (foreign / RUN_FILE).write_text(text)
        with opened(fresh, "auto") as place:
            assert (place.path, place.resumed) == (fresh, False)
        with pytest.raises(UserError, match="another config"):
            opened(foreign, "auto")


def test_auto_looks_only_beside_directories_named_by_the_clock(tmp_path: Path) -> None:
    started(tmp_path / "a" / "x", saved_at=1)
    started(tmp_path / "outputs" / "archive" / "old", saved_at=9)
    old = started(run_at(tmp_path, "2026-01-01", "10-00-00"), saved_at=1)
    with opened(run_at(tmp_path, "2026-01-02", "10-00-00"), "auto") as place:
        assert place.path == old
    for mine in (tmp_path / "a" / "y", tmp_path / "b" / "y", run_at(tmp_path, "2026-01-01", "mine")):
        with opened(mine, "auto") as place:
            assert (place.path, place.resumed) == (mine, False)


# --- a run by its name ------------------------------------------------------------------------------------------------


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without `flock`."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(runs.fcntl, "flock", flock)
    with pytest.raises(
        UserError, match=r"locks no files \(Function not implemented\).*mount it with flock, or set hydra"
    ):
        opened(tmp_path / "run", None)


def test_a_named_run_must_be_there_and_of_the_same_config(tmp_path: Path) -> None:
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    with pytest.raises(UserError, match=r"there is no run in .*, or start a run there with hydra\.run\.dir="):
        opened(fresh, str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()
    old = started(run_at(tmp_path, "2026-01-01", "10-00-00"))
    with pytest.raises(UserError, match="another config"):
        opened(fresh, str(old), OTHER)
    with opened(fresh, str(old)) as place:
        assert (place.path, place.resumed) == (old, True)


def test_a_run_may_be_named_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ``~`` of OPTION=~/.. alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    started(tmp_path / "runs" / "a")
    require_free(tmp_path / "fresh", "~/runs/a")
    with opened(tmp_path / "fresh", "~/runs/a") as place:
        assert place.path == tmp_path / "runs" / "a"


def test_a_run_that_is_alive_is_refused_by_name_and_in_its_own_directory(tmp_path: Path) -> None:
    run_dir = started(tmp_path / "run")
    with opened(run_dir, "auto"):
        for own, resume in ((run_dir, "auto"), (run_dir, None), (tmp_path / "fresh", str(run_dir))):
            with pytest.raises(UserError, match="Another process uses"):
                opened(own, resume)
    opened(run_dir, "auto").close()


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
        with pytest.raises(UserError, match="Another process uses"):
            opened(tmp_path / "run", "auto")
        process.kill()
        process.wait()
        try:
            with opened(tmp_path / "run", "auto") as place:
                assert place.resumed
        finally:
            os.kill(worker, 9)


# --- finished runs ----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_finished_until_more_turns_are_requested(tmp_path: Path) -> None:
    run_dir = started(tmp_path / "run", finished=True)
    fresh = tmp_path / "fresh"
    for own, resume in ((run_dir, "auto"), (fresh, str(run_dir))):
        with opened(own, resume) as place:
            assert place.finished
        with opened(own, resume, num_steps=STEPS + 1) as place:
            assert place.resumed
            assert not place.finished
    with opened(fresh, str(run_dir), num_steps=STEPS + 1) as place:
        place.start("")
        record = read_record(run_dir)
        assert record is not None
        assert (record["num_steps"], record["finished"]) == (STEPS + 1, False)


def test_a_run_under_a_schedule_becomes_longer_where_it_is_named(tmp_path: Path) -> None:
    config = with_option("optimizer", "schedule", "linear")
    run_dir, fresh = run_at(tmp_path, "2026-01-01", "10-00-00"), run_at(tmp_path, "2026-01-02", "10-00-00")
    with opened(run_dir, None, config) as place:
        place.start(json.dumps(config))
        place.finish()
    longer = with_option("train", "total_dialog_turns", 128, config)
    for own, resume in ((fresh, str(run_dir)), (run_dir, "auto")):
        with opened(own, resume, longer, 2 * STEPS) as place:
            assert (place.path, place.finished, place.shorter) == (run_dir, False, STEPS)
    with opened(fresh, "auto", longer, 2 * STEPS) as place:
        assert (place.path, place.shorter) == (fresh, None)  # it is no run of this config
    with pytest.raises(RunRefused, match=r"another config\. Different: train\.epochs"):
        opened(fresh, str(run_dir), with_option("train", "epochs", 2, longer), 2 * STEPS)


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
    with opened(tmp_path, "auto", longer, 2 * STEPS) as place:
        assert place.resumed


def test_what_was_made_for_a_command_is_gone_and_what_was_there_is_not(tmp_path: Path) -> None:
    fresh, other = run_at(tmp_path, "2026-01-02", "10-00-00"), run_at(tmp_path, "2026-01-01", "10-00-00")
    for folder in (fresh, other):
        (folder / ".hydra").mkdir(parents=True)
    (other / "training.log").touch()
    drop_empty(other)
    drop_empty(fresh)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["2026-01-01"]
    assert (other / ".hydra").is_dir()


def test_a_run_does_not_become_shorter(tmp_path: Path) -> None:
    run_dir = started(run_at(tmp_path, "2026-01-01", "10-00-00"), saved_at=1)
    with pytest.raises(UserError, match="started for 4 steps, but this command sets 3"):
        opened(tmp_path / "fresh", str(run_dir), num_steps=STEPS - 1)
    fresh = run_at(tmp_path, "2026-01-02", "10-00-00")
    with opened(fresh, "auto", num_steps=STEPS - 1) as place:
        assert place.path == fresh


# --- files and differences --------------------------------------------------------------------------------------------


def test_a_file_counts_by_what_it_holds(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    names = (*(str(tmp_path / n) for n in "abc"), "org/table")
    for section, _, option in (name.partition(".") for name in FILES):
        a, b, c, hub = (signature(with_option(section, option, name)) for name in names)
        assert a == b != c != hub != a, option


def test_a_refusal_names_what_differs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with opened(run_dir, None) as place:
        place.start("seed: 1\ntrain: {epochs: 1, total_dialog_turns: 64}\nlogging: {level: warning}\n")
    with pytest.raises(RunRefused, match=r"another config\. Different: seed, train\.epochs\. Give the options of"):
        opened(run_dir, "auto", with_option("train", "epochs", 2, OTHER))
    with pytest.raises(RunRefused, match="Different: the content of a file, a Python input or the engine"):
        opened(run_dir, "auto", {**CONFIG, "passed": {"train": "0"}})
    mixture = with_option("env", "mixture", {"a": {"weight": 1}})
    with pytest.raises(RunRefused, match=r"Different: env\.mixture\.a\.weight\. Give"):
        opened(run_dir, "auto", mixture)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(RunRefused, match=r"another config, and its config\.yaml is missing or empty; choose another"):
        opened(run_dir, "auto", OTHER)


def test_a_run_continues_with_the_models_that_it_was_started_with(tmp_path: Path) -> None:
    run_dir, models = tmp_path / "run", {"model.name": "aa", "ref_model.name": None}
    with opened(run_dir, None) as place:
        place.require_models(models)
        place.start("seed: 1\n")
    with opened(run_dir, "auto") as place:
        place.require_models(models | {"ref_model.name": "bb"})  # was not known
        with pytest.raises(RunRefused, match=r"other files of model.name .digest aa, now cc.; restore"):
            place.require_models({"model.name": "cc"})


def test_an_error_to_which_the_system_gave_no_reason_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot be written \(quota\);"), runs.writing_in(Path("run")):
        raise OSError("quota")
