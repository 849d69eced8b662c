"""vLLM behind HTTP: a server of its own on the loopback interface, or one that runs already.

Generation goes through vLLM's token-in token-out endpoint ``/inference/v1/generate``, which returns the ids, their
log-probs and the spans of the weights' labels. Weights go through ``/pause?mode=keep``, ``reload_weights`` of the
workers by ``/collective_rpc`` and ``/resume``: no code of ours runs in the workers, so any vLLM server that was started
with the options of :data:`NEEDED_OPTIONS` will do, as long as it can read the folder of the pushed weights, or is sent
them (:mod:`sota_grpo.engines.weight_upload`). On CPU it needs ``--no-enable-chunked-prefill`` too (seeds). Its
``--api-key`` alone leaves the control of the weights open to all who reach it; ``VLLM_API_KEY`` with ``--middleware
sota_grpo.engines.vllm_server.RequireKey`` closes that.
"""

from __future__ import annotations

import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines import Deadlines, EngineOptions
from sota_grpo.engines.inference_server import Dialect, Order, Versions, finite_sample
from sota_grpo.errors import UserError
from sota_grpo.http import HttpClient, ServerError
from sota_grpo.rl.records import MOST_KEPT, GroupRequest, Sample, Sampling, sample_seed

TIES = 64  # tokens that may tie with the last that top-k keeps: vLLM keeps them all
_CPU_BLOCK_TOKENS = 32  # vLLM's default on CPU is 128: prompts below that would share nothing
KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it too; a command line would show it to every user of the machine
NEEDED_OPTIONS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm "
    "--logprobs-mode processed_logprobs"
)
_NAME_PREFIX = "generate-tokens-"  # the endpoint's own, in front of the names that it is given


class VLLMDialect(Dialect):
    """vLLM 0.32's HTTP endpoints."""

    name, package = "vllm_server", "vllm"
    remedy = f"start it with `{NEEDED_OPTIONS}`"
    generate_path = "/inference/v1/generate"
    probe_path = "/weight_info"  # the engine's process answers it between two steps
    pause, resume = ("/pause?mode=keep&clear_cache=false", None), ("/resume", None)
    free_memory, restore_memory = ("/sleep?level=1", None), ("/wake_up", None)
    takes_uploads = True

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """The key travels in the environment: every user of the machine can read a command line."""
        return [
            # The script `vllm` looks up the distribution `vllm`, which the CPU build is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "policy", "--tokens-only", "--middleware", f"{__name__}.{RequireKey.__name__}"),
            *("--disable-uvicorn-access-log", "--model", options.model_path),
            *chain.from_iterable(starmap(flag, engine_arguments(options, on_cpu=on_cpu).items())),
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

    def _check_sampling(self, client: HttpClient, deadlines: Deadlines) -> None:
        """Sample one token that has no rival."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "seed": 0, "logprobs": 0, "detokenize": False}
        # Not token 0: it is often the padding token, whose embedding is 0, and top_k=1 keeps all of many equal logits.
        body = {"token_ids": [1, 2, 3], "sampling_params": params}
        answer = client.post(self.generate_path, body, timeout_s=deadlines.start)
        log_prob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        if log_prob != 0:
            raise UserError(
                f"The server at {client.url} gives the only token that top_k=1 leaves a log-prob of {log_prob}: it "
                "reports those of another distribution than it samples from; start it with --logprobs-mode "
                "processed_logprobs."
            )

    def _request(self, order: Order) -> dict[str, Any]:
        return {
            "request_id": order.name,
            "token_ids": list(order.request.prompt_ids),
            "cache_salt": order.cache_salt,
            "sampling_params": sampling_parameters(order.request, order.sampling, order.room, order.stop_token_ids),
        }

    def _samples(self, answer: Any, order: Order, versions: Versions) -> tuple[Sample, ...]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        samples = tuple(_sample(choice, versions) for choice in choices)
        return samples * order.request.num_samples if order.sampling.temperature == 0 else samples

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        client.post("/inference/v1/abort_requests", {"request_ids": [_NAME_PREFIX + name]}, timeout_s=timeout_s)

    def label_to_build_on(self, client: HttpClient, deadlines: Deadlines) -> str | None:
        return str(client.get("/weight_info", timeout_s=deadlines.control)["weight_version"])

    def _load(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Old cached prompts are left to the salt of new requests."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        client.post("/collective_rpc", load, timeout_s=deadlines.push)
        self._label(client, label, deadlines)


_CAPTURED_ROWS, _CAPTURED_STEP = 512, 16  # of vLLM 0.32's CUDA graphs before Blackwell: wider batches are eager


def engine_arguments(options: EngineOptions, *, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is given beside the model's path, in this process or as a server, from options that are resolved.

    A copy on several GPUs runs in processes that vLLM starts itself (``mp``), on this process's devices. Left alone,
    vLLM takes Ray inside one of our actors and then refuses the actor's placement group: it wants a bundle per GPU.
    """
    arguments: dict[str, Any] = {
        "generation_config": "vllm",  # else the model's folder adds stop tokens and sampling defaults of its own
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MOST_KEPT + TIES,
        "enable_prefix_caching": True,
        "max_model_len": options.max_model_len,
        "dtype": options.dtype,
        "max_num_seqs": options.max_rows,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.is_eager(on_cpu=on_cpu),
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut in pieces, which CPU generators
        # do not support: the prefill of a prompt stays whole.
        arguments |= {"enable_chunked_prefill": False, "block_size": _CPU_BLOCK_TOKENS}
    else:
        arguments["enable_sleep_mode"] = True
    chosen = {name: value for name, value in options.engine_kwargs.items() if name not in arguments}
    if options.max_rows > _CAPTURED_ROWS and not arguments["enforce_eager"]:
        wide = {"max_cudagraph_capture_size": options.max_rows - options.max_rows % _CAPTURED_STEP}
        compilation = chosen.get("compilation_config") or {}
        if isinstance(compilation, Mapping):
            chosen["compilation_config"] = wide | dict(compilation)
    return arguments | chosen


_OURS = ("model", "skip_tokenizer_init", "use_tqdm_on_load", "ir_op_priority", "tokens_only", "runner", "convert")
_REFUSED = {  # beginnings of names of vLLM's arguments, and why they are not passed on
    **dict.fromkeys(
        ("speculative_", "spec_"),
        "several tokens come of one step then, and neither their seeds nor their versions of the weights are known",
    ),
    **dict.fromkeys(
        ("logits_processors", "override_generation_config", "watermark_config", "diffusion_config"),
        "responses would be drawn from another distribution than the learner's, which biases every ratio",
    ),
    **dict.fromkeys(
        ("quantization", "allow_deprecated_quantization", "model_", "hf_config_path", "hf_overrides", "config_format"),
        "it has to be the learner's model, whose weights it is given by their names",
    ),
    **dict.fromkeys(
        ("revision", "code_revision", "tokenizer"),
        "learner, tokenizer and engine have to be of one revision: give its folder as model.name",
    ),
    **dict.fromkeys(
        (
            *("data_parallel", "pipeline_parallel", "prefill_context", "decode_context", "dcp_"),
            *("nnodes", "node_rank", "master_", "device_ids"),
        ),
        "devices are given by inference_model.num_devices, devices and tensor_parallel_size",
    ),
    **dict.fromkeys(
        ("enable_lora", "max_lora", "default_mm_loras"),
        "adapters are merged before they are given to an engine, or served under inference_model.serve_adapter=true",
    ),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "scheduler_cls", "weight_transfer_config"),
        "weights and versions are given to vLLM's own workers and scheduler",
    ),
    "hf_token": "it would be saved with the run; set HF_TOKEN",
}


def refuse_arguments(options: EngineOptions, *, on_cpu: bool) -> None:
    """Check ``options.engine_kwargs`` before anything is started.

    Raises:
        UserError: an argument that is set here, that would make what is sampled wrong, or that vLLM has not.
    """
    ours = engine_arguments(replace(options, engine_kwargs={}, tensor_parallel_size=2, max_rows=1), on_cpu=on_cpu)
    for name in options.engine_kwargs:
        said = f"inference_model.engine_kwargs has {name}"
        if name in ours or name in _OURS:
            raise UserError(f"{said}, which follows from other options here; leave it out.")
        for beginning, reason in _REFUSED.items():
            if name.startswith(beginning):
                raise UserError(f"{said}: {reason}; leave it out.")
    if find_spec("vllm") is None or not options.engine_kwargs:
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs

    known = [one.name for one in fields(EngineArgs) if not one.name.startswith("_")]
    for name in options.engine_kwargs:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else "its names are the fields of vllm.engine.arg_utils.EngineArgs."
            )
            raise UserError(f"vLLM has no argument {name} (inference_model.engine_kwargs); {hint}")


def flag(name: str, value: Any) -> tuple[str, ...]:
    """An argument of ``LLM`` on the server's command line.

    >>> flag("block_size", 32), flag("enforce_eager", False), flag("max_model_len", None)
    (('--block-size', '32'), ('--no-enforce-eager',), ())
    >>> flag("compilation_config", {"level": 0}), flag("ignore_patterns", ["a", "b"])
    (('--compilation-config', '{"level": 0}'), ('--ignore-patterns', 'a', 'b'))
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    if isinstance(value, Mapping):
        return (f"--{flag}", json.dumps(value))
    if isinstance(value, (list, tuple)):
        return (f"--{flag}", *map(str, value))
    return () if value is None else (f"--{flag}", str(value))


def sampling_parameters(
    request: GroupRequest, sampling: Sampling, room: int, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """What vLLM is told of one group; sample ``i`` is drawn from vLLM's own stream, of ``sample_seed(seed) + i``."""
    return {
        "n": 1 if sampling.temperature == 0 else request.num_samples,  # it refuses n > 1 for greedy; they are equal
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": room,
        "seed": sample_seed(request.seed) + request.first_sample,
        "stop_token_ids": [] if sampling.ignore_eos else list(stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }


def _sample(choice: Mapping[str, Any], versions: Versions) -> Sample:
    tokens, reason = choice["logprobs"]["content"], choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ServerError(f"The server ended a sample with finish_reason={reason}.")
    return finite_sample(
        [token["token_id"] for token in tokens],
        [token["logprob"] for token in tokens],
        versions.per_token(choice["weight_versions"], len(tokens)),
        truncated=reason == "length",
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
        header = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(header, self._expected)
