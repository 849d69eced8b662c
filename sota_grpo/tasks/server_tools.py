"""Adapters to tool servers: an MCP server's tools, or an OpenEnv server's actions, are the policy's tools.

Every sample has a session of its own. An adapter is loaded by name (:class:`~.servers.ToolServer`) in an environment
worker. The protocol of OpenEnv is that of version 0.10, whose package is not needed here: ``GET /schema`` describes the
actions, and a connection to the WebSocket ``/ws`` is a session, with one answer to each message::

    > {"type": "reset", "data": {"seed": 3, "ground_truth": "42"}}
    < {"type": "observation", "data": {"observation": {"text": "0 to 99?"}, "reward": null, "done": false}}
    > {"type": "step", "data": {"number": 42}}
    < {"type": "observation", "data": {"observation": {"text": "right"}, "reward": 1.0, "done": true}}
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.tasks.servers import KEY, content_text, headers_of
from sota_grpo.text import sentence
from sota_grpo.workers.instances import InstanceLost

# ToolServer.require says what is missing
with suppress(ImportError):
    import httpx2
    import mcp
    from anyio.from_thread import start_blocking_portal
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND
with suppress(ImportError):
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect


class ToolFailed(Exception):
    """The server answered a call with an error, which is the message."""


class McpTools:
    """A session with an MCP server, open from the beginning.

    It begins with the handshake of the protocol before 2026-07-28, under which a server over HTTP knows the session of
    a call and can keep a state for it; a server that refuses it is used without sessions.

    Args:
        command: starts a server that uses stdin and stdout, in the directory and with the stderr of the run, and with
            ``HOME``, ``PATH`` and the like as its only environment variables.
        url: of a running server, over streamable HTTP. The key and the headers of the environment
            (:func:`~.servers.headers_of`) are sent to it, and not to another server after a redirect.

    Raises:
        InstanceLost: there is no such server, or it cannot be started.
    """

    def __init__(self, command: Sequence[str] = (), url: str = "") -> None:
        self._command, self._url = command, url
        self._refused = 0  # the HTTP status of a server that requires a key
        with ExitStack() as opened:
            # one task of one event loop enters the session and leaves it, as anyio asks
            self._portal = opened.enter_context(start_blocking_portal())
            try:
                self._client = self._connected(opened)
            except Exception as error:
                where, cause = " ".join(command) if command else url, sentence(_cause(error))
                if self._refused:
                    cause = f"it refuses us, HTTP status {self._refused}: set {KEY}"
                raise InstanceLost(f"no MCP server answers at {where} ({cause})") from error
            self._opened = opened.pop_all()

    def _connected(self, opened: ExitStack) -> Any:
        try:
            return self._entered(opened, mode="legacy")
        except Exception as error:
            refused = _cause(error)
            if not isinstance(refused, mcp.MCPError) or refused.code == CONNECTION_CLOSED:
                raise
        return self._entered(opened)

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        """Yield the transport, whose redirects stay on the server; its timeouts are those of MCP's own client."""

        async def look(response: Any) -> None:
            if response.status_code in (401, 403):
                self._refused = response.status_code

        headers, timeout = headers_of(self._url), httpx2.Timeout(30.0, read=300.0)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [look]}) as client,
            streamable_http_client(self._url, http_client=client) as streams,
        ):
            yield streams

    def _entered(self, opened: ExitStack, **options: Any) -> Any:
        server: Any = self._over_http()
        if not self._url:
            server = mcp.StdioServerParameters(command=self._command[0], args=list(self._command[1:]))
        return opened.enter_context(self._portal.wrap_async_context_manager(mcp.Client(server, **options)))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the server lists."""
        tools: list[Any] = []
        cursor = None
        while True:
            page = self._portal.call(partial(self._client.list_tools, cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return [function_schema(tool.name, tool.description, tool.input_schema) for tool in tools]

    def reset(self, **row: Any) -> None:
        """No-op: the session is new."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the text of a tool's result, or its data where it has no text."""
        try:
            result = self._portal.call(self._client.call_tool, name, dict(arguments))
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, mcp.MCPError) and cause.code in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND):
                raise ToolFailed(joined(str(cause))) from error
            raise InstanceLost(f"the MCP server is gone ({sentence(cause)})") from error
        text = content_text([block.model_dump() for block in result.content])
        if result.is_error:
            raise ToolFailed(joined(text))
        return text if result.content or result.structured_content is None else result.structured_content

    def close(self) -> None:
        """End the session, and the server that was started for it."""
        with suppress(Exception):  # the server may be gone
            self._opened.close()


def _cause(error: BaseException) -> BaseException:
    """Return the first error of tasks that ended together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_MOST_BYTES = 1 << 24  # of one answer
_ROOM_WITHIN_S = 5.0  # longest wait for a session that ends to make room for one that begins
_LOOK_EVERY_S = 0.1
_LEAVE_S = 1.0  # longest for the goodbye
_MCP_ACTIONS = ("call_tool", "list_tools")  # what an action's field "type" says where the server lists tools


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool in the form of chat templates."""
    function = {"name": name, "description": description or "", "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def joined(text: str) -> str:
    """Return the lines as one: only the first line of an exception reaches the policy."""
    return " ".join(text.split())


class ActionFailed(Exception):
    """The server refused an action, or failed at it, with this message."""


class EpisodeOver(Exception):
    """An action after the last one."""


class OpenEnv:
    """A session with an OpenEnv server, which begins at :meth:`reset`.

    Args:
        url: of the server, without ``/ws``; key and headers as in :class:`McpTools`.
    """

    def __init__(self, url: str) -> None:
        self.seed = random.getrandbits(31)  # of the next reset; the same for all samples of a group
        self._url = url.rstrip("/")
        self._connection: Any = None
        self._opened = ExitStack()  # of the connection
        self._reward, self._is_over = 0.0, False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools: one for each type of action, or those that the server lists."""
        if not self._lists_tools:
            return [schema for schema, _ in self._actions.values()]
        listed = self._first({"type": "step", "data": {"type": "list_tools"}})["observation"].get("tools", [])
        try:
            return [function_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        except (TypeError, KeyError, ValueError) as error:
            raise self._unlike() from error

    def reset(self, **row: Any) -> str | None:
        """Begin an episode with the columns of ``row`` that the environment's ``reset`` takes; one may be ``seed``."""
        return self._observed(self._first({"type": "reset", "data": {"seed": self.seed, **row}}))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return the observation of an action."""
        if self._is_over:
            raise EpisodeOver("the episode is over")
        if self._lists_tools:
            action: dict[str, Any] = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        elif name in self._actions:
            action = {**arguments, **self._actions[name][1]}
        else:
            raise LookupError(f"there is no tool {name!r}; the tools are {', '.join(self._actions)}")
        return self._observed(self._request({"type": "step", "data": action}))

    def get_reward(self) -> float:
        """Return the last reward of the environment, as OpenEnv's own rollouts count it; 0 where there is none."""
        return self._reward

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            with suppress(ConnectionClosed, OSError):
                self._connection.send(json.dumps({"type": "close"}))
        self._opened.close()
        self._connection = None

    @cached_property
    def _action(self) -> Mapping[str, Any]:
        """Return the JSON schema of the actions."""
        server = HttpClient(self._url, headers=headers_of(self._url), option="env.environment", max_bytes=_MOST_BYTES)
        try:
            described = server.get("/schema", timeout_s=30.0)
        except ServerError as error:
            reason = f"what answers at {self._url}/schema is no OpenEnv server ({sentence(error)})"
            if isinstance(error, ServerSilent):
                reason = f"no OpenEnv server answers at {self._url} ({sentence(error)})"
            elif error.status in (401, 403):
                reason = f"the server at {self._url} refuses us, HTTP status {error.status}: set {KEY}"
            raise InstanceLost(reason) from error
        finally:
            server.close()
        action = described.get("action") if isinstance(described, dict) else None
        if not isinstance(action, dict):
            raise InstanceLost(f"what answers at {self._url}/schema is no OpenEnv server")
        return action

    @cached_property
    def _lists_tools(self) -> bool:
        fields = self._action.get("properties")
        if not isinstance(fields, dict):
            return False
        kind = fields.get("type")
        is_mcp = isinstance(kind, dict) and kind.get("const") in _MCP_ACTIONS
        return is_mcp or (self._action.get("title") == "Action" and set(fields) <= {"metadata"})  # of no type at all

    @cached_property
    def _actions(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        return {schema["function"]["name"]: (schema, fields) for schema, fields in action_types(self._action)}

    def _first(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to the first message of a new session, once the server has room for one."""
        until, options = time.monotonic() + _ROOM_WITHIN_S, dict[str, Any]()
        if headers := headers_of(self._url):  # then the address is fixed: a redirect to another one is refused
            address = urlsplit(self._url)
            port = address.port or {"http": 80, "https": 443}[address.scheme]
            options = {"additional_headers": headers, "address": (address.hostname, port)}
        while True:
            self.close()
            try:
                self._connection = self._opened.enter_context(
                    connect(
                        f"ws{self._url.removeprefix('http')}/ws",
                        proxy=None,
                        max_size=_MOST_BYTES,
                        ping_timeout=None,  # a call has a deadline of its own
                        close_timeout=_LEAVE_S,
                        **options,
                    )
                )
            except Exception as error:  # of the network, of TLS, of HTTP
                raise InstanceLost(f"no OpenEnv server answers at {self._url} ({sentence(error)})") from error
            try:
                return self._request(message)
            except ActionFailed as error:
                raise InstanceLost(f"the OpenEnv server cannot begin ({error})") from error
            except _NoRoom as error:
                if time.monotonic() > until:
                    raise InstanceLost(
                        f"the OpenEnv server has no room for another session ({error}); raise its max_concurrent_envs, "
                        "or lower env.num_envs"
                    ) from error
                time.sleep(_LOOK_EVERY_S)

    def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            with suppress(ConnectionClosed):  # its last messages can still be read
                self._connection.send(json.dumps(message))
            answer = json.loads(self._connection.recv())
            kind, data = answer["type"], answer["data"]
            if kind == "error" and isinstance(data, dict):
                raise _error(data)
            if kind != "observation" or not isinstance(data["observation"], dict):
                raise ValueError
            if (reward := data.get("reward")) is not None:
                self._reward = float(reward)
            self._is_over = bool(data.get("done"))
        except (ConnectionClosed, OSError) as error:
            raise InstanceLost(f"the OpenEnv server is gone ({sentence(error)})") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._unlike() from error
        return data

    def _observed(self, data: Mapping[str, Any]) -> str | None:
        """Return an observation as text: its one text, else its fields as JSON; of a tool's result the content."""
        seen = {name: value for name, value in data["observation"].items() if name != "metadata"}
        if self._lists_tools and "tool_name" in seen:
            return _tool_answer(seen)
        if not seen:
            return None
        (first, *others) = seen.values()
        return first if isinstance(first, str) and not others else json.dumps(seen, ensure_ascii=False)

    def _unlike(self) -> InstanceLost:
        return InstanceLost(f"{self._url} answered what no OpenEnv server answers")


class _NoRoom(Exception):
    """The server has as many sessions as it may."""


def _error(data: Mapping[str, Any]) -> Exception:
    """Return the exception for an error of the server."""
    message, code = str(data.get("message")), data.get("code")
    if code == "CAPACITY_REACHED":
        return _NoRoom(message)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return InstanceLost(f"the OpenEnv server has no session ({message})")
    if isinstance(details := data.get("errors"), list):
        message += "".join(f"; {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
    return ActionFailed(joined(message))


def _tool_answer(seen: Mapping[str, Any]) -> str:
    """Return the result of a tool that the server lists as text."""
    result, error = seen.get("result"), seen.get("error")
    if isinstance(error, Mapping):
        raise ActionFailed(joined(str(error.get("message"))))
    blocks = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if isinstance(result, Mapping) and result.get("is_error"):
        raise ActionFailed(joined(content_text(blocks)))
    return content_text(blocks)


def action_types(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the types of action of a JSON schema: itself, or each branch of its union.

    Each is a tool's schema without the fields of one value, and these fields.

    >>> up = {"title": "GoUpAction", "properties": {"kind": {"const": "up"}, "steps": {"type": "integer"}}}
    >>> schema = {"oneOf": [{"$ref": "#/$defs/Up"}], "$defs": {"Up": {**up, "required": ["kind", "steps"]}}}
    >>> ((tool, fields),) = action_types(schema)
    >>> tool["function"]["name"], tool["function"]["parameters"]["required"], fields
    ('go_up', ['steps'], {'kind': 'up'})
    """
    definitions = schema.get("$defs", {})
    for branch in schema.get("oneOf") or schema.get("anyOf") or [schema]:
        if isinstance(named := branch.get("$ref"), str):
            branch = definitions.get(named.rpartition("/")[2], {})
        properties = {name: one for name, one in branch.get("properties", {}).items() if name != "metadata"}
        fields = {name: one["const"] for name, one in properties.items() if "const" in one}
        chosen = {name: one for name, one in properties.items() if name not in fields}
        required = [name for name in branch.get("required", []) if name in chosen]
        parameters = {"type": "object", "properties": chosen, "required": required}
        if "$ref" in json.dumps(chosen):
            parameters["$defs"] = definitions
        name, purpose = tool_name(branch.get("title", "")), branch.get("description") or "Take this action."
        yield function_schema(name, purpose, parameters), fields


def tool_name(title: str) -> str:
    """Return the name of a tool for a class of actions.

    >>> tool_name("GoUpAction"), tool_name("Action"), tool_name("TextArena[int]Action")
    ('go_up', 'step', 'text_arena_int')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title.removesuffix("Action"))
    return re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_").lower() or "step"
