"""A judge of the run's own: a vLLM server that is started on this machine, on a device that nothing else uses."""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines import Deadlines, EngineOptions
from sota_grpo.engines.inference_server import SOCKET_BYTES, ServerProcess
from sota_grpo.engines.vllm_server import RequireKey, VLLMDialect, engine_arguments, flag
from sota_grpo.errors import UserError
from sota_grpo.files import folder_for_sockets
from sota_grpo.rewards.judge import CHAT

logger = logging.getLogger(__name__)

_NOT_OF_A_JUDGE = ("generation_config", "logprobs_mode", "enable_sleep_mode", "seed")


class JudgeDialect(VLLMDialect):
    """How a judge is started: as any vLLM server, with text in and text, or numbers, out."""

    name = "judge"

    def __init__(self, kind: str, served_name: str) -> None:
        self._kind, self._served_name = kind, served_name

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """The key travels in the environment."""
        arguments: dict[str, Any] = engine_arguments(options, on_cpu=on_cpu)
        if self._kind != CHAT:
            arguments |= {"runner": "pooling", "enable_prefix_caching": False}
        passed = {name: value for name, value in arguments.items() if name not in _NOT_OF_A_JUDGE}
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}", "--disable-uvicorn-access-log"),
            *("--served-model-name", self._served_name, "--model", options.model_path),
            *chain.from_iterable(starmap(flag, passed.items())),
        ]


class JudgeServer:
    """One vLLM server, on the loopback interface and behind a random key, which ends with this process.

    Args:
        kind: of the judge.
        model: folder or hub name; it is served under this name.
        rows: most questions that it is asked at a time.
        log_path: what it prints goes there.
        device: index of its GPU; None on a CPU.

    Raises:
        UserError: there are GPUs, and none is named; or the model is not there.
    """

    def __init__(self, kind: str, model: str, *, rows: int, log_path: Path, device: int | None) -> None:
        if device is None and torch.cuda.is_available():
            raise UserError("A judge needs a GPU of its own; give reward.judge.device=INDEX, or reward.judge.url.")
        self._dialect = JudgeDialect(kind, model)
        self._options = EngineOptions(
            model,
            engine="vllm_server",
            eos_token_ids=(),
            max_rows=rows,
            gpu_memory_utilization=0.9,
            log_path=log_path,
            environment={} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)},
            deadlines=Deadlines(),
        ).resolved()
        self._lock = threading.Lock()
        self._process: ServerProcess | None = None

    def start(self) -> tuple[str, str]:
        """Start it; its url and its key.

        Raises:
            ServerDied: it ended while it started; the sentence has the cause.
            ServerLate: it was not ready in time.
        """
        scratch = Path(tempfile.mkdtemp(prefix="sota-grpo-judge-", dir=folder_for_sockets(room=SOCKET_BYTES)))
        on_cpu = not torch.cuda.is_available()
        self._process, url, key = self._dialect.start(self._options, scratch, on_cpu=on_cpu)
        return url, key

    def revive(self) -> tuple[str, str] | None:
        """Start it again if it has ended; url and key of the new one, None where the old one lives."""
        with self._lock:
            if self._process is None or not self._process.has_ended(within_s=1.0):
                return None
            logger.warning("The judge has ended (%s) and is started again.", self._process.cause())
            return self.start()

    def close(self) -> None:
        """End it; idempotent."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()
