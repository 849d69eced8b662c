"""Tasks of the package reasoning-gym (Apache-2.0), several in one run: drawn from the seed, scored by its scorers.

Its scorers read model text, so those that execute it are refused, and so are tasks that break the promises of a run
(:data:`REFUSED`). The others were tried on hostile answers, with version 0.1.25.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.rewards.extract import extract_answer
from sota_grpo.rl.records import SUBTASK, Example, Score
from sota_grpo.tasks.dataset import BaseTask, DatasetError, Row, normalised
from sota_grpo.tasks.procedural import DrawnExamples, is_heldout
from sota_grpo.tasks.questions import answering

_EXECUTES = "its scorer executes the model's text (eval or SymPy's parser)"
_EXECUTES_ITEM = "its scorer executes a text of the problem, which may come from a file of rows"
_UNSTABLE = "its problems change with Python's hash seed, so a run could not be repeated"
#: Tasks that are not offered, with the reason.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens"), _EXECUTES),
    **dict.fromkeys(("polynomial_multiplication", "puzzle24", "simple_integration"), _EXECUTES),
    **dict.fromkeys(("spiral_matrix", "string_insertion"), _EXECUTES),
    **dict.fromkeys(("bitwise_arithmetic", "number_sorting"), _EXECUTES_ITEM),
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"), _UNSTABLE),
    "codeio": "it executes bundled programs, and its problems differ from call to call",
    "coin_flip": "its scorer gives the answer 0 the full score wherever the right one is below 1",
    "complex_arithmetic": "its scorer gives the answer nan the full score",
    "game_of_life_halting": "its scorer gives any answer the full score",
    "propositional_logic": "the answer ¬¬P has the full score in most of its problems",
    "rubiks_cube": "a short answer such as R999999999 fills the memory of its scorer",
    "composite": "it is a mixture of the others; name them in env.tasks",
}
#: Tasks whose problems depend on how many there are, and that many; the others have as many as there are numbers.
_SIZES = {"acre": 1000, "gsm_symbolic": 10_000, "list_functions": 10_000}
_SIZE = 1 << 30
_DRAWS = 1000  # at most, for a problem of one side of the split
_MAX_ANSWER_CHARS = 8192  # some scorers take quadratic time
_TOO_MUCH = {"rush_hour": re.compile(r"\d{2}", re.ASCII)}  # a move by as many fields, made one by one
_TUPLES = ("arc_agi", "rearc")  # whose metadata JSON made lists of
_FORMATS = ("tags", "boxed", "any")
_OURS = {"seed": "seed=N", "size": "env.max_samples=N"}  # options of the run
SYSTEM_PROMPT = (
    "Solve the problem step by step. Then write the final answer alone {}, in the form of the problem's example where "
    "it has one."
)
_FORMS = {"tags": "between <answer> and </answer>", "boxed": "in \\boxed{}"}
_LOCK = threading.Lock()  # two of its tasks draw from the process's global random numbers


def task_faults(tasks: Any) -> Iterator[str]:
    """Yield the faults of ``env.tasks`` that can be found without the package."""
    if not tasks or not isinstance(tasks, Mapping):
        yield "env.dataset=reasoning_gym draws its problems from env.tasks; give for example env.tasks={chain_sum: 1}."
        return
    for name, value in tasks.items():
        if name in REFUSED:
            yield f"env.tasks names {name}, which is refused: {REFUSED[name]}."
        options = value if isinstance(value, Mapping) else {"weight": value}
        weight, levels = options.get("weight", 1), _levels_of(options)
        if type(weight) is not int or weight < 0:
            yield f"env.tasks.{name} has the weight {weight}, which must be a whole number of parts, 0 or more."
        if any(level is not None and (type(level) is not int or level < 0) for level in levels):
            shown = options.get("level")
            yield f"env.tasks.{name} has the level {shown}, which must be a whole number, 0 or more, or a list of such."
        if not levels or len(set(map(str, levels))) < len(levels):
            yield f"env.tasks.{name} has the levels {options['level']}; name one at least, and each once."
        for option in options.keys() & _OURS.keys():
            yield f"env.tasks.{name} has the option {option}, which the run decides; use {_OURS[option]}."
    if not any(value.get("weight", 1) if isinstance(value, Mapping) else value for value in tasks.values()):
        yield "env.tasks gives every task the weight 0; give one of them a part."


def _levels_of(options: Mapping[str, Any]) -> list[Any]:
    """Return the levels in the options of a task; None means its default options."""
    level = options.get("level")
    return list(level) if isinstance(level, Sequence) and not isinstance(level, str) else [level]


class ReasoningGymTask(BaseTask):
    """Problems of several tasks of reasoning-gym, each in proportion to its weight.

    ``reward = correct``, the score in [0, 1] of the task's own scorer; the success is a score of 1. A text at which a
    scorer fails, or to which it gives a number outside [0, 1], is wrong. ``extra`` of an example and ``info`` of a
    score have the name of the task: every task has its own metrics and accuracy (:meth:`counts`). A problem is held
    out by its text, for every seed.

    Args:
        train, heldout: examples to train on, and to evaluate on, as :meth:`load` draws them.
        tasks: by name the weight of a task (a whole number of parts; 0 leaves it out), or a dict of ``weight``,
            ``level`` (of its curriculum; of several, one is drawn for each problem) and options of its config class,
            which override the level's.
        system_prompt: replaces the task's own; an empty text is no system turn.
        answer_format: the place of the answer: ``tags``, ``boxed`` or ``any``.

    Raises:
        ValueError: another answer format.
        UserError: the package is missing, a task is unknown or refused, or it does not take an option.

    Example::

        task = ReasoningGymTask.load(tasks={"chain_sum": 2, "leg_counting": {"weight": 1, "max_animals": 4}})
        task.score("<answer>12</answer>", task.train[0]).terms  # {'correct': 0.0}
    """

    name = "reasoning_gym"

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        tasks: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        answer_format: str = "tags",
    ):
        if answer_format not in _FORMATS:
            raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(_FORMATS)}.")
        self.answer_format = answer_format
        self._requested_format = "tags" if answer_format == "any" else answer_format
        self.default_prompt = SYSTEM_PROMPT.format(_FORMS[self._requested_format])
        super().__init__(train, heldout, system_prompt=system_prompt)
        self._weights: dict[str, int] = {}
        self._levels: dict[str, list[int | None]] = {}
        self._options: dict[tuple[str, int | None], str] = {}  # of a level, as JSON, by which a dataset is kept
        for sentence in task_faults(tasks) if tasks is not None else ():
            raise UserError(sentence)
        for name, value in (tasks or {}).items():
            options = dict(value) if isinstance(value, Mapping) else {"weight": value}
            self._weights[name] = options.pop("weight", 1)
            self._levels[name] = _levels_of(options)
            for level in self._levels[name]:
                level_option = {} if level is None else {"level": level}
                task_options = {option: value for option, value in options.items() if option != "level"} | level_option
                self._options[name, level] = json.dumps(task_options, sort_keys=True)
                _source(name, self._options[name, level])

    @classmethod
    def load(
        cls, *, tasks: Mapping[str, Any], seed: int = 0, num_train: int = 8192, num_heldout: int = 512, **options: Any
    ) -> ReasoningGymTask:
        """Draw both splits (:class:`~sota_grpo.tasks.procedural.DrawnExamples`); held out are the tasks in turn."""
        task = cls(tasks=tasks, **options)
        if not task._weights:
            raise UserError(next(task_faults({})))
        task.train = DrawnExamples([partial(task._draw, task._weights)], seed, False, num_train)
        alone = [partial(task._draw, {name: weight}) for name, weight in task._weights.items() if weight]
        task.heldout = DrawnExamples(alone, seed, True, num_heldout)
        return task

    def _draw(self, weights: Mapping[str, int], rng: random.Random, heldout: bool) -> Example:
        """Draw a task by its weight, then problems of it until one is of this side of the split."""
        (name,) = rng.choices([*weights], [*weights.values()])
        levels = self._levels[name]
        level = rng.choice(levels) if len(levels) > 1 else levels[0]
        failure: Exception | None = None
        for _ in range(_DRAWS):
            try:
                item = _item(name, self._options[name, level], rng.randrange(_SIZES.get(name, _SIZE)))
            except Exception as error:  # some tasks make no problem of some numbers
                failure = error
                continue
            if is_heldout(normalised(item["question"])) == heldout:
                extra = {SUBTASK: name, "metadata": item["metadata"]} | ({"level": level} if len(levels) > 1 else {})
                return Example(item["question"], item["answer"] or "", extra)
        reason = f" ({failure})" if failure else ""
        side = "held-out problem" if heldout else "problem to train on"
        raise UserError(
            f"{_DRAWS} draws from {name} made no {side}{reason}; give env.tasks.{name} options with more problems."
        )

    def prepare(self) -> None:
        """Import the package and read its data before the deadline of the first response begins."""
        _package()
        for (name, _), options in self._options.items():
            _source(name, options)

    def score(self, response: str, example: Example) -> Score:
        """Return the score of the task's own scorer."""
        name, answer = example.extra[SUBTASK], extract_answer(response, self.answer_format)
        wrong = Score({"correct": 0.0}, success=False, info={"task": name})
        if answer is None or len(answer) > _MAX_ANSWER_CHARS or (name in _TOO_MUCH and _TOO_MUCH[name].search(answer)):
            return wrong
        metadata = json.loads(json.dumps(example.extra["metadata"]))  # a copy: some scorers write into it
        if name in _TUPLES:
            metadata["output"] = tuple(map(tuple, metadata["output"]))
        entry = {"question": example.query, "answer": example.answer, "metadata": metadata}
        level = example.extra.get("level", self._levels.get(name, [None])[0])
        source = _source(name, self._options.get((name, level), "{}"))
        try:
            value = float(source.score_answer(answer, entry))
        except Exception:  # model text may raise anything in a scorer
            return wrong
        if not 0.0 <= value <= 1.0:  # one scorer gives wrong answers more than 1
            return wrong
        return Score({"correct": value}, success=value == 1.0, info={"task": name})

    def counts(self, score: Score, example: Example) -> dict[str, tuple[float, float]]:
        """Return the success of one trial, by the name of the task."""
        return {example.extra[SUBTASK]: (int(score.success), 1)}

    def gold_response(self, example: Example) -> str | None:
        """Return the task's own answer in its place; None where it has none."""
        return answering(self._requested_format, example.answer) if example.answer else None

    def read_row(self, row: Row, location: str) -> Example:
        """Read an item of the package: ``metadata`` with ``source_dataset``, ``answer``, perhaps ``question``."""
        metadata, answer = row.get("metadata"), row.get("answer")
        name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if not isinstance(metadata, Mapping) or not isinstance(name, str):
            raise DatasetError(f"{location}: there is no metadata with source_dataset; give items of reasoning-gym.")
        if answer is not None and not isinstance(answer, str):
            raise DatasetError(f"{location}: column 'answer' holds {type(answer).__name__}, not text.")
        try:
            _require_known(name)
        except UserError as error:
            raise DatasetError(f"{location}: {error}") from error
        return Example(str(row.get("question", "")), answer or "", {SUBTASK: name, "metadata": dict(metadata)})


def _package() -> Any:
    """Return the package's registry of tasks; its import takes seconds."""
    try:
        import reasoning_gym.factory as factory
    except ImportError as error:
        raise UserError(
            "env.dataset=reasoning_gym needs the package reasoning-gym; install it with "
            f"pip install -e '.[reasoning-gym]' ({error})."
        ) from error
    return factory


def _require_known(name: str) -> None:
    if name in REFUSED:
        raise UserError(f"{name} is refused: {REFUSED[name]}.")
    known = sorted(_package().DATASETS.keys() - REFUSED.keys())
    if name not in known:
        near = get_close_matches(name, known, n=3)
        raise UserError(
            f"There is no task {name} in reasoning-gym"
            + (f"; did you mean {' or '.join(near)}?" if near else f"; the tasks are {', '.join(known)}.")
        )


@cache
def _source(name: str, options: str) -> Any:
    """Return the dataset that makes and scores the problems of a task; ``options`` (JSON) include ``level``."""
    _require_known(name)
    factory, chosen = _package(), json.loads(options)
    kind, config_class = factory.DATASETS[name]
    level = chosen.pop("level", None)
    known = config_class.__dataclass_fields__.keys() - _OURS.keys()
    for option in chosen.keys() - known:
        takes = ", ".join(sorted(["weight", *(["level"] if name in factory.CURRICULA else []), *known]))
        raise UserError(f"env.tasks.{name} has no option {option}; it takes {takes}.")
    values: dict[str, Any] = {}
    if level is not None:  # an attribute of the curriculum with fewer levels has its last one
        if name not in factory.CURRICULA:
            raise UserError(f"env.tasks.{name} has level={level}, and this task has no curriculum; leave it out.")
        curriculum = factory.create_curriculum(name)
        highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if level > highest:
            raise UserError(f"env.tasks.{name} has level={level}, and its curriculum ends at level={highest}.")
        curriculum.set_global_level(level)
        made = curriculum.generate_configuration()
        values = {field: getattr(made, field) for field in made.__dataclass_fields__}
    values |= chosen | {"seed": 0, "size": _SIZES.get(name, _SIZE)}
    try:
        return kind(config=config_class(**values))
    except Exception as error:  # assertions and type errors of the config class
        what = f"level={level} " if level is not None else ""
        raise UserError(
            f"env.tasks.{name} cannot be made with {what}{chosen or ''} ({type(error).__name__}: {error}); choose "
            "other values."
        ) from error


def _item(name: str, options: str, index: int) -> dict[str, Any]:
    """Return problem ``index`` of a task as JSON has it: question, answer (perhaps None) and metadata."""
    import numpy

    source = _source(name, options)
    printed = contextlib.redirect_stdout(io.StringIO()) if name == "bf" else contextlib.nullcontext()  # a dot each
    with _LOCK, printed:  # global random numbers start at the index, and are restored
        before, before_numpy = random.getstate(), numpy.random.get_state()
        random.seed(index)
        try:
            item = source[index]
        finally:
            random.setstate(before)
            numpy.random.set_state(before_numpy)
    return json.loads(json.dumps(item, default=str))  # fractions become text; no scorer reads them
