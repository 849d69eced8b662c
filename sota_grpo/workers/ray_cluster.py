"""Workers that are Ray actors, in a local Ray that this process starts, or in a running cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from sota_grpo.errors import UserError, collect_garbage_rarely
from sota_grpo.files import folder_for_sockets
from sota_grpo.orphans import die_with_parent, guard
from sota_grpo.workers.base import (
    Host,
    Launcher,
    OpenCalls,
    WorkerDied,
    WorkerSpec,
    child_environment,
    descendants,
)

logger = logging.getLogger(__name__)
Location = tuple[int, str]  # (pid, machine_id())
_SHARED_MEMORY = Path("/dev/shm")
_LISTENER_S = 10.0  # longest wait for a cluster's address to accept a connection
_OBEY_S = 1.0  # longest wait of kill() for Ray to end the process
_GONE_S = 10.0  # longest wait of kill() after SIGKILL
# A local Ray's services listen on 127.0.0.1 only and require a token, so other users of this machine cannot run code in
# it.
_LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}
_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_SOCKET_BYTES = len("/ray/session_2026-11-26_14-32-10_123456_4194304/sockets/plasma_store")
_NO_IDLE_WORKERS = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}


@dataclass(frozen=True)
class Shared:
    """An argument that is a Ray object reference; the worker receives the referenced value."""

    reference: Any


def pack(args: Sequence[Any]) -> tuple[bytes, list[np.ndarray], dict[int, Any]]:
    """Return (pickled arguments, their out-of-band buffers, object references of shared arguments by position)."""
    shared = {position: arg.reference for position, arg in enumerate(args) if isinstance(arg, Shared)}
    buffers: list[pickle.PickleBuffer] = []
    values = [None if position in shared else arg for position, arg in enumerate(args)]
    body = pickle.dumps(values, protocol=5, buffer_callback=buffers.append)
    return body, [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers], shared


def _unpack(body: bytes, buffers: list[np.ndarray], shared: dict[int, Any]) -> tuple[Any, ...]:
    import ray

    args = pickle.loads(body, buffers=buffers)
    return tuple(ray.get(shared[position]) if position in shared else arg for position, arg in enumerate(args))


class HostActor:
    """The actor class: a :class:`~.base.Host`, whose calls are put in order by number on the actor's event loop."""

    def __init__(self, name: str, spec: bytes, path: list[str]) -> None:
        die_with_parent()  # a stopped actor does not notice that Ray's node manager has ended
        sys.path += [entry for entry in path if entry not in sys.path]
        collect_garbage_rarely()
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore in /dev/shm, which stays if this process is killed
        self._host = Host(name, lambda: pickle.loads(spec))
        self._host.serve_on_thread()
        self._next_call = 0
        self._arrived: dict[int, Callable[[], None]] = {}

    async def locate(self) -> tuple[Location, bool, None]:
        return (os.getpid(), machine_id()), True, None

    async def call(self, number: int, method: str, *packed: Any) -> tuple[Location, bool, Any]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[bool, Any]] = loop.create_future()
        answer = lambda *outcome: loop.call_soon_threadsafe(answered.set_result, outcome)  # noqa: E731
        self._arrived[number] = partial(self._host.post, method, partial(_unpack, *packed), answer)
        while (post := self._arrived.pop(self._next_call, None)) is not None:
            self._next_call += 1
            post()
        return (os.getpid(), machine_id()), *await answered


@cache
def machine_id() -> str:
    """Return an identifier of this boot and pid namespace, in which pids are unique; empty if this is not Linux."""
    if sys.platform != "linux":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


class RayWorker:
    """A worker in a Ray actor (:class:`~.base.Worker`).

    Ray starts the calls of an async actor in any order, so they are numbered, and the actor puts them in order.
    :meth:`call` pickles the arguments; a handle of :meth:`RayLauncher.share` must not be nested in another argument.
    The worker receives arrays read-only. Ray never restarts the actor.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.pid: int | None = None  # known after the first answer
        self._actor = actor
        self._calls = OpenCalls()
        self._lock = threading.Lock()
        self._sent = 0
        self._process: int | None = None  # pidfd of the actor's process, if it runs on this machine
        self._await(actor.locate.remote(), number=-1)  # answered during the construction too

    def call(self, method: str, *args: Any) -> Future[Any]:
        def send(number: int) -> None:
            packed = pack(args)
            try:
                with self._lock:
                    answer = self._actor.call.remote(self._sent, method, *packed)
                    self._sent += 1
            except Exception as error:  # Ray has ended, or raises
                self._calls.fail(WorkerDied(f"{self.name} cannot be reached: {_one_line(error)}"))
            else:
                self._await(answer, number)

        return self._calls.open(send)

    def kill(self) -> None:
        """Fail pending and later calls, and kill the actor's process, which frees its bundle.

        ``ray.kill`` is tried first, because Ray prints a message when a process ends otherwise. SIGKILL follows, also
        for stopped processes, if the process has answered a call, is on this machine and runs a second later.
        """
        import ray

        self._calls.fail(WorkerDied(f"{self.name} (pid {self.pid}) was killed"))
        with self._lock:
            process, self._process = self._process, None
        with suppress(Exception):  # the actor, or Ray, may have ended
            ray.kill(self._actor)
        if process is not None:
            if not wait([process], _OBEY_S):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                wait([process], _GONE_S)
            os.close(process)

    def _await(self, answer: Any, number: int) -> None:
        answer.future().add_done_callback(partial(self._answered, number))

    def _answered(self, number: int, answer: Future[tuple[Location, bool, Any]]) -> None:
        from ray.exceptions import RayTaskError

        error = answer.exception()
        if error is None:
            (pid, machine), succeeded, value = answer.result()
            with self._lock:
                if self.pid is None and self._calls.dead is None:
                    self.pid = pid
                    if machine == machine_id() and hasattr(os, "pidfd_open"):
                        with suppress(ProcessLookupError):
                            self._process = os.pidfd_open(pid)
            self._calls.resolve(number, succeeded, value)
        elif isinstance(error, RayTaskError):  # the result cannot be pickled
            self._calls.resolve(number, False, error.cause or error)
        else:
            self._calls.fail(WorkerDied(f"{self.name} (pid {self.pid}) is gone: {_one_line(error)}"))


def cluster_gpus(address: str) -> int:
    """Return the number of GPUs of the cluster at ``address``, or to which this process is connected; stay connected.

    ImportError if Ray is not installed, ConnectionError if there is no cluster, UserError if it requires another token.
    """
    ray = _imported_ray(local=False)
    if not ray.is_initialized():
        _connect(ray, address, 0, None)
    return int(ray.cluster_resources().get("GPU", 0))


def cores_per_gpu() -> int:
    """Return the fewest CPU cores per GPU, rounded down, of a node with GPUs in the connected cluster; at least 1."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [node.get("CPU", 0) // node["GPU"] for node in nodes if node.get("GPU", 0)]
    return max(1, int(min(shares, default=1)))


def each_node(address: str, task: Callable[..., Any], *args: Any, deadline_s: float) -> list[tuple[str, Any]]:
    """Call ``task(*args)``, a function of this package, once on every live node of a running cluster, concurrently.

    The cluster and the exceptions are those of :func:`cluster_gpus`. Return a tuple for each node, sorted by address:
    the address; the function's result, or the exception raised (TimeoutError: no answer within ``deadline_s``).
    """
    ray = _imported_ray(local=False)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    owned = not ray.is_initialized()
    if owned:
        _connect(ray, address, 0, None)
    try:
        calls = {}
        remote = ray.remote(num_cpus=0, max_retries=0)(task)
        for node in (node for node in ray.nodes() if node["Alive"]):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            calls[remote.options(scheduling_strategy=there).remote(*args)] = node["NodeManagerAddress"]
        ended, late = ray.wait(list(calls), num_returns=len(calls), timeout=deadline_s)
        silence = TimeoutError(f"no answer within {deadline_s:g} s")
        answers: list[tuple[str, Any]] = [(calls[call], silence) for call in late]
        for call in ended:
            try:
                answer = ray.get(call)
            except Exception as error:  # raised by the task or by Ray
                answer = error
            answers.append((calls[call], answer))
        return sorted(answers, key=lambda answer: answer[0])
    finally:
        if owned:
            ray.shutdown()


class RayLauncher(Launcher):
    """Starts workers as Ray actors (:class:`RayWorker`) in the bundles of one placement group.

    If this process is connected to Ray already, that connection is used. Else, without an address, the launcher starts
    a local Ray, whose services listen on loopback only and end with this process, even if that is killed. Then create
    the launcher on the main thread: Linux kills Ray's processes when the thread that started them ends. All nodes of a
    running cluster must be able to import this package; :meth:`close` leaves the cluster running.

    Args:
        bundles: resources of each worker, such as ``{"CPU": 1, "GPU": 1}``. A local Ray is started with as many logical
            CPUs as the bundles need, even if the machine has fewer cores.
        address: address of a running cluster (``"auto"``, ``"host:6379"``); None starts a local Ray.
        deadline_s: longest wait for all bundles together.
        object_store_bytes: object store size of a local Ray; None: Ray's default (30 % of the memory).

    TimeoutError if Ray does not allocate the bundles in time; RuntimeError if a local Ray would be started on another
    thread than the main thread; else the exceptions of :func:`cluster_gpus`.
    """

    def __init__(
        self,
        bundles: Sequence[Mapping[str, float]],
        *,
        address: str | None = None,
        deadline_s: float = 120.0,
        object_store_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self._closed = False
        ray = _imported_ray(local=address is None)
        self._owns_ray = not ray.is_initialized()
        self._guardian = None
        if self._owns_ray:
            before = set(descendants())
            _connect(ray, address, math.ceil(sum(bundle.get("CPU", 0) for bundle in bundles)), object_store_bytes)
            if address is None:
                # Else the agents of Ray's node manager run for a minute after the driver is killed.
                self._guardian = guard(new.pid for new in set(descendants()) - before)
        self._group = ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        if not self._group.wait(deadline_s):
            there = f"the cluster has {_counts(ray.cluster_resources())}, free {_counts(ray.available_resources())}"
            self.close()
            raise TimeoutError(
                f"Ray did not allocate {list(map(dict, bundles))} within {deadline_s:g} s; {there}. "
                "Use fewer devices, add nodes, or wait until other jobs have ended."
            )

    def start(
        self,
        name: str,
        spec: WorkerSpec,
        *,
        bundle: int,
        num_gpus: float = 0,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> RayWorker:
        """Start a worker in a bundle; its actor starts when an earlier worker has freed the bundle's GPUs.

        Args:
            bundle: index of the bundle.
            num_gpus: number of the bundle's GPUs that the actor sees.
            env: environment variables, set before its process starts.
            threads: OpenMP threads, hence torch's; None: Ray's default.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "max_concurrency": 10_000}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        if variables := child_environment(env, threads):
            options["runtime_env"] = {"env_vars": variables}
        actor = _actor_class(name.partition("-")[0]).options(**options).remote(name, pickle.dumps(spec), sys.path)
        worker = RayWorker(name, actor)
        self._workers.add(worker)
        return worker

    def share(self, value: Any) -> Any:
        """Put ``value`` into Ray's object store, which sends it to each node once; return a handle for ``call``."""
        import ray

        return Shared(ray.put(value))

    def close(self) -> None:
        """Kill the workers, free the bundles, end the connection or local Ray that this launcher began; idempotent."""
        import ray

        if self._closed:
            return
        self._closed = True
        super().close()
        with suppress(Exception):  # the cluster may have ended
            ray.util.remove_placement_group(self._group)
        if self._owns_ray:
            ray.shutdown()
        if self._guardian is not None:
            self._guardian.kill()
            self._guardian.wait()


class AddressWorker:
    """Worker with two methods: one returns a rendezvous address on its machine, one its visible GPUs."""

    def devices(self) -> str:
        """Return ``CUDA_VISIBLE_DEVICES`` of this process, which Ray sets; empty if unset."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def address(self) -> str:
        """Return ``HOST:PORT``: this machine's address and a port that is free at the moment."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"


@cache
def _actor_class(role: str) -> Any:
    """Return the actor class under a name that ``ps`` shows, such as ``ray::rollout``."""
    import ray

    return ray.remote(type(role, (HostActor,), {}))


def _imported_ray(local: bool) -> Any:
    """Set Ray's environment variables (token; ``local``: loopback only), which it reads at import; return ``ray``."""
    if local:
        os.environ.update(_LOCAL_ENVIRONMENT)
        if not os.environ.get(_TOKEN) and not os.environ.get(_TOKEN_FILE):
            os.environ[_TOKEN] = secrets.token_hex(32)  # not in a file: Ray's own token file is readable by all users
    elif _token_held() and _MODE not in os.environ:
        os.environ[_MODE] = "token"  # a cluster that requires no token accepts it too
    import ray
    from ray._private import ray_constants
    from ray._raylet import Config  # type: ignore[attr-defined]

    if not ray.is_initialized():  # Ray may have been imported before, with other variables
        ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER and not local
        Config.initialize("")
    return ray


def _connect(ray: Any, address: str | None, num_cpus: int, object_store_bytes: int | None) -> None:
    """Call ``ray.init``; keep this process's SIGTERM handler, and let Ray's processes ignore a terminal's SIGHUP."""
    options: dict[str, Any] = {"address": address or "local"}
    _require_cluster(address)
    if address is None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("A local Ray ends with the thread that started it: use RayLauncher on the main thread.")
        options |= {"num_cpus": max(num_cpus, 1), "object_store_memory": object_store_bytes}
        options |= {"include_dashboard": False, "_system_config": _NO_IDLE_WORKERS, "_node_ip_address": "127.0.0.1"}
        if "RAY_TMPDIR" not in os.environ:
            options["_temp_dir"] = f"{folder_for_sockets(room=_SOCKET_BYTES)}/ray"
    on_main = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    on_hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN) if on_main else None
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    try:
        ray.init(**options, namespace=f"sota_grpo_{uuid.uuid4().hex}", log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, on_sigterm)
            signal.signal(signal.SIGHUP, on_hangup)
    if address is None and free is not None and (store := ray.cluster_resources().get("object_store_memory", 0)) > free:
        logger.warning(  # Ray's own warning is silenced
            "%s has %.2f GiB free, but Ray's object store takes %.1f GiB: it is on disk, which slows down all data "
            "that workers exchange. Enlarge shared memory (of a container by --shm-size=%dg or --ipc=host).",
            _SHARED_MEMORY,
            free / 2**30,
            store / 2**30,
            math.ceil(1.1 * store / 2**30),
        )


def _require_cluster(address: str | None) -> None:
    """Check the cluster's address (ConnectionError) and token (UserError) at once; Ray would retry for minutes."""
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    address = canonicalize_bootstrap_address(address) if address == "auto" else address
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdigit():  # ray://..., local
        return
    try:
        socket.create_connection((host, int(port)), timeout=_LISTENER_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
    try:
        GcsClient(address=address)
    except AuthenticationError as error:
        held = _token_held()
        has = f"the token of this machine ({held}) differs" if held else "this machine has none"
        raise UserError(
            f"The Ray cluster at {address} requires its token, but {has}: export {_TOKEN} with the token in "
            f"~/.ray/auth_token of the head node, and {_MODE}=token."
        ) from error
    except Exception as error:  # ray.init retries, and raises it
        logger.debug("The first connection to %s failed.", address, exc_info=error)


def _token_held() -> str:
    """Return the variable or file with this machine's Ray token; empty if there is none."""
    if os.environ.get(_TOKEN):
        return _TOKEN
    file = Path(os.environ.get(_TOKEN_FILE) or "~/.ray/auth_token").expanduser()
    return str(file) if file.is_file() else ""


def _counts(resources: Mapping[str, float]) -> str:
    counts = {key: resources.get(key, 0) for key in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {key}" for key, value in counts.items())


def _one_line(error: BaseException) -> str:
    """Return Ray's message in one line, without its list of common causes.

    >>> _one_line(RuntimeError("The actor died.\\n  pid: 1\\nThe actor is dead because it left. Some common causes: a"))
    'The actor is dead because it left.'
    """
    text = " ".join(str(error).split())
    text = text[max(text.find("The actor is dead because"), 0) :]
    return text.partition(" Some common causes")[0][:500]
