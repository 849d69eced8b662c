"""GSM8K: grade-school word problems whose worked answer ends in ``#### N`` (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sota_grpo.records import Example, Score
from sota_grpo.rewards import ANSWER_FORMATS, extract_answer, numbers_equal, parse_number
from sota_grpo.tasks.asking import answering, asking
from sota_grpo.tasks.base import chat
from sota_grpo.tasks.dataset import DatasetError, Row, number_or_text, require_columns
from sota_grpo.tasks.splits import load_sides

HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"
COLUMNS = ("question", "answer")

_ANY = "hash"  # what is asked for where any format will do
_CALCULATION = re.compile(r"<<[^<>]*>>")  # the calculator annotations of the gold answers


class GSM8KTask:
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

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        answer_format: str = "hash",
        system_prompt: str | None = None,
        format_weight: float = 0.0,
    ):
        if answer_format not in ANSWER_FORMATS:
            raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}.")
        if format_weight < 0:
            raise ValueError(f"format_weight={format_weight} must not be negative.")
        self.train, self.heldout = train, heldout
        self.answer_format = answer_format
        self._asked_format = _ANY if answer_format == "any" else answer_format
        self.system_prompt = asking(self._asked_format, "number") if system_prompt is None else system_prompt
        self.term_weights: Mapping[str, float] = {"correct": 1.0, "format": format_weight}

    @classmethod
    def load(
        cls,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        source: str = HUB_NAME,
        num_heldout: int = 512,
        max_samples: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> GSM8KTask:
        """From the hub, whose test split is held out, or from a local file, of which ``num_heldout`` rows are.

        Questions that come twice (letter case and spacing aside) are kept once, and never on both sides.

        Args:
            path: local file with the columns ``question`` and ``answer``; None asks the hub.
            eval_path: local file of the held-out problems; None holds out the hub's test split, or rows of ``path``.
            source: name on the hub.
            num_heldout: rows held out of a local file, the same for every order of its rows.
            max_samples: train on the first so many examples only.
            seed: of the choice of the held-out rows.
            options: of the class.

        Raises:
            DatasetError: rows that cannot be used (see :mod:`sota_grpo.tasks.dataset`), a gold answer without a
                number, or a file with no more than ``num_heldout`` rows.
        """
        task = cls(**options)
        train, task.heldout = load_sides(
            read_examples,
            source=source,
            config=HUB_CONFIG,
            path=path,
            eval_path=eval_path,
            num_heldout=num_heldout,
            seed=seed,
        )
        task.train = train[:max_samples]
        return task

    def messages(self, example: Example) -> list[dict[str, str]]:
        """A system turn, unless the system prompt is empty, and the raw question."""
        return chat(self.system_prompt, example.query)

    def score(self, response: str, example: Example) -> Score:
        """Compare the number in the response with the gold one; see the class for the terms."""
        answer = extract_answer(response, self.answer_format)
        found = answer is not None and parse_number(answer) is not None
        correct = answer is not None and numbers_equal(answer, _gold(example.answer))
        return Score(terms={"correct": float(correct), "format": float(found)}, success=correct)

    def gold_response(self, example: Example) -> str:
        """The worked gold answer without its calculator annotations, its number where the format asks for it."""
        steps = _CALCULATION.sub("", example.answer).rpartition("####")[0].rstrip()
        last_line = answering(self._asked_format, _gold(example.answer))
        return f"{steps}\n{last_line}" if steps else last_line

    def read_row(self, row: Row, place: str) -> Example:
        """Of the columns ``answer`` (worked, or the number alone) and, where it is there, ``question``.

        Raises:
            DatasetError: the answer is missing or holds no number.
        """
        return _read_row(row, place)


def _gold(answer: str) -> str:
    """The number of a gold answer: what follows the last ``####``, or all of it where there is none."""
    return extract_answer(answer, "hash") or answer


def read_examples(rows: Sequence[Row], source: str) -> list[Example]:
    """Rows to examples, the gold answers checked.

    Raises:
        DatasetError: a missing column, or a gold answer without a number after ``####``, with its row (from 1).

    >>> read_examples([{"question": "1+1?", "answer": "#### 2"}], "demo")[0].query
    '1+1?'
    """
    require_columns(rows, COLUMNS[:1], source)
    return [_read_row(row, f"{source}, row {number}") for number, row in enumerate(rows, start=1)]


def _read_row(row: Row, place: str) -> Example:
    answer = number_or_text(row, "answer", place)
    if parse_number(_gold(answer)) is None:
        raise DatasetError(
            f"{place}: the gold answer has no number after '####' (it ends in {answer[-40:]!r}); "
            "mend or remove the row."
        )
    return Example(query=str(row.get("question", "")), answer=answer)
