"""The replays of a run's stored steps under other algorithms: ``replays/`` in the run directory, tables of text.

``sota-grpo replay RUN algorithm=A,B`` writes them and the report shows them. A run directory may be anybody's: a file
that is no replay is named in a sentence and left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import write_text
from sota_grpo.recording.run_files import REPLAYS
from sota_grpo.text import json_line, readable
from sota_grpo.untrusted import open_file, require_plain

_MOST_BYTES = 64 << 10  # of a file: two tables of 23 algorithms are 20 kB
_MOST = 16  # files that are read, the newest

Table = Sequence[Sequence[str]]  # rows of cells, the first is the head


def save_replay(run_dir: Path, step: int, question: Sequence[str], replay: Mapping[str, Any]) -> Path:
    """Write ``title``, ``tables`` (see ``Table``) and ``notes``; they replace those of the same step and question.

    Raises:
        UserError: they cannot be written, or ``replays`` is a link that leaves the run.
    """
    folder = run_dir / REPLAYS
    path = folder / f"step_{step:06d}_{hashlib.sha256(json.dumps(list(question)).encode()).hexdigest()[:12]}.json"
    require_plain(folder, run_dir)
    try:
        folder.mkdir(exist_ok=True)
        write_text(path, json_line(replay) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}), so the report will not show this replay."
        ) from error
    return path


def read_replays(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The replays of a run by name, and of each file that is none a sentence.

    >>> read_replays(getfixture("tmp_path"))
    ([], [])
    """
    replays, sentences = [], []
    try:
        # no link is followed here: its file is opened below, or refused
        paths = sorted((run_dir / REPLAYS).glob("*.json"), key=lambda path: (path.lstat().st_mtime_ns, path.name))
    except OSError:
        return [], []
    for path in sorted(paths[-_MOST:]):
        try:
            with open_file(path, most_bytes=_MOST_BYTES, levels=2) as file:
                record = json.loads(file.read())
            problem = "" if _is_replay(record) else "it is not what sota-grpo replay writes"
        except OSError as error:
            problem = error.strerror or type(error).__name__
        except (ValueError, RecursionError):
            problem = "it is no JSON"
        if problem:
            sentences.append(readable(f"{path} cannot be shown ({problem}); remove it, or replay again.", keep=""))
        else:
            replays.append(record)
    return replays, sentences


def _is_replay(record: Any) -> bool:
    """Whether it is text and tables of text, every table with a head and rows as long as it.

    >>> _is_replay({"title": "Step 0", "tables": [[["", "dapo"], ["kl", "0"]]], "notes": []})
    True
    >>> _is_replay({"title": "Step 0", "tables": [[["", "dapo"], ["kl"]]], "notes": []}), _is_replay({"title": 1})
    (False, False)
    """

    def is_text(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)

    def is_table(rows: Any) -> bool:
        return isinstance(rows, list) and bool(rows) and all(is_text(r) and r and len(r) == len(rows[0]) for r in rows)

    if not isinstance(record, dict) or not isinstance(record.get("title"), str) or not is_text(record.get("notes")):
        return False
    return isinstance(record.get("tables"), list) and all(map(is_table, record["tables"]))
