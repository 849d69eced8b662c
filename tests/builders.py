"""Small fakes shared by the tests: ragged rows, tiny random models, actors whose log-probs are plain parameters."""

from __future__ import annotations

import random

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sota_grpo import keys

VOCAB = 40


def generator(seed: int | None = None) -> torch.Generator:
    """A random stream of its own: of the test's draws, or of ``seed``."""
    return torch.Generator().manual_seed(random.getrandbits(62) if seed is None else seed)


def random_row(
    stream: torch.Generator,
    prompt: int,
    response: int,
    *,
    index: int = 0,
    group_size: int = 2,
    vocab: int = VOCAB,
    spread: tuple[float, float] = (0.5, -2.0),  # of the behaviour log-probs: standard deviation and mean
    dtype=torch.float32,
) -> TensorDict:
    """One response with every key that a learner may read; off the assistant mask the per-token values are 0."""
    length = prompt + response
    mask = torch.arange(length) >= prompt

    def values(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.where(mask, shift + scale * torch.randn(length, generator=stream, dtype=dtype), 0.0)

    tokens = torch.randint(3, vocab, (length,), generator=stream)
    behaviour = values(*spread)
    return TensorDict(
        {
            "query": f"question {index // group_size}",
            "group_id": torch.tensor(index // group_size),
            "sample_id": torch.tensor(index % group_size),
            "tokens": {"full": tokens, "prompt": tokens[:prompt], "response": tokens[prompt:]},
            "masks": {"all_attention_mask": torch.ones(length, dtype=torch.bool), "all_assistant_mask": mask},
            "log_probs": {"full": behaviour},
            "proximal_log_probs": {"full": torch.where(mask, behaviour + values(0.4), 0.0)},
            "advantage": torch.randn(1, 1, generator=stream, dtype=dtype),
            "next": {
                "ref_log_probs": {"full": torch.where(mask, behaviour + values(0.4), 0.0)},
                "token_version": torch.where(mask, 3, -1),
                "policy_version": torch.tensor(3),
                "reward": torch.randn(1, generator=stream),
                "truncated": torch.tensor([False]),
            },
        }
    )


def random_rows(stream: torch.Generator, count: int, *, group_size: int = 2, **options) -> list[TensorDict]:
    """``count`` rows with prompts of 1 to 4 tokens (one per group) and responses of 1 to 6."""
    rows = []
    for index in range(count):
        if index % group_size == 0:
            prompt = int(torch.randint(1, 5, (), generator=stream))
        response = int(torch.randint(1, 7, (), generator=stream))
        rows.append(random_row(stream, prompt, response, index=index, group_size=group_size, **options))
    return rows


class TableActor(nn.Module):
    """A policy whose log-prob and entropy of every token are free parameters, looked up by group and sample id."""

    def __init__(self, rows: list[TensorDict], stream: torch.Generator, *, group_size: int = 2, shift: float = 0.4):
        super().__init__()
        width = max(row[keys.FULL_TOKENS].shape[0] for row in rows) + 8
        dtype = rows[0][keys.LOG_PROBS].dtype
        table = torch.zeros(len(rows), width, dtype=dtype)
        for row, values in zip(rows, table, strict=True):
            old = row[keys.LOG_PROBS]
            values[: len(old)] = old + shift * torch.randn(len(old), generator=stream, dtype=dtype)
        self.group_size = group_size
        self.log_probs = nn.Parameter(table)
        self.entropy = nn.Parameter(torch.rand(len(rows), width, generator=stream, dtype=dtype))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        index = td["group_id"] * self.group_size + td["sample_id"]
        width = td[keys.FULL_TOKENS].shape[1]
        td.set(keys.LOG_PROBS, self.log_probs[index, :width])
        return td.set("entropy", self.entropy[index, :width])


class ModelActor(nn.Module):
    """The plainest policy over a causal LM: whole-batch logits, log-probs and entropy of the assistant tokens."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        tokens, real = td[keys.FULL_TOKENS], td[keys.ATTENTION_MASK]
        logits = self.model(input_ids=tokens, attention_mask=real.long()).logits[:, :-1]
        log_p = torch.cat([torch.zeros_like(logits[:, :1]), logits], 1).log_softmax(-1)
        mask = td[keys.ASSISTANT_MASK]
        sampled = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        td.set(keys.LOG_PROBS, torch.where(mask, sampled, 0.0))
        return td.set("entropy", torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0.0))


def tiny_model(seed: int = 0, *, vocab: int = VOCAB) -> Qwen2ForCausalLM:
    """A random Qwen2 of two layers, in eval mode; weights large enough that its log-probs differ between tokens."""
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words ``w3`` to ``w{vocab-1}`` after the three special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{index}": index for index in range(3, vocab)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
