"""The worker process that runs one environment object per sample (:mod:`.instances`), and its results as text."""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.orphans import adopt_orphans, children
from sota_grpo.rl.records import LARGEST, sample_seed
from sota_grpo.text import sentence
from sota_grpo.workers.base import WorkerThread
from sota_grpo.workers.instances import InstanceLost, InstanceSpec

_TOOLBOX = "sota_grpo.tasks.toolbox"  # imported when needed: tasks may import workers, not vice versa
_LOCK = threading.Lock()


class EnvironmentWorker:
    """Worker that creates, calls and deletes environment objects, by integer key.

    The main thread runs the user's file in the constructor, and calls the environments one after the other. Processes
    that an environment's calls started are killed when the environment ends. An adapter's environments have a thread
    each, no seeded random numbers, and end their own processes. Given seeds, an environment's attribute ``seed`` is
    set, if it has one. The arguments are those of :class:`~.instances.Instances`.
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
    import asyncio  # only here: most tools are plain functions

    with _LOCK:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(_result_of(value), loop).result()


@functools.cache
def _event_loop() -> Any:
    import asyncio

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
