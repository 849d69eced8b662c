"""What tasks share whose problems are a question and an answer, from files or from a dataset on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import chat
from sota_grpo.tasks.dataset import Row, load_sides

_FORMS = {  # what the system prompt asks for, and the last line of a response
    "hash": ("on a last line of the form '#### <{}>'", "#### {}"),
    "boxed": ("in the form \\boxed{{<{}>}}", "The answer is \\boxed{{{}}}."),
    "tags": ("in the form <answer><{}></answer>", "<answer>{}</answer>"),
    "last_number": ("as the last number of the response", "The answer is {}."),
}


def asking(answer_format: str, what: str = "answer") -> str:
    """A system prompt that asks for worked steps and for the answer where ``answer_format`` looks for it.

    Args:
        answer_format: see :func:`sota_grpo.rewards.extract_answer`; of ``any``, give the one that is asked for.
        what: a word for the answer.

    >>> asking("hash", "number")
    "Solve the problem step by step, then give the final answer on a last line of the form '#### <number>'."
    """
    return f"Solve the problem step by step, then give the final answer {_FORMS[answer_format][0].format(what)}."


def answering(answer_format: str, answer: str) -> str:
    """The last line of a response that gives ``answer`` where ``answer_format`` looks for it.

    >>> answering("boxed", "18"), answering("tags", "18")
    ('The answer is \\\\boxed{18}.', '<answer>18</answer>')
    """
    return _FORMS[answer_format][1].format(answer)


class QuestionTask:
    """Loads the two sides, and asks a question after a system prompt.

    A task sets ``hub_name``, ``hub_config`` and ``system_prompt``, and reads its rows.
    """

    hub_name: str
    hub_config: str
    system_prompt: str
    train: Sequence[Example]
    heldout: Sequence[Example]

    def read_problem(self, row: Row, place: str) -> Example:
        """An example of a row, which must have a question; ``DatasetError`` names a row that cannot be used."""
        raise NotImplementedError

    @classmethod
    def load(
        cls,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        source: str | None = None,
        num_heldout: int = 512,
        max_samples: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """From local files, or from the hub; the options are checked before anything is loaded.

        Questions that come twice (letter case and spacing aside) are kept once, and never on both sides.

        Args:
            path: local file; None asks the hub.
            eval_path: local file of the held-out problems; None holds out the hub's test split, or ``num_heldout``
                rows of ``path``, the same for every order of its rows.
            source: name on the hub, of a dataset in the task's own columns; None is the task's own.
            num_heldout: see ``eval_path``.
            max_samples: train on the first so many examples only.
            seed: of the choice of the held-out rows.
            options: of the class.

        Raises:
            DatasetError: rows that cannot be used (see :mod:`sota_grpo.tasks.dataset`), or too few of them.
        """
        task = cls(**options)
        train, task.heldout = load_sides(
            task.read_problem,
            source=source or cls.hub_name,
            config=cls.hub_config,
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


def require_format(answer_format: str) -> None:
    """Check that there is such an answer format.

    Raises:
        ValueError: naming those that there are.
    """
    if answer_format not in ANSWER_FORMATS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}.")


def require_not_negative(**values: float) -> None:
    """Check weights and amounts.

    Raises:
        ValueError: naming the first that is negative.

    >>> require_not_negative(format_weight=-0.1)
    Traceback (most recent call last):
        ...
    ValueError: format_weight=-0.1 must not be negative.
    """
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative.")
