"""Faster replacements of two vLLM methods, for samples that continue with one more token.

With a thousand samples at once the GPU waits for vLLM's Python code (docs/hardware.md). Calls that have nothing to do,
or only store a token and its log-prob, are handled here; vLLM's own method gets every other call. Tokens, log-probs and
versions are the same (``tests/contract/test_vllm_cpu.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

#: Versions of vLLM whose records and arguments these functions know; a development build may have the next one's.
VERSIONS = re.compile(r"0\.32\.\d+(\.post\d+)?(\+.*)?")


def shorten(engine: Any) -> None:
    """Replace methods of vLLM's ``LLMEngine`` in this process by faster ones; no-op unless :data:`VERSIONS` matches.

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
