"""Run directories: what a run is called, whether it is finished, and which one a resumed command continues."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError

RUN_FILE = "run.json"
#: Sections that may differ between a run and its continuation: they change where it is seen, not what it computes.
FREE_SECTIONS = ("logging",)
FREE_OPTIONS = (("train", "resume"), ("train", "keep_checkpoints"), ("check", "mode"))


def signature(config: Mapping[str, Any]) -> str:
    """Digest of everything in ``config`` that changes what a run computes.

    >>> a, b = {"seed": 1, "train": {"resume": "auto"}}, {"seed": 1, "train": {"resume": None}}
    >>> signature(a) == signature(b), signature(a) == signature({"seed": 2, "train": {"resume": None}})
    (True, False)
    """
    kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    for name in FREE_SECTIONS:
        kept.pop(name, None)
    for section, option in FREE_OPTIONS:
        if isinstance(kept.get(section), dict):
            kept[section].pop(option, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def open_run(run_dir: Path, config: Mapping[str, Any], resume: str | None) -> tuple[Path, bool]:
    """The directory this command works in, and whether it continues what is there.

    ``resume=None`` starts in ``run_dir``. ``auto`` continues ``run_dir`` when it holds a run, else the newest
    unfinished run of the same config beside it (``outputs/DATE/TIME``), else starts in ``run_dir``. Anything else is
    the path of the run to continue.

    Raises:
        UserError: the directory already holds a run, the run named is not there, or its config is another one.
    """
    digest = signature(config)
    if resume is None:
        if (run_dir / RUN_FILE).exists():
            raise UserError(
                f"{run_dir} already holds a run; continue it with train.resume=auto or choose another hydra.run.dir."
            )
        _write(run_dir, digest, finished=False)
        return run_dir, False
    found = _find(run_dir, digest) if resume == "auto" else Path(resume)
    if found is None:
        _write(run_dir, digest, finished=False)
        return run_dir, False
    record = _read(found)
    if record is None:
        raise UserError(f"train.resume={resume}: there is no run in {found} ({RUN_FILE} is missing).")
    if record["signature"] != digest:
        raise UserError(
            f"The run in {found} was started with another config; give the same options as then ({found}/config.yaml)."
        )
    _drop_empty(run_dir, found)
    return found, True


def mark_finished(run_dir: Path) -> None:
    """``train.resume=auto`` looks for another run from now on."""
    record = _read(run_dir) or {}
    _write(run_dir, record.get("signature", ""), finished=True)


def _find(run_dir: Path, digest: str) -> Path | None:
    if (run_dir / RUN_FILE).exists():
        return run_dir
    beside = sorted(run_dir.parent.parent.glob(f"*/*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in beside:
        record = _read(path.parent)
        if record and record["signature"] == digest and not record["finished"]:
            return path.parent
    return None


def _drop_empty(fresh: Path, found: Path) -> None:
    """Remove the directory that was made for this command when another one is continued and nothing else is in it."""
    if fresh.resolve() != found.resolve() and fresh.is_dir() and {p.name for p in fresh.iterdir()} <= {".hydra"}:
        shutil.rmtree(fresh)


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / RUN_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(run_dir: Path, digest: str, *, finished: bool) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        temporary = run_dir / f".{RUN_FILE}.tmp"
        temporary.write_text(json.dumps({"signature": digest, "finished": finished}))
        os.replace(temporary, run_dir / RUN_FILE)
    except OSError as error:
        raise UserError(
            f"The run directory {run_dir} cannot be written ({error.strerror}); set hydra.run.dir."
        ) from error
