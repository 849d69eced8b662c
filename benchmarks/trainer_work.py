"""What :mod:`benchmarks.trainer` gives to every trainer: a model of a known shape and rows of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from sota_grpo import keys
from sota_grpo.functional.flops import Load, ModelShape, forward_flops, shared_load
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.lora import add_lora

_QWEN: dict[str, Any] = {"vocab_size": 151_936, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        _QWEN
        | _ROPE
        | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "max_position_embeddings": 40_960}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        _QWEN
        | _ROPE
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "max_position_embeddings": 32_768}
        | {"num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "tiny": (
        "qwen2",
        _QWEN
        | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 40_960}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    ),
}
PAD = 0


@dataclass(frozen=True)
class Case:
    """One amount of work; the fields are the options of the command line."""

    shape: str = "tiny"
    tokens: int = 16_384
    prompt: int = 1024
    response: int = 1024
    group: int = 8
    ragged: float = 0.0
    lora: int = 0
    checkpointing: bool = False
    micro_tokens: int = 0
    dtype: str = "float32"
    precision: str = "fp32"
    device: str = "cpu"


def make_model(case: Case) -> nn.Module:
    """A random model of the case's shape in training mode, with its adapter where it has one; the same every time."""
    family, sizes = SHAPES[case.shape]
    with torch.device(case.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes), dtype=getattr(torch, case.dtype))
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    model = model.train()
    return add_lora(model, r=case.lora, alpha=2 * case.lora) if case.lora else model


def group_sizes(case: Case) -> list[int]:
    """Responses of each group, so that prompts and responses of full length fill ``tokens``; the last has what is left.

    >>> group_sizes(Case(tokens=16_384, prompt=1024, response=1024, group=8))  # 9 * 1024 and 7 * 1024
    [8, 6]
    """
    sizes, left = [], case.tokens
    while left >= case.prompt + case.response:
        sizes.append(min(case.group, (left - case.prompt) // case.response))
        left -= case.prompt + sizes[-1] * case.response
    if not sizes:
        raise ValueError(f"--tokens {case.tokens} has no room for a prompt of {case.prompt} and {case.response} more")
    return sizes


def make_rows(case: Case, seed: int = 0) -> list[TensorDict]:
    """Rows as a source gives them: random tokens, behaviour log-probs near those of a random policy.

    Responses are drawn evenly from ``(1 - ragged) * response`` to ``response`` tokens.
    """
    stream = torch.Generator().manual_seed(seed)
    vocab = SHAPES[case.shape][1]["vocab_size"]
    shortest, uniform = max(1, round((1 - case.ragged) * case.response)), -torch.tensor(float(vocab)).log()
    rows = []
    for group, size in enumerate(group_sizes(case)):
        prompt = torch.randint(3, vocab, (case.prompt,), generator=stream)
        advantages = torch.randn(size, generator=stream)
        for sample in range(size):
            length = int(torch.randint(shortest, case.response + 1, (), generator=stream))
            tokens = torch.cat([prompt, torch.randint(3, vocab, (length,), generator=stream)])
            sampled = torch.arange(len(tokens)) >= case.prompt
            near = uniform + 0.1 * torch.randn(len(tokens), generator=stream)
            rows.append(
                TensorDict(
                    {
                        keys.FULL_TOKENS: tokens,
                        keys.ATTENTION_MASK: torch.ones_like(sampled),
                        keys.ASSISTANT_MASK: sampled,
                        keys.LOG_PROBS: torch.where(sampled, near, 0.0),
                        keys.ADVANTAGE: (advantages[sample] - advantages.mean()).reshape(1, 1),
                        keys.GROUP_ID: torch.tensor(group),
                        keys.SAMPLE_ID: torch.tensor(sample),
                        keys.TRUNCATED: torch.tensor([False]),
                    }
                )
            )
    return rows


def shared_loads(rows: Sequence[TensorDict]) -> Load:
    """What the rows require where the prompt of each group is computed once."""
    lengths: dict[int, tuple[int, list[int]]] = {}
    for row in rows:
        num_sampled = int(row[keys.ASSISTANT_MASK].sum())
        prompt = row[keys.FULL_TOKENS].shape[0] - num_sampled
        lengths.setdefault(int(row[keys.GROUP_ID]), (prompt, []))[1].append(num_sampled)
    return sum((shared_load(prompt, responses) for prompt, responses in lengths.values()), Load())


def kept_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, gradients that were not freed, and the state of the optimizer."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return [*parameters, *gradients, *state]


def padded_load(num_rows: int, width: int, *, predicted: int) -> Load:
    """``num_rows`` rows of ``width`` tokens, each with its prompt and padding; ``predicted`` positions have logits."""
    return Load(num_rows * width, num_rows * width * (width + 1) // 2, predicted)


def recomputed_flops(shape: ModelShape, load: Load, *, checkpointing: bool) -> int:
    """What the backward pass computes a second time to save memory: the logits, and under checkpointing the decoder.

    A head that is not trained keeps its slopes.
    """
    head = 2 * shape.head_weights * load.predicted
    again = head if shape.head_trainable else 0
    return forward_flops(shape, load) - head + again if checkpointing else again
