"""An engine whose samples are episodes of a user's agent, which samples through the run's :class:`~.gateway.Gateway`.

The agent runs in a worker process (:mod:`sota_grpo.workers.instances`) that may hang or crash. When it returns, the
tokens of all its requests are one sample (:mod:`.token_tree`), with its reward in the sample's record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Task, Wrapped, result
from sota_grpo.envs.chat_tokens import num_shared
from sota_grpo.envs.dialogs import ANSWERED, LOST, TRUNCATED, DialogEngine, SampleGroup, example_of
from sota_grpo.envs.gateway import Gateway, SessionQueue
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.rewards.functions import plain
from sota_grpo.rl.records import LARGEST, TASK, TURNS, GroupOutput, GroupRequest, Sampling
from sota_grpo.tasks.wrappers import row_of
from sota_grpo.text import one_line
from sota_grpo.workers.instances import InstanceLost, Instances

RUN = "run"  # the call that runs an agent


@dataclass(frozen=True)
class Agents:
    """Runner of a task's episodes (worker processes, or a queue), with at most ``max_turns`` responses in each."""

    instances: Instances | SessionQueue
    max_turns: int


class AgentEngine(Wrapped):
    """An engine whose samples are episodes of a user's agent; a wrapped engine samples the agent's requests.

    Args:
        engine: samples the agents' requests; groups of tasks without an agent are passed on to it.
        gateway: the server that the agents use; :meth:`close` closes it.
        env: source of the prompts; its dataset rows are passed to the agents.
        agents: {task name in a mixture: :class:`Agents`}; without a mixture the key is None.
    """

    def __init__(self, engine: Engine, gateway: Gateway, env: PromptSource, agents: Mapping[str | None, Agents]):
        super().__init__(engine)
        self._gateway, self._env, self._agents = gateway, env, dict(agents)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Start one episode of the agent per sample; return the group's future. ValueError without an example."""
        example = example_of(request)
        agents = self._agents.get(example.extra.get(TASK))
        if agents is None:
            is_read = isinstance(self.engine, DialogEngine)  # engines of single responses take no examples
            return self.engine.submit(request if is_read else replace(request, example=None), sampling)
        messages = [dict(message) for message in self._env.task.messages(example)]
        row = {**row_of(self._env.task, example), "prompt": messages}
        return GroupEpisodes(request, row, agents, self._gateway, sampling)

    def close(self) -> None:
        """Close the gateway and the wrapped engine, but not the agents' processes, which belong to the caller."""
        self._gateway.close()
        self.engine.close()


class GroupEpisodes(SampleGroup):
    """A group of episodes, each of which ends with its agent; cancelling the group ends the agents.

    It fails with the first exception of the engine, or if no worker can be started. The record of a sample has
    ``reward`` (None with an error), ``info`` (other results, if any), ``error`` (why the agent failed or was lost, or
    None), ``ended`` (``answer``, ``truncated``, ``turns``, or ``lost`` with an error), ``requests`` (the number of
    responses) and ``messages`` (of the last request, with its reply).
    """

    def __init__(
        self, request: GroupRequest, row: Mapping[str, Any], agents: Agents, gateway: Gateway, sampling: Sampling
    ):
        super().__init__(request.num_samples)
        self._request, self._row, self._agents = request, row, agents
        self.sessions = [
            gateway.open(request, index, sampling, agents.max_turns) for index in range(request.num_samples)
        ]
        self._records: dict[int, dict[str, Any]] = {}
        self._keys: dict[int, int] = {}
        for index in range(request.num_samples):
            Task(self._counted(self._episode(index)))

    def _leave(self) -> None:
        """Refuse further requests, and end the agents."""
        for session in self.sessions:
            session.close()
        for key in [*self._keys.values()]:
            self._agents.instances.drop(key)

    async def _episode(self, index: int) -> None:
        """Run the agent for sample ``index``, to its record."""
        session, instances = self.sessions[index], self._agents.instances
        record: dict[str, Any] = {"reward": None, "error": None}
        try:
            opened = await result(instances.open(self._row))
            self._keys[index] = opened.key
            if self.done():  # meanwhile
                instances.drop(opened.key)
                return
            called = {"base_url": session.base_url, "api_key": session.key}
            (answer,) = await result(instances.call(opened.key, [(RUN, called)]))
            record |= _result(answer.content, answer.is_error)
            instances.drop(opened.key)
        except InstanceLost as error:
            record["error"] = str(error)
        finally:
            session.close()
        if session.failure is not None:
            raise session.failure
        self._records[index] = record

    def _output(self) -> GroupOutput:
        prompts = [session.tree.prompt for session in self.sessions if session.tree.num_sampled]
        common = num_shared(prompts) if prompts else 0
        samples = []
        for index, session in enumerate(self.sessions):
            record = self._records[index]
            ended = TRUNCATED if session.truncated else TURNS if session.is_full else ANSWERED
            record |= {"ended": LOST if record["error"] else ended, "requests": session.num_turns}
            record["messages"] = session.messages
            samples.append(session.tree.sample(common, truncated=session.truncated, record=record))
        prompt_ids = tuple(prompts[0][:common]) if prompts else None
        return GroupOutput(self._request.group_id, tuple(samples), prompt_ids)


def _result(content: str, is_error: bool) -> dict[str, Any]:
    """Parse an agent's result (JSON): return ``reward`` and, as ``info``, other entries; ``error`` if it has none."""
    if is_error:
        return {"error": content.removeprefix("error: ")}
    try:
        value = json.loads(content)
        reward = float(value.pop("reward") if isinstance(value, dict) else value)
        if abs(reward) <= LARGEST:
            return {"reward": reward, **({"info": plain(value)} if isinstance(value, dict) and value else {})}
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    return {"error": f"the agent returned {one_line(content, 80)}, which is no finite reward; return a number"}
