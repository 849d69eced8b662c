"""MATH: competition problems whose solution ends in a boxed answer (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sota_grpo.rewards.extract import extract_answer
from sota_grpo.rewards.maths import math_equal
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, QuestionTask, Row, answering, first_text, optional_text, present

GOLD_COLUMNS = ("ground_truth", "answer", "solution")

_MAX_INFO_CHARS = 200


class MathTask(QuestionTask):
    """Problems graded by the final answer alone, which may be any expression, list, interval, equation or word.

    ``reward = 1.0 * answer + format_weight * format``: ``answer`` is ``correct`` where the answer in the response is
    the same as the gold one (:func:`sota_grpo.rewards.maths.math_equal`), ``no_answer`` where none stands where
    ``answer_format`` looks for it, else ``wrong``; ``format`` is 1 where an answer stands there.

    Args:
        train, heldout: examples to train on, and to evaluate on.
        answer_format: see :func:`sota_grpo.rewards.extract_answer`; thinking is read over.
        system_prompt: replaces the default one; an empty text leaves the system turn out.
        format_weight: weight of ``format``; at 0 it is still reported.
        correct: reward of a right answer, greater than the others.
        wrong: reward of a wrong answer.
        no_answer: reward of a response without an answer.

    Raises:
        ValueError: an unknown answer format, a negative weight, or a right answer that does not earn the most.

    >>> task = MathTask([Example("Solve 2x = 1.", "\\\\frac{1}{2}")], [])
    >>> [task.score(response, task.train[0]).terms["answer"] for response in ("\\\\boxed{0.5}", "\\\\boxed{2}", "0.5")]
    [1.0, -1.0, -0.5]
    """

    name = "math"
    hub_name, hub_config = "DigitalLearningGmbH/MATH-lighteval", "default"
    any_format = "boxed"
    question_columns = ("question", "problem", "prompt")

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        answer_format: str = "boxed",
        system_prompt: str | None = None,
        format_weight: float = 0.0,
        correct: float = 1.0,
        wrong: float = -1.0,
        no_answer: float = -0.5,
    ):
        weights = {"answer": 1.0, "format": format_weight}
        super().__init__(train, heldout, answer_format, system_prompt, weights)
        if not all(map(math.isfinite, (correct, wrong, no_answer))) or correct <= max(wrong, no_answer):
            raise ValueError(
                f"reward.correct={correct} must be greater than reward.wrong={wrong} and reward.no_answer={no_answer}."
            )
        self.correct, self.wrong, self.no_answer = correct, wrong, no_answer

    def score(self, response: str, example: Example) -> Score:
        """Compare the answer in the response with the gold one; see the class for the terms."""
        answer = extract_answer(response, self.answer_format, mathematics=True)
        if answer is None:
            return Score({"answer": self.no_answer, "format": 0.0}, success=False)
        right = math_equal(example.answer, answer)
        value = self.correct if right else self.wrong
        return Score({"answer": value, "format": 1.0}, success=right, info={"extracted": answer[:_MAX_INFO_CHARS]})

    def gold_response(self, example: Example) -> str | None:
        """The gold answer where the format asks for it; None where it cannot stand there: words as ``last_number``."""
        response = answering(self._asked_format, " ".join(example.answer.split()))
        return response if self.score(response, example).success else None

    def read_row(self, row: Row, place: str) -> Example:
        """Of the first of ``GOLD_COLUMNS`` that is there the answer and, where it is there, the question.

        The gold answer may be bare (text or a number), in dollars, or in the last box of a worked solution.
        """
        text = first_text(row, GOLD_COLUMNS, place)
        gold = extract_answer(text, "boxed")
        if gold is None and all(present(row.get(column)) is None for column in GOLD_COLUMNS[:-1]):
            raise DatasetError(f"{place}: the solution has no \\boxed{{answer}} (it ends in {text[-40:]!r}).")
        gold = gold or extract_answer(text, "hash") or text.strip()
        if not math_equal(gold, gold):
            raise DatasetError(
                f"{place}: the gold answer {gold[:40]!r} ({len(gold)} characters) cannot be compared; "
                "give a short final answer or remove the row."
            )
        return Example(query=optional_text(row, self.question_columns), answer=gold)
