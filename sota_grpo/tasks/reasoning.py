"""Reasoning in tags: ``<think>`` worked steps ``</think>``, then ``<answer>`` the answer alone ``</answer>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sota_grpo.rewards.extract import CALCULATION, extract_answer
from sota_grpo.rewards.thinking import TAG, answer_term, count_words, format_term, read_parts, thinking_term
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, Row
from sota_grpo.tasks.gsm8k import HUB_CONFIG, HUB_NAME
from sota_grpo.tasks.questions import QuestionTask, require_format, require_not_negative

QUESTION_COLUMNS = ("question", "prompt")
GOLD_COLUMNS = ("answer", "ground_truth", "completion")
SYSTEM_PROMPT = (
    "Think about the problem step by step between <think> and </think>, then give the final answer alone between "
    "<answer> and </answer>."
)
_ANY_TAG = re.compile(TAG.pattern, re.IGNORECASE)
_MAX_INFO_CHARS = 200


class ReasoningTask(QuestionTask):
    """Problems whose answer is a number or a short text, rewarded by form, thinking and answer together.

    ``reward = 1.0 * answer + format_weight * format + thinking_weight * thinking`` with the terms of
    :mod:`sota_grpo.rewards.thinking`: ``answer`` in {0, 1}, ``format`` in [0, 1], ``thinking`` in [-1, 0]. The answer
    is looked for in the last complete answer tags after the thinking, whatever the rest of the form is like; success
    is a right answer. With ``format_weight + thinking_weight < 1`` every right answer earns more than every wrong one.

    Args:
        train: examples to train on.
        heldout: examples to evaluate on.
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
    hub_name, hub_config = HUB_NAME, HUB_CONFIG

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
        require_format(answer_format)
        require_not_negative(
            format_weight=format_weight, thinking_weight=thinking_weight, min_think_words=min_think_words
        )
        self.train, self.heldout = train, heldout
        self.system_prompt = SYSTEM_PROMPT if system_prompt is None else system_prompt
        self.min_think_words, self.answer_format = min_think_words, answer_format
        self.term_weights: Mapping[str, float] = {
            "answer": 1.0,
            "format": format_weight,
            "thinking": thinking_weight,
        }

    def score(self, response: str, example: Example) -> Score:
        """The three terms; beside them the words of thinking and the beginning of the answer that was found."""
        parts, answer = read_parts(response), extract_answer(response, self.answer_format)
        right = answer_term(answer, split_gold(example.answer)[1])
        terms = {
            "answer": right,
            "format": format_term(parts),
            "thinking": thinking_term(parts.thinking, self.min_think_words),
        }
        found = {} if answer is None else {"answer_found": answer[:_MAX_INFO_CHARS]}
        return Score(terms, success=right == 1.0, info={"think_words": count_words(parts.thinking or ""), **found})

    def gold_response(self, example: Example) -> str:
        """The worked answer where there is one, else the question restated, as thinking long enough; then the answer.

        Earns the full reward whatever stands in the question: tags in it become brackets.
        """
        steps, gold = split_gold(example.answer)
        thinking = CALCULATION.sub("", steps) or f"I am asked: {example.query}"
        again = f"\nI read the question once more: {example.query}\nMy answer stays {gold}."
        missing = max(0, self.min_think_words - count_words(thinking))
        thinking += again * -(-missing // count_words(again))
        return f"<think>\n{TAG.sub(_bracketed, thinking)}\n</think>\n<answer>{gold}</answer>"

    def read_row(self, row: Row, place: str) -> Example:
        """Of one of the columns ``GOLD_COLUMNS`` and, where there is text in one, of ``QUESTION_COLUMNS``.

        Raises:
            DatasetError: there is no answer, it is empty, or it holds a tag.
        """
        questions = [row[name] for name in QUESTION_COLUMNS if isinstance(row.get(name), str)]
        return _example(questions[0] if questions else "", row, place)

    def read_problem(self, row: Row, place: str) -> Example:
        """As :meth:`read_row`, of a row that must have a question.

        >>> ReasoningTask().read_problem({"prompt": "1+1?", "ground_truth": 2}, "demo, row 1")
        Example(query='1+1?', answer='2', extra={})
        """
        question = _text(row, QUESTION_COLUMNS, place)
        if not question.strip():
            raise DatasetError(f"{place}: the question is empty; mend or remove the row.")
        return _example(question, row, place)


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


def _example(question: str, row: Row, place: str) -> Example:
    answer = _text(row, GOLD_COLUMNS, place)
    gold = split_gold(answer)[1]
    if not gold:
        raise DatasetError(f"{place}: the right answer is empty (it ends in {answer[-40:]!r}); mend or remove the row.")
    if _ANY_TAG.search(gold):
        raise DatasetError(
            f"{place}: the right answer {gold[:40]!r} holds one of the tags that end an answer; mend or remove the row."
        )
    return Example(query=question, answer=answer)


def _text(row: Row, columns: Sequence[str], place: str) -> str:
    """The text, or the number as text, in the first of ``columns`` that the row has."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            raise DatasetError(
                f"{place}: column {column!r} holds {type(value).__name__}, not text (env.dataset=table reads chats)."
            )
    found = ", ".join(map(repr, row)) or "none"
    raise DatasetError(f"{place}: there is no column {' or '.join(map(repr, columns))}; the columns found are {found}.")


def _bracketed(tag: re.Match[str]) -> str:
    return f"[{tag[0][1:-1]}]"
