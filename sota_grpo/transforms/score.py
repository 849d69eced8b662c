"""The reward of a response: graded once, its terms kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.collate import row_list
from sota_grpo.records import Example, Score
from sota_grpo.scoring import FailureLog, Scorer, guarded_score
from sota_grpo.transforms.base import RowTransform


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

    def __init__(self, score: Scorer, term_weights: Mapping[str, float]) -> None:
        names = list(term_weights)
        super().__init__(
            in_keys=[keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER],
            out_keys=[keys.REWARD, keys.SUCCESS, keys.REWARD_ERROR, *((*keys.REWARD_TERMS, name) for name in names)],
        )
        self.score, self.term_weights = score, dict(term_weights)
        self._failures = FailureLog()

    def _write(self, rows: TensorDictBase) -> None:
        write_scores(rows, [self.guarded(*graded_text(row)) for row in row_list(rows)], self.term_weights)

    def guarded(self, response: str, example: Example) -> Score:
        """The score of one response; a failed grader is reported in ``error`` with all terms 0, and raises nothing."""
        return self._failures.add(guarded_score(self.score, self.term_weights, response, example))


def graded_text(row: TensorDictBase) -> tuple[str, Example]:
    """What a grader reads of a finished row: the response's text, and the example that it answers.

    >>> from tensordict import TensorDict
    >>> graded_text(TensorDict({"text": {"response": "4"}, "query": "2+2?", "answer": "#### 4"}))
    ('4', Example(query='2+2?', answer='#### 4', extra={}))
    """
    extra = row.get(keys.EXTRA, None)
    response, query, answer = (_text(row.get(key)) for key in (keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER))
    return response, Example(query, answer, {} if extra is None else json.loads(_text(extra)))


def write_scores(rows: TensorDictBase, scores: Sequence[Score], term_weights: Mapping[str, float]) -> None:
    """Write one score per row, in place: ``reward = sum_k weight_k * term_k`` (in float64), terms, success and error.

    Args:
        rows: a batch of ``N`` rows, lazily stacked or dense.
        scores: one per row, each with the terms that ``term_weights`` names.

    >>> from tensordict import TensorDict
    >>> rows = TensorDict(batch_size=[2])
    >>> write_scores(rows, [Score({"right": 1.0}, True), Score({"right": 0.0}, False, "Timeout: 5 s")], {"right": 2.0})
    >>> rows["next", "reward"].tolist(), rows["next", "reward_error"].tolist()
    ([[2.0], [0.0]], [[False], [True]])
    """
    terms = {name: torch.tensor([[score.terms[name]] for score in scores]) for name in term_weights}
    weighted = [weight * terms[name].double() for name, weight in term_weights.items()]
    for name, values in terms.items():
        rows.set((*keys.REWARD_TERMS, name), values)
    rows.set(keys.REWARD, torch.stack(weighted).sum(0).float())
    rows.set(keys.SUCCESS, torch.tensor([[score.success] for score in scores]))
    rows.set(keys.REWARD_ERROR, torch.tensor([[score.error is not None] for score in scores]))


def _text(value: Any) -> str:
    """A string entry of one row, however TensorDict wraps it."""
    return value if isinstance(value, str) else value.data
