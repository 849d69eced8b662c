"""Open files of run directories safely: another user may have made them, so they are untrusted.

Code that reads a run opens its files with :func:`open_file`, which refuses a file with an ``OSError`` and the reason.
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

SMALL_BYTES = 16 << 20  # largest file that is read as a whole
_YAML_BYTES, _YAML_DEPTH = 1 << 20, 32
# Refuse a sparse file: longer than 1 GiB with data on under a hundredth of its length. Reading it takes hours.
_HOLES_MATTER, _HOLES = 1 << 30, 100
#: Errors of torch's ``weights_only`` loader for a file without tensors; their messages advise executing its code.
NO_TENSORS = (
    *(RuntimeError, EOFError, pickle.UnpicklingError, struct.error),
    *(LookupError, TypeError, ValueError, AttributeError),
)
_LINK = "it is a link that leaves the run directory"
_NOT_REGULAR = "it is no regular file"


def open_file(path: str | os.PathLike[str], *, most_bytes: int | None = None, levels: int = 1) -> IO[bytes]:
    """Open a regular file of a run directory for reading bytes; never blocks on a pipe or a device.

    ``levels``: 1 if the file is directly in the run directory, 2 in a subfolder, ... OSError if it cannot be read, has
    more than ``most_bytes`` (None: no limit), is a link out of the run directory, not regular, or large and sparse.

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
        refused = f"it is a sparse file: {status.st_size} bytes long and almost without data"
    if refused:
        os.close(descriptor)
        raise OSError(errno.EINVAL, refused)
    return os.fdopen(descriptor, "rb")


def require_plain(folder: Path, run_dir: Path, below: Sequence[str] | None = None) -> None:
    """Raise UserError if a run's folder has a link out of ``run_dir``, a pipe, a socket or a device.

    Checked are ``folder``, if it exists, its direct contents, and its subfolders ``below`` (None: all) recursively.
    """
    if not os.path.lexists(folder):
        return
    deeper = (path for name in (("",) if below is None else below) for path in (folder / name).rglob("*"))
    for path in chain([folder], folder.glob("*"), deeper):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) and _leaves(path, run_dir):
            raise UserError(f"{path}: {_LINK}; replace it by its target (a run directory may be linked as a whole).")
        if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{path} is a pipe, a socket or a device; remove it.")


def read_yaml(path: Path, *, levels: int = 1) -> Any:
    """Read a YAML file of a run with OmegaConf, interpolations unresolved; refuse aliases and deep nesting.

    OSError: see :func:`open_file`; or the file has more than 1 MiB, or only a number or a boolean. UnicodeDecodeError,
    YAMLError or OmegaConfBaseException: it is no valid YAML, has aliases, or is nested deeper than 32 levels.
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
