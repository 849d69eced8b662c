"""The life of one instance: a process that answers requests about one object, one after the other.

Requests and replies are JSON behind their length. What a reply may hold is bounded here, and judged again by whoever
reads it (:mod:`.instance_host`): this process may have been talked into anything by the model's calls.
"""

from __future__ import annotations

import inspect
import json
import random
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from sota_grpo.errors import UserError
from sota_grpo.rl.records import LARGEST
from sota_grpo.text import sentence

LENGTH = struct.Struct(">I")


class Unusable(Exception):
    """A request failed in a way after which the instance is of no use; the message says how. Adapters raise it, too."""


def framed(message: Any) -> bytes:
    """A message as it travels.

    >>> framed(["open", {"word": "é"}])
    b'\\x00\\x00\\x00\\x1c["open", {"word": "\\\\u00e9"}]'
    """
    text = json.dumps(message).encode()
    return LENGTH.pack(len(text)) + text


def live(connection: socket.socket, make: Callable[[], Any], max_chars: int) -> None:
    """Answer requests until one is the last, or the other end is gone.

    Args:
        connection: to the host.
        make: gives the object: ``schemas``, ``reset(**row)``, ``call(name, arguments)``, and where it has them
            ``get_reward()`` and ``close()``; what they return may be awaitable.
        max_chars: of a text that is given back.
    """
    instance, requests = _Instance(make, max_chars), connection.makefile("rb")
    while (request := _receive(requests)) is not None:
        kind, content = request
        try:
            reply = ["ok", getattr(instance, kind)(content)]
        except Unusable as error:
            reply = ["error", str(error)]
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by what a tool likes better
                stream.flush()
        connection.sendall(framed(reply))
        if kind in ("describe", "finish") or reply[0] == "error":
            break
    instance.close()


def _receive(requests: BinaryIO) -> Any:
    """The next request; None when the other end is gone."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    message = requests.read(size)
    return json.loads(message) if len(message) == size else None


def _seed(seed: int | None) -> None:
    """Of the random numbers that a user's file draws, by whatever it has imported."""
    if seed is None:
        return
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


class _Instance:
    """The object and what is asked of it; a method for each kind of request."""

    def __init__(self, make: Callable[[], Any], max_chars: int) -> None:
        self._make, self._max_chars = make, max_chars
        self._object: Any = None
        self._loop: Any = None

    def describe(self, _: Any) -> dict[str, Any]:
        self._object = self._done("its construction", self._make)
        schemas = self._done("making the schemas of its tools", lambda: list(self._object.schemas))
        try:
            json.dumps(schemas)
        except (TypeError, ValueError, RecursionError) as error:
            raise Unusable(f"the schemas of its tools are no JSON ({sentence(error)})") from error
        return {"schemas": schemas, "has_reward": hasattr(self._object, "get_reward")}

    def open(self, content: tuple[Mapping[str, Any], int | None, int | None]) -> str | None:
        row, first, later = content
        _seed(first)
        self._object = self._done("its construction", self._make)
        observation = self._done("reset", lambda: self._object.reset(**row))
        _seed(later)
        if observation is not None and not isinstance(observation, str):
            raise Unusable(f"reset returned a {type(observation).__name__}; it returns a str or None")
        return None if observation is None else cut(observation, self._max_chars)

    def call(self, request: tuple[str, Mapping[str, Any]]) -> tuple[str, bool]:
        name, arguments = request
        try:
            return shown(self._settled(self._object.call(name, arguments)), self._max_chars), False
        except Unusable:
            raise
        except BaseException as error:  # SystemExit too: it is the tool's, and the policy may do better next time
            return cut(f"error: {_said(error)}", self._max_chars), True

    def state(self, _: Any) -> dict[str, Any] | None:
        """Attributes and properties, as many as ``max_chars`` characters of JSON hold."""
        read = getattr(self._object, "attributes", None)
        if read is None:
            return None
        left, state = self._max_chars, {}
        for name, value in self._done("reading its attributes", read).items():
            with suppress(TypeError, ValueError, RecursionError):  # no JSON
                left -= len(text := json.dumps([name, value], allow_nan=False))
                if left < 0:
                    break
                state[name] = json.loads(text)[1]
        return state

    def finish(self, _: Any) -> float | None:
        if not hasattr(self._object, "get_reward"):
            return None
        reward = self._done("get_reward", lambda: self._object.get_reward())
        if reward is None:
            return None
        try:
            number = float("nan") if isinstance(reward, (str, bytes)) else float(reward)
        except Exception:  # of whatever class it is
            number = float("nan")
        if not abs(number) <= LARGEST:
            shown = number if isinstance(reward, float) else f"a {type(reward).__name__}"
            raise Unusable(f"get_reward returned {shown}, not a number that is finite in float32")
        return number

    def close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            self._settled(close())

    def _done(self, what: str, compute: Callable[[], Any]) -> Any:
        try:
            return self._settled(compute())
        except Unusable:
            raise
        except UserError as error:
            raise Unusable(str(error)) from error
        except BaseException as error:
            raise Unusable(f"{what} raised {_said(error)}") from error

    def _settled(self, value: Any) -> Any:
        """What was returned; of an awaitable its result, from one event loop that runs as long as the process."""
        if not inspect.isawaitable(value):
            return value
        import asyncio  # only here: most tools are plain functions

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="instance", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_result_of(value), self._loop).result()


async def _result_of(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise RuntimeError(_said(error)) from error


def _said(error: BaseException) -> str:
    try:
        return sentence(error)
    except Exception:  # an exception of the user's may do anything when it is asked
        return type(error).__name__


def shown(value: Any, max_chars: int) -> str:
    """What a tool returned, as the policy is told: text as it is, else JSON, else what ``str`` makes of it.

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
    """``text``, of which at most ``max_chars`` characters are left, the note about the rest included.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.

    >>> cut("x" * 50, 40), cut("x\\ud800", 40)
    ('xxxxxxx\\n[only 7 of 50 characters shown]', 'x?')
    """
    text = str.__str__(text)  # of a subclass, what it was made of
    if len(text) > max_chars:
        kept = max_chars
        while kept and len(note := f"\n[only {kept} of {len(text)} characters shown]") + kept > max_chars:
            kept -= max(1, len(note) + kept - max_chars)
            kept = max(kept, 0)
        text = (text[:kept] + note if kept else text)[:max_chars]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
