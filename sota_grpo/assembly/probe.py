"""How fast this device is: a few real passes of a model of the run's widths and few layers, timed.

The learner's rate is in floating-point operations per second, as :mod:`sota_grpo.functional.flops` counts them, and so
carries over to the whole model and to rows of any length. The engine's is the time of one token of all rows, which is
scaled by the weights that it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sota_grpo.assembly.memory import Learning
from sota_grpo.engines.hf import TransformersEngine
from sota_grpo.functional.flops import Load, ModelShape, recomputed_flops, shared_load, step_flops
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import MODEL_LOCK
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.rl.records import GroupRequest, Sampling

_MOST_WEIGHTS = 150_000_000  # of the model that is timed, where its widths allow
_MOST_VOCAB = 16_384
_PROMPT, _RESPONSE, _GROUP = 64, 64, 8
_WORK, _MOST_GROUPS = 2e10, 16  # operations of a pass of the learner, and the groups that it takes at most
_TOKENS = 16  # that the engine samples for each row
_MOST_ROWS = 128
_SECONDS = 2.0  # of the learner's passes, once warm


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Args:
        flops_per_s: of the learner's forward and backward passes, what they compute twice counted twice.
        token_s: seconds in which the embedded engine samples one token for each of ``rows`` rows of the whole model.
    """

    flops_per_s: float
    token_s: float
    rows: int


def measure_rates(model: Architecture, how: Learning, *, device: str, engine_bytes: int, rows: int) -> Rates:
    """Time the learner and the embedded engine on ``device`` with a small model of the same widths.

    Args:
        model: of the run.
        how: the run trains.
        device: ``cpu`` or ``cuda``.
        engine_bytes: per weight of the engine.
        rows: that it samples at once.
    """
    small = reduced(model)
    net = _random_model(small, device, torch.float32 if how.weight_bytes == 4 else torch.bfloat16)
    rows = min(rows, _MOST_ROWS)
    dtype = torch.float32 if engine_bytes == 4 else torch.bfloat16
    token_s = _token_seconds(net, small, rows, dtype) * decode_weights(model) / decode_weights(small)
    shape = shape_of(small, how.rank)
    groups = min(_MOST_GROUPS, 1 + int(_WORK / step_flops(shape, shared_load(_PROMPT, [_RESPONSE] * _GROUP))))
    load = turn_load(_PROMPT, _RESPONSE, _GROUP, groups * _GROUP)
    work = step_flops(shape, load) + recomputed_flops(shape, load, checkpointing=False)
    return Rates(work / _learn_seconds(net, small, how, device, groups), token_s, rows)


def shape_of(model: Architecture, rank: int) -> ModelShape:
    """What the operations of a model are counted from; ``rank`` of its adapter, 0 without.

    >>> from sota_grpo.policy.model_sizes import architecture_of
    >>> shape_of(architecture_of("Qwen/Qwen2.5-0.5B"), 16).trainable_weights
    8798208
    """
    matrices = model.layers * model.layer_matrices
    return ModelShape(
        trainable_weights=model.adapter_parameters(rank) if rank else matrices,
        frozen_weights=matrices if rank else 0,
        attention_width=model.layers * model.query_width,
        head_weights=model.head_weights,
        head_trainable=not rank,
    )


def reduced(model: Architecture) -> Architecture:
    """The same widths, a smaller vocabulary and so many layers that it is quickly made.

    >>> from sota_grpo.policy.model_sizes import architecture_of
    >>> small = reduced(architecture_of("Qwen/Qwen2.5-1.5B"))
    >>> small.layers, small.vocab
    (2, 16384)
    """
    vocab = min(model.vocab, _MOST_VOCAB)
    room = max(0, _MOST_WEIGHTS - vocab * model.hidden) // model.layer_matrices
    return replace(model, vocab=vocab, layers=min(model.layers, max(1, room)), tied=True, other=0)


def decode_weights(model: Architecture) -> int:
    """Weights that are read for every token: all layers' matrices and the head."""
    return model.layers * model.layer_matrices + model.head_weights


def turn_load(prompt: int, response: int, group: int, rows: int) -> Load:
    """Of ``rows`` rows in groups, each prompt computed once.

    >>> turn_load(3, 2, 2, 4)
    Load(positions=14, pairs=48, predicted=8)
    """
    one = shared_load(prompt, [response] * group)
    groups = rows // group
    return Load(groups * one.positions, groups * one.pairs, groups * one.predicted)


def _random_model(model: Architecture, device: str, dtype: torch.dtype) -> Any:
    """Weights that are all alike: they take no time to draw, and products do not depend on what is multiplied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    options: dict[str, Any] = {  # head_dim is not in its signature
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    config = Qwen2Config(**options)
    with MODEL_LOCK, torch.device("meta"):
        net: Any = Qwen2ForCausalLM(config)
    net = net.to(dtype).to_empty(device=device)
    net.tie_weights()
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.fill_(0.01)
    return net


def _learn_seconds(net: Any, model: Architecture, how: Learning, device: str, groups: int) -> float:
    """Of one forward and backward pass over so many groups, the fastest of some."""
    net = add_lora(net, r=how.rank, alpha=how.rank) if how.rank else net
    policy = CausalPolicy(net.train(), shared_prompt=not how.repeats_keys)
    rows = groups * _GROUP
    tokens = torch.arange(rows * (_PROMPT + _RESPONSE), device=device).view(rows, -1) % model.vocab
    tokens[:, :_PROMPT] = tokens[::_GROUP, :_PROMPT].repeat_interleave(_GROUP, 0)
    completion_mask = (torch.arange(_PROMPT + _RESPONSE, device=device) >= _PROMPT).expand(rows, -1)
    half = how.product_bytes < how.weight_bytes
    device_type = torch.device(device).type

    def once() -> None:
        with torch.autocast(device_type, torch.bfloat16, enabled=half):
            log_probs, _ = policy.log_probs(tokens, torch.ones_like(completion_mask), completion_mask)
        log_probs.sum().backward()
        policy.zero_grad(set_to_none=True)

    return _fastest(once, device_type)


def _token_seconds(net: Any, model: Architecture, rows: int, dtype: torch.dtype) -> float:
    """Of one token of all rows: the difference between a short and a longer response, which both have the prompt."""
    engine = TransformersEngine(
        net, eos_token_ids=[0], pad_token_id=0, max_model_len=1024, max_rows=rows, device=net.device, dtype=dtype
    )
    group = min(_GROUP, rows)
    prompt = tuple(1 + index % (model.vocab - 1) for index in range(_PROMPT))
    requests = [GroupRequest(index, prompt, group, index) for index in range(max(1, rows // group))]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        list(engine.generate(requests, Sampling(max_tokens=tokens, ignore_eos=True)))
        return time.perf_counter() - began

    seconds(2)  # the first call of everything
    short, long = seconds(1), seconds(1 + _TOKENS)
    engine.close()
    return max(long - short, 1e-6) / _TOKENS


def _fastest(once: Callable[[], None], device_type: str) -> float:
    once()
    found: list[float] = []
    while not found or (sum(found) < _SECONDS and len(found) < 20):
        _wait(device_type)
        began = time.perf_counter()
        once()
        _wait(device_type)
        found.append(time.perf_counter() - began)
    return min(found)


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()
