"""Readers of run directories, whose files are untrusted: another user may have made them.

Every reader of a run opens its files here. A refused file is an ``OSError`` with the reason, like any other unreadable
file.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import struct
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sota_grpo.errors import UserError

SMALL_BYTES = 16 << 20  # of a file that is read as a whole
_YAML_BYTES, _YAML_DEPTH = 1 << 20, 32
# A longer file that occupies a hundredth of its length or less takes hours and has no content.
_HOLES_MATTER, _HOLES = 1 << 30, 100
#: Errors of torch's ``weights_only`` loader for bytes that are no tensors; their text advises to run the file's code.
NO_TENSORS = (
    *(RuntimeError, EOFError, pickle.UnpicklingError, struct.error),
    *(LookupError, TypeError, ValueError, AttributeError),
)
_LINK = "it is a link that leaves the run directory"
_NOT_REGULAR = "it is no regular file"


def open_file(path: str | os.PathLike[str], *, most_bytes: int | None = None, levels: int = 1) -> IO[bytes]:
    """Open a regular file of a run for reading, without waiting for a pipe or a device.

    Args:
        most_bytes: refuse a larger file; None: no limit.
        levels: depth of the file in the run directory, 1 for a file directly in it.

    Raises:
        OSError: no regular file, too large, all holes, or a link that leaves the run; or the system refuses.

    >>> folder = getfixture("tmp_path")
    >>> os.mkfifo(folder / "rollouts.jsonl")
    >>> open_file(folder / "rollouts.jsonl")
    Traceback (most recent call last):
    OSError: [Errno 22] it is no regular file
    """
    if _leaves(Path(path), Path(os.path.abspath(path)).parents[levels - 1]):
        raise OSError(errno.EINVAL, _LINK)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    refused = None if stat.S_ISREG(status.st_mode) else _NOT_REGULAR
    if most_bytes is not None and status.st_size > most_bytes:
        refused = f"it has more than {most_bytes} bytes"
    elif status.st_size > _HOLES_MATTER and _HOLES * 512 * status.st_blocks < status.st_size:
        refused = f"it is {status.st_size} bytes long and almost all of them are holes"
    if refused:
        os.close(descriptor)
        raise OSError(errno.EINVAL, refused)
    return os.fdopen(descriptor, "rb")


def require_plain(folder: Path, run_dir: Path, below: Sequence[str] | None = None) -> None:
    """Check a folder before a library reads it or this program writes to it; a missing folder passes.

    Args:
        folder: it and its direct contents are checked.
        run_dir: the only place where links may lead.
        below: folders in it that are checked recursively; None: all.

    Raises:
        UserError: it contains a link that leaves ``run_dir``, a pipe or a device.
    """
    if not os.path.lexists(folder):
        return
    deeper = (path for name in (("",) if below is None else below) for path in (folder / name).rglob("*"))
    for path in chain([folder], folder.glob("*"), deeper):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) and _leaves(path, run_dir):
            raise UserError(f"{path}: {_LINK}; replace it by its target (a run directory may be linked as a whole).")
        if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{path}: {_NOT_REGULAR}; remove it.")


def read_yaml(path: Path, *, levels: int = 1) -> Any:
    """Return the content of a YAML file, as OmegaConf has it and unresolved; content that could expand is refused.

    Args:
        levels: as in :func:`open_file`.

    Raises:
        OSError: as :func:`open_file`.
        Exception: PyYAML's and OmegaConf's own: no YAML, aliases, or too deep nesting.
    """
    import yaml
    from omegaconf import OmegaConf

    with open_file(path, most_bytes=_YAML_BYTES, levels=levels) as file:
        text = file.read().decode()
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _YAML_DEPTH:
            raise yaml.YAMLError(f"it has aliases, or is nested deeper than {_YAML_DEPTH} levels")
    return OmegaConf.load(io.StringIO(text))


def _leaves(path: Path, run_dir: Path) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))
