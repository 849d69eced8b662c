"""Any task as a single-turn TorchRL environment that speaks token ids, and the order in which its prompts are drawn."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase

from sota_grpo import keys
from sota_grpo.envs.chat_tokens import ChatTokens, Messages
from sota_grpo.errors import UserError
from sota_grpo.policy.end_tokens import end_token_ids, response_text
from sota_grpo.rewards.grading import FailureLog, Grader, LocalGrader, guarded_scores
from sota_grpo.rl.collate import done_entries, prompt_rows, response_ids
from sota_grpo.rl.records import Example, SampledText, Score, sample_seed, task_of_example
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import Scorer, Task
from sota_grpo.rl.transforms import RowTransform, graded_texts, write_scores
from sota_grpo.tasks.mixture import MixedExamples
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)

_LOOKED_AT = 64  # prompts of a task that tell it from another
_NAMED = 10  # prompts that are left out are named up to so many


class PromptStream:
    """An endless, deterministic sequence of ``(group id, example)``.

    Draw ``k`` is element ``k mod n`` of the permutation of ``n`` examples that ``(seed, k div n)`` gives, so it depends
    on nothing but the seed and ``k``. Group ids count draws: the same example drawn twice has two.

    Of :class:`~sota_grpo.tasks.mixture.MixedExamples` it is so within each task, whose draws are those that its weight
    gives it, under a seed of its own.

    Args:
        examples: what to draw from.
        seed: of the permutations.
        shuffle: False draws in the given order, every epoch.

    Raises:
        ValueError: no examples, or a state of another stream.

    >>> stream = PromptStream([Example(f"{i} + 1?", str(i + 1)) for i in range(3)], seed=0, shuffle=False)
    >>> [(group_id, example.query) for group_id, example in stream.draw(4)]
    [(0, '0 + 1?'), (1, '1 + 1?'), (2, '2 + 1?'), (3, '0 + 1?')]
    >>> stream.state_dict()
    {'seed': 0, 'num_examples': 3, 'prompts': 31706315251783947, 'epoch': 1, 'position': 1, 'next_group_id': 4}
    >>> stream.example_of(2).query
    '2 + 1?'
    """

    def __init__(self, examples: Sequence[Example], *, seed: int = 0, shuffle: bool = True):
        #: The examples of each task of a mixture; without one, all under ``""``.
        self.parts = examples.parts if isinstance(examples, MixedExamples) else {"": examples}
        if not self.parts or not all(map(len, self.parts.values())):
            raise ValueError("there are no examples to draw prompts from; give a task with at least one.")
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.next_group_id = 0
        self._first_group_id = 0  # of the draws under this seed

    def name_apart(self) -> None:
        """Before the first draw: count groups from a number that follows from the seed and the examples.

        Rows of several environments may then meet in one buffer. A run has one stream, and counts from 0.
        """
        if self.next_group_id == self._first_group_id:
            told = repr((self.seed, self.next_group_id, len(self.examples), self._prompts)).encode()
            number = int.from_bytes(hashlib.blake2b(told, digest_size=4).digest()) >> 1
            self.next_group_id = self._first_group_id = number << 32

    def draw(self, num_groups: int) -> list[tuple[int, Example]]:
        """The next ``num_groups`` prompts, each with a group id that no other draw has."""
        group_ids = range(self.next_group_id, self.next_group_id + num_groups)
        self.next_group_id += num_groups
        return [(group_id, self.example_of(group_id)) for group_id in group_ids]

    def example_of(self, group_id: int) -> Example:
        """The example that was drawn as ``group_id``; changes nothing.

        Raises:
            ValueError: no prompt has been drawn under that id with the stream's present seed.
        """
        if not self._first_group_id <= group_id < self.next_group_id:
            raise ValueError(
                f"group {group_id} is not of this stream: under its seed it has drawn the groups "
                f"{self._first_group_id} to {self.next_group_id - 1}."
            )
        draw = group_id - self._first_group_id
        if not isinstance(self.examples, MixedExamples):
            return self.examples[self._index(draw, len(self.examples), self.seed)]
        name, draw = self.examples.drawn(draw)
        seed = sample_seed(self.seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))
        return self.examples.example(name, self._index(draw, len(self.parts[name]), seed))

    def reseed(self, seed: int) -> None:
        """Start over with another seed; group ids go on, so that they stay unique."""
        self.seed = seed
        self._first_group_id = self.next_group_id

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain integers; of a mixture also what it is made of."""
        epoch, position = divmod(self.next_group_id - self._first_group_id, len(self.examples))
        place = {"epoch": epoch, "position": position, "next_group_id": self.next_group_id}
        return self._identity() | place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: the state is of a stream over other examples, with another seed or another mixture: its
                position would mean other prompts here.
        """
        own = {"mixture": None, "num_examples": 0, "seed": 0} | self._identity()
        for name, value in own.items():
            if name == "prompts" and name not in state_dict:
                continue  # of a run before they were saved
            if state_dict.get(name) != value:
                raise ValueError(
                    f"the saved stream of prompts has {name}={state_dict.get(name)} and this one {name}={value}; "
                    "resume with the dataset and the seed of the saved run."
                )
        self.next_group_id = state_dict["next_group_id"]
        drawn = state_dict["epoch"] * len(self.examples) + state_dict["position"]
        self._first_group_id = self.next_group_id - drawn

    def _index(self, draw: int, count: int, seed: int) -> int:
        """Which of ``count`` examples their draw ``draw`` gives."""
        epoch, position = divmod(draw, count)
        return _permutation(count, seed, epoch)[position] if self.shuffle else position

    @cached_property
    def _prompts(self) -> int:
        """A number that other prompts do not have: of some from each task, evenly over all of it."""
        digest = hashlib.blake2b(digest_size=7)
        for name, part in self.parts.items():
            chosen = range(0, len(part), -(-len(part) // _LOOKED_AT))
            digest.update(repr((name, [part[index].query for index in chosen])).encode())
        return int.from_bytes(digest.digest())

    def _identity(self) -> dict[str, Any]:
        """What a state must have alike; of a mixture the number of examples of each task and its weight, too."""
        own = {"seed": self.seed, "num_examples": len(self.examples), "prompts": self._prompts}
        if not isinstance(self.examples, MixedExamples):
            return own
        weights = self.examples.weights
        return own | {"mixture": {name: [len(part), str(weights[name])] for name, part in self.parts.items()}}


@lru_cache(maxsize=32)  # groups in flight reach into the epoch before, and each task of a mixture has one
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()


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
    each next to each other; other seeds and other examples have other group ids. Step reads ``tokens.response`` (or
    ``tokens.full``) and writes the reward, its terms, ``success``, ``reward_error``, ``done``, ``terminated`` and
    ``truncated``; a term that does not apply is NaN. Text is decoded for grading only, never tokenised again.

    Here TorchRL's wrappers do not say why a response ended, so it counts as truncated when it does not end in an end
    token; where padding *is* EOS the wrappers strip it, and no response counts as truncated.

    Args:
        task: examples, chat and score.
        tokenizer: with ``apply_chat_template``; without a chat template the turns are joined by blank lines.
        num_envs: dialogs at once, a multiple of ``repeats``; or, in one turn, a divisor: siblings then come in
            successive resets, and ``GroupAdvantage(group_size=repeats)`` waits for them in a buffer.
        repeats: group size, of tasks that have none of their own (:meth:`group_size`).
        shuffle, seed: of the :class:`PromptStream` over ``task.train``.
        max_prompt_tokens: longest prompt allowed; None allows any.
        compute_reward: False grades nothing and leaves the reward to your own transforms.
        grader: gives texts their scores; None grades with ``task.score`` in this process.
        multi_turn: a dialog has several turns, so what samples it needs the examples (``GroupRequest.example``).
        template_kwargs: further arguments of ``apply_chat_template``.
        task_kwargs: those beside them of the prompts of a mixture's tasks, by name: their tools.
        device: of the tensors.

    Raises:
        ValueError: ``num_envs`` is neither a multiple of ``repeats`` nor a divisor of it.
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
        task_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
    ):
        few = repeats > num_envs > 0 == repeats % num_envs and not multi_turn
        if repeats < 1 or num_envs < 1 or (num_envs % repeats and not few):
            fix = max(1, num_envs // max(1, repeats)) * max(1, repeats)
            raise ValueError(
                f"num_envs={num_envs} is not divisible by the group size repeats={repeats}; use num_envs={fix}."
            )
        super().__init__(device=device, batch_size=(num_envs,))
        self.task, self.tokenizer, self.repeats = task, tokenizer, repeats
        self.stream = PromptStream(task.train, seed=seed, shuffle=shuffle)
        self.max_prompt_tokens, self.compute_reward = max_prompt_tokens, compute_reward
        self.template_kwargs = dict(template_kwargs or {})
        self.grader = LocalGrader(task.score, task.term_weights) if grader is None else grader
        self.multi_turn = multi_turn
        self._siblings: list[TensorDictBase] = []  # of the last prompt, for the next resets
        self._prompt_ids: dict[tuple[str, str], tuple[int, ...]] = {}
        self.longest_prompt = 0  # tokens, once :meth:`check_prompts` has looked
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
        for split in ("train", "heldout"):
            examples, kept = getattr(self.task, split), []
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
                setattr(self.task, split, examples.only(kept, may_be_empty=split == "heldout") if is_mixed else kept)
        if left_out:
            self.stream = PromptStream(self.task.train, seed=self.stream.seed, shuffle=self.stream.shuffle)
            _tell_of([example for example, _ in left_out], left_out[0][1])
        self.longest_prompt = longest
        return longest

    def decode(self, token_ids: torch.Tensor) -> str:
        """The text that the grader reads: end tokens and padding left out."""
        return response_text(self.tokenizer, token_ids)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        chosen = None if tensordict is None else tensordict.get("_reset", None)
        if chosen is not None and not chosen.all():
            raise ValueError(
                f"{int(chosen.sum())} of {chosen.numel()} rows were asked to reset; a single-turn env resets them all."
            )
        self.stream.name_apart()
        rows, num_envs = list(self._siblings), self.batch_size[0]
        for group_id, example in self.stream.draw(-(-(num_envs - len(rows)) // self.repeats)):
            if self.group_size(example) != self.repeats:
                raise ValueError(
                    f"a prompt of this task has {self.group_size(example)} responses, and a reset gives "
                    f"{self.batch_size[0]} rows, {self.repeats} of each prompt; use PromptGroupCollector, or one size."
                )
            rows += prompt_rows(group_id, example, self.prompt_ids(example), self.repeats)
        rows, self._siblings = rows[:num_envs], rows[num_envs:]
        for row in rows:
            prompt = row.get(keys.PROMPT_TOKENS)
            row.set(keys.ATTENTION_MASK, torch.ones_like(prompt, dtype=torch.bool))  # replaces the last response's
        return self._stack(rows)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in tensordict.unbind(0):
            response = response_ids(row)
            after = self._observed(row, torch.cat([row.get(keys.PROMPT_TOKENS), response]))
            ends = {name: flags[0] for name, flags in done_entries(torch.tensor([self._truncated(response)])).items()}
            rows.append(self._stepped(row, SampledText(self.decode(response), response.tolist()), after | ends))
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

    def _observed(self, row: TensorDictBase, prompt: torch.Tensor) -> dict[str, Any]:
        masks = {"all_attention_mask": torch.ones_like(prompt, dtype=torch.bool)}
        return {**{key: row.get(key) for key in DRAWN}, "tokens": {"prompt": prompt}, "masks": masks}

    def _stepped(self, row: TensorDictBase, text: SampledText, after: Mapping[str, Any]) -> TensorDictBase:
        """A row as its grader reads it, with what step returns under ``next``."""
        drawn = {key: row.get(key) for key in DRAWN}
        return TensorDict({**drawn, "text": {"response": text}, "next": dict(after)}, batch_size=[])

    def _truncated(self, response: torch.Tensor) -> bool:
        if response.numel() and int(response[-1]) in end_token_ids(self.tokenizer):
            return False
        return self.tokenizer.eos_token_id != self.tokenizer.pad_token_id

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._siblings = []
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


class ScoreResponse(RowTransform):
    """Grade every response: text in, ``reward = sum_k weight_k * term_k`` out, its terms and the success beside it.

    Reads ``("text", "response")``, ``query``, ``answer`` and, where there is one, ``extra`` (JSON); writes
    ``("next", "reward")``, ``("next", "reward_terms", name)``, ``("next", "success")``, ``("next", "reward_error")``
    and ``("next", "reward_timeout")``, each ``[N, 1]``, and ``("next", "reward_info")`` (JSON). Model text is
    untrusted: a grader that raises, reports an error or returns a term that is not finite is counted in
    ``reward_error`` with all terms 0, and never ends the run.

    Args:
        score: ``(response, example) -> Score``; one with a method ``score_group`` is given the whole batch.
        term_weights: weight of each term; the grader must return exactly these names.

    Raises:
        KeyError: if the grader returns other terms than ``term_weights`` names: a mistake of the task, not of the text.

    >>> def exact(text, example):
    ...     return Score({"exact": float(text == example.answer)}, success=text == example.answer)
    >>> from tensordict import TensorDict
    >>> rows = TensorDict({"text": {"response": "4"}, "query": "2+2?", "answer": "4"}).unsqueeze(0)
    >>> ScoreResponse(exact, {"exact": 2.0})(rows)["next", "reward"].tolist()
    [[2.0]]
    """

    written_key = keys.REWARD_ERROR  # which no environment writes: a reward and a success may be of the env itself

    def __init__(self, score: Scorer, term_weights: Mapping[str, float]) -> None:
        written = [keys.REWARD, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO]
        terms = [(*keys.REWARD_TERMS, name) for name in term_weights]
        super().__init__(in_keys=[keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER], out_keys=[*written, *terms])
        self.score, self.term_weights = score, dict(term_weights)
        self._failures = FailureLog()

    def _write(self, rows: RowTable) -> None:
        scores = guarded_scores(self.score, self.term_weights, graded_texts(rows))
        write_scores(rows, [self._failures.add(score) for score in scores], self.term_weights)
