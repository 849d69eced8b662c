"""The process that forks instances (:mod:`.instances`), keeps their deadlines and judges what they answer."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from sota_grpo.errors import UserError
from sota_grpo.orphans import adopt_orphans, children, die_with_parent, ending
from sota_grpo.rl.records import LARGEST
from sota_grpo.text import one_line
from sota_grpo.workers.base import promised
from sota_grpo.workers.instance_process import LENGTH, live
from sota_grpo.workers.instances import InstanceLost, InstanceSpec
from sota_grpo.workers.slots import Timers

_TOOLBOX = "sota_grpo.tasks.toolbox"  # named, not imported: that room is above this one
_DESCRIBE_S = 120.0  # longest for the construction of one object and the schemas of its tools (imports transformers)
_SCHEMAS_BYTES = 16 << 20
_JSON_BYTES = 12  # of one character: two escapes
_ENVELOPE_BYTES = 4096  # of a reply beside its text, or of the sentence of an error
_READ_BYTES = 1 << 16
_END_S = 10.0  # longest from the last answer of an instance to the end of its process
_SWEEP_AGAIN_S = 0.05


@dataclass(eq=False)
class _Request:
    """What one instance is asked; ``read`` judges the reply and raises ValueError where no instance answers so."""

    message: bytes
    read: Callable[[Any], Any]
    most_bytes: int
    timeout_s: float
    is_last: bool
    future: Future[Any] = field(default_factory=promised)


@dataclass(eq=False)
class _Instance:
    """An instance as its host sees it. The first of ``requests`` is the one that it is at."""

    key: int
    pid: int
    connection: socket.socket
    death: int | None  # a pidfd, where there are any
    requests: deque[_Request] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    to_send: memoryview = field(default_factory=lambda: memoryview(b""))
    num_events: int = 0  # a deadline holds until the next one
    is_gone: bool = False  # nobody listens to it any more


class InstanceHost:
    """The worker that forks instances and speaks to them.

    Its main thread, which has run the user's file, forks: so an instance is on the thread that made the module's
    objects. Another thread does everything else, woken by the instances, the next deadline or the main thread; the
    others of this process sleep in system calls. No lock of theirs is needed in an instance, which shares no object
    with them that it would use.

    Args:
        spec, timeout_s, max_chars: as in :class:`~.instances.Instances`.
    """

    def __init__(self, spec: InstanceSpec, timeout_s: float, max_chars: int) -> None:
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self._refusal: UserError | None = None
        own_files = _open_files()
        try:
            self._make = import_module(_TOOLBOX).load(spec)
        except UserError as error:
            self._refusal = UserError(str(error))
        self._kept_files = _open_files() - own_files
        self._file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_files = self._file_limits[1]
        with suppress(ValueError, OSError):  # an instance takes two
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        adopt_orphans()
        self._board = _Board()
        threading.Thread(target=self._board.run, name="instances", daemon=True).start()
        gc.collect()  # once, here, instead of in every instance

    def run(self, kind: str, key: int, message: bytes) -> Future[Any] | None:
        """Ask an instance; ``open`` and ``describe`` make it."""
        if self._refusal is not None:
            raise self._refusal
        if kind == "drop":
            self._board.post(self._board.drop, key)
            return None
        is_described = kind == "describe"
        request = _Request(
            message,
            partial(_READERS[kind], self._max_chars),
            most_bytes=_SCHEMAS_BYTES if is_described else _ENVELOPE_BYTES + _JSON_BYTES * self._max_chars,
            timeout_s=max(_DESCRIBE_S, self._timeout_s) if is_described else self._timeout_s,
            is_last=kind in ("describe", "finish"),
        )
        if kind in ("open", "describe"):
            try:
                self._fork(key)
            except OSError as error:
                raise InstanceLost(f"no process can be started for it: {error}") from error
        self._board.post(self._board.ask, key, request)
        return request.future

    def ping(self) -> float:
        """Seconds for which the thread that speaks to the instances has been at one event."""
        return self._board.silent_s()

    def _fork(self, key: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._board.forking, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: see the class
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            host = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_instance(theirs, host)
            ours.setblocking(False)
            self._board.add(_Instance(key, pid, ours, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None))

    def _become_instance(self, connection: socket.socket, host: int) -> NoReturn:
        """In the child. It never returns: the frames above hold what belongs to the host."""
        code = 1
        try:
            gc.freeze()  # a collection would write to all that came along, and so copy it
            os.setsid()
            die_with_parent()
            adopt_orphans()  # so that all that it starts is found below it
            if os.getppid() == host:  # else it ended before that was said
                _close_files_but({0, 1, 2, connection.fileno()} | self._kept_files)
                resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limits)
                if "numpy.random" in sys.modules:  # Python's own generator is seeded anew in every child
                    sys.modules["numpy.random"].seed()
                live(connection, self._make, self._max_chars)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class _Board:
    """The instances of a host, spoken to by one thread.

    Contract. Consumes: requests, of any thread; what instances send. Produces: the requests' futures. Waits for: the
    first of these and of the deadlines, in one system call that costs the same however many instances are silent.
    """

    def __init__(self) -> None:
        self.forking = threading.Lock()  # held until a process that has been forked is known here
        self._instances: dict[int, _Instance] = {}  # those that can be asked something
        self._reasons: dict[int, str] = {}  # why one is lost that was asked nothing at the time
        self._pids = set(_children())  # what the user's file has started, and every instance
        self._timers = Timers(max_late_s=math.inf)
        self._inbox: deque[Callable[[], None]] = deque()
        self._since: float | None = None
        self._is_sweep_due = False
        self._selector = selectors.DefaultSelector()
        self._wakeup_out, self._wakeup_in = socket.socketpair()
        self._wakeup_out.setblocking(False)
        self._wakeup_in.setblocking(False)
        self._selector.register(self._wakeup_in, selectors.EVENT_READ, self._wake)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called on the thread of :meth:`run`."""
        self._inbox.append(partial(function, *args))
        with suppress(BlockingIOError):  # it has been rung for already
            self._wakeup_out.send(b"!")

    def add(self, instance: _Instance) -> None:
        """Make a process known; called by the thread that has forked it, which holds ``forking``."""
        self._pids.add(instance.pid)
        self.post(self._register, instance)

    def silent_s(self) -> float:
        """Seconds for which the thread has been at what woke it."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def run(self) -> NoReturn:
        """Serve as long as the process lives, which ends when this cannot go on: its owner starts another."""
        try:
            while True:
                events = self._selector.select(self._timers.wait_s())
                self._since = time.monotonic()
                for key, mask in events:
                    key.data(mask)
                while (due := self._timers.take_due()) is not None:
                    function, args = due
                    function(*args)
                if self._is_sweep_due:
                    self._sweep()
                self._since = None
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def ask(self, key: int, request: _Request) -> None:
        """Queue a request at an instance, behind those that it has."""
        instance = self._instances.get(key)
        if instance is None:
            unknown = "it was finished or dropped, or is lost with its host"
            request.future.set_exception(InstanceLost(self._reasons.pop(key, unknown)))
            return
        instance.requests.append(request)
        if len(instance.requests) == 1:
            self._begin(instance)

    def drop(self, key: int) -> None:
        """Kill an instance, if there is one."""
        if key in self._instances:
            self._lose(self._instances[key], "it was dropped")
        self._reasons.pop(key, None)

    def _wake(self, _: int) -> None:
        self._wakeup_in.recv(_READ_BYTES)
        while self._inbox:
            self._inbox.popleft()()

    def _register(self, instance: _Instance) -> None:
        self._instances[instance.key] = instance
        self._selector.register(instance.connection, selectors.EVENT_READ, partial(self._serve, instance))
        if instance.death is not None:
            self._selector.register(instance.death, selectors.EVENT_READ, partial(self._reap, instance))

    def _limit(self, instance: _Instance, wait_s: float, reason: str) -> None:
        """The instance is lost where nothing has come of it in so many seconds."""
        instance.num_events += 1
        self._timers.at(self._timers.now_s() + wait_s, self._expire, instance, instance.num_events, reason)

    def _expire(self, instance: _Instance, num_events: int, reason: str) -> None:
        if instance.num_events == num_events:
            self._lose(instance, reason)

    # What goes to an instance, and what comes

    def _begin(self, instance: _Instance) -> None:
        request = instance.requests[0]
        self._limit(instance, request.timeout_s, f"TimeoutError: no answer within {request.timeout_s:g} s")
        instance.to_send = memoryview(request.message)
        self._send(instance)

    def _serve(self, instance: _Instance, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._receive(instance)
        if mask & selectors.EVENT_WRITE and instance.to_send:
            self._send(instance)

    def _send(self, instance: _Instance) -> None:
        try:
            while instance.to_send:
                instance.to_send = instance.to_send[instance.connection.send(instance.to_send) :]
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone: what is read, or its death, says why
            instance.to_send = memoryview(b"")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if instance.to_send else 0)
        with suppress(KeyError, ValueError):  # the other end is gone, and that has been read already
            self._selector.modify(instance.connection, events, partial(self._serve, instance))

    def _receive(self, instance: _Instance) -> bool:
        """Read once from an instance; False when there is nothing."""
        try:
            received = instance.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if received:
            instance.received += received
            self._read(instance)
        elif instance.death is None:
            self._reap(instance)
        else:  # it has ended, which is told in a moment; else something else holds its process
            self._hang_up(instance)
            self._limit(instance, _END_S, "it closed its connection")
        return bool(received) and not instance.is_gone

    def _read(self, instance: _Instance) -> None:
        """Judge what an instance has sent: it says nothing that nobody has asked for, and no more than it may."""
        received = instance.received
        while len(received) >= LENGTH.size and not instance.is_gone:
            (size,) = LENGTH.unpack_from(received)
            if not instance.requests or instance.to_send:
                self._lose(instance, "it sent what nobody had asked for")
            elif size > instance.requests[0].most_bytes:
                self._lose(instance, f"its answer has {size} bytes, more than it may")
            elif len(received) >= LENGTH.size + size:
                reply = bytes(received[LENGTH.size : LENGTH.size + size])
                del received[: LENGTH.size + size]
                self._answer(instance, reply)
            else:
                return

    def _answer(self, instance: _Instance, reply: bytes) -> None:
        request = instance.requests[0]
        try:
            outcome, value = json.loads(reply)
            if outcome not in ("ok", "error"):
                raise ValueError
            value = request.read(value) if outcome == "ok" else one_line(_text(value))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._lose(instance, "it answered what no instance answers")
            return
        if outcome == "error":
            self._retire(instance, value)
            return
        instance.requests.popleft()
        instance.num_events += 1
        if request.is_last:
            self._retire(instance, "it was finished")
        elif instance.requests:
            self._begin(instance)
        request.future.set_result(value)

    # The end of an instance

    def _retire(self, instance: _Instance, reason: str) -> None:
        """It can be asked nothing any more, and ends by itself in the time of one request."""
        self._forget(instance, reason)
        self._limit(instance, _END_S, reason)

    def _lose(self, instance: _Instance, reason: str) -> None:
        """Kill it; the kernel tells when it has ended."""
        self._hang_up(instance)
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(ProcessLookupError):
                kill(instance.pid, signal.SIGKILL)
        self._tell(instance, reason)
        if instance.death is None:
            self._reap(instance)

    def _tell(self, instance: _Instance, reason: str) -> None:
        """Why it is lost, to those who wait for it, else to whoever asks it next."""
        if instance.key in self._instances and not instance.requests:
            self._reasons[instance.key] = reason
        self._forget(instance, reason)

    def _forget(self, instance: _Instance, reason: str) -> None:
        instance.num_events += 1
        self._instances.pop(instance.key, None)
        requests, instance.requests = instance.requests, deque()
        for request in requests:
            request.future.set_exception(InstanceLost(reason))

    def _hang_up(self, instance: _Instance) -> None:
        instance.is_gone = True
        with suppress(KeyError, ValueError):  # that has been done
            self._selector.unregister(instance.connection)
        instance.connection.close()

    def _reap(self, instance: _Instance, _: int = 0) -> None:
        """Its process has ended, or its connection where nothing else is told: reap it, and end what it leaves."""
        while not instance.is_gone and instance.death is not None and self._receive(instance):
            pass  # what it said last
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
            os.killpg(instance.pid, signal.SIGKILL)
        _, status = os.waitpid(instance.pid, 0)
        self._pids.discard(instance.pid)
        if instance.death is not None:
            self._selector.unregister(instance.death)
            os.close(instance.death)
        self._is_sweep_due = True
        self._hang_up(instance)
        self._tell(instance, f"WorkerDied: its process {ending(os.waitstatus_to_exitcode(status))}")

    def _sweep(self) -> None:
        """Kill what instances that have ended left behind: it is this process's own now (:func:`adopt_orphans`)."""
        self._is_sweep_due = False
        with self.forking:
            left = [pid for pid in _children() if pid not in self._pids]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        if left:  # they may leave others
            self._timers.at(self._timers.now_s() + _SWEEP_AGAIN_S, self._sweep)


def _children() -> list[int]:
    try:
        return children()
    except OSError:  # not Linux
        return []


def _open_files() -> set[int]:
    files = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # of the listing itself
            os.fstat(int(name))
            files.add(int(name))
    return files


def _close_files_but(kept: set[int]) -> None:
    low = 0
    for file in sorted(kept):
        if low < file:  # an empty range is every file to some versions of Python
            os.closerange(low, file)
        low = file + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


# What instances answer, judged: it is made of model text, too. Each takes the length that a text may have.


def _text(value: Any, max_chars: float = math.inf) -> str:
    if not isinstance(value, str) or len(value) > max_chars:
        raise ValueError
    return value


def _description(_: int, value: Any) -> dict[str, Any]:
    if not all(isinstance(schema, dict) for schema in value["schemas"]):
        raise ValueError
    return {"schemas": list(value["schemas"]), "has_reward": bool(value["has_reward"])}


def _observation(max_chars: int, value: Any) -> str | None:
    return None if value is None else _text(value, max_chars)


def _answer(max_chars: int, value: Any) -> tuple[str, bool]:
    content, is_error = value
    return _text(content, max_chars), bool(is_error)


def _state(_: int, value: Any) -> dict[str, Any] | None:
    return None if value is None else {_text(name): item for name, item in value.items()}


def _reward(_: int, value: Any) -> float | None:
    if value is not None and not abs(value) <= LARGEST:
        raise ValueError
    return None if value is None else float(value)


_READERS: Mapping[str, Callable[[int, Any], Any]] = {
    "describe": _description,
    "open": _observation,
    "call": _answer,
    "state": _state,
    "finish": _reward,
}
