"""An MCP server of notes: ``mcp_server.py`` over stdin and stdout, ``mcp_server.py PORT [KEY]`` over HTTP on loopback.

With a key it answers only those who send it, and the header ``X-Team: blue``.
"""

import os
import sys
from collections import defaultdict


def serve(arguments: list[str]) -> None:
    from mcp.server.mcpserver import Context, Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server, notes = MCPServer("notes", log_level="ERROR"), defaultdict(list)

    def add_note(text: str, ctx: Context, times: int = 1) -> list[str]:
        """Add a note, and read all."""
        session = (ctx.headers or {}).get("mcp-session-id")
        notes[session] += [text] * times
        return notes[session]

    def fail(text: str) -> str:
        """Fail."""
        raise ToolError(text)

    def draw() -> Image:
        """Draw."""
        return Image(data=b"abc", format="png")

    def look() -> str:
        """Look around."""
        return " ".join([str(os.getpid()), *sorted(os.environ)])

    def leave() -> str:
        """Leave."""
        os._exit(3)

    for tool in (add_note, fail, draw, look, leave):
        server.add_tool(tool, structured_output=False)
    if arguments[1:]:
        import uvicorn

        app = server.streamable_http_app()

        async def guarded(scope: dict, receive: object, send: object) -> None:
            sent = dict(scope.get("headers", ()))
            allowed = sent.get(b"authorization") == f"Bearer {arguments[1]}".encode() and sent.get(b"x-team") == b"blue"
            if scope["type"] == "lifespan" or allowed:
                await app(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        uvicorn.run(guarded, port=int(arguments[0]), log_level="error")
    elif arguments:
        server.run("streamable-http", port=int(arguments[0]))
    else:
        server.run()


if __name__ == "__main__":
    serve(sys.argv[1:])
