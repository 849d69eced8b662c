"""What a run directory says about its run, for whoever only looks: nothing here needs torch or locks anything."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError

RUN_FILE = "run.json"  # written when training begins: signature, turns asked for, whether they are done
CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
FAILURE_FILE = "failure.json"  # why a run of a sweep ended; gone as soon as it trains again
LOCK_FILE = ".lock"


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """What ``run.json`` says: None where there is none, nothing where it is not ours."""
    return read_json(run_dir / RUN_FILE)


def is_held(run_dir: Path) -> bool:
    """Whether a process is at work in ``run_dir``. The question itself holds nothing for longer than it takes."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run was ever here, or it is another user's
        return False
    return False


def note_failure(run_dir: Path, error: Exception) -> None:
    """Leave in ``run_dir`` why its run ended, for the summary of a sweep."""
    write_json(run_dir / FAILURE_FILE, {"reason": reason(error)})


def reason(error: Exception) -> str:
    """One line: the sentence of an error that we word ourselves, else its type and its first line.

    >>> reason(UserError("Mend it.")), reason(ValueError("odd\\nand more"))
    ('Mend it.', 'ValueError: odd')
    """
    text = " ".join(str(error).split()) if isinstance(error, UserError) else str(error).strip().partition("\n")[0]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def read_failure(run_dir: Path) -> str | None:
    """Why the run ended, where it failed and has not trained since."""
    record = read_json(run_dir / FAILURE_FILE)
    return None if record is None else str(record.get("reason", "unknown"))


def state_of(run_dir: Path) -> tuple[str, str]:
    """``finished``, ``running``, ``failed`` or ``stopped``, and why, where there is something to say.

    A run that asks about itself is running until it has noted that it is finished.
    """
    record, failure = read_record(run_dir), read_failure(run_dir)
    if (record or {}).get("finished"):
        return "finished", ""
    if is_held(run_dir):
        return "running", "starting" if record is None else ""
    if failure is not None:
        return "failed", failure
    return "stopped", "before its first turn" if record is None else ""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON under its name only once it is complete."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``path`` under its name only once it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; empty where it cannot be read or holds something else, None where there is no file."""
    try:
        record = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):  # of another user, or of another program
        return {}
    return record if isinstance(record, dict) else {}
