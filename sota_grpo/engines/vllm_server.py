"""vLLM behind HTTP: a server of its own on the loopback interface, or one that runs already.

Generation goes through vLLM's token-in token-out endpoint ``/inference/v1/generate``, which returns the ids, their
log-probs and the spans of the weights' labels. Weights go through ``/pause?mode=keep``, ``reload_weights`` of the
workers by ``/collective_rpc`` and ``/resume``. No code of ours is needed in the workers, so any vLLM server that was
started with the options of :data:`NEEDED_OPTIONS` will do, as long as it can read the folder of pushed weights; with
``--worker-extension-cls sota_grpo.engines.vllm_server.WeightSums`` it also tells which weights it holds, for the checks
before training. On CPU it needs ``--no-enable-chunked-prefill`` too (seeds). Its ``--api-key`` alone leaves the control
of the weights open to all who reach it; ``VLLM_API_KEY`` with
``--middleware sota_grpo.engines.vllm_server.RequireKey`` closes that.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch

from sota_grpo.engines import Deadlines, EngineOptions
from sota_grpo.engines.inference_server import ServerDied, ServerLate, ServerProcess
from sota_grpo.engines.stepping import matrix_dtype
from sota_grpo.errors import UserError
from sota_grpo.http import HttpClient, ServerError, ServerSilent
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import MOST_KEPT, GroupRequest, Sample, Sampling, sample_seed

logger = logging.getLogger(__name__)
Exchange = tuple[str, Any]  # path and body; a body of None is an empty one
TIES = 64  # tokens that may tie with the last that top-k keeps: vLLM keeps them all
_CPU_BLOCK_TOKENS = 32  # vLLM's default on CPU is 128: prompts below that would share nothing
KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads it too; a command line would show it to every user of the machine
NEEDED_OPTIONS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --generation-config vllm "
    "--logprobs-mode processed_logprobs"
)
_NO_LOG_PROB = -9000.0  # vLLM writes -9999 where a log-prob is missing, infinite or NaN
_PORT_TRIES, _POLL_S = 3, 0.2
_NAME_PREFIX = "generate-tokens-"  # the endpoint's own, in front of the names that it is given


@dataclass(frozen=True)
class Versions:
    """Policy versions as the labels of weights that the server keeps: ``TOKEN:VERSION``, the token new for each engine.

    A label of another engine in a response means that another trainer has pushed weights to the same server.

    >>> mine = Versions("ab")
    >>> mine.label(3), mine.version("ab:3")
    ('ab:3', 3)
    >>> mine.version("cd:4")
    Traceback (most recent call last):
    ...
    RuntimeError: The server's weights have the label cd:4, which this engine never gave (its own begin with ab:); ...
    """

    token: str

    def label(self, version: int) -> str:
        """What the server is to call weights of ``version``."""
        return f"{self.token}:{version}"

    def version(self, label: str) -> int:
        """The version that ``label`` was made of.

        Raises:
            RuntimeError: it is not one of ours.
        """
        token, _, number = label.rpartition(":")
        if token != self.token:
            raise RuntimeError(
                f"The server's weights have the label {label}, which this engine never gave (its own begin with "
                f"{self.token}:); give every trainer a server of its own."
            )
        return int(number)

    def per_token(self, spans: Iterable[dict[str, Any]], num_tokens: int) -> torch.Tensor:
        """Versions ``[num_tokens]`` int64 from spans ``{version, start, end}`` over the response.

        >>> spans = [{"version": "ab:3", "start": 0, "end": 1}, {"version": "ab:4", "start": 1, "end": 3}]
        >>> Versions("ab").per_token(spans, 3)
        tensor([3, 4, 4])

        Raises:
            ServerError: they cover another number of tokens.
        """
        parts = [torch.full((span["end"] - span["start"],), self.version(span["version"])) for span in spans]
        versions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        if len(versions) != num_tokens:
            raise ServerError(f"The server labelled {len(versions)} tokens of {num_tokens} with their weights.")
        return versions


@dataclass(frozen=True)
class Order:
    """One group as it is sent: what to sample, and what the server is to remember about it.

    Args:
        name: of the request, unique in the server.
        request: the group.
        room: most response tokens.
        sampling: how they are drawn.
        stop_token_ids: the tokens that end a response, but for ``sampling.ignore_eos``.
        cache_salt: cached prompts are shared between requests of one salt only; it is new after every push.
        version: of the weights when this was sent.
    """

    name: str
    request: GroupRequest
    room: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    cache_salt: str
    version: int


class VLLMDialect:
    """How a vLLM 0.32 server is started and spoken to; a server of another kind is a subclass, which says what differs.

    Every exchange blocks and may raise :class:`~sota_grpo.engines.inference_server.ServerError`.

    Attributes:
        name: of the engine.
        package: that a server of this kind is started from.
        remedy: what mends a server that lacks something.
        generate_path: where groups are sampled.
        probe_path: a small question that only a server whose workers still work can answer.
        pause, resume: path and body of what freezes everything in flight, and lets it go on.
        free_memory, restore_memory: path and body of what frees its GPU memory, and takes it again.
    """

    name, package = "vllm_server", "vllm"
    remedy = f"start it with `{NEEDED_OPTIONS}`"
    generate_path = "/inference/v1/generate"
    probe_path = "/weight_info"  # the engine's process answers it between two steps
    pause: Exchange = ("/pause?mode=keep&clear_cache=false", None)
    resume: Exchange = ("/resume", None)
    free_memory: Exchange = ("/sleep?level=1", None)
    restore_memory: Exchange = ("/wake_up", None)

    def command(self, options: EngineOptions, port: int, key: str, scratch: Path, *, on_cpu: bool) -> list[str]:
        """What starts one on ``port`` of the loopback interface, where everything wants ``key``.

        The key travels in the environment: every user of the machine can read a command line.
        """
        return [
            # The script `vllm` looks up the distribution `vllm`, which the CPU build is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "policy", "--tokens-only", "--middleware", f"{__name__}.{RequireKey.__name__}"),
            *("--disable-uvicorn-access-log", "--model", options.model_path),
            *("--worker-extension-cls", f"{__name__}.{WeightSums.__name__}"),
            *chain.from_iterable(starmap(flag, engine_arguments(options, on_cpu=on_cpu).items())),
        ]

    def environment(self, options: EngineOptions, key: str, *, on_cpu: bool) -> dict[str, str]:
        """What it needs on top of this process's environment.

        Control endpoints; on CPU this process's number of threads wherever there is room, and nothing compiled: what
        vLLM compiles there only counts ranks, for no reader, and takes 7 seconds. Without the extra worker process,
        which vLLM starts on CPU to place threads, the server is there 10 seconds earlier and takes 0.6 GB less.
        """
        common = {KEY_VARIABLE: key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if not on_cpu:
            return common
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.tensor_parallel_size == 1 else {}
        cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        return common | threads | alone | cache | {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1"}

    def start(self, options: EngineOptions, scratch: Path, *, on_cpu: bool) -> tuple[ServerProcess, str, str]:
        """Start a server on a free port of the loopback interface and wait until ``/health`` answers.

        Args:
            options: of which ``log_path``, ``environment`` and ``deadlines.start`` are read here.
            scratch: folder that is deleted with it.

        Returns:
            The process, its url, and the random key that it asks for.

        Raises:
            ServerDied: it ended before it answered.
            ServerLate: it did not answer in time; it was ended then.
        """
        log_path = Path(options.log_path)
        logger.info("An inference server is started; what it says goes to %s.", log_path)
        # A killed server leaves sockets and rendezvous files. On a GPU the temporary folder keeps compiled code too.
        leavings = {"TMPDIR" if on_cpu else "VLLM_RPC_BASE_PATH": str(scratch)}
        for attempt in range(1, _PORT_TRIES + 1):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port, key = int(probe.getsockname()[1]), secrets.token_urlsafe(32)
            environment = {**leavings, **self.environment(options, key, on_cpu=on_cpu), **options.environment}
            command = self.command(options, port, key, scratch, on_cpu=on_cpu)
            process = ServerProcess(command, environment, log_path, scratch)
            url = f"http://127.0.0.1:{port}"
            try:
                _wait_until_healthy(process, HttpClient(url, api_key=key), options.deadlines.start)
            except ServerDied:
                if attempt == _PORT_TRIES or "address already in use" not in process.said().lower():
                    raise
                logger.warning("Another program took port %d before the server did; trying the next one.", port)
                scratch.mkdir(mode=0o700, exist_ok=True)
                continue
            except BaseException:
                process.close()
                raise
            return process, url, key
        raise AssertionError("unreachable")

    def connect(self, client: HttpClient, deadlines: Deadlines, label: str) -> int:
        """Check that the server can do all that is needed, label its weights, and return its context in tokens.

        Raises:
            UserError: the key is wrong or something is missing; with what mends it.
            ServerError: the server has another fault.
        """
        try:
            context = client.get("/v1/models", timeout_s=deadlines.control)["data"][0]["max_model_len"]
            client.post(*self.resume, timeout_s=deadlines.control)  # a trainer that died may have left it paused
            self._label(client, label, deadlines)
            self._check_sampling(client, deadlines)
        except ServerError as error:
            if error.status == 401:
                raise UserError(
                    f"The server at {client.url} refused the key; set engine.api_key (SOTA_GRPO_API_KEY) to its own."
                ) from error
            if error.status not in (403, 404, 405):
                raise
            lacks = f"The server at {client.url} lacks what a trainer needs ({error}); {self.remedy}."
            raise UserError(lacks) from error
        return int(context)

    def _check_sampling(self, client: HttpClient, deadlines: Deadlines) -> None:
        """Raise UserError where its log-probs, of a token that has no rival, are not those of what it samples from."""
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

    def generate(self, client: HttpClient, order: Order, versions: Versions, timeout_s: float) -> tuple[Sample, ...]:
        """Sample one group; as many samples as were asked for."""
        answer = client.post(self.generate_path, self._request(order), timeout_s=timeout_s)
        try:
            return self._samples(answer, order, versions)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"POST {client.url}{self.generate_path} was answered in a form this client does not know ({error!r}): "
                f"{str(answer)[:300]}"
            ) from error

    def _request(self, order: Order) -> dict[str, Any]:
        """The body that asks for one group."""
        return {
            "request_id": order.name,
            "token_ids": list(order.request.prompt_ids),
            "cache_salt": order.cache_salt,
            "sampling_params": sampling_parameters(order.request, order.sampling, order.room, order.stop_token_ids),
        }

    def _samples(self, answer: Any, order: Order, versions: Versions) -> tuple[Sample, ...]:
        """What was answered to it."""
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        samples = tuple(_sample(choice, versions) for choice in choices)
        return samples * order.request.num_samples if order.sampling.temperature == 0 else samples

    def abort(self, client: HttpClient, name: str, num_samples: int, timeout_s: float) -> None:
        """End the request called ``name``; one that the server does not know is no error."""
        client.post("/inference/v1/abort_requests", {"request_ids": [_NAME_PREFIX + name]}, timeout_s=timeout_s)

    def refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for what this server cannot do; vLLM samples all."""

    def _label(self, client: HttpClient, label: str, deadlines: Deadlines) -> None:
        client.post("/update_weight_version", {"new_version": label}, timeout_s=deadlines.control)

    def label_to_build_on(self, client: HttpClient, deadlines: Deadlines) -> str | None:
        """The label of the server's weights, where those that a push leaves out stay; None: a push has to be whole."""
        return str(client.get("/weight_info", timeout_s=deadlines.control)["weight_version"])

    def weight_sums(
        self, client: HttpClient, shapes: Mapping[str, Sequence[int]], deadlines: Deadlines
    ) -> dict[str, Checksum] | None:
        """Checksums of the weights as they are held, by name; None without :class:`WeightSums`, and of several GPUs."""
        ask = {"method": "weight_sums", "kwargs": {"shapes": {name: list(shape) for name, shape in shapes.items()}}}
        try:
            results = client.post("/collective_rpc", ask, timeout_s=deadlines.push)["results"]
        except ServerSilent:
            raise
        except ServerError:
            return None
        if len(results) > 1:  # each has a part of most weights
            return None
        return {name: Checksum(getattr(torch, dtype), *sums) for name, (dtype, *sums) in results[0].items()}

    def push(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Load the safetensors in ``folder``; what is in flight goes on, its next token from the new weights."""
        client.post(*self.pause, timeout_s=deadlines.control)
        try:
            self._load(client, folder, label, deadlines, idle=idle)
        except ServerError:
            with contextlib.suppress(ServerError):  # the first error is the cause
                client.post(*self.resume, timeout_s=deadlines.control)
            raise
        client.post(*self.resume, timeout_s=deadlines.control)

    def _load(self, client: HttpClient, folder: str, label: str, deadlines: Deadlines, *, idle: bool) -> None:
        """Replace and label the weights of a server that is paused, and was ``idle`` before.

        Old cached prompts are left to the salt of new requests.
        """
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        client.post("/collective_rpc", load, timeout_s=deadlines.push)
        self._label(client, label, deadlines)


def finite_sample(
    token_ids: Sequence[int], log_probs: Sequence[float], versions: torch.Tensor, *, truncated: bool
) -> Sample:
    """A sample as a server told it.

    Raises:
        ServerError: a log-prob is not finite.
    """
    told = torch.tensor(log_probs, dtype=torch.float32)
    if not bool((told.isfinite() & (told > _NO_LOG_PROB)).all()):
        raise ServerError("The server reports no finite log-prob for a token that it sampled.")
    return Sample(torch.tensor(token_ids, dtype=torch.int64), told, versions, truncated)


def _wait_until_healthy(process: ServerProcess, client: HttpClient, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not process.has_ended():
        try:
            client.get("/health", timeout_s=5.0)
        except ServerError as error:  # not there yet, or there and still loading
            if time.monotonic() > deadline:
                raise ServerLate(
                    f"The inference server was not ready after {start_s:g} s ({str(error).rstrip('.')}); "
                    f"what it said is in {process.log_path}."
                ) from error
            time.sleep(_POLL_S)
        else:
            client.close()
            return
    raise process.died("before it was ready")


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
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut in pieces, which CPU generators
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


@torch.no_grad()
def weight_sums(model: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, Checksum]:
    """A checksum of every weight that vLLM's own ``model`` computes with, by its name in a push.

    A fused layer (``qkv_proj``) is cut into the rows of those that it is made of. On a CPU vLLM packs its matrices,
    the output layer's beside the one that is kept: these are read by what they make of the identity, bit for bit. What
    has another name or shape, as each part on one of several GPUs, is left out.

    Args:
        shapes: of the weights of a push, by name.
    """
    fused, dtype = getattr(model, "packed_modules_mapping", None) or {}, matrix_dtype(model.parameters())
    sums: dict[str, Checksum] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, own = path.rpartition(".")
        for kind, held in module.named_parameters(recurse=False):
            names = [f"{parent}.{part}.{kind}".lstrip(".") for part in fused.get(own, (own,))]
            if not shapes.keys() >= {*names}:
                continue
            rows, (_, *row) = [shapes[name][0] for name in names], shapes[names[0]]
            packed: Any = getattr(module, "cpu_linear", None) if kind == "weight" else None
            is_looked_up = hasattr(module, "embedding_dim") and own != "lm_head"
            if packed is not None and not is_looked_up:
                held = packed(torch.eye(*row, dtype=held.dtype), module.weight, None).t()
            if list(held.shape[1:]) == list(row) and len(held) >= sum(rows):  # a vocabulary may be padded
                parts = held.split([*rows, len(held) - sum(rows)])
                sums |= {name: Checksum.of(part, dtype) for name, part in zip(names, parts)}
    return sums


class WeightSums:
    """Worker extension of a vLLM server: :func:`weight_sums` for ``/collective_rpc``."""

    def weight_sums(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        """As JSON has it."""
        sums = weight_sums(self.get_model(), shapes)  # type: ignore[attr-defined]  # the worker's
        return {name: [str(own.dtype).removeprefix("torch."), own.total, own.by_row] for name, own in sums.items()}


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
        is_open = scope["type"] == "lifespan" or scope["path"] == "/health"
        if is_open or hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"This path needs the server's API key."})
        else:
            await send({"type": "websocket.close", "code": 1008})
