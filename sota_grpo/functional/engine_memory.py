"""Bytes that those who only read a model hold beside its weights: the reference in its pass, an inference engine.

Plain numbers in, bytes out. The embedded engine's are those of :mod:`sota_grpo.engines.prompt_cache` and
:mod:`sota_grpo.engines.decode`; vLLM takes the share of the device that it is given, and what is left of that after
its weights and its largest pass are keys and values.
"""

from __future__ import annotations

from sota_grpo.functional.memory import SLOT_BYTES, Learning, MicroBatch
from sota_grpo.model_sizes import Architecture

PREFILL_TOKENS = 2048  # of one pass over prompts, see sota_grpo.engines.prompt_cache
VLLM_PASS_TOKENS = 8192  # that vLLM computes at once, its default


def kv_bytes_per_token(model: Architecture, number_bytes: int) -> int:
    """Keys and values of one token in all layers.

    >>> from sota_grpo.model_sizes import architecture_of
    >>> kv_bytes_per_token(architecture_of("Qwen/Qwen2.5-1.5B"), 2)
    28672
    """
    return 2 * model.layers * model.kv_width * number_bytes


def grown_columns(tokens: int) -> int:
    """Columns of the embedded engine's cache after ``tokens`` tokens: it grows by half, at least by 64.

    >>> [grown_columns(n) for n in (1, 65, 66, 300)]
    [65, 65, 130, 444]
    """
    columns = 0
    while columns < tokens:
        end = columns + 1
        columns = end + max(64, end // 2)
    return columns


def embedded_engine_bytes(
    model: Architecture, *, number_bytes: int, prompts: int, rows: int, prompt_tokens: int, response_tokens: int
) -> tuple[int, int]:
    """Keys and values, and what the pass of a token needs beside them, at the end of the longest responses.

    Each prompt's keys and values are there once, a row's own in :func:`grown_columns`. A pass needs the logits, twice
    in float32 beside the engine's own dtype (scaled, and as probabilities), and the results of all rows; or, at the
    beginning, an MLP of :data:`PREFILL_TOKENS` tokens.

    Args:
        number_bytes: of the engine's dtype.
        prompts: groups that are sampled together.
        rows: their samples.
        prompt_tokens, response_tokens: of the longest.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> embedded_engine_bytes(tiny, number_bytes=4, prompts=1, rows=2, prompt_tokens=10, response_tokens=20)
    (8960, 589824)
    """
    columns = prompts * prompt_tokens + rows * grown_columns(response_tokens)
    token = rows * (model.vocab * (number_bytes + 8) + 16 * response_tokens)
    prefill = pass_bytes(model, PREFILL_TOKENS, number_bytes)
    return kv_bytes_per_token(model, number_bytes) * columns, max(token, prefill)


def pass_bytes(model: Architecture, tokens: int, number_bytes: int) -> int:
    """What a pass without gradient over ``tokens`` tokens holds: one MLP and the residual stream.

    >>> pass_bytes(Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64), 10, 4)
    2880
    """
    return tokens * 3 * number_bytes * (model.intermediate + model.hidden)


def vllm_pool_bytes(
    model: Architecture, *, share_bytes: int, number_bytes: int, rows: int, tensor_parallel: int = 1
) -> int:
    """What vLLM has left for keys and values on each device; below 0 where its share is too small for the weights.

    ``share - weights / n - one pass of 8192 tokens - float32 logits of all rows, twice``. The pass is an estimate: vLLM
    measures it when it starts.

    >>> from sota_grpo.model_sizes import architecture_of
    >>> pool = vllm_pool_bytes(architecture_of("Qwen/Qwen2.5-1.5B"), share_bytes=20 * 2**30, number_bytes=2, rows=128)
    >>> round(pool / 2**30, 1)
    16.5
    """
    weights = model.parameters * number_bytes // tensor_parallel
    logits = rows * model.vocab * 8
    return share_bytes - weights - pass_bytes(model, VLLM_PASS_TOKENS, number_bytes) // tensor_parallel - logits


def forward_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """What a forward pass without gradient holds beside the weights (the reference): one layer's MLP, and the head.

    In the MLP stand three numbers per unit of its width (``silu(gate)``, ``up``, their product), and three of the
    residual stream; under autocast one matrix is cast at a time.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> forward_bytes(tiny, Learning(), MicroBatch(tokens=10, predicted=6, slots=20)) - 8 * 2**20
    6072
    """
    c, w = how.product_bytes, how.weight_bytes
    layer = rows.tokens * 3 * (c * model.intermediate + w * model.hidden)
    cast = c * max(inputs * outputs for inputs, outputs in model.linear_layers) if how.casts else 0
    hidden = rows.predicted * model.hidden * (w + (c if how.casts else 0))
    return layer + cast + hidden + rows.slots * SLOT_BYTES + how.tile_bytes
