"""Parse the tool calls of a policy turn from its sampled token ids.

Special tokens count only if they were sampled as tokens: ``<|python_tag|>`` spelled in characters is text, and so is a
call inside the arguments of another. Calls inside thinking do not count. An invalid call gets an error, which the
policy receives as the tool's result; nothing is executed here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from sota_grpo.envs.call_formats import (
    OTHER,
    SPELLED,
    BadCall,
    MarkedCalls,
    ParsedCall,
    TemplateCalls,
    check_json,
    derive,
    read_json,
)
from sota_grpo.envs.chat_tokens import num_shared, opened_thinking
from sota_grpo.errors import UserError
from sota_grpo.rewards.extract import THINKING
from sota_grpo.rl.tool_schemas import NAME, ToolCall, argument_error, call_id, keyword, parameters_by_name, quoted
from sota_grpo.text import first_line, one_line

logger = logging.getLogger(__name__)

_QUESTION_TEXT, _ANSWER, _RESULT = "whatwasasked", "whatwassaid", "whatthetoolsaid"  # which no template changes
_TOOL = "probe_tool"
_QUESTION = {"role": "user", "content": _QUESTION_TEXT}
_SIMPLE: dict[str, Any] = {"text": "probevalue", "number": 7}  # simple to find in any rendering
_HARD: dict[str, Any] = {"text": 'é日 "x" \\ \n <b> {[', "items": [{"deep": [1, 2.5, None, True]}, []]}
_PROBES = ([_SIMPLE], [_SIMPLE, _SIMPLE], [_HARD], [_SIMPLE, _HARD])
_TYPES = {"text": "string", "number": "integer", "items": "array"}
_PROPERTIES = {name: {"type": kind, "description": "Anything."} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
_SCHEMA = {"type": "function", "function": {"name": _TOOL, "description": "A probe.", "parameters": _PARAMETERS}}
_NEEDED = "use a model whose chat template is made for tools, or set the tokenizer's chat_template to one"


@dataclass(frozen=True)
class PolicyTurn:
    """A parsed turn: its text outside of calls and thinking, stripped, and its calls; an invalid call has an error."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallReader:
    """Parses policy turns, for tokenizers whose chat template supports tools.

    The tokenizer's ``response_template`` defines the format of calls. If there is none, or it cannot parse the calls
    that the chat template renders, the format is derived from such calls. UserError if this fails, the chat template
    does not render tools, calls or results, or ``schemas`` is empty or malformed.

    Args:
        schemas: JSON schemas of the tools (:func:`~sota_grpo.rl.tool_schemas.function_schemas`).
        template_kwargs: further arguments of ``apply_chat_template``.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> from sota_grpo.rl.tool_schemas import function_schemas
    >>> def divide(dividend: int, divisor: int) -> str:
    ...     '''Divide two numbers.
    ...
    ...     Args:
    ...         dividend: What is divided.
    ...         divisor: By what.
    ...     '''
    >>> tokenizer = load_tokenizer("tiny")
    >>> reader = ToolCallReader(tokenizer, function_schemas([divide]))
    >>> said = 'Let me see. <tool_call>{"name": "divide", "arguments": {"dividend": 6, "divisor": "2"}}</tool_call>'
    >>> turn = reader.read(tokenizer(said)["input_ids"])
    >>> turn.content, turn.calls[0].name, dict(turn.calls[0].arguments)
    ('Let me see.', 'divide', {'dividend': 6, 'divisor': '2'})
    >>> turn.calls[0].error
    "the argument 'divisor' is a string, not an integer"
    """

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._tools, self._tokenizer = parameters_by_name(schemas), tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        known = getattr(tokenizer, "added_tokens_decoder", {})
        special = {number for number, token in known.items() if token.special} | set(tokenizer.all_special_ids)
        self._special = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in special}
        self._num_ids = len(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"the tokenizer has no chat template, so a prompt cannot describe tools; {_NEEDED}")
        self._require_tools(schemas)
        self._use_format()

    def read(self, token_ids: Iterable[int]) -> PolicyTurn:
        """Return the content and the calls of a turn ``[R]``, special tokens included; never raises.

        Takes time linear in the turn's length, or with a ``response_template`` at most about 5 s.
        """
        return self._read(token_ids, self._tools)

    def _read(self, token_ids: Iterable[int], tools: Mapping[str, Mapping[str, Any]]) -> PolicyTurn:
        text, calls = self._format.scan(self._text(token_ids))
        content = self._marks.sub("", text).replace(OTHER, "").replace(SPELLED, "").strip()
        return PolicyTurn(content, tuple(_checked(call, tools) for call in calls))

    def _text(self, token_ids: Iterable[int]) -> str:
        """Decode for the parsers: special tokens as names or :data:`OTHER`, spelled names broken by :data:`SPELLED`."""
        pieces: list[str] = []
        plain = range(self._num_ids)
        for is_plain, run in groupby(map(int, token_ids), lambda id: id in plain and id not in self._special):
            if is_plain:
                text = self._tokenizer.decode([*run], skip_special_tokens=False, clean_up_tokenization_spaces=False)
                pieces.append(self._spelled.sub(rf"\1{SPELLED}", _HALVES.sub("\ufffd", text)))
            else:
                names = [self._special.get(number, OTHER) for number in run]
                pieces += [name if name in self._counting else OTHER for name in names]
        return "".join(pieces)

    # probes of the chat template, at construction --------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], **options: Any) -> str:
        options = {"tools": [*tools] or None, "tokenize": False, **self._template_kwargs, **options}
        return self._tokenizer.apply_chat_template([*messages], **options)

    def _probe(self, what: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], **options: Any) -> str:
        try:
            return self._rendered(messages, tools, **options)
        except Exception as error:  # a template is code from the model repository: it may raise anything
            raise UserError(f"the chat template cannot render {what} ({first_line(error)}); {_NEEDED}") from error

    def _require_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        bare, text = self._probe("a question", [_QUESTION], []), self._probe("tools", [_QUESTION], schemas)
        missing = [name for name in self._tools if text.count(name) <= bare.count(name)]
        if missing:
            raise UserError(f"the chat template does not list the tools ({missing[0]} is not in the prompt); {_NEEDED}")
        call = message_of("", [ToolCall(_TOOL, _SIMPLE, id=call_id(0))])
        if _TOOL not in self._probe("tool calls", [_QUESTION, call], []):
            raise UserError(f"the chat template does not render tool calls of earlier turns; {_NEEDED}")
        result = {"role": "tool", "name": _TOOL, "tool_call_id": call_id(0), "content": _RESULT}
        if _RESULT not in self._probe("tool turns", [_QUESTION, call, result], [], add_generation_prompt=True):
            raise UserError(f"the chat template does not render the results of tools; {_NEEDED}")

    def _use_format(self) -> None:
        """Choose the first format that parses the calls which the template renders."""
        prompt = self._probe("a prompt", [_QUESTION], [_SCHEMA], add_generation_prompt=True)
        written = [self._written(prompt, probe) for probe in _PROBES]
        turns = [(text, probe) for text, probe in zip(written, _PROBES) if text is not None]
        template = getattr(self._tokenizer, "response_template", None)
        form = json.dumps(template, ensure_ascii=False).replace("\\", "") if template else ""
        marks = [*(mark for pair in THINKING for mark in pair), form, prompt, *filter(None, written)]
        names = {name for name in self._special.values() if len(name) > 1 and any(name in mark for mark in marks)}
        self._counting = names
        either = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        self._marks = re.compile(either)
        self._spelled = re.compile(f"(?={either})(.)", re.DOTALL)  # every name, overlapping ones included
        for candidate in self._candidates(template, prompt, *written[:2]):
            self._format = candidate
            if all(self._reads(text, probe) for text, probe in turns):
                return
        raise UserError(
            "the tool calls that the chat template renders cannot be parsed, because they are not JSON after a fixed "
            "marker; use a model whose template writes JSON, or set the tokenizer's response_template"
        )

    def _written(self, prompt: str, probe: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the rendered turn with these calls; None if the template supports only one call per turn."""
        calls = [ToolCall(_TOOL, arguments, id=call_id(number)) for number, arguments in enumerate(probe)]
        turn = message_of("", calls)
        try:
            text = self._rendered([_QUESTION, turn], [_SCHEMA])
        except Exception:  # the template raises for two calls; one call passed _probe
            return None
        return _after_prompt(prompt, text) if text.count(_TOOL) - prompt.count(_TOOL) >= len(probe) else None

    def _candidates(
        self, template: Any, prompt: str, one: str | None, two: str | None
    ) -> Iterator[MarkedCalls | TemplateCalls]:
        specials = tuple(sorted(self._counting))
        if template:
            try:
                yield TemplateCalls(template, prompt, specials)
            except Exception as error:  # the template is untrusted
                logger.warning("The tokenizer's response_template fails to load and is ignored: %s", first_line(error))
        plain = self._probe("an answer", [_QUESTION, {"role": "assistant", "content": _ANSWER}], [])
        form = one and derive(one, two, _TOOL, _SIMPLE, plain.rpartition(_ANSWER)[2])
        if form:
            yield replace(form, specials=specials, thinks_until=opened_thinking(prompt.rpartition(_QUESTION_TEXT)[2]))

    def _reads(self, text: str, probe: Sequence[Mapping[str, Any]]) -> bool:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        calls = self._read(ids, parameters_by_name([_SCHEMA])).calls
        return calls == tuple(ToolCall(_TOOL, arguments) for arguments in probe)


_ID = re.compile("[A-Za-z0-9]{9}", re.ASCII)
_HALVES = re.compile("[\ud800-\udfff]")


def message_of(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return a policy turn as a message in the form of chat templates and TRL."""
    made = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


def _after_prompt(prompt: str, text: str) -> str:
    """Return the policy's text after ``prompt`` in ``text``, which may render an opened thinking block differently."""
    if text.startswith(prompt):
        return text[len(prompt) :]
    for begins, ends in THINKING:
        head = prompt[: max(0, prompt.rfind(begins, prompt.rfind(_QUESTION_TEXT)))]
        if head and text.startswith(head):
            rest = text[len(head) :]
            return rest.removeprefix(begins) if rest.startswith(begins) else ends + rest
    before, tail = prompt.rpartition(_QUESTION_TEXT)[1:]
    if before and tail.strip() and tail in text:  # the text before the question differs from the prompt's
        return text.rpartition(tail)[2]
    return text[num_shared([prompt, text]) :]


def _checked(parsed: ParsedCall, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """Return the checked call; ``error`` is set if the tool is unknown or the arguments do not fit its schema."""
    name, arguments, error, untyped, given_id = parsed
    if error is not None:
        return ToolCall("", {}, one_line(error, 300))
    is_name = isinstance(name, str) and bool(NAME.fullmatch(name))
    is_id = isinstance(given_id, str) and _ID.fullmatch(given_id)
    call = ToolCall(name if is_name else "", {}, id=given_id if is_id else "")
    if not is_name or name not in tools:
        reason = f"there is no tool {quoted(name)}" if is_name else "the call names no tool"
        return replace(call, error=one_line(f"{reason}; available: {', '.join(tools)}"))
    if not isinstance(arguments, dict):
        return replace(call, error="the arguments are not a JSON object")
    if untyped:
        properties = keyword(tools[name], "properties", {})
        arguments = {key: _typed(value, properties.get(key, {})) for key, value in arguments.items()}
        try:
            check_json(arguments)
        except BadCall as bad:
            return replace(call, error=str(bad))
    misfit = argument_error(tools[name], arguments)
    error = None if misfit is None else one_line(misfit)
    return replace(call, arguments=arguments, error=error, is_misfit=misfit is not None)


def _typed(value: Any, schema: Any) -> Any:
    """Return an argument of an untyped format: the string if the schema allows one, else its value parsed as JSON."""
    if not isinstance(value, str) or argument_error({"properties": {"it": schema}}, {"it": value}) is None:
        return value
    try:
        return read_json(value.strip())
    except BadCall:
        return value
