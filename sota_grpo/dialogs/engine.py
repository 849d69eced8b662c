"""An engine whose samples are whole dialogs."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from sota_grpo.dialogs.asking import AskByFuture, AskByRound, AskByStep, Asking, Steps
from sota_grpo.dialogs.group import GroupDialogs, Rules, Turns
from sota_grpo.engines.base import Engine, Generates
from sota_grpo.engines.checks import response_rooms
from sota_grpo.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.rewards.grading import Grader


class DialogEngine:
    """Groups of dialogs: each sample is graded, and where its score has a reply, the policy hears it and goes on.

    A sample then holds all that follows the prompt, as it was sampled and inserted: nothing that was sampled is ever
    tokenised again. On the tokens of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1.
    A dialog ends with a score without reply, a failed grader, a truncated turn, its ``max_steps``-th turn, or where the
    context has no room for the reply and one more token (truncated too). ``sampling.max_tokens`` bounds one turn.

    Contract. Consumes: requests with their examples. Produces: groups, as soon as all their dialogs have ended. Waits
    for: the engine and the grader, which have deadlines of their own. Unblocked by: the last dialog of a group. A
    failure of either ends the stream, or fails the future. A stream that is dropped takes its groups along, at the next
    call where the engine is stepwise.

    An engine with ``submit`` (rollout workers) and a stepwise one (:class:`~sota_grpo.engines.base.Engine`; it must be
    nobody else's) begin a dialog's next turn while others are in the middle of theirs. One that has ``generate`` alone
    is asked in rounds, turn by turn: see :class:`sota_grpo.dialogs.asking.AskByRound` for what that costs.

    The random numbers of turn ``t`` of sample ``i`` derive from ``(request.seed, i, t)``, so a dialog depends on no
    other, up to the rounding of the engine's batches.

    Args:
        engine: samples single turns.
        grader: between the turns.
        turns: reads and writes the ids of turns (:class:`sota_grpo.envs.turns.TurnTokens`).
        max_steps: most turns of the policy in a dialog, at least 2.
        in_rounds: ask in rounds whatever the engine; for ``transformers``, which computes every call by itself.

    Raises:
        ValueError: ``max_steps`` is below 2, where the engine alone does the same.

    Example, with a grader that is never content and turns of two tokens between those of the policy:

    >>> from types import SimpleNamespace
    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> from sota_grpo.records import Example, Score
    >>> graded = Future()
    >>> graded.set_result([Score({}, False, reply={"role": "user", "content": "Again?"})])
    >>> grader = SimpleNamespace(scores=lambda pairs: graded)
    >>> turns = SimpleNamespace(text=str, ids=lambda reply, last_id: (8, 9))
    >>> engine = DialogEngine(ScriptedEngine(lambda request, sample, version: [5]), grader, turns, max_steps=2)
    >>> request = GroupRequest(0, (1, 2), num_samples=1, seed=0, example=Example("?", "!"))
    >>> ((sample,),) = [output.samples for output in engine.generate([request], Sampling(max_tokens=4))]
    >>> sample.token_ids.tolist(), sample.assistant_mask.int().tolist()
    ([5, 0, 8, 9, 5, 0], [1, 1, 0, 0, 1, 1])
    """

    def __init__(self, engine: Generates, grader: Grader, turns: Turns, *, max_steps: int, in_rounds: bool = False):
        if max_steps < 2:
            raise ValueError(f"max_steps={max_steps} leaves no second turn; use the engine itself.")
        self.engine: Any = engine
        self.name, self.max_model_len = engine.name, engine.max_model_len
        self._rules = Rules(grader, turns, max_steps, engine.max_model_len)
        self._in_rounds = in_rounds
        self._steps = Steps(engine) if isinstance(engine, Engine) and not in_rounds else None

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """The group, some day, of an engine that has ``submit``; what is to be done runs where its futures resolve.

        Raises:
            ValueError: the prompt leaves no room for a response, or the request has no example.
        """
        self._check([request], sampling)
        group = GroupDialogs(request, self._rules, AskByFuture(self.engine, sampling).ask, post=_at_once)
        group.begin()
        return group.done

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last dialog has ended; nothing is sampled before the first is asked for.

        Raises:
            ValueError: a prompt leaves no room for a response, or a request has no example; raised at the call.
        """
        self._check(requests, sampling)
        return self._stream(list(requests), sampling)

    def _stream(self, requests: list[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        ended: deque[Future[GroupOutput]] = deque()
        asking = self._asking(sampling)
        try:
            for request in requests:
                group = GroupDialogs(request, self._rules, asking.ask, post=inbox.put)
                group.done.add_done_callback(ended.append)
                group.begin()
            for _ in requests:
                while not ended:
                    _move_on(inbox, asking)
                yield ended.popleft().result()
        finally:
            asking.close()

    def _asking(self, sampling: Sampling) -> Asking:
        if self._steps is not None:
            return AskByStep(self._steps, sampling)
        if hasattr(self.engine, "submit") and not self._in_rounds:
            return AskByFuture(self.engine, sampling)
        return AskByRound(self.engine, sampling)

    def _check(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        response_rooms(requests, sampling, self.max_model_len)
        for request in requests:
            if request.example is None:
                raise ValueError(f"Group {request.group_id} has no example to grade its dialogs against; give it one.")

    @property
    def version(self) -> int:
        """The version that the engine serves."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:  # the protocol's attribute is one that can be set
        self.engine.version = version

    @property
    def fleet(self) -> Any:
        """The workers of an engine that has some."""
        return self.engine.fleet

    @property
    def base(self) -> Any:
        """What a pushed adapter is merged into, of an engine that takes adapters."""
        return self.engine.base

    @base.setter
    def base(self, base: Any) -> None:
        self.engine.base = base

    def update_weights(self, weights: Iterable[Any], version: int) -> None:
        """Push to the engine, in the middle of running dialogs too; every token keeps the version that sampled it."""
        self.engine.update_weights(weights, version)

    def sleep(self) -> None:
        """Free the engine's device until :meth:`wake`."""
        if self._steps is not None:
            self._steps.settle()  # an engine does not sleep over groups in flight, those that nobody waits for included
        self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.engine.wake()

    def close(self) -> None:
        """Close the engine; idempotent."""
        self.engine.close()


def _at_once(action: Callable[[], None]) -> None:
    action()


def _move_on(inbox: queue.SimpleQueue[Callable[[], None]], asking: Asking) -> None:
    """Do what has come; where nothing has, sample, or wait for the grader where nothing is left to sample."""
    try:
        action = inbox.get(block=not asking.busy)
    except queue.Empty:
        asking.advance()
        return
    action()
    while not inbox.empty():
        inbox.get()()
