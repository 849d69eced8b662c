"""Tool servers in ``env.environment``: parsing, validation and credentials.

======================== ===========================================================================================
``mcp:COMMAND``          an MCP server over stdin and stdout; the command is started once per sample
``mcp+http://HOST/mcp``  a running MCP server (streamable HTTP; also ``mcp+https://``)
``openenv+http://HOST``  a running OpenEnv server (also ``openenv+https://``)
======================== ===========================================================================================

Credentials come from environment variables, never from a config: ``SOTA_GRPO_TOOLS_KEY`` is sent as ``Authorization:
Bearer``; ``SOTA_GRPO_TOOLS_HEADERS`` has further headers, one ``NAME: VALUE`` per line. Does not import the packages
of the servers, because configs are validated before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sota_grpo.errors import UserError
from sota_grpo.files import file_reference
from sota_grpo.text import one_line
from sota_grpo.workers.instances import InstanceSpec

#: Accepted forms, for error messages.
FORMS = "mcp:COMMAND, mcp+http://HOST:PORT/mcp or openenv+http://HOST:PORT"
_WRITTEN = re.compile(r"mcp:(?P<command>.*)|(?P<protocol>mcp|openenv)\+(?P<url>https?://.*)", re.DOTALL)
_ADAPTERS = {
    "mcp": "sota_grpo.tasks.server_tools:McpTools",
    "openenv": "sota_grpo.tasks.server_tools:OpenEnv",
    "agent": "sota_grpo.tasks.agents:Agent",
}
KEY, HEADERS = "SOTA_GRPO_TOOLS_KEY", "SOTA_GRPO_TOOLS_HEADERS"  # environment variables
_PACKAGES = {"mcp": "mcp", "openenv": "websockets"}  # extra: package


@dataclass(frozen=True)
class ToolServer:
    """A tool server from the value of ``env.environment``."""

    written: str  # the option's value
    protocol: str  # ``mcp`` or ``openenv``; also the name of the required extra
    command: str = ""  # command line that starts the server, without a shell; empty for a running server
    url: str = ""

    def fault(self) -> str | None:
        """Return an error message if the value is invalid, else None."""
        option = f"env.environment={one_line(self.written)}"
        if self.url:
            try:
                address = urlsplit(self.url)
                host, _ = address.hostname, address.port
            except ValueError as error:
                return f"{option} is not a valid address ({error}); write {FORMS}."
            if not host:
                return f"{option} has no host; write {FORMS}."
            if address.username is not None or address.password is not None:
                return "env.environment has a user name or password in its address, which would be saved; remove it."
            return None
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            return f"{option} is not a valid command line ({error}); write it as for a shell."
        if not words:
            return f"{option} has no command; write mcp:COMMAND, as in 'mcp:python server.py'."
        if "://" in words[0]:
            return f"{option} has an address instead of a command; write mcp+{one_line(words[0])}."
        return None

    def require(self) -> None:
        """Raise UserError if package, command or credentials are unusable; :meth:`fault` must have returned None."""
        if self.url:
            headers_of(self.url)
        package, option = _PACKAGES[self.protocol], f"env.environment={one_line(self.written)}"
        if find_spec(package) is None:
            raise UserError(
                f"{option} needs the package {package}, which is not installed; install the extra {self.protocol} "
                f"(pip install -e '.[{self.protocol}]')."
            )
        if self.command and shutil.which(shlex.split(self.command)[0]) is None:
            raise UserError(f"{option}: the command {shlex.split(self.command)[0]!r} is not found; correct its path.")

    def act(self) -> str:
        """Return what a run does with this server, for the consent prompt: ``run the command ..`` or ``send ..``."""
        if self.command:
            return f"run the command {one_line(self.command.strip())}"
        sent = "calls" if self.protocol == "mcp" else "rows and calls"
        return f"send {sent} to {one_line(self.url)}"


def server_of(value: str | None) -> ToolServer | None:
    """Return the server that a value of ``env.environment`` names; None if it does not name a server.

    >>> server_of("mcp:npx -y some-server /data").command, server_of("guess.py:Guess")
    ('npx -y some-server /data', None)
    """
    if value is None or (written := _WRITTEN.fullmatch(value)) is None:
        return None
    return ToolServer(value, written["protocol"] or "mcp", written["command"] or "", written["url"] or "")


def instance_spec(value: str, kind: str) -> InstanceSpec:
    """Return the spec of a value of ``env.tools``, ``env.environment`` or ``env.agent``.

    ``kind`` is ``functions``, ``factory`` or ``agent``. A file is not opened here. UserError if the value names a
    server that cannot be used (:meth:`ToolServer.require`).

    >>> str(instance_spec("tools.py:add,multiply", "functions")), instance_spec("guess.py:Guess", "factory").kind
    ('tools.py:add,multiply', 'factory')
    """
    if kind == "factory" and (server := server_of(value)) is not None:
        server.require()
        options = {"url": server.url} if server.url else {"command": tuple(shlex.split(server.command))}
        return InstanceSpec(_ADAPTERS[server.protocol], server.written, options=options)
    if kind == "agent":
        return InstanceSpec(_ADAPTERS[kind], value, options={"value": value})
    path, names = file_reference(value) or (Path(value), "")
    return InstanceSpec(path=str(path), names=tuple(names.split(",")) if names else (), kind=kind)


def headers_of(url: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the HTTP headers for a server, from the environment variables :data:`KEY` and :data:`HEADERS`.

    UserError, without their values, if these are malformed or would be sent unencrypted to another machine.
    """
    headers = {"Authorization": f"Bearer {key}"} if (key := environ.get(KEY, "").strip()) else {}
    if key and not re.fullmatch(r"[\w.~+/=-]+", key, re.ASCII):
        raise UserError(f"the environment variable {KEY} has a character that a key cannot have; copy the key again.")
    for line in filter(str.strip, environ.get(HEADERS, "").splitlines()):
        name, mark, value = line.partition(":")
        if not mark or not re.fullmatch(r"[!-~]+", name.strip()) or not re.fullmatch(r"[ -~]+", value.strip()):
            raise UserError(f"a line of {HEADERS} is not a valid header; write NAME: VALUE, in ASCII.")
        headers[name.strip()] = value.strip()
    address = urlsplit(url)
    is_here = address.hostname == "localhost" or re.fullmatch(r"127(\.\d+){3}|::1", address.hostname or "")
    if headers and address.scheme != "https" and not is_here:
        raise UserError(
            f"{one_line(url)} is not encrypted, so {KEY} or {HEADERS} would be sent in clear text; use https, or a "
            "tunnel to localhost."
        )
    return headers


_MEDIA = ("image", "audio", "video", "image_url", "resource", "resource_link")
_CARRIERS = ("data", "uri", "url", "source", *_MEDIA)  # keys of a block's content


def is_block(value: Any) -> bool:
    """Return whether a value is a content block of MCP or TRL, not another mapping with a ``type``.

    >>> is_block({"type": "text", "text": "Hi"}), is_block({"type": "dog", "name": "Rex"})
    (True, False)
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return isinstance(value.get("text"), str)
    return kind in _MEDIA and not value.keys().isdisjoint(_CARRIERS)


def content_text(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the content blocks of a tool result as lines of text; a block without text gives its type.

    What is no block (:func:`is_block`) is JSON.

    >>> content_text([{"type": "text", "text": "Two notes:"}, {"type": "resource", "resource": {"text": "a, b"}}])
    'Two notes:\\na, b'
    >>> content_text([{"type": "image", "data": "YWJj", "mimeType": "image/png"}])
    '[image, not shown]'
    """
    texts = []
    for block in blocks:
        if not is_block(block):
            texts.append(json.dumps(block, ensure_ascii=False, default=str))
            continue
        inner = block.get("resource")
        text = inner.get("text") if isinstance(inner, Mapping) else block.get("text")
        texts.append(text if isinstance(text, str) else f"[{block.get('type')}, not shown]")
    return "\n".join(texts)
