"""The data of a run, as verl and TRL read them: what it trains on, and the held-out problems that it measures.

Our grader as a reward function of verl and of TRL, so that a run that has moved is rewarded as before.

An exported ``reward.py`` (verl) or ``train.py`` (TRL) calls these with the ``config.yaml`` beside it; the columns
``query``, ``answer`` and ``extra`` of the exported data hold the example (:mod:`sota_grpo.migration.data`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.rollout import bare_task
from sota_grpo.errors import UserError
from sota_grpo.functional.weighting import soft_overlong_penalty
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task, guarded_scores, total_reward


def example_columns(example: Example) -> dict[str, str]:
    """An example as three columns of text, which every table can hold.

    >>> example = Example("2 + 2?", "4", {"level": 1})
    >>> example_columns(example)
    {'query': '2 + 2?', 'answer': '4', 'extra': '{"level": 1}'}
    >>> example_of(example_columns(example)) == example
    True
    """
    return {"query": example.query, "answer": example.answer, "extra": json.dumps(dict(example.extra))}


def example_of(columns: Mapping[str, str]) -> Example:
    """The example of :func:`example_columns`."""
    return Example(columns["query"], columns["answer"], json.loads(columns["extra"]))


def verl_reward(config_file: str | Path) -> Callable[..., dict[str, float]]:
    """``compute_score`` for verl: the reward as ``score``, and whether the response is right as ``acc``.

    A response at which the grader fails earns 0, as in training.

    Args:
        config_file: of the run; its folder holds what it names.
    """
    task = _task(Path(config_file))

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
    ) -> dict[str, float]:
        (score,) = _scores(task, [(solution_str, example_of(extra_info))])
        return {"score": total_reward(score.terms, task.term_weights), "acc": float(score.success)}

    return compute_score


def trl_reward(config_file: str | Path) -> Callable[..., list[float]]:
    """A reward function for TRL's trainers, which are given the columns of the exported data.

    Args:
        config_file: see :func:`verl_reward`.
    """
    task = _task(Path(config_file))

    def reward(
        completions: Sequence[Any], query: Sequence[str], answer: Sequence[str], extra: Sequence[str], **_: Any
    ) -> list[float]:
        rows = [dict(zip(("query", "answer", "extra"), row)) for row in zip(query, answer, extra, strict=True)]
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        scores = _scores(task, list(zip(texts, map(example_of, rows), strict=True)))
        return [total_reward(score.terms, task.term_weights) for score in scores]

    return reward


def trl_overlong(max_tokens: int, buffer_tokens: int) -> Callable[..., list[float]]:
    """DAPO's soft penalty on length (``algorithm.overlong_buffer``) as a reward function of its own.

    >>> trl_overlong(10, 4)(completion_ids=[[1] * 6, [1] * 9])
    [0.0, -0.75]
    """
    import torch

    def overlong(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        lengths = torch.tensor([len(ids) for ids in completion_ids])
        return soft_overlong_penalty(lengths, max_tokens, buffer_tokens).tolist()

    return overlong


def _scores(task: Task, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
    return guarded_scores(task.score, task.term_weights, pairs)


def _task(config_file: Path) -> Task:
    """The task of an exported config; its reward functions stand beside it."""
    config = load_config(config_file.parent)
    if config.reward.path is not None:
        config.reward.path = str(config_file.parent / config.reward.path)
    return bare_task(config)


def verl_rows(task: Task, examples: Sequence[Example], split: str) -> Iterator[dict[str, Any]]:
    """verl's five columns; the example stands in ``extra_info``, where our grader looks for it.

    >>> from sota_grpo.tasks import make_task
    >>> task = make_task("arithmetic", num_train=1, num_heldout=1)
    >>> list(next(verl_rows(task, task.train, "train")))
    ['data_source', 'prompt', 'ability', 'reward_model', 'extra_info']
    """
    for index, example in enumerate(examples):
        yield {
            "data_source": task.name,
            "prompt": task.messages(example),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.answer},
            "extra_info": {"index": index, "split": split, **example_columns(example)},
        }


def trl_rows(task: Task, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    """A chat as ``prompt``, and the columns that our grader reads."""
    for example in examples:
        yield {"prompt": task.messages(example), **example_columns(example)}


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """All rows in one file.

    Raises:
        UserError: there are no rows, or the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    if not listed:
        raise UserError(f"There is nothing to write to {path.name}: the task has no such problems.")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from error


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """One JSON object per line.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from error
