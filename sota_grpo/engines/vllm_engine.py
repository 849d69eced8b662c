"""Rollout engine on vLLM in this process, on CPU or CUDA. Importing this module does not import vLLM."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.stepping import Flight, SteppingEngine, checked_weights, expected_weights, matrix_dtype
from sota_grpo.engines.vllm_server import TIES, engine_arguments, sampling_parameters, weight_sums
from sota_grpo.errors import UserError
from sota_grpo.policy.weight_pack import Checksum, WeightFolder, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, SamplingSupport

logger = logging.getLogger(__name__)

PROVIDER = "sota_grpo_cpu"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM accepts
#: Versions of vLLM whose records and arguments :func:`shorten` knows; a development build may have the next one's.
VERSIONS = re.compile(r"0\.32\.\d+(\.post\d+)?(\+.*)?")


def cpu_norms() -> dict[str, list[str]]:
    """Register vLLM's C++ RMS norms for its CPU engine; return the argument ``ir_op_priority`` that prefers them.

    vLLM's norms in plain torch, its default, take a fifth of a small model's decoding time; they still handle tensors
    that the kernels do not support. The result is empty if this build of vLLM lacks the kernels.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not all(hasattr(torch.ops._C, name) for name in ("rms_norm", "fused_add_rms_norm")):
        return {}
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
        register = ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_both, inplace=True)
        register(_fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether the kernel supports the tensors: contiguous rows and a weight of the same dtype."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _takes_both(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = x_residual.dtype == x.dtype and x_residual.is_contiguous()
    return same and _takes(x, weight, epsilon, variance_size)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


class VLLMEngine(SteppingEngine):
    """Rollout engine on vLLM in this process: one request per group (``n`` samples) and vLLM's prefix cache.

    Sample ``i`` of a group, counted from ``request.first_sample``, has vLLM's seed ``sample_seed(request.seed) + i``.
    At temperature 0 one sample is requested and repeated. Equal calls return equal tokens if vLLM batches them alike.
    Log-probs are those after temperature, top-k, etc.

    With top-k the sampling support is reported: the tokens of finite processed log-prob among the ``top_k + TIES`` most
    likely ones. Under top-p or min-p without top-k it is not reported.

    Weights may be pushed from another thread or between two steps: running requests continue with the new weights, and
    every token records the version that sampled it. A new group never uses cached prompts of an older version.

    Environment variables of this process that are set before vLLM is imported: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``
    (weights are passed as tensors) and ``options.environment``; if unset, ``VLLM_LOGGING_LEVEL=ERROR`` and, on CPU,
    ``VLLM_CPU_KVCACHE_SPACE=1`` (GiB). On CPU vLLM and the learner compute in turn, with the same OpenMP threads
    (``OMP_NUM_THREADS``). UserError if vLLM does not support ``options.adapter_rank``.
    """

    name = "vllm"

    def __init__(self, options: EngineOptions):
        super().__init__()
        self._on_cpu = not torch.cuda.is_available()
        self._can_sleep = not self._on_cpu  # vLLM cannot on a CPU
        self._eos_token_ids = sorted(options.eos_token_ids)
        # vLLM ends a response at these texts; `stops` cuts the response, as in every engine
        stop = {"stop": list(options.stop), "include_stop_str_in_output": True, "detokenize": True}
        self._stop = stop | {"skip_special_tokens": False} if options.stop else {}
        self._requests: dict[int, GroupRequest] = {}  # in flight, by ticket; vLLM knows them as str(ticket)
        self._num_devices = options.tensor_parallel_size
        if not self._on_cpu and options.tensor_parallel_size == 1:
            self.device = torch.device("cuda:0")  # vLLM takes the first that this process sees
        options = options.resolved()
        with _process_state_restored():
            self._llm: Any = _start(options, on_cpu=self._on_cpu)
        self._engine: Any = self._llm.llm_engine
        shorten(self._engine)
        self.max_model_len = int(self._engine.model_config.max_model_len)
        if not self._on_cpu and not self._engine.vllm_config.use_v2_model_runner:
            logger.warning(
                "vLLM uses its model runner V1, which samples seeded rows one by one in a slow Python loop; if the "
                "environment variable VLLM_USE_V2_MODEL_RUNNER is set, unset it."
            )
        self._engine.set_weight_version("0")
        self.takes_adapters = options.adapter_rank > 0
        self._folder = WeightFolder({}, None) if self.takes_adapters else None  # of the newest adapter
        self._adapter: Any = None  # argument of generation requests; None before the first adapter
        dtypes = set(self._engine.apply_model(_weight_dtype))  # some models keep their routers in float32
        self.weight_dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        self._shapes, self._tied = expected_weights(
            self._engine.model_config.hf_config, trust_remote_code=options.trust_remote_code
        )

    def _start(self, flights: Mapping[int, Flight]) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for ticket, (request, room, sampling, _) in flights.items():
            self._requests[ticket] = request
            truncation = {}
            if sampling.is_truncated and sampling.top_k > 0:
                truncation = {"logprobs": min(sampling.top_k + TIES, self._vocab_size)}
            params = SamplingParams(
                **sampling_parameters(request, sampling, room, self._eos_token_ids) | self._stop | truncation,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # The salt keys the prefix cache by version: it cannot be reset while other requests run.
            prompt = tokens_input(list(request.prompt_ids), cache_salt=str(self.version))
            self._engine.add_request(str(ticket), prompt, params, lora_request=self._adapter)

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        # On CPU the only compiled function counts ranks that are not read; compiling it takes seconds per process.
        eager = torch.compiler.set_stance("force_eager") if self._on_cpu else contextlib.nullcontext()
        with eager:
            outputs = self._engine.step()
        ended = {int(output.request_id): output for output in outputs if output.finished}
        return [(ticket, self._group(self._requests.pop(ticket), output)) for ticket, output in ended.items()]

    def _group(self, request: GroupRequest, output: Any) -> GroupOutput:
        ordered = sorted(output.outputs, key=lambda completion: completion.index)
        samples = tuple(_sample(completion, self._vocab_size) for completion in ordered)
        # greedy samples are equal and requested once
        return GroupOutput(request.group_id, samples * request.num_samples if len(samples) == 1 else samples)

    def _drop(self, flights: Mapping[int, Flight]) -> None:
        for ticket in flights:
            if self._requests.pop(ticket, None) is not None:
                self._engine.abort_request([str(ticket)])

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight, or the adapter; every request samples its next token with the new weights.

        A LoRA adapter is served unmerged with ``adapter_rank``, else merged into :attr:`base`. Whole weights need all
        names of the ``state_dict()``, tied ones too. ValueError, with nothing copied, if names, shapes or tied weights
        do not fit, or ``base`` is missing; RuntimeError if the engine is closed.
        """
        self._require_open()
        adapter = weights if self._folder and isinstance(weights, WeightPack) and weights.scales else None
        pairs: list[tuple[str, torch.Tensor]] = []
        if adapter is None:
            pushed = checked_weights(self.whole(weights), self._shapes, self._tied, tied_required=True)
            pairs = [(name, tensor.detach()) for name, tensor in pushed.items()]
            if self._num_devices > 1:  # the workers are other processes: the tensors travel as bytes
                pairs = [(name, tensor.cpu()) for name, tensor in pairs]
        with self._between_steps():
            self._require_open()  # another thread may have closed this meanwhile
            self._wake_now()
            self._finish_batches()
            if self._folder is not None and adapter is not None:
                self._load_adapter(adapter, self._folder.path)
            else:
                self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            if not self._engine.has_unfinished_requests():
                self._engine.reset_prefix_cache()
            self._engine.set_weight_version(str(version))
            self.version = version

    def weight_sums(self) -> Mapping[str, Mapping[str, Checksum]] | None:
        """Return ``{"vllm": {weight's name: checksum}}``; None on several GPUs, and with ``adapter_rank``.

        The weights are those that can be read. This wakes the engine; RuntimeError if it is closed.
        """
        if self._num_devices > 1 or self.takes_adapters:
            return None
        with self._between_steps():
            self._require_open()
            self._wake_now()
            (sums,) = self._engine.apply_model(partial(weight_sums, shapes=self._shapes, turn=self.version))
        return {self.name: sums}

    def _load_adapter(self, adapter: WeightPack, folder: Path) -> None:
        """Load an adapter, by files, in place of the last; vLLM computes ``W x + (alpha / r) B A x`` unmerged.

        ValueError if its ranks or scales differ.
        """
        from vllm.lora.request import LoRARequest

        tensors, ranks = {}, set()
        for name, tensor in adapter.tensors():
            weight, _, factor = name.rpartition(":")
            tensors[f"base_model.model.{weight.removesuffix('weight')}lora_{factor}.weight"] = tensor.contiguous()
            ranks.add(tensor.shape[0] if factor == "A" else tensor.shape[1])
        (rank,), (scale,) = ranks, set(adapter.scales.values())
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": scale * rank,
            "target_modules": sorted({weight.split(".")[-2] for weight in adapter.scales}),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        self._engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        self._adapter = LoRARequest("policy", 1, str(folder))

    def _finish_batches(self) -> None:
        """Fetch the results of all launched batches, which a later step would label with the new version."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler(mode="keep", clear_cache=False)
        try:
            while core.batch_queue:
                self._finish(self._step())
        finally:
            core.resume_scheduler()

    def _free_memory(self) -> None:
        self._engine.sleep(level=1)  # moves the weights to the host and drops the cache

    def _restore_memory(self) -> None:
        self._engine.wake_up()

    def _release(self) -> None:
        try:
            with _process_state_restored():
                self._engine.engine_core.shutdown()
        finally:
            self._engine = self._llm = None
            if self._folder is not None:
                self._folder.close()


def _start(options: EngineOptions, *, on_cpu: bool) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # vLLM sets it only after its imports
    os.environ.update(options.environment)
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM

        # ids in, ids out
        quiet = {"skip_tokenizer_init": not options.stop, "use_tqdm_on_load": False}
        arguments = engine_arguments(options, on_cpu=on_cpu) | quiet
        if options.adapter_rank:
            arguments |= adapter_arguments(options.adapter_rank)
        if on_cpu:
            arguments["ir_op_priority"] = cpu_norms()
        return LLM(options.model_path, **arguments)


@contextlib.contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restore what vLLM changes in the block: all random states and, on CPU, the function ``torch.set_num_threads``."""
    states, set_num_threads = (random.getstate(), np.random.get_state()), torch.set_num_threads
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_num_threads


def _weight_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of vLLM's model; a function, not a lambda, because it is pickled to the model's process."""
    return matrix_dtype(model.parameters())


def _sample(completion: Any, vocab: int) -> Sample:
    log_probs, support = log_probs_and_support(completion.logprobs, len(completion.token_ids), vocab)
    spans = completion.weight_versions
    versions = [torch.full((span.end - span.start,), int(span.version), dtype=torch.int64) for span in spans]
    return Sample(
        token_ids=torch.tensor(completion.token_ids, dtype=torch.int64),
        log_probs=log_probs,
        versions=torch.cat(versions),
        truncated=completion.finish_reason == "length",
        support=support,
    )


def log_probs_and_support(logprobs: Any, num_tokens: int, vocab: int) -> tuple[Tensor, SamplingSupport | None]:
    """Return the log-probs ``[R]`` and the sampling support of the ``R = num_tokens`` tokens of a response.

    The support is None if ``logprobs`` has only the sampled tokens. RuntimeError if it may lack tokens: at a position
    all returned tokens are in the support, but are not the whole vocabulary of ``vocab`` tokens.

    Args:
        logprobs: vLLM's ``FlatLogprobs``: per position the sampled token, then a fixed number of the most likely
            tokens, possibly with the sampled one; tokens outside the support have a log-prob of minus infinity.

    >>> from types import SimpleNamespace
    >>> ids, nothing = [5, 7, 5, 3], float("-inf")
    >>> flat = SimpleNamespace(token_ids=ids, logprobs=[-1.0, -0.5, -1.0, nothing])
    >>> log_probs, support = log_probs_and_support(flat, num_tokens=1, vocab=100)
    >>> log_probs.tolist(), support.ids.tolist(), support.counts.tolist()
    ([-1.0], [5, 7], [2])
    """
    log_probs = torch.tensor(logprobs.logprobs, dtype=torch.float32).view(num_tokens, -1)
    if log_probs.shape[1] == 1:
        return log_probs[:, 0], None
    ids = torch.tensor(logprobs.token_ids, dtype=torch.int32).view(num_tokens, -1)
    count = log_probs.shape[1] - 1
    if count < vocab and bool(log_probs[:, 1:].isfinite().all(1).any()):
        raise RuntimeError(
            f"vLLM reports only {count} tokens at one position but may sample from more, because at least {TIES} tie "
            "with the last one of top_k; use engine=transformers or inference_model.torch_dtype=float32."
        )
    finite = log_probs.isfinite()
    finite[:, 1:] &= ids[:, 1:] != ids[:, :1]
    return log_probs[:, 0].clone(), SamplingSupport(ids[finite], finite.sum(1).to(torch.int32))


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for one LoRA adapter of ``rank``; raise UserError if vLLM does not support the rank.

    >>> adapter_arguments(12)
    {'enable_lora': True, 'max_loras': 1, 'max_lora_rank': 16}
    """
    room = next((most for most in ADAPTER_RANKS if most >= rank), None)
    if room is None:
        raise UserError(f"train_model.lora.r={rank} is above {ADAPTER_RANKS[-1]}, vLLM's highest; reduce it.")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def shorten(engine: Any) -> None:
    """Replace two methods of vLLM's ``LLMEngine`` by faster ones; no-op unless :data:`VERSIONS` matches.

    With a thousand samples at once the GPU waits for vLLM's Python code (docs/hardware.md). Calls for samples that
    continue with one more token, which do nothing or only store a token and its log-prob, are handled here; vLLM's own
    methods get every other call. Tokens, log-probs and versions are the same.

    >>> [bool(VERSIONS.fullmatch(version)) for version in ("0.32.0+cu130", "0.32.1.post1", "0.32.1rc0.dev7", "0.33.0")]
    [True, True, False, False]
    """
    import vllm

    if VERSIONS.fullmatch(vllm.__version__):
        shorten_outputs(engine.output_processor)
        shorten_slots(engine.engine_core.engine_core.scheduler.kv_cache_manager)


def shorten_outputs(processor: Any) -> None:
    """Make vLLM's ``processor`` only store the token and log-prob of a sample that continues, without an output."""
    from vllm.logprobs import FlatLogprobs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    whole, states = processor.process_outputs, processor.request_states

    def stored(output: Any, weight_version: str | None) -> bool:
        state, log_probs = states.get(output.request_id), output.new_logprobs
        if state is None or state.is_prefilling or output.finish_reason is not None or log_probs is None:
            return False
        if len(output.new_token_ids) != 1 or log_probs.logprobs.shape != (1, 1):
            return False
        if output.new_sampling_mask is not None or output.routed_experts is not None:
            return False
        sample = state.logprobs_processor
        if state.output_kind is not RequestOutputKind.FINAL_ONLY or type(sample.logprobs) is not FlatLogprobs:
            return False
        if type(state.detokenizer) is not IncrementalDetokenizer:  # the base class stores ids and makes no text
            return False
        if weight_version is not None:
            state.track_weight_version(weight_version)
        (token,), log_prob = output.new_token_ids, log_probs.logprobs.item()
        state.detokenizer.token_ids.append(token)
        sample.cumulative_logprob += log_prob
        flat = sample.logprobs
        flat.start_indices.append(len(flat.logprobs))
        flat.token_ids.append(token)
        flat.logprobs.append(log_prob)
        flat.ranks.append(None)
        flat.decoded_tokens.append(None)
        flat.end_indices.append(len(flat.logprobs))
        return True

    def process(outputs: Sequence[Any], *, iteration_stats: Any, weight_version: str | None, **others: Any) -> Any:
        rest = [output for output in outputs if iteration_stats is not None or not stored(output, weight_version)]
        return whole(rest, iteration_stats=iteration_stats, weight_version=weight_version, **others)

    processor.process_outputs = process


def shorten_slots(manager: Any) -> None:
    """Make vLLM's KV cache ``manager`` return at once if a sample's last block has room and no block became full.

    No-op for models with layers other than full attention, and if prefixes are hashed in blocks of another size.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return
    only, nothing = managers[0], manager.empty_kv_cache_blocks
    size, blocks, cached = only.block_size, only.req_to_blocks, only.num_cached_block
    if only.block_pool.hash_block_size != size:
        return
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **others: Any) -> Any:
        needed = request.num_computed_tokens + 1
        if num_new_tokens == 1 and not args and not any(others.values()) and needed <= manager.max_model_len:
            has_room = needed <= len(blocks.get(request.request_id, ())) * size
            if has_room and min(needed, request.num_tokens) // size <= cached.get(request.request_id, 0):
                return nothing
        return allocate(request, num_new_tokens, *args, **others)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > cached.get(request.request_id, 0):
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
