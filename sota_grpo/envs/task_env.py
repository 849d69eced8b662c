"""A task as a TorchRL environment over token ids, single-turn or multi-turn; and training rows made from its steps.

The steps of a dialog with prompt ``p p``, a response ``a a``, an answer ``u u`` and a second response ``a``::

    turn  tokens.prompt      tokens.response    next.tokens.prompt        next.done
    0     p p                a a                p p a a u u               False
    1     p p a a u u        a                  p p a a u u a             True

:class:`DialogRows` joins them into one training row.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase

from sota_grpo import keys
from sota_grpo.engines import stepping
from sota_grpo.envs.chat_tokens import num_shared
from sota_grpo.envs.dialogs import Dialog, GradedTurns, Responder, Rules, ToolResponder, TurnTokens
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.policy.causal import end_token_ids
from sota_grpo.rewards.functions import PICKLED, pickled
from sota_grpo.rewards.grading import FailureLog, Grader, guarded_scores
from sota_grpo.rl.collate import finish_rows, known_log_probs, prompt_rows, response_ids, without_padding
from sota_grpo.rl.records import GroupRequest, Sample, SampledText, Score, sample_seed
from sota_grpo.rl.table import RowTable, in_place
from sota_grpo.rl.task import Scorer, Task
from sota_grpo.rl.transforms import RowTransform, graded_texts, write_scores
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.wrappers import with_tools
from sota_grpo.workers.instances import Instances, InstanceSpec

#: Tools as a config writes them (``FILE.py:NAME,NAME``), or the functions.
Tools = str | Sequence[Callable[..., Any]]
_DRAWN = (keys.QUERY, keys.ANSWER, keys.EXTRA, keys.GROUP_ID, keys.SAMPLE_ID)  # written by reset, kept by step
_GRADED = (keys.REWARD, keys.REWARD_TERMS, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO)


class TaskEnv(PromptSource, EnvBase):
    """A task as a TorchRL environment: reset draws prompts, the policy responds with tokens, step grades responses.

    ``batch_size=[num_envs]``, rows lazily stacked and ragged. Reset writes ``query``, ``answer``, ``extra``,
    ``group_id``, ``sample_id``, ``tokens.prompt`` and ``masks.all_attention_mask`` of the next prompts, each for
    ``repeats`` successive rows; other seeds and other examples have other group ids. Step reads ``tokens.response``
    (or ``tokens.full``) and writes reward, terms (NaN: does not apply), ``success``, ``reward_error``,
    ``reward_timeout``, ``reward_info``, ``done``, ``terminated`` and ``truncated``. Text is never tokenised again.

    With ``max_steps`` above 1, the task, tools or an environment answers each response, as in training
    (:mod:`sota_grpo.envs.dialogs`). Then ``next`` has the longer prompt (the prompt, the response as it was sampled,
    the answer and the start of the policy's next turn), reward 0, and ``done`` False. The last response of a dialog
    is done and graded, and truncated if the response was cut or the context is full. ``turn`` counts the responses of
    a dialog so far. Step returns when all tool calls have finished. Calls of a server or an adapter run concurrently;
    calls of functions and local environments one after another per worker process, which up to 8 rows share.

    Rows can be reset individually: the samples of a prompt share its ``group_id`` even if they start at different
    resets. A reward that compares the responses of a group gets only those that end in the same step.

    TorchRL's wrappers do not report why a response ended, so a response counts as truncated if it does not end in an
    end token; if the pad token is EOS, the wrappers strip EOS, and no response counts as truncated.

    Args:
        task: examples, chat and score; in a dialog without tools the ``reply`` of a score is the answer.
        tokenizer: see :class:`PromptSource`; with tools, its chat template must support tools.
        num_envs: concurrent dialogs, a multiple of ``repeats``. With ``max_steps=1`` it may also be a divisor: a group
            then takes several resets, and ``GroupAdvantage(group_size=repeats)`` in a buffer waits for all of them.
        max_steps: maximum number of policy turns in a dialog.
        tools: typed functions, or ``FILE.py:NAME,NAME``.
        environment: factory of environments in TRL's protocol, or ``FILE.py:FACTORY``, or a server
            (:mod:`sota_grpo.tasks.servers`). Its ``get_reward``, if it has one, replaces the task's reward.
        tool_timeout_s: time limit in seconds of a reset, a tool call or a reward.
        repeats, shuffle, seed, grader, template_kwargs: see :class:`PromptSource`.
        max_prompt_tokens: maximum prompt length; a dialog whose later prompt is longer is truncated. None: no limit.
        compute_reward: False: step writes neither reward nor success, which your own transforms then write; without
            tools, the replies of a dialog are still those of the task's score.
        device: device of the tensors.

    Raises:
        ValueError: ``num_envs`` is neither a multiple nor (with one turn) a divisor of ``repeats``; one of these or
            ``max_steps`` is below 1; ``max_steps`` is 1 with tools; tools and an environment are given; there are no
            examples. In reset: the first one is not of all rows. In
            step: the dialog of a row is over, or ``tokens.prompt`` is not what the environment returned.
        KeyError: in step, a row has neither ``tokens.response`` nor ``tokens.full``.
        UserError: a prompt is longer than ``max_prompt_tokens``; the tools or the chat template cannot be used.

    Example::

        env = TaskEnv(make_task("arithmetic"), tokenizer, num_envs=16, repeats=8)
        rows = env.rollout(max_steps=1, policy=policy)      # policy reads tokens.prompt, writes tokens.response
        env = TaskEnv(task, tokenizer, num_envs=16, repeats=8, max_steps=4, tools=[multiply])
        steps = env.rollout(4, policy, break_when_all_done=True)
        rows = DialogRows(tokenizer, group_size=8).add(steps)
    """

    batch_locked = True
    input_mode = "tokens"  # read by TorchRL's reward transforms

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        num_envs: int = 1,
        repeats: int = 1,
        max_steps: int = 1,
        tools: Tools | None = None,
        environment: str | Callable[[], Any] | None = None,
        tool_timeout_s: float = 30.0,
        shuffle: bool = True,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        compute_reward: bool = True,
        grader: Grader | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ):
        few = repeats > num_envs > 0 == repeats % num_envs and max_steps == 1
        if repeats < 1 or num_envs < 1 or (num_envs % repeats and not few):
            fix = max(1, num_envs // max(1, repeats)) * max(1, repeats)
            raise ValueError(
                f"num_envs={num_envs} must be a positive multiple of the group size repeats={repeats} (with "
                f"max_steps=1 also a divisor); use num_envs={fix} and repeats={max(1, repeats)}."
            )
        has_tools = tools is not None or environment is not None
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps} allows no policy turn; use 1 or more.")
        if tools is not None and environment is not None:
            raise ValueError("both tools and environment are given; give the tools as methods of the environment.")
        if max_steps == 1 and has_tools:
            raise ValueError("max_steps=1 allows no policy turn after a tool result; use max_steps=2 or more.")
        fixed = kwargs = dict(template_kwargs or {})
        with ExitStack() as opened:
            if has_tools:
                spec = _instance_spec(tools, environment, opened)
                instances = opened.enter_context(closing(Instances(spec, timeout_s=tool_timeout_s)))
                instances.wait_ready()
                task = with_tools(task, has_reward=instances.has_reward, adds_task_terms=not instances.has_reward)
                kwargs = {**fixed, "tools": instances.schemas}
            EnvBase.__init__(self, device=device, batch_size=(num_envs,))
            PromptSource.__init__(
                self,
                task,
                tokenizer,
                repeats=repeats,
                shuffle=shuffle,
                seed=seed,
                max_prompt_tokens=max_prompt_tokens,
                grader=grader,
                multi_turn=max_steps > 1,
                template_kwargs=kwargs,
            )
            turns = TurnTokens(tokenizer, kwargs)
            graded = GradedTurns(self.grader, turns)
            responder: Responder = ToolResponder(self, instances, fixed) if has_tools else graded
            bound = sys.maxsize if max_prompt_tokens is None else max_prompt_tokens + 1
            self._rules = Rules(responder, turns, max_steps, bound)
            self._opened = opened.pop_all()
        self.compute_reward = compute_reward
        self._dialogs: list[Dialog | None] = [None] * num_envs
        self._rows: list[TensorDictBase] = [TensorDict()] * num_envs  # the entries that reset wrote for each row
        self._begin_anew()
        self._make_specs()

    def _begin_anew(self) -> None:
        self._episodes = [-1] * self.batch_size[0]
        self._prompts: dict[int, tuple[GroupRequest, list[TensorDictBase]]] = {}  # by prompt number: request and rows
        self._num_drawn = 0

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.stream.reseed(seed)
            self._begin_anew()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        num_envs, mask = self.batch_size[0], None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:  # all rows start together, with new prompts
            self._episodes = [max(self._episodes)] * num_envs
        chosen = self._chosen(mask)
        unknown = [index for index in range(num_envs) if index not in chosen and self._dialogs[index] is None]
        if unknown:
            raise ValueError(f"row {unknown[0]} has no dialog yet; reset all rows before single ones.")
        self._leave(chosen)
        for index, future in [(index, self._begin(index)) for index in chosen]:
            episode = future.result()
            prompt_ids = episode.prompt_ids or self._rows[index].get(keys.PROMPT_TOKENS).tolist()
            self._dialogs[index] = Dialog(episode, prompt_ids, self._rules)
        first = min(self._episodes) * num_envs // self.repeats
        self._prompts = {number: drawn for number, drawn in self._prompts.items() if number >= first}
        return self._stack([TensorDict(self._observation(index), []) for index in range(num_envs)])

    def _chosen(self, mask: torch.Tensor | None) -> list[int]:
        return [*range(self.batch_size[0])] if mask is None else mask.flatten().nonzero().flatten().tolist()

    def _begin(self, index: int) -> Future[Any]:
        """Sample the next prompt of row ``index`` and open its dialog; the future resolves to the episode."""
        self._episodes[index] += 1
        number, sample = divmod(self._episodes[index] * self.batch_size[0] + index, self.repeats)
        while self._num_drawn <= number:
            self.stream.name_apart()
            ((group_id, example),) = self.stream.draw(1)
            prompt_ids, seed = self.prompt_ids(example), sample_seed(self.stream.seed, group_id)
            request = GroupRequest(group_id, prompt_ids, self.repeats, seed, example)
            rows = prompt_rows(group_id, example, prompt_ids, self.repeats)
            self._prompts[self._num_drawn] = request, rows
            self._num_drawn += 1
        request, rows = self._prompts[number]
        self._rows[index] = rows[sample]
        return stepping.Task(self._rules.responder.begin(request, sample))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows, chosen = tensordict.unbind(0), self._chosen(tensordict.get("_step", None))
        for future in [self._follow(index, rows[index]) for index in chosen]:
            future.result()
        steps = [self._next(index) for index in range(len(rows))]
        if self.compute_reward:
            self._grade(steps, chosen)
        return self._stack([step.get("next") for step in steps])

    def _follow(self, index: int, row: TensorDictBase) -> Future[None]:
        """Add a response to its dialog; the future resolves when the response is answered or the dialog is over."""
        dialog = self._dialogs[index]
        if dialog is None or dialog.is_over:
            raise ValueError(f"the dialog of row {index} is over or has not begun; reset the row before the next step.")
        if row.get(keys.PROMPT_TOKENS).tolist() != dialog.ids:
            raise ValueError(
                f"tokens.prompt of row {index} is not the prompt that the environment returned; call step with the "
                "tensordict of reset or of the last step, plus the responses."
            )
        ids = without_padding(row, response_ids(row)).cpu()
        sample = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int64), self._truncated(ids))
        return stepping.Task(dialog.follow(sample))

    def _observation(self, index: int) -> dict[str, Any]:
        dialog = self._dialog(index)
        prompt = torch.tensor(dialog.ids, dtype=torch.int64)
        masks = {"all_attention_mask": torch.ones_like(prompt, dtype=torch.bool)}
        observed = {**self._drawn(index), "tokens": {"prompt": prompt}, "masks": masks}
        return {**observed, keys.TURN: torch.tensor(dialog.num_turns)} if self.multi_turn else observed

    def _dialog(self, index: int) -> Dialog:
        dialog = self._dialogs[index]
        assert dialog is not None
        return dialog

    def _drawn(self, index: int) -> dict[str, Any]:
        return {key: self._rows[index].get(key) for key in _DRAWN}

    def _next(self, index: int) -> TensorDictBase:
        """Return the row in the form that graders read, with the output of step under ``next``."""
        dialog = self._dialog(index)
        text = SampledText(self.decode(dialog.last), dialog.last.tolist(), dialog.record, self.opens_thinking)
        truncated = dialog.is_over and dialog.truncated
        ends = {"done": dialog.is_over, "terminated": dialog.is_over and not truncated, "truncated": truncated}
        after = self._observation(index) | {name: torch.tensor([flag]) for name, flag in ends.items()}
        return TensorDict({**self._drawn(index), "text": {"response": text}, "next": after}, [])

    def _grade(self, steps: Sequence[TensorDictBase], chosen: Sequence[int]) -> None:
        """Grade the dialogs that ended in this step, group by group; the reward of all other rows is 0."""
        ended: dict[int, list[TensorDictBase]] = {}
        others: list[TensorDictBase] = []
        for index, step in enumerate(steps):
            is_graded = index in chosen and step[keys.DONE]
            (ended.setdefault(int(step[keys.GROUP_ID]), []) if is_graded else others).append(step)
        futures = [self.grader.scores(graded_texts(group)) for group in ended.values()]
        for group, scores in zip(ended.values(), futures, strict=True):
            self._write(group, scores.result())
        if others:
            nothing = Score(dict.fromkeys(self.task.term_weights, 0.0), success=False)
            self._write(others, [nothing] * len(others))

    def _write(self, rows: list[TensorDictBase], scores: Sequence[Score]) -> None:
        """Write the scores under ``next``; every row gets all terms, and a term that does not apply is NaN."""
        in_place(write_scores)(lazy_stack(rows), scores, self.task.term_weights)
        for row, score in zip(rows, scores, strict=True):
            for name in self.task.term_weights:
                if score.terms[name] is None:
                    row.set((*keys.REWARD_TERMS, name), torch.tensor([math.nan]))

    def _stack(self, rows: list[TensorDictBase]) -> LazyStackedTensorDict:
        stacked = lazy_stack(rows)
        return stacked if self.device is None else stacked.to(self.device)

    def _truncated(self, response: torch.Tensor) -> bool:
        if response.numel() and int(response[-1]) in end_token_ids(self.tokenizer):
            return False
        return self.tokenizer.eos_token_id != self.tokenizer.pad_token_id

    def _leave(self, indexes: Sequence[int]) -> None:
        """Abandon the dialogs that are still open."""
        for index in indexes:
            dialog, self._dialogs[index] = self._dialogs[index], None
            if dialog is not None and not dialog.is_over:
                dialog.episode.leave()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the open dialogs and close the tools, not the grader; idempotent. ``raise_if_closed`` has no effect."""
        self._leave(range(len(self._dialogs)))
        self._opened.close()
        super().close(raise_if_closed=raise_if_closed)

    def fake_tensordict(self) -> TensorDictBase:
        """Return zeros in the shape of the specs, lazily stacked like real rows, whose lengths differ."""
        return super().fake_tensordict().to_lazystack(0)

    def _make_specs(self) -> None:
        shape, device = self.batch_size, self.device
        column = torch.Size((*shape, 1))
        text = NonTensor(shape=shape, example_data="text", device=device)
        index = Unbounded(shape=shape, dtype=torch.int64, device=device)
        turn = {keys.TURN: index.clone()} if self.multi_turn else {}
        self.observation_spec = self._group(
            **turn,
            **{key: text.clone() for key in _DRAWN[:3]},
            **{key: index.clone() for key in _DRAWN[3:]},
            tokens=self._ragged(prompt=Unbounded(shape=(-1,), dtype=torch.int64, device=device)),
            masks=self._ragged(all_attention_mask=Unbounded(shape=(-1,), dtype=torch.bool, device=device)),
        )
        response = Categorical(len(self.tokenizer), shape=(-1,), dtype=torch.int64, device=device)
        self.action_spec = self._group(tokens=self._ragged(response=response))
        flag = Binary(n=1, shape=column, dtype=torch.bool, device=device)
        self.done_spec = self._group(done=flag.clone(), terminated=flag.clone(), truncated=flag.clone())
        amount = Unbounded(shape=column, dtype=torch.float32, device=device)
        terms = self._group(**{name: amount.clone() for name in self.task.term_weights})
        flags = {name: flag.clone() for name in ("success", "reward_error", "reward_timeout")}
        graded = {"reward": amount, "reward_terms": terms, "reward_info": text.clone(), **flags}
        self.reward_spec = self._group(**(graded if self.compute_reward else {}))

    def _group(self, **entries: Any) -> Composite:
        return Composite(entries, shape=self.batch_size, device=self.device)

    def _ragged(self, **entries: Any) -> StackedComposite:
        """Return one spec per row, because rows of different lengths cannot share a dense spec."""
        row = Composite(entries, device=self.device)
        return StackedComposite(*(row.clone() for _ in range(self.batch_size[0])), dim=0)


def _instance_spec(tools: Tools | None, environment: str | Callable[[], Any] | None, opened: ExitStack) -> InstanceSpec:
    """Return the spec of the instances; objects are pickled to a temporary file, which ``opened`` removes."""
    kind = "functions" if environment is None else "factory"
    offered: Any = tools if environment is None else environment
    if isinstance(offered, str):
        return instance_spec(offered, kind)
    functions = [*offered] if environment is None else [offered]
    names = tuple(function.__name__ for function in functions)
    path = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_"))) / f"tools{PICKLED}"
    path.write_bytes(pickled(dict(zip(names, functions, strict=True))))
    return InstanceSpec(kind, str(path), names)


class _StoredDialog(Dialog):
    """The steps of a dialog so far; ``final``: its last step, None before that; ``lacks``: what its row cannot have."""

    def __init__(self, prompt_ids: Sequence[int]):
        super().__init__(None, prompt_ids)
        self.lacks: set[Any] = set()
        self.final: TensorDictBase | None = None


class DialogRows:
    """Joins the environment steps of each dialog into one training row, as ``finish_rows`` of ``rl.collate`` makes it.

    The row has all tokens of the dialog, an assistant mask that is True on the sampled ones, and the reward of the last
    step. The rows of a group are returned together, once its last dialog has ended; until then its steps are stored.
    The prompt of the rows is the common prefix of the group's prompts. ``group_size`` is the environment's ``repeats``.

    Each step must have ``tokens.response`` (or ``tokens.full``). ``log_probs.response`` (or ``log_probs.full``) and
    ``next.policy_version`` (TorchRL's ``PolicyVersion`` with integers) are optional: without them the rows have no
    ``log_probs`` or no versions.

    Example::

        rows = DialogRows(tokenizer, group_size=8)
        for steps in collector:
            for row in rows.add(steps): ...
    """

    def __init__(self, tokenizer: Any, group_size: int = 1):
        self._tokenizer, self._group_size = tokenizer, group_size
        self._groups: dict[int, dict[int, _StoredDialog]] = {}

    def add(self, steps: TensorDictBase) -> list[TensorDictBase]:
        """Add steps; return the rows of each group whose last dialog has ended, in order of ``sample_id``.

        ``steps`` have any batch shape in which those of a dialog are in order: ``[N, T]`` of a rollout or a collector,
        also flattened. Steps that follow the end of their dialog are ignored until its rows are returned. ValueError if
        an earlier step of a dialog is missing, or a prompt does not begin with the dialog so far.
        """
        complete: list[int] = []
        for step in _each(steps):
            group_id, sample_id = int(step[keys.GROUP_ID]), int(step[keys.SAMPLE_ID])
            group = self._groups.setdefault(group_id, {})
            if sample_id in group and group[sample_id].final is not None:
                continue
            prompt, turn = step[keys.PROMPT_TOKENS].tolist(), int(step.get(keys.TURN, torch.zeros(())))
            if turn == 0:
                group[sample_id] = _StoredDialog(prompt)
            dialog = group.get(sample_id)
            if dialog is None or dialog.num_turns != turn:
                raise ValueError(
                    f"turn {turn} of group {group_id}, sample {sample_id}, does not follow the turn that was added "
                    "last; add all steps of a dialog, in order."
                )
            if prompt[: len(dialog.ids)] != dialog.ids:
                raise ValueError(
                    f"the prompt of turn {turn} of group {group_id}, sample {sample_id}, does not begin with the "
                    "tokens of the dialog so far; pass token ids on, do not tokenise the text again."
                )
            if turn:
                dialog.add_observation(prompt[len(dialog.ids) :])
            dialog.add_turn(self._turn(dialog, step, len(prompt)))
            if step[keys.DONE].any():
                dialog.final = step
                if sum(other.final is not None for other in group.values()) == self._group_size:
                    complete.append(group_id)
        return [row for group_id in complete for row in self._finished(self._groups.pop(group_id))]

    def _turn(self, dialog: _StoredDialog, step: TensorDictBase, num_before: int) -> Sample:
        ids = without_padding(step, response_ids(step)).cpu()
        log_probs, version = step.get(("log_probs", "response"), None), step.get(("next", "policy_version"), None)
        if log_probs is None and (full := step.get(keys.LOG_PROBS, None)) is not None:
            log_probs = full[num_before:]
        if log_probs is None:
            dialog.lacks.add("log_probs")
        if not isinstance(version, torch.Tensor):
            dialog.lacks |= {keys.TOKEN_VERSION, keys.POLICY_VERSION}
            version = torch.zeros(())
        log_probs = torch.zeros(len(ids)) if log_probs is None else without_padding(step, log_probs).cpu()
        versions = version.cpu().long().expand(len(ids))
        return Sample(ids, known_log_probs(log_probs), versions, bool(step[keys.TRUNCATED].any()))

    def _finished(self, group: dict[int, _StoredDialog]) -> list[TensorDictBase]:
        dialogs = [dialog for _, dialog in sorted(group.items())]
        common = num_shared([dialog.prompt_ids for dialog in dialogs])
        rows = []
        for dialog in dialogs:
            assert dialog.final is not None
            prompt = TensorDict({key: dialog.final.get(key) for key in _DRAWN}, [])
            prompt[keys.PROMPT_TOKENS] = torch.tensor(dialog.prompt_ids[:common], dtype=torch.int64)
            (row,) = finish_rows(prompt, [dialog.sample(common)], self._tokenizer)
            for key in (keys.SAMPLE_ID, *_GRADED):
                if (value := dialog.final.get(key, None)) is not None:
                    row.set(key, value)
            for name, value in [*row.get(keys.REWARD_TERMS, {}).items()]:
                if value.isnan().any():  # the term does not apply
                    del row[(*keys.REWARD_TERMS, name)]
            for key in dialog.lacks:
                del row[key]
            rows.append(row)
        return rows


def _each(steps: TensorDictBase) -> Iterator[TensorDictBase]:
    """Yield the single steps, row by row, each row in order of time."""
    if not steps.batch_dims:
        yield steps
        return
    for step in steps.unbind(0):
        yield from _each(step)


class ScoreResponse(RowTransform):
    """A transform that grades responses: writes the reward ``sum_k weight_k * term_k``, the terms and the success.

    Reads ``("text", "response")``, ``query``, ``answer`` and, if present, ``extra`` (JSON); writes
    ``("next", "reward")``, ``("next", "reward_terms", name)``, ``("next", "success")``, ``("next", "reward_error")``
    and ``("next", "reward_timeout")``, each ``[N, 1]``, and ``("next", "reward_info")`` (JSON). A row lacks a term that
    does not apply. If the grader raises, reports an error or returns a non-finite term, the row gets ``reward_error``
    and 0 for all terms that apply, and the run continues. An environment's step grades every row. Elsewhere, a batch
    that already has ``reward_error`` is not graded again; if only some rows of a lazy stack have it, the others are.

    Args:
        score: ``(response, example) -> Score``; a method ``score_group``, if it has one, gets the whole batch.
        term_weights: weight of each term; the grader must return exactly these names.

    Raises:
        KeyError: the grader returns other terms than ``term_weights`` names, which is a mistake in the task.
        ValueError: a term does not apply to a row of a dense batch.

    >>> def exact(text, example):
    ...     return Score({"exact": float(text == example.answer)}, success=text == example.answer)
    >>> from tensordict import TensorDict
    >>> rows = TensorDict({"text": {"response": "4"}, "query": "2+2?", "answer": "4"}).unsqueeze(0)
    >>> ScoreResponse(exact, {"exact": 2.0})(rows)["next", "reward"].tolist()
    [[2.0]]
    """

    written_key = keys.REWARD_ERROR  # unlike reward and success, no environment writes it

    def __init__(self, score: Scorer, term_weights: Mapping[str, float]) -> None:
        written = [keys.REWARD, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO]
        terms = [(*keys.REWARD_TERMS, name) for name in term_weights]
        super().__init__(in_keys=[keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER], out_keys=[*written, *terms])
        self.score, self.term_weights = score, dict(term_weights)
        self._failures = FailureLog()

    def _write(self, rows: RowTable) -> None:
        scores = guarded_scores(self.score, self.term_weights, graded_texts(rows))
        write_scores(rows, [self._failures.add(score) for score in scores], self.term_weights)
