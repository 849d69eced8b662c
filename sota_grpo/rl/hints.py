"""A teacher that is told more than the policy: the same responses, scored behind prompts with a hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sota_grpo import keys
from sota_grpo.errors import UserError
from sota_grpo.rl.records import Example
from sota_grpo.rl.table import Key, Row, RowTable
from sota_grpo.rl.transforms import graded_texts

HINT = "\n\nA correct response:\n\n{}\n\nNow give your own."
Source = Literal["gold", "sibling"]


class Hints:
    """Rows for a teacher whose prompt says a correct response, and its log-probs back behind the policy's own prompt.

    The teacher scores ``log q(y_t | x, hint, y_<t)`` where the policy sampled ``y_t`` from ``p(. | x, y_<t)``. ``gold``
    is the task's gold response; ``sibling`` is the first right response of the group after the row's own, in the order
    of the samples and around. A row without one, or whose hint makes it longer than ``longest``, or whose hint the chat
    template cannot take as text, is scored without a hint.

    Args:
        source: of the hint.
        prompt_ids: the templated prompt of an example with a text added to its last turn, as
            :meth:`sota_grpo.envs.TaskEnv.prompt_ids` makes it: special tokens in the text are text.
        gold_response: of an example, None where there is none.
        longest: tokens of prompt and response that the teacher reads at most.

    Sources: ``gold``: Shenfeld et al. 2026 (SDFT, arXiv:2601.19897); ``sibling``: Hübotter et al. 2026 (SDPO,
    arXiv:2601.20802). Both teach by the policy of the moment or a moving average of it; the weights here are those of
    whatever reference the rows are given to.
    """

    def __init__(
        self,
        source: Source,
        prompt_ids: Callable[[Example, str], Sequence[int]],
        gold_response: Callable[[Example], str | None],
        longest: int,
    ) -> None:
        self.source, self.longest = source, longest
        self._prompt_ids, self._gold_response = prompt_ids, gold_response

    def ask(self, rows: RowTable) -> tuple[list[Row], Callable[[Sequence[Tensor]], list[Tensor]]]:
        """What the teacher is given in the place of whole groups, and what moves its answers back behind their prompts.

        Which rows have a hint is written to them.
        """
        listed = rows.rows()
        prompts = self._prompts(listed)
        hinted = [behind(row, prompt) for row, prompt in zip(listed, prompts, strict=True)]
        rows.set(keys.HINTED, torch.tensor([[prompt is not None] for prompt in prompts]))
        return hinted, partial(moved_back, listed, hinted)

    def _prompts(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Of each row the prompt with its hint ``[P]``, where there is one that fits."""
        texts, prompts = graded_texts(rows), []
        known: dict[tuple[int, str], Tensor | None] = {}
        for row, (_, example), hint in zip(rows, texts, self._hints(rows, texts), strict=True):
            prompt = None
            if hint is not None:
                key = id(example), hint  # siblings share their example
                prompt = known[key] if key in known else known.setdefault(key, self._prompt(example, hint))
            response = int(row[keys.ATTENTION_MASK].sum()) - prompt_length(row)
            prompts.append(prompt if prompt is not None and len(prompt) + response <= self.longest else None)
        return prompts

    def _hints(self, rows: Sequence[Row], texts: Sequence[tuple[str, Example]]) -> list[str | None]:
        if self.source == "gold":
            return [self._gold_response(example) for _, example in texts]
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(int(row[keys.GROUP_ID]), []).append(index)
        hints: list[str | None] = [None] * len(rows)
        for members in groups.values():
            for at, index in enumerate(members):
                others = members[at + 1 :] + members[:at]
                right = (texts[other][0] for other in others if bool(rows[other][keys.SUCCESS].any()))
                hints[index] = next(right, None)
        return hints

    def _prompt(self, example: Example, hint: str) -> Tensor | None:
        try:
            return torch.tensor(self._prompt_ids(example, HINT.format(hint)), dtype=torch.int64)
        except UserError:  # too long, or the hint (a model may have written it) names a special token as none can stand
            return None


def prompt_length(row: Row) -> int:
    """Tokens before the first that the policy produced."""
    return int(row[keys.ASSISTANT_MASK].int().argmax())


def behind(row: Row, prompt: Tensor | None) -> Row:
    """What a reference reads of ``row``, behind another prompt ``[P]``, or its own.

    >>> row = {
    ...     ("tokens", "full"): torch.tensor([4, 5, 6]),
    ...     ("masks", "all_attention_mask"): torch.ones(3).bool(),
    ...     ("masks", "all_assistant_mask"): torch.tensor([0, 1, 1]).bool(),
    ... }
    >>> other = behind(row, torch.tensor([7, 8]))
    >>> other["tokens", "full"].tolist(), other["masks", "all_assistant_mask"].int().tolist()
    ([7, 8, 5, 6], [0, 0, 1, 1])
    """
    read = keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.KEPT_IDS, keys.KEPT_COUNTS
    other: dict[Key, Tensor] = {key: row[key] for key in read if row.get(key, None) is not None}
    if prompt is None:
        return other
    start = prompt_length(row)
    heads = {
        keys.FULL_TOKENS: prompt,
        keys.ATTENTION_MASK: torch.ones(len(prompt), dtype=torch.bool),
        keys.ASSISTANT_MASK: torch.zeros(len(prompt), dtype=torch.bool),
    }
    if keys.KEPT_COUNTS in other:  # the teacher is renormalised over the policy's sets, and prompts have none
        heads[keys.KEPT_COUNTS] = torch.zeros(len(prompt), dtype=torch.int64)
    for key, head in heads.items():
        values = other[key]
        other[key] = torch.cat([head.to(values.device, values.dtype), values[start:]])
    return other


def moved_back(rows: Sequence[Row], hinted: Sequence[Row], values: Sequence[Tensor]) -> list[Tensor]:
    """Values of the rows that were ``asked`` ``[T'_i]``, 0 on prompts, at the positions of ``rows`` ``[T_i]``."""
    moved = []
    for row, other, value in zip(rows, hinted, values, strict=True):
        own = value.new_zeros(row[keys.FULL_TOKENS].shape)
        own[prompt_length(row) :] = value[prompt_length(other) :]
        moved.append(own)
    return moved
