"""Tasks whose responses give the answer in a fixed format: GSM8K, MATH, and reasoning in tags.

Model text is untrusted: it is searched with linear-time regular expressions, and never executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sota_grpo.rewards.extract import CALCULATION, answers_equal, extract_answer, is_number, parse_number
from sota_grpo.rewards.maths import math_equal
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import (
    DatasetError,
    FileTask,
    Row,
    first_text,
    optional_text,
    present,
    require_not_negative,
)

_FORMS = {  # instruction in the system prompt, and last line of a response
    "hash": ("on a last line of the form '#### <{}>'", "#### {}"),
    "boxed": ("in the form \\boxed{{<{}>}}", "The answer is \\boxed{{{}}}."),
    "tags": ("in the form <answer><{}></answer>", "<answer>{}</answer>"),
    "last_number": ("as the last number of the response", "The answer is {}."),
}
_MAX_INFO_CHARS = 200
_MIN_THINK_WORDS = 20


def answering(answer_format: str, answer: str) -> str:
    """Return the last line of a response that gives ``answer`` in a format; KeyError for ``any`` and unknown ones.

    >>> answering("boxed", "18"), answering("tags", "18")
    ('The answer is \\\\boxed{18}.', '<answer>18</answer>')
    """
    return _FORMS[answer_format][1].format(answer)


@dataclass(eq=False, repr=False, kw_only=True)
class QuestionTask(FileTask):
    """Base class of tasks that grade the answer which a response gives in a fixed format.

    A subclass may set ``default_format``; ``default_weights``, those of the reward terms; and ``what``, the word for
    the answer in the prompt. ValueError for an unknown answer format or a negative weight.

    Args:
        answer_format: see :func:`~sota_grpo.rewards.extract.extract_answer`; None is the class's ``default_format``,
            which the prompt also requests for ``any``.
        system_prompt: replaces the task's system prompt; with an empty text there is no system turn.
        format_weight: weight of ``format``; at 0 it is still reported. None is that of ``default_weights``.
    """

    has_test_split = True
    default_format, what = "hash", "answer"
    default_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "format": 0.0}
    question_columns: ClassVar[Sequence[str]] = ("question",)

    answer_format: str | None = None
    format_weight: float | None = None

    def __post_init__(self) -> None:
        self.answer_format = self._format
        extract_answer("", self._format)  # raises if it is unknown
        self._requested_format = self.default_format if self._format == "any" else self._format
        if not self.default_prompt:
            where = _FORMS[self._requested_format][0].format(self.what)
            self.default_prompt = f"Solve the problem step by step, then give the final answer {where}."
        super().__post_init__()
        weight = self.default_weights["format"] if self.format_weight is None else self.format_weight
        require_not_negative(format_weight=weight)
        self.term_weights = {**self.default_weights, "format": weight}

    @property
    def _format(self) -> str:
        return self.default_format if self.answer_format is None else self.answer_format


class GSM8KTask(QuestionTask):
    """Grade-school word problems, graded by the final number alone (Cobbe et al. 2021, arXiv:2110.14168).

    ``reward = 1.0 * correct + format_weight * format``: ``correct`` is 1 when the answer equals the gold number
    exactly; ``format`` is 1 when the response gives a number in the answer format. Arguments: :class:`QuestionTask`.

    >>> task = GSM8KTask([Example("What is 9 times 2?", "9*2=18\\n#### 18")], [])
    >>> task.score("Nine twice is 18.\\n#### 18.00", task.train[0]).terms
    {'correct': 1.0, 'format': 1.0}
    >>> task.score("18", task.train[0]).success
    False
    """

    name = "gsm8k"
    hub_name, hub_config = "openai/gsm8k", "main"
    what = "number"

    def score(self, response: str, example: Example) -> Score:
        answer = extract_answer(response, self._format)
        number = None if answer is None else parse_number(answer)
        gold = parse_number(extract_answer(example.answer, "hash") or example.answer)
        correct = number is not None and number == gold
        return Score(terms={"correct": float(correct), "format": float(number is not None)}, success=correct)

    def gold_response(self, example: Example) -> str:
        """Return the gold solution without calculator annotations, its final number in the requested format."""
        steps = CALCULATION.sub("", example.answer).rpartition("####")[0].rstrip()
        last_line = answering(self._requested_format, extract_answer(example.answer, "hash") or example.answer)
        return f"{steps}\n{last_line}" if steps else last_line

    def read_row(self, row: Row, location: str) -> Example:
        """Return a row's example: ``answer`` (``N`` or ``.. #### N``; else DatasetError), optional ``question``."""
        answer = first_text(row, ["answer"], location)
        if parse_number(extract_answer(answer, "hash") or answer) is None:
            raise DatasetError(
                f"{location}: the gold answer must be one number, or end in one after '####', but ends in "
                f"{answer[-40:]!r}; mend or remove the row."
            )
        return Example(query=optional_text(row, self.question_columns), answer=answer)


@dataclass(eq=False, repr=False, kw_only=True)
class MathTask(QuestionTask):
    """Competition problems whose answer is any expression (MATH, Hendrycks et al. 2021, arXiv:2103.03874).

    ``reward = 1.0 * answer + format_weight * format``. The term ``answer`` has the value ``correct`` if the response's
    answer equals the gold answer (:func:`sota_grpo.rewards.maths.math_equal`), ``no_answer`` if the response has no
    answer, else ``wrong``; ``format`` is 1 if the response has an answer, else 0. ValueError unless the three rewards
    are finite and ``correct`` is the greatest. Further arguments: :class:`QuestionTask`.

    >>> task = MathTask([Example("Solve 2x = 1.", "\\\\frac{1}{2}")], [])
    >>> [task.score(response, task.train[0]).terms["answer"] for response in ("\\\\boxed{0.5}", "\\\\boxed{2}", "0.5")]
    [1.0, -1.0, -0.5]
    """

    name = "math"
    hub_name, hub_config = "DigitalLearningGmbH/MATH-lighteval", "default"
    default_format = "boxed"
    default_weights: ClassVar[Mapping[str, float]] = {"answer": 1.0, "format": 0.0}
    question_columns = ("question", "problem", "prompt")
    _gold_columns = ("ground_truth", "answer", "solution")

    correct: float = 1.0
    wrong: float = -1.0
    no_answer: float = -0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        rewards = self.correct, self.wrong, self.no_answer
        if not all(map(math.isfinite, rewards)) or self.correct <= max(self.wrong, self.no_answer):
            raise ValueError(
                f"reward.correct={self.correct} must be greater than reward.wrong={self.wrong} and "
                f"reward.no_answer={self.no_answer}, and all three finite."
            )

    def score(self, response: str, example: Example) -> Score:
        """Return the terms ``answer`` and ``format``; ``info`` has any answer (200 characters) as ``extracted``."""
        answer = extract_answer(response, self._format, mathematics=True)
        if answer is None:
            return Score({"answer": self.no_answer, "format": 0.0}, success=False)
        right = math_equal(example.answer, answer)
        value = self.correct if right else self.wrong
        return Score({"answer": value, "format": 1.0}, success=right, info={"extracted": answer[:_MAX_INFO_CHARS]})

    def gold_response(self, example: Example) -> str | None:
        """Return the gold answer in the requested format; None if this would not be graded as right."""
        response = answering(self._requested_format, " ".join(example.answer.split()))
        return response if self.score(response, example).success else None

    def read_row(self, row: Row, location: str) -> Example:
        """Return the example of a row, whose gold answer is in ``ground_truth``, else ``answer``, else ``solution``.

        It is text, a number, ``$...$``, after ``####`` or in a solution's ``\\boxed{}``; DatasetError: incomparable.
        """
        text = first_text(row, self._gold_columns, location)
        gold = extract_answer(text, "boxed")
        if gold is None and all(present(row.get(column)) is None for column in self._gold_columns[:-1]):
            raise DatasetError(
                f"{location}: the solution has no \\boxed{{answer}} (it ends in {text[-40:]!r}); mend the row."
            )
        gold = gold or extract_answer(text, "hash") or text.strip()
        if not math_equal(gold, gold):
            raise DatasetError(
                f"{location}: the gold answer {gold[:40]!r} ({len(gold)} characters) cannot be compared; "
                "give a short final answer or remove the row."
            )
        return Example(query=optional_text(row, self.question_columns), answer=gold)


TAG = re.compile(r"</?(?:think|answer)>")  # lower case without spaces, as the prompt requests
_ANY_TAG = re.compile(TAG.pattern, re.IGNORECASE)
_SHAPE = ["<think>", "</think>", "<answer>", "</answer>"]
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # scripts without spaces between words
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


class ParsedResponse(NamedTuple):
    """The texts between a response's think tags and answer tags; ``exact``: the response has both, and nothing else.

    A text is None if it is empty or :func:`parse_response` rejects its tags.
    """

    thinking: str | None
    answer: str | None
    exact: bool


def parse_response(response: str) -> ParsedResponse:
    """Parse the thinking and the answer of a response by their tags.

    Each text needs exactly one pair of its tags, and the answer's must be the last tags. Only the opening ``<think>``
    may be missing, as prompts of reasoning models end with it. Other tags or text outside make ``exact`` False.

    >>> parse_response("<think>9 + 9</think> <answer>18</answer>")
    ParsedResponse(thinking='9 + 9', answer='18', exact=True)
    >>> parse_response("9 + 9</think>So: <answer>18</answer>")
    ParsedResponse(thinking='9 + 9', answer='18', exact=False)
    >>> parse_response("<answer>18</answer><think>9 + 9</think>")
    ParsedResponse(thinking='9 + 9', answer=None, exact=False)
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
    return ParsedResponse(thinking or None, answer or None, exact)


def format_term(parsed: ParsedResponse) -> float:
    """Return 1 for the exact form, else 0.25 for each of ``thinking`` and ``answer`` that is not None."""
    return 1.0 if parsed.exact else 0.25 * ((parsed.thinking is not None) + (parsed.answer is not None))


def count_words(text: str) -> int:
    """Return the number of words and numbers; each Chinese or Japanese character counts as a word."""
    return sum(1 for _ in _WORD.finditer(text))


class ReasoningTask(QuestionTask):
    """Problems whose answer is a number or a short text, with rewards for answer, format and thinking.

    The requested format is ``<think>`` steps ``</think>`` and then ``<answer>`` only the answer ``</answer>``.

    ``reward = 1.0 * answer + format_weight * format + 0.2 * thinking``: ``answer`` is
    :func:`~sota_grpo.rewards.extract.answers_equal`, 0 or 1; ``format`` is :func:`format_term` in [0, 1]; ``thinking``
    is ``min(words / 20, 1) - 1`` in [-1, 0]. The answer is in the last complete answer tags after the thinking, even if
    the format is otherwise wrong; success is a right answer. If ``format_weight < 0.8``, every right answer earns more
    than every wrong one. Further arguments: :class:`QuestionTask`; ``answer_format`` only changes how the answer is
    extracted, for use with a custom prompt.

    >>> task = ReasoningTask()
    >>> task.score("<think>Nine and nine is 18.</think><answer>18</answer>", Example("9 * 2?", "#### 18")).terms
    {'answer': 1.0, 'format': 1.0, 'thinking': -0.75}
    >>> task.score("<answer>$18.00</answer>", Example("9 * 2?", "18")).terms
    {'answer': 1.0, 'format': 0.25, 'thinking': -1.0}
    """

    name = "reasoning"
    hub_name, hub_config = "openai/gsm8k", "main"
    default_format = "tags"
    default_weights: ClassVar[Mapping[str, float]] = {"answer": 1.0, "format": 0.2, "thinking": 0.2}
    question_columns = ("question", "prompt")
    default_prompt = (
        "Think about the problem step by step between <think> and </think>, then give the final answer alone between "
        "<answer> and </answer>."
    )

    def score(self, response: str, example: Example) -> Score:
        """Return the class's terms; ``info``: ``think_words`` (a count) and, if there is one, ``answer_found``."""
        parsed, gold = parse_response(response), split_gold(example.answer)[1]
        answer = extract_answer(response, self._format, words=not is_number(gold))
        right = answer is not None and answers_equal(answer, gold)
        words = count_words(parsed.thinking or "")
        thinking = min(words / _MIN_THINK_WORDS, 1.0) - 1.0
        terms = {"answer": float(right), "format": format_term(parsed), "thinking": thinking}
        info: dict[str, object] = {"think_words": words}
        if answer is not None:
            info["answer_found"] = answer[:_MAX_INFO_CHARS]
        return Score(terms, success=right, info=info)

    def gold_response(self, example: Example) -> str:
        """Return at least 20 words of thinking in think tags, then the gold answer in answer tags.

        This earns the full reward if ``answer_format`` is ``tags`` or ``any``. The thinking is the gold solution or the
        question, followed by the question as often as needed.
        """
        steps, gold = split_gold(example.answer)
        thinking = CALCULATION.sub("", steps) or f"I am asked: {example.query}"
        again = f"\nI read the question once more: {example.query}\nMy answer stays {gold}."
        missing = max(0, _MIN_THINK_WORDS - count_words(thinking))
        thinking += again * -(-missing // count_words(again))
        return f"<think>\n{TAG.sub(lambda tag: f'[{tag[0][1:-1]}]', thinking)}\n</think>\n<answer>{gold}</answer>"

    def read_row(self, row: Row, location: str) -> Example:
        """Return a row's example; DatasetError if ``answer``, else ``ground_truth``, else ``completion`` is invalid."""
        answer = first_text(row, ("answer", "ground_truth", "completion"), location)
        gold = split_gold(answer)[1]
        if not gold or _ANY_TAG.search(gold):
            ends = f"is empty (it ends in {answer[-40:]!r})"
            reason = f"{gold[:40]!r} contains a think or answer tag" if gold else ends
            raise DatasetError(f"{location}: the gold answer {reason}; mend or remove the row.")
        return Example(query=optional_text(row, self.question_columns), answer=answer)


def split_gold(answer: str) -> tuple[str, str]:
    """Split a gold answer into ``(solution steps, final answer)``; the steps are empty if there are none.

    The final answer is the content of answer tags, else the text after ``####`` on the last line, else the whole text.

    >>> split_gold("9*2=18\\n#### 18"), split_gold("<think>9*2</think><answer>18</answer>"), split_gold(" Paris ")
    (('9*2=18', '18'), ('9*2', '18'), ('', 'Paris'))
    """
    tagged = extract_answer(answer, "tags")
    if tagged is not None:
        return parse_response(answer).thinking or "", tagged
    steps, mark, last = answer.rpartition("####")
    if mark and "\n" not in last.strip():
        return steps.strip(), last.strip()
    return "", answer.strip()
