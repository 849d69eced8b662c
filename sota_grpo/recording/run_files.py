"""Names and readers of the files in a run directory, which may be damaged or incomplete. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sota_grpo.config.spelling import walk
from sota_grpo.errors import UserError, writing
from sota_grpo.files import write_json
from sota_grpo.text import os_reason, readable, sentence
from sota_grpo.untrusted import SMALL_BYTES, open_file, read_yaml, require_plain

RUN_FILE = "run.json"  # written when training begins: config signature, number of steps, whether finished
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
EVALUATED = "eval/accuracy"  # metric that only rows of evaluations have
OVERRIDES_FILE = ".hydra/overrides.yaml"  # written first once the directory is locked
CHECKPOINTS = "checkpoints"
EXPORTED = "hf"  # the exported model
INPUTS = "inputs"  # Python inputs
STEPS_FOLDER, DEBUG_FOLDER, REPLAYS = "steps", "debug_logs", "replays"
#: Folders whose files a run itself reads or writes; other folders are a library's or a user's.
OWN_FOLDERS = (CHECKPOINTS, EXPORTED, INPUTS, STEPS_FOLDER, DEBUG_FOLDER, REPLAYS, ".hydra")
GATE_FILE = "gate.json"
BEST_FILE = "best.json"  # with train.keep_best: step, metric and value of the best checkpoint
FAILURE_FILE = "failure.json"  # why a run ended too early; deleted when it trains again
LOCK_FILE = ".lock"
_DEPTH = 4  # levels of folders searched for runs: DATE/TIME/JOB and one more
_LINE_BYTES = 256 << 20  # longest line that is read; runs write shorter ones
_REPLAY_BYTES = 64 << 10  # largest file of a replay; two tables of 23 algorithms are 20 kB
_MOST_REPLAYS = 16  # only the newest are read


def has_begun(path: Path, *others: str) -> bool:
    """Return whether a folder has a run that has begun, or one of the files ``others``; True also if it is locked."""
    try:
        os.listdir(path)
        return any((path / name).is_file() for name in (RUN_FILE, METRICS_FILE, *others))
    except PermissionError:
        return True


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key for natural order: job 10 of a sweep comes after job 2.

    >>> sorted([Path("sweep/10"), Path("sweep/2")], key=natural)[0].name
    '2'
    """
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the run directories among ``paths`` and below them, once each, in natural order below each path.

    Folders are searched 4 levels deep. UserError for a path that is no folder or has no run.
    """
    runs: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"There is no run in {path}: the folder does not exist; give the directory of a run.")
        if not path.is_dir():
            raise UserError(f"{path} is a file; give the run directory, {path.parent}.")
        below = _below(path, _DEPTH)
        if not below:
            what = f"neither the folder nor its subfolders have a {METRICS_FILE}"
            raise UserError(f"There is no run in {path}: {what}; give the directory of a run.")
        for run in below:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _below(path: Path, depth: int) -> list[Path]:
    if has_begun(path):
        return [path]
    entries = path.iterdir() if depth else ()
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    below = [run for folder in sorted(folders, key=natural) for run in _below(folder, depth - 1)]
    return below or ([path] if has_begun(path, OVERRIDES_FILE) else [])


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of ``run.json``: None if the file is missing, ``{}`` if it is unreadable or no JSON object."""
    return read_json(run_dir / RUN_FILE)


def is_held(run_dir: Path) -> bool:
    """Return whether a process, this one included, holds the lock of ``run_dir``; False if none can be opened."""
    try:
        with open_file(run_dir / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or no permission
        return False
    return False


def note_failure(run_dir: Path, error: Exception) -> None:
    """Write the :func:`reason` of a run's failure to ``failure.json``, for reports and sweeps; OSError on failure."""
    write_json(run_dir / FAILURE_FILE, {"reason": reason(error)})


def reason(error: Exception) -> str:
    """Return an error as one line: the message of a ``UserError``, else the type and the first line of the message.

    >>> reason(UserError("Mend it.")), reason(ValueError("odd\\nand more"))
    ('Mend it.', 'ValueError: odd')
    """
    return " ".join(str(error).split()) if isinstance(error, UserError) else sentence(error)


def state_of(run_dir: Path) -> tuple[str, str]:
    """Return the state of a run, ``finished``, ``running``, ``failed`` or ``stopped``, and a note or ``""``.

    The note is why a run failed, or that it is starting or has no first step. UserError if metrics are unreadable.
    """
    record, failure = read_record(run_dir), read_json(run_dir / FAILURE_FILE)
    if (record or {}).get("finished"):
        return "finished", ""
    if is_held(run_dir):
        return "running", "starting" if record is None else ""
    if failure is not None:
        return "failed", str(failure.get("reason", "unknown"))
    began = record is not None or next(whole_lines(run_dir / METRICS_FILE), None) is not None
    return "stopped", "" if began else "before its first step"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the parsed complete lines of a JSON Lines file, ``[]`` if missing; UserError if unreadable or invalid."""
    return [json_line(line, path, number) for number, _, line in whole_lines(path)]


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` that are evaluations, in order; exceptions: :func:`read_rows`."""
    return [row for row in read_rows(run_dir / METRICS_FILE) if EVALUATED in row]


def whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset in bytes, line with its end) of complete lines, if any; UserError if unreadable."""
    offset = 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), 1):
                if len(line) == _LINE_BYTES:
                    raise OSError(errno.EFBIG, f"line {number} has more than {_LINE_BYTES >> 20} MiB")
                if not line.endswith(b"\n"):  # an incomplete last line, still being written
                    return
                yield number, offset, line
                offset += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error


def json_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse line ``number`` of ``path``, NaN and infinity as None; UserError if it is no object with ``step`` >= 0."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)
        row["step"] = int(row["step"])
        if not 0 <= row["step"] < 1 << 53:
            raise ValueError(row["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"Line {number} of {path} is not a JSON object with a step from 0; remove the line.") from error
    return row


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the nested options in ``config.yaml``; ``{}`` if it is missing, UserError if it is unreadable or wrong."""
    from omegaconf import OmegaConf

    path = run_dir / CONFIG_FILE
    try:
        content = OmegaConf.to_container(read_yaml(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # PyYAML and OmegaConf raise many types
        raise UserError(f"{path} is not a valid config; remove the file: a run is readable without it.") from error
    config = {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}
    sections = {name.partition(".")[0] for name, _, _ in walk() if "." in name}
    odd = [name for name in sections & config.keys() if not isinstance(config[name], dict)]
    if odd:
        raise UserError(f"{path}: {min(odd)} is no section of options; remove the file: a run is readable without it.")
    return config


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the UserError for a file or folder that cannot be read."""
    return UserError(f"{path} cannot be read ({os_reason(error)}).")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, ``{}`` if it has none, is unreadable or huge."""
    try:
        with open_file(path, most_bytes=SMALL_BYTES) as file:
            record = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):  # no permission, or written by another program
        return {}
    return record if isinstance(record, dict) else {}


def dicts(values: Any) -> list[dict[str, Any]]:
    """Return the dicts in ``values``, which may be no list, as in a file of another program."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def save_replay(run_dir: Path, step: int, question: Sequence[str], replay: Mapping[str, Any]) -> Path:
    """Save and return a replay's file, in place of one of equal step and options ``question``; UserError on failure."""
    folder = run_dir / REPLAYS
    path = folder / f"step_{step:06d}_{hashlib.sha256(json.dumps(list(question)).encode()).hexdigest()[:12]}.json"
    require_plain(folder, run_dir)
    with writing(path, "the report will not show this replay"):
        folder.mkdir(exist_ok=True)
        write_json(path, dict(replay))
    return path


def read_replays(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results in the 16 newest files of ``sota-grpo replay``, by step, and a message per invalid file."""
    replays, sentences = [], []
    try:
        # no link is followed here: its file is opened below, or refused
        paths = sorted((run_dir / REPLAYS).glob("*.json"), key=lambda path: (path.lstat().st_mtime_ns, path.name))
    except OSError:
        return [], []
    for path in sorted(paths[-_MOST_REPLAYS:]):
        try:
            with open_file(path, most_bytes=_REPLAY_BYTES, levels=2) as file:
                record = json.loads(file.read())
            tables = [[[*row] for row in rows] for rows in record["tables"]]
            replay = {"title": record["title"], "tables": tables, "notes": [*record["notes"]]}
            are_texts = all(
                isinstance(text, str) for text in (replay["title"], *replay["notes"], *chain(*chain(*tables)))
            )
            are_tables = all(len({*map(len, rows)}) == 1 and rows[0] for rows in tables)
            if not (are_texts and are_tables and replay.items() <= record.items()):
                raise ValueError(path)
            replays.append(replay)
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            problem = getattr(error, "strerror", None) or "it was not written by sota-grpo replay"
            sentences.append(readable(f"{path} cannot be shown ({problem}); remove it, or replay again.", keep=""))
    return replays, sentences
