"""An engine over HTTP from its options: over a server that is started here, or over one that runs already."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines.server import ServerEngine
from sota_grpo.engines.server_dialect import Dialect, ServerOptions
from sota_grpo.engines.server_http import HttpClient, ServerError, ServerSilent
from sota_grpo.engines.server_process import start_server
from sota_grpo.engines.sglang_server import SGLangDialect
from sota_grpo.engines.vllm_server import VLLMDialect
from sota_grpo.engines.weight_files import WeightFolder, expected_weights
from sota_grpo.errors import UserError

_CONTROL_CONNECTIONS = 4  # pushing, probing and aborting go on while every row is waited for
_DIALECTS: dict[str, type[Dialect]] = {dialect.name: dialect for dialect in (VLLMDialect, SGLangDialect)}


def server_engine(name: str, options: ServerOptions) -> ServerEngine:
    """The engine called ``name``, ``vllm_server`` or ``sglang_server``.

    A server that is started here listens on the loopback interface, wants a random key for everything, and ends with
    this process even when that is killed. One at ``options.url`` must be able to read this machine's shared memory.

    Raises:
        UserError: the server's package is not installed, or the server lacks something.
        ServerDied: the server ended while it started.
        ServerLate: it was not ready in time.

    >>> server_engine("sglang_server", ServerOptions("model", eos_token_ids=[1], url="localhost"))
    Traceback (most recent call last):
    ...
    sota_grpo.errors.UserError: engine.url=localhost is not the address of a server; write http://HOST:PORT.
    """
    dialect = _DIALECTS[name]()
    if options.url is None:
        return _start(dialect, options)
    client = HttpClient(options.url, api_key=options.api_key, max_connections=options.max_rows + _CONTROL_CONNECTIONS)
    _require_answer(client, options.deadlines.control)
    shapes, tied = expected_weights(options.model_path, trust_remote_code=options.trust_remote_code)
    return ServerEngine(client, dialect, shapes=shapes, tied=tied, **_limits(options))


def _require_answer(client: HttpClient, timeout_s: float) -> None:
    try:
        client.get("/health", timeout_s=timeout_s)
    except ServerSilent as error:
        raise UserError(f"No server answers at engine.url={client.url}; start it first, or mend the url.") from error
    except ServerError:
        return  # it is there, and says what it lacks when it is asked for more


def _start(dialect: Dialect, options: ServerOptions) -> ServerEngine:
    if find_spec(dialect.package) is None:
        raise UserError(
            f"engine={dialect.name} needs the package {dialect.package}, which is not installed; install it "
            "(README.md, Install), or give engine.url of a server that runs elsewhere on this machine."
        )
    on_cpu = not torch.cuda.is_available()
    shapes, tied = expected_weights(options.model_path, trust_remote_code=options.trust_remote_code)
    folder = WeightFolder(shapes, getattr(torch, options.dtype))
    # A killed server leaves sockets and meeting points behind. On a GPU the temporary folder keeps compiled code too.
    leavings = "TMPDIR" if on_cpu else "VLLM_RPC_BASE_PATH"
    try:
        process, url, key = start_server(
            lambda port, key: dialect.command(options, port, key, folder.path, on_cpu=on_cpu),
            lambda key: {
                leavings: str(folder.path),
                **dialect.environment(options, key, on_cpu=on_cpu),
                **options.environment,
            },
            log_path=Path(options.log_path),
            scratch=folder.path,
            start_s=options.deadlines.start,
        )
    except BaseException:
        folder.close()
        raise
    client = HttpClient(url, api_key=key, max_connections=options.max_rows + _CONTROL_CONNECTIONS)
    parts: dict[str, Any] = {"process": process, "weight_folder": folder, "can_sleep": not on_cpu}
    return ServerEngine(client, dialect, shapes=shapes, tied=tied, **parts, **_limits(options))


def _limits(options: ServerOptions) -> dict[str, Any]:
    return {
        "eos_token_ids": options.eos_token_ids,
        "max_model_len": options.max_model_len,
        "max_rows": options.max_rows,
        "deadlines": options.deadlines,
    }
