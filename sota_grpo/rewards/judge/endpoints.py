"""How each kind of judge is asked over HTTP, and where the value stands in what it answers.

``chat`` is the chat completions of OpenAI's form, which most servers and services have. ``score``, ``classify`` and
``pooling`` are those of vLLM 0.32, for reward models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sota_grpo.rewards.judge.cache import key_of
from sota_grpo.rewards.judge.prompts import (
    Material,
    Unreadable,
    data,
    dialog,
    pair_messages,
    read_pair,
    read_score,
    score_messages,
)
from sota_grpo.rewards.judge.rules import CHAT, CLASSIFY, POOLING, SCORE

#: Where each kind of judge is asked.
PATHS = {CHAT: "/v1/chat/completions", SCORE: "/score", CLASSIFY: "/classify", POOLING: "/pooling"}


class WrongForm(ValueError):
    """An answer is not of the form that its path has."""


@dataclass(frozen=True)
class Answer:
    """What one answer says: the value, and the words that it was read from."""

    value: float
    said: str = ""


@dataclass(frozen=True)
class Question:
    """One request to a judge.

    Args:
        path: where it goes.
        body: what is sent.
        read: makes an answer of the parsed JSON; raises :class:`Unreadable` where a judge's words have no verdict.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[Any], Answer] = field(compare=False)

    @property
    def key(self) -> str:
        """By which its verdict is kept."""
        return key_of(self.path, self.body)


@dataclass(frozen=True)
class Endpoint:
    """One kind of judge.

    Args:
        kind: see the module.
        model: its name there.
        rubric: of ``chat``.
        max_tokens: of what it says (``chat``).
        label: which of several numbers is the value (``classify``, ``pooling``).
        extra_body: further fields of every request; None as a value takes one out.
        as_text: ``classify`` and ``pooling`` are given one text, for a model without a chat template.

    >>> endpoint = Endpoint("score", "rm")
    >>> question = endpoint.ask(Material([{"role": "user", "content": "2 + 2?"}], "4"))
    >>> question.path, question.body
    ('/score', {'model': 'rm', 'text_1': 'user: 2 + 2?', 'text_2': '4'})
    >>> question.read({"data": [{"index": 0, "score": 0.75}], "usage": {"prompt_tokens": 9}}).value
    0.75
    """

    kind: str
    model: str
    rubric: str = ""
    max_tokens: int = 512
    label: int = -1
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    as_text: bool = False

    def ask(self, one: Material) -> Question:
        """The question what a response is worth."""
        if self.kind == CHAT:
            messages, nonce = score_messages(self.rubric, one)
            return self._chat(messages, lambda said: read_score(said, nonce))
        body: dict[str, Any]
        if self.kind == SCORE:
            body = {"text_1": data(dialog(one.prompt)), "text_2": data(one.response)}
            return self._question(body, _score)
        if self.as_text:
            body = {"input": data(f"{dialog(one.prompt)}\n\n{one.response}")}
        else:
            turns = [*one.prompt, {"role": "assistant", "content": one.response}]
            body = {"messages": [{**turn, "content": data(str(turn.get("content") or ""))} for turn in turns]}
        if self.kind == POOLING:  # the number itself, before anything squeezes it into [0, 1]
            body["use_activation"] = False
        return self._question(body, lambda answer: _labelled(self.kind, answer, self.label))

    def compare(self, one: Material, other: str) -> Question:
        """The question which of two responses is better, of ``chat`` only; the value is what it is to the first."""
        messages, nonce = pair_messages(self.rubric, one, other)
        return self._chat(messages, lambda said: read_pair(said, nonce))

    def ping(self) -> Question:
        """The smallest question of this kind: whoever answers it works."""
        one = Material([{"role": "user", "content": "ok"}], "ok")
        if self.kind != CHAT:
            return self.ask(one)
        return self._question({"messages": [*one.prompt], "max_tokens": 1}, lambda answer: Answer(0.0, _said(answer)))

    def _chat(self, messages: list[dict[str, str]], value_of: Callable[[str], float]) -> Question:
        def read(answer: Any) -> Answer:
            said = _said(answer)
            if _first(answer, "choices").get("finish_reason") == "length":  # what is cut may be another number
                raise Unreadable(f"the judge was cut at {self.max_tokens} tokens")
            return Answer(value_of(said), said)

        return self._question({"messages": messages, "temperature": 0, "max_tokens": self.max_tokens}, read)

    def _question(self, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> Question:
        whole = {"model": self.model, **body, **self.extra_body}
        return Question(PATHS[self.kind], {name: value for name, value in whole.items() if value is not None}, read)


def _said(answer: Any) -> str:
    message = _first(answer, "choices").get("message")
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is not None and not isinstance(content, str):
        raise WrongForm("the content of its message is no text")
    return content or ""


def _score(answer: Any) -> Answer:
    return Answer(_number(_first(answer, "data").get("score")))


def _labelled(kind: str, answer: Any, label: int) -> Answer:
    """Of class probabilities, or of a pooled vector; of one vector per token, of the last."""
    row = _first(answer, "data")
    values = row.get("probs" if kind == CLASSIFY else "data")
    if isinstance(values, list) and values and isinstance(values[0], list):
        values = values[-1]
    if not isinstance(values, list) or not -len(values) <= label < len(values):
        raise WrongForm(f"it has no number {label} for a label")
    return Answer(_number(values[label]))


def _first(answer: Any, name: str) -> Mapping[str, Any]:
    rows = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], Mapping):
        raise WrongForm(f"it has no {name}")
    return rows[0]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
        raise WrongForm("its value is no finite number")
    return float(value)


def tokens_of(answer: Any) -> tuple[int, int]:
    """Tokens of the prompt and of what was said, as an answer counts them; 0 where it does not.

    >>> tokens_of({"usage": {"prompt_tokens": 9, "completion_tokens": None}})
    (9, 0)
    """
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    counts = [usage.get(name) if isinstance(usage, Mapping) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (max(0, count) if isinstance(count, int) else 0 for count in counts)
    return prompt, completion
