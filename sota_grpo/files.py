"""Files and folders that are there whole or not at all, whatever ends their writer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path`` for the block to write; it takes the name when the block ends well.

    Args:
        path: what is there before stays until then, and stays if the block fails.
        durable: the file and its name are on the disk afterwards, so that they outlive a power cut.

    Raises:
        OSError: the file system refused; nothing is left behind.

    >>> folder = getfixture("tmp_path")
    >>> with atomic_file(folder / "a.txt") as temporary:
    ...     size, there = temporary.write_text("whole"), (folder / "a.txt").exists()
    >>> there, (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    (False, 'whole', 1)
    """
    temporary = _beside(path)
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path`` for the block to fill; it takes the place of ``path`` when the block ends well.

    Raises:
        OSError: the file system refused; what was at ``path`` is still there.
    """
    temporary, replaced = _beside(path), _beside(path, "old")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            path.rename(replaced)
        try:
            temporary.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write ``path`` in UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON, atomically."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _beside(path: Path, ending: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
