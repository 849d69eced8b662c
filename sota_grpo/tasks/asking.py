"""How a task asks for its answer, and how a response gives it, in each answer format."""

from __future__ import annotations

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
