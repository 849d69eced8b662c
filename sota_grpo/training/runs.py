"""Run directories: the signature of a run, its state, and the run that a resumed command continues."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

from sota_grpo.config import rubric_file
from sota_grpo.config.mixture import ENTRY_OPTIONS
from sota_grpo.config.spelling import flat
from sota_grpo.errors import UserError
from sota_grpo.files import drop_leftovers, write_text
from sota_grpo.recording.machine import starts_of, this_start
from sota_grpo.recording.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    FAILURE_FILE,
    LOCK_FILE,
    OWN_FOLDERS,
    RUN_FILE,
    is_held,
    read_config,
    read_record,
)
from sota_grpo.rl.custom_objectives import IN_FILES, file_reference
from sota_grpo.untrusted import require_plain

#: Sections and options that a resumed run may change: they do not change what is computed.
FREE_SECTIONS = ("logging", "ray")
ROLES = ("train_model", "inference_model", "ref_model")
FREE_OPTIONS = (
    "train.resume",
    "train.micro_batch_tokens",
    "train.checkpoint_frequency",
    "train.keep_checkpoints",
    "train.export_hf",
    "train.grace_s",
    *(f"{role}.{option}" for role in ROLES for option in ("num_devices", "devices")),
    "env.reward_workers",
    "env.timeout_s",
    "engine.url",
    "inference_model.gpu_memory_utilization",
    "inference_model.max_num_seqs",
    "train_model.shard_gradients",
    "train_model.tensor_parallel_size",
    "train_model.fsdp_size",
    "train_model.compile",
    "check.mode",
    "reward.judge.url",
)
FILES = ("env.dataset_path", "env.eval_path", "reward.path")
_ENTRY = re.compile(r"env\.mixture\.[^.]+\.(\w+)")
# Folders that Hydra names by the clock, DATE/TIME: only these have neighbours to look at. A run of a sweep has none:
# a sweep is continued as a whole (sota_grpo/sweeps.py).
_BY_THE_CLOCK = re.compile(r"(?<![^/])\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d$")
_ELSEWHERE = "choose another hydra.run.dir (of a sweep: hydra.sweep.dir; from Python: run_dir)"
_TRIES = 5


def signature(config: Mapping[str, Any]) -> str:
    """Return the digest of everything in ``config`` that changes what a step computes.

    A file counts by its content, the engine by the name that ``auto`` has here, and the length of the run only where
    the learning rate depends on it.
    """
    contents = {name: _content(name, value) for name, value in _counted(config).items()}
    if contents.get("optimizer.schedule") == "constant":
        contents.pop("train.total_dialog_turns", None)
    if "engine.name" in contents:
        from sota_grpo.engines import resolve_engine_name

        contents["engine.name"] = resolve_engine_name(contents["engine.name"], device=config.get("device"))
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, by dotted name, that a resumed run may not change."""
    free = {*FREE_SECTIONS, *FREE_OPTIONS}
    return {name: value for name, value in flat(config).items() if free.isdisjoint((name, name.partition(".")[0]))}


def _content(name: str, value: Any) -> Any:
    """Return the digest of the file that an option names, with the name of what it defines; else the value."""
    if isinstance(value, list):
        return [_content(name, item) for item in value]
    entry = _ENTRY.fullmatch(name)
    option = name if entry is None else ENTRY_OPTIONS.get(entry[1])
    is_file = option in FILES or (option == "reward.judge.rubric" and rubric_file(value) is not None)
    reference = file_reference(value) if value and option in IN_FILES else None
    if value is None or not (is_file or reference):
        return value
    file = Path(value).expanduser() if reference is None else reference[0]
    digest = str(file)
    if file.is_file():
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return digest if reference is None else [digest, reference[1]]


class RunRefused(UserError):
    """The directory is that of another run, or another process uses it: nothing was written there."""


class RunDir(AbstractContextManager["RunDir"]):
    """A run directory, locked by this process until :meth:`close` or its death.

    Attributes:
        path: the directory.
        resumed: a run was started here before.
        finished: that run has done all requested steps.
        shorter: the steps that it was started for, where more are requested now.
    """

    def __init__(self, path: Path, digest: str, num_steps: int, lock: IO[bytes], passed: Any = None):
        record = read_record(path)
        self.path = path
        self.resumed = record is not None
        self.finished = record is not None and bool(record.get("finished")) and record.get("num_steps", 0) >= num_steps
        before = num_steps if record is None else int(record.get("num_steps", num_steps))
        self.shorter = before if before < num_steps else None
        self._row: dict[str, Any] = {"signature": digest, "num_steps": num_steps}
        self._row |= {"passed": passed} if passed else {}
        self._starts = starts_of(record)
        self._lock = lock

    def require_models(self, digests: Mapping[str, str | None]) -> None:
        """Raise RunRefused unless a resumed run has the models that it was started with.

        ``digests`` are by option, ``model.name`` and ``ref_model.name``; None: not known.
        """
        before = (read_record(self.path) or {}).get("models")
        for option, digest in digests.items():
            then = before.get(option) if isinstance(before, dict) else None
            if None not in (then, digest) and then != digest:
                raise RunRefused(
                    f"The run in {self.path} was started with other files of {option}: its digest was {then} and is "
                    f"{digest}; give it back its model, or start another run ({_ELSEWHERE})."
                )
        self._row["models"] = dict(digests)

    def start(self, config_yaml: str) -> None:
        """Record that the run trains from here on; called right before the first step."""
        self._row["starts"] = [*self._starts, this_start()]
        self._write(CONFIG_FILE, config_yaml)
        self._write(RUN_FILE, json.dumps({**self._row, "finished": False}))
        (self.path / FAILURE_FILE).unlink(missing_ok=True)

    def finish(self) -> None:
        """Record that the run is finished."""
        self._write(RUN_FILE, json.dumps({**self._row, "finished": True}))

    def close(self) -> None:
        """Unlock the directory; idempotent."""
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.path / name, text)
        except OSError as error:
            raise unwritable(self.path, error) from error


def open_run(run_dir: Path, config: Mapping[str, Any], resume: str | None, *, num_steps: int) -> RunDir:
    """Return the locked directory of this command's run.

    ``resume=None`` starts in ``run_dir``. ``auto`` continues ``run_dir`` when it holds a run; else, of the unfinished
    runs of the same config next to it (``outputs/DATE/TIME``) without a process, the one that saved a checkpoint last;
    else it starts in ``run_dir``. Anything else is the path of the run to continue, which may become longer, with its
    learning rate's schedule.

    Raises:
        RunRefused: the directory already holds a run or has a process, or the run to continue is missing or has another
            config.
    """
    digest, passed = signature(config), config.get("passed")
    if resume == "auto" and not (run_dir / RUN_FILE).exists():
        sibling = _newest_sibling(run_dir, digest, num_steps, passed)
        if sibling is not None:
            drop_empty(run_dir)
            return sibling
    path = run_dir
    if resume not in (None, "auto"):
        path = Path(resume)
        _require_run(path, resume)
    if read_record(path) is not None:
        require_plain(path, path, OWN_FOLDERS)  # before anything is written there, through a link perhaps
    lock = _lock(path)
    if lock is None:
        raise RunRefused(_is_busy(path))
    sentence = _refusal(path, config, digest, num_steps, resume)
    if sentence is not None:
        lock.close()
        raise RunRefused(sentence)
    if path is not run_dir:
        drop_empty(run_dir)
    drop_leftovers(path)
    return RunDir(path, digest, num_steps, lock, passed)


def require_free(run_dir: Path, resume: str | None) -> None:
    """Raise the errors of :func:`open_run` that need no config; nothing is written."""
    if is_held(run_dir):
        raise RunRefused(_is_busy(run_dir))
    if resume not in (None, "auto"):
        _require_run(Path(resume), resume)
    elif resume is None and read_record(run_dir) is not None:
        raise RunRefused(_holds_a_run(run_dir))


def _require_run(path: Path, resume: str) -> None:
    if not (path / RUN_FILE).exists():
        raise RunRefused(f"train.resume={resume}: there is no run in {path} ({RUN_FILE} is missing).")


def _is_busy(path: Path) -> str:
    return f"Another process is at work in {path}; stop it first or {_ELSEWHERE}."


def _holds_a_run(path: Path) -> str:
    return f"{path} already holds a run; continue it with train.resume=auto or {_ELSEWHERE}."


def _refusal(path: Path, config: Mapping[str, Any], digest: str, num_steps: int, resume: str | None) -> str | None:
    """Return why this command cannot use ``path``, which is locked."""
    record = read_record(path)
    if record is None:
        return None
    if resume is None:
        return _holds_a_run(path)
    before = read_config(path)
    length = {"total_dialog_turns": before.get("train", {}).get("total_dialog_turns")}
    as_long = {**config, "train": {**config.get("train", {}), **length}}
    if record.get("signature") != digest and record.get("signature") != signature(as_long):
        old, new = map(_counted, (before, config))
        names = [name for name, value in new.items() if name in old and old[name] != value]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        differs = ", ".join(names[:3]) + more if names else "a file that it names, or what was passed, is another"
        return (
            f"The run in {path} was started with another config: {differs}; give the same options as then "
            f"({path / CONFIG_FILE})."
        )
    if record["num_steps"] > num_steps:
        return (
            f"The run in {path} was started for {record['num_steps']} steps and this command has {num_steps}; "
            "train.total_dialog_turns can grow, not shrink."
        )
    return None


def _newest_sibling(run_dir: Path, digest: str, num_steps: int, passed: Any) -> RunDir | None:
    shape = _BY_THE_CLOCK.search(run_dir.as_posix())
    if shape is None:
        return None
    root = Path(run_dir.as_posix()[: shape.start()])
    siblings = [path.parent for path in root.glob(f"*/*/{RUN_FILE}") if _BY_THE_CLOCK.search(path.parent.as_posix())]
    for path in sorted((path for path in siblings if _is_resumable(path, digest, num_steps)), key=_age, reverse=True):
        lock = _lock(path)
        if lock is not None and _is_resumable(path, digest, num_steps):  # still: its process may just have finished it
            return RunDir(path, digest, num_steps, lock, passed)
        if lock is not None:
            lock.close()
    return None


def _is_resumable(path: Path, digest: str, num_steps: int) -> bool:
    """Whether ``path`` holds an unfinished run of this command."""
    record = read_record(path) or {}
    same = record.get("signature") == digest and record["num_steps"] <= num_steps
    return same and not record["finished"] and os.access(path, os.W_OK)


def _age(path: Path) -> tuple[float, float]:
    """Return when the run last saved a checkpoint (0: never), and when it was started."""
    from sota_grpo.training.checkpoint import CheckpointStore  # brings torch

    def modified(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # pruned meanwhile by a run that is alive
            return 0.0

    saved = (checkpoint for _, checkpoint in CheckpointStore(path / CHECKPOINTS).paths())
    return max(map(modified, saved), default=0.0), modified(path / RUN_FILE)


def _lock(path: Path) -> IO[bytes] | None:
    """Return the open lock file of ``path``, or None while another process has it; it ends with the process."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK_FILE).open("ab")
        for _ in range(_TRIES):  # `is_held` takes it for an instant
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.register_at_fork(after_in_child=file.close)  # a worker must not keep the lock of a killed run
                return file
            time.sleep(0.02)
        file.close()
        return None
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error for a run directory that cannot be written."""
    return UserError(f"The run directory {path} cannot be written ({error.strerror}); set hydra.run.dir.")


def drop_empty(fresh: Path) -> None:
    """Remove a directory without files that was made for a command, and empty DATE folders above it."""
    if not fresh.is_dir() or {path.name for path in fresh.iterdir()} - {".hydra"}:
        return
    shutil.rmtree(fresh, ignore_errors=True)  # a link stays
    if _BY_THE_CLOCK.search(fresh.as_posix()):
        with suppress(OSError):  # another run is in it
            for folder in fresh.parents[:2]:  # outputs/DATE
                folder.rmdir()
