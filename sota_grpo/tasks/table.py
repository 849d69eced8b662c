"""The task ``table``: prompts and ground truths in a file or hub dataset, including verl's Parquet files."""

from __future__ import annotations

import datetime
import decimal
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sota_grpo.rewards.extract import answers_equal, extract_answer, is_number
from sota_grpo.rewards.maths import math_equal
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import (
    DatasetError,
    FileTask,
    Row,
    columns_found,
    load_rows,
    normalised,
    number_text,
    present,
)
from sota_grpo.tasks.questions import GSM8KTask, answering

Chat = list[dict[str, Any]]

TEMPLATE_COLUMN = "chat_template_kwargs"  # per-row template arguments in TRL's data
DEFAULT_ANSWER = "ground_truth"  # column
GSM8K_SOURCES = ("openai/gsm8k",)
MATH_SOURCES = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "EleutherAI/hendrycks_math",
)


def plain_columns(row: Row, location: str) -> dict[str, Any]:
    """Return the columns in JSON types (dates as text, arrays as lists, NaN as None); DatasetError for other types."""
    return {str(name): _plain(value, f"{location}: column {name!r}") for name, value in row.items()}


def _plain(value: Any, location: str) -> Any:
    value = present(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, location) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, location) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if hasattr(value, "tolist"):  # NumPy, pandas and torch values
        return _plain(value.tolist(), location)
    raise DatasetError(
        f"{location} holds {type(value).__name__}, which is not text, a number, or a list or dict of these; remove the "
        "column or convert it to text."
    )


def chat_of(prompt: Any, location: str) -> Chat:
    """Return the turns of a chat prompt, without the None entries that Parquet adds; DatasetError if malformed."""
    if not isinstance(prompt, list) or not prompt or not all(isinstance(turn, Mapping) for turn in prompt):
        raise DatasetError(
            f"{location} is neither text nor a chat; give a string, or a list of {{'role', 'content'}} turns."
        )
    for number, turn in enumerate(prompt, start=1):
        for name in ("role", "content"):
            if not isinstance(turn.get(name), str):
                problem = f"holds {type(turn[name]).__name__}" if name in turn else "is missing"
                raise DatasetError(f"{location}, turn {number}: {name!r} {problem}; role and content must be text.")
    if prompt[-1]["role"] == "assistant" or not any(turn["role"] == "user" for turn in prompt):
        raise DatasetError(f"{location}: a chat must have a user turn and not end in an assistant turn; mend the row.")
    return [{name: value for name, value in turn.items() if value is not None} for turn in prompt]


def _turns(prompt: str | Chat) -> Chat:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]


def text_of_answer(ground_truth: Any) -> str:
    """Return the ground truth as text: text as it is, None as "", a float by :func:`number_text`, others as JSON."""
    if ground_truth is None or isinstance(ground_truth, str):
        return ground_truth or ""
    if isinstance(ground_truth, float):
        return number_text(ground_truth)
    return json.dumps(ground_truth, ensure_ascii=False)


def answer_format_of(source: str, answer_format: str | None) -> str:
    """Return the format; if None, ``hash`` for ``GSM8K_SOURCES``, ``boxed`` for ``MATH_SOURCES``, else ``any``."""
    if answer_format is not None:
        return answer_format
    return "hash" if source in GSM8K_SOURCES else "boxed" if source in MATH_SOURCES else "any"


def is_right(response: str, source: str, ground_truth: Any, answer_format: str | None) -> bool:
    """Return whether the response is right by the rule of the ``data_source`` ``source``.

    ``answer_format`` None is :func:`answer_format_of`; ValueError if it is unknown. The rules:

    - ``openai/gsm8k``: the same number exactly (:class:`~sota_grpo.tasks.questions.GSM8KTask`).
    - ``MATH_SOURCES``: an expression equivalent (:func:`~sota_grpo.rewards.maths.math_equal`) to the ground truth, or
      to one entry if that is a list.
    - others: :func:`~sota_grpo.rewards.extract.answers_equal` to the ground truth, or to one entry if that is a list.
      If the truth is no number, ``any`` tries tags, boxed and ``####``, then the text after "the answer is", then the
      whole response, never the last number.

    >>> is_right("I say <answer>paris </answer>", "mine", "Paris", None), is_right("Paris", "mine", "Paris", "tags")
    (True, False)
    >>> is_right("x is 0.5", "mine", ["1/2", "one half"], None)
    True
    """
    form = answer_format_of(source, answer_format)
    if source in GSM8K_SOURCES:
        return GSM8KTask(answer_format=form).score(response, Example("", text_of_answer(ground_truth))).success
    truths = _texts(ground_truth)
    if source in MATH_SOURCES:
        answer = extract_answer(response, form, mathematics=True)
        return answer is not None and any(math_equal(truth, answer) for truth in truths)
    answers = {words: extract_answer(response, form, words=words) for words in (False, True)}
    pairs = [(answers[not is_number(truth)], truth) for truth in truths]
    return any(answer is not None and answers_equal(answer, truth) for answer, truth in pairs)


def _texts(ground_truth: Any) -> list[str]:
    """Return the right answers as a list of text; empty if only a reward function can grade the ground truth."""
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [text_of_answer(truth) for truth in truths] if all(isinstance(t, (str, int, float)) for t in truths) else []


@dataclass(eq=False, repr=False, kw_only=True)
class TableTask(FileTask):
    """Prompts with ground truths from a table: ``reward = correct``, 1 for a right answer and 0 otherwise.

    A prompt is text (one user turn) or a chat, a list of ``{"role", "content"}`` turns. Rows with verl's columns
    (``data_source``, ``prompt``, ``reward_model`` with its ``ground_truth``, ...) need no option. Examples keep the
    other columns, for reward functions (:func:`sota_grpo.tasks.wrappers.with_reward_functions`). The ``data_source``
    selects the grading rule: see :func:`is_right`.

    Args:
        prompt_column: column of the prompts.
        answer_column: column of the ground truths, unless the columns are verl's. If it is the default and data has no
            column ``ground_truth``, the column ``answer`` is used.
        answer_format: see :func:`~sota_grpo.rewards.extract.extract_answer`; None is ``hash`` for GSM8K, ``boxed`` for
            MATH and ``any`` for others. With ``any``, a response that equals a ground truth in words is also right.
        system_prompt: replaces the system turn of every prompt, or is added as the first turn; an empty text removes
            the system turn; None leaves the prompts unchanged.
        answer_required: refuse rows whose ground truth this class cannot grade; False if only functions grade.

    >>> task = TableTask()
    >>> example = task.read_row({"prompt": "What is 2+2?", "ground_truth": 4}, "demo, row 1")
    >>> task.messages(example), task.score("It is 4.", example).success
    ([{'role': 'user', 'content': 'What is 2+2?'}], True)
    """

    name = "table"

    prompt_column: str = "prompt"
    answer_column: str = DEFAULT_ANSWER
    answer_format: str | None = None
    answer_required: bool = True

    def __post_init__(self) -> None:
        if self.answer_format is not None:
            extract_answer("", self.answer_format)  # raises if it is unknown

    def messages(self, example: Example) -> list[dict[str, str]]:
        """Return the turns of the prompt, with the system turn that ``system_prompt`` sets."""
        chat = _turns(example.extra["prompt"])
        if self.system_prompt is None:
            return chat
        rest = chat[1:] if chat[0]["role"] == "system" else chat
        return [{"role": "system", "content": self.system_prompt}, *rest] if self.system_prompt else rest

    def score(self, response: str, example: Example) -> Score:
        right = is_right(response, source_of(example), example.extra["ground_truth"], self.answer_format)
        return Score({"correct": float(right)}, success=right)

    def gold_response(self, example: Example) -> str | None:
        """Return the ground truth in the answer format; None if this would not be graded as right."""
        source, ground_truth = source_of(example), example.extra["ground_truth"]
        texts, form = _texts(ground_truth), answer_format_of(source, self.answer_format)
        response = answering("tags" if form == "any" else form, texts[0]) if texts else ""
        return response if is_right(response, source, ground_truth, self.answer_format) else None

    def read_row(self, row: Row, location: str) -> Example:
        """Return a row's example; the prompt may be missing, and ``answer`` replaces a missing ``answer_column``.

        ``extra`` has ``prompt``, ``ground_truth`` and ``columns`` (all but the prompt). DatasetError for a bad row.
        """
        return self._example(row, location, [self.answer_column, "answer"])

    def _rows(self, name: str, splits: Sequence[str]) -> Sequence[Row]:
        """Return the rows, of which each has all columns: None, as in Parquet and on the hub, where it lacks one."""
        rows = load_rows(name, splits)
        columns = dict.fromkeys(column for row in rows for column in row)
        return [{**columns, **row} for row in rows]

    def _problem(self, row: Row, location: str) -> Example:
        prompt = row.get(self.prompt_column)
        if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
            raise DatasetError(
                f"{location}: column {self.prompt_column!r} holds no prompt; {columns_found(row)}: set "
                "env.prompt_column, or remove the row."
            )
        is_other = self.answer_column == DEFAULT_ANSWER and DEFAULT_ANSWER not in row
        columns = [self.answer_column, "answer"] if is_other else [self.answer_column]
        return replace(self._example(row, location, columns), place=location)

    def _sides(self, name: str, eval_path: str | None) -> tuple[list[Example], list[Example] | None]:
        """Return both splits; if different chats end in the same user turn, their ``query`` is all their turns."""
        train, heldout = super()._sides(name, eval_path)
        chats = defaultdict(set)

        def whole(example: Example) -> str:
            turns = _turns(example.extra["prompt"])
            return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)

        for example in (*train, *(heldout or ())):
            chats[normalised(example.query)].add(normalised(whole(example)))

        def distinct(example: Example) -> Example:
            return replace(example, query=whole(example)) if len(chats[normalised(example.query)]) > 1 else example

        return [*map(distinct, train)], None if heldout is None else [*map(distinct, heldout)]

    def _example(self, row: Row, location: str, answer_columns: Sequence[str]) -> Example:
        columns = plain_columns(row, location)
        prompt = columns.pop(self.prompt_column, None)
        if not isinstance(prompt, str):
            prompt = "" if prompt is None else chat_of(prompt, f"{location}: column {self.prompt_column!r}")
        ground_truth = next((columns[name] for name in answer_columns if columns.get(name) is not None), None)
        model = columns.get("reward_model")
        if "data_source" in columns and isinstance(model, Mapping) and "ground_truth" in model:  # verl's
            ground_truth = model["ground_truth"]
        if columns.get(TEMPLATE_COLUMN) is not None:
            raise DatasetError(
                f"{location}: column {TEMPLATE_COLUMN!r} is not supported; remove it and set env.chat_template_kwargs, "
                "which applies to all rows."
            )
        extra = {"prompt": prompt, "ground_truth": ground_truth, "columns": columns}
        query = next(turn["content"] for turn in reversed(_turns(prompt)) if turn["role"] == "user")
        example = Example(query, text_of_answer(ground_truth), extra)
        if self.answer_required:
            self._require_gradable(example, location)
        return example

    def require_answers(self) -> None:
        """Raise ``DatasetError``, which names the row, if some example has no ground truth that the task can grade."""
        for example in (*self.train, *self.heldout):
            self._require_gradable(example, example.place)

    def _require_gradable(self, example: Example, location: str) -> None:
        ground_truth = example.extra["ground_truth"]
        if not example.answer.strip():
            raise DatasetError(
                f"{location}: column {self.answer_column!r} holds no ground truth; besides the prompt, "
                f"{columns_found(example.extra['columns'])}: set env.answer_column, or grade with reward.path."
            )
        if not _texts(ground_truth):
            raise DatasetError(
                f"{location}: the ground truth is a {type(ground_truth).__name__}: {example.answer[:60]}, "
                "which only your own reward function can grade; set reward.path."
            )
        if source_of(example) in GSM8K_SOURCES:
            GSM8KTask().read_row({"answer": example.answer}, location)


def source_of(example: Example) -> str:
    """Return the ``data_source`` of an example's row; an empty text if it has none."""
    source = example.extra["columns"].get("data_source")
    return source if isinstance(source, str) else ""
