"""Adapters that give the policy the tools of an MCP server, or the actions of an OpenEnv server as tools.

Every sample has a separate session. Environment workers load an adapter by name (:class:`~.servers.ToolServer`). The
OpenEnv protocol is that of version 0.10; its package is not needed: ``GET /schema`` describes the actions, and a
connection to the WebSocket ``/ws`` is a session, with one response to each message::

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
from sota_grpo.rl.tool_schemas import keyword
from sota_grpo.tasks.servers import KEY, content_text, headers_of
from sota_grpo.text import sentence
from sota_grpo.workers.instances import InstanceLost

# ToolServer.require reports a missing package
with suppress(ImportError):
    import httpx2
    import mcp
    from anyio.from_thread import start_blocking_portal
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND
with suppress(ImportError):
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect


def _lost(what: str, cause: BaseException | str) -> InstanceLost:
    reason = cause if isinstance(cause, str) else sentence(cause)
    return InstanceLost(f"{what} ({reason.rstrip('.')})")


class ToolFailed(Exception):
    """A tool call failed; the message is the server's."""


class McpTools:
    """A session with an MCP server, which the constructor opens; InstanceLost if it cannot be opened.

    The client sends the ``initialize`` of protocols before 2026-07-28, so that an HTTP server can keep state for the
    session. A server that rejects ``initialize`` is used without sessions.

    Args:
        command: command that starts a server on stdin and stdout, in the run's directory and with the run's stderr. Of
            the environment variables the server only gets ``HOME``, ``PATH`` and similar ones.
        url: in place of a command, URL of a running server (streamable HTTP). This server gets the headers of
            :func:`~.servers.headers_of`, a server that it redirects to does not.
    """

    def __init__(self, command: Sequence[str] = (), url: str = "") -> None:
        self._command, self._url = command, url
        self._refused = 0  # HTTP status 401 or 403 of a server that requires a key
        with ExitStack() as opened:
            # anyio requires that the same task enters and leaves the session
            self._portal = opened.enter_context(start_blocking_portal())
            try:
                self._client = self._connected(opened, mode="legacy")
            except Exception as error:
                where, cause = " ".join(command) if command else url, sentence(_cause(error))
                if self._refused:
                    cause = f"it rejects the request with HTTP status {self._refused}: set {KEY} to a valid key"
                raise _lost(f"no session with the MCP server {where}", cause) from error
            self._opened = opened.pop_all()

    def _connected(self, opened: ExitStack, **options: Any) -> Any:
        server: Any = self._over_http()
        if not self._url:
            server = mcp.StdioServerParameters(command=self._command[0], args=list(self._command[1:]))
        try:
            return opened.enter_context(self._portal.wrap_async_context_manager(mcp.Client(server, **options)))
        except Exception as error:
            refused = _cause(error)
            if not options or not isinstance(refused, mcp.MCPError) or refused.code == CONNECTION_CLOSED:
                raise
        return self._connected(opened)  # without the ``initialize`` that the server rejects

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        """Yield the HTTP transport; redirects stay on the server, and the timeouts are those of MCP's client."""

        async def look(response: Any) -> None:
            if response.status_code in (401, 403):
                self._refused = response.status_code

        headers, timeout = headers_of(self._url), httpx2.Timeout(30.0, read=300.0)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [look]}) as client,
            streamable_http_client(self._url, http_client=client) as streams,
        ):
            yield streams

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools that the server lists; each read asks the server again."""
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
        """Call a tool; return the text of its result, or its structured content if it has no content blocks.

        ToolFailed if the tool fails or the server rejects the call, InstanceLost if the connection or server fails.
        """
        try:
            result = self._portal.call(self._client.call_tool, name, dict(arguments))
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, mcp.MCPError) and cause.code in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND):
                raise ToolFailed(joined(str(cause))) from error
            raise _lost("the MCP server failed in a tool call", cause) from error
        text = content_text([block.model_dump() for block in result.content])
        if result.is_error:
            raise ToolFailed(joined(text))
        return text if result.content or result.structured_content is None else result.structured_content

    def close(self) -> None:
        """Close the session, and stop the server if the constructor started one; idempotent, never raises."""
        with suppress(Exception):  # the server may have exited
            self._opened.close()


def _cause(error: BaseException) -> BaseException:
    """Return the first exception in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_MOST_BYTES = 1 << 24  # of one response
_ROOM_WITHIN_S = 5.0  # how long a new session waits for the server's capacity
_LOOK_EVERY_S = 0.1
_LEAVE_S = 1.0  # timeout of closing a session
_MCP_ACTIONS = ("call_tool", "list_tools")  # values of an action's field "type" if the server lists tools


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool in the form that chat templates expect."""
    function = {"name": name, "description": description or "", "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def joined(text: str) -> str:
    """Return ``text`` on one line with single spaces, because the policy gets only the first line of an exception."""
    return " ".join(text.split())


class ActionFailed(Exception):
    """The server rejected an action or failed to execute it; the message is the server's."""


class EpisodeOver(Exception):
    """An action was called after the end of the episode."""


class OpenEnv:
    """A client of an OpenEnv server; :meth:`reset` opens a session, and so does ``schemas`` if the server has tools.

    ``url`` has no ``/ws``; headers are sent as in :class:`McpTools`. The methods raise InstanceLost if the server does
    not answer, has no room for a session within 5 s, or does not follow the protocol.
    """

    def __init__(self, url: str) -> None:
        self.seed = random.getrandbits(31)  # of the next reset; equal for all samples of a group
        self._url = url.rstrip("/")
        self._connection: Any = None
        self._opened = ExitStack()  # closes the connection
        self._reward, self._is_over = 0.0, False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the server lists (each read replaces the session), or one per action type."""
        if not self._lists_tools:
            return [schema for schema, _ in self._actions.values()]
        listed = self._first({"type": "step", "data": {"type": "list_tools"}})["observation"].get("tools", [])
        try:
            return [function_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        except (TypeError, KeyError, ValueError) as error:
            raise self._unlike() from error

    def reset(self, **row: Any) -> str | None:
        """Start an episode with ``seed`` and ``row`` in a new session; return the observation, None if empty.

        A column ``seed`` replaces ``seed``, unless it is None, with which the server would draw one for each sample.
        """
        seed = self.seed if row.get("seed") is None else row["seed"]
        return self._observed(self._first({"type": "reset", "data": {**row, "seed": seed}}))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Execute the action, or call the tool, ``name`` after :meth:`reset`; return its observation, None if empty.

        EpisodeOver after the end, LookupError for an unknown action, ActionFailed if the server rejects it or it fails,
        InstanceLost if the connection fails.
        """
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
        """Return the last reward that the environment sent, as OpenEnv's rollouts do; 0 if it sent none."""
        return self._reward

    def close(self) -> None:
        """Close the session, if there is one; idempotent."""
        if self._connection is not None:
            with suppress(ConnectionClosed, OSError):
                self._connection.send(json.dumps({"type": "close"}))
        self._opened.close()
        self._connection = None

    @cached_property
    def _action(self) -> Mapping[str, Any]:
        server = HttpClient(self._url, headers=headers_of(self._url), option="env.environment", max_bytes=_MOST_BYTES)
        try:
            described = server.get("/schema", timeout_s=30.0)
        except ServerSilent as error:
            raise _lost(f"no OpenEnv server answers at {self._url}", error) from error
        except ServerError as error:
            if error.status in (401, 403):
                status = f"rejects the request with HTTP status {error.status}"
                raise InstanceLost(f"the server at {self._url} {status}: set {KEY}") from error
            raise _lost(f"the server at {self._url}/schema is not an OpenEnv server", error) from error
        finally:
            server.close()
        action = described.get("action") if isinstance(described, dict) else None
        if not isinstance(action, dict):
            raise InstanceLost(f"the server at {self._url}/schema is not an OpenEnv server")
        return action

    @cached_property
    def _lists_tools(self) -> bool:
        fields = self._action.get("properties")
        if not isinstance(fields, dict):
            return False
        kind = fields.get("type")
        is_mcp = isinstance(kind, dict) and kind.get("const") in _MCP_ACTIONS
        return is_mcp or (self._action.get("title") == "Action" and set(fields) <= {"metadata"})  # an untyped action

    @cached_property
    def _actions(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        try:
            return {schema["function"]["name"]: (schema, fields) for schema, fields in action_types(self._action)}
        except (AttributeError, TypeError) as error:  # such as a title that is a number
            raise self._unlike() from error

    def _first(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open a new session, waiting for the server's capacity; return the response to ``message``."""
        until, options = time.monotonic() + _ROOM_WITHIN_S, dict[str, Any]()
        if headers := headers_of(self._url):  # then fix the address, so that a redirect to another one fails
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
                        ping_timeout=None,  # calls have a separate time limit
                        close_timeout=_LEAVE_S,
                        **options,
                    )
                )
            except Exception as error:  # network, TLS or HTTP
                raise _lost(f"no OpenEnv server answers at {self._url}", error) from error
            try:
                return self._request(message)
            except ActionFailed as error:
                raise _lost("the OpenEnv server cannot start an episode", str(error)) from error
            except _NoRoom as error:
                if time.monotonic() > until:
                    raise InstanceLost(
                        f"the OpenEnv server accepts no further session ({str(error).rstrip('.')}); raise its "
                        "max_concurrent_envs, or lower env.num_envs"
                    ) from error
                time.sleep(_LOOK_EVERY_S)

    def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            with suppress(ConnectionClosed):  # its last messages can still be received
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
            raise _lost("the connection to the OpenEnv server failed", error) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._unlike() from error
        return data

    def _observed(self, data: Mapping[str, Any]) -> str | None:
        """Return an observation as text: a tool's result, its only text field, or its fields as JSON; None if empty."""
        seen = {name: value for name, value in data["observation"].items() if name != "metadata"}
        if not seen:
            return None
        if not (self._lists_tools and "tool_name" in seen):
            first, *others = seen.values()
            return first if isinstance(first, str) and not others else json.dumps(seen, ensure_ascii=False)
        result, error = seen.get("result"), seen.get("error")
        if isinstance(error, Mapping):
            raise ActionFailed(joined(str(error.get("message"))))
        blocks = result.get("content") if isinstance(result, Mapping) else None
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        if isinstance(result, Mapping) and result.get("is_error"):
            raise ActionFailed(joined(content_text(blocks)))
        return content_text(blocks)

    def _unlike(self) -> InstanceLost:
        return InstanceLost(f"the response of {self._url} does not follow the OpenEnv protocol")


class _NoRoom(Exception):
    """The server's maximum number of sessions is reached."""


def _error(data: Mapping[str, Any]) -> Exception:
    message, code = str(data.get("message")), data.get("code")
    if code == "CAPACITY_REACHED":
        return _NoRoom(message)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return InstanceLost(f"the OpenEnv server reports a session error ({message})")
    if isinstance(details := data.get("errors"), list):
        message += "".join(f"; {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
    return ActionFailed(joined(message))


def action_types(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (tool schema, constant fields) of each type of action: each branch of a union, or the whole JSON schema.

    Fields with ``const`` are returned as constant fields, not in the tool schema; ``metadata`` is dropped.

    >>> up = {"title": "GoUpAction", "properties": {"kind": {"const": "up"}, "steps": {"type": "integer"}}}
    >>> schema = {"oneOf": [{"$ref": "#/$defs/Up"}], "$defs": {"Up": {**up, "required": ["kind", "steps"]}}}
    >>> ((tool, fields),) = action_types(schema)
    >>> tool["function"]["name"], tool["function"]["parameters"]["required"], fields
    ('go_up', ['steps'], {'kind': 'up'})
    """
    definitions = keyword(schema, "$defs", {})
    for branch in keyword(schema, "oneOf", []) or keyword(schema, "anyOf", []) or [schema]:
        if isinstance(named := branch.get("$ref"), str):
            branch = definitions.get(named.rpartition("/")[2], {})
        properties = {name: one for name, one in keyword(branch, "properties", {}).items() if name != "metadata"}
        mappings = {name: one for name, one in properties.items() if isinstance(one, Mapping)}
        fields = {name: one["const"] for name, one in mappings.items() if one.get("const") is not None}
        chosen = {name: one for name, one in properties.items() if name not in fields}
        required = [name for name in keyword(branch, "required", []) if name in chosen]
        parameters = {"type": "object", "properties": chosen, "required": required}
        if "$ref" in json.dumps(chosen):
            parameters["$defs"] = definitions
        name, purpose = tool_name(branch.get("title") or ""), branch.get("description") or "Take this action."
        yield function_schema(name, purpose, parameters), fields


def tool_name(title: str) -> str:
    """Return the name of the tool for an action class with this title; ``step`` if no word is left of the title.

    >>> tool_name("GoUpAction"), tool_name("Action"), tool_name("TextArena[int]Action")
    ('go_up', 'step', 'text_arena_int')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title.removesuffix("Action"))
    return re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_").lower() or "step"
