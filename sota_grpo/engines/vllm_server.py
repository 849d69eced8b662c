"""Arguments of vLLM, and code that vLLM's processes import: checksums of weights, and an API key for every path.

A running vLLM server can be used if it was started with the options of :attr:`ServerEngine.remedy
<sota_grpo.engines.server_engine.ServerEngine>` and can read the folder of pushed weights. With
``--worker-extension-cls sota_grpo.engines.vllm_server.WeightSums`` it also reports checksums of its weights, for the
checks before training. On CPU it needs ``--no-enable-chunked-prefill`` too (for seeds). With ``--api-key`` alone every
client that reaches the server can replace its weights; ``VLLM_API_KEY`` with
``--middleware sota_grpo.engines.vllm_server.RequireKey`` requires the key for that too.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import torch

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.stepping import matrix_dtype
from sota_grpo.errors import UserError
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import MAX_SUPPORT, GroupRequest, Sampling, sample_seed

TIES = 64  # tokens that may tie with the last one of top-k: vLLM keeps them all
_CPU_BLOCK_TOKENS = 32  # vLLM's default on CPU is 128: prompts below that would share nothing
KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it too; a command line would show it to every user of the machine
_CAPTURED_ROWS, _CAPTURED_STEP = 512, 16  # of vLLM's CUDA graphs before Blackwell: wider batches are eager


def engine_arguments(options: EngineOptions, *, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments except the model's path, for ``LLM`` or a server, from resolved options.

    ``options.engine_kwargs`` are added, without those that this function sets. With several GPUs vLLM starts processes
    itself (``mp``): Ray, its default in a Ray actor, would need a bundle per GPU.
    """
    arguments: dict[str, Any] = {
        "generation_config": "vllm",  # else the model's folder adds stop tokens and sampling defaults
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_SUPPORT + TIES,
        "enable_prefix_caching": True,
        "max_model_len": options.max_model_len,
        "dtype": options.dtype,
        "max_num_seqs": options.max_rows,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        # vLLM rewinds the generator of a seeded request whose prefill was cut in pieces, which CPU generators
        # do not support: the prefill of a prompt stays whole.
        arguments |= {"enable_chunked_prefill": False, "block_size": _CPU_BLOCK_TOKENS, "enforce_eager": True}
    else:
        arguments["enable_sleep_mode"] = True
    chosen = {name: value for name, value in options.engine_kwargs.items() if name not in arguments}
    if options.max_rows > _CAPTURED_ROWS and not (arguments | chosen).get("enforce_eager"):
        wide = {"max_cudagraph_capture_size": options.max_rows - options.max_rows % _CAPTURED_STEP}
        compilation = chosen.get("compilation_config") or {}
        if isinstance(compilation, Mapping):
            chosen["compilation_config"] = wide | dict(compilation)
    return arguments | chosen


_READABLE = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of weights that are not quantised
_TURNS, _FEWEST_COLUMNS = 32, 32  # most ranges of columns of a packed matrix, and fewest columns of a range


@torch.no_grad()
def weight_sums(model: torch.nn.Module, shapes: Mapping[str, Sequence[int]], turn: int = 0) -> dict[str, Checksum]:
    """Return a checksum of every weight in vLLM's ``model``, by its name in a push; ``shapes`` has the push's shapes.

    A fused layer (``qkv_proj``) is split into its components' rows. On a CPU vLLM packs its matrices (and a second copy
    of the output layer): columns of a packed matrix are read exactly, by multiplying it with rows of the identity. That
    is slow, so each call reads one of at most 32 ranges of columns (``Checksum.columns``), chosen by ``turn``, which
    grows by 1. A weight with another name or shape, such as a shard on one of several GPUs, and a quantised
    weight are left out.
    """
    fused, dtype = getattr(model, "packed_modules_mapping", None) or {}, matrix_dtype(model.parameters())
    sums: dict[str, Checksum] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, attribute = path.rpartition(".")
        for kind, held in module.named_parameters(recurse=False):
            names = [f"{parent}.{layer}.{kind}".lstrip(".") for layer in fused.get(attribute, (attribute,))]
            if not shapes.keys() >= {*names}:
                continue
            rows, (_, *row) = [shapes[name][0] for name in names], shapes[names[0]]
            columns, packed = None, getattr(module, "cpu_linear", None) if kind == "weight" else None
            is_looked_up = hasattr(module, "embedding_dim") and attribute != "lm_head"
            if packed is not None and not is_looked_up:
                width = max(_FEWEST_COLUMNS, -(-row[0] // _TURNS))
                start = turn % -(-row[0] // width) * width
                columns, row = (start, min(start + width, row[0])), [min(width, row[0] - start)]
                held = packed(
                    torch.eye(shapes[names[0]][1], dtype=held.dtype)[slice(*columns)], module.weight, None
                ).t()
            if list(held.shape[1:]) == list(row) and len(held) >= sum(rows) and held.dtype in _READABLE:
                slices = held.split([*rows, len(held) - sum(rows)])  # a vocabulary may be padded
                for name, slice_rows in zip(names, slices):
                    sums[name] = Checksum.of(slice_rows, dtype)._replace(columns=columns)
    return sums


class WeightSums:
    """vLLM worker extension class: adds the method :func:`weight_sums`, which clients call by ``/collective_rpc``."""

    def weight_sums(self, shapes: Mapping[str, Sequence[int]], turn: int) -> dict[str, list[Any]]:
        """Return :func:`weight_sums` of the model as JSON values: {name: [dtype, total, by_row, columns]}."""
        sums = weight_sums(self.get_model(), shapes, turn)  # type: ignore[attr-defined]  # the worker's
        return {name: [str(dtype).removeprefix("torch."), *rest] for name, (dtype, *rest) in sums.items()}


_OURS = ("model", "skip_tokenizer_init", "use_tqdm_on_load", "ir_op_priority", "tokens_only", "runner", "convert")
_REFUSED = {  # prefixes of vLLM's arguments: why they are refused
    ("speculative_", "spec_"): (
        "a step would give several tokens of unknown seeds and versions, and vLLM's method fly keeps tokens that the "
        "policy rejects"
    ),
    ("logits_processors", "override_generation_config", "watermark_config", "diffusion_config"): (
        "responses would be sampled from another distribution than the learner's, which biases every ratio"
    ),
    ("quantization", "allow_deprecated_quantization", "model_", "hf_config_path", "hf_overrides", "config_format"): (
        "the engine's model must be the learner's, because weights are pushed by name"
    ),
    ("revision", "code_revision", "tokenizer"): (
        "learner, tokenizer and engine must use one revision: set model.name to the folder of that revision"
    ),
    (
        *("data_parallel", "pipeline_parallel", "prefill_context", "decode_context", "dcp_"),
        *("nnodes", "node_rank", "master_", "device_ids"),
    ): "devices are set by inference_model.num_devices, devices and tensor_parallel_size",
    ("enable_lora", "max_lora", "default_mm_loras"): (
        "adapters are merged before a push, or served by inference_model.serve_adapter=true"
    ),
    ("worker_cls", "worker_extension_cls", "scheduler_cls", "weight_transfer_config"): (
        "pushed weights and their versions need vLLM's own worker and scheduler classes"
    ),
    ("hf_token",): "it would be saved with the run; set HF_TOKEN",
}


def refuse_arguments(options: EngineOptions, *, on_cpu: bool) -> None:
    """Raise UserError for an argument in ``options.engine_kwargs`` that is set by this package, unsupported or unknown.

    If there are arguments and vLLM is installed, this imports vLLM, after setting its environment variables
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and, if unset, ``VLLM_LOGGING_LEVEL=ERROR``.
    """
    ours = engine_arguments(replace(options, engine_kwargs={}, tensor_parallel_size=2, max_rows=1), on_cpu=on_cpu)
    for name in options.engine_kwargs:
        problem = f"inference_model.engine_kwargs has {name}"
        if name in ours or name in _OURS:
            raise UserError(f"{problem}, which sota-grpo itself sets; leave it out.")
        for beginnings, reason in _REFUSED.items():
            if name.startswith(beginnings):
                raise UserError(f"{problem}: {reason}; leave it out.")
    if find_spec("vllm") is None or not options.engine_kwargs:
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in fields(EngineArgs) if not field.name.startswith("_")]
    for name in options.engine_kwargs:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else "its names are the fields of vllm.engine.arg_utils.EngineArgs."
            )
            raise UserError(f"vLLM has no argument {name} (inference_model.engine_kwargs); {hint}")


def command_line(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments of vLLM's ``LLM`` as command-line arguments of the server; those that are None are left out.

    >>> list(command_line({"block_size": 32, "enforce_eager": False, "max_model_len": None}))
    ['--block-size', '32', '--no-enforce-eager']
    >>> list(command_line({"compilation_config": {"level": 0}, "ignore_patterns": ["a", "b"]}))
    ['--compilation-config', '{"level": 0}', '--ignore-patterns', 'a', 'b']
    """
    for name, value in arguments.items():
        if value is None:
            continue
        yield f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if isinstance(value, (list, tuple)):
            yield from map(str, value)
        elif not isinstance(value, bool):
            yield json.dumps(value) if isinstance(value, Mapping) else str(value)


def sampling_parameters(
    request: GroupRequest, sampling: Sampling, room: int, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a group; ``seed`` is its first sample's, and ``n`` is 1 if greedy."""
    return {
        # vLLM refuses n > 1 for greedy ones, which are equal
        "n": 1 if sampling.temperature == 0 else request.num_samples,
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


class RequireKey:
    """ASGI middleware: every path except ``/health`` requires the key in the environment variable ``VLLM_API_KEY``.

    vLLM's own check covers only ``/v1`` and ``/inference``: without the key, every user of the machine could pause the
    server, push weights and call the workers' methods. RuntimeError if the variable is unset or empty.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set, so any user of this machine could use the server; set it.")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] == "lifespan" or scope["path"] == "/health"
        if is_open or hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"This path needs the server's API key."})
        else:
            await send({"type": "websocket.close", "code": 1008})
