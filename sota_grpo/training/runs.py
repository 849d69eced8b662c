"""Run directories: the config digest of a run, its lock and record, and the choice of the run to resume."""

from __future__ import annotations

import errno
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

from sota_grpo.config import IN_FILES, rubric_file
from sota_grpo.config.mixture import ENTRY_OPTIONS
from sota_grpo.config.spelling import flat, walk
from sota_grpo.errors import UserError, writing
from sota_grpo.files import drop_leftovers, file_reference, write_text
from sota_grpo.recording import run_files
from sota_grpo.recording.machine import this_start
from sota_grpo.recording.run_files import CHECKPOINTS, CONFIG_FILE, RUN_FILE, dicts, is_held, read_config, read_record
from sota_grpo.text import os_reason
from sota_grpo.untrusted import require_plain

#: Config sections and options that a resumed run may change, because they do not affect results.
FREE_SECTIONS = ("logging", "ray")
ROLES = ("train_model", "inference_model", "ref_model")
FREE_OPTIONS = (
    "train.resume",
    "train.micro_batch_tokens",
    "train.checkpoint_frequency",
    "train.keep_checkpoints",
    "train.keep_best",
    "eval.target",
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
# Hydra's default folders DATE/TIME: only next to these is a run to resume looked for.
_BY_THE_CLOCK = re.compile(r"(?<![^/])\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d$")
_ELSEWHERE = "choose another hydra.run.dir (of a sweep: hydra.sweep.dir; from Python: run_dir)"
_IS_BUSY = "Another process uses {}; stop it first or " + _ELSEWHERE + "."
_TRIES = 5


def signature(config: Mapping[str, Any]) -> str:
    """Return a digest of all options that affect results.

    Files count by their content, ``engine.name=auto`` as the engine chosen on this machine, and the length of the run
    only if the learning-rate schedule depends on it. UserError if the engine cannot be used on this machine.
    """
    contents = {name: _content(name, value) for name, value in counted(config).items()}
    if contents.get("optimizer.schedule") == "constant":
        contents.pop("train.total_dialog_turns", None)
    if "engine.name" in contents:
        from sota_grpo.engines import resolve_engine_name

        contents["engine.name"] = resolve_engine_name(contents["engine.name"], device=config.get("device"))
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[:16]


def counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted name: value} of the options that a resumed run may not change."""
    free = {*FREE_SECTIONS, *FREE_OPTIONS}
    return {name: value for name, value in flat(config).items() if free.isdisjoint((name, name.partition(".")[0]))}


def _content(name: str, value: Any) -> Any:
    """Return the digest of the file in ``value`` (FILE.py:NAME: [digest, NAME]), or ``value`` if it is no file."""
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
    """The run directory is in use, already has a run, or has none that this command can continue."""


class RunDir(AbstractContextManager["RunDir"]):
    """A run directory, locked by this process until :meth:`close` or the end of the process.

    Attributes:
        resumed: the directory already has a run.
        has_ended: that run has ended, after all steps requested then or at its target, so it had a checkpoint.
        finished: that run has ended, after all steps requested now, or at an accuracy that meets the target set now.
        reached: step, accuracy and target of that run, if it reached its target; else None.
        shorter: number of steps requested of that run before, if more are requested now; else None.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        num_steps: int,
        lock: IO[bytes],
        passed: Any = None,
        target: float | None = None,
    ):
        found = read_record(path)
        record = found or {}
        self.path, self._lock = path, lock
        self.resumed, self.has_ended = found is not None, bool(record.get("finished"))
        self.reached: dict[str, float] | None = record.get("reached")
        is_done = record.get("num_steps", 0) >= num_steps
        if self.reached is not None:
            is_done = target is not None and self.reached["accuracy"] >= target
        self.finished = is_done and self.has_ended
        before = int(record.get("num_steps", num_steps))
        self.shorter = before if before < num_steps else None
        self._row: dict[str, Any] = {
            "signature": digest,
            "num_steps": num_steps,
            **({"passed": passed} if passed else {}),
        }
        self._starts = dicts(record.get("starts"))

    def require_models(self, digests: Mapping[str, str | None]) -> None:
        """Raise RunRefused if the model files differ from those of the run's last start; :meth:`start` records them.

        ``digests`` maps ``model.name`` and ``ref_model.name`` to digests of their files; None: not known, not compared.
        """
        before = (read_record(self.path) or {}).get("models")
        for option, digest in digests.items():
            then = before.get(option) if isinstance(before, dict) else None
            if None not in (then, digest) and then != digest:
                raise RunRefused(
                    f"The run in {self.path} was started with other files of {option} (digest {then}, now {digest}); "
                    f"restore the model's files, or start another run ({_ELSEWHERE})."
                )
        self._row["models"] = dict(digests)

    def start(self, config_yaml: str) -> None:
        """Right before the first step: write config and record, delete ``failure.json``; UserError if that fails."""
        self._row["starts"] = [*self._starts, this_start()]
        files = [(CONFIG_FILE, config_yaml), (RUN_FILE, json.dumps({**self._row, "finished": False}))]
        for name, text in files[::-1] if self.resumed else files:  # so that a kill between leaves a run to resume
            self._write(name, text)
        with writing_in(self.path):
            (self.path / run_files.FAILURE_FILE).unlink(missing_ok=True)

    def finish(self, reached: Mapping[str, float] | None = None) -> None:
        """Record that the run is finished; ``reached``: step, accuracy and target, if met. UserError if that fails."""
        self._write(RUN_FILE, json.dumps(self._row | ({"reached": reached} if reached else {}) | {"finished": True}))

    def close(self) -> None:
        """Unlock the directory; idempotent."""
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, text: str) -> None:
        with writing_in(self.path):
            write_text(self.path / name, text)


def open_run(run_dir: Path, config: Mapping[str, Any], resume: str | None, *, num_steps: int) -> RunDir:
    """Choose, lock and return the run directory of this command.

    ``resume=None`` starts a run in ``run_dir``. ``auto`` continues the run in ``run_dir``. If there is none, and
    ``run_dir`` is ``ROOT/DATE/TIME``, it continues another run ``ROOT/DATE/TIME``: of those that have the same config,
    are unfinished and are used by no process, the one with the newest checkpoint. Else it starts a run. Any other
    value is the path of the run to continue. A continued run may get more steps than before (``num_steps``), which
    stretches its learning-rate schedule. If another run is continued, ``run_dir`` is deleted, if it has nothing but
    ``.hydra``. ``config`` has all options, and digests of the Python inputs.

    RunRefused: the directory is in use, already has a run or files of another program, or has no run that can be
    continued. UserError: the directory, its config or the engine cannot be used.
    """
    digest, passed = signature(config), config.get("passed")
    target = config.get("eval", {}).get("target")
    path = run_dir
    lock: IO[bytes] | None = None
    if resume == "auto" and not (run_dir / RUN_FILE).exists():
        path, lock = _newest_sibling(run_dir, digest, num_steps) or (run_dir, None)
    elif resume not in (None, "auto"):
        path = Path(resume).expanduser()
        _require_run(path, resume)
    lock = lock or _lock(path)
    if lock is None:
        raise RunRefused(_IS_BUSY.format(path))
    if (sentence := _refusal(path, config, digest, num_steps, resume)) is not None:
        lock.close()
        raise RunRefused(sentence)
    if path is not run_dir:
        drop_empty(run_dir)
    drop_leftovers(path)
    return RunDir(path, digest, num_steps, lock, passed, target)


def require_free(run_dir: Path, resume: str | None) -> None:
    """Do the checks of :func:`open_run` that need no config; raise RunRefused if one fails, and write nothing."""
    if is_held(run_dir):
        raise RunRefused(_IS_BUSY.format(run_dir))
    if resume not in (None, "auto"):
        _require_run(Path(resume).expanduser(), resume)
    elif resume is None and (sentence := _occupied(run_dir)) is not None:
        raise RunRefused(sentence)


def _require_run(path: Path, resume: str) -> None:
    if not (path / RUN_FILE).exists():
        raise RunRefused(
            f"train.resume={resume}: there is no run in {path} that has begun to train ({RUN_FILE} is missing); "
            f"correct the path, or start a run there with hydra.run.dir={path}."
        )


def _occupied(path: Path) -> str | None:
    """Return why no run can start in ``path``: it would begin the logs there at step 0, and delete some."""
    if read_record(path) is not None:
        return f"{path} already holds a run; continue it with train.resume=auto or {_ELSEWHERE}."
    logs = [path / name for name in (run_files.METRICS_FILE, run_files.ROLLOUTS_FILE)]
    own = [*(log for log in logs if log.is_file() and log.stat().st_size), *_checkpoints(path)]
    if not own:
        return None
    has = f"{path} has {own[0].relative_to(path)}, but no {RUN_FILE}"
    return f"{has}, so it may be of another program; move it away or {_ELSEWHERE}."


def _refusal(path: Path, config: Mapping[str, Any], digest: str, num_steps: int, resume: str | None) -> str | None:
    """Return why this command cannot use the locked directory ``path``; None if it can."""
    record = read_record(path)
    if record is None or resume is None:
        return _occupied(path)
    before = read_config(path)
    length = {"total_dialog_turns": before.get("train", {}).get("total_dialog_turns")}
    as_long = {**config, "train": {**config.get("train", {}), **length}}
    if record.get("signature") != digest and record.get("signature") != signature(as_long):
        old, new = map(counted, (before, config))
        names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        mappings = tuple(f"{name}." for name, _, _ in walk())  # of other options, an older run may lack some
        names = [name for name in names if (name in old and name in new) or name.startswith(mappings)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        differs = ", ".join(names[:3]) + more if names else "the content of a file, a Python input or the engine"
        if not before:
            empty = f"its {CONFIG_FILE} is missing or empty"
            return f"The run in {path} was started with another config, and {empty}; {_ELSEWHERE}."
        return (
            f"The run in {path} was started with another config. Different: {differs}. Give the options of "
            f"{path / CONFIG_FILE}, or {_ELSEWHERE}."
        )
    if record["num_steps"] > num_steps:
        return (
            f"The run in {path} was started for {record['num_steps']} steps, but this command sets {num_steps}; "
            "train.total_dialog_turns of a resumed run can be raised, not lowered."
        )
    return None


def _newest_sibling(run_dir: Path, digest: str, num_steps: int) -> tuple[Path, IO[bytes]] | None:
    """Return the run next to ``run_dir`` that ``train.resume=auto`` continues, and its lock; None without one."""
    shape = _BY_THE_CLOCK.search(run_dir.as_posix())
    if shape is None:
        return None
    root = Path(run_dir.as_posix()[: shape.start()])
    siblings = [path.parent for path in root.glob(f"*/*/{RUN_FILE}") if _BY_THE_CLOCK.search(path.parent.as_posix())]

    def is_resumable(path: Path) -> bool:
        record = read_record(path) or {}
        same = record.get("signature") == digest and record["num_steps"] <= num_steps
        return same and not record["finished"] and os.access(path, os.W_OK)

    for path in sorted(filter(is_resumable, siblings), key=_age, reverse=True):
        if (lock := _lock(path)) is not None:
            if is_resumable(path):  # still: its process may just have finished it
                return path, lock
            lock.close()
    return None


def _age(path: Path) -> tuple[float, float]:
    """Return (time of the last checkpoint or 0, time of the start), in seconds since the epoch."""

    def modified(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # pruned meanwhile by a run that is alive
            return 0.0

    return max(map(modified, _checkpoints(path)), default=0.0), modified(path / RUN_FILE)


def _checkpoints(path: Path) -> list[Path]:
    return sorted((path / CHECKPOINTS).glob("checkpoint_*.pt"))


def _lock(path: Path) -> IO[bytes] | None:
    """Lock ``path`` until this process ends; return the open lock file, or None if a process has the lock.

    UserError if the directory cannot be written, or its run has a link out of it.
    """
    if is_held(path):  # its files come and go
        return None
    if read_record(path) is not None:
        require_plain(path, path, run_files.OWN_FOLDERS)  # before anything is written there, through a link perhaps
    with writing_in(path):
        path.mkdir(parents=True, exist_ok=True)
        file = (path / run_files.LOCK_FILE).open("ab")
        for _ in range(_TRIES):  # `is_held` holds the lock for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
                raise UserError(
                    f"The file system of {path} locks no files ({os_reason(error)}), so a second process could not be "
                    "kept away from the run; mount it with flock, or set hydra.run.dir."
                ) from error
            else:
                os.register_at_fork(after_in_child=file.close)  # a worker must not keep the lock of a killed run
                return file
        file.close()
    return None


def writing_in(path: Path) -> AbstractContextManager[None]:
    """Replace an OSError in the block by a UserError: the run directory ``path`` cannot be written."""
    return writing(f"The run directory {path}", "make it writable, or set hydra.run.dir")


def drop_empty(fresh: Path) -> None:
    """Remove a command's directory if it has nothing but ``.hydra``; of ROOT/DATE/TIME also DATE and ROOT if empty."""
    if not fresh.is_dir() or {path.name for path in fresh.iterdir()} - {".hydra"}:
        return
    shutil.rmtree(fresh, ignore_errors=True)  # a link stays
    if _BY_THE_CLOCK.search(fresh.as_posix()):
        with suppress(OSError):  # another run is in it
            for folder in fresh.parents[:2]:  # outputs/DATE
                folder.rmdir()
