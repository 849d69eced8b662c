"""Wrappers that change a task: reward functions of the user, dialogs with tools, a request to think again.

Reward functions written for verl or TRL work unchanged, unless they require ``trainer_state`` or ``prompt_ids``.
``reward.path`` names a Python file, ``reward.name`` one or several of its functions. The parameters of a function,
plain or ``async``, identify its interface:

- verl's ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict``, called once per
  response. In a dict, ``score`` is the reward; the other entries are stored, and numbers logged as metrics.
- TRL's ``function(prompts, completions, **columns) -> list[float | None]``, called once with the whole group. Prompts
  and completions are text if the prompt is text, else lists of ``{"role", "content"}`` turns. None means that the
  function does not apply. A completion of a dialog with tools has all its turns. ``completion_ids``, ``log_extra``,
  ``log_metric`` and ``environments`` (with their final attributes) are passed; ``trainer_state`` and ``prompt_ids``
  are not, because graders read responses only.

A function gets only the keywords that it accepts. Functions can also be passed as objects (:func:`sota_grpo.train`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sota_grpo.rewards.extract import is_number
from sota_grpo.rewards.functions import (
    DEFAULT_NAME,
    NEEDS_ENVIRONMENTS,
    PICKLED,
    TRL,
    TRL_PARAMETERS,
    Functions,
    RewardFunction,
    RewardFunctionError,
    RewardInputs,
    RewardOutput,
    call_function,
    load_functions,
    no_function,
    recognise,
    unpickled,
)
from sota_grpo.rewards.grading import failed_score, guarded_scores
from sota_grpo.rl.records import TURNS, VERDICTS, Example, SampledText, Score, total_reward
from sota_grpo.rl.task import Scorer, Task, prepare, scorer_of, without_examples
from sota_grpo.tasks.mixture import MixtureTask
from sota_grpo.tasks.table import TableTask, source_of

BUILTIN = "builtin"  # names the reward of the wrapped task

_TAKEN = ("kl", "overlong")  # reward terms that the trainer adds
_SOURCES = {"gsm8k": "openai/gsm8k"}  # task name: verl's data_source


def with_reward_functions(
    task: Task,
    path: str,
    names: Sequence[str] = (DEFAULT_NAME,),
    weights: Sequence[float] | None = None,
    *,
    success_above: float = 0.0,
    functions: Functions | None = None,
) -> Task:
    """Return ``task`` with the reward ``sum_k weight_k * function_k`` of the user's functions.

    The returned task has no gold response and no benchmark ``counts``. Success is decided by the first of: an entry
    ``success``, ``acc`` or ``correct`` (at least 1) in a function's dict; the task, if ``builtin`` is a name; reward >
    ``success_above``. If a function raises, that response gets an error with the line of the file; an invalid reward is
    an error, too, and so is a response for which every function returns None.

    RewardFunctionError if a file, function, name or weight cannot be used, or a TRL function requires a missing column.

    Args:
        task: any task. TRL functions get the columns of a table's row; of other tasks ``question``, ``answer``, the
            entries of ``extra``, and ``ground_truth``: the text after ``####`` in the answer, or the whole answer.
        path: the Python file, which is executed here (to check it) and in every grading process; or a file of pickled
            functions (:func:`~sota_grpo.rewards.functions.pickled`).
        names: functions to use, and names of their reward terms. ``builtin`` is the reward of ``task``. The default
            also selects the only function of a file.
        weights: one weight per name; None: 1 for each.
        functions: functions by name, used instead of the file; they are not pickled with the task.
    """
    for fault in naming_faults(names, weights):
        raise RewardFunctionError(fault)
    term_weights = dict(zip(names, weights or [1.0] * len(names), strict=True))
    scorer = FunctionScorer(without_examples(task), path, term_weights, success_above, functions)
    for fault in naming_faults([*scorer.term_weights], weights):
        raise RewardFunctionError(fault)
    for example in task.train[:1]:
        scorer.require_columns(example)
    return _scored_by(scorer, task, scorer.term_weights, reads_environments=scorer.reads_environments)


def _scored_by(score: Scorer, task: Task, term_weights: Mapping[str, float] | None = None, **changes: Any) -> Task:
    """Return a copy of ``task`` with another scorer; with other terms it has neither gold response nor ``counts``."""
    wrapped = copy.copy(task)
    if term_weights is not None:
        changes |= {"term_weights": term_weights, "gold_response": no_gold_response, "counts": None}
    vars(wrapped).update(changes, score=score)
    return wrapped


def no_gold_response(example: Example) -> None:
    """Return None: the ``gold_response`` of a task for which no response is known to earn the full reward."""


@dataclass(eq=False, repr=False)
class FunctionScorer:
    """The scorer of :func:`with_reward_functions`; ``term_weights`` are weights by name, ``task`` has no examples.

    It has ``score_group`` if a function is TRL's. Pickling keeps the path of the file, which is then executed again.
    """

    task: Task
    path: str
    term_weights: dict[str, float]
    success_above: float
    passed: Functions | None = None

    def __post_init__(self) -> None:
        self.path = str(Path(self.path).expanduser().resolve())  # a grading process may have another working directory
        self._is_pickled = self.path.endswith(PICKLED)
        # the task is also scored if its replies answer turns
        self._adds_task_terms = BUILTIN in self.term_weights or getattr(self.task, "replies", False)
        if len(self._functions) == len(self.term_weights) == 1:  # the only function of a file needs no name
            self.term_weights = dict.fromkeys(self._functions, *self.term_weights.values())
        forms = {function.form for function in self._functions.values()}
        if TRL in forms:  # without a TRL function, each response is graded alone, with a separate time limit
            self.score_group = self._scores

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_functions"} | {"passed": None}

    def __call__(self, response: str, example: Example) -> Score:
        return self._scores([(response, example)])[0]

    def prepare(self) -> None:
        """Load the functions, and prepare the task's scorer if it is used, outside the first response's time limit."""
        _ = self._functions
        if self._adds_task_terms:
            prepare(self.task.score)

    def _scores(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        # Copies, because a function may modify its arguments and the group shares one example.
        group = [reward_inputs(self.task, response, copy.deepcopy(example)) for response, example in pairs]
        builtin: Sequence[Score | None] = [None] * len(group)
        if self._adds_task_terms:
            builtin = guarded_scores(self.task.score, self.task.term_weights, pairs)
        outputs = {name: call_function(f, self._file_of(f), group) for name, f in self._functions.items()}
        rows = zip(*outputs.values(), builtin, strict=True)
        return [self._total(dict(zip(outputs, row, strict=True)), score) for *row, score in rows]

    def require_columns(self, example: Example) -> None:
        """Raise ``RewardFunctionError`` if a required parameter of a TRL function is neither a column nor TRL's own."""
        offered = [*reward_inputs(self.task, "", example).columns, "ground_truth"]
        for function in self._functions.values():
            missing = [name for name in function.required if name not in (*offered, *TRL_PARAMETERS)]
            if function.form == TRL and missing:
                raise RewardFunctionError(
                    f"{self.path}: {function.name} has the parameters {', '.join(missing)}, but the data has "
                    f"the columns {', '.join(offered)}; rename a column or give the parameter a default value."
                )

    @property
    def reads_environments(self) -> bool:
        """Whether a TRL function accepts the keyword ``environments``."""
        return any(f.form == TRL and (f.taken is None or "environments" in f.taken) for f in self._functions.values())

    @cached_property
    def _functions(self) -> dict[str, RewardFunction]:
        names = [name for name in self.term_weights if name != BUILTIN]
        if self.passed is None and not self._is_pickled:
            return {function.name: function for function in load_functions(self.path, names)}
        functions = unpickled(Path(self.path)) if self.passed is None else self.passed
        for name in names:
            if name not in functions:
                raise RewardFunctionError(no_function(self.path, name, functions))
        return {name: recognise(functions[name], name, "reward") for name in names}

    def _file_of(self, function: RewardFunction) -> str:
        code = getattr(function.call, "__code__", None)
        return code.co_filename if self._is_pickled and code is not None else self.path

    def _total(self, outputs: Mapping[str, RewardOutput], builtin: Score | None) -> Score:
        terms = {name: output.value for name, output in outputs.items()}
        errors = [output.error for output in outputs.values() if output.error is not None]
        verdicts = [verdict for output in outputs.values() for verdict in _verdicts(output.info)]
        info = {  # with several functions, entries are prefixed by the function's name
            name if len(outputs) == 1 else f"{function}/{name}": value
            for function, output in outputs.items()
            for name, value in output.info.items()
        }
        reply = None if builtin is None else builtin.reply
        if builtin is not None and BUILTIN in self.term_weights:
            terms[BUILTIN] = _reward(builtin.terms, self.task.term_weights)
            errors += [builtin.error] if builtin.error is not None else []
            verdicts.append(builtin.success)
            info |= dict(builtin.info)
        if errors:
            return failed_score(self.term_weights, errors[0])
        reward = _reward(terms, self.term_weights)
        success = verdicts[0] if verdicts else reward is not None and reward > self.success_above
        return Score({name: terms[name] for name in self.term_weights}, success, info=info, reply=reply)


def _verdicts(info: Mapping[str, Any]) -> list[bool]:
    return [bool(info[name] >= 1) for name in VERDICTS if isinstance(info.get(name), (bool, int, float))]


def reward_inputs(task: Task, response: str, example: Example) -> RewardInputs:
    """Return the inputs of reward functions for a response: the columns of a table's row, or an example's fields."""
    if isinstance(task, MixtureTask):
        _, task, example = task.resolve(example)
    ids = response.token_ids if isinstance(response, SampledText) else None
    record = _record_of(response)
    if isinstance(task, TableTask):
        prompt, truth, columns = (example.extra[name] for name in ("prompt", "ground_truth", "columns"))
        source = source_of(example) or task.name
    else:
        _, mark, final = example.answer.rpartition("####")
        truth = final.strip() if mark else example.answer
        truth = truth.replace(",", "") if mark and is_number(truth) else truth  # as in verl's files
        prompt, columns = task.messages(example), {"question": example.query, "answer": example.answer, **example.extra}
        source = _SOURCES.get(task.name, task.name)
    return RewardInputs(
        response, prompt, truth, columns, source, ids, record.get("messages"), record.get("environment")
    )


def row_of(task: Task, example: Example) -> dict[str, Any]:
    """Return an example's dataset row as environments and agents get it: its columns, ground truth and prompt."""
    inputs = reward_inputs(task, "", example)
    return {"ground_truth": inputs.ground_truth, **inputs.columns, "prompt": inputs.prompt}


def naming_faults(names: Sequence[str], weights: Sequence[float] | None) -> Iterator[str]:
    """Yield a message for each error in the names and weights of reward functions."""
    if not names or not all(names) or len(set(names)) < len(names):
        yield f"reward.name={list(names)} is empty or has an empty or repeated name; give different names."
    for name in names:
        if not name.isascii():
            yield f"the reward function {name} has a non-ASCII name, which cannot name a metric; rename it."
        if name in _TAKEN:
            yield f"{name} is the name of a built-in reward term; give the function another name."
        if name == "std":
            yield "the reward function std has the name of another metric, reward/std; rename it."
    if weights is not None and len(weights) != len(names):
        functions = f"{len(names)} functions ({', '.join(names)})"
        yield f"reward.weights has {len(weights)} entries for {functions}; give one weight per function."
    if weights is not None and not all(map(math.isfinite, weights)):
        yield f"reward.weights={list(weights)} has a value that is not finite; give finite numbers."


def _reward(terms: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of the terms that apply; None if no term applies."""
    return total_reward(terms, weights) if any(value is not None for value in terms.values()) else None


def without_terms(task: Task) -> Task:
    """Return a copy of ``task`` without reward terms, for a reward that only a judge or an environment gives."""
    return _scored_by(_no_score, task, {})


def _no_score(response: str, example: Example) -> Score:
    return Score({}, success=False)


ENVIRONMENT = "environment"  # the reward term of ``get_reward``
_COUNTED = ("tool_calls", "tool_errors", "requests")


def with_tools(task: Task, *, has_reward: bool, adds_task_terms: bool, success_above: float = 0.0) -> Task:
    """Return a copy of ``task`` for dialogs with tools, whose scores also use the dialog's record.

    ``info`` gets ``tool_calls``, ``tool_errors``, ``requests`` (of an agent) and ``ended_by_turns`` (1 if the turn
    limit ended the dialog), which are logged as metrics, and what an agent returned besides its reward; if that
    has ``success``, ``acc`` or ``correct``, it decides success. A dialog whose environment was lost has an error.

    Args:
        task: any task, with its own reward or that of functions.
        has_reward: the environment has ``get_reward``, which becomes the term ``environment`` with weight 1.
        adds_task_terms: also use the task's terms; else success is an environment reward above ``success_above``.

    RewardFunctionError if a function of the task has the name of the environment's reward.
    """
    weights = {**(task.term_weights if adds_task_terms else {}), **({ENVIRONMENT: 1.0} if has_reward else {})}
    if adds_task_terms and ENVIRONMENT in task.term_weights:
        raise RewardFunctionError(f"{ENVIRONMENT} names the environment's reward; give the function another name.")
    change = partial(_of_dialog, weights, adds_task_terms, success_above)
    scorer = ChangedScorer(scorer_of(task) if adds_task_terms else _no_score, change)
    return _scored_by(scorer, task, weights if has_reward or not adds_task_terms else None)


class ChangedScorer:
    """Applies ``change`` to the scores of ``score``, whose ``score_group`` gets no dialog that lost its environment."""

    def __init__(self, score: Scorer, change: Callable[[str, Score], Score]) -> None:
        self._score: Any = score
        self._change = change
        if hasattr(score, "score_group"):
            self.score_group = self._score_group

    def __call__(self, response: str, example: Example) -> Score:
        return self._change(response, self._score(response, example))

    def prepare(self) -> None:
        prepare(self._score)

    def _score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        sound = [pair for pair in pairs if not _record_of(pair[0]).get("error")]
        scores = self._score.score_group(sound) if sound else []
        if len(scores) != len(sound):  # the caller reports it
            return scores
        left = iter(scores)
        return [
            self._change(response, Score({}, success=False) if _record_of(response).get("error") else next(left))
            for response, _ in pairs
        ]


def _of_dialog(
    term_weights: Mapping[str, float], adds_task_terms: bool, success_above: float, response: str, score: Score
) -> Score:
    record = _record_of(response)
    if not record and NEEDS_ENVIRONMENTS in (score.error or ""):
        score = Score(dict.fromkeys(score.terms), success=False)  # a start-up check grades a text without a dialog
    error = record.get("error") or score.error
    if error is not None:
        return failed_score(term_weights, error)
    reward, terms = record.get("reward"), dict(score.terms)
    if ENVIRONMENT in term_weights:
        terms[ENVIRONMENT] = reward
    returned = record.get("info", {})
    info = {**score.info, **returned} | {name: record[name] for name in _COUNTED if name in record}
    info |= {"ended_by_turns": int(record["ended"] == TURNS)} if record else {}
    is_success = score.success if adds_task_terms else reward is not None and reward > success_above
    return Score(terms, next(iter(_verdicts(returned)), is_success), info=info)


def _record_of(response: str) -> Mapping[str, Any]:
    return getattr(response, "record", None) or {}


MESSAGE = (
    "That does not look right. Can you see what went wrong? Think about it again, step by step, and then give the "
    "final answer in the form that was asked for."
)


def think_again(task: Task, message: str = MESSAGE) -> Task:
    """Return a copy of ``task`` whose scores reply to each unsuccessful response with ``message`` as a user turn.

    A reply of the task takes precedence; a grader error ends the dialog.

    >>> from sota_grpo.tasks import make_task
    >>> task = think_again(make_task("arithmetic", num_train=1, num_heldout=1), message="Think again.")
    >>> task.score("#### -1", task.train[0]).reply
    {'role': 'user', 'content': 'Think again.'}
    >>> print(task.score(task.gold_response(task.train[0]), task.train[0]).reply)
    None
    """
    reply = {"role": "user", "content": message}
    scorer = ChangedScorer(scorer_of(task), partial(_with_reply, reply))
    return _scored_by(scorer, task)


def _with_reply(reply: Mapping[str, str], response: str, score: Score) -> Score:
    ends = score.success or score.error is not None or score.reply is not None
    return score if ends else replace(score, reply=reply)
