"""The judge of a run, from its config: whom it asks, what about, and what becomes of the task."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sota_grpo.config import Config, rubric_file
from sota_grpo.config.mixture import task_configs
from sota_grpo.config.secrets import JUDGE_KEY, key_of
from sota_grpo.errors import UserError
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.grading import Grader
from sota_grpo.rewards.judge.client import TERM, JudgeClient, JudgedGrader, Rules, VerdictCache
from sota_grpo.rewards.judge.questions import RUBRIC, Endpoint
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task, without_examples

CACHE_FILE = "judge.jsonl"
_LONGEST_RUBRIC = 1 << 16


def judged_task(config: Config, task: Task, make_grader: Any, run_dir: Path | None) -> tuple[Task, Grader]:
    """``task`` with a judge's terms, and its grader; both as they would be without one, where the config names none.

    Nobody knows how much of a judge's term a gold answer earns, so the task has no gold responses then.

    Args:
        make_grader: of a task without a judge's terms.
        run_dir: where what the judge says is kept; None: nowhere.
    """
    options = config.reward.judge
    if options.kind is None:
        return task, make_grader(task)
    assert options.url is not None
    if config.env.mixture is None:
        rules: dict[str | None, Rules] = {None: _rules_of(config, TERM)}
    else:
        configs = task_configs(config).items()
        rules = {
            name: _rules_of(each, f"{name}/{TERM}") for name, each in configs if each.reward.judge.kind is not None
        }
    starting("Asking for the judge")
    endpoint = Endpoint(options.kind, options.model or "", extra_body=options.extra_body or {})
    cache = VerdictCache(run_dir and run_dir / CACHE_FILE)
    judge = JudgeClient(options.url, endpoint, cache, api_key=key_of(JUDGE_KEY))
    try:
        judge.connect()
        grader = JudgedGrader(make_grader(task), judge, without_examples(task), rules)
    except BaseException:
        judge.close()
        raise
    changed = copy.copy(task)
    vars(changed).update(term_weights=grader.term_weights, gold_response=_no_gold_response, is_judged=True)
    return changed, grader


def _no_gold_response(example: Example) -> None: ...


def _rules_of(config: Config, term: str) -> Rules:
    options = config.reward.judge
    rubric, file = options.rubric or RUBRIC, rubric_file(options.rubric)
    if file is not None:
        try:
            rubric = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            kind = type(error).__name__
            raise UserError(f"reward.judge.rubric={options.rubric} cannot be read ({kind}); correct it.") from error
        if not rubric.strip() or len(rubric) > _LONGEST_RUBRIC:
            raise UserError(
                f"reward.judge.rubric={options.rubric} is empty, or longer than {_LONGEST_RUBRIC} characters; mend it."
            )
    success_above = config.reward.success_above if options.alone else None
    return Rules(term, options.weight, rubric, options.reference, success_above)


def judge_metrics(grader: Grader, others: Callable[[], Mapping[str, float]]) -> Callable[[], Mapping[str, float]]:
    """``others``, with the judge's metrics where ``grader`` has a judge."""
    return (lambda: {**others(), **grader.metrics()}) if isinstance(grader, JudgedGrader) else others
