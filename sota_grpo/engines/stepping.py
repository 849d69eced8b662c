"""What engines share: who drives them, streams of groups, groups in flight on top of single steps, and their checks."""

from __future__ import annotations

import contextlib
import itertools
import operator
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from sota_grpo.engines import Engine
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from sota_grpo.engines.stop_strings import StopStrings
    from sota_grpo.policy.weight_pack import Checksum

Result = TypeVar("Result")
_ATTEND_S = 0.1  # between two calls of what is to be attended to
_IDLE_S = 0.005  # an engine without work is asked again so soon: another thread may have submitted some


class EventLoop:
    """The event loop of the thread that drives an engine: actions that any thread posts, and coroutines.

    Args:
        engine: makes a step whenever no action waits.
        attend: called while there is nothing to do.

    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> loop, done = EventLoop(ScriptedEngine()), []
    >>> loop.post(lambda: done.append(1))
    >>> loop.run_once(), done, loop.run_once(timeout_s=0.0)
    (1, [1], 0)
    """

    def __init__(self, engine: Engine, attend: Callable[[], object] | None = None):
        self._engine, self._attend = engine, attend
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.active_at = time.monotonic()  # when there was something to do last

    def post(self, action: Callable[[], object]) -> None:
        """Have ``action`` called by the thread that drives the engine; from any thread."""
        self._actions.put(action)

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Task[Result]:
        """Run ``coroutine`` to the first future that it waits for, and on when that is resolved; see :func:`result`."""
        return Task(coroutine, self.post)

    def drain(self) -> int:
        """Do what is there, and what that posts; how many actions it was."""
        done = 0
        with contextlib.suppress(queue.Empty):
            while True:
                action = self._actions.get_nowait()
                self.active_at = time.monotonic()
                action()
                done += 1
        return done

    def run_once(self, timeout_s: float | None = None) -> int:
        """Do what is there; else let the engine make a step; else wait for an action, ``timeout_s`` at most.

        Returns:
            How many actions were done.
        """
        done = self.drain()
        if done or self._engine.advance():
            return done
        if self._attend is not None:
            self._attend()
            timeout_s = _ATTEND_S if timeout_s is None else min(_ATTEND_S, timeout_s)
        if self._engine.stepwise:
            timeout_s = _IDLE_S if timeout_s is None else min(_IDLE_S, timeout_s)
        try:
            action = self._actions.get(timeout=timeout_s)
        except queue.Empty:
            return 0
        self.active_at = time.monotonic()
        action()
        return 1 + self.drain()


class Task(Future[Result]):
    """The future of a coroutine that waits for futures of other threads; it goes on where ``post`` has actions done,
    by default in the thread that resolves them.

    :meth:`cancel`, for the thread that has the actions done, cancels what it waits for.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Result], post: Callable[[Callable[[], object]], object] = operator.call
    ):
        super().__init__()
        self._coroutine, self._post = coroutine, post
        self._go_on()

    def _go_on(self) -> None:
        if self.cancelled():
            return
        try:
            self._waits_for: Future[Any] = self._coroutine.send(None)
        except StopIteration as ended:
            self.set_result(ended.value)
        except BaseException as error:  # raised where the result is read
            self.set_exception(error)
        else:
            self._waits_for.add_done_callback(lambda _: self._post(self._go_on))

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._waits_for.cancel()
            self._coroutine.close()
        return cancelled


@coroutine
def result(future: Future[Result]) -> Generator[Future[Result], None, Result]:
    """What ``future`` resolves to: ``await result(engine.submit(...))`` in a coroutine of :meth:`EventLoop.start`."""
    yield future
    return future.result()


def completed(loop: EventLoop, begin: Iterable[Callable[[], Future[Result]]]) -> Iterator[Result]:
    """Begin everything, then yield the results as they come, driving the engine of ``loop``.

    What is left when the iterator is dropped, or when a failure ends it, is cancelled.
    """
    done: deque[Future[Result]] = deque()
    left: set[Future[Result]] = set()
    try:
        for one in begin:
            left.add(future := one())
            future.add_done_callback(lambda future: loop.post(partial(done.append, future)))
        while left:
            while not done:
                loop.run_once()
            left.discard(future := done.popleft())
            yield future.result()
    finally:
        for future in left:
            future.cancel()


class Streams:
    """``generate`` of an engine that has ``submit``; without another ``advance`` it is one that drives itself."""

    stepwise = False

    def advance(self) -> bool:
        """Nothing: the engine drives itself."""
        return False

    def generate(self: Any, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last sample has ended; nothing is sampled before the first is asked for.

        Raises:
            ValueError: a prompt leaves no room for a response; raised at the call.
        """
        response_rooms(requests, sampling, self.max_model_len)
        return completed(EventLoop(self), [partial(self.submit, request, sampling) for request in requests])


class FairLock:
    """A mutex that who has just had it cannot take again before another thread that waits.

    ``threading.Lock`` goes to whoever asks first after the release, and a thread that steps in a loop asks again at
    once: another thread with new weights can then wait for ever. Here one waiter at a time stands at the lock, and the
    others behind it.

    >>> lock = FairLock()
    >>> with lock:
    ...     lock.try_acquire()
    False
    """

    def __init__(self) -> None:
        self._held, self._first = threading.Lock(), threading.Lock()
        self.release = self._held.release

    def __enter__(self) -> None:
        with self._first:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def try_acquire(self) -> bool:
        """Take the lock if that needs no waiting at all."""
        return self._held.acquire(blocking=False)


class Flight(NamedTuple):
    """A group that was submitted: ``room`` is the most tokens of a response to it."""

    request: GroupRequest
    room: int
    sampling: Sampling
    future: Future[GroupOutput]


def are_drawn_alike(one: Sampling, other: Sampling) -> bool:
    """Whether responses can be drawn together; how long they may be is each flight's ``room``.

    >>> are_drawn_alike(Sampling(max_tokens=8), Sampling(max_tokens=9))
    True
    """
    return replace(one, max_tokens=other.max_tokens) == other


class SteppingEngine(Streams, ABC):
    """An engine that says how to start, step and drop groups, which have tickets.

    All state changes hold the engine's lock, a :class:`FairLock`: one that pushes weights waits for at most one step of
    every thread before it. Futures are resolved outside the lock, by whoever made the step, so what follows may push or
    submit.

    A subclass sets ``max_model_len``, takes ``with self._between_steps():`` around what must not run within a step
    (pushing weights), and writes the hooks below, which are called under the lock. One that can free device memory says
    so in ``_can_sleep`` and calls :meth:`_wake_now` where it needs that memory.
    """

    name: str
    label: str  # in messages
    version = 0
    max_model_len: int
    stepwise = True
    device = torch.device("cpu")  # where this process can compute with weights before it pushes them
    weight_dtype: torch.dtype | None = None  # see :class:`~sota_grpo.engines.Engine`
    stops: StopStrings | None = None  # what ends a response beside the end tokens
    _can_sleep = False
    _closed = False

    def __init__(self) -> None:
        self._asleep = False
        self._lock = FairLock()
        self._numbers = itertools.count()
        self._submitted: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}  # by ticket
        self._ended: deque[tuple[Flight, GroupOutput | Exception]] = deque()
        self._cancelled: deque[Future[GroupOutput]] = deque()

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    def weight_sums(self) -> Mapping[str, Checksum] | None:
        """See :class:`~sota_grpo.engines.Engine`."""
        return None

    @abstractmethod
    def _start(self, flights: Mapping[int, Flight]) -> None:
        """Take groups in, by ticket; all have one sampling but for its ``max_tokens``, for which each has a room."""

    @abstractmethod
    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        """Move everything in flight on; the groups that ended, by ticket."""

    @abstractmethod
    def _drop(self, tickets: Collection[int]) -> None:
        """Forget these groups, those already unknown too."""

    def _release(self) -> None:
        """Called to close, once, with nothing in flight."""

    def _free_memory(self) -> None:
        """Called to sleep, with nothing in flight."""

    def _restore_memory(self) -> None:
        """Undo :meth:`_free_memory`."""

    def _refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for what this engine cannot do; called by :meth:`submit`, in any thread."""

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("This engine is closed; build a new one to sample again.")

    @property
    def num_in_flight(self) -> int:
        """Groups submitted whose futures are open."""
        flights = [*list(self._submitted), *list(self._flights.values()), *(flight for flight, _ in list(self._ended))]
        return sum(not flight.future.cancelled() for flight in flights)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Take one group in, to be sampled by :meth:`advance`; from any thread.

        Raises:
            ValueError: its prompt leaves no room for a response.
            RuntimeError: the engine is closed.
        """
        self._require_open()
        (room,) = response_rooms([request], sampling, self.max_model_len)
        self._refuse(request, sampling)
        future: Future[GroupOutput] = Future()
        future.add_done_callback(self._note_cancelled)
        self._submitted.append(Flight(request, room, sampling, future))
        return future

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """As :meth:`Streams.generate`; a closed engine raises RuntimeError at the call."""
        self._require_open()
        return super().generate(requests, sampling)

    def advance(self) -> bool:
        """Take in what was submitted, and move everything in flight on, once; False where nothing was.

        A failure in between fails every group in flight: nobody knows how far each has come.
        """
        busy = resolved = False
        try:
            with self._between_steps():
                try:
                    self._take_in()
                    busy = bool(self._flights)
                    if busy:
                        self._require_open()
                        self._land(self._step())
                except BaseException as error:
                    self._forget_all(f"was lost when the engine failed ({error!r})")
                    raise
        finally:
            resolved = self._resolve_ended()
        return resolved or busy

    def sleep(self) -> None:
        """Free device memory until :meth:`wake`, or until it is needed; nothing where there is none to free.

        Raises:
            RuntimeError: groups are in flight; what they hold would be lost.
        """
        with self._between_steps():
            if not self._can_sleep or self._asleep:
                return
            self._require_open()
            if self.num_in_flight:
                raise RuntimeError(
                    f"The {self.label} engine was asked to sleep with {self.num_in_flight} groups in flight; consume "
                    "or abort them first."
                )
            self._free_memory()
            self._asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`; sampling does it by itself."""
        with self._between_steps():
            self._wake_now()

    def _wake_now(self) -> None:
        if self._asleep:
            self._require_open()
            self._restore_memory()
            self._asleep = False

    def abort(self) -> None:
        """Forget everything in flight; its futures raise RuntimeError."""
        with self._between_steps():
            self._forget_all()
        self._resolve_ended()

    def close(self) -> None:
        """Forget everything in flight and free what the engine holds; idempotent."""
        try:
            with self._between_steps():
                self._forget_all()
                if not self._closed:
                    self._closed = True
                    self._release()
        finally:
            self._resolve_ended()

    def _forget_all(self, why: str = "was dropped by abort() or close(); ask for it again") -> None:
        """The futures are told by :meth:`_resolve_ended`."""
        lost = [*(self._submitted.popleft() for _ in range(len(self._submitted))), *self._flights.values()]
        tickets = list(self._flights)
        self._flights.clear()
        for flight in lost:
            self._ended.append((flight, RuntimeError(f"Group {flight.request.group_id} {why}.")))
        self._drop(tickets)  # last: a broken engine may fail here

    def _take_in(self) -> None:
        """Start what was submitted, neighbours of one sampling together."""
        while self._submitted:
            sampling, flights = self._submitted[0].sampling, []
            while self._submitted and are_drawn_alike(self._submitted[0].sampling, sampling):
                flights.append(self._submitted.popleft())
            if flights := [flight for flight in flights if not flight.future.cancelled()]:
                self._start_together(flights)

    def _start_together(self, flights: Sequence[Flight]) -> None:
        """An engine refuses all or none: where it refuses, each is tried alone."""
        by_ticket = {next(self._numbers): flight for flight in flights}
        self._flights |= by_ticket
        try:
            self._start(by_ticket)
        except ValueError as error:
            self._drop(list(by_ticket))
            for ticket in by_ticket:
                self._flights.pop(ticket, None)
            if len(flights) == 1:
                self._ended.append((flights[0], error))
                return
            for flight in flights:
                self._start_together([flight])

    def _land(self, ended: Iterable[tuple[int, GroupOutput]]) -> None:
        """What a step has ended waits until the lock is free.

        Here every response ends where its stop strings say, whether or not the engine itself has gone on.
        """
        cut = self.stops.cut if self.stops is not None else lambda output: output
        self._ended.extend((self._flights.pop(ticket), cut(output)) for ticket, output in ended)

    def _resolve_ended(self) -> bool:
        any_resolved = False
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._ended:
                flight, output = self._ended.popleft()
                any_resolved = True
                if not flight.future.set_running_or_notify_cancel():
                    continue
                if isinstance(output, Exception):
                    flight.future.set_exception(output)
                else:
                    flight.future.set_result(output)
        return any_resolved

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._lock:
            self._drop_cancelled()
            yield

    def _note_cancelled(self, future: Future[GroupOutput]) -> None:
        """The garbage collector may cancel at any point, within a step of this very thread too: so never wait."""
        if future.cancelled():
            self._cancelled.append(future)
            if self._lock.try_acquire():
                try:
                    self._drop_cancelled()
                finally:
                    self._lock.release()

    def _drop_cancelled(self) -> None:
        """Of what was started; the others are left out when they would be."""
        gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        tickets = [ticket for ticket, flight in self._flights.items() if flight.future in gone] if gone else []
        for ticket in tickets:
            del self._flights[ticket]
        if tickets:
            self._drop(tickets)


def response_rooms(requests: Sequence[GroupRequest], sampling: Sampling, max_model_len: int) -> list[int]:
    """Most response tokens of each request: ``min(max_tokens, max_model_len - prompt tokens)``.

    Raises:
        ValueError: a prompt leaves no room for one token, a prompt is empty, or nothing is to be sampled.

    >>> request = GroupRequest(group_id=0, prompt_ids=(1, 2, 3), num_samples=1, seed=0)
    >>> response_rooms([request], Sampling(max_tokens=8), max_model_len=5)
    [2]
    """
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves nothing to sample; use at least 1.")
    for request in requests:
        if not request.prompt_ids or request.num_samples < 1:
            raise ValueError(
                f"Group {request.group_id} has {len(request.prompt_ids)} prompt tokens and num_samples="
                f"{request.num_samples}; both must be at least 1."
            )
        if len(request.prompt_ids) >= max_model_len:
            raise ValueError(
                f"The prompt of group {request.group_id} has {len(request.prompt_ids)} tokens and the context holds "
                f"max_model_len={max_model_len}: no room for a response; raise max_model_len or drop the prompt."
            )
    return [min(sampling.max_tokens, max_model_len - len(request.prompt_ids)) for request in requests]


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: Mapping[str, str],
    *,
    tied_required: bool,
) -> dict[str, torch.Tensor]:
    """The pushed weights by name, once it is certain that they replace every weight of the model.

    Args:
        weights: named tensors, names as in the ``state_dict()`` of the base model, adapters merged.
        shapes: name and shape of every weight of the model.
        tied: for each tied weight, the name of the weight it shares its values with.
        tied_required: the tied names must be given too (vLLM needs them).

    Raises:
        ValueError: an unknown name, a missing name, a wrong shape, or a tied pair with different values.

    >>> checked_weights([("a", torch.ones(2))], {"a": torch.Size([3])}, {}, tied_required=False)
    Traceback (most recent call last):
    ...
    ValueError: The pushed weight a has shape [2] and the engine's has [3]; push the weights of the same model.
    """
    pushed = dict(weights)
    if unknown := sorted(pushed.keys() - shapes.keys()):
        raise ValueError(
            f"{len(unknown)} of {len(pushed)} pushed weights are unknown to the engine, the first is {unknown[0]}; "
            "push the state_dict() of the base model, adapters merged."
        )
    optional = set() if tied_required else tied.keys()
    if missing := sorted(shapes.keys() - pushed.keys() - optional):
        hint = ""
        if missing[0] in tied:
            hint = f" ({missing[0]} is tied to {tied[missing[0]]}, yet without it the engine would keep the old one)"
        raise ValueError(
            f"{len(missing)} of {len(shapes)} weights are missing from the push, the first is {missing[0]}{hint}; "
            "push the whole state_dict(), not named_parameters()."
        )
    for name, tensor in pushed.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"The pushed weight {name} has shape {list(tensor.shape)} and the engine's has {list(shapes[name])}; "
                "push the weights of the same model."
            )
    for name, partner in tied.items():
        if name not in pushed or pushed[name].data_ptr() == pushed[partner].data_ptr():
            continue
        if not torch.equal(pushed[name], pushed[partner]):
            raise ValueError(f"{name} and {partner} are tied in the engine's model but differ in the push; untie it.")
    return pushed


def matrix_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all floating-point matrices among ``tensors``; None where they have several.

    >>> matrix, vector = torch.ones(2, 2), torch.ones(2)
    >>> matrix_dtype([matrix, vector.half()]), matrix_dtype([matrix, matrix.half()])
    (torch.float32, None)
    """
    of_matrices = [tensor for tensor in tensors if tensor.ndim > 1 or not tensor.numel()]  # vLLM empties what it packs
    dtypes = {tensor.dtype for tensor in of_matrices if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Each name in the state dict that shares its parameter with an earlier one, and that earlier name.

    >>> embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    >>> head.weight = embed.weight
    >>> tied_names(torch.nn.ModuleDict({"embed": embed, "head": head}))
    {'head.weight': 'embed.weight'}
    """
    first_name: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied[name] = first_name[id(parameter)]
    return tied


def expected_weights(
    model: str | PreTrainedConfig, *, trust_remote_code: bool
) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Names and shapes of a model's ``state_dict()``, and its tied names, without allocating it.

    Args:
        model: its folder, or its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from sota_grpo.policy.load import MODEL_LOCK

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    with MODEL_LOCK, torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tensor.shape for name, tensor in built.state_dict().items()}, tied_names(built)
