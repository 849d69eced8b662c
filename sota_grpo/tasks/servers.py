"""``env.environment`` as a server instead of a file: its forms, and what a run needs for it.

======================== ===========================================================================================
``mcp:COMMAND``          an MCP server that the command starts, once per sample, over its stdin and stdout
``mcp+http://HOST/mcp``  an MCP server that runs already (streamable HTTP; also ``mcp+https://``)
``openenv+http://HOST``  an OpenEnv server that runs already (also ``openenv+https://``)
======================== ===========================================================================================

Credentials are in environment variables, never in a config: ``SOTA_GRPO_TOOLS_KEY`` is sent as ``Authorization:
Bearer``, ``SOTA_GRPO_TOOLS_HEADERS`` are further headers, a line ``NAME: VALUE`` each. Standard library only, because
configs are validated here before anything is loaded.
"""

from __future__ import annotations

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
from sota_grpo.rl.custom_objectives import file_reference
from sota_grpo.text import one_line
from sota_grpo.workers.instances import InstanceSpec

#: The forms, for the message about another value.
FORMS = "mcp:COMMAND, mcp+http://HOST:PORT/mcp or openenv+http://HOST:PORT"
_WRITTEN = re.compile(r"mcp:(?P<command>.*)|(?P<protocol>mcp|openenv)\+(?P<url>https?://.*)", re.DOTALL)
_ADAPTERS = {"mcp": "sota_grpo.tasks.server_tools:McpTools", "openenv": "sota_grpo.tasks.server_tools:OpenEnv"}
KEY, HEADERS = "SOTA_GRPO_TOOLS_KEY", "SOTA_GRPO_TOOLS_HEADERS"  # variables
_PACKAGES = {"mcp": "mcp", "openenv": "websockets"}  # by the extra that brings it


@dataclass(frozen=True)
class ToolServer:
    """A server of tools, as the config names it."""

    written: str  # the value of the option
    protocol: str  # ``mcp`` or ``openenv``, which is also the name of the extra that it needs
    command: str = ""  # a command line that starts it, without a shell; empty where it runs already
    url: str = ""

    def fault(self) -> str | None:
        """Return what is wrong with the value, in one sentence; None for nothing."""
        option = f"env.environment={one_line(self.written)}"
        if self.url:
            try:
                address = urlsplit(self.url)
                host, _ = address.hostname, address.port
            except ValueError as error:
                return f"{option} is no address ({error}); write {FORMS}."
            if not host:
                return f"{option} names no host; write {FORMS}."
            if address.username is not None or address.password is not None:
                return "env.environment has a user name or password in its address, which would be saved; leave it out."
            return None
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            return f"{option} is no command line ({error}); write it as for a shell."
        if not words:
            return f"{option} has no command; write mcp:COMMAND, as in 'mcp:python server.py'."
        if "://" in words[0]:
            return f"{option} has an address in place of a command; write mcp+{one_line(words[0])}."
        return None

    def require(self) -> None:
        """Raise ``UserError`` where the package or the command is missing, or a key would be sent unencrypted."""
        if self.url:
            headers_of(self.url)
        package, option = _PACKAGES[self.protocol], f"env.environment={one_line(self.written)}"
        if find_spec(package) is None:
            raise UserError(
                f"{option} needs the package {package}, which is not installed; install the extra {self.protocol} "
                f"(pip install -e '.[{self.protocol}]')."
            )
        if self.command and shutil.which(shlex.split(self.command)[0]) is None:
            raise UserError(f"{option}: there is no command {shlex.split(self.command)[0]!r} here; correct its path.")

    def act(self) -> str:
        """Return what a run does with it, for the request for consent."""
        if self.command:
            return f"run the command {one_line(self.command.strip())}"
        sent = "calls" if self.protocol == "mcp" else "rows and calls"
        return f"send {sent} to {one_line(self.url)}"


def server_of(value: str | None) -> ToolServer | None:
    """Return the server that ``env.environment`` names, or None.

    >>> server_of("mcp:npx -y some-server /data").command, server_of("guess.py:Guess")
    ('npx -y some-server /data', None)
    """
    if value is None or (written := _WRITTEN.fullmatch(value)) is None:
        return None
    return ToolServer(value, written["protocol"] or "mcp", written["command"] or "", written["url"] or "")


def instance_spec(value: str, kind: str) -> InstanceSpec:
    """Return the spec of the instances that ``env.tools`` (``functions``) or ``env.environment`` (``factory``) names.

    >>> str(instance_spec("tools.py:add,multiply", "functions")), instance_spec("guess.py:Guess", "factory").kind
    ('tools.py:add,multiply', 'factory')
    """
    if kind == "factory" and (server := server_of(value)) is not None:
        server.require()
        options = {"url": server.url} if server.url else {"command": tuple(shlex.split(server.command))}
        return InstanceSpec(_ADAPTERS[server.protocol], server.written, options=options)
    path, names = file_reference(value) or (Path(value), "")
    return InstanceSpec(path=str(path), names=tuple(names.split(",")) if names else (), kind=kind)


def headers_of(url: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the headers of requests to a server: its key, and the further ones of the user.

    Raises:
        UserError: a header is malformed, or would be sent unencrypted; no message repeats a value.
    """
    headers = {"Authorization": f"Bearer {key}"} if (key := environ.get(KEY, "").strip()) else {}
    if key and not re.fullmatch(r"[\w.~+/=-]+", key, re.ASCII):
        raise UserError(f"the servers' key ({KEY}) has a character that no token has; copy it again.")
    for line in filter(str.strip, environ.get(HEADERS, "").splitlines()):
        name, mark, value = line.partition(":")
        if not mark or not re.fullmatch(r"[!-~]+", name.strip()) or not re.fullmatch(r"[ -~]+", value.strip()):
            raise UserError(f"a line of {HEADERS} is no header; write NAME: VALUE, in plain characters.")
        headers[name.strip()] = value.strip()
    address = urlsplit(url)
    is_here = address.hostname == "localhost" or re.fullmatch(r"127(\.\d+){3}|::1", address.hostname or "")
    if headers and address.scheme != "https" and not is_here:
        raise UserError(
            f"{one_line(url)} is not encrypted, and {KEY} or {HEADERS} would be readable on its way; use https, or "
            "a tunnel to this machine."
        )
    return headers


def content_text(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the blocks of an MCP tool's result as text, line by line; of a block without text, its type.

    >>> content_text([{"type": "text", "text": "Two notes:"}, {"type": "resource", "resource": {"text": "a, b"}}])
    'Two notes:\\na, b'
    >>> content_text([{"type": "image", "data": "YWJj", "mimeType": "image/png"}])
    '[image, not shown]'
    """
    texts = []
    for block in blocks:
        inner = block.get("resource")
        text = inner.get("text") if isinstance(inner, Mapping) else block.get("text")
        texts.append(text if isinstance(text, str) else f"[{block.get('type')}, not shown]")
    return "\n".join(texts)
