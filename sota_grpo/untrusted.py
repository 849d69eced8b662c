"""Files of a run directory that somebody else may have made: data, whatever they are made to look like.

Every reader of a run opens its files here. What is refused is an ``OSError`` whose text says why, so that a caller
treats it like any other file that cannot be read.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

from sota_grpo.errors import UserError

SMALL_BYTES = 16 << 20  # of a file that is read as a whole
_YAML_BYTES, _YAML_DEPTH = 1 << 20, 32
# A longer file that is stored in a hundredth of its length or less takes hours and tells nothing.
_HOLES_MATTER, _HOLES = 1 << 30, 100
_LINK = "it is a link that leaves the run directory"
_NOT_REGULAR = "it is no regular file"
_END = b"PK\x05\x06"  # of a zip archive: the record that says where its directory is
_END_BYTES = 22
_ITEM_BYTES = {  # of torch's storages, by their names in a pickle
    **dict.fromkeys(("BoolStorage", "ByteStorage", "CharStorage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_SHARED = 8  # tensors of one storage may claim it so often: tied weights do twice


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


class TensorFileError(ValueError):
    """A file of tensors is not what ``torch.save`` writes, or claims more memory than it has bytes."""


def load_tensors(file: IO[bytes], num_bytes: int | None = None) -> Any:
    """What ``torch.save`` wrote, on the CPU; no code in it is run, and its tensors take no more memory than its bytes.

    An archive may be compressed, a storage may claim a size that its bytes have not (which torch takes at its word), a
    tensor may repeat one number for ever. What it claims is therefore read first, and held against its bytes.

    Args:
        file: at any place; regular, or in memory.
        num_bytes: of the archive, which the file begins with; None: all of it.

    Raises:
        TensorFileError: it is no such archive, or claims too much; the text says which.
        Exception: of torch, for what it refuses to load.

    >>> import torch
    >>> file = io.BytesIO()
    >>> torch.save({"weight": torch.zeros(1).expand(10**12)}, file)
    >>> load_tensors(file)
    Traceback (most recent call last):
    sota_grpo.untrusted.TensorFileError: a tensor claims 4000000000000 bytes and its storage has 4
    """
    import torch

    part = _Beginning(file, file.seek(0, os.SEEK_END) if num_bytes is None else num_bytes)
    try:
        _require_honest(part)
    except TensorFileError:
        raise
    except Exception as error:  # of zipfile and pickle, for bytes that anybody may have written: any kind there is
        raise TensorFileError(f"it is no archive of tensors ({type(error).__name__})") from error
    part.seek(0)
    return torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]


class _Beginning(io.RawIOBase):
    """The first bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file: Any = file
        self.num_bytes, self._at = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self.num_bytes - self._at)])
        self._at += count
        return int(count)


def _require_honest(file: _Beginning) -> None:
    """See that the archive can be read in one way only, and claims no more than its bytes."""
    file.seek(max(0, file.num_bytes - _END_BYTES))
    end = file.read(_END_BYTES) or b""
    if not end.startswith(_END) or end[-2:] != b"\0\0":
        raise TensorFileError("it does not end as an archive of tensors does")
    with ZipFile(file) as archive:
        entries = archive.infolist()
        if any(one.compress_type != ZIP_STORED or one.file_size != one.compress_size for one in entries):
            raise TensorFileError("it is compressed, which torch never does")
        sizes = {one.filename: one.file_size for one in entries}
        if sum(sizes.values()) > file.num_bytes or len(sizes) < len(entries):
            raise TensorFileError("its entries overlap")
        (folder,) = {name.partition("/")[0] for name in sizes}
        if min(one.header_offset for one in entries):
            raise TensorFileError("something stands before the archive")
        order = f"{folder}/byteorder"
        if order in sizes and archive.read(order) != b"little":
            raise TensorFileError("its numbers are not in this machine's order of bytes")
        claims = _Claims(archive.open(f"{folder}/data.pkl"), lambda key: sizes[f"{folder}/data/{key}"])
        claims.load()
    if claims.num_bytes > _SHARED * file.num_bytes:
        raise TensorFileError(f"its tensors claim {claims.num_bytes} bytes and it has {file.num_bytes}")


class _Claims(pickle.Unpickler):
    """Walks through what ``torch.save`` pickled, and makes nothing of it but sums: it knows a few names.

    Args:
        file: the pickle.
        size_of: bytes of a storage, by its key.
    """

    def __init__(self, file: IO[bytes], size_of: Callable[[str], int]) -> None:
        super().__init__(file)
        self._size_of, self.num_bytes = size_of, 0

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _ITEM_BYTES:
            return _ITEM_BYTES[name]
        made = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._nothing,
            ("_codecs", "encode"): self._nothing,  # bytes, which the protocol writes as text
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in made:
            raise TensorFileError(f"it asks for {module}.{name}, which is no part of a tensor")
        return made[module, name]

    def persistent_load(self, pid: Any) -> tuple[int, int]:
        """Bytes of a storage and of one number in it."""
        kind, item, key, _, count = pid
        has = self._size_of(key)
        if kind != "storage" or count * item != has:
            raise TensorFileError(f"a storage claims {count * item} bytes and has {has}")
        return has, item

    def _tensor(self, storage: tuple[int, int], offset: int, size: Any, stride: Any, *_: Any) -> None:
        claimed = math.prod(size) * storage[1]
        if claimed > storage[0] or min(offset, *size, *stride, 0) < 0:
            raise TensorFileError(f"a tensor claims {claimed} bytes and its storage has {storage[0]}")
        self.num_bytes += claimed

    @staticmethod
    def _nothing(*_: Any) -> None: ...


def _leaves(path: Path, run_dir: Path) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))
