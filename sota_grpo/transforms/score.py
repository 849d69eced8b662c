"""The reward of a response: graded once, its terms kept beside it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.collate import row_list
from sota_grpo.records import Example, Score
from sota_grpo.transforms.base import RowTransform

logger = logging.getLogger(__name__)


class ScoreResponse(RowTransform):
    """Grade every response: text in, ``reward = sum_k weight_k * term_k`` out, its terms and the success beside it.

    Reads ``("text", "response")``, ``query``, ``answer`` and, where there is one, ``extra`` (JSON); writes
    ``("next", "reward")``, ``("next", "reward_terms", name)``, ``("next", "success")`` and ``("next",
    "reward_error")``, each ``[N, 1]``. Model text is untrusted: a grader that raises, reports an error or returns a
    term that is not finite is counted in ``reward_error`` with all terms 0, and never ends the run.

    Args:
        score: ``(response, example) -> Score``.
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

    written_key = keys.SUCCESS

    def __init__(self, score: Callable[[str, Example], Score], term_weights: Mapping[str, float]) -> None:
        names = list(term_weights)
        super().__init__(
            in_keys=[keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER],
            out_keys=[keys.REWARD, keys.SUCCESS, keys.REWARD_ERROR, *((*keys.REWARD_TERMS, name) for name in names)],
        )
        self.score, self.term_weights = score, dict(term_weights)
        self._reported: set[str] = set()

    def _write(self, rows: TensorDictBase) -> None:
        scores = [self._grade(row) for row in row_list(rows)]
        terms = {name: torch.tensor([[score.terms[name]] for score in scores]) for name in self.term_weights}
        weighted = [weight * terms[name].double() for name, weight in self.term_weights.items()]
        for name, values in terms.items():
            rows.set((*keys.REWARD_TERMS, name), values)
        rows.set(keys.REWARD, torch.stack(weighted).sum(0).float())
        rows.set(keys.SUCCESS, torch.tensor([[score.success] for score in scores]))
        rows.set(keys.REWARD_ERROR, torch.tensor([[score.error is not None] for score in scores]))

    def _grade(self, row: TensorDictBase) -> Score:
        extra = row.get(keys.EXTRA, None)
        response, query, answer = (_text(row.get(key)) for key in self.in_keys)
        return self.guarded(response, Example(query, answer, {} if extra is None else json.loads(_text(extra))))

    def guarded(self, response: str, example: Example) -> Score:
        """The score of one response; a failed grader is reported in ``error`` with all terms 0, and raises nothing."""
        try:
            score = self.score(response, example)
        except Exception as error:  # the grader reads model text: whatever it trips over must not end the run
            return self._failed(f"{type(error).__name__}: {error}")
        if score.error is not None:
            return self._failed(score.error)
        if set(score.terms) != set(self.term_weights):
            raise KeyError(
                f"the grader returned the terms {sorted(score.terms)} but term_weights names "
                f"{sorted(self.term_weights)}; make them the same."
            )
        if not all(math.isfinite(value) for value in score.terms.values()):
            return self._failed(f"ValueError: a term is not finite: {dict(score.terms)}")
        return Score({name: float(value) for name, value in score.terms.items()}, bool(score.success))

    def _failed(self, error: str) -> Score:
        kind = error.partition(":")[0]
        logger.log(logging.DEBUG if kind in self._reported else logging.WARNING, "grader failed: %s", error)
        self._reported.add(kind)
        return Score(dict.fromkeys(self.term_weights, 0.0), False, error)


def _text(value: Any) -> str:
    """A string entry of one row, however TensorDict wraps it."""
    return value if isinstance(value, str) else value.data
