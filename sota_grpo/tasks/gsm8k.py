"""GSM8K: grade-school word problems whose worked answer ends in ``#### N`` (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sota_grpo.rewards.extract import CALCULATION, extract_answer, numbers_equal, parse_number
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import (
    DatasetError,
    QuestionTask,
    Row,
    answering,
    asking,
    number_or_text,
    require_format,
    require_not_negative,
    text_of,
)

HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"

_ANY = "hash"  # what is asked for where any format will do


class GSM8KTask(QuestionTask):
    """Word problems graded by the final number alone.

    ``reward = 1.0 * correct + format_weight * format``: ``correct`` is 1 when the answer, taken from where
    ``answer_format`` says, equals the gold number exactly; ``format`` is 1 when a number stands there at all. A right
    answer has both, so a gold response earns the most that can be earned and an empty one earns 0.

    Args:
        train: examples to train on.
        heldout: examples to evaluate on.
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
    hub_name, hub_config = HUB_NAME, HUB_CONFIG

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        answer_format: str = "hash",
        system_prompt: str | None = None,
        format_weight: float = 0.0,
    ):
        require_format(answer_format)
        require_not_negative(format_weight=format_weight)
        self.train, self.heldout = train, heldout
        self.answer_format = answer_format
        self._asked_format = _ANY if answer_format == "any" else answer_format
        self.system_prompt = asking(self._asked_format, "number") if system_prompt is None else system_prompt
        self.term_weights: Mapping[str, float] = {"correct": 1.0, "format": format_weight}

    def score(self, response: str, example: Example) -> Score:
        """Compare the number in the response with the gold one; see the class for the terms."""
        answer = extract_answer(response, self.answer_format)
        found = answer is not None and parse_number(answer) is not None
        correct = answer is not None and numbers_equal(answer, _gold(example.answer))
        return Score(terms={"correct": float(correct), "format": float(found)}, success=correct)

    def gold_response(self, example: Example) -> str:
        """The worked gold answer without its calculator annotations, its number where the format asks for it."""
        steps = CALCULATION.sub("", example.answer).rpartition("####")[0].rstrip()
        last_line = answering(self._asked_format, _gold(example.answer))
        return f"{steps}\n{last_line}" if steps else last_line

    def read_row(self, row: Row, place: str) -> Example:
        """Of the columns ``answer`` (worked, or the number alone) and, where it is there, ``question``.

        Raises:
            DatasetError: the answer is missing or holds no number.
        """
        answer = number_or_text(row, "answer", place)
        if parse_number(_gold(answer)) is None:
            raise DatasetError(
                f"{place}: the gold answer has no number after '####' (it ends in {answer[-40:]!r}); "
                "mend or remove the row."
            )
        return Example(query=str(row.get("question", "")), answer=answer)

    def read_problem(self, row: Row, place: str) -> Example:
        """As :meth:`read_row`, of a row that must have a question.

        >>> GSM8KTask().read_problem({"question": "1+1?", "answer": "#### 2"}, "demo, row 1").query
        '1+1?'
        """
        text_of(row, "question", place)
        return self.read_row(row, place)


def _gold(answer: str) -> str:
    """The number of a gold answer: what follows the last ``####``, or all of it where there is none."""
    return extract_answer(answer, "hash") or answer
