"""Code shared by rollout engines: the event loop, the base class that steps groups, stop strings, weight checks."""

from __future__ import annotations

import contextlib
import itertools
import operator
import queue
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from sota_grpo.engines import Engine
from sota_grpo.policy.weight_pack import Checksum, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Result = TypeVar("Result")
_POLL_S = 0.1  # between two calls of ``poll``
_IDLE_S = 0.005  # between two steps of an engine without work: another thread may have submitted some
_MOST_BYTES, _INCOMPLETE = 4, "\ufffd"  # of a character in UTF-8; its text where bytes are missing
_MARGIN = 8  # tokens before a stop string's own bytes, so that it never begins where a decoder begins


class EventLoop:
    """Event loop of the thread that drives an engine; it runs coroutines and callables that any thread posts.

    Args:
        engine: :meth:`run_once` calls its ``advance`` if no posted action waits.
        poll: :meth:`run_once` calls it, at least every 0.1 s, while there is nothing to do.

    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> loop, done = EventLoop(ScriptedEngine()), []
    >>> loop.post(lambda: done.append(1))
    >>> loop.run_once(), done, loop.run_once(timeout_s=0.0)
    (1, [1], 0)
    """

    def __init__(self, engine: Engine, poll: Callable[[], object] | None = None):
        self._engine, self._poll = engine, poll
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.post = self._actions.put  # queues an action for the thread that drives the engine; thread-safe
        self.active_at = time.monotonic()  # time of the last action, monotonic seconds

    def run_once(self, timeout_s: float | None = None, *, steps: bool = True) -> int:
        """Call all posted actions; if none, advance the engine; if it is idle, wait up to ``timeout_s`` for an action.

        The wait is at most 0.1 s with ``poll`` and 5 ms for a stepwise engine; ``timeout_s`` None sets no limit of its
        own. Without ``steps`` only call the posted actions. Return the number of actions called.
        """
        if not steps or not self._actions.empty():
            timeout_s = 0.0
        elif self._engine.advance():
            return 0
        else:
            if self._poll is not None:
                self._poll()
                timeout_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s)
            if self._engine.stepwise:
                timeout_s = _IDLE_S if timeout_s is None else min(_IDLE_S, timeout_s)
        done = 0
        with contextlib.suppress(queue.Empty):
            while True:
                action = self._actions.get(done == 0 and timeout_s != 0.0, timeout_s)
                self.active_at = time.monotonic()
                action()
                done += 1
        return done


class Task(Future[Result]):
    """Future of a coroutine that awaits futures of other threads (:func:`result`).

    The constructor runs the coroutine until its first ``await``. When an awaited future is resolved, ``post`` receives
    the callable that continues the coroutine; the default calls it in the resolving thread. Call :meth:`cancel` in the
    coroutine's thread; it also cancels the awaited future.
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
    """Make ``future`` awaitable in the coroutine of a :class:`Task`: ``await result(engine.submit(...))``."""
    yield future
    return future.result()


def as_completed(loop: EventLoop, begin: Iterable[Callable[[], Future[Result]]]) -> Iterator[Result]:
    """Call each function in ``begin`` and yield the results of their futures as these complete, running ``loop``.

    The exception of a future is raised. If the iterator fails or is dropped, the unresolved futures are cancelled.
    """
    done: deque[Future[Result]] = deque()
    tasks: dict[Future[Result], Task[None]] = {}

    async def wait(future: Future[Result]) -> None:
        with contextlib.suppress(Exception):  # raised below
            await result(future)
        done.append(future)

    try:
        for call in begin:
            future = call()
            tasks[future] = Task(wait(future), loop.post)
        while tasks:
            while not done:
                loop.run_once()
            future = done.popleft()
            del tasks[future]
            yield future.result()
    finally:
        for task in tasks.values():
            task.cancel()


class Streams:
    """Mixin: ``generate`` for an engine that has ``submit``, and a no-op ``advance`` for one with its own threads."""

    stepwise = False

    def advance(self) -> bool:
        """No-op: the engine samples in threads or processes of its own; return False."""
        return False

    def generate(self: Any, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group when it has ended; ``next()`` starts sampling, the call raises as :func:`response_rooms`."""
        response_rooms(requests, sampling, self.max_model_len)
        return as_completed(EventLoop(self), [partial(self.submit, request, sampling) for request in requests])


class Wrapped(Streams):
    """Base class of an engine that wraps another ``engine``; steps and missing attributes are the wrapped engine's."""

    def __init__(self, engine: Engine):
        self.engine: Any = engine
        self.name, self.max_model_len, self.stepwise = engine.name, engine.max_model_len, engine.stepwise

    def advance(self) -> bool:
        """Run one step of the wrapped engine; return False if there was nothing to do."""
        return self.engine.advance()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped engine: weight updates, sleep, wake, close."""
        if name == "engine":  # before __init__
            raise AttributeError(name)
        return getattr(self.engine, name)


class Flight(NamedTuple):
    """A submitted group; ``room`` is the maximum number of tokens of one response."""

    request: GroupRequest
    room: int
    sampling: Sampling
    future: Future[GroupOutput]


class SteppingEngine(Streams, ABC):
    """Base class of engines; a subclass implements how to start, step and drop groups, identified by tickets.

    Every state change but ``submit`` holds the engine's lock, which no thread acquires twice in a row while another
    waits: while one thread steps, a push of weights waits for at most one step. Futures are resolved without the
    lock, by a thread that calls :meth:`advance` or :meth:`close`, so that their callbacks may push or submit. A
    cancelled group is dropped at the next state change.

    A subclass sets ``name`` and ``max_model_len``, uses ``with self._between_steps():`` around code that must not run
    within a step (pushing weights), and implements the private hooks below, which are called with the lock held. A
    subclass that can free device memory sets ``_can_sleep`` and calls :meth:`_wake_now` before it uses that memory;
    ``_start`` finds the engine awake.
    """

    name: str
    version = 0
    max_model_len: int
    stepwise = True
    device = torch.device("cpu")  # of this process, for merging adapters before a push
    weight_dtype: torch.dtype | None = None
    stops: StopStrings | None = None
    base: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    takes_adapters = False  # True: :meth:`update_weights` gets a LoRA adapter alone; False: merged weights
    _can_sleep = False
    _closed = False

    def __init__(self) -> None:
        self._asleep = False
        self._lock, self._first_in_line = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._submitted: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}  # by ticket
        self._ended: deque[tuple[Flight, GroupOutput | Exception]] = deque()

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    def weight_sums(self) -> Mapping[str, Mapping[str, Checksum]] | None:
        """Return None: this engine reports no checksums (:class:`~sota_grpo.engines.Engine`)."""
        return None

    @abstractmethod
    def _start(self, flights: Mapping[int, Flight]) -> None:
        """Start groups, by ticket, of an engine that is awake; ``room`` replaces ``max_tokens`` of their samplings."""

    @abstractmethod
    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        """Advance every group in flight; return ``(ticket, output)`` of the groups that ended."""

    @abstractmethod
    def _drop(self, flights: Mapping[int, Flight]) -> None:
        """Stop and forget these groups, by ticket; some may never have started."""

    def whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return all weights of a push; an adapter is merged into ``base()``: ValueError if ``base`` is None."""
        if not (isinstance(weights, WeightPack) and weights.scales):
            return weights
        if self.base is None:
            raise ValueError("The engine lacks the base weights of the pushed LoRA adapter; set engine.base first.")
        return weights.merged(self.base(), self.device)

    def _release(self) -> None:
        """Free the engine's resources; called once by :meth:`close`, with no group in flight."""

    def _free_memory(self) -> None:
        """Free device memory; called by :meth:`sleep`, with no group in flight."""

    def _restore_memory(self) -> None:
        """Undo :meth:`_free_memory`."""

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("This engine is closed; build a new one to sample again.")

    @property
    def num_in_flight(self) -> int:
        """Number of submitted groups whose futures are neither resolved nor cancelled."""
        flights = [*list(self._submitted), *list(self._flights.values()), *(flight for flight, _ in list(self._ended))]
        return sum(not flight.future.cancelled() for flight in flights)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Queue a prompt group for :meth:`advance`; return its future. Thread-safe.

        ValueError as by :func:`response_rooms`; RuntimeError if the engine is closed, or uses a server and has failed.
        """
        self._require_open()
        (room,) = response_rooms([request], sampling, self.max_model_len)
        future: Future[GroupOutput] = Future()
        self._submitted.append(Flight(request, room, sampling, future))
        return future

    def advance(self) -> bool:
        """Start submitted groups and make one step; return False if there was nothing to do.

        If the step fails, all groups fail with RuntimeError, and this method raises the step's error. A group that the
        engine refuses to start fails alone, with the ValueError.
        """
        busy = resolved = False
        try:
            with self._between_steps():
                try:
                    submitted = [self._submitted.popleft() for _ in range(len(self._submitted))]
                    if flights := [flight for flight in submitted if not flight.future.cancelled()]:
                        self._start_together(flights)
                    busy = bool(self._flights)
                    if busy:
                        self._require_open()
                        self._finish(self._step())
                except BaseException as error:
                    self._forget_all(f"was lost when the engine failed ({error!r})")
                    raise
        finally:
            resolved = self._resolve_ended()
        return resolved or busy

    def sleep(self) -> None:
        """Free device memory until :meth:`wake` or until a group starts; no-op if the engine cannot free any.

        RuntimeError if groups are in flight, whose state would be lost, or the engine is closed.
        """
        with self._between_steps():
            if not self._can_sleep or self._asleep:
                return
            self._require_open()
            if self.num_in_flight:
                raise RuntimeError(
                    f"The {self.name} engine cannot sleep while groups are in flight ({self.num_in_flight}); consume "
                    "or cancel them first."
                )
            self._free_memory()
            self._asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`; no-op if the engine is awake; RuntimeError if it was closed asleep."""
        with self._between_steps():
            self._wake_now()

    def _wake_now(self) -> None:
        if self._asleep:
            self._require_open()
            self._restore_memory()
            self._asleep = False

    def close(self) -> None:
        """Fail every group in flight (RuntimeError) and free the engine's resources; idempotent."""
        try:
            with self._between_steps():
                self._forget_all("was dropped by close(); submit it to a new engine")
                if not self._closed:
                    self._closed = True
                    self._release()
        finally:
            self._resolve_ended()

    def _forget_all(self, why: str) -> None:
        flights, self._flights = self._flights, {}
        for flight in (*(self._submitted.popleft() for _ in range(len(self._submitted))), *flights.values()):
            self._ended.append((flight, RuntimeError(f"Group {flight.request.group_id} {why}.")))
        self._drop(flights)  # last: a broken engine may fail here

    def _start_together(self, flights: Sequence[Flight]) -> None:
        """Start all groups; if that is refused, start each one alone, so that only refused groups fail."""
        by_ticket = {next(self._numbers): flight for flight in flights}
        self._flights |= by_ticket
        try:
            if self._asleep:
                self._wake_now()
            self._start(by_ticket)
        except ValueError as error:
            self._drop(by_ticket)
            for ticket in by_ticket:
                self._flights.pop(ticket, None)
            if len(flights) == 1:
                self._ended.append((flights[0], error))
                return
            for flight in flights:
                self._start_together([flight])

    def _finish(self, ended: Iterable[tuple[int, GroupOutput]]) -> None:
        """Cut the responses of ended groups at their stop strings; :meth:`_resolve_ended` resolves the groups later."""
        for ticket, output in ended:
            output = output if self.stops is None else self.stops.cut(output)
            self._ended.append((self._flights.pop(ticket), output))

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
        with self._first_in_line:
            self._lock.acquire()
        try:
            cancelled = {ticket: flight for ticket, flight in self._flights.items() if flight.future.cancelled()}
            if cancelled:
                for ticket in cancelled:
                    del self._flights[ticket]
                self._drop(cancelled)
            yield
        finally:
            self._lock.release()


class StopStrings:
    """Stop strings: a response ends with the token that completes the first occurrence of one of ``texts``.

    That token is kept whole, even if its text continues after the stop string, because log-probs belong to sampled
    tokens; such a response is not truncated. A special token has its name as text, such as ``<|im_end|>``.

    Args:
        texts: at least one; non-empty strings without U+FFFD, to which tokenizers decode an incomplete character.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> stops, ids = StopStrings(tokenizer, ["is"]), tokenizer("it is not")["input_ids"]
    >>> tokenizer.decode(ids[: stops.end(ids)])
    'it is'
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self.window = max(len(text.encode()) for text in texts) + _MARGIN  # a token has a byte at least

    def _holds(self, ids: Sequence[int]) -> bool:
        # without the clean-up of spaces, later tokens change decoded text only at an incomplete character: decoders
        # with byte fallback (Llama 2, Mistral 7B) then make no text of the run of bytes that it begins or ends
        decoded = ""
        for start in range(_MOST_BYTES):
            for end in range(len(ids), max(start, len(ids) - _MOST_BYTES), -1):
                decoded = self._tokenizer.decode(
                    ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                if any(text in decoded for text in self._texts):
                    return True
                if not decoded.endswith(_INCOMPLETE):
                    break
            if not decoded.startswith(_INCOMPLETE):
                break
        return False

    def is_complete(self, ids: Sequence[int]) -> bool:
        """Return whether the last ``window`` tokens contain a stop string; call it after every token, to miss none."""
        return self._holds(ids[-self.window :])

    def end(self, ids: Sequence[int]) -> int | None:
        """Return the length of the shortest prefix of ``ids`` that contains a stop string; None if none occurs."""
        if not self._holds(ids):
            return None
        return bisect_left(range(len(ids)), True, key=lambda at: self._holds(ids[: at + 1])) + 1

    def cut(self, output: GroupOutput) -> GroupOutput:
        """Return the group with each response cut after the token that completes its first stop string, if any."""

        def cut(sample: Sample) -> Sample:
            end = self.end(sample.token_ids.tolist())
            if end is None:
                return sample
            columns = {name: getattr(sample, name)[:end].clone() for name in ("token_ids", "log_probs", "versions")}
            support = None if sample.support is None else sample.support.first(end)
            return replace(sample, **columns, support=support, truncated=False)

        return replace(output, samples=tuple(map(cut, output.samples)))


def response_rooms(requests: Sequence[GroupRequest], sampling: Sampling, max_model_len: int) -> list[int]:
    """Return the maximum response tokens of each request: ``min(max_tokens, max_model_len - prompt tokens)``.

    ValueError if a prompt is empty or leaves no room for one token, or ``max_tokens`` or ``num_samples`` is below 1.

    >>> request = GroupRequest(group_id=0, prompt_ids=(1, 2, 3), num_samples=1, seed=0)
    >>> response_rooms([request], Sampling(max_tokens=8), max_model_len=5)
    [2]
    """
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} allows no response token; use at least 1.")
    for request in requests:
        if not request.prompt_ids or request.num_samples < 1:
            raise ValueError(
                f"Group {request.group_id} has {len(request.prompt_ids)} prompt tokens and num_samples="
                f"{request.num_samples}; both must be at least 1."
            )
        if len(request.prompt_ids) >= max_model_len:
            raise ValueError(
                f"The prompt of group {request.group_id} has {len(request.prompt_ids)} tokens, which leaves no "
                f"room for a response in max_model_len={max_model_len}; raise max_model_len or drop the prompt."
            )
    return [min(sampling.max_tokens, max_model_len - len(request.prompt_ids)) for request in requests]


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: Mapping[str, str],
    *,
    tied_required: bool,
) -> dict[str, torch.Tensor]:
    """Return the pushed weights by name; ValueError unless all names, shapes and tied values fit the model.

    Args:
        weights: ``(name, tensor)`` pairs, named as in the ``state_dict()`` of the base model, adapters merged.
        shapes: shape of every weight of the model, by name.
        tied: for each tied weight, the name of the weight whose values it shares.
        tied_required: whether the tied names must be pushed too (vLLM needs them).

    >>> checked_weights([("a", torch.ones(2))], {"a": torch.Size([3])}, {}, tied_required=False)
    Traceback (most recent call last):
    ...
    ValueError: The pushed weight a has shape [2] and the engine's has [3]; push weights of the engine's model.
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
            hint = f" (it is tied to {tied[missing[0]]}, but this engine would keep its old values)"
        raise ValueError(
            f"{len(missing)} of {len(shapes)} weights are missing from the push, the first is {missing[0]}{hint}; "
            "push the whole state_dict(), not named_parameters()."
        )
    for name, tensor in pushed.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"The pushed weight {name} has shape {list(tensor.shape)} and the engine's has {list(shapes[name])}; "
                "push weights of the engine's model."
            )
    for name, first in tied.items():
        tensor = pushed.get(name, pushed[first])
        if tensor.data_ptr() != pushed[first].data_ptr() and not torch.equal(tensor, pushed[first]):
            raise ValueError(f"{name} and {first} are tied in the engine but differ in the push; push equal values.")
    return pushed


def matrix_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of all floating-point matrices among ``tensors``; None if they have several, or there are none.

    A matrix has two dimensions or more, or no elements (as vLLM leaves matrices that it packs).

    >>> matrix, vector = torch.ones(2, 2), torch.ones(2)
    >>> matrix_dtype([matrix, vector.half()]), matrix_dtype([matrix, matrix.half()])
    (torch.float32, None)
    """
    matrices = (tensor for tensor in tensors if tensor.ndim > 1 or not tensor.numel())
    dtypes = {tensor.dtype for tensor in matrices if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return ``{name: first name}`` of tied parameters, for each of a parameter's state-dict names after the first.

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
    """Return ``({name: shape}, tied_names)`` of a model (folder, hub id or config) without allocating its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sota_grpo.policy.load import MODEL_LOCK

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    with MODEL_LOCK, torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tensor.shape for name, tensor in built.state_dict().items()}, tied_names(built)
