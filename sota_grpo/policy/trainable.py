"""Whether a model is one that is trained here, by what its folder says of it before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from sota_grpo.errors import UserError


def require_whole(name: str, folder: str | Path, option: str = "model.name") -> None:
    """Check that the ``folder`` of a model holds no adapter, which transformers would put into it.

    Raises:
        UserError: it does.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(
            f"{option}={name} has an adapter_config.json; merge the adapter into its base (merge_and_unload) and "
            "save that, or remove the adapter's files."
        )


def require_causal(name: str, config: PretrainedConfig, option: str = "model.name") -> None:
    """Check that a model is a causal language model with attention whose weights are not quantised.

    Args:
        option: that names it.

    Raises:
        UserError: it is not.
    """
    own_code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    text: Any = config.get_text_config()
    what = None
    if config.is_encoder_decoder:
        what = "has an encoder and a decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        what = "has no causal language model of text in transformers"
    elif getattr(text, "num_attention_heads", None) is None:
        what = "has no attention"
    if what is not None:
        raise UserError(f"{option}={name} ({config.model_type}) {what}; use a causal language model of text.")
    quantized = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantized:
        settings = quantized if isinstance(quantized, dict) else vars(quantized)
        raise UserError(
            f"{option}={name} has quantised weights ({settings.get('quant_method')}), which can neither be trained nor "
            "be a reference; use the model that they were made of (model.quantization=nf4 with "
            "train_model.lora.enabled=true keeps it in 4 bits)."
        )


def require_rows(name: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that an embedding of ``rows`` has one for every token of a prompt, a response or padding.

    A special token that nothing writes needs none: Gemma 3 1B has one for images. What messages say is never read as a
    special token (:class:`~sota_grpo.envs.chat_tokens.ChatTokens`).

    Raises:
        UserError: tokens have none, or there is no tokenizer.
    """
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    if len(vocabulary) <= len(added):  # transformers makes one without words where the folder has none
        raise UserError(f"model.name={name} has no tokenizer; put its tokenizer.json beside its config.json.")
    special = {token.content for token in added.values() if token.special}
    written, template = {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token}, str(tokenizer.chat_template)
    lost = [
        token
        for token, number in vocabulary.items()
        if number >= rows and (token not in special or token in written or token in template)
    ]
    if lost:
        raise UserError(
            f"model.name={name}: its tokenizer has {len(lost)} tokens that its embedding of {rows} has no row for, for "
            f"example {min(lost)!r}; resize the model (resize_token_embeddings) and save it, or give it its own "
            "tokenizer."
        )
