"""Finding the final answer of a response, in the place where the task asked for it. Linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Callable

from sota_grpo.rewards.numbers import find_last_number

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)  # \{ and \} are text, not braces


def without_thinking(text: str) -> str:
    """What follows the last ``</think>``, up to a ``<think>`` that is never closed; the whole text without either.

    >>> without_thinking("<think>#### 1</think> #### 2"), without_thinking("#### 3 <think> or #### 4?")
    (' #### 2', '#### 3 ')
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _tags(text: str) -> str | None:
    begin, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            answer, begin = text[begin : tag.start()], None
    return answer


def _boxed(text: str) -> str | None:
    """Of all boxes that are closed, the one that opens last: one pass with a stack of open braces."""
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, token.start())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[last[0] : last[1]] if last else None


def _hash(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.partition("\n")[0]
    last_line = text.rstrip().rpartition("\n")[2]
    return last_line[2:] if last_line.startswith("A:") else None  # the solutions released with GSM8K end so


_FINDERS: dict[str, tuple[Callable[[str], str | None], ...]] = {
    "tags": (_tags,),
    "boxed": (_boxed,),
    "hash": (_hash,),
    "last_number": (find_last_number,),
    "any": (_tags, _boxed, _hash, find_last_number),
}
ANSWER_FORMATS = tuple(_FINDERS)


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer of a response, stripped, or None when it is not there; thinking is read over.

    Args:
        text: the response.
        answer_format: ``tags`` the last complete ``<answer>...</answer>``; ``boxed`` the last complete
            ``\\boxed{...}`` (or ``\\fbox``), braces matched; ``hash`` the rest of the line after the last ``####``
            or, without one, of a last line that begins with ``A:``; ``last_number``; ``any`` the first of these, in
            this order, that is there.

    Raises:
        ValueError: an unknown format.

    >>> extract_answer("So 6*3=18.\\n#### 18", "hash"), extract_answer("#### 18", "boxed")
    ('18', None)
    >>> extract_answer("<think>\\\\boxed{1}</think> \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3", "boxed")
    '\\\\frac{1}{2}'
    """
    if answer_format not in _FINDERS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}.")
    visible = without_thinking(text)
    for find in _FINDERS[answer_format]:
        answer = find(visible)
        if answer is not None and answer.strip():
            return answer.strip()
    return None
