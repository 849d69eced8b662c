"""What a Ray actor runs, and how arguments get there: imported by the driver and the actors; needs no Ray itself."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sota_grpo.workers.host import Host, die_with_parent, outcome

Place = tuple[int, str]  # pid, and the machine on which it means something


class Shared:
    """A reference that is replaced by its value in the worker."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


class _Hole(int):
    """Where the shared value of this index goes."""


def pack(args: Sequence[Any]) -> tuple[bytes, list[np.ndarray], list[Any]]:
    """Pickled arguments, their large buffers, and references; the actor unpacks them on the servant's thread."""
    references: list[Any] = []
    left = []
    for arg in args:
        if isinstance(arg, Shared):
            left.append(_Hole(len(references)))
            references.append(arg.reference)
        else:
            left.append(arg)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(tuple(left), protocol=5, buffer_callback=buffers.append)
    return body, [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers], references


def _unpack(body: bytes, buffers: list[np.ndarray], references: list[Any]) -> tuple[Any, ...]:
    import ray

    args = pickle.loads(body, buffers=buffers)
    return tuple(ray.get(references[arg]) if isinstance(arg, _Hole) else arg for arg in args)


class HostActor:
    """What Ray runs: a host, and calls put in order. All methods run on one event loop."""

    def __init__(self, name: str, spec: bytes, path: list[str]) -> None:
        die_with_parent()  # Ray's node manager; a stopped actor could not notice that it is gone
        sys.path += [entry for entry in path if entry not in sys.path]
        self._host = Host(name, lambda: pickle.loads(spec))
        self._host.serve_on_thread()
        self._turn = 0
        self._arrived: dict[int, Callable[[], None]] = {}

    async def place(self) -> Place:
        return os.getpid(), machine_id()

    async def call(self, turn: int, method: str, *packed: Any) -> tuple[Place, bool, Any]:
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        answers: list[Future[Any]] = []

        def post() -> None:
            answers.append(self._host.post(method, lambda: _unpack(*packed)))
            answers[0].add_done_callback(lambda _: loop.call_soon_threadsafe(answered.set))

        self._arrived[turn] = post
        while (next_post := self._arrived.pop(self._turn, None)) is not None:
            self._turn += 1
            next_post()
        await answered.wait()
        return await self.place(), *outcome(self._host.name, answers[0])


@cache
def machine_id() -> str:
    """Equal for two processes that mean the same by a pid."""
    if sys.platform != "linux":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
