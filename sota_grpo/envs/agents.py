"""Dialogs with tools: the policy calls what an environment offers, and hears what comes of it.

Every sample has an environment of its own, in a worker process (:mod:`sota_grpo.workers.instances`). What the
policy says is read from the ids that it sampled; what a tool answers is a turn of the role ``tool``::

    sampled      <tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 28}}</tool_call> <|im_end|>
    inserted     \\n  <|im_start|>tool  \\n  9716  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      It is 9716. <|im_end|>

A turn without a call is the answer and ends the dialog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sota_grpo.engines.stepping import result
from sota_grpo.envs.chat_tokens import Messages
from sota_grpo.envs.dialogs import Talk
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.envs.tool_calls import ToolCallReader, message_of
from sota_grpo.errors import UserError
from sota_grpo.rl.records import TURNS, GroupRequest, sample_seed
from sota_grpo.rl.tool_schemas import ToolCall, call_id
from sota_grpo.tasks.wrappers import reward_inputs
from sota_grpo.workers.instances import Answer, InstanceLost, Instances

#: How a dialog may end beside :data:`~sota_grpo.rl.records.TURNS`: with an answer, cut, or without its instance.
ANSWERED, TRUNCATED, LOST = "answer", "truncated", "lost"


class ToolPartner:
    """The environment's side of dialogs with tools (:class:`~sota_grpo.envs.dialogs.Partner`).

    Contract. Consumes: groups with their examples. Produces: a dialog for each sample, over an instance of its own.
    Waits for: the instance, which has a deadline per call. An instance that is late, dies, or cannot begin costs its
    sample: the dialog ends, and its record says why.

    Args:
        env: its prompts describe the tools.
        instances: of the tools' environment.
        template_kwargs: further arguments of ``apply_chat_template``.

    Raises:
        UserError: the chat template has no tools.
    """

    def __init__(
        self, env: PromptSource, instances: Instances, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._env, self.instances = env, instances
        self.reader = ToolCallReader(env.tokenizer, instances.schemas, template_kwargs)
        #: Whether records hold what the environment's attributes were at the end.
        self.reads_environments = getattr(env.task, "reads_environments", False)

    async def begin(self, request: GroupRequest, index: int) -> Talk:
        """Once an instance is there and was reset.

        Siblings are reset with the random numbers of their group, so that they begin alike, and have their own then.
        """
        example = request.example
        assert example is not None
        seeds = sample_seed(request.seed), sample_seed(request.seed, request.first_sample + index)
        inputs = reward_inputs(self._env.task, "", example)
        row = {"ground_truth": inputs.ground_truth, **inputs.columns, "prompt": inputs.prompt}  # under TRL's names
        try:
            there = await result(self.instances.open(row, seeds))
        except InstanceLost as error:
            return ToolTalk(self, None, error=str(error))
        if not there.observation:
            return ToolTalk(self, there.key)
        try:
            return ToolTalk(self, there.key, self._env.prompt_ids(example, there.observation))
        except UserError as error:  # it is the environment's text, not the user's: it costs the sample
            self.instances.drop(there.key)
            return ToolTalk(self, None, error=f"what reset returned cannot be said: {error}")


class ToolTalk:
    """One dialog with tools (:class:`~sota_grpo.envs.dialogs.Talk`).

    Its record, which graders find in ``response.record``: ``messages`` as TRL writes them (``role``, ``content``,
    ``tool_calls`` of the policy, ``name`` and ``tool_call_id`` of a tool), ``failed`` (which of
    them are answers to calls that failed), ``tool_calls``, ``tool_errors``, ``ended``
    (how), ``reward`` (of ``get_reward``, None without one), ``error`` (why the instance was lost, else None) and, where
    reward functions read it, ``environment`` (its attributes at the end, by name).

    A call's id is the one that the policy gave it, where it is one that every template takes; else it is its number.

    Args:
        partner: with what all dialogs share.
        key: of the instance; None where there is none.
        prompt_ids: of this dialog, where the environment added to its prompt.
        error: why there is none.
    """

    def __init__(
        self, partner: ToolPartner, key: int | None, prompt_ids: tuple[int, ...] | None = None, error: str | None = None
    ) -> None:
        self.prompt_ids = prompt_ids
        self._partner, self._key, self._error = partner, key, error
        self._messages: list[dict[str, Any]] = []
        self._num_said = self._num_calls = 0
        self._failed: list[int] = []
        self._ended = ANSWERED if error is None else LOST

    async def answer(self, said: torch.Tensor) -> Messages | None:
        """What the tools say that the turn calls, in order, or why one cannot be called; None where it calls none."""
        calls = self._heard(said)
        if not calls or self._error is not None:
            return None
        self._num_calls += len(calls)
        sound = [(call.name, call.arguments) for call in calls if call.error is None]
        answers: list[Answer] = []
        if sound:
            assert self._key is not None
            try:
                answers = await result(self._partner.instances.call(self._key, sound))
            except InstanceLost as error:
                self._key, self._error, self._ended = None, str(error), LOST
                return None
        left = iter(answers)
        replies: list[dict[str, str]] = []
        for call in calls:
            answer = next(left) if call.error is None else Answer(f"error: {call.error}", is_error=True)
            if answer.is_error:
                self._failed.append(len(self._messages) + len(replies))
            name = call.name or "unknown"
            replies.append({"role": "tool", "name": name, "tool_call_id": call.id, "content": answer.content})
        self._messages += replies
        return replies

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        """The record, once the instance has said what the dialog was worth and is gone."""
        calls = () if unanswered is None else self._heard(unanswered)
        if truncated:
            self._ended = TRUNCATED
        elif calls:
            self._ended = TURNS
        key, self._key = self._key, None
        reward = state = None
        if key is not None:
            instances = self._partner.instances
            seen = instances.state(key) if self._partner.reads_environments else None
            rewarded = instances.finish(key)
            try:
                known = None if seen is None else await result(seen)
                reward, state = await result(rewarded), known
            except InstanceLost as error:
                self._error = str(error)
        counts = {"tool_calls": self._num_calls, "tool_errors": len(self._failed)}
        ended = {"ended": self._ended, "reward": reward, "error": self._error}
        environment = {} if state is None else {"environment": state}
        return {"messages": self._messages, "failed": self._failed, **counts, **ended, **environment}

    def leave(self) -> None:
        """Nobody waits: the instance goes."""
        key, self._key = self._key, None
        if key is not None:
            self._partner.instances.drop(key)

    def _heard(self, said: torch.Tensor) -> tuple[ToolCall, ...]:
        turn = self._partner.reader.read(said.tolist())
        calls = tuple(
            replace(call, id=call.id or call_id(number)) for number, call in enumerate(turn.calls, self._num_said)
        )
        self._num_said += len(calls)
        self._messages.append(message_of(turn.content, calls))
        return calls
