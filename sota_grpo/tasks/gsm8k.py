"""GSM8K: grade-school word problems whose worked answer ends in ``#### N`` (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Sequence

from sota_grpo.rewards.extract import CALCULATION, extract_answer, numbers_equal, parse_number
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, QuestionTask, Row, answering, first_text, optional_text


class GSM8KTask(QuestionTask):
    """Word problems graded by the final number alone.

    ``reward = 1.0 * correct + format_weight * format``: ``correct`` is 1 when the answer, taken from where
    ``answer_format`` says, equals the gold number exactly; ``format`` is 1 when a number stands there at all. A right
    answer has both, so a gold response earns the most that can be earned and an empty one earns 0.

    Args:
        train, heldout: examples to train on, and to evaluate on.
        answer_format: see :func:`sota_grpo.rewards.extract_answer`.
        system_prompt: replaces the default one; an empty text leaves the system turn out.
        format_weight: weight of ``format``; at 0 it is still reported.

    Raises:
        ValueError: an unknown answer format, or a negative weight.

    >>> task = GSM8KTask([Example("What is 9 times 2?", "9*2=18\\n#### 18")], [])
    >>> task.score("Nine twice is 18.\\n#### 18.00", task.train[0]).terms
    {'correct': 1.0, 'format': 1.0}
    >>> task.score("18", task.train[0]).success
    False
    """

    name = "gsm8k"
    hub_name, hub_config = "openai/gsm8k", "main"

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        answer_format: str = "hash",
        system_prompt: str | None = None,
        format_weight: float = 0.0,
    ):
        weights = {"correct": 1.0, "format": format_weight}
        super().__init__(train, heldout, answer_format, system_prompt, weights, what="number")

    def score(self, response: str, example: Example) -> Score:
        """Compare the number in the response with the gold one; see the class for the terms."""
        answer = extract_answer(response, self.answer_format)
        is_number = answer is not None and parse_number(answer) is not None
        correct = answer is not None and numbers_equal(answer, _gold(example.answer))
        return Score(terms={"correct": float(correct), "format": float(is_number)}, success=correct)

    def gold_response(self, example: Example) -> str:
        """The worked gold answer without its calculator annotations, its number where the format asks for it."""
        steps = CALCULATION.sub("", example.answer).rpartition("####")[0].rstrip()
        last_line = answering(self._asked_format, _gold(example.answer))
        return f"{steps}\n{last_line}" if steps else last_line

    def read_row(self, row: Row, place: str) -> Example:
        """Of the columns ``answer`` (worked, or the number alone) and, where it is there, ``question``."""
        answer = first_text(row, ["answer"], place)
        if parse_number(_gold(answer)) is None:
            raise DatasetError(
                f"{place}: the gold answer has no number after '####' (it ends in {answer[-40:]!r}); "
                "mend or remove the row."
            )
        return Example(query=optional_text(row, self.question_columns), answer=answer)


def _gold(answer: str) -> str:
    """The number of a gold answer: what follows the last ``####``, or all of it where there is none."""
    return extract_answer(answer, "hash") or answer
