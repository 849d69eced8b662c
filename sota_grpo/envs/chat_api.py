"""Requests and replies of two chat APIs: OpenAI's ``/v1/chat/completions`` and Anthropic's ``/v1/messages``.

A request of either becomes a :class:`ChatRequest` (one of Anthropic's by way of OpenAI's form), whose messages have the
form of chat templates: ``role`` (``system``, ``user``, ``assistant``, ``tool``), ``content`` as text, ``tool_calls``
with arguments as a dict, ``tool_call_id``. A reply that an agent sends back as history is parsed to the same message,
so that a request which continues it is recognised.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sota_grpo.envs.tool_calls import message_of
from sota_grpo.rl.tool_schemas import ToolCall
from sota_grpo.text import one_line

MODEL = "policy"  # the name under which the policy is listed
#: Options that would change the distribution or the form of a reply: refused unless they have no effect.
_REFUSED = ("frequency_penalty", "presence_penalty", "logit_bias", "functions", "prediction", "audio", "modalities")
_NONE: tuple[Any, ...] = (None, 0, {}, [], ["text"])


class BadRequest(ValueError):
    """A request that cannot be answered; ``status`` is the HTTP status, ``code`` the error's code in the response."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """A request for ``n`` replies to ``messages``, with at most ``max_tokens`` tokens each (None: the run's limit).

    ``tools`` are JSON schemas in OpenAI's form, ``stop`` are stop strings; ``with_usage``: end a stream with the usage.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False


@dataclass(frozen=True)
class Reply:
    """One parsed response of the policy: its text outside of tool calls, its calls, and its number of tokens."""

    content: str
    calls: tuple[ToolCall, ...]
    truncated: bool
    num_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of chat templates."""
        return message_of(self.content, self.calls)

    @property
    def finish_reason(self) -> str:
        """Why the response ended, as OpenAI's API names it."""
        return "length" if self.truncated else "tool_calls" if self.calls else "stop"


def openai_request(body: Any) -> ChatRequest:
    """Parse the body of ``/v1/chat/completions``; BadRequest if it is malformed or cannot be answered.

    Options that the run sets, such as ``model`` and ``temperature``, are ignored.

    >>> openai_request({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}).messages
    ({'role': 'user', 'content': 'Hi'},)
    """
    body = _object(body, "the request")
    for name in _REFUSED:
        if body.get(name) not in _NONE:
            raise BadRequest(f"{name} is not supported; leave it out.")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise BadRequest("response_format is not supported; leave it out.")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice={one_line(str(choice), 60)} is not supported; use auto or none.")
    messages = [_message(message) for message in _messages(body)]
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's; end with a message of the user or a tool result.")
    calls = [call for message in messages for call in message.get("tool_calls", ()) if call["id"]]
    names = {call["id"]: call["function"]["name"] for call in calls}
    for message in messages:  # templates write the name of a tool with its result
        if message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    tools = _list(body.get("tools") or [], "tools")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ChatRequest(
        tuple(messages),
        tuple(_tool(tool) for tool in tools) if choice == "auto" else (),
        _count(body.get(limit), limit),
        _count(body.get("n"), "n") or 1,
        tuple(_strings(body.get("stop"), "stop")),
        bool(body.get("stream")),
        bool(_object(body.get("stream_options") or {}, "stream_options").get("include_usage")),
    )


def _message(message: Any) -> dict[str, Any]:
    """Parse one of OpenAI's messages."""
    message = _object(message, "a message")
    role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"a message has the role {one_line(str(role), 40)!r}; use system, user, assistant or tool.")
    parsed: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    calls = []
    for call in _list(message.get("tool_calls") or [], "tool_calls"):
        function = _object(_object(call, "a tool call").get("function"), "the function of a tool call")
        calls.append(_call(call.get("id"), function.get("name"), function.get("arguments")))
    if calls:
        parsed["tool_calls"] = calls
    if message.get("tool_call_id") is not None:
        parsed["tool_call_id"] = str(message["tool_call_id"])
    return parsed


def anthropic_request(body: Any) -> ChatRequest:
    """Parse the body of ``/v1/messages``; BadRequest if it is malformed or cannot be answered.

    Thinking blocks are dropped, and options that the run sets, such as ``temperature``, are ignored.

    >>> turns = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "9"}]}]
    >>> anthropic_request({"system": "Add.", "messages": turns, "max_tokens": 5}).messages[1]
    {'role': 'tool', 'content': '9', 'tool_call_id': 'a'}
    """
    body = _object(body, "the request")
    choice = _object(body.get("tool_choice") or {"type": "auto"}, "tool_choice").get("type")
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice of type {one_line(str(choice), 60)} is not supported; use auto or none.")
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in _messages(body):
        messages += _openai_messages(_object(message, "a message"))
    names, left_out = {"input_schema": "parameters"}, ("type", "cache_control")
    tools = [_object(tool, "a tool") for tool in _list(body.get("tools") or [], "tools")] if choice == "auto" else []
    functions = [{names.get(name, name): tool[name] for name in tool if name not in left_out} for tool in tools]
    read = {name: body.get(name) for name in ("max_tokens", "stream")}
    stop = _strings(body.get("stop_sequences"), "stop_sequences")
    made = {"messages": messages, "tools": [{"function": function} for function in functions], "stop": stop}
    return openai_request(read | made)


def _openai_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one of Anthropic's messages as OpenAI's: tool results first, then the text and the calls."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"a message has the role {one_line(str(role), 40)!r}; use user or assistant.")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [_object(block, "a content block") for block in _list(content, "content")]
    of_kind = {kind: [block for block in blocks if block.get("type") == kind] for kind in ("tool_result", "tool_use")}
    for block in of_kind["tool_result"]:
        yield {"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")}
    thoughts = (*of_kind, "thinking", "redacted_thinking")
    text = _text([block for block in blocks if block.get("type") not in thoughts])
    calls = [_call(block.get("id"), block.get("name"), block.get("input")) for block in of_kind["tool_use"]]
    if role == "assistant":
        yield {"role": role, "content": text, "tool_calls": calls}
    elif text or not of_kind["tool_result"]:
        yield {"role": role, "content": text}


def openai_reply(replies: Sequence[Reply], num_prompt_tokens: int) -> dict[str, Any]:
    """Return the body of the response to ``/v1/chat/completions``, with one choice per reply.

    A message's ``content`` is None if the reply has only calls.
    """
    choices = []
    for index, reply in enumerate(replies):
        message = reply.message
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        message["content"] = reply.content or (None if reply.calls else "")
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reply.finish_reason})
    num, num_tokens = num_prompt_tokens, sum(reply.num_tokens for reply in replies)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": num, "completion_tokens": num_tokens, "total_tokens": num + num_tokens},
    }


def openai_events(request: ChatRequest, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ``body`` of :func:`openai_reply` as server-sent events; the whole message of a choice is one chunk."""
    head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in body["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        for piece, reason in ((delta, None), ({}, choice["finish_reason"])):
            made = {"index": choice["index"], "delta": piece, "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps({**head, 'choices': [made]})}\n\n"
    if request.with_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': body['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def anthropic_reply(replies: Sequence[Reply], num_prompt_tokens: int) -> dict[str, Any]:
    """Return the body of the response to ``/v1/messages``, which has one reply."""
    (reply,) = replies
    content: list[dict[str, Any]] = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in reply.calls
    ]
    if reply.content or not content:
        content.insert(0, {"type": "text", "text": reply.content})
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": reasons[reply.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def anthropic_events(request: ChatRequest, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the response ``body`` of :func:`anthropic_reply` as server-sent events; a content block is one delta."""
    usage = body["usage"]

    def event(kind: str, **values: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"

    begun = {**body, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(body["content"]):
        empty: dict[str, Any] = {"text": ""}
        delta: dict[str, Any] = {"type": "text_delta", "text": block.get("text")}
        if block["type"] == "tool_use":
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=block | empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield event("message_stop")


def _object(value: Any, what: str, kind: type = dict) -> Any:
    if not isinstance(value, kind):
        is_a = "missing or null" if value is None else f"a {type(value).__name__}"
        raise BadRequest(f"{what} is {is_a}, not a JSON {'object' if kind is dict else 'array'}.")
    return value


def _list(value: Any, what: str) -> list[Any]:
    return _object(value, what, list)


def _messages(body: Mapping[str, Any]) -> list[Any]:
    if not (messages := _list(body.get("messages"), "messages")):
        raise BadRequest("messages has no entry; send at least one message.")
    return messages


def _strings(value: Any, name: str) -> list[str]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise BadRequest(f"{name} must be a string or an array of strings.")
    return strings


def _count(value: Any, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadRequest(f"{name}={one_line(str(value), 40)} must be a whole number of at least 1.")
    return value


def _text(content: Any) -> str:
    """Return the text of a message's content (string, None or list of text parts); unpaired surrogates become ``?``."""
    if content is None or isinstance(content, str):
        return (content or "").encode("utf-8", "replace").decode()
    texts = []
    for part in _list(content, "content"):
        kind, text = _object(part, "a part of content").get("type"), part.get("text")
        if kind is None:
            raise BadRequest('a part of content has no type; send {"type": "text", "text": ..}.')
        if kind != "text":
            raise BadRequest(f"content of the type {one_line(str(kind), 40)!r} is not supported; send text.")
        if not isinstance(text, str):
            raise BadRequest(f"the text of a part of content is a {type(text).__name__}, not a string.")
        texts.append(text)
    return "".join(texts).encode("utf-8", "replace").decode()


def _arguments(arguments: Any) -> Any:
    """Return a call's arguments as a dict, as chat templates need them; unchanged if they are not a JSON object."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments or {}


def _call(given: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise BadRequest("a tool call has no name, or one that is not a string.")
    return {"type": "function", "id": str(given or ""), "function": {"name": name, "arguments": _arguments(arguments)}}


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool's schema as chat templates need it: with a description and parameters."""
    function = _object(_object(tool, "a tool").get("function"), "the function of a tool")
    name, parameters = function.get("name"), function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not name:
        raise BadRequest("a tool has no name, or one that is not a string.")
    parameters = _object(parameters, f"the schema of {name}")
    described = {} if "description" in function else {"description": ""}
    return {"type": "function", "function": {**function, **described, "parameters": parameters}}


#: By path: the parser of a request's body, and what makes the body of a response, and its events, from replies.
APIS = {
    "/v1/chat/completions": (openai_request, openai_reply, openai_events),
    "/v1/messages": (anthropic_request, anthropic_reply, anthropic_events),
}
