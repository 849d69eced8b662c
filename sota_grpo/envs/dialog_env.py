"""Dialogs as a TorchRL environment: a response that is answered leads to a longer prompt, the last one to the reward.

The steps of one row, of a policy ``a`` that is answered ``u`` once::

    turn  tokens.prompt      tokens.response    next.tokens.prompt        next.done
    0     p p                a a                p p a a u u               False
    1     p p a a u u        a                  p p a a u u a             True

:class:`DialogRows` makes one row of them, as training reads it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Unbounded

from sota_grpo import keys
from sota_grpo.engines import stepping
from sota_grpo.envs.agents import ToolPartner
from sota_grpo.envs.chat_tokens import num_shared
from sota_grpo.envs.dialogs import Dialog, GradedTurns, Partner, Rules, TurnTokens
from sota_grpo.envs.task_env import DRAWN, TaskEnv
from sota_grpo.rewards.functions import PICKLED, pickled
from sota_grpo.rl.collate import done_entries, finish_rows, known_log_probs, prompt_rows, response_ids
from sota_grpo.rl.records import Example, GroupRequest, Sample, SampledText, Score, sample_seed
from sota_grpo.rl.task import Task
from sota_grpo.rl.transforms import graded_texts
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.wrappers import with_tools
from sota_grpo.workers.instances import Instances, InstanceSpec

#: What ``tools`` and ``environment`` may be: written as in a config, or the objects themselves.
Tools = str | Sequence[Callable[..., Any]]
_GRADED = (keys.REWARD, keys.REWARD_TERMS, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO)


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
        max_prompt_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ):
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps} leaves no turn; use 1 or more.")
        if tools is not None and environment is not None:
            raise ValueError("both tools and environment are given; give the tools as methods of the environment.")
        if max_steps == 1 and (tools is not None or environment is not None):
            raise ValueError("max_steps=1 leaves no turn after a tool has answered; use max_steps=2 or more.")
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
            self._rules = self._make_rules(instances, max_steps) if several else None
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

    def _make_rules(self, instances: Instances | None, max_steps: int) -> Rules:
        turns = TurnTokens(self.tokenizer, self.template_kwargs)
        partner: Partner = GradedTurns(self.grader, turns)
        if instances is not None:
            own = {name: value for name, value in self.template_kwargs.items() if name != "tools"}
            partner = ToolPartner(self, instances, own)
        bound = sys.maxsize if self.max_prompt_tokens is None else self.max_prompt_tokens + 1
        return Rules(partner, turns, max_steps, bound)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self._rules is None:
            return super()._reset(tensordict, **kwargs)
        mask = None if tensordict is None else tensordict.get("_reset", None)
        chosen = [True] * len(self._dialogs) if mask is None else mask.reshape(len(self._dialogs)).tolist()
        if mask is None:  # all begin together, with prompts that nobody has had
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
            self.stream.name_apart()
            self._blocks[episode] = self.stream.draw(len(self._dialogs) // self.repeats)
        group, sample = divmod(index, self.repeats)
        group_id, example = self._blocks[episode][group]
        prompt_ids = self.prompt_ids(example)
        self._rows[index] = prompt_rows(group_id, example, prompt_ids, self.repeats)[sample]
        seed = sample_seed(self.stream.seed, group_id)
        request = GroupRequest(group_id, prompt_ids, self.repeats, seed, example)
        return stepping.Task(self._rules.partner.begin(request, sample))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._rules is None:
            return super()._step(tensordict)
        mask = tensordict.get("_step", None)
        rows = tensordict.unbind(0)
        chosen = [True] * len(rows) if mask is None else mask.reshape(len(rows)).tolist()
        answered = [self._follow(index, row) for index, row in enumerate(rows) if chosen[index]]
        for future in answered:
            future.result()
        steps = [self._next(index) for index in range(len(rows))]
        if self.compute_reward:
            self._grade(steps, chosen)
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
        said = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int64), self._truncated(ids))
        return stepping.Task(dialog.follow(said))

    def _observation(self, index: int) -> dict[str, Any]:
        """What the policy is to answer."""
        dialog = self._dialogs[index]
        assert dialog is not None
        observed = self._observed(self._rows[index], torch.tensor(dialog.ids, dtype=torch.int64))
        return {**observed, keys.TURN: torch.tensor(dialog.num_turns)}

    def _next(self, index: int) -> TensorDictBase:
        dialog = self._dialogs[index]
        assert dialog is not None
        text = SampledText(self.decode(dialog.last), dialog.last.tolist(), dialog.record)
        ends = {
            name: flags[0] & dialog.is_over for name, flags in done_entries(torch.tensor([dialog.truncated])).items()
        }
        return self._stepped(self._rows[index], text, self._observation(index) | ends)

    def _grade(self, steps: Sequence[TensorDictBase], chosen: Sequence[bool]) -> None:
        """Those that have ended in this step, siblings together; the others have earned nothing."""
        ended: dict[int, list[TensorDictBase]] = {}
        others: list[TensorDictBase] = []
        for step, is_chosen in zip(steps, chosen, strict=True):
            siblings = ended.setdefault(int(step[keys.GROUP_ID]), []) if is_chosen and step[keys.DONE] else others
            siblings.append(step)
        futures = [self.grader.scores(graded_texts(group)) for group in ended.values()]
        for group, scores in zip(ended.values(), futures, strict=True):
            self._write(group, scores.result())
        if others:
            nothing = Score(dict.fromkeys(self.task.term_weights, 0.0), success=False)
            self._write(others, [nothing] * len(others))

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


def _spec(tools: Tools | None, environment: str | Callable[[], Any] | None, opened: ExitStack) -> InstanceSpec | None:
    """What the instances are made of; objects travel in a file that is there as long as they are."""
    kind = "functions" if environment is None else "factory"
    spec: Any = tools if environment is None else environment
    if spec is None:
        return None
    if isinstance(spec, str):
        return instance_spec(spec, kind)
    functions = list(spec) if kind == "functions" else [spec]
    names = tuple(function.__name__ for function in functions)
    path = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_"))) / f"tools{PICKLED}"
    path.write_bytes(pickled(dict(zip(names, functions, strict=True))))
    return InstanceSpec(kind, str(path), names)


@dataclass
class _Gathered:
    """What is known of a dialog; ``last`` is its last step, once it is there."""

    dialog: Dialog
    has_log_probs: bool = True
    has_versions: bool = True
    last: TensorDictBase | None = None


class DialogRows:
    """Makes one row of the steps of each dialog, as :func:`~sota_grpo.rl.collate.finish_rows` makes it of a sample.

    A dialog's row has all that was said, the assistant mask on what the policy sampled, and the reward of the last
    step. Rows come as whole groups, as soon as the last sibling has ended; what has not ended waits for the next
    steps. The row's prompt is what the siblings' prompts begin with alike.

    Read of a step are ``tokens.response`` (or ``tokens.full``), and where they are there ``log_probs.response`` (or
    ``log_probs.full``) and ``next.policy_version`` (TorchRL's ``PolicyVersion`` with integers); without them the rows
    lack ``log_probs`` or the versions.

    Args:
        tokenizer: of the environment.
        group_size: its ``repeats``.

    Example::

        rows = DialogRows(tokenizer, group_size=8)
        for steps in collector:
            for row in rows.add(steps): ...
    """

    def __init__(self, tokenizer: Any, group_size: int = 1):
        self._tokenizer, self._group_size = tokenizer, group_size
        self._groups: dict[int, dict[int, _Gathered]] = {}

    def add(self, steps: TensorDictBase) -> list[TensorDictBase]:
        """The rows of the groups whose last dialog has ended in these steps.

        Args:
            steps: of any batch shape, in which the steps of a dialog are in order: ``[N, T]`` of a rollout or a
                collector, also flattened; those that a rollout repeats because their row had ended are left out.

        Raises:
            ValueError: a dialog's beginning is missing, or its prompt is not what was said before.
        """
        ended: set[tuple[int, int]] = set()
        complete: list[int] = []
        for step in _each(steps):
            group_id, sample_id = int(step[keys.GROUP_ID]), int(step[keys.SAMPLE_ID])
            if (group_id, sample_id) in ended:
                continue
            group = self._groups.setdefault(group_id, {})
            gathered = self._added(group, sample_id, step)
            if step[keys.DONE].any():
                gathered.last = step
                ended.add((group_id, sample_id))
                if sum(one.last is not None for one in group.values()) == self._group_size:
                    complete.append(group_id)
        return [row for group_id in complete for row in self._finished(self._groups.pop(group_id))]

    def _added(self, group: dict[int, _Gathered], sample_id: int, step: TensorDictBase) -> _Gathered:
        prompt, turn = step[keys.PROMPT_TOKENS].tolist(), int(step.get(keys.TURN, torch.zeros(())))
        if turn == 0:
            group[sample_id] = _Gathered(Dialog(None, prompt))
        gathered = group.get(sample_id)
        if gathered is None or gathered.dialog.num_turns != turn or gathered.last is not None:
            raise ValueError(
                f"turn {turn} of group {int(step[keys.GROUP_ID])}, sample {sample_id}, does not follow what was added "
                "before it; add all steps of a dialog, in order."
            )
        dialog = gathered.dialog
        if prompt[: len(dialog.ids)] != dialog.ids:
            raise ValueError(
                f"the prompt of turn {turn} of group {int(step[keys.GROUP_ID])}, sample {sample_id}, does not begin "
                "with what was said before; never tokenise a dialog again."
            )
        if turn:
            dialog.hear(prompt[len(dialog.ids) :])
        dialog.speak(self._turn(gathered, step, len(prompt)))
        return gathered

    def _turn(self, gathered: _Gathered, step: TensorDictBase, num_before: int) -> Sample:
        ids = response_ids(step).cpu()
        log_probs = step.get(("log_probs", "response"), None)
        if log_probs is None and (full := step.get(keys.LOG_PROBS, None)) is not None:
            log_probs = full[num_before:]
        version = step.get(("next", "policy_version"), None)
        if log_probs is None:
            gathered.has_log_probs, log_probs = False, torch.zeros(len(ids))
        if not isinstance(version, torch.Tensor):
            gathered.has_versions, version = False, torch.zeros(())
        return Sample(
            ids,
            known_log_probs(log_probs.cpu()),
            version.cpu().long().expand(len(ids)),
            bool(step[keys.TRUNCATED].any()),
        )

    def _finished(self, group: dict[int, _Gathered]) -> list[TensorDictBase]:
        siblings = [one for _, one in sorted(group.items())]
        common = num_shared([one.dialog.prompt_ids for one in siblings])
        samples = [one.dialog.sample(common) for one in siblings]
        rows = []
        for one, sample in zip(siblings, samples, strict=True):
            assert one.last is not None
            prompt = TensorDict({key: one.last.get(key) for key in DRAWN}, [])
            prompt[keys.PROMPT_TOKENS] = torch.tensor(one.dialog.prompt_ids[:common], dtype=torch.int64)
            (row,) = finish_rows(prompt, [sample], self._tokenizer)
            for key in (keys.SAMPLE_ID, *_GRADED):
                if (value := one.last.get(key, None)) is not None:
                    row.set(key, value)
            terms = row.get(keys.REWARD_TERMS, None)
            for name in [] if terms is None else [name for name, value in terms.items() if value.isnan().any()]:
                del row[(*keys.REWARD_TERMS, name)]  # it does not apply
            if not one.has_log_probs:
                row.pop("log_probs")
            if not one.has_versions:
                del row[keys.TOKEN_VERSION], row[keys.POLICY_VERSION]
            rows.append(row)
        return rows


def _each(steps: TensorDictBase) -> Iterator[TensorDictBase]:
    """The single steps, by rows and then by time."""
    if not steps.batch_dims:
        yield steps
        return
    for step in steps.unbind(0):
        yield from _each(step)
