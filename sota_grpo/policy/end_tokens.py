"""End tokens of responses, and the text of a response without them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sota_grpo.errors import UserError

_SAID = "plaintext"  # plain letters, which no template changes


def end_token_ids(tokenizer: Any, generation_config: Any = None) -> tuple[int, ...]:
    """Return the sorted token ids that end a response: those of tokenizer, generation config and chat template.

    Qwen2.5's base models, for example, declare ``<|endoftext|>``, but their template ends turns with ``<|im_end|>``.
    Ids of config and template are stored as ``tokenizer.known_ends``, for later calls without ``generation_config``.
    The result may be empty. UserError if an ``eos_token_id`` of the config is not an integer.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    known = getattr(tokenizer, "known_ends", None)
    if known is None or generation_config is not None:
        named = getattr(generation_config, "eos_token_id", None)
        known = {*(named if isinstance(named, (list, tuple)) else [named]), end_of_turn(tokenizer)}
        if odd := [token for token in known - {None} if not isinstance(token, int)]:
            raise UserError(
                f"generation_config.json or config.json has eos_token_id={odd[0]!r}, which is not a token id; correct "
                "the model's file."
            )
        with suppress(AttributeError):  # a class with slots: computed again at each call
            tokenizer.known_ends = known
    return tuple(sorted({*known, eos} - {None}))


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the first added or special token after an assistant turn in the chat template, or None.

    Added tokens that are blank, such as Gemma's for several line breaks, also occur within a turn and end none.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": _SAID}]
    try:
        _, mark, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_SAID)
    except Exception:  # a template is the model's program; if prompts need it, its error is reported there
        return None
    known = getattr(tokenizer, "added_tokens_decoder", {})
    added = {*tokenizer.all_special_ids, *(number for number, token in known.items() if token.content.strip(" \n\t▁"))}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if mark else []
    return next((number for number in ids if number in added), None)


def response_text(tokenizer: Any, token_ids: Any) -> str:
    """Return the text of a response, ids ``[R]``, without end tokens and padding; other special tokens are kept."""
    left_out = {*end_token_ids(tokenizer), getattr(tokenizer, "pad_token_id", None)}
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    said = [number for number in ids if number not in left_out]
    # some tokenizers would remove spaces beside signs, as in ' '.join(words)
    return tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
