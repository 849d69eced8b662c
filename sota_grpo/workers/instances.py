"""Environments with state: one instance per sample, each a process of its own that may hang, crash and be killed.

One host process imports the user's file once and forks a process for every instance, so nothing that an instance
changes, module globals included, is there for another. Imports no torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.text import one_line
from sota_grpo.workers.base import WorkerSpec, gathered, promised, resolve, starter
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.instance_process import framed
from sota_grpo.workers.processes import ProcessLauncher
from sota_grpo.workers.slots import TaskLost


class InstanceLost(RuntimeError):
    """An instance is of no use any more, and its process is ended; the message is the reason."""


@dataclass(frozen=True)
class InstanceSpec:
    """What every instance is made of.

    Args:
        kind: ``functions`` (plain tools), ``factory`` (TRL's protocol), or ``package.module:function`` of an adapter:
            called with ``options`` in the instance's process, it returns what :func:`~.instance_process.live` takes.
        path: of the user's file, or of a pickle of functions and factories that were passed in Python; of an adapter
            what the user wrote.
        names: of the functions in it, or of the one factory; of a pickle none are all.
        options: of an adapter.
    """

    kind: str
    path: str = ""
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path}:{','.join(self.names)}" if self.names else self.path or self.kind


@dataclass(frozen=True)
class Answer:
    """Of one tool call.

    Args:
        content: what the policy is told.
        is_error: the tool raised, or there is no such tool; the content then begins with ``error:``.
    """

    content: str
    is_error: bool


@dataclass(frozen=True)
class Opened:
    """An instance that has been reset; ``observation`` is what its ``reset`` returned."""

    key: int
    observation: str | None


class Instances:
    """Instances of one environment, each alive from :meth:`open` to :meth:`finish` or :meth:`drop`.

    Contract. Consumes: rows and tool calls, from any thread. Produces: one future per request, answered exactly once.
    Waits for: an instance, at one request no longer than ``timeout_s``. One that is late, ends, or answers what no
    instance answers is killed with all that it has started, and its futures fail with :class:`InstanceLost`; the others
    do not notice. When the host dies, all instances are lost and another host is started; a future that fails with
    anything else (:class:`~.base.WorkerDied`) says that no host starts any more, or that this was closed. The futures'
    callbacks must be quick.

    The user's file is run once, in the host. It should start no threads: they are not there in the instances. What it
    opens (files, connections) the instances share.

    Args:
        spec: what an instance is.
        timeout_s: longest for a reset, a tool call or a reward.
        max_chars: of an observation, or of the answer to one call; the rest is cut with a note.

    Attributes:
        fleet: of the one host; it counts its restarts.
        schemas: of the tools, as chat templates take them, after :meth:`wait_ready`.
        has_reward: whether there is a ``get_reward``, after :meth:`wait_ready`.

    Example::

        instances = Instances(InstanceSpec("factory", "guess.py", ("Guess",)), timeout_s=5.0)
        instances.wait_ready()
        opened = instances.open({"word": "river"}).result()
        instances.call(opened.key, [("guess", {"word": "lakes"})]).result()
        reward = instances.finish(opened.key).result()
        instances.close()
    """

    def __init__(self, spec: InstanceSpec, *, timeout_s: float, max_chars: int = 65536) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.has_reward = False
        self._spec = spec
        self._keys = itertools.count()
        self._launcher = ProcessLauncher()
        options = {"spec": spec, "timeout_s": timeout_s, "max_chars": max_chars}
        host = WorkerSpec("sota_grpo.workers.instance_host:InstanceHost", options)
        self.fleet = Fleet(
            "instances",
            starter(self._launcher, "instances", host, [{"threads": 1}]),
            1,
            capacity=sys.maxsize,
            max_attempts=1,
        )

    def wait_ready(self) -> None:
        """Return when instances can be opened.

        Raises:
            UserError: the file or the object cannot be used; the message says why.
        """
        self.fleet.wait_ready()
        try:
            described = self._ask("describe", next(self._keys), None, lambda value: value).result()
        except InstanceLost as error:
            raise UserError(f"{self._spec} cannot be used: {error}; mend it there.") from None
        except UserError as error:
            raise type(error)(str(error)) from None  # without the host's traceback
        self.schemas, self.has_reward = described["schemas"], described["has_reward"]

    def open(self, row: Mapping[str, Any], seeds: tuple[int, int] | None = None) -> Future[Opened]:
        """Make an instance and reset it with ``row``, whose values JSON can hold.

        Args:
            row: its columns.
            seeds: of the random numbers of Python, NumPy and torch, as far as they are imported: until the end of the
                reset, and from then on; None draws them.
        """
        key = next(self._keys)
        return self._ask("open", key, [dict(row), *(seeds or (None, None))], partial(Opened, key))

    def call(self, key: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[list[Answer]]:
        """Call tools, by name and with keyword arguments, one after the other; a deadline each, one reply for all."""
        requests = [(name, dict(arguments)) for name, arguments in calls]
        return gathered([self._ask("call", key, one, lambda answer: Answer(*answer)) for one in requests])

    def state(self, key: int) -> Future[dict[str, Any] | None]:
        """The attributes of an environment that are public and JSON; None of what is no environment of a factory."""
        return self._ask("state", key, None, lambda state: state)

    def finish(self, key: int) -> Future[float | None]:
        """The instance's reward, None where it has none to give; its process then ends."""
        return self._ask("finish", key, None, lambda reward: reward)

    def drop(self, key: int) -> None:
        """Kill an instance that nobody needs any more; one that is gone may be dropped."""
        self.fleet.submit("drop", key, b"")

    def close(self) -> None:
        """Kill all instances and the host; futures that are open fail. Idempotent."""
        self.fleet.close()
        self._launcher.close()

    def _ask(self, kind: str, key: int, content: Any, read: Callable[[Any], Any]) -> Future[Any]:
        done = promised()
        try:
            message = framed([kind, content])
        except (TypeError, ValueError, RecursionError) as error:
            done.set_exception(InstanceLost(f"what {kind} is given is no JSON: {one_line(str(error))}"))
            if kind != "open":
                self.drop(key)
            return done
        self.fleet.submit(kind, key, message).add_done_callback(partial(self._answered, done, read))
        return done

    def _answered(self, done: Future[Any], read: Callable[[Any], Any], answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, TaskLost):
            done.set_exception(InstanceLost(f"WorkerDied: {one_line(str(error.__cause__ or error))}"))
        elif isinstance(error, InstanceLost):
            done.set_exception(InstanceLost(str(error)))  # without the host's traceback
        else:
            resolve(done, lambda: read(answer.result()))
