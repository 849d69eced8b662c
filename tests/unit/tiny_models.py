"""Random causal language models of a few thousand parameters, rows for them, and a tokenizer, for the policy tests."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import CONFIG_MAPPING

from sota_grpo import keys

VOCAB = 37
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}
LONG_ROPE = {  # Phi-3's positions, which change for all rows of a batch if one has more than 8 tokens
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "long_factor": [4.0, 4.0],
        "short_factor": [1.0, 1.0],
    },
}


def make_model(family: str = "qwen2", *, attn_implementation: str = "sdpa", **changes) -> PreTrainedModel:
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    with torch.no_grad():  # a fresh initialisation is almost uniform, which would hide errors
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def make_rows(lengths: list[int], *, width: int | None = None, holes: bool = False) -> TensorDict:
    """Right-padded random rows: the first two tokens are prompt, the rest assistant (with a tool turn when holes)."""
    width = width or max(lengths)
    length = torch.tensor(lengths)[:, None]
    position = torch.arange(width)[None, :]
    attention = position < length
    assistant = attention & (position >= 2)
    if holes:
        assistant &= (position != 4) & (position != 5)
    tokens = torch.where(attention, torch.randint(3, VOCAB, (len(lengths), width)), 0)
    entries = {keys.FULL_TOKENS: tokens, keys.ATTENTION_MASK: attention, keys.ASSISTANT_MASK: assistant}
    return TensorDict(entries, batch_size=[len(lengths)])


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *(f"w{index}" for index in range(VOCAB - 3))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer
