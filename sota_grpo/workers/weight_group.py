"""The process group of one learner and its rollout workers: gloo between CPUs, NCCL between GPUs.

The learner is member 0 of a process group of its own, which neither side's default group (FSDP's, vLLM's) knows of.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from sota_grpo.workers.futures import promised, resolve

_NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class TransferFailed(RuntimeError):
    """A member of the group is gone, was late, or has no room; the weights may go another way."""


@dataclass(frozen=True)
class Meeting:
    """How the members of one group find each other.

    Args:
        host, port: of the store.
        group: its name, never used before.
        members: what the rollout workers call themselves, in the order of their ranks from 1.
        backend: ``gloo`` or ``nccl``.
        stall_s: longest wait for the others, to come and at each slice.
        slice_bytes: of one message, a multiple of 64.
    """

    host: str
    port: int
    group: str
    members: tuple[str, ...]
    backend: Literal["gloo", "nccl"]
    stall_s: float
    slice_bytes: int


class WeightGroup:
    """One member's end of a group; made when all others make theirs.

    Args:
        meeting: where.
        rank: of this member.
        device: where its slices lie.

    Raises:
        TransferFailed: they did not, within ``meeting.stall_s``.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device):
        self.name = meeting.group
        self._limit = timedelta(seconds=meeting.stall_s)
        self._backend = meeting.backend
        self._group: Any = None
        made = promised()
        make: Callable[[], Any] = lambda: _joined(meeting, rank, device)  # noqa: E731
        # NCCL may wait for a member that has just died, for ever: that thread is left behind
        threading.Thread(target=resolve, args=(made, make), name="weight group", daemon=True).start()
        try:
            self._group = made.result(meeting.stall_s)
        except TimeoutError as error:
            raise TransferFailed(f"not all members came within {meeting.stall_s:g} s") from error
        except RuntimeError as error:
            raise TransferFailed(f"the members did not find each other: {first_line(error)}") from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill ``flat`` with member 0's, on every member.

        Raises:
            TransferFailed: another member is gone or was late; the group cannot be used again.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout, options.asyncOp = 0, self._limit, True
        try:
            work = self._group.broadcast([flat], options)
            if self._backend == "nccl":
                work.wait(self._limit)  # the host waits too; without a limit only the stream would
            else:
                work.wait()  # its own timeout ends it
        except RuntimeError as error:
            raise TransferFailed(first_line(error)) from error

    def close(self) -> None:
        """Leave; members that wait for this one notice it (NCCL's at their deadline). Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # it may be broken already
                group.abort()


def _joined(meeting: Meeting, rank: int, device: torch.device) -> Any:
    limit, size = timedelta(seconds=meeting.stall_s), 1 + len(meeting.members)
    client = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=limit)
    store = dist.PrefixStore(meeting.group, client)
    if meeting.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options, local = gloo._Options(), meeting.host.startswith("127.")
        options._devices = [gloo.create_device(hostname=meeting.host) if local else gloo.create_default_device()]
        options._timeout = limit
        return gloo(store, rank, size, options)
    torch.cuda.set_device(device)
    before = os.environ.get(_NCCL_HANDLING)
    os.environ[_NCCL_HANDLING] = "0"  # read once, here: its watchdog would end the process where a member dies
    try:
        group: Any = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    finally:
        os.environ.pop(_NCCL_HANDLING)
        if before is not None:
            os.environ[_NCCL_HANDLING] = before
    group.eager_connect_single_device(device)
    return group


class Seat:
    """The group that this process is in, kept from one transfer to the next."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def take(self, meeting: Meeting, rank: int, device: torch.device) -> WeightGroup:
        if self._group is None or self._group.name != meeting.group:
            self.leave()
            self._group = WeightGroup(meeting, rank, device)
        return self._group

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def first_line(error: BaseException) -> str:
    """What an exception of torch says, without its stack and its own address in torch's source.

    >>> first_line(RuntimeError("[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:63649. This is due to you"))
    'Connection closed by peer [127.0.0.1]:63649'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (text.partition("] ")[2] if text.startswith("[/") else text).partition(". ")[0]
