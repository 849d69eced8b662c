"""Messages as token ids: a special token stands where the chat template writes it, and nowhere else."""

from __future__ import annotations

import copy
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from sota_grpo.errors import UserError

Messages = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)

_PLAIN = "plaintext"  # plain letters, which every template and every filter in it leaves alone


class ChatTokens:
    """Renders messages and tokenises what comes out, with what the messages themselves say read as text only.

    A chat template makes one text of markers and contents, in which ``<|im_end|>`` in a question, a table or a tool's
    answer would end the turn as the template's own does. Here the special tokens of a rendering are those that the same
    roles have around plain words. Where they are, its ids are the tokenizer's; where contents name or add some, it is
    rendered and tokenised once more with other names for the template's own tokens, so that those of contents are text.

    Markers that the tokenizer has no special token for (``[INST]`` of Llama 2, ``User:``) are text wherever they stand.

    Args:
        tokenizer: of the policy.
        render: what the chat template makes of messages.
        add_special_tokens: as the tokenizer takes it.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> chat = ChatTokens(tokenizer, lambda messages: tokenizer.apply_chat_template(messages, tokenize=False))
    >>> ids = chat.ids([{"role": "user", "content": "Hi<|im_end|>"}])
    >>> tokenizer.decode(ids), ids.count(tokenizer.eos_token_id)
    ('<|im_start|>user\\nHi<|im_end|><|im_end|>\\n', 1)
    """

    def __init__(self, tokenizer: Any, render: Callable[[Messages], str], *, add_special_tokens: bool = False):
        self._tokenizer, self._template, self._add_special_tokens = tokenizer, render, add_special_tokens
        known: Mapping[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {number for number, token in known.items() if token.special}
        special |= set(getattr(tokenizer, "all_special_ids", ()))
        ends = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos")}
        special -= {getattr(tokenizer, "unk_token_id", None)} - ends  # it stands for what the tokenizer does not know
        self._special = {number: known[number] for number in special if number in known}
        longest_first = sorted((token.content for token in self._special.values()), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._framings: dict[str, list[int]] = {}
        self._was_told = False

    def ids(self, messages: Messages) -> tuple[int, ...]:
        """The rendered messages ``[P]``; equal to the tokenizer's own wherever no content names a special token.

        Raises:
            UserError: a content names one, and the template does more with it than to write it down; or it cannot
                render such messages at all.
        """
        text = self._render(messages)
        ids = self._tokenizer(text, add_special_tokens=self._add_special_tokens)["input_ids"]
        framing = self._framing(messages)
        # a template may leave its own token out because a content has it, so equal specials prove nothing then
        if self._specials_of(ids) != framing or any(self._replaced(each, " ") != dict(each) for each in messages):
            name = self._first_name(messages)
            ids = self._read_as_text(messages, text)
            if self._specials_of(ids) != framing:
                raise UserError(
                    f"a text holds {name!r}, a special token that could begin or end a turn, and this chat template "
                    "and tokenizer leave no way to read it as text; take it out."
                )
            if not self._was_told:
                logger.warning("A prompt or reply says %r: it is read as text, not as the special token.", name)
                self._was_told = True
        return tuple(ids)

    def _render(self, messages: Messages) -> str:
        try:
            return self._template(messages)
        except UserError:
            raise
        except Exception as error:  # a template is a program that came with the model: it raises what it likes
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template cannot render messages of the roles {roles} ({type(error).__name__}: {error}); use "
                "a model whose template takes them."
            ) from error

    def _specials_of(self, ids: Sequence[int]) -> list[int]:
        return [number for number in ids if number in self._special]

    def _framing(self, messages: Messages) -> list[int]:
        """The special tokens that the template writes around plain words."""

        def plain(name: str, value: Any) -> Any:
            if name == "content" and isinstance(value, str) and value.strip():
                return _PLAIN
            return self._replaced(value, " ")

        words = [{name: plain(name, value) for name, value in message.items()} for message in messages]
        key = json.dumps(words, default=str)
        if key not in self._framings:
            ids = self._tokenizer(self._render(words), add_special_tokens=self._add_special_tokens)["input_ids"]
            self._framings[key] = self._specials_of(ids)
        return self._framings[key]

    def _replaced(self, value: Any, by: str | Callable[[re.Match[str]], str]) -> Any:
        """``value`` with the names of special tokens replaced, however deep they stand in it."""
        if isinstance(value, str):
            return self._names.sub(by, value)
        if isinstance(value, Mapping):
            return {self._replaced(name, by): self._replaced(item, by) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._replaced(item, by) for item in value]
        return value

    def _read_as_text(self, messages: Messages, text: str) -> list[int]:
        """The ids of ``text`` with only the template's own special tokens as tokens; none where it has mixed them."""
        reader, numbers, words = self._reader
        quoted = {name: word.replace("x", "y") for name, word in words.items()}
        rendered = self._render([self._replaced(message, lambda name: quoted[name[0]]) for message in messages])
        names = {word: name for name, word in quoted.items()}
        unquote = re.compile("|".join(names))

        def said(text: str) -> str:
            return unquote.sub(lambda word: names[word[0]], text)

        if said(rendered) != text:
            return []
        marked = said(self._names.sub(lambda name: words[name[0]], rendered))
        ids = reader(marked, add_special_tokens=self._add_special_tokens, split_special_tokens=True)["input_ids"]
        return [numbers.get(number, number) for number in ids]

    @cached_property
    def _reader(self) -> tuple[Any, dict[int, int], dict[str, str]]:
        """A copy of the tokenizer that knows the special tokens by other names; what they are, what they are called.

        The names are new words that nobody can have written beforehand, and no special tokens: a tokenizer that splits
        special tokens leaves them whole.
        """
        reader, salt = copy.deepcopy(self._tokenizer), secrets.token_hex(8)
        words = {token.content: f"zq{salt}x{number}z" for number, token in self._special.items()}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        reader.add_tokens(
            [
                AddedToken(words[token.content], special=False, **{flag: getattr(token, flag) for flag in flags})
                for token in self._special.values()
            ]
        )
        numbers = {reader.convert_tokens_to_ids(words[t.content]): number for number, t in self._special.items()}
        return reader, numbers, words

    def _first_name(self, messages: Messages) -> str:
        said = json.dumps([*messages], ensure_ascii=False, default=str)
        name = self._names.search(said)
        return name[0] if name else said[:60]


def num_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """How many tokens, or characters, all begin with.

    >>> num_shared([(1, 2, 3), (1, 2, 4, 5)]), num_shared(["<call>", "<call>"])
    (2, 6)
    """
    return next((at for at, each in enumerate(zip(*sequences)) if len({*each}) > 1), min(map(len, sequences)))
