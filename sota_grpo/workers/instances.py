"""Stateful environments, one object per sample, in worker processes that may hang or crash; without torch.

:class:`Instances` is used in the driver; it calls an :class:`EnvironmentWorker` in each process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.orphans import adopt_orphans, children
from sota_grpo.rl.records import LARGEST, sample_seed
from sota_grpo.text import one_line, sentence
from sota_grpo.workers.base import ProcessLauncher, WorkerDied, WorkerSpec, WorkerThread, pending_future, starter
from sota_grpo.workers.fleet import Fleet, TaskLost, TaskOverdue

_DESCRIBE_S = 120.0  # longest time to construct an object and its tools' schemas (imports transformers)
_SILENCE_S = 60.0  # longest time without an answer to a ping, in addition to the deadline of a call
_TOOLBOX = "sota_grpo.tasks.toolbox"  # imported when needed: tasks may import workers, not vice versa
_LOCK = threading.Lock()


class InstanceLost(RuntimeError):
    """An environment failed or has ended; the message is the reason. Adapters may raise it too."""


@dataclass(frozen=True)
class InstanceSpec:
    """How environment objects are created.

    Args:
        kind: ``functions`` (plain tools), ``factory`` (TRL's protocol), or ``package.module:function`` of an adapter,
            which is called with ``**options``. The object that it returns has ``schemas``, ``reset(**row)``,
            ``call(name, arguments)``, and optionally ``get_reward()``, ``attributes()``, ``seed``, ``close()`` and
            ``kill()``, which ends a running call; results may be awaitable.
        path: path of the user's file, or of a pickle of functions and factories that were passed in Python; for an
            adapter, the value that the user gave.
        names: names of the functions in the file, or of its factory; empty for a pickle: all.
        options: keyword arguments of an adapter.
    """

    kind: str
    path: str = ""
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path}:{','.join(self.names)}" if self.names else self.path or self.kind

    @property
    def is_adapter(self) -> bool:
        """Whether ``kind`` names an adapter, whose calls mostly wait, so that a worker runs several concurrently."""
        return ":" in self.kind


@dataclass(frozen=True)
class Answer:
    """The result of one tool call as text; if the tool raised or does not exist, ``error:`` and the reason."""

    content: str
    is_error: bool


@dataclass(frozen=True)
class Opened:
    """A new environment: its key for later calls, and the observation that ``reset`` returned."""

    key: int
    observation: str | None


class Instances:
    """The live environments of one spec; an environment lives from :meth:`open` to :meth:`finish` or :meth:`drop`.

    A worker process runs the user's file once. It then calls its environments one after the other on its main thread,
    or, if they are an adapter's, all concurrently. A worker is added when all have ``per_worker`` environments. A
    worker that dies, or exceeds ``timeout_s`` for a request, is replaced, and the futures of its environments fail with
    :class:`InstanceLost`. Futures fail with :class:`~.base.WorkerDied` if workers cannot be started, or after
    :meth:`close`. Thread-safe; callbacks of the futures must not block.

    Args:
        timeout_s: longest time for one request: construction with reset, a tool call, the state or the reward.
        max_chars: most characters of an observation or tool result, which is truncated with a note, and of a state.
        per_worker: most environments per worker; all are lost if the worker hangs.

    Attributes:
        schemas: JSON schemas of the tools, as chat templates need them; set by :meth:`wait_ready`.
        has_reward: whether environments have ``get_reward``; set by :meth:`wait_ready`.
        workers: fleets of one worker each, because an environment cannot move to another process.

    Example::

        instances = Instances(InstanceSpec("factory", "guess.py", ("Guess",)), timeout_s=5.0)
        instances.wait_ready()
        opened = instances.open({"word": "river"}).result()
        instances.call(opened.key, [("guess", {"word": "lakes"})]).result()
        reward = instances.finish(opened.key).result()
        instances.close()
    """

    def __init__(self, spec: InstanceSpec, *, timeout_s: float, max_chars: int = 65536, per_worker: int = 8) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.has_reward = False
        self._spec, self._timeout_s, self._per_worker = spec, timeout_s, per_worker
        options = {"spec": spec, "max_chars": max_chars}
        self._worker = WorkerSpec("sota_grpo.workers.instances:EnvironmentWorker", options)
        self._launcher = ProcessLauncher()
        self._keys = itertools.count()
        self._lock, self._is_closed = threading.Lock(), False
        self.workers: list[Fleet] = []
        self._worker_of: dict[int, Fleet] = {}

    def wait_ready(self) -> None:
        """Read the tools' schemas from a temporary environment (UserError if that fails); begin to start a worker."""
        deadline_s = max(_DESCRIBE_S, self._timeout_s)
        describing = self._started("environment", deadline_s)
        try:
            described = describing.submit("describe", 0).result()
        except (TaskLost, TaskOverdue, InstanceLost) as error:
            raise UserError(
                f"{self._spec} cannot be used: {_loss(error, deadline_s).rstrip('.')}; correct this."
            ) from None
        except UserError as error:
            raise type(error)(str(error)) from None  # without the worker's traceback
        finally:
            describing.close()
        self.schemas, self.has_reward = described["schemas"], described["has_reward"]
        with self._lock:
            self._add_worker()

    def open(self, row: Mapping[str, Any], seeds: tuple[int, int] | None = None) -> Future[Opened]:
        """Create an environment and call ``reset(**row)``; return a future of its key and observation.

        ``seeds`` are (seed of construction and reset, seed of later calls), for Python's random numbers, and NumPy's
        and torch's if they are imported (of an adapter only the attribute ``seed``); None: not seeded.
        """
        key = next(self._keys)
        with self._lock:
            if self._is_closed:
                return _failed(WorkerDied("the environments were closed"))
            loads = Counter([*self._worker_of.values()])
            if all(loads[worker] >= self._per_worker for worker in self.workers):
                self._add_worker()
            worker = self._worker_of[key] = min(self.workers, key=loads.__getitem__)

        async def opened() -> Opened:
            return Opened(key, await self._request(worker, "open", key, dict(row), seeds))

        return worker.start(opened())

    def call(self, key: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[list[Answer]]:
        """Make tool calls, each (name, keyword arguments), in order; return a future of the answers."""

        async def answers(worker: Fleet) -> list[Answer]:
            return [Answer(*await self._request(worker, "call", key, name, dict(values))) for name, values in calls]

        return self._start(key, answers)

    def state(self, key: int) -> Future[dict[str, Any] | None]:
        """Return a future of {name: value} of the environment's public attributes that are JSON, up to ``max_chars``.

        The future's result is None for functions and for adapters without ``attributes``.
        """
        return self._start(key, lambda worker: self._request(worker, "state", key))

    def finish(self, key: int) -> Future[float | None]:
        """Get the environment's reward, and end it; return a future of the reward (None if it gives none)."""

        async def reward(worker: Fleet) -> float | None:
            value = await self._request(worker, "finish", key)
            self._worker_of.pop(key, None)
            return value

        return self._start(key, reward)

    def drop(self, key: int) -> None:
        """End an environment without its reward; do not wait until it has ended; no-op if it had ended before."""
        worker = self._worker_of.pop(key, None)
        if worker is not None:
            worker.submit("drop", key)

    def close(self) -> None:
        """Kill all workers and fail pending futures with WorkerDied; idempotent."""
        with self._lock:
            self._is_closed = True
        for worker in self.workers:
            worker.close()
        self._launcher.close()

    def _add_worker(self) -> None:
        self.workers.append(self._started(f"environments-{len(self.workers)}", self._timeout_s))

    def _started(self, role: str, deadline_s: float) -> Fleet:
        return Fleet(
            role,
            starter(self._launcher, role, self._worker, [{"threads": 1}]),
            1,
            capacity=self._per_worker if self._spec.is_adapter else 1,
            task_deadline_s=deadline_s,
            silence_s=_SILENCE_S + deadline_s,  # a call may hold the GIL
            max_attempts=1,
        )

    def _start(self, key: int, request: Callable[[Fleet], Coroutine[Any, Any, Any]]) -> Future[Any]:
        worker = self._worker_of.get(key)
        if worker is not None:
            return worker.start(request(worker))
        return _failed(InstanceLost("the environment was finished or dropped, or its worker process died"))

    async def _request(self, worker: Fleet, kind: str, key: int, *content: Any) -> Any:
        try:
            return await worker.run(kind, key, *content)
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, TaskLost):  # bad file, or no worker left
                raise
            self.drop(key)
            raise InstanceLost(_loss(error, self._timeout_s)) from None


def _failed(error: Exception) -> Future[Any]:
    future = pending_future()
    future.set_exception(error)
    return future


def _loss(error: BaseException, timeout_s: float) -> str:
    """Return why an environment was lost, without the worker's traceback."""
    if isinstance(error, TaskOverdue):
        return f"TimeoutError: no answer within {timeout_s:g} s"
    if isinstance(error, TaskLost):
        return f"WorkerDied: {one_line(str(error.__cause__ or error))}"
    return str(error) if isinstance(error, InstanceLost) else sentence(error)


class EnvironmentWorker:
    """Worker that creates, calls and deletes environment objects, by integer key.

    The main thread runs the user's file in the constructor, and calls the environments one after the other. Processes
    that an environment's calls started are killed when the environment ends. An adapter's environments have a thread
    each, no seeded random numbers, and end their own processes. Given seeds, an environment's attribute ``seed`` is
    set, if it has one. The arguments are those of :class:`Instances`.
    """

    def __init__(self, spec: InstanceSpec, max_chars: int) -> None:
        self._is_adapter, self._max_chars = spec.is_adapter, max_chars
        self._environments: dict[int, _Environment] = {}
        self._refusal: UserError | None = None
        try:
            self._make = import_module(_TOOLBOX).load(spec)
        except UserError as error:
            self._refusal = UserError(str(error))
        adopt_orphans()
        self._processes = {*children()}

    def ping(self) -> float:
        """Return 0: hanging calls are detected by the fleet's task deadline."""
        return 0.0

    def run(self, kind: str, key: int, *content: Any) -> Any:
        """Call method ``kind`` of environment ``key`` with ``content``; return the result (of an adapter: its future).

        ``open`` and ``describe`` create the environment; ``describe``, ``finish`` and ``drop``, which returns None, end
        it. UserError if the user's file cannot be used; InstanceLost if the environment does not exist (but not for
        ``drop``), or fails, which ends it.
        """
        if self._refusal is not None:
            raise self._refusal
        if kind in ("open", "describe"):
            self._environments[key] = _Environment(self._make, self._max_chars, self._is_adapter)
        environment = self._environments.get(key)
        if kind == "drop":
            return self._end(key)
        if environment is None:
            raise InstanceLost("the environment's worker process died or was replaced")
        if environment.thread is not None:
            return environment.thread.submit(self._answer, environment, kind, key, content)
        return self._answer(environment, kind, key, content)

    def _answer(self, environment: _Environment, kind: str, key: int, content: tuple[Any, ...]) -> Any:
        is_last = kind in ("describe", "finish")
        try:
            return getattr(environment, kind)(*content)
        except InstanceLost:
            is_last = True
            raise
        finally:
            if environment.thread is None:
                before, self._processes = self._processes, {*children()}
                environment.processes |= self._processes - before
            if is_last:
                self._end(key)

    def _end(self, key: int) -> None:
        if (environment := self._environments.pop(key, None)) is not None:
            environment.end()


class _Environment:
    """The environment of one sample; its methods raise InstanceLost if the user's code fails."""

    def __init__(self, make: Callable[[], Any], max_chars: int, is_adapter: bool) -> None:
        self._make, self._max_chars = make, max_chars
        self._object: Any = None
        self._seed: int | None = None
        self._num_calls = 0
        self.thread = WorkerThread("environment") if is_adapter else None
        self.processes: set[int] = set()  # pids of processes that its calls started

    def describe(self) -> dict[str, Any]:
        self._object = self._done("the environment's construction", self._make)
        schemas = self._done("making the schemas of the tools", lambda: list(self._object.schemas))
        try:
            json.dumps(schemas)
        except (TypeError, ValueError, RecursionError) as error:
            raise InstanceLost(f"the schemas of the environment's tools are not JSON ({sentence(error)})") from error
        return {"schemas": schemas, "has_reward": hasattr(self._object, "get_reward")}

    def open(self, row: Mapping[str, Any], seeds: tuple[int, int] | None) -> str | None:
        first, self._seed = seeds or (None, None)
        if first is not None and self.thread is None:
            _seed(first)
        self._object = self._done("the environment's construction", self._make)
        if first is not None and hasattr(self._object, "seed"):
            self._object.seed = random.Random(first).getrandbits(31)
        observation = self._done("reset", lambda: self._object.reset(**row))
        if observation is not None and not isinstance(observation, str):
            raise InstanceLost(f"reset returned a value of type {type(observation).__name__}, not a str or None")
        return None if observation is None else cut(observation, self._max_chars)

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        self._draw_on()
        try:
            return shown(_settled(self._object.call(name, arguments)), self._max_chars), False
        except InstanceLost:
            raise
        except BaseException as error:  # including the tool's SystemExit: the policy may call it again
            return cut(f"error: {_said(error)}", self._max_chars), True

    def state(self) -> dict[str, Any] | None:
        """Return public attributes that are JSON, until ``max_chars`` are full; None for tools and adapters."""
        read = getattr(self._object, "attributes", None)
        if read is None:
            return None
        left, state = self._max_chars, {}
        for name, value in self._done("reading the environment's attributes", read).items():
            with suppress(TypeError, ValueError, RecursionError):  # no JSON
                left -= len(text := json.dumps([name, value], allow_nan=False))
                if left < 0:
                    break
                state[name] = json.loads(text)[1]
        return state

    def finish(self) -> float | None:
        if not hasattr(self._object, "get_reward"):
            return None
        self._draw_on()
        reward = self._done("get_reward", lambda: self._object.get_reward())
        if reward is None:
            return None
        try:
            number = float("nan") if isinstance(reward, (str, bytes)) else float(reward)
        except Exception:  # not a number
            number = float("nan")
        if not abs(number) <= LARGEST:
            shown = number if isinstance(reward, float) else f"a value of type {type(reward).__name__}"
            raise InstanceLost(f"get_reward returned {shown}, not None or a number that is finite in float32")
        return number

    def end(self) -> None:
        """Close the object after its pending calls, and kill processes that its calls started."""
        if self.thread is not None:
            if callable(kill := getattr(self._object, "kill", None)):
                kill()  # a call that runs ends now
            self.thread.submit(self._close)
            self.thread.close()
        for pid in self.processes.intersection(children()):
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            _settled(close())

    def _draw_on(self) -> None:
        """Seed each call separately, so that random numbers of other environments have no effect."""
        if self._seed is not None and self.thread is None:
            _seed(sample_seed(self._seed, self._num_calls))
        self._num_calls += 1

    def _done(self, what: str, compute: Callable[[], Any]) -> Any:
        try:
            return _settled(compute())
        except InstanceLost:
            raise
        except UserError as error:
            raise InstanceLost(str(error)) from error
        except BaseException as error:
            raise InstanceLost(f"{what} raised {_said(error)}") from error


def _seed(seed: int) -> None:
    """Seed Python's random numbers, and those of NumPy and torch if they are imported."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _settled(value: Any) -> Any:
    """Return ``value``, or if it is awaitable its result, awaited in the process's event loop."""
    if not inspect.isawaitable(value):
        return value
    with _LOCK:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(_result_of(value), loop).result()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


async def _result_of(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise RuntimeError(_said(error)) from error


def _said(error: BaseException) -> str:
    try:
        return sentence(error)
    except Exception:  # the user's exception class may raise in its own methods
        return type(error).__name__


def shown(value: Any, max_chars: int) -> str:
    """Return a tool's result as text, truncated by :func:`cut`: a str itself, else JSON, else ``str(value)``.

    >>> shown("é", 9), shown({"a": [1, None]}, 99), shown({1, 1}, 99), shown(float("nan"), 99)
    ('é', '{"a": [1, null]}', '{1}', 'nan')
    """
    if isinstance(value, str):
        return cut(value, max_chars)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = str(value)
    return cut(text, max_chars)


def cut(text: str, max_chars: int) -> str:
    """Return ``text`` truncated to ``max_chars`` characters, including a note on the truncation if there is room.

    Unpaired surrogates, which no tokenizer accepts, become question marks.

    >>> cut("x" * 50, 40), cut("x\\ud800", 40)
    ('xxxxxxx\\n[only 7 of 50 characters shown]', 'x?')
    """
    text = str.__str__(text)  # plain str of a subclass
    if len(text) > max_chars:
        shown = max_chars
        while shown and len(note := f"\n[only {shown} of {len(text)} characters shown]") + shown > max_chars:
            shown -= max(1, len(note) + shown - max_chars)
            shown = max(shown, 0)
        text = (text[:shown] + note if shown else text)[:max_chars]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
