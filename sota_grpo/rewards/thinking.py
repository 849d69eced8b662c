"""The three terms that reward reasoning: the form of a response, the length of its thinking, and its answer.

Model text is untrusted: it is searched with regular expressions that are linear in its length, and never evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sota_grpo.rewards.extract import numbers_equal

TAG = re.compile(r"</?(?:think|answer)>")  # as they are asked for: in lower case, without spaces
_SHAPE = ["<think>", "</think>", "<answer>", "</answer>"]
_PART_CREDIT = 0.25

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # scripts that put no spaces between words
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_NAME = re.compile(r"\\?[^\W\d_]{2,}")  # a word of two letters and more, or a LaTeX command
_NUMBER_FIRST = re.compile(r"[$\s-]*\.?\d")
_SPACED_SIGN = re.compile(r" ?([^\w ]) ?")


@dataclass(frozen=True)
class Parts:
    """A response taken apart.

    Attributes:
        thinking: the text between the think tags, None where there is not exactly one such part with text in it.
        answer: the text between the answer tags, None where there is not exactly one such part with text in it, after
            the thinking.
        exact: there is nothing else but space: no other text, no further tag.
    """

    thinking: str | None
    answer: str | None
    exact: bool


def read_parts(response: str) -> Parts:
    """Find the two parts of a response.

    A tag that stands twice, in the wrong order, or without its partner makes no part; tags inside a part make the form
    inexact. Only ``<think>`` may be missing: the chat templates of reasoning models end the prompt with it, and the
    response then begins inside the thinking. The grader does not see the prompt, so this holds for every response; it
    can be read in one way only.

    >>> read_parts("<think>9 + 9</think> <answer>18</answer>")
    Parts(thinking='9 + 9', answer='18', exact=True)
    >>> read_parts("9 + 9</think>So: <answer>18</answer>")
    Parts(thinking='9 + 9', answer='18', exact=False)
    >>> read_parts("<answer>18</answer><think>9 + 9</think>")
    Parts(thinking='9 + 9', answer=None, exact=False)
    """
    found = list(TAG.finditer(response))
    names = [tag[0] for tag in found]
    thinking, answer = "", ""
    if names.count("</think>") == 1 and names.count("<think>") <= 1:
        begin = found[names.index("<think>")].end() if "<think>" in names else 0
        thinking = response[begin : found[names.index("</think>")].start()].strip()
    if names[-2:] == _SHAPE[2:] and names.count("<answer>") == names.count("</answer>") == 1:
        answer = response[found[-2].end() : found[-1].start()].strip()
    outside = TAG.split(response)[::-2] if names in (_SHAPE, _SHAPE[1:]) else [response]
    exact = bool(thinking and answer) and not "".join(outside).strip()
    return Parts(thinking or None, answer or None, exact)


def format_term(parts: Parts) -> float:
    """1 for the exact form, else 0.25 for each of the two parts that is there; in {0, 0.25, 0.5, 1}.

    All or nothing would say nothing about a response until a model finds both parts at once; so each is worth
    something by itself, and everything that keeps the form from being exact (chatter around it, a second answer)
    costs at least half.

    >>> [format_term(read_parts(text)) for text in ("18", "<answer>18</answer>", "9+9</think><answer>18</answer>")]
    [0.0, 0.25, 1.0]
    """
    return 1.0 if parts.exact else _PART_CREDIT * ((parts.thinking is not None) + (parts.answer is not None))


def thinking_term(thinking: str | None, min_words: int) -> float:
    """``min(words / min_words, 1) - 1``: from -1 without thinking up to 0 at ``min_words``, and 0 however much follows.

    Args:
        thinking: of :class:`Parts`; None is no thinking.
        min_words: 0 takes the penalty away.

    >>> thinking_term("9 + 9 = 18", 4), thinking_term(None, 4), thinking_term("word " * 1000, 4)
    (-0.25, -1.0, 0.0)
    """
    return min(count_words(thinking or "") / min_words, 1.0) - 1.0 if min_words else 0.0


def count_words(text: str) -> int:
    """Words and numbers; signs between them count for nothing, each Chinese or Japanese character for one word.

    >>> count_words("So 48/2 = 24 clips."), count_words("所以是24个"), count_words(" ... ")
    (5, 5, 0)
    """
    return sum(1 for _ in _WORD.finditer(text))


def answer_term(answer: str | None, gold: str) -> float:
    """1 for the right answer, else 0; None is no answer.

    >>> answer_term("$18.00", "18"), answer_term(None, "18")
    (1.0, 0.0)
    """
    return float(answer is not None and answers_equal(answer, gold))


def answers_equal(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, or the same text but for letter case, spacing and a last period.

    Units are read over where the gold answer has none, or where the answer has none and the gold answer is a number
    with its unit; so ``11`` is not ``Apollo 11``, and ``3 am`` is not ``3 pm``.

    >>> answers_equal("18 dollars", "$18"), answers_equal("5", "5 apples"), answers_equal("5 pears", "5 apples")
    (True, True, False)
    >>> answers_equal(" new  york.", "New York"), answers_equal("(1,2)", "( 1, 2 )"), answers_equal("11", "Apollo 11")
    (True, True, False)
    """
    if _folded(answer) == _folded(gold):
        return True
    if not numbers_equal(answer, gold):
        return False
    given, asked = _names(answer), _names(gold)
    return not asked or given == asked or (not given and _NUMBER_FIRST.match(gold) is not None)


def _folded(text: str) -> str:
    return _SPACED_SIGN.sub(r"\1", " ".join(text.casefold().split())).rstrip(". ")


def _names(text: str) -> list[str]:
    return [name.casefold() for name in _NAME.findall(text) if name[0] != "\\"]
