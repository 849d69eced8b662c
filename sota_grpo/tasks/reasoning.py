"""Reasoning in tags: ``<think>`` worked steps ``</think>``, then ``<answer>`` the answer alone ``</answer>``.

Three terms reward it: the form of a response, the length of its thinking, and its answer. Model text is untrusted: it
is searched with regular expressions that are linear in its length, and never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sota_grpo.rewards.extract import CALCULATION, answers_equal, extract_answer, is_number
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, QuestionTask, Row, first_text, optional_text, require_not_negative

GOLD_COLUMNS = ("answer", "ground_truth", "completion")
SYSTEM_PROMPT = (
    "Think about the problem step by step between <think> and </think>, then give the final answer alone between "
    "<answer> and </answer>."
)
TAG = re.compile(r"</?(?:think|answer)>")  # as they are asked for: in lower case, without spaces
_ANY_TAG = re.compile(TAG.pattern, re.IGNORECASE)
_SHAPE = ["<think>", "</think>", "<answer>", "</answer>"]

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # scripts that put no spaces between words
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_MAX_INFO_CHARS = 200


class Parts(NamedTuple):
    """Of a response the text between its think tags and its answer tags, None where there is not exactly one such part
    with text in it, and whether there is nothing else but space."""

    thinking: str | None
    answer: str | None
    exact: bool


def read_parts(response: str) -> Parts:
    """Find the two parts of a response.

    A tag that stands twice, in the wrong order, or without its partner makes no part; tags inside a part make the form
    inexact. Only ``<think>`` may be missing: the chat templates of reasoning models end the prompt with it, and the
    response then begins inside the thinking.

    >>> read_parts("<think>9 + 9</think> <answer>18</answer>")
    Parts(thinking='9 + 9', answer='18', exact=True)
    >>> read_parts("9 + 9</think>So: <answer>18</answer>")
    Parts(thinking='9 + 9', answer='18', exact=False)
    >>> read_parts("<answer>18</answer><think>9 + 9</think>")
    Parts(thinking='9 + 9', answer=None, exact=False)
    """
    tags = list(TAG.finditer(response))
    names = [tag[0] for tag in tags]
    thinking, answer = "", ""
    if names.count("</think>") == 1 and names.count("<think>") <= 1:
        begin = tags[names.index("<think>")].end() if "<think>" in names else 0
        thinking = response[begin : tags[names.index("</think>")].start()].strip()
    if names[-2:] == _SHAPE[2:] and names.count("<answer>") == names.count("</answer>") == 1:
        answer = response[tags[-2].end() : tags[-1].start()].strip()
    outside = TAG.split(response)[::-2] if names in (_SHAPE, _SHAPE[1:]) else [response]
    exact = bool(thinking and answer) and not "".join(outside).strip()
    return Parts(thinking or None, answer or None, exact)


def format_term(parts: Parts) -> float:
    """1 for the exact form, else 0.25 for each of the two parts that is there; in {0, 0.25, 0.5, 1}.

    Each part is worth something by itself, because a model does not find both at once.
    """
    return 1.0 if parts.exact else 0.25 * ((parts.thinking is not None) + (parts.answer is not None))


def thinking_term(thinking: str | None, min_words: int) -> float:
    """``min(words / min_words, 1) - 1``: from -1 without thinking up to 0; a ``min_words`` of 0 is no penalty."""
    return min(count_words(thinking or "") / min_words, 1.0) - 1.0 if min_words else 0.0


def count_words(text: str) -> int:
    """Words and numbers; signs between them count for nothing, each Chinese or Japanese character for one word."""
    return sum(1 for _ in _WORD.finditer(text))


class ReasoningTask(QuestionTask):
    """Problems whose answer is a number or a short text, rewarded by form, thinking and answer together.

    ``reward = 1.0 * answer + format_weight * format + thinking_weight * thinking``:
    :func:`~sota_grpo.rewards.answers_equal` in {0, 1}, :func:`format_term` in [0, 1], :func:`thinking_term` in [-1, 0].
    The answer is looked for in the last complete answer tags after the thinking, whatever the rest of the form is like;
    success is a right answer. With ``format_weight + thinking_weight < 1`` every right answer earns more than every
    wrong one.

    Args:
        train, heldout: examples to train on, and to evaluate on.
        system_prompt: replaces the default one, which asks for the tags; an empty text leaves the system turn out.
        format_weight: weight of ``format``.
        thinking_weight: weight of ``thinking``.
        min_think_words: words of thinking from which it is not penalised; 0 takes the penalty away.
        answer_format: where ``answer`` looks, for responses to another prompt than this one's
            (:func:`sota_grpo.rewards.extract_answer`); the form asked for stays that of the tags.

    Raises:
        ValueError: an unknown answer format, or a negative weight or number of words.

    >>> task = ReasoningTask(min_think_words=4)
    >>> task.score("<think>Twice 9 is 18.</think><answer>18</answer>", Example("9 * 2?", "#### 18")).terms
    {'answer': 1.0, 'format': 1.0, 'thinking': 0.0}
    >>> task.score("<answer>$18.00</answer>", Example("9 * 2?", "18")).terms
    {'answer': 1.0, 'format': 0.25, 'thinking': -1.0}
    """

    name = "reasoning"
    hub_name, hub_config = "openai/gsm8k", "main"
    question_columns = ("question", "prompt")

    def __init__(
        self,
        train: Sequence[Example] = (),
        heldout: Sequence[Example] = (),
        *,
        system_prompt: str | None = None,
        format_weight: float = 0.2,
        thinking_weight: float = 0.2,
        min_think_words: int = 20,
        answer_format: str = "tags",
    ):
        weights = {"answer": 1.0, "format": format_weight, "thinking": thinking_weight}
        prompt = SYSTEM_PROMPT if system_prompt is None else system_prompt
        super().__init__(train, heldout, answer_format, prompt, weights)
        require_not_negative(min_think_words=min_think_words)
        self.min_think_words = min_think_words

    def score(self, response: str, example: Example) -> Score:
        """The three terms; beside them the words of thinking and the beginning of the answer that was found."""
        parts, gold = read_parts(response), split_gold(example.answer)[1]
        answer = extract_answer(response, self.answer_format, words=not is_number(gold))
        right = answer is not None and answers_equal(answer, gold)
        terms = {
            "answer": float(right),
            "format": format_term(parts),
            "thinking": thinking_term(parts.thinking, self.min_think_words),
        }
        info: dict[str, object] = {"think_words": count_words(parts.thinking or "")}
        if answer is not None:
            info["answer_found"] = answer[:_MAX_INFO_CHARS]
        return Score(terms, success=right, info=info)

    def gold_response(self, example: Example) -> str:
        """The worked answer where there is one, else the question restated, as thinking long enough; then the answer.

        Earns the full reward whatever stands in the question: tags in it become brackets.
        """
        steps, gold = split_gold(example.answer)
        thinking = CALCULATION.sub("", steps) or f"I am asked: {example.query}"
        again = f"\nI read the question once more: {example.query}\nMy answer stays {gold}."
        missing = max(0, self.min_think_words - count_words(thinking))
        thinking += again * -(-missing // count_words(again))
        return f"<think>\n{TAG.sub(lambda tag: f'[{tag[0][1:-1]}]', thinking)}\n</think>\n<answer>{gold}</answer>"

    def read_row(self, row: Row, place: str) -> Example:
        """Of one of the columns ``GOLD_COLUMNS`` and, where there is text in one, of ``question_columns``."""
        answer = first_text(row, GOLD_COLUMNS, place)
        gold = split_gold(answer)[1]
        if not gold or _ANY_TAG.search(gold):
            ends = f"is empty (it ends in {answer[-40:]!r})"
            reason = f"{gold[:40]!r} holds one of the tags that end an answer" if gold else ends
            raise DatasetError(f"{place}: the right answer {reason}; mend or remove the row.")
        return Example(query=optional_text(row, self.question_columns), answer=answer)


def split_gold(answer: str) -> tuple[str, str]:
    """The worked steps of a gold answer, where it has any, and the answer alone.

    The answer is what stands in its answer tags, else what follows ``####`` on its last line, else all of it.

    >>> split_gold("9*2=18\\n#### 18"), split_gold("<think>9*2</think><answer>18</answer>"), split_gold(" Paris ")
    (('9*2=18', '18'), ('9*2', '18'), ('', 'Paris'))
    """
    tagged = extract_answer(answer, "tags")
    if tagged is not None:
        return read_parts(answer).thinking or "", tagged
    steps, mark, last = answer.rpartition("####")
    if mark and "\n" not in last.strip():
        return steps.strip(), last.strip()
    return "", answer.strip()
