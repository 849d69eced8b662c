"""Write files and folders atomically; execute a user's Python files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sota_grpo.errors import UserError
from sota_grpo.text import sentence

T = TypeVar("T")
_SOCKET_PATH_BYTES = 103  # longest path of a Unix socket on macOS; 107 on Linux
_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]+\.(tmp|old)")


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of an empty temporary file next to ``path``; rename it to ``path`` if the block succeeds.

    Until then ``path`` keeps its former content; after an exception the temporary file is removed. OSError if ``path``
    is a folder, its folder is missing, or the file system fails. ``durable``: the write survives a power cut.

    >>> folder = getfixture("tmp_path")
    >>> with atomic_file(folder / "a.txt") as temporary:
    ...     size, there = temporary.write_text("whole"), (folder / "a.txt").exists()
    >>> there, (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    (False, 'whole', 1)
    """
    temporary = _sibling(path)
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # follows no link
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder next to ``path`` (parents too); it replaces ``path`` if the block succeeds, or is removed."""
    temporary, replaced = _sibling(path), _sibling(path, "old")
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
        with suppress(OSError):
            _remove(replaced)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise an OSError for an error of tokenizers or safetensors, written in Rust, that has the number of one."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or isinstance(error, (OSError, UserError)):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def drop_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders of killed atomic writes from ``folder``; no process may be writing there.

    ``name``: only those of writes to this file or folder. A folder that was moved away for a new one, which did not
    take its place, is moved back.
    """
    for leftover in folder.glob(".*"):
        if (match := _LEFTOVER.fullmatch(leftover.name)) and name in (None, match[1]):
            path = folder / match[1]
            if match[2] == "old" and not path.exists():
                leftover.rename(path)
            else:
                _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8, atomically; UnicodeEncodeError if it has a lone surrogate."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path`` as JSON, atomically; ValueError for NaN or infinity, TypeError for other types."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def folder_for_sockets(room: int) -> str:
    """Return the path of the temporary folder; ``/tmp`` if it and ``room`` more bytes are too long for a socket's path.

    >>> folder_for_sockets(room=100)
    '/tmp'
    """
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + room <= _SOCKET_PATH_BYTES else "/tmp"


def run_python(path: Path) -> ModuleType:
    """Execute a user's Python file, anew at each call, and return its module; exceptions of the file propagate.

    The file's folder is appended to ``sys.path``. The module stays in ``sys.modules``, unless the file raises.
    """
    name = f"user_file_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up by its name
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file next to it must not shadow a package
    try:
        # Not by a loader: it would write compiled files next to the user's own, and trust stale ones.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def require_file(path: Path, option: str, error: type[Exception] = UserError) -> None:
    """Raise ``error`` unless the file ``path``, which ``option`` names, exists."""
    if not path.is_file():
        raise error(f"there is no file {path}; correct {option} (relative to {Path.cwd()}).")


def load_python(path: Path, option: str, error: type[Exception]) -> dict[str, Any]:
    """Return the globals of the Python file that ``option`` names (:func:`run_python`); ``error`` if that fails."""
    require_file(path, option, error)
    try:
        return vars(run_python(path))
    except (Exception, SystemExit) as fault:
        line = error_line(path, fault)
        location = "" if line is None else f", line {line}"
        raise error(
            f"{path}{location}: it cannot be imported ({sentence(fault).rstrip('.')}); correct the file or install "
            "the packages that it imports."
        ) from fault


def file_reference(value: str) -> tuple[Path, str] | None:
    """Return (file, name) of ``FILE.py:NAME``, with ``~`` expanded; None for a value without ``.py:``."""
    file, mark, function = value.rpartition(".py:")
    return (Path(f"{file}.py").expanduser(), function) if mark else None


def load_instances(name: str, named: Sequence[str], base: type[T]) -> list[tuple[str, T]]:
    """Return ``(NAME=VALUE, instance)`` for each value of the option ``name``; UserError if a value cannot be used.

    A value is ``FILE.py:ATTRIBUTE``, with an instance of ``base``, or a class or function that returns one when called
    without arguments. A file with several values is executed once.
    """
    modules: dict[Path, dict[str, Any]] = {}
    loaded = []
    for value in named:
        path, attribute = file_reference(value) or (Path(value), "")
        option = f"{name}={value}"
        if path not in modules:
            modules[path] = load_python(path, option, UserError)
        if attribute not in modules[path]:
            raise UserError(f"{option}: the file does not define {attribute!r}; correct the name.")
        made = modules[path][attribute]
        if not isinstance(made, base) and callable(made):
            try:
                made = made()
            except Exception as error:
                line = error_line(path, error)
                location = "" if line is None else f" (line {line})"
                fault = f"{sentence(error).rstrip('.')}; correct {attribute}."
                raise UserError(f"{option}: calling {attribute} failed{location}: {fault}") from error
        if not isinstance(made, base):
            raise UserError(
                f"{option} gives an object of type {type(made).__name__}, not a TorchRL {base.__name__}; name an "
                "instance, its class, or a function without parameters that returns an instance."
            )
        loaded.append((option, made))
    return loaded


def error_line(path: str | Path, error: BaseException) -> int | None:
    """Return the line (from 1) of a SyntaxError in ``path``, else the traceback's innermost line of it, or None."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == str(path)]
    return lines[-1] if lines else None


def _sibling(path: Path, ending: str = "tmp") -> Path:
    """Return a path of the form ``_LEFTOVER``, unpredictable, so that no other user can prepare a link there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{ending}")


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
