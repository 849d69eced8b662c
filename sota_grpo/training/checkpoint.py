"""Checkpoints of a run, written atomically and checked by SHA-256 when they are read.

A checkpoint is a ``torch.save`` archive followed by 8 bytes of magic and the SHA-256 of everything before them (torch's
reader does not compare the archive's CRCs). It is written under a temporary name, synced and renamed: a name
``checkpoint_*.pt`` is never a half-written file. Plain ``torch.load(path)`` reads it too.

If the learner runs in other processes, each rank writes its shard, while training continues, to a safetensors file in a
folder with a new random name. The ``.pt`` is written last and has the folder's name and the SHA-256 of every file::

    checkpoint_000020.pt
    checkpoint_000020.5f0c81d2a9b3/rank_00000.safetensors
    checkpoint_000020.5f0c81d2a9b3/rank_00001.safetensors

In this ``.pt``, ``{"stored_tensor": name}`` replaces each tensor of the learner that is not empty::

    {"model": {"w": tensor}, "version": 3}  ->  {"model": {"w": {"stored_tensor": "model.w"}}, "version": 3}
                                                {"model.w": tensor}
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import PicklingError
from typing import IO, Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from sota_grpo.errors import RunFailed
from sota_grpo.files import atomic_file, drop_leftovers, sync
from sota_grpo.policy.sharding import Ranks, local_shard
from sota_grpo.policy.tensor_files import SUFFIX, Piece, StoredTensor, TensorFileError, stored_tensors, write_tensors
from sota_grpo.policy.weight_pack import as_bytes, copy_to_host, emptied, filled
from sota_grpo.text import one_line, os_reason, sentence
from sota_grpo.untrusted import NO_TENSORS, open_file
from sota_grpo.workers.base import WorkerThread, pending_future

_MAGIC = b"SGRPOck1"
_FOOTER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_NAME = re.compile(r"checkpoint_(\d{6,})\.pt")
_FOLDER = re.compile(r"checkpoint_(\d{6,})\.[0-9a-f]{12}")  # of the ranks' files
_RANK_FILE = re.compile(r"rank_\d{5}\.safetensors")
_SHARDS = "shards"  # key in a state: the folder's name, and the SHA-256 of each file in it
_HASHED_AT_ONCE = 8
_READ_BYTES = 1 << 22

logger = logging.getLogger(__name__)


class CheckpointError(RunFailed, RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointStore:
    """The checkpoints of one run: ``save`` is atomic and durable, ``latest`` skips damaged files.

    Only one process may write to a directory. ``save`` keeps the newest ``keep`` checkpoints (ValueError if below 1)
    and that of step ``best``, which the caller sets. It deletes others, and those of later steps after a rewind.

    >>> import tempfile
    >>> store = CheckpointStore(tempfile.mkdtemp(), keep=2)
    >>> [store.save(step, {"step": step}).name for step in (1, 2, 3)][-1]
    'checkpoint_000003.pt'
    >>> store.latest()
    (3, {'step': 3})
    >>> [path.name for _, path in store.paths()]
    ['checkpoint_000003.pt', 'checkpoint_000002.pt']
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}, but at least 1 checkpoint must be kept to resume from")
        self.directory = Path(directory)
        self.keep = keep
        self.best: int | None = None

    def paths(self) -> list[tuple[int, Path]]:
        """Return (step, path) of every checkpoint in the directory, highest step first; [] without a directory."""
        if not self.directory.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    def folder(self, step: int) -> Path:
        """Return a path for a new folder of the ranks' files of ``step``; delete such folders without a checkpoint."""
        self._drop_folders(None)
        return self.directory / f"checkpoint_{step:06d}.{secrets.token_hex(6)}"

    @property
    def num_bytes(self) -> int:
        """Size of all checkpoints on disk, the ranks' files included, in bytes."""
        files = [path for _, path in self.paths()]
        files += [file for folder in self._folders() for file in folder.iterdir()]
        return sum(file.stat().st_size for file in files)

    def save(self, step: int, state: dict[str, Any], shards: Shards | None = None) -> Path:
        """Write ``checkpoint_{step:06d}.pt``, sync it to disk, and delete others (see the class); return its path.

        Args:
            state: nested dicts, lists and tuples of tensors and plain Python values.
            shards: the files that ranks are writing in a :meth:`folder` of this step; ``save`` waits for them.

        Raises:
            CheckpointError: a write failed (disk full, no permission), a rank died, or a value cannot be pickled or
                would be refused by ``torch.load(weights_only=True)``; older checkpoints are unchanged.
        """
        path = self.directory / f"checkpoint_{step:06d}.pt"
        earlier = _inode(path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if shards is not None:
                state = state | {_SHARDS: {"folder": shards.folder.name, "files": dict(shards.written())}}
                sync(shards.folder)
            with atomic_file(path, durable=True) as temporary:
                _write(temporary, state)
        except BaseException as error:
            if shards is not None and earlier is not None and _inode(path) == earlier:
                shutil.rmtree(shards.folder, ignore_errors=True)  # the earlier checkpoint of this step has its own
            self._drop_folders(None)
            if isinstance(error, (OSError, RunFailed)):  # a rank may have died
                raise CheckpointError(self._write_failure(step, error)) from error
            raise
        for later, old in self.paths():
            if later > step:
                logger.warning("Deleting %s: the run was rewound, and the newest step is now %d", old.name, step)
                old.unlink()
        for older, old in self.paths()[self.keep :]:
            if older != self.best:
                old.unlink()
        self._drop_folders(path.with_suffix("") if shards is None else shards.folder)
        drop_leftovers(self.directory)  # of killed processes
        return path

    def latest(self, entries: Sequence[str] = ()) -> tuple[int, dict[str, Any]] | None:
        """Return the readable checkpoint of the highest step as (step, state); None if there is no checkpoint.

        A checkpoint that is damaged or lacks one of ``entries`` is skipped with a warning; CheckpointError if all are.
        """
        paths = self.paths()
        for step, path in paths:
            try:
                return step, self.load(path, entries)
            except CheckpointError as error:
                logger.warning("Skipping the checkpoint of step %d: %s", step, one_line(str(error), None))
        if not paths:
            return None
        names = ", ".join(path.name for _, path in paths)
        raise CheckpointError(
            f"no checkpoint in {self.directory} can be read ({names}); "
            "restore one from a backup, or move them away to start from step 0"
        )

    @staticmethod
    def load(path: str | os.PathLike[str], entries: Sequence[str] = ()) -> dict[str, Any]:
        """Check the SHA-256 of one checkpoint and load its state onto the CPU, without running code from the file.

        Tensors in the ranks' files, which are checked too, are :class:`~sota_grpo.policy.tensor_files.StoredTensor`.
        CheckpointError: a file is missing or altered, has unexpected content, or lacks one of the keys ``entries``.
        """
        try:
            with open_file(path, levels=2) as file:
                _require_intact(file, path)
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or not state.keys() >= set(entries):
                raise TypeError(state)
            shards = state.pop(_SHARDS, None)
            return state if shards is None else filled(state, _stored(Path(path), **shards))
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {os_reason(error)}; use another") from error
        except CheckpointError:
            raise
        except NO_TENSORS as error:
            what = error if isinstance(error, TensorFileError) else f"{type(error).__name__}; no code in it was run"
            content = f"lacks entries or has unexpected content ({what})"
            raise CheckpointError(f"checkpoint {path} {content}; use another") from None

    def _folders(self) -> list[Path]:
        folders = self.directory.iterdir() if self.directory.is_dir() else ()
        return [path for path in folders if _FOLDER.fullmatch(path.name) and not path.is_symlink()]

    def _drop_folders(self, current: Path | None) -> None:
        """Delete ranks' folders without a checkpoint, and all folders of the step of ``current`` except ``current``."""
        steps = {path.stem for _, path in self.paths()}
        for folder in self._folders():
            if folder.stem not in steps or (current is not None and folder.stem == current.stem and folder != current):
                shutil.rmtree(folder, ignore_errors=True)

    def _write_failure(self, step: int, error: OSError | RunFailed) -> str:
        what, fix = str(error).rstrip("."), ""
        if isinstance(error, OSError):
            what, fix = os_reason(error), "; make room, make it writable or set another hydra.run.dir"
            if self.directory.is_dir():
                what += f" ({shutil.disk_usage(self.directory).free / 2**20:.0f} MiB free)"
        last = next((f"{path.name} is the last good one" for _, path in self.paths()), "there is no earlier one")
        return f"the checkpoint of step {step} could not be written to {self.directory}: {what}; {last}{fix}"


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


class BackgroundSaves(AbstractContextManager["BackgroundSaves"]):
    """Saves checkpoints in a background thread, one at a time; leaving the ``with`` block waits for the last save.

    Do not modify a state after passing it to :meth:`save`: pass a :func:`host_copy`. A save's error is raised once: by
    the next :meth:`save` or :meth:`wait`, by a :meth:`check` after the save has failed, or when the block ends. If the
    block ends by another exception, a CheckpointError is only logged.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # whose threads are no daemons
        self.saving: Future[Path] | None = None  # the last save, until wait() returned

    def save(self, step: int, state: dict[str, Any], shards: Shards | None = None) -> None:
        """Wait for the previous save and raise its error, if any; start :meth:`CheckpointStore.save` in the thread."""
        self.wait()
        self.saving = self._writer.submit(self.store.save, step, state, shards)

    def check(self) -> None:
        """Raise the error of the last save if it has failed; do not wait."""
        if self.saving is not None and self.saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk; raise its error if it failed."""
        if self.saving is not None:
            failure, self.saving = self.saving.exception(), None
            if failure is not None:
                raise failure

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if kind is None:
                raise
            logger.error("%s", failure)


def host_copy(value: Any) -> Any:
    """Return a nested state with every tensor copied to the CPU."""
    return tree_map_only(torch.Tensor, on_host, value)


def rng_state() -> dict[str, Any]:
    """Return the state of every global random generator: Python, NumPy, torch, and CUDA if it is initialized."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()  # of plain types, as a checkpoint needs them
    state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # else this would take memory of every GPU
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` returned; CUDA's states only if CUDA is initialized, with as many devices."""
    cuda = state.get("cuda") if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    if cuda is not None and len(cuda) != torch.cuda.device_count():
        logger.warning(
            "The checkpoint has random states of %d CUDA devices, but %d are visible: CUDA's are not restored.",
            *(len(cuda), torch.cuda.device_count()),
        )
        cuda = None
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


class _HashingWriter:
    """A file wrapper that hashes all written bytes and keeps an OSError, which torch.save would replace."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash = file, hashlib.sha256()
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        return written


def _write(path: Path, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        writer = _HashingWriter(file)
        try:
            torch.save(state, cast(IO[bytes], writer))
        except RuntimeError as error:
            raise writer.error or error from error
        except (TypeError, AttributeError, PicklingError) as error:  # it cannot be pickled
            raise _not_plain(sentence(error).rstrip(".")) from error
        file.write(_MAGIC + writer.hash.digest())
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise _not_plain(refused[0])


def _not_plain(reason: str) -> RunFailed:
    return RunFailed(
        f"its state has a value that is not a tensor, dict, list, tuple or plain value ({reason}); if train.sampler is "
        "set, make its state_dict() return only these"
    )


def _require_intact(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless the footer's SHA-256 matches the file; rewind the file."""
    size = os.fstat(file.fileno()).st_size
    remaining = size - _FOOTER_BYTES
    digest = hashlib.sha256()
    while remaining > 0 and (data := file.read(min(_READ_BYTES, remaining))):
        digest.update(data)
        remaining -= len(data)
    footer = file.read(_FOOTER_BYTES)
    if not footer.startswith(_MAGIC):
        raise CheckpointError(f"checkpoint {path} ({size} bytes) is truncated or not of this program; use another")
    if footer[len(_MAGIC) :] != digest.digest():
        raise CheckpointError(f"checkpoint {path} is damaged: SHA-256 and content ({size} bytes) differ; use another")
    file.seek(0)


def _stored(path: Path, folder: str, files: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Check the SHA-256 of the ranks' files next to ``path``; return their tensors by name, without reading them."""
    if not _FOLDER.fullmatch(folder) or not all(_RANK_FILE.fullmatch(name) for name in files):
        raise ValueError(folder)
    paths = [path.absolute().parent / folder / name for name in files]  # other processes read them too
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        for file, expected, actual in zip(paths, files.values(), pool.map(_sha256, paths)):
            if expected != actual:
                raise CheckpointError(f"checkpoint {path} is damaged: {folder}/{file.name} has changed; use another")
    return stored_tensors(paths)


def _sha256(path: Path) -> str:
    with open_file(path, levels=3) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shards:
    """The files that the learner's ranks are writing for one checkpoint, in ``folder``."""

    folder: Path
    written: Callable[[], Mapping[str, str]]  # waits; returns {file name: SHA-256}, or raises the error of a rank


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy of the tensor on the CPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_to_host(as_bytes(copy), as_bytes(tensor.detach()))
    return copy


class ShardWriter:
    """Writes this rank's shard of states to files in a background thread, one after the other.

    The thread first copies the tensors to host memory; they must not change before ``wait_copied()`` returns.
    ``written`` is a future of (file name, SHA-256) of the file that the last :meth:`begin` writes.
    """

    def __init__(self, ranks: Ranks):
        self._ranks, self.thread, self._copied = ranks, WorkerThread("checkpoint"), threading.Event()
        self._copied.set()
        self.wait_copied = self._copied.wait
        self.written: Future[tuple[str, str]] = pending_future()

    def begin(self, folder: Path, state: Any) -> Any:
        """Start to copy and write this rank's shard of ``state`` to ``folder``; return ``state`` without tensors."""
        rest, tensors = emptied(state)
        shards = ((name, local_shard(tensor, self._ranks), tuple(tensor.shape)) for name, tensor in tensors.items())
        mine = {name: (*shard, whole) for name, shard, whole in shards if shard is not None}
        launched = torch.cuda.Event() if self._ranks.device.type == "cuda" else None
        if launched is not None:
            launched.record()  # kernels launched before still change these tensors
        self._copied.clear()
        self.written = self.thread.submit(self._write, folder, mine, launched)
        return rest

    def _write(
        self, folder: Path, local: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]], launched: Any
    ) -> tuple[str, str]:
        try:
            layout = {name: Piece.of(*shard) for name, shard in local.items()}
            copies: list[torch.Tensor] = []
            with nullcontext() if launched is None else torch.cuda.stream(torch.cuda.Stream(self._ranks.device)):
                if launched is not None:
                    launched.wait()
                for tensor, *_ in local.values():
                    copies.append(on_host(tensor))
                    self.thread.progress()
        finally:
            local.clear()
            self._copied.set()
        name = f"rank_{self._ranks.rank:05d}{SUFFIX}"
        folder.mkdir(parents=True, exist_ok=True)
        progress, copies = self.thread.progress, copies[::-1]
        released = (copies.pop() for _ in range(len(copies)))  # a tensor is freed once it is written
        return name, write_tensors(folder / name, layout, released, durable=True, progress=progress)
