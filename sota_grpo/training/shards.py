"""A learner's state in parts: each rank copies its own to its host and writes it behind its training.

The nested state is cut in two: ``rest``, plain values with ``{"stored_tensor": name}`` where a tensor was, and the
tensors by name, of which each rank writes the rows that it holds (:mod:`sota_grpo.policy.tensor_files`)::

    {"model": {"w": tensor}, "version": 3}  ->  {"model": {"w": {"stored_tensor": "model.w"}}, "version": 3}
                                                {"model.w": tensor}
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sota_grpo.policy.sharding import Ranks, own_shard
from sota_grpo.policy.tensor_files import SUFFIX, Kept, StoredTensor, write_tensors
from sota_grpo.policy.weight_pack import as_bytes, copy_to_host
from sota_grpo.workers.base import WorkerThread, promised

_MARK = "stored_tensor"


@dataclass(frozen=True)
class Shards:
    """What the ranks of a learner are writing for one checkpoint, in a folder of its own.

    ``written`` waits for all of them: the SHA-256 of each file by its name. It raises what kept one from being written.
    """

    folder: Path
    written: Callable[[], Mapping[str, str]]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_to_host(as_bytes(copy), as_bytes(tensor.detach()))
    return copy


def emptied(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A nested state without its tensors, and these by name, uncopied.

    >>> emptied({"model": [torch.ones(1)], "step": 3})
    ({'model': [{'stored_tensor': 'model.0'}], 'step': 3}, {'model.0': tensor([1.])})
    """
    tensors: dict[str, torch.Tensor] = {}

    def without(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor) and value.numel():
            name = ".".join(path)
            if name in tensors:
                raise ValueError(f"two tensors of a state are called {name}")
            tensors[name] = value
            return {_MARK: name}
        if isinstance(value, Mapping):
            return {key: without(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(without(item, (*path, str(index))) for index, item in enumerate(value))
        return value

    return without(state, ()), tensors


def filled(rest: Any, tensors: Mapping[str, StoredTensor]) -> Any:
    """The state again, each tensor as the :class:`~sota_grpo.policy.tensor_files.StoredTensor` of its name."""
    if isinstance(rest, dict):
        if rest.keys() == {_MARK}:
            return tensors[rest[_MARK]]
        return {key: filled(item, tensors) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)(filled(item, tensors) for item in rest)
    return rest


class ShardWriter:
    """Writes this rank's part of a state behind its training.

    Contract. Consumes: states whose tensors nobody changes before :meth:`wait_copied` has returned. Produces: one file
    per :meth:`begin`, whose name and SHA-256 :meth:`written` promises. Waits for: the disk, on a thread of its own; a
    new state waits for the one before. It keeps a copy of this rank's part in the host's memory while it writes.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._thread = WorkerThread("checkpoint")
        self._copied = threading.Event()
        self._copied.set()
        self._written: Future[tuple[str, str]] = promised()

    def begin(self, folder: Path, state: Any) -> Any:
        """Begin to copy and to write; what is no tensor comes back."""
        rest, tensors = emptied(state)
        own = {name: shard for name, tensor in tensors.items() if (shard := own_shard(tensor, self._ranks)) is not None}
        launched = torch.cuda.Event() if self._ranks.device.type == "cuda" else None
        if launched is not None:
            launched.record()  # what has been launched before changes these tensors still
        self._copied.clear()
        self._written = self._thread.submit(self._write, folder, own, launched)
        return rest

    def wait_copied(self) -> None:
        """Return when the tensors of the last state may change."""
        self._copied.wait()

    def written(self) -> Future[tuple[str, str]]:
        """Of the last state: the file's name and its SHA-256."""
        return self._written

    def silent_s(self) -> float:
        """Seconds since it last copied or wrote something; 0 when nothing is to be written."""
        return self._thread.silent_s()

    def close(self) -> None:
        """End after what is queued."""
        self._thread.close()

    def _write(
        self, folder: Path, own: dict[str, tuple[torch.Tensor, tuple[int, ...]]], launched: Any
    ) -> tuple[str, str]:
        try:
            layout = {name: Kept.of(tensor, begin) for name, (tensor, begin) in own.items()}
            copies = self._copies([tensor for tensor, _ in own.values()], launched)
        finally:
            own.clear()
            self._copied.set()
        name = f"rank_{self._ranks.rank:05d}{SUFFIX}"
        folder.mkdir(parents=True, exist_ok=True)
        progress = self._thread.progress
        return name, write_tensors(folder / name, layout, _released(copies), durable=True, progress=progress)

    def _copies(self, tensors: Iterable[torch.Tensor], launched: Any) -> list[torch.Tensor]:
        """On the host. A GPU makes them beside what it computes."""
        copies = []
        with nullcontext() if launched is None else torch.cuda.stream(torch.cuda.Stream(self._ranks.device)):
            if launched is not None:
                launched.wait()
            for tensor in tensors:
                copies.append(on_host(tensor))
                self._thread.progress()
        return copies


def _released(tensors: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Each in turn, and nothing of it afterwards."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
