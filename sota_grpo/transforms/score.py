"""The reward of a response: graded once, its terms kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase

from sota_grpo import keys
from sota_grpo.collate import row_list
from sota_grpo.records import Example, Score
from sota_grpo.scoring import FailureLog, Scorer, guarded_scores, total_reward
from sota_grpo.transforms.base import RowTransform

_WRITTEN = (keys.REWARD, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO)


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

    written_key = keys.SUCCESS

    def __init__(self, score: Scorer, term_weights: Mapping[str, float]) -> None:
        names = list(term_weights)
        super().__init__(
            in_keys=[keys.RESPONSE_TEXT, keys.QUERY, keys.ANSWER],
            out_keys=[*_WRITTEN, *((*keys.REWARD_TERMS, name) for name in names)],
        )
        self.score, self.term_weights = score, dict(term_weights)
        self._failures = FailureLog()

    def _write(self, rows: TensorDictBase) -> None:
        scores = guarded_scores(self.score, self.term_weights, graded_texts(row_list(rows)))
        write_scores(rows, [self._failures.add(score) for score in scores], self.term_weights)


def graded_texts(rows: Sequence[TensorDictBase]) -> list[tuple[str, Example]]:
    """What a grader reads of finished rows: the response's text, and the example that it answers.

    Siblings that share their texts, as those of :func:`sota_grpo.envs.finish_rows` do, share their example too.

    >>> from tensordict import TensorDict
    >>> graded_texts([TensorDict({"text": {"response": "4"}, "query": "2+2?", "answer": "#### 4"})])
    [('4', Example(query='2+2?', answer='#### 4', extra={}))]
    """
    asked: list[tuple[str, Example]] = []
    before: list[Any] = []
    for row in rows:
        texts = [row.get(keys.QUERY), row.get(keys.ANSWER), row.get(keys.EXTRA, None)]
        if not before or any(text is not other for text, other in zip(texts, before)):
            extra = {} if texts[2] is None else json.loads(_text(texts[2]))
            example, before = Example(_text(texts[0]), _text(texts[1]), extra), texts
        asked.append((_text(row.get(keys.RESPONSE_TEXT)), example))
    return asked


def write_scores(rows: TensorDictBase, scores: Sequence[Score], term_weights: Mapping[str, float]) -> None:
    """Write one score per row, in place: ``reward = sum_k weight_k * term_k`` (in float64), and all that is beside it.

    A term that is None does not apply: it adds nothing to the reward, and its key is missing in that row.

    Args:
        rows: a batch of ``N`` rows, lazily stacked or dense.
        scores: one per row, each with the terms that ``term_weights`` names.

    Raises:
        ValueError: the rows are dense, where every row has every key, and a term does not apply to one of them.

    >>> from tensordict import TensorDict
    >>> rows = TensorDict(batch_size=[2])
    >>> write_scores(rows, [Score({"right": 1.0}, True), Score({"right": 0.0}, False, "Timeout: 5 s")], {"right": 2.0})
    >>> rows["next", "reward"].tolist(), rows["next", "reward_error"].tolist()
    ([[2.0], [0.0]], [[False], [True]])
    """
    for name in term_weights:
        _write_term(rows, (*keys.REWARD_TERMS, name), [score.terms[name] for score in scores])
    rewards = [[total_reward(score.terms, term_weights)] for score in scores]
    rows.set(keys.REWARD, torch.tensor(rewards, dtype=torch.float32))
    rows.set(keys.SUCCESS, torch.tensor([[score.success] for score in scores]))
    rows.set(keys.REWARD_ERROR, torch.tensor([[score.error is not None] for score in scores]))
    rows.set(keys.REWARD_TIMEOUT, torch.tensor([[(score.error or "").startswith("TimeoutError")] for score in scores]))
    infos = [json.dumps(_info(score), default=str) for score in scores]
    wrapped = {info: NonTensorData(info) for info in set(infos)}  # most are alike, and the wrapping takes its time
    rows.set(keys.REWARD_INFO, NonTensorStack(*(wrapped[info] for info in infos)))


def _info(score: Score) -> dict[str, Any]:
    return {**score.info, "error": score.error} if score.error is not None else dict(score.info)


def _write_term(rows: TensorDictBase, key: tuple[str, ...], values: Sequence[float | None]) -> None:
    if None not in values:
        rows.set(key, torch.tensor(values, dtype=torch.float32).unsqueeze(-1))
        return
    if not isinstance(rows, LazyStackedTensorDict):
        raise ValueError(f"{key[-1]} does not apply to every row; stack the rows lazily, so that one may lack it.")
    for row, value in zip(row_list(rows), values, strict=True):
        if value is not None:
            row.set(key, torch.tensor([value], dtype=torch.float32))


def _text(value: Any) -> str:
    """A string entry of one row, however TensorDict wraps it."""
    return value if isinstance(value, str) else value.data
