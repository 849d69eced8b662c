"""A judge's answers, kept by the content of the request: a resumed run pays for no answer twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.text import json_line

logger = logging.getLogger(__name__)

LONGEST_LINE = 1 << 16
MOST_SAID = 2000  # characters of what a judge said that are kept, its end
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Verdict:
    """What came of one question.

    Args:
        value: the score; None where there is none.
        error: why there is none.
        said: the judge's words, cut to their end.
        is_final: the judge has answered, and would say the same again; what it never answered is asked for anew.
    """

    value: float | None
    error: str | None = None
    said: str = ""
    is_final: bool = True


def key_of(path: str, body: Any) -> str:
    """The name of a question: a digest of where it goes and of all that is sent, and so of model, rubric and texts.

    >>> key_of("/score", {"a": 1, "b": 2}) == key_of("/score", {"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """Verdicts by the key of their question, in a file of JSON lines that is only ever appended to.

    A line is written with one call of the system, so a process that is killed leaves whole lines and at most one cut
    short, which is passed over, as is anything else that is no verdict. The verdicts themselves stay in the file:
    memory holds their positions. For use from any thread.

    Args:
        path: of the file; None: one without a name, gone with this object.

    Raises:
        UserError: the path is a link, or no regular file, or cannot be written.

    >>> path = getfixture("tmp_path") / "judge.jsonl"
    >>> cache = VerdictCache(path)
    >>> cache.put("a" * 64, Verdict(0.5, said="Verdict: 5"))
    >>> cache.close()
    >>> size = path.open("a").write('{"key": "cut sh')
    >>> VerdictCache(path).get("a" * 64)
    Verdict(value=0.5, error=None, said='Verdict: 5', is_final=True)
    """

    def __init__(self, path: Path | None) -> None:
        self._lock, self._places = threading.Lock(), dict[bytes, tuple[int, int]]()
        if path is None:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise UserError(f"The judge's answers cannot be kept in {path} ({error.strerror}).") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise UserError(f"The judge's answers cannot be kept in {path}: it is no regular file.")
        self._read(path)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Verdict | None:
        """The verdict on the question called ``key``; None where it was not asked yet."""
        with self._lock:
            place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        verdict = _verdict_of(os.pread(self._fd, *place))
        return None if verdict is None or verdict[0] != key else verdict[1]

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep ``verdict``; it is in the file when this returns.

        Raises:
            OSError: the disk is full.
        """
        row = {"key": key, "value": verdict.value, "error": verdict.error, "said": verdict.said[-MOST_SAID:]}
        line = json_line({name: value for name, value in row.items() if value not in (None, "")}).encode() + b"\n"
        with self._lock:
            written = os.write(self._fd, line)
            if written < len(line):  # the disk is full: what was begun is no line, and none goes on from it
                os.write(self._fd, b"\n")
                raise OSError(28, "No space left on device")
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            self._places[bytes.fromhex(key)] = (len(line), end - len(line))

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _read(self, path: Path) -> None:
        at, num_odd, ends_whole = 0, 0, True
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            while line := file.readline(LONGEST_LINE):
                verdict = _verdict_of(line) if (ends_whole and line.endswith(b"\n")) else None
                if verdict is not None:
                    self._places[bytes.fromhex(verdict[0])] = (len(line), at)
                else:
                    num_odd += 1
                at += len(line)
                ends_whole = line.endswith(b"\n")
        if not ends_whole:
            os.write(self._fd, b"\n")
        if num_odd:
            logger.warning("%s: %d pieces are no verdicts of a judge, and are passed over.", path, num_odd)


def _verdict_of(line: bytes) -> tuple[str, Verdict] | None:
    """Key and verdict of a line; None of a line that is none, whoever wrote it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _KEY.fullmatch(str(row.get("key"))):
        return None
    value: Any = row.get("value")
    error, said = row.get("error"), row.get("said", "")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    if not isinstance(said, str) or (not is_number and not isinstance(error, str)):
        return None
    return row["key"], Verdict(float(value) if is_number else None, None if is_number else str(error), said)
