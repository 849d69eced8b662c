"""The command of a sweep, kept in its directory, so that the same command can find it again.

``--multirun train.resume=auto`` continues the newest sweep that the same command began and did not complete: its
directory is used again, where every run that is finished is left as it is and every other one goes on or begins. With
``hydra.sweep.dir=DIR`` given, that directory is used, whatever is in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import write_json
from sota_grpo.recording.run_record import is_held, read_json

SWEEP_FILE = "sweep.json"
FOLDER = "multirun"  # Hydra's own, with DATE/TIME below it

_RESUME = "train.resume="
# May differ between a sweep and its continuation: they change nothing that a run computes.
_FREE = re.compile(r"\+{0,2}(train\.resume|logging\.|hydra\.sweep\.dir|hydra\.callbacks\.)")


def continued(arguments: Sequence[str], root: Path = Path(FOLDER)) -> list[str]:
    """``arguments``, with the directory of the sweep that they continue, where ``train.resume=auto`` asks for one.

    Args:
        arguments: of ``grpo.py``.
        root: where the sweeps are, ``DATE/TIME`` each.

    >>> continued(["--multirun", "seed=1,2"])
    ['--multirun', 'seed=1,2']
    """
    kept = list(arguments)
    if not is_sweep(kept) or f"{_RESUME}auto" not in kept or any(one.startswith("hydra.sweep.dir=") for one in kept):
        return kept
    for folder in sorted((path.parent for path in root.glob(f"*/*/{SWEEP_FILE}")), reverse=True):  # the newest first
        record = read_json(folder / SWEEP_FILE) or {}
        same = record.get("command") == _identity(kept) and not record.get("complete")
        if same and os.access(folder, os.W_OK) and not any(map(is_held, folder.glob("*/"))):
            return [f"hydra.sweep.dir={folder.as_posix()}", *kept]
    return kept


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether Hydra will make several runs of ``arguments``.

    >>> is_sweep(["-m", "seed=1,2"]), is_sweep(["--multirun"]), is_sweep(["hydra.mode=MULTIRUN"]), is_sweep(["seed=1"])
    (True, True, True, False)
    """
    return any(one in ("-m", "hydra.mode=MULTIRUN") or one.startswith("--mu") for one in arguments)


def note_command(sweep_dir: Path, arguments: Sequence[str]) -> None:
    """Write into a sweep's directory which command works there.

    Raises:
        UserError: it cannot be written.
    """
    _write(sweep_dir, {"command": _identity(arguments), "complete": False})


def mark_complete(sweep_dir: Path) -> None:
    """Every run of the sweep is finished: ``train.resume=auto`` begins another one from now on."""
    _write(sweep_dir, {**(read_json(sweep_dir / SWEEP_FILE) or {}), "complete": True})


def _identity(arguments: Sequence[str]) -> list[str]:
    """What makes two commands the same sweep; the order counts, because Hydra numbers the runs by it."""
    return [one for one in arguments if not _FREE.match(one)]


def _write(sweep_dir: Path, content: dict[str, Any]) -> None:
    try:
        write_json(sweep_dir / SWEEP_FILE, content)
    except OSError as error:
        raise UserError(f"The sweep's directory {sweep_dir} cannot be written ({error.strerror}).") from error
