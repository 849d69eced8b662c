"""Which answer to a row of a user's table is right, where no reward function says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sota_grpo.records import Example
from sota_grpo.rewards import extract_answer, numbers_equal
from sota_grpo.rewards.extract import without_thinking
from sota_grpo.tasks.asking import answering
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.gsm8k import GSM8KTask
from sota_grpo.tasks.splits import normalised
from sota_grpo.tasks.table_rows import text_of_answer

GSM8K_SOURCES = ("openai/gsm8k",)
MATH_SOURCES = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "EleutherAI/hendrycks_math",
)


def answer_format_of(source: str, answer_format: str | None) -> str:
    """Where the answer stands: where the option says, else where the ``source`` asks for it.

    >>> answer_format_of("openai/gsm8k", None), answer_format_of("mine", None), answer_format_of("mine", "tags")
    ('hash', 'any', 'tags')
    """
    if answer_format is not None:
        return answer_format
    return "hash" if source in GSM8K_SOURCES else "boxed" if source in MATH_SOURCES else "any"


def is_right(response: str, source: str, ground_truth: Any, answer_format: str | None) -> bool:
    """Whether the response has the right answer, by the rule of its ``source``.

    - ``openai/gsm8k``: :class:`~sota_grpo.tasks.gsm8k.GSM8KTask`, the same number exactly.
    - MATH (``MATH_SOURCES``): :func:`~sota_grpo.rewards.maths.math_equal`, an equivalent expression.
    - all others: the answer is the same number as the ground truth or as an entry of it, if it is a list, or the same
      text, letter case and spacing aside; under ``any`` the whole response may be that text.

    >>> is_right("I say <answer>paris </answer>", "mine", "Paris", None), is_right("Paris", "mine", "Paris", "tags")
    (True, False)
    >>> is_right("x is 0.5", "mine", ["1/2", "one half"], None), is_right("One half", "mine", ["one half"], None)
    (True, True)
    """
    place = answer_format_of(source, answer_format)
    if source in GSM8K_SOURCES:
        return GSM8KTask(answer_format=place).score(response, Example("", text_of_answer(ground_truth))).success
    answer, truths = extract_answer(response, place), _texts(ground_truth)
    if source in MATH_SOURCES:
        from sota_grpo.rewards.maths import math_equal  # of no use to most tables

        return answer is not None and any(math_equal(truth, answer) for truth in truths)
    whole = without_thinking(response) if place == "any" else None
    return any(_equal(answer, truth) or _same_text(whole, truth) for truth in truths)


def gold_response(source: str, ground_truth: Any, answer_format: str | None) -> str | None:
    """A response with the right answer where the grading looks for it; None if what it would be is not right.

    >>> gold_response("openai/gsm8k", "18", None), gold_response("mine", {"cases": []}, None)
    ('#### 18', None)
    """
    texts = _texts(ground_truth)
    if not texts:
        return None
    place = answer_format_of(source, answer_format)
    response = answering("tags" if place == "any" else place, texts[0])
    return response if is_right(response, source, ground_truth, answer_format) else None


def require_gradable(source: str, ground_truth: Any, columns: Sequence[str], answer_column: str, place: str) -> None:
    """Check that :func:`is_right` can be right about some response.

    Raises:
        DatasetError: no ground truth, one that is neither text nor a number nor a list of these, or, of GSM8K, one
            that is no number.
    """
    if ground_truth is None or not text_of_answer(ground_truth).strip():
        raise DatasetError(
            f"{place}: column {answer_column!r} holds no ground truth; the columns found are "
            f"{', '.join(map(repr, columns)) or 'none'}: set env.answer_column, or grade with reward.path."
        )
    if not _texts(ground_truth):
        raise DatasetError(
            f"{place}: the ground truth is {type(ground_truth).__name__} "
            f"{text_of_answer(ground_truth)[:60]}, which only a function of yours can grade; give reward.path."
        )
    if source in GSM8K_SOURCES:
        GSM8KTask().read_row({"answer": text_of_answer(ground_truth)}, place)


def _texts(ground_truth: Any) -> list[str]:
    """The right answers as text; none of what only a reward function understands."""
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [text_of_answer(truth) for truth in truths] if all(map(_is_scalar, truths)) else []


def _is_scalar(truth: Any) -> bool:
    return isinstance(truth, (str, int, float))


def _equal(answer: str | None, truth: str) -> bool:
    return answer is not None and (numbers_equal(answer, truth) or _same_text(answer, truth))


def _same_text(text: str | None, truth: str) -> bool:
    return text is not None and normalised(text) == normalised(truth)
