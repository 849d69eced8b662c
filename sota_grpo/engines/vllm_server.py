"""vLLM behind HTTP: a server of its own on the loopback interface, or one that runs already.

Generation goes through vLLM's token-in token-out endpoint ``/inference/v1/generate``, which returns the ids, their
log-probs and the spans of the weights' labels. Weights go through ``/pause?mode=keep``, ``reload_weights`` of the
workers by ``/collective_rpc`` and ``/resume``: no code of ours runs in the workers, so any vLLM server that was started
with the options of :data:`NEEDED_OPTIONS` will do, as long as it can read the folder of the pushed weights. On CPU it
needs ``--no-enable-chunked-prefill`` too (seeds). Its ``--api-key`` alone leaves the control of the weights open to all
who reach it; ``VLLM_API_KEY`` with ``--middleware sota_grpo.engines.vllm_server.RequireKey`` closes that.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines.base import Deadlines, EngineOptions
from sota_grpo.engines.server_dialect import HttpClient, Order, ServerError, Versions, refusal
from sota_grpo.errors import UserError
from sota_grpo.rl.records import GroupRequest, Sample, Sampling, sample_seed

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it too; a command line would show it to every user of the machine
NEEDED_OPTIONS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm "
    "--logprobs-mode processed_logprobs"
)
_GENERATE = "/inference/v1/generate"
_NAME_PREFIX = "generate-tokens-"  # the endpoint's own, in front of the names that it is given
_NO_LOG_PROB = -9000.0  # the endpoint writes -9999 where a log-prob is missing, infinite or NaN


class VLLMDialect:
    """vLLM 0.32's HTTP endpoints."""

    name = "vllm_server"
    package = "vllm"

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """The key travels in the environment: every user of the machine can read a command line."""
        eager = on_cpu if options.enforce_eager is None else options.enforce_eager
        # Chunked prefill breaks seeded requests on CPU, and its default block of 128 tokens shares no short prompt.
        kind = ("--no-enable-chunked-prefill", "--block-size", "32") if on_cpu else ("--enable-sleep-mode",)
        return [
            # The script `vllm` looks up the distribution `vllm`, which the CPU build is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "policy", "--tokens-only", "--middleware", f"{__name__}.{RequireKey.__name__}"),
            *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
            *("--disable-uvicorn-access-log", "--model", options.model_path, "--dtype", options.dtype),
            *("--seed", str(options.seed), "--max-num-seqs", str(options.max_rows)),
            *(() if options.max_model_len is None else ("--max-model-len", str(options.max_model_len))),
            *("--gpu-memory-utilization", str(options.gpu_memory_utilization)),
            *("--tensor-parallel-size", str(options.tensor_parallel_size)),
            *(("--enforce-eager",) if eager else ()),
            *(("--trust-remote-code",) if options.trust_remote_code else ()),
            *kind,
        ]

    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """Control endpoints; on CPU this process's number of threads wherever there is room, and nothing compiled.

        What vLLM compiles on CPU counts ranks that nobody reads, and takes 7 seconds. Without the extra worker
        process, which vLLM starts on CPU to place threads, the server is there 10 seconds earlier and takes 0.6 GB
        less.
        """
        common = {KEY_VARIABLE: key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if not on_cpu:
            return common
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.tensor_parallel_size == 1 else {}
        cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        return common | threads | alone | cache | {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1"}

    def connect(self, client: HttpClient, deadlines: Deadlines, label: str) -> int:
        """Try everything once: context, control of the weights, sampling, and what its log-probs mean.

        Raises:
            UserError: an option is missing, with the command that has them all.
            ServerError: the server has another fault.
        """
        try:
            context = client.get("/v1/models", timeout_s=deadlines.control)["data"][0]["max_model_len"]
            client.post("/resume", timeout_s=deadlines.control)  # a trainer that died may have left it paused
            client.post("/update_weight_version", {"new_version": label}, timeout_s=deadlines.control)
            answer = client.post(_GENERATE, _trial(), timeout_s=deadlines.start)
        except ServerError as error:
            raise refusal(error, client.url, f"start it with `{NEEDED_OPTIONS}`") from error
        log_prob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        if log_prob != 0:
            raise UserError(
                f"The server at {client.url} gives the only token that top_k=1 leaves a log-prob of {log_prob}: it "
                "reports those of another distribution than it samples from; start it with --logprobs-mode "
                "processed_logprobs."
            )
        return int(context)

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """It can do everything."""

    def generate(self, client: HttpClient, order: Order, versions: Versions, timeout_s: float) -> tuple[Sample, ...]:
        """One request for the group; the samples' streams are vLLM's own of the seeds ``sample_seed(seed) + i``."""
        sampling, greedy = order.sampling, order.sampling.temperature == 0
        body = {
            "request_id": order.name,
            "token_ids": list(order.request.prompt_ids),
            "cache_salt": order.cache_salt,
            "sampling_params": {
                "n": 1 if greedy else order.request.num_samples,  # vLLM refuses n > 1 for greedy; they are equal
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": order.room,
                "seed": sample_seed(order.request.seed),
                "stop_token_ids": list(order.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }
        answer = client.post(_GENERATE, body, timeout_s=timeout_s)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            samples = tuple(_sample(choice, versions) for choice in choices)
        except (KeyError, TypeError) as error:
            raise ServerError(
                f"POST {client.url}{_GENERATE} was answered in a form this client does not know ({error!r}): "
                f"{str(answer)[:300]}"
            ) from error
        return samples * order.request.num_samples if greedy else samples

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        client.post("/inference/v1/abort_requests", {"request_ids": [_NAME_PREFIX + name]}, timeout_s=timeout_s)

    def push(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Freeze what is in flight, load, label, go on. Old cached prompts are left to the salt of new requests."""
        client.post("/pause?mode=keep&clear_cache=false", timeout_s=deadlines.control)
        try:
            load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            client.post("/collective_rpc", load, timeout_s=deadlines.push)
            client.post("/update_weight_version", {"new_version": label}, timeout_s=deadlines.control)
        except ServerError:
            with contextlib.suppress(ServerError):  # the first error is the cause
                client.post("/resume", timeout_s=deadlines.control)
            raise
        client.post("/resume", timeout_s=deadlines.control)

    def probe(self, client: HttpClient, timeout_s: float) -> None:
        client.get("/weight_info", timeout_s=timeout_s)  # the engine's process answers it between two steps

    def sleep(self, client: HttpClient, timeout_s: float) -> None:
        client.post("/sleep?level=1", timeout_s=timeout_s)

    def wake(self, client: HttpClient, timeout_s: float) -> None:
        client.post("/wake_up", timeout_s=timeout_s)


def _trial() -> dict[str, Any]:
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "seed": 0, "logprobs": 0, "detokenize": False}
    # Not token 0: it is often the padding token, whose embedding is 0, and top_k=1 keeps all of many equal logits.
    return {"token_ids": [1, 2, 3], "sampling_params": params}


def _sample(choice: Mapping[str, Any], versions: Versions) -> Sample:
    tokens = choice["logprobs"]["content"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerError(f"The server ended a sample with finish_reason={choice['finish_reason']}.")
    log_probs = torch.tensor([token["logprob"] for token in tokens], dtype=torch.float32)
    if not bool((log_probs > _NO_LOG_PROB).all()):
        raise ServerError("The server reports no finite log-prob for a token that it sampled.")
    return Sample(
        token_ids=torch.tensor([token["token_id"] for token in tokens], dtype=torch.int64),
        log_probs=log_probs,
        versions=versions.per_token(choice["weight_versions"], len(tokens)),
        truncated=choice["finish_reason"] == "length",
    )


class RequireKey:
    """ASGI middleware: every path but ``/health`` needs the key of the environment variable ``VLLM_API_KEY``.

    vLLM's own check covers ``/v1`` and ``/inference`` only, which leaves pausing, pushing weights and running methods
    of the workers open to every user of the machine.

    Raises:
        RuntimeError: the variable is not set.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set; the server would be open to every user of this machine.")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"This path needs the server's API key."})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
