"""Any task as a single-turn TorchRL environment that speaks token ids.

A response is one ragged row, ``batch_size=[]``, for :class:`TaskEnv` and the streaming collector alike. A prompt of two
tokens and a response of three, sampled by version 7 while version 8 landed::

    tokens.full               p   p   a   a   a
    masks.all_assistant_mask  .   .   x   x   x
    log_probs.full            0   0  -.4 -.1 -.9
    next.token_version       -1  -1   7   7   8      next.policy_version = 7

In a dialog of two turns, whose user turn ``u`` stands between what the policy said::

    tokens.full               p   p   a   a   u   u   a
    masks.all_assistant_mask  .   .   x   x   .   .   x
    log_probs.full            0   0  -.4 -.1  0   0  -.9
    next.token_version       -1  -1   7   7  -1  -1   8
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase

from sota_grpo import keys
from sota_grpo.envs.chat_tokens import ChatTokens, Messages
from sota_grpo.envs.prompts import PromptStream
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import Grader, LocalGrader
from sota_grpo.rl.records import Example, Sample, Score, task_of_example
from sota_grpo.rl.task import SampledText, Task
from sota_grpo.rl.transforms import graded_texts, write_scores
from sota_grpo.tasks.mixture import MixedExamples
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)

_NAMED = 10  # prompts that are left out are named up to so many


def prompt_rows(group_id: int, example: Example, prompt_ids: Sequence[int], repeats: int) -> list[TensorDictBase]:
    """The ``repeats`` sibling rows of one drawn prompt, before anything is sampled.

    Args:
        group_id: unique per draw.
        example: the problem; its raw texts travel with the row.
        prompt_ids: the templated prompt ``[P]``.
        repeats: group size; sibling ``i`` gets ``sample_id = i``.

    >>> rows = prompt_rows(3, Example("1 + 1?", "2"), [5, 6, 7], repeats=2)
    >>> [(row["group_id"].item(), row["sample_id"].item(), row["tokens", "prompt"].tolist()) for row in rows]
    [(3, 0, [5, 6, 7]), (3, 1, [5, 6, 7])]
    """
    prompt = torch.tensor(prompt_ids, dtype=torch.int64)
    texts = {keys.QUERY: example.query, keys.ANSWER: example.answer, keys.EXTRA: json.dumps(dict(example.extra))}
    shared = {key: NonTensorData(text) for key, text in texts.items()}
    group = torch.tensor(group_id)
    return [
        TensorDict(
            {**shared, keys.GROUP_ID: group, keys.SAMPLE_ID: torch.tensor(index), "tokens": {"prompt": prompt}},
            batch_size=[],
        )
        for index in range(repeats)
    ]


def finish_rows(prompt: TensorDictBase, samples: Sequence[Sample], tokenizer: Any) -> list[TensorDictBase]:
    """The rows of a sampled group: ids as they were sampled, masks, log-probs, versions, text, done.

    The text is decoded for grading and reading only; nothing is ever tokenised again. In a dialog of several turns it
    is that of the last one, and off the assistant mask log-probs are 0 and versions -1 whatever a sample has there.

    The rows share the prompt's tensors and texts, and what has one value per token is computed for all rows as one
    tensor: their entries are views of it, side by side, which no other row can see.

    Args:
        prompt: a row of :func:`prompt_rows`; its siblings have the same prompt.
        samples: responses ``[R_i]``, ``R_i >= 1``; sample ``i`` becomes the row of ``sample_id = i``.
        tokenizer: decodes the responses, special tokens left out.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(chr(96 + i) for i in ids)
    >>> (prompt,) = prompt_rows(3, Example("1 + 1?", "2"), [5, 6], repeats=1)
    >>> ids = [torch.tensor([1]), torch.tensor([2, 3])]
    >>> samples = [Sample(each, -torch.ones(len(each)), torch.full((len(each),), 7), truncated=False) for each in ids]
    >>> [(row["tokens", "full"].tolist(), row["text", "response"]) for row in finish_rows(prompt, samples, Letters())]
    [([5, 6, 1], 'a'), ([5, 6, 2, 3], 'bc')]
    """
    ids = prompt.get(keys.PROMPT_TOKENS)
    tokens = _behind(ids, [sample.token_ids for sample in samples])
    produced, log_probs, versions = _sampled(ids.shape[0], samples)
    lengths = [len(sample.token_ids) + len(ids) for sample in samples]
    attention = torch.ones_like(tokens, dtype=torch.bool)
    by_row = zip(
        samples,
        torch.arange(len(samples)).unbind(0),
        *(each.split(lengths) for each in (tokens, attention, produced, log_probs, versions)),
        *done_entries(torch.tensor([sample.truncated for sample in samples])).values(),
        strict=True,
    )
    drawn = dict(prompt.items())
    rows: list[TensorDictBase] = []
    for sample, index, full, real, said, probs, version, done, terminated, truncated in by_row:
        text = tokenizer.decode(last_turn(sample), skip_special_tokens=True)
        row = {
            **drawn,
            keys.SAMPLE_ID: index,
            "tokens": {"prompt": ids, "response": sample.token_ids, "full": full},
            "masks": {"all_attention_mask": real, "all_assistant_mask": said},
            "log_probs": {"full": probs},
            "text": {"response": NonTensorData(text)},
            "next": {
                "token_version": version,
                "policy_version": _oldest(version[said]),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        }
        rows.append(TensorDict(row | _told_of(sample, len(ids)), batch_size=[]))
    return rows


def _told_of(sample: Sample, num_prompt_tokens: int) -> dict[Any, Any]:
    """The entries that a sample has or has not: what a dialog says of itself, the sets that its tokens are from."""
    told: dict[Any, Any] = {}
    if sample.record is not None:
        told[keys.DIALOG] = NonTensorData(json.dumps(sample.record))
    if sample.kept is not None:
        ids, counts = sample.kept
        told["kept"] = {"ids": ids, "counts": torch.cat([counts.new_zeros(num_prompt_tokens), counts])}
    return told


def _oldest(versions: torch.Tensor) -> torch.Tensor:
    """The version of the oldest token; -1 without any."""
    return versions.min() if len(versions) else versions.new_tensor(-1)


def _behind(head: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``head`` before every part, one after the other: ``[sum(P + R_i)]``."""
    return torch.cat([piece for part in parts for piece in (head, part)])


def _sampled(num_prompt_tokens: int, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assistant mask, log-probs and versions of all rows, one after the other, prompts included."""
    off = torch.zeros(num_prompt_tokens, dtype=torch.bool)
    masks = [sample.assistant_mask for sample in samples]
    whole = [torch.ones_like(s.token_ids, dtype=torch.bool) if m is None else m for s, m in zip(samples, masks)]
    produced = _behind(off, whole)
    log_probs = _behind(off.float(), [sample.log_probs.float() for sample in samples])
    versions = _behind(off.long(), [sample.versions.long() for sample in samples])
    return produced, torch.where(produced, log_probs, 0.0), torch.where(produced, versions, -1)


def last_turn(sample: Sample) -> torch.Tensor:
    """The ids of the policy's last turn, which is what a grader reads; in a dialog of one turn, all of them.

    >>> ids, mask = torch.tensor([5, 6, 7, 8]), torch.tensor([True, False, True, True])
    >>> last_turn(Sample(ids, torch.zeros(4), torch.zeros(4), truncated=False, assistant_mask=mask)).tolist()
    [7, 8]
    """
    if sample.assistant_mask is None:
        return sample.token_ids
    others = (~sample.assistant_mask).nonzero()
    return sample.token_ids[int(others[-1]) + 1 :] if len(others) else sample.token_ids


def done_entries(truncated: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """``done``, ``terminated`` and ``truncated`` of finished responses, each a bool ``[1]`` per response.

    Args:
        truncated: bool ``[G]``.

    >>> {name: [each.item() for each in flags] for name, flags in done_entries(torch.tensor([True, False])).items()}
    {'done': [True, True], 'terminated': [False, True], 'truncated': [True, False]}
    """
    flags = {"done": torch.ones_like(truncated), "terminated": ~truncated, "truncated": truncated}
    return {name: each.unsqueeze(1).unbind(0) for name, each in flags.items()}


def response_ids(row: TensorDictBase) -> torch.Tensor:
    """The response ``[R]`` that a policy wrote: ``tokens.response``, else ``tokens.full`` past the prompt.

    Raises:
        KeyError: the policy wrote neither.
    """
    response = row.get(keys.RESPONSE_TOKENS, None)
    if response is not None:
        return response
    full = row.get(keys.FULL_TOKENS, None)
    if full is None:
        raise KeyError("the policy wrote neither ('tokens', 'response') nor ('tokens', 'full'); the env grades tokens.")
    return full[..., row.get(keys.PROMPT_TOKENS).shape[-1] :]


def complete_rows(rows: TensorDictBase) -> TensorDictBase:
    """Rows that TorchRL's own collector and LLM wrapper made, with what they leave out written in place.

    TorchRL's wrappers give ``log_probs.response`` and no assistant mask in tokens mode; :class:`GRPOLoss` and
    ``collate`` read ``log_probs.full`` and ``masks.all_assistant_mask``. Give it as the collector's ``postproc``.

    The log-probs are copied as they are, and ``TransformersWrapper`` of torchrl 0.14.1 writes 0 for the first token of
    every response and drops padding tokens that were sampled: train on proximal log-probs recomputed by the learner.

    Args:
        rows: of any batch shape, lazily stacked where they are ragged: the collector's ``[N]``, or ``[N, 1]`` of
            ``env.rollout(1, policy)``, which the losses read after ``reshape(-1)``.

    >>> row = TensorDict({"tokens": {"prompt": torch.tensor([1, 2]), "response": torch.tensor([3])},
    ...                   "log_probs": {"response": torch.tensor([-0.5])}}, [])
    >>> complete_rows(row)["log_probs", "full"].tolist(), row["masks", "all_assistant_mask"].tolist()
    ([0.0, 0.0, -0.5], [False, False, True])
    """
    if isinstance(rows, LazyStackedTensorDict):
        for part in rows.tensordicts:  # what unbind gives may be copies
            complete_rows(part)
        return rows
    prompt, response = rows.get(keys.PROMPT_TOKENS), response_ids(rows)
    full = torch.cat([prompt, response], -1)
    assistant = torch.zeros_like(full, dtype=torch.bool)
    assistant[..., prompt.shape[-1] :] = True
    rows.set(keys.FULL_TOKENS, full)
    rows.set(keys.ATTENTION_MASK, torch.ones_like(assistant))
    rows.set(keys.ASSISTANT_MASK, assistant)
    sampled = rows.get(("log_probs", "response"), None)
    if sampled is not None:
        rows.set(keys.LOG_PROBS, torch.cat([sampled.new_zeros(prompt.shape), sampled], -1))
    return rows


def _named(example: Example) -> str:
    """A problem as messages name it."""
    place = f" ({one_line(example.place)})" if example.place else ""
    return f"{example.query[:60]!r}{place}"


def _tell_of(left_out: Sequence[Example], error: UserError) -> None:
    rows: dict[str, list[str]] = {}  # by file
    for example in left_out[:_NAMED]:
        file, mark, row = example.place.rpartition(", row ")
        rows.setdefault(one_line(file) + mark, []).append(row or repr(example.query[:60]))
    names = "; ".join(file + ", ".join(numbers) for file, numbers in rows.items())
    more = ", .." if len(left_out) > _NAMED else ""
    logger.warning("%d prompts are left out (%s%s). The first: %s", len(left_out), names, more, error)


DRAWN = (keys.QUERY, keys.ANSWER, keys.EXTRA, keys.GROUP_ID, keys.SAMPLE_ID)  # written by reset, kept by step


class TaskEnv(EnvBase):
    """Reset draws prompts, the policy answers each with tokens, step grades the answers; then all rows are done.

    ``batch_size=[num_envs]``, rows lazily stacked and ragged. Reset writes ``query``, ``answer``, ``extra``,
    ``group_id``, ``sample_id`` and ``tokens.prompt`` for ``num_envs / repeats`` prompts, the ``repeats`` siblings of
    each next to each other. Step reads ``tokens.response`` (or ``tokens.full``) and writes the reward, its terms,
    ``success``, ``reward_error``, ``done``, ``terminated`` and ``truncated``; a term
    that does not apply is NaN. Text is decoded for grading only, never tokenised again.

    Here TorchRL's wrappers do not say why a response ended, so it counts as truncated when it does not end in the
    tokenizer's EOS; where padding *is* EOS the wrappers strip it, and no response counts as truncated.

    Args:
        task: examples, chat and score.
        tokenizer: with ``apply_chat_template``; without a chat template the turns are joined by blank lines.
        num_envs: dialogs at once, a multiple of ``repeats``.
        repeats: group size, of tasks that have none of their own (:meth:`group_size`).
        shuffle, seed: of the :class:`PromptStream` over ``task.train``.
        make_stream: makes the stream of prompts, of examples, seed and shuffle; for example
            ``partial(CurriculumStream, rule=rule, level=task.level)`` (:mod:`sota_grpo.envs.curriculum`).
        max_prompt_tokens: longest prompt allowed; None allows any.
        compute_reward: False grades nothing and leaves the reward to your own transforms.
        grader: gives texts their scores; None grades with ``task.score`` in this process.
        multi_turn: a dialog has several turns, so what samples it needs the examples (``GroupRequest.example``).
        template_kwargs: further arguments of ``apply_chat_template``.
        task_kwargs: those beside them of the prompts of a mixture's tasks, by name: their tools.
        device: of the tensors.

    Raises:
        ValueError: ``num_envs`` is not a multiple of ``repeats``.
        UserError: a prompt is longer than ``max_prompt_tokens``.

    Example::

        env = TaskEnv(make_task("arithmetic"), tokenizer, num_envs=16, repeats=8)
        rows = env.rollout(max_steps=1, policy=policy)      # policy reads tokens.prompt, writes tokens.response
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
        shuffle: bool = True,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        compute_reward: bool = True,
        grader: Grader | None = None,
        multi_turn: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        make_stream: Callable[..., PromptStream] = PromptStream,
        task_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
    ):
        if repeats < 1 or num_envs < 1 or num_envs % repeats:
            fix = max(1, num_envs // max(1, repeats)) * max(1, repeats)
            raise ValueError(
                f"num_envs={num_envs} is not divisible by the group size repeats={repeats}; use num_envs={fix}."
            )
        super().__init__(device=device, batch_size=(num_envs,))
        self.task, self.tokenizer, self.repeats = task, tokenizer, repeats
        self.make_stream = make_stream
        self.stream = make_stream(task.train, seed=seed, shuffle=shuffle)
        self.max_prompt_tokens, self.compute_reward = max_prompt_tokens, compute_reward
        self.template_kwargs = dict(template_kwargs or {})
        self.grader = LocalGrader(task.score, task.term_weights) if grader is None else grader
        self.multi_turn = multi_turn
        self._prompt_ids: dict[tuple[str, str], tuple[int, ...]] = {}
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        of_tasks = {name: {**self.template_kwargs, **own} for name, own in (task_kwargs or {}).items()}
        self._chats = {
            name: ChatTokens(tokenizer, partial(self._rendered, kwargs), add_special_tokens=not self._has_template)
            for name, kwargs in [(None, self.template_kwargs), *of_tasks.items()]
        }
        self._make_specs()

    def prompt_ids(self, example: Example, observation: str = "") -> tuple[int, ...]:
        """The templated prompt of ``example`` as token ids, tokenised once; what it says cannot begin or end a turn.

        Args:
            example: the problem.
            observation: what an environment adds to the last turn of the prompt.

        Raises:
            UserError: it is longer than ``max_prompt_tokens``, or the template cannot take it as text.
        """
        key = (example.query, json.dumps(dict(example.extra), sort_keys=True))
        ids = None if observation else self._prompt_ids.get(key)
        if ids is None:
            *before, last = self.task.messages(example)
            try:
                chat = self._chats.get(task_of_example(example.extra), self._chats[None])
                ids = chat.ids([*before, {**last, "content": last["content"] + observation}])
            except UserError as error:
                raise UserError(f"the prompt of {_named(example)}: {error}") from error
            if not observation:
                self._prompt_ids[key] = ids
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise UserError(
                f"the prompt of {_named(example)} has {len(ids)} tokens and at most {self.max_prompt_tokens} fit; "
                f"raise inference_model.max_model_len where the model allows more, or take the problem out."
            )
        return ids

    def group_size(self, example: Example) -> int:
        """Responses to ``example``: as its task says, else ``repeats``."""
        size = getattr(self.task, "group_size", lambda _: None)(example)
        return self.repeats if size is None else size

    def _rendered(self, kwargs: Mapping[str, Any], messages: Messages) -> str:
        if not self._has_template:
            return "".join(f"{message['content']}\n\n" for message in messages)
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **kwargs)

    def check_prompts(self, *, skip: bool = False) -> int:
        """Tokenise every prompt of the task before training starts; the longest, in tokens.

        Args:
            skip: take those that :meth:`prompt_ids` refuses out of the task and of the stream, and say which. What is
                held out was chosen before, from all problems.

        Raises:
            UserError: one is refused; with ``skip``, all of those to train on, or all of those held out, are.
        """
        longest, left_out = 0, []
        for part in ("train", "heldout"):
            examples, kept = getattr(self.task, part), []
            for number, example in enumerate(examples, start=1):
                try:
                    longest = max(longest, len(self.prompt_ids(example)))
                    kept.append(example)
                except UserError as error:
                    if not skip or (not kept and number == len(examples)):
                        raise
                    left_out.append((example, error))
            if len(kept) < len(examples):
                is_mixed = isinstance(examples, MixedExamples)
                setattr(self.task, part, examples.only(kept, may_be_empty=part == "heldout") if is_mixed else kept)
        if left_out:
            self.stream = self.make_stream(self.task.train, seed=self.stream.seed, shuffle=self.stream.shuffle)
            _tell_of([example for example, _ in left_out], left_out[0][1])
        return longest

    def decode(self, token_ids: torch.Tensor) -> str:
        """The text that the grader reads: special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        chosen = None if tensordict is None else tensordict.get("_reset", None)
        if chosen is not None and not chosen.all():
            raise ValueError(
                f"{int(chosen.sum())} of {chosen.numel()} rows were asked to reset; a single-turn env resets them all."
            )
        rows = []
        for group_id, example in self.stream.draw(self.batch_size[0] // self.repeats):
            if self.group_size(example) != self.repeats:
                raise ValueError(
                    f"a prompt of this task has {self.group_size(example)} responses, and a reset gives "
                    f"{self.batch_size[0]} rows, {self.repeats} of each prompt; use RolloutCollector, or one size."
                )
            rows += prompt_rows(group_id, example, self.prompt_ids(example), self.repeats)
        for row in rows:
            prompt = row.get(keys.PROMPT_TOKENS)
            row.set(keys.ATTENTION_MASK, torch.ones_like(prompt, dtype=torch.bool))  # replaces the last response's
        return self._stack(rows)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = [self._finish(row) for row in tensordict.unbind(0)]
        if self.compute_reward:
            groups = [rows[start : start + self.repeats] for start in range(0, len(rows), self.repeats)]
            futures = [self.grader.scores(graded_texts(group)) for group in groups]
            for group, scores in zip(groups, futures, strict=True):
                self._write(group, scores.result())
        return self._stack([row.get("next") for row in rows])

    def _write(self, rows: Sequence[TensorDictBase], scores: Sequence[Score]) -> None:
        """Write the scores under ``next``; the rows of an env have all its terms, NaN where one does not apply."""
        write_scores(lazy_stack(list(rows)), scores, self.task.term_weights)
        for row, score in zip(rows, scores, strict=True):
            for name in self.task.term_weights:
                if score.terms[name] is None:
                    row.set((*keys.REWARD_TERMS, name), torch.tensor([math.nan]))

    def _stack(self, rows: list[TensorDictBase]) -> LazyStackedTensorDict:
        stacked = lazy_stack(rows)
        return stacked if self.device is None else stacked.to(self.device)

    def _finish(self, row: TensorDictBase) -> TensorDictBase:
        """The row as its grader needs it, with the observation and the end of the dialog under ``next``."""
        response = response_ids(row)
        drawn = {key: row.get(key) for key in DRAWN}
        full = torch.cat([row.get(keys.PROMPT_TOKENS), response])
        after = {
            **drawn,
            "tokens": {"prompt": full},
            "masks": {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)},
            **{name: flag for name, (flag,) in done_entries(torch.tensor([self._truncated(response)])).items()},
        }
        text = SampledText(self.decode(response), response.tolist())
        return TensorDict({**drawn, "text": {"response": text}, "next": after}, batch_size=[])

    def _truncated(self, response: torch.Tensor) -> bool:
        eos = self.tokenizer.eos_token_id
        if eos == self.tokenizer.pad_token_id:
            return False
        return not response.numel() or int(response[-1]) != eos

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.stream.reseed(seed)

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros in the shape of the specs; lazily stacked as the real rows are, for these have no common length."""
        return super().fake_tensordict().to_lazystack(0)

    def _make_specs(self) -> None:
        shape, device = self.batch_size, self.device
        column = torch.Size((*shape, 1))
        text = NonTensor(shape=shape, example_data="text", device=device)
        index = Unbounded(shape=shape, dtype=torch.int64, device=device)
        self.observation_spec = self._group(
            **{key: text.clone() for key in DRAWN[:3]},
            **{key: index.clone() for key in DRAWN[3:]},
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
        """One spec per row: rows of different lengths have no common tensor that one spec could describe."""
        row = Composite(entries, device=self.device)
        return StackedComposite(*(row.clone() for _ in range(self.batch_size[0])), dim=0)
