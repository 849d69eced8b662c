"""Dialogs as a TorchRL environment: a response that is answered leads to a longer prompt, the last one to the reward.

The steps of one row, of a policy ``a`` that is answered ``u`` once::

    turn  tokens.prompt      tokens.response    next.tokens.prompt        next.done
    0     p p                a a                p p a a u u               False
    1     p p a a u u        a                  p p a a u u a             True

:class:`~sota_grpo.envs.dialog_rows.DialogRows` makes one row of them, as training reads it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Unbounded

from sota_grpo import keys
from sota_grpo.envs.agents import Budgets, ToolPartner
from sota_grpo.envs.dialogs import Dialog, GradedTurns, Partner, Rules, TurnTokens
from sota_grpo.envs.task_env import DRAWN, TaskEnv, done_entries, prompt_rows, response_ids
from sota_grpo.rewards.functions import PICKLED, pickled
from sota_grpo.rl.records import Example, GroupRequest, Sample, Score, sample_seed
from sota_grpo.rl.task import SampledText, Task
from sota_grpo.rl.transforms import graded_texts
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.wrappers import with_tools
from sota_grpo.workers.base import promised
from sota_grpo.workers.instances import Instances, InstanceSpec

#: What ``tools`` and ``environment`` may be: written as in a config, or the objects themselves.
Tools = str | Sequence[Callable[..., Any]]


class DialogEnv(TaskEnv):
    """A :class:`TaskEnv` of several turns: what the policy says is answered, by its task, by tools or an environment.

    The dialogs are those of training (:mod:`sota_grpo.envs.dialogs`): who answers, when a dialog ends, and every token
    between two turns. Step reads the response to ``tokens.prompt``. Where it is answered, ``next`` has the longer
    prompt (the prompt, the response as it was sampled, the answer and the beginning of the policy's next turn), a
    reward of 0, and is not done; else it is done, truncated where the response was cut or the context is full, and
    graded. ``turn`` counts the answered responses of a dialog. With one turn and no tools this is a :class:`TaskEnv`.

    Rows end at different times, and each goes on by itself where it is reset alone: its episode ``k`` is the same
    sample of the ``k``-th prompts that are drawn, so siblings share their ``group_id`` whenever they begin. A reward
    that compares siblings (a function given a whole group) sees those that end in the same step. All of a step's tools
    are called at once, and step returns when the last of them has answered.

    Args:
        task: examples, chat and score; a score's ``reply`` is the answer where there are no tools.
        tokenizer: with a chat template that has tools, where there are any.
        max_steps: most turns of the policy in a dialog.
        tools: typed functions, or ``FILE.py:NAME,NAME``.
        environment: what makes an environment of TRL's protocol, or ``FILE.py:FACTORY``, or a server
            (:mod:`sota_grpo.tasks.servers`). One with ``get_reward`` rewards instead of the task.
        tool_timeout_s: longest for a reset, a call of a tool or a reward.
        budgets: of a dialog with tools.
        max_prompt_tokens: longest prompt, also of a later turn, whose dialog is truncated else; None allows any.
        keywords: of :class:`TaskEnv`.

    Raises:
        ValueError: ``max_steps`` is below 1, or 1 with tools; both tools and an environment.
        UserError: the tools or the chat template cannot be used.

    Example::

        env = DialogEnv(task, tokenizer, num_envs=16, repeats=8, max_steps=4, tools=[multiply])
        steps = env.rollout(4, policy, break_when_all_done=True)
        rows = DialogRows(tokenizer, group_size=8).add(steps)
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        max_steps: int = 1,
        tools: Tools | None = None,
        environment: str | Callable[[], Any] | None = None,
        tool_timeout_s: float = 30.0,
        budgets: Budgets | None = None,
        max_prompt_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ):
        _check(max_steps, tools, environment)
        with ExitStack() as opened:
            spec = _spec(tools, environment, opened)
            instances = (
                None if spec is None else opened.enter_context(closing(Instances(spec, timeout_s=tool_timeout_s)))
            )
            kwargs = dict(template_kwargs or {})
            if instances is not None:
                instances.wait_ready()
                task = with_tools(task, has_reward=instances.has_reward, asks_task=not instances.has_reward)
                kwargs["tools"] = instances.schemas
            several = max_steps > 1
            super().__init__(
                task,
                tokenizer,
                max_prompt_tokens=max_prompt_tokens,
                multi_turn=several,
                template_kwargs=kwargs,
                **keywords,
            )
            self._opened = ExitStack()  # what close() closes, once all of it is there
            self._rules = self._make_rules(instances, budgets or Budgets(), max_steps) if several else None
            self._opened = opened.pop_all()
        self._dialogs: list[Dialog | None] = [None] * self.batch_size[0]
        self._rows: list[TensorDictBase] = [TensorDict()] * self.batch_size[0]  # what was drawn for each
        self._episodes = [-1] * self.batch_size[0]
        self._blocks: dict[int, list[tuple[int, Example]]] = {}  # the prompts of an episode

    def _make_specs(self) -> None:
        super()._make_specs()
        if self.multi_turn:
            turn = Unbounded(shape=self.batch_size, dtype=torch.int64, device=self.device)
            self.observation_spec = self._group(**dict(self.observation_spec.items()), turn=turn)

    def _make_rules(self, instances: Instances | None, budgets: Budgets, max_steps: int) -> Rules:
        turns = TurnTokens(self.tokenizer, self.template_kwargs)
        partner: Partner = GradedTurns(self.grader, turns)
        if instances is not None:
            partner = ToolPartner.of(
                self, instances, budgets, {name: one for name, one in self.template_kwargs.items() if name != "tools"}
            )
        bound = sys.maxsize if self.max_prompt_tokens is None else self.max_prompt_tokens + 1
        return Rules(partner, turns, max_steps, bound)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self._rules is None:
            return super()._reset(tensordict, **kwargs)
        asked = None if tensordict is None else tensordict.get("_reset", None)
        chosen = [True] * len(self._dialogs) if asked is None else asked.reshape(len(self._dialogs)).tolist()
        if asked is None:  # all begin together, with prompts that nobody has had
            self._episodes = [max(self._episodes)] * len(self._episodes)
        indexes = [index for index, is_chosen in enumerate(chosen) if is_chosen]
        self._leave(indexes)
        begun = {index: self._begin(index) for index in indexes}
        for index, talk in begun.items():
            prompt_ids = talk.result().prompt_ids or self._rows[index].get(keys.PROMPT_TOKENS).tolist()
            self._dialogs[index] = Dialog(talk.result(), prompt_ids, self._rules)
        first = min(self._episodes)
        self._blocks = {episode: block for episode, block in self._blocks.items() if episode >= first}
        return self._stack([TensorDict(self._observation(index), []) for index in range(len(self._dialogs))])

    def _begin(self, index: int) -> Future[Any]:
        """Draw the row's next prompt, and open its dialog."""
        assert self._rules is not None
        self._episodes[index] += 1
        episode = self._episodes[index]
        if episode not in self._blocks:
            self._blocks[episode] = self.stream.draw(len(self._dialogs) // self.repeats)
        group, sample = divmod(index, self.repeats)
        group_id, example = self._blocks[episode][group]
        prompt_ids = self.prompt_ids(example)
        self._rows[index] = prompt_rows(group_id, example, prompt_ids, self.repeats)[sample]
        seed = sample_seed(self.stream.seed, group_id)
        return self._rules.partner.begin(GroupRequest(group_id, prompt_ids, self.repeats, seed, example), sample)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._rules is None:
            return super()._step(tensordict)
        asked = tensordict.get("_step", None)
        rows = tensordict.unbind(0)
        chosen = [True] * len(rows) if asked is None else asked.reshape(len(rows)).tolist()
        answered = [self._follow(index, row) for index, row in enumerate(rows) if chosen[index]]
        for future in answered:
            future.result()
        steps = [self._next(index) for index in range(len(rows))]
        if self.compute_reward:
            self._grade([step for step, is_chosen in zip(steps, chosen) if is_chosen])
            not_asked = [step for step, is_chosen in zip(steps, chosen) if not is_chosen]
            self._write_nothing(not_asked)
        return self._stack([step.get("next") for step in steps])

    def _follow(self, index: int, row: TensorDictBase) -> Future[None]:
        """Give a dialog its turn; resolved once it can go on, or is over."""
        dialog = self._dialogs[index]
        if dialog is None or dialog.is_over:
            raise ValueError(f"the dialog of row {index} is over; reset the row before the next step.")
        if row.get(keys.PROMPT_TOKENS).tolist() != dialog.ids:
            raise ValueError(
                f"row {index} answers another prompt than the environment has given; step with what reset or the last "
                "step returned."
            )
        ids = response_ids(row).cpu()
        followed: Future[None] = promised()

        def then(future: Future[Any], handle: Callable[[Any], None]) -> None:
            def done(result: Future[Any]) -> None:
                try:
                    handle(result.result())
                except BaseException as error:  # it belongs to whoever steps
                    followed.set_exception(error)

            future.add_done_callback(done)

        said = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int64), self._truncated(ids))
        dialog.follow(said, then, partial(followed.set_result, None))
        return followed

    def _observation(self, index: int) -> dict[str, Any]:
        """What the policy is to answer."""
        dialog, row = self._dialogs[index], self._rows[index]
        assert dialog is not None
        prompt = torch.tensor(dialog.ids, dtype=torch.int64)
        return {
            **{key: row.get(key) for key in DRAWN},
            keys.TURN: torch.tensor(dialog.num_turns),
            "tokens": {"prompt": prompt},
            "masks": {"all_attention_mask": torch.ones_like(prompt, dtype=torch.bool)},
        }

    def _next(self, index: int) -> TensorDictBase:
        """A row as its grader reads it, with what step returns under ``next``."""
        dialog = self._dialogs[index]
        assert dialog is not None
        text = SampledText(self.decode(dialog.last), dialog.last.tolist(), dialog.record)
        ends = {name: flag & dialog.is_over for name, (flag,) in done_entries(torch.tensor([dialog.truncated])).items()}
        drawn = {key: self._rows[index].get(key) for key in DRAWN}
        return TensorDict({**drawn, "text": {"response": text}, "next": {**self._observation(index), **ends}}, [])

    def _grade(self, steps: Sequence[TensorDictBase]) -> None:
        """Those that have ended, siblings together; the others have earned nothing yet."""
        ended: dict[int, list[TensorDictBase]] = {}
        for step in steps:
            if step[keys.DONE]:
                ended.setdefault(int(step[keys.GROUP_ID]), []).append(step)
        futures = [self.grader.scores(graded_texts(group)) for group in ended.values()]
        for group, scores in zip(ended.values(), futures, strict=True):
            self._write(group, scores.result())
        self._write_nothing([step for step in steps if not step[keys.DONE]])

    def _write_nothing(self, steps: Sequence[TensorDictBase]) -> None:
        nothing = Score(dict.fromkeys(self.task.term_weights, 0.0), success=False)
        if steps:
            self._write(steps, [nothing] * len(steps))

    def _leave(self, indexes: Sequence[int]) -> None:
        """Let go of the dialogs that are still open."""
        for index in indexes:
            dialog, self._dialogs[index] = self._dialogs[index], None
            if dialog is not None and not dialog.is_over:
                dialog.talk.leave()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the tools, if there are any."""
        self._leave(range(len(self._dialogs)))
        self._opened.close()
        super().close(raise_if_closed=raise_if_closed)


def _check(max_steps: int, tools: Tools | None, environment: Any) -> None:
    if max_steps < 1:
        raise ValueError(f"max_steps={max_steps} leaves no turn; use 1 or more.")
    if tools is not None and environment is not None:
        raise ValueError("both tools and environment are given; give the tools as methods of the environment.")
    if max_steps == 1 and (tools is not None or environment is not None):
        raise ValueError("max_steps=1 leaves no turn after a tool has answered; use max_steps=2 or more.")


def _spec(tools: Tools | None, environment: str | Callable[[], Any] | None, opened: ExitStack) -> InstanceSpec | None:
    """What the instances are made of; objects travel in a file that is there as long as they are."""
    given: Any = tools if environment is None else environment
    if given is None:
        return None
    if isinstance(given, str):
        return instance_spec(*((given, None) if environment is None else (None, given)))
    functions = [given] if environment is not None else list(given)
    names = tuple(function.__name__ for function in functions)
    path = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_"))) / f"tools{PICKLED}"
    path.write_bytes(pickled(dict(zip(names, functions, strict=True))))
    return InstanceSpec("factory" if environment is not None else "functions", str(path), names)
