"""Rewards from functions of the user's own, written for verl or for TRL, unchanged.

``reward.path=reward_function.py`` names a Python file, ``reward.name`` a function in it or several. Two forms are told
apart by their parameters, and both may be ``async``:

- verl's ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict``, called once per
  response. Of a dict, ``score`` is the reward; the other entries are kept beside it, numbers as metrics.
- TRL's ``function(prompts, completions, **columns) -> list[float | None]``, called once with the whole group. Prompts
  and completions are text where the prompt is text, else lists of ``{"role", "content"}`` turns. None means that the
  function does not apply. ``log_extra`` and ``log_metric`` are passed; ``completion_ids`` and ``trainer_state`` are
  not, because graders read text and nothing else.

A function is given those keywords that it takes. ``builtin`` as a name is the task's own reward, to stand beside them.
Functions can be passed as objects, too (:func:`sota_grpo.train`); the file is then one of pickled functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.rewards.function_calls import Asked, Found, call_function
from sota_grpo.rewards.function_file import (
    PICKLED,
    TRL,
    TRL_PARAMETERS,
    Functions,
    RewardFunction,
    RewardFunctionError,
    load_functions,
    recognise,
    unpickled,
)
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task, failed_score, guarded_score, total_reward
from sota_grpo.tasks.table import TableTask

DEFAULT_NAME = "compute_score"  # verl's
BUILTIN = "builtin"  # the task's own reward

_TAKEN = ("kl", "overlong")  # reward terms that are not graders'
_SUCCESS = ("success", "acc", "correct")  # entries of a function that say whether the response is right
_SOURCES = {"gsm8k": "openai/gsm8k"}  # verl's name of a task's data


class WithRewardFunctions:
    """A task whose reward comes from functions of the user's own: ``reward = sum_k weight_k * function_k``.

    Everything else is the task's. A response is a success where a function says so (an entry ``success``, ``acc`` or
    ``correct`` of its dict, true or at least 1), else where ``builtin`` does, else where the reward is greater than
    ``success_above``. What a function raises or returns that is no reward is counted as an error of that response
    alone, with the line of the file. A response to which no function applies has a reward of 0 and no terms.

    Args:
        task: any task; functions of TRL's form get its columns, or ``question``, ``answer`` and what else its examples
            hold, and ``ground_truth`` is the final answer of a worked one.
        path: the Python file. It is run here, so that mistakes are told at once, and again in every grader's process.
            Or a file of pickled functions (:func:`~sota_grpo.rewards.function_file.pickled`).
        names: of the functions, each the name of its reward term; ``builtin`` is the task's own reward.
        weights: of the functions; None weighs each 1.
        success_above: see above.
        functions: objects that are called in this process instead of what ``path`` holds, by name.

    Raises:
        RewardFunctionError: a file or function that cannot be used, or names and weights that do not match.

    Example::

        task = WithRewardFunctions(TableTask.load(path="train.parquet"), "reward_function.py")
        task = WithRewardFunctions(task, "rewards.py", ["accuracy", "brevity"], weights=[1.0, 0.2])
    """

    def __init__(
        self,
        task: Task,
        path: str,
        names: Sequence[str] = (DEFAULT_NAME,),
        weights: Sequence[float] | None = None,
        *,
        success_above: float = 0.0,
        functions: Functions | None = None,
    ) -> None:
        _require_names(names, weights)
        self.name = task.name
        self.train, self.heldout = task.train, task.heldout
        self.term_weights: Mapping[str, float] = dict(zip(names, weights or [1.0] * len(names), strict=True))
        self._task = copy.copy(task)
        self._task.train = self._task.heldout = ()  # see scorer_of
        scorer = FunctionScorer(self._task, path, self.term_weights, success_above, functions)
        scorer.check(task.train[:1])
        self.score = scorer.of_groups() if scorer.sees_groups() else scorer

    def messages(self, example: Example) -> list[dict[str, str]]:
        return self._task.messages(example)

    def gold_response(self, example: Example) -> None:
        """None: nobody knows what a user's function rewards most."""

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        return self._task.read_row(row, place)


class FunctionScorer:
    """The scorer of :class:`WithRewardFunctions`; it pickles the path of the file and loads it where it runs.

    Args:
        task: without examples.
        path: of the file.
        term_weights: weight of each function, by name.
        success_above: least reward, itself excluded, of a success.
        functions: see :class:`WithRewardFunctions`; they stay in this process.
    """

    def __init__(
        self,
        task: Task,
        path: str,
        term_weights: Mapping[str, float],
        success_above: float,
        functions: Functions | None = None,
    ) -> None:
        self._task, self._term_weights, self._success_above = task, dict(term_weights), success_above
        self._path = str(Path(path).expanduser().resolve())  # a grader's process may have another working directory
        self._replies = getattr(task, "replies", False)  # then it answers turns, whoever rewards them
        self._passed = functions
        self._loaded: dict[str, RewardFunction] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_passed": None}

    def __call__(self, response: str, example: Example) -> Score:
        return self.together([(response, example)])[0]

    def prepare(self) -> None:
        """Run the file now, so that what it imports does not count against the first response's deadline."""
        self._functions()

    def sees_groups(self) -> bool:
        """Whether a function is given a group at once; else each response has a deadline of its own."""
        return any(function.form == TRL for function in self._functions().values())

    def of_groups(self) -> GroupScorer:
        return GroupScorer(self._task, self._path, self._term_weights, self._success_above, self._passed)

    def together(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        """The scores of a group's responses, whose functions of TRL's form see them all.

        Raises:
            Exception: what such a function raised, if there are several responses.
        """
        # Copies: siblings share an example, and a function may change what it is given.
        group = [asked(self._task, response, copy.deepcopy(example)) for response, example in pairs]
        needed = BUILTIN in self._term_weights or self._replies
        builtin = [self._builtin(*pair) for pair in pairs] if needed else []
        found = {name: call_function(one, self._file_of(one), group) for name, one in self._functions().items()}
        return [
            self._total({name: column[row] for name, column in found.items()}, builtin[row] if builtin else None)
            for row in range(len(group))
        ]

    def check(self, examples: Iterable[Example]) -> None:
        """Load the file, and see that every function gets the columns of ``examples`` that it asks for.

        Raises:
            RewardFunctionError: as :func:`load_functions`, or naming the column.
        """
        for example in examples:
            for function in self._functions().values():
                self._require_columns(function, asked(self._task, "", example))
        self._functions()

    def _require_columns(self, function: RewardFunction, row: Asked) -> None:
        if function.form == TRL:
            offered = [*row.columns, "ground_truth"]
            missing = [name for name in function.required if name not in (*offered, *TRL_PARAMETERS)]
            if missing:
                raise RewardFunctionError(
                    f"{self._path}: {function.name} asks for {', '.join(missing)}, but the columns of the data are "
                    f"{', '.join(offered)}; rename one or give the parameter a default value."
                )

    def _functions(self) -> dict[str, RewardFunction]:
        if self._loaded is None:
            names = [name for name in self._term_weights if name != BUILTIN]
            self._loaded = {function.name: function for function in self._load(names)}
        return self._loaded

    def _load(self, names: Sequence[str]) -> list[RewardFunction]:
        if self._passed is None and not self._is_pickled:
            return load_functions(self._path, names)
        found = unpickled(Path(self._path)) if self._passed is None else self._passed
        missing = [name for name in names if name not in found]
        if missing:
            raise RewardFunctionError(
                f"{self._path} has no function {missing[0]!r}; its functions are {', '.join(found)}: "
                "correct reward.name."
            )
        return [recognise(found[name], name, "reward") for name in names]

    def _file_of(self, function: RewardFunction) -> str:
        """Where the code of ``function`` is written, to name the line at which it fails."""
        code = getattr(function.call, "__code__", None)
        return code.co_filename if self._is_pickled and code is not None else self._path

    @property
    def _is_pickled(self) -> bool:
        return self._path.endswith(PICKLED)

    def _builtin(self, response: str, example: Example) -> Score:
        return guarded_score(self._task.score, self._task.term_weights, response, example)

    def _total(self, found: Mapping[str, Found], builtin: Score | None) -> Score:
        """One response's score of what its functions gave."""
        terms = {name: one.value for name, one in found.items()}
        errors = [one.error for one in found.values() if one.error is not None]
        said = [bool(one.info[name] >= 1) for one in found.values() for name in _SUCCESS if _is_number(one.info, name)]
        info, reply = _joined_info(found), None if builtin is None else builtin.reply
        if builtin is not None and BUILTIN in self._term_weights:
            terms[BUILTIN] = _reward(builtin.terms, self._task.term_weights)
            errors += [builtin.error] if builtin.error is not None else []
            said.append(builtin.success)
            info |= dict(builtin.info)
        if errors:
            return failed_score(self._term_weights, errors[0])
        reward = _reward(terms, self._term_weights)
        success = said[0] if said else reward is not None and reward > self._success_above
        return Score({name: terms[name] for name in self._term_weights}, success, info=info, reply=reply)


class GroupScorer(FunctionScorer):
    """The same where a function sees groups: graders hand it the responses of a group together."""

    def score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        """See :meth:`FunctionScorer.together` and :func:`sota_grpo.rl.task.guarded_scores`."""
        return self.together(pairs)


def asked(task: Task, response: str, example: Example) -> Asked:
    """What functions read of a response: the row of a table, or what another task's example holds."""
    if isinstance(task, TableTask):
        return task.asked(response, example)
    final = example.answer.rpartition("####")[2].strip().replace(",", "") if "####" in example.answer else None
    return Asked(
        response=response,
        prompt=task.messages(example),
        ground_truth=example.answer if final is None else final,  # of GSM8K's worked answers, as verl's files have it
        columns={"question": example.query, "answer": example.answer, **example.extra},
        data_source=_SOURCES.get(task.name, task.name),
    )


def _require_names(names: Sequence[str], weights: Sequence[float] | None) -> None:
    if not names or len(set(names)) < len(names):
        raise RewardFunctionError(f"reward.name names {list(names)}; give one function or several different ones.")
    odd = [name for name in names if not name.isascii()]
    if odd:
        raise RewardFunctionError(f"{odd[0]} names a metric, which is ASCII; give the function another name.")
    taken = [name for name in names if name in _TAKEN]
    if taken:
        raise RewardFunctionError(f"{taken[0]} is a reward term already; give the function another name.")
    if weights is not None and len(weights) != len(names):
        raise RewardFunctionError(
            f"reward.weights has {len(weights)} entries for {len(names)} functions ({', '.join(names)}); give as many."
        )
    if weights is not None and not all(math.isfinite(weight) for weight in weights):
        raise RewardFunctionError(f"reward.weights={list(weights)} holds a number that is not finite.")


def _reward(terms: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the terms that apply; None where none does."""
    return total_reward(terms, weights) if any(value is not None for value in terms.values()) else None


def _is_number(info: Mapping[str, Any], name: str) -> bool:
    return isinstance(info.get(name), (bool, int, float))


def _joined_info(found: Mapping[str, Found]) -> dict[str, Any]:
    """What stood beside the rewards; of several functions, each entry under its function's name."""
    if len(found) == 1:
        return dict(next(iter(found.values())).info)
    return {f"{function}/{name}": value for function, one in found.items() for name, value in one.info.items()}
