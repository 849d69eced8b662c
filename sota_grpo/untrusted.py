"""Files of a run directory that somebody else may have made: data, whatever they are made to look like.

Every reader of a run opens its files here. What is refused is an ``OSError`` whose text says why, so that a caller
treats it like any other file that cannot be read.
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
# A longer file that is stored in a hundredth of its length or less takes hours and tells nothing.
_HOLES_MATTER, _HOLES = 1 << 30, 100
#: What torch's ``weights_only`` loader raises of bytes that are no file of tensors. Its text advises to run their code.
NO_TENSORS = (
    *(RuntimeError, EOFError, pickle.UnpicklingError, struct.error),
    *(LookupError, TypeError, ValueError, AttributeError),
)
_LINK = "it is a link that leaves the run directory"
_NOT_REGULAR = "it is no regular file"


def open_file(path: str | os.PathLike[str], *, most_bytes: int | None = None, levels: int = 1) -> IO[bytes]:
    """Open a regular file of a run for reading; neither a pipe nor a device is waited for.

    Args:
        path: of the file.
        most_bytes: a larger file is refused; None takes any.
        levels: folders from the run directory to the file, 1 for one that stands in it.

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
    """Check a folder before it is given to a library that opens files itself, or written to; one not there passes.

    Args:
        folder: the folder; it and its direct contents are checked.
        run_dir: where links may lead.
        below: of its folders, those whose contents are checked as well; None: all.

    Raises:
        UserError: something below it is a link that leaves ``run_dir``, a pipe or a device.
    """
    if not os.path.lexists(folder):
        return
    deeper = (path for name in (("",) if below is None else below) for path in (folder / name).rglob("*"))
    for path in chain([folder], folder.glob("*"), deeper):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) and _leaves(path, run_dir):
            raise UserError(f"{path}: {_LINK}; put there what it names (a run directory may be linked as a whole).")
        if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{path}: {_NOT_REGULAR}; remove it.")


def read_yaml(path: Path, *, levels: int = 1) -> Any:
    """What stands in a YAML file, as OmegaConf has it and unresolved; what could grow while it is read is refused.

    Args:
        path: of the file.
        levels: as in :func:`open_file`.

    Raises:
        OSError: as :func:`open_file`.
        Exception: PyYAML's and OmegaConf's own, for what is no YAML, has aliases or is nested too deeply.
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
