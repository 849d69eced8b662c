r"""Parsers of the tool-call formats of chat templates.

A format is the tokenizer's ``response_template``, or is derived from two known calls that the template renders. The
templates of Qwen, Llama and Mistral render the calls ``a(x=1)`` and ``b()``, or only the first (Llama), as::

    <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n{"name": "b", ..
    {"name": "a", "parameters": {"x": 1}}
    [TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b", ..}]

:class:`~sota_grpo.envs.tool_calls.ToolCallReader` decodes the ids for these parsers: a special token that formats use
becomes its name, any other special token becomes :data:`OTHER`, and :data:`SPELLED` is inserted into ordinary text that
only spells such a name. Both constants are lone surrogates, which no decoded text contains.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from sota_grpo.envs.chat_tokens import num_shared
from sota_grpo.rewards.extract import THINKING
from sota_grpo.rl.tool_schemas import MAX_NAME, call_id
from sota_grpo.text import sentence

SPELLED, OTHER = "\ud800", "\ud801"
MAX_DEPTH = 64  # nesting of arrays and objects in a call
MAX_CHARS = 32_768  # in a call
MAX_CALLS = 16  # in a turn
TEMPLATE_SECONDS = 5.0  # time limit of the regular expressions of a response_template, per turn

_SPACE = re.compile(rf"[\s{OTHER}]*+")
# strings match as a whole, so that their brackets do not count; an unclosed string extends to the end of the text
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


class ParsedCall(NamedTuple):
    """An unchecked call, or the ``error`` of one. ``untyped``: its format does not distinguish strings from numbers."""

    name: str
    arguments: Any
    error: str | None = None
    untyped: bool = False
    id: Any = None


class BadCall(ValueError):
    """A call cannot be parsed; the message has the reason."""


def read_json(text: str) -> Any:
    """Parse strict JSON: no NaN, infinity, duplicate keys or lone surrogates, at most :data:`MAX_DEPTH` deep.

    BadCall if it is not.

    >>> read_json('{"a": [1, 2.5, "é"]}')
    {'a': [1, 2.5, 'é']}
    >>> read_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    sota_grpo.envs.call_formats.BadCall: it is not JSON (a key is repeated)
    """
    _extent(text, 0)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadCall(f"it is not JSON ({error.msg} at character {error.pos})") from None
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise BadCall(f"it is not JSON ({error})") from None
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Raise BadCall unless ``value`` can be written as JSON in UTF-8 and is at most :data:`MAX_DEPTH` deep."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise BadCall("it has a number that is not finite, half a surrogate pair, or a type that JSON lacks") from None
    _extent(text, 0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is repeated")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _extent(text: str, start: int) -> int | None:
    """Return the end of the value whose opening bracket is at ``start``; None if not closed. BadCall if too deep."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        sign = text[bracket.start()]
        if sign == '"':
            continue
        depth += 1 if sign in "[{" else -1
        if depth <= 0:
            return bracket.end()
        if depth > MAX_DEPTH:
            raise BadCall(f"it is nested deeper than {MAX_DEPTH}")
    return None


_TOO_MANY = ParsedCall("", {}, f"a turn can have at most {MAX_CALLS} calls; this call and those after it are ignored")


@dataclass(frozen=True)
class MarkedCalls:
    """Parser of calls that are JSON, or a name followed by JSON, after an opening text.

    Args:
        opening: text before a call or a list of calls; if empty, a call counts only at the start of a turn's text.
        closing: text after that call or list; may be empty.
        keys: JSON keys of the name and of the arguments; None if the name precedes a JSON object of arguments.
        between: if ``keys`` is None, text between the name (or the id that follows it) and the arguments.
        before_id: if ``keys`` is None, text between the name and the call's id; empty if no id follows.
        listed: a JSON list of calls follows ``opening``.
        specials: special tokens; no call may contain one.
        thinks_until: text that ends the thinking opened by the generation prompt; empty if the prompt opens none.
    """

    opening: str
    closing: str
    keys: tuple[str, str] | None
    between: str
    listed: bool
    specials: tuple[str, ...]
    thinks_until: str = ""
    before_id: str = ""

    def scan(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the text without calls and thinking, and the calls, in linear time; a bad call has an ``error``."""
        texts: list[str] = []
        calls: list[ParsedCall] = []
        text_seen = False
        call = re.escape(self.opening)
        if not self.opening and self.keys is not None:
            kind = r'(?:"type"\s*+:\s*+"function"\s*+,\s*+)?'  # Llama 3 writes it too
            call = rf'\{{\s*+{kind}"{re.escape(self.keys[0])}"\s*+:'
        marks = "|".join(re.escape(mark) for pair in THINKING for mark in pair)
        begins = re.compile(f"(?P<call>{call})|{marks}")  # marks that change how the following text is parsed
        position = _after(text, self.thinks_until, 0) if self.thinks_until else 0
        while (match := begins.search(text, position)) is not None:
            texts.append(text[position : match.start()])
            text_seen = text_seen or bool(texts[-1].strip(f"{OTHER};, \t\r\n"))
            if match.lastgroup != "call":
                ends = dict(THINKING).get(match[0])
                position = _after(text, ends, match.end()) if ends else match.end()
            elif self.opening:
                position = self._opened(text, match.end(), calls)
            elif text_seen or not self.keys or text.find(f'"{self.keys[1]}"', match.start()) < 0:  # no call
                texts.append(match[0])
                text_seen, position = True, match.end()
            else:
                position = self._opened(text, match.start(), calls)
        return "".join((*texts, text[position:])), calls

    def _opened(self, text: str, start: int, calls: list[ParsedCall]) -> int:
        """Append the calls after an opening text to ``calls``; return the position after them."""
        position = _skip(text, start)
        listed = self.listed and text.startswith("[", position)
        try:
            while True:
                if len(calls) >= MAX_CALLS:
                    calls.append(_TOO_MANY)
                    return len(text)
                call, position = self._call(text, position + listed)
                position = _skip(text, position)
                if not listed:
                    break
                calls.append(call)
                if text.startswith("]", position):
                    position = _skip(text, position + 1)
                    break
                if not text.startswith(",", position):
                    raise BadCall("a call in the list is followed by neither a comma nor ]")
            position = self._closed(text, position)
            if not listed:
                calls.append(call)
            return position
        except BadCall as error:
            calls.append(ParsedCall("", {}, f"the call cannot be read: {error}"))
            ends = text.find(self.closing, start) if self.closing else -1
            return ends + len(self.closing) if ends >= 0 else len(text)

    def _closed(self, text: str, position: int) -> int:
        if not self.closing or text.startswith(self.closing, position):
            return position + len(self.closing)
        if re.compile(rf"(?:\s|{'|'.join((OTHER, *map(re.escape, self.specials)))})*+\Z").match(text, position):
            return position  # the turn ends here
        raise BadCall(f"{self.closing} is missing after its JSON")

    def _call(self, text: str, start: int) -> tuple[ParsedCall, int]:
        """Return the call that begins at ``start``, and the position after it."""
        name = identity = ""
        if self.keys is None:
            ends = text.find(self.between or "{", start, start + MAX_NAME + max(1, len(self.between)))
            if ends < 0:
                raise BadCall(f"no arguments follow its name, or its name has more than {MAX_NAME} characters")
            name, start = text[start:ends], ends + len(self.between)
            if self.before_id:
                name, _, identity = name.partition(self.before_id)
            name = without_specials(name, self.specials).strip()
        start = _skip(text, start)
        if not text.startswith("{", start):
            raise BadCall("no JSON object follows")
        end = _extent(text, start)
        if end is None:
            raise BadCall("it is not JSON (its object has no end)")
        if end - start > MAX_CHARS:
            raise BadCall(f"its JSON has {end - start} characters, more than {MAX_CHARS}")
        value = read_json(without_specials(text[start:end], self.specials))
        if self.keys is None:
            return ParsedCall(name, value, id=identity.strip()), end
        name_key, arguments_key = self.keys
        if name_key not in value or arguments_key not in value:
            raise BadCall(f"its object needs the keys {name_key} and {arguments_key}")
        return ParsedCall(value[name_key], value[arguments_key], id=value.get("id")), end


def without_specials(text: str, specials: Sequence[str]) -> str:
    """Return a call's text without :data:`SPELLED`; BadCall if it has :data:`OTHER` or one of the ``specials``."""
    if OTHER in text or any(name in text for name in specials):
        raise BadCall("it contains a special token")
    return text.replace(SPELLED, "")


def _skip(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it always matches


def _after(text: str, ends: str, position: int) -> int:
    """Return the position after ``ends`` (the end of thinking), or the length of the text if ``ends`` is missing."""
    at = text.find(ends, position)
    return at + len(ends) if at >= 0 else len(text)


class TemplateCalls:
    """Parser of calls by the ``response_template`` of a tokenizer, with transformers.

    The template's regular expressions come from the model repository and may be slow, so a turn may take at most
    :data:`TEMPLATE_SECONDS`. A call that cannot be parsed has an ``error``; the other calls of the turn stay valid.

    Args:
        template: the ``response_template``; ValueError if it cannot be loaded or has no ``tool_calls``.
        prefix: a rendered prompt that ends where the policy's turn begins.
        specials: special tokens; no call may contain one.
    """

    def __init__(self, template: Mapping[str, Any], prefix: str, specials: tuple[str, ...]):
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template = load_response_template(dict(template))
        if "tool_calls" not in self._template.fields:
            raise ValueError("it has no tool_calls")
        self._prefix, self._specials = prefix, specials
        self._calls = self._template.fields["tool_calls"]
        groups = getattr(self._calls.open_re, "groupindex", {})
        self._template.fields["tool_calls"] = replace(  # as raw text, which _call parses
            self._calls,
            content="text",
            content_args={"strip": False},
            transform={"body": "{content}", "captures": {name: f"{{{name}}}" for name in groups}},
            transform_each=False,
        )
        parser = self._calls.content_args.get("value_parser") or {"name": "text"}
        self._untyped = self._calls.content in ("xml-inline", "kv-lines") and parser.get("name", "text") == "text"

    def scan(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return text and calls like :meth:`MarkedCalls.scan`; a turn that cannot be parsed is a call with an error."""
        from transformers.utils.chat_parsing import parse_response

        deadline = time.monotonic() + TEMPLATE_SECONDS
        timed = copy.copy(self._template)
        timed.fields = {
            name: replace(entry, open_re=_timed(entry.open_re, deadline), close_re=_timed(entry.close_re, deadline))
            for name, entry in self._template.fields.items()
        }
        try:
            message = parse_response(text, timed, prefix=self._prefix)
        except Exception as error:  # text and template are both untrusted
            return "", [ParsedCall("", {}, f"the turn cannot be read: {sentence(error)}")]
        content = message.get("content")
        raw = message.get("tool_calls") or []
        calls: list[ParsedCall] = []
        for entry in raw if isinstance(raw, list) else [raw]:
            if len(calls) >= MAX_CALLS:
                calls.append(_TOO_MANY)
                break
            try:
                calls += self._call(entry, deadline)
            except Exception as error:
                calls.append(ParsedCall("", {}, f"the call cannot be read: {sentence(error)}"))
        return content if isinstance(content, str) else "", calls

    def _call(self, entry: Mapping[str, Any], deadline: float) -> list[ParsedCall]:
        from transformers.utils.chat_parsing.content_parsers import parse_content, process_field

        body = without_specials(entry["body"], self._specials)
        captures = {name: without_specials(text, self._specials) for name, text in entry["captures"].items()}
        if len(body) > MAX_CHARS:
            raise BadCall(f"it has {len(body)} characters, more than {MAX_CHARS}")
        field = self._calls
        if field.content == "xml-inline":
            value: Any = self._tags(body, deadline)
        elif field.content == "json" and not field.content_args:
            value = read_json(body.strip())
        else:
            _extent(body, 0)
            value = parse_content(body, field.content, field.content_args)
        check_json(value)
        made = process_field(json.dumps(value), replace(field, content="json", content_args={}), captures)
        parsed = []
        for call in made if isinstance(made, list) else [made]:
            function = call.get("function", call)
            parsed.append(
                ParsedCall(function.get("name"), function.get("arguments"), None, self._untyped, call.get("id"))
            )
        return parsed

    def _tags(self, body: str, deadline: float) -> dict[str, Any]:
        """Parse ``xml-inline`` arguments as transformers does, but with the time limit."""
        import regex  # transformers' own, whose searches have a timeout
        from transformers.utils.chat_parsing.content_parsers import parse_content

        options = self._calls.content_args
        parser = options.get("value_parser") or {"name": "text"}
        tags = regex.compile(options["tag_pattern"], regex.DOTALL)
        arguments: dict[str, Any] = {}
        for tag in tags.finditer(body, timeout=_left(deadline)):
            if tag["key"] in arguments:
                raise BadCall(f"the argument {tag['key'][:MAX_NAME]!r} is given twice")
            arguments[tag["key"]] = parse_content(tag["value"], parser.get("name", "text"), parser.get("args", {}))
        return arguments


def _timed(pattern: Any, deadline: float) -> Any:
    """Return a regular expression whose searches stop at the deadline; None for None."""

    def search(text: str, position: int, **options: Any) -> Any:
        return pattern.search(text, position, timeout=_left(deadline), **options)

    return None if pattern is None else SimpleNamespace(search=search)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it takes longer than {TEMPLATE_SECONDS:g} s")
    return left


def derive(one: str, two: str | None, name: str, arguments: Mapping[str, Any], ending: str) -> MarkedCalls | None:
    """Return the format of calls in rendered turns, without ``specials`` and ``thinks_until``; None without JSON calls.

    Args:
        one: a rendered turn with one call.
        two: a rendered turn with the same call twice; None if the template supports only one.
        name, arguments: the called tool and its arguments.
        ending: the text that the template writes after every turn.

    >>> turn = '<call>{"name": "f", "arguments": {"x": 1}}</call>'
    >>> derive(turn, turn + "\\n" + turn, "f", {"x": 1}, "").opening
    '<call>'
    """
    if (call := _call_in(one, 0, name, arguments)) is None:
        return None
    start, end, keys = call
    before, after = one[:start], one[end:].removesuffix(ending)
    for _, thought in THINKING:
        before = before[before.rfind(thought) + len(thought) :] if thought in before else before
    between = before_id = ""
    if keys is None:
        before, _, between = before.rpartition(name)
        if call_id(0) in between:
            before_id, _, between = between.partition(call_id(0))
    listed = before.rstrip().endswith("[") and after.lstrip().startswith("]")
    if listed:
        before, after = before.rstrip()[:-1], after.lstrip()[1:]
    elif two is not None and (second := _call_in(two, end, name, arguments)) is not None:
        joint = two[end : second[0]]
        if keys is None:
            joint = joint.rpartition(name)[0]
        before, after, joint = before.rstrip(), after.lstrip(), joint.strip()
        before = before[len(before) - num_shared([before[::-1], joint[::-1]]) :]
        after = after[: num_shared([after, joint])]
    return MarkedCalls(before.strip(), after.strip(), keys, between.strip(), listed, (), before_id=before_id.strip())


def _call_in(
    text: str, start: int, name: str, arguments: Mapping[str, Any]
) -> tuple[int, int, tuple[str, str] | None] | None:
    """Return (start, end, keys) of the first JSON object that is the call, or its arguments (keys None)."""
    for opened in re.compile(r"\{").finditer(text, start):
        begin = opened.start()
        with suppress(BadCall):
            end = _extent(text, begin) or begin  # not closed: empty text, which is not JSON
            value = read_json(text[begin:end])
            if value == arguments and name in text[start:begin]:
                return begin, end, None
            of_name = [key for key, item in value.items() if item == name]
            of_arguments = [key for key, item in value.items() if item == arguments]
            if of_name and of_arguments:
                return begin, end, (of_name[0], of_arguments[0])
    return None
