"""An MCP server as an environment: its tools are the policy's, and every sample has a session of its own.

Loaded by name (:class:`~.servers.ToolServer`), in an environment worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from sota_grpo.tasks.servers import KEY, content_text, function_schema, headers_of, joined
from sota_grpo.text import sentence
from sota_grpo.workers.instances import InstanceLost

with suppress(ImportError):  # ToolServer.require says so; here, once, and not for every sample
    import httpx2
    import mcp
    from anyio.from_thread import start_blocking_portal
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND


class ToolFailed(Exception):
    """The server answered a call with an error; the message is what it said."""


class McpTools:
    """A session with an MCP server, open from the beginning.

    It begins with the handshake of the protocol before 2026-07-28, under which a server over HTTP knows the session of
    a call and can keep a state for it; a server that refuses it is spoken to without sessions.

    Args:
        command: starts a server that is spoken to over stdin and stdout. It has the directory and stderr of the run,
            and of its environment variables ``HOME``, ``PATH`` and the like only.
        url: of a server that runs already, over streamable HTTP. It is sent the key and the headers of the environment
            (:func:`~.servers.headers_of`), which a redirect to another server does not take along.

    Raises:
        InstanceLost: there is no such server, or it cannot be started.
    """

    def __init__(self, command: Sequence[str] = (), url: str = "") -> None:
        self._command, self._url = command, url
        self._refused = 0  # the HTTP status of a server that wants to know who asks
        with ExitStack() as opened:
            # one task of one event loop enters the session and leaves it, as anyio asks
            self._portal = opened.enter_context(start_blocking_portal())
            try:
                self._client = self._connected(opened)
            except Exception as error:
                where, said = " ".join(command) if command else url, sentence(_cause(error))
                if self._refused:
                    said = f"it refuses us, HTTP status {self._refused}: set {KEY}"
                raise InstanceLost(f"no MCP server answers at {where} ({said})") from error
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
        """The transport, whose redirects stay on the server; its times are those of MCP's own client."""

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
        """Of the tools that the server lists, as chat templates take them."""
        tools: list[Any] = []
        cursor = None
        while True:
            page = self._portal.call(partial(self._client.list_tools, cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return [function_schema(tool.name, tool.description, tool.input_schema) for tool in tools]

    def reset(self, **row: Any) -> None:
        """Nothing is to be reset: the session is new."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The text of what a tool answers; what it answers as data where it has no text."""
        try:
            result = self._portal.call(self._client.call_tool, name, dict(arguments))
        except Exception as error:
            said = _cause(error)
            if isinstance(said, mcp.MCPError) and said.code in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND):
                raise ToolFailed(joined(str(said))) from error
            raise InstanceLost(f"the MCP server is gone ({sentence(said)})") from error
        text = content_text([block.model_dump() for block in result.content])
        if result.is_error:
            raise ToolFailed(joined(text))
        return text if result.content or result.structured_content is None else result.structured_content

    def close(self) -> None:
        """End the session, and the server where it was started for it."""
        with suppress(Exception):  # of a server that is gone
            self._opened.close()


def _cause(error: BaseException) -> BaseException:
    """What went wrong first among tasks that ended together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
