"""Tokenise prompts and replies so that only the chat template, never a message's text, adds special tokens."""

from __future__ import annotations

import copy
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from tokenizers import AddedToken

from sota_grpo.errors import UserError
from sota_grpo.policy.causal import end_token_ids, response_text
from sota_grpo.rewards.extract import THINKING
from sota_grpo.rl.records import SampledText
from sota_grpo.rl.tool_schemas import call_id
from sota_grpo.text import SURROGATE, sentence

Messages = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)

# plain letters, which no template or filter changes
_MOST_FRAMINGS, _CACHED_CHARACTERS = 1024, 1 << 14  # cached frames of chats; characters of a reply that is cached
_PLAIN, _EARLIER, _PROBE = "plaintext", "earlierassistantturn", "laterturn"


class ChatTokens:
    """Renders and tokenises messages so that names of special tokens in their contents are ordinary text.

    In a rendered chat, ``<|im_end|>`` in a question or in a tool's result would end the turn like the template's
    ``<|im_end|>``. So the messages are also rendered with plain words as contents. If both have the same special
    tokens, and no content names one, the ids are the tokenizer's. Else the messages are tokenised again, with new names
    for the special tokens that the template writes, so that only these become special.

    Markers that are no special tokens (``[INST]`` of Llama 2, ``User:``) are not protected: a content can imitate them.
    ``render`` returns the text of a list of messages, by the chat template.

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
        special -= {getattr(tokenizer, "unk_token_id", None)} - ends  # it replaces unknown text
        self._special = {number: known[number] for number in special if number in known}
        longest_first = sorted((token.content for token in self._special.values()), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._framings: dict[str, list[int]] = {}
        self._has_warned = False

    def ids(self, messages: Messages) -> tuple[int, ...]:
        """Return the token ids of the rendered messages; logs once if a message names a special token.

        UserError if the template fails, if a message has half of a surrogate pair, or if the messages would have other
        special tokens than plain words have.
        """
        text = self._render(messages)
        if half := SURROGATE.search(text):
            raise UserError(f"a message has half of a surrogate pair, {half[0]!r}, which has no tokens; remove it.")
        ids = self._tokenizer(text, add_special_tokens=self._add_special_tokens)["input_ids"]
        framing = self._framing(messages)
        # equal specials prove nothing if a content names one: a template may omit its own
        if self._specials_of(ids) != framing or any(self._replaced(turn, " ") != dict(turn) for turn in messages):
            dumped = json.dumps([*messages], ensure_ascii=False, default=str)
            first = self._names.search(dumped)
            name = first[0] if first else dumped[:60]
            ids = self._read_as_text(messages, text)
            if self._specials_of(ids) != framing:
                raise UserError(
                    f"a message has the text {name!r}, a special token that could begin or end a turn, and with this "
                    "chat template and tokenizer it cannot be tokenised as text; remove it from the message."
                    if first
                    else f"for the messages that begin with {name!r} the chat template writes other special tokens "
                    "than for plain words, and these could begin or end a turn; change the messages."
                )
            if not self._has_warned:
                logger.warning("A prompt or reply contains %r: it is tokenised as text, not as a special token.", name)
                self._has_warned = True
        return tuple(ids)

    def _render(self, messages: Messages) -> str:
        try:
            return self._template([*messages])
        except UserError:
            raise
        except Exception as error:  # a template is code from the model repository: it may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template cannot render messages of the roles {roles} ({sentence(error).rstrip('.')}); use a "
                "model whose template supports them."
            ) from error

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the rendered text leaves a thinking block (``<think>``) open, in which every response begins."""
        try:
            prompt = self._template([{"role": "user", "content": _PROBE}])
        except Exception:  # as in _render; the error is reported where a prompt needs the template
            return False
        return bool(opened_thinking(prompt.rpartition(_PROBE)[2]))

    def _specials_of(self, ids: Sequence[int]) -> list[int]:
        return [number for number in ids if number in self._special]

    def _framing(self, messages: Messages) -> list[int]:
        """Return the special tokens of a rendering with plain words in place of the contents."""

        def plain(name: str, value: Any) -> Any:
            if name == "content" and isinstance(value, str) and value.strip():
                return _PLAIN
            return self._replaced(value, " ")

        words = [{name: plain(name, value) for name, value in message.items()} for message in messages]
        key = json.dumps(words, default=str)
        if key not in self._framings:
            if len(self._framings) >= _MOST_FRAMINGS:
                self._framings.clear()
            ids = self._tokenizer(self._render(words), add_special_tokens=self._add_special_tokens)["input_ids"]
            self._framings[key] = self._specials_of(ids)
        return self._framings[key]

    def _replaced(self, value: Any, by: str | Callable[[re.Match[str]], str]) -> Any:
        """Return ``value`` with the names of special tokens replaced, in nested values too."""
        if isinstance(value, str):
            return self._names.sub(by, value)
        if isinstance(value, Mapping):
            return {self._replaced(name, by): self._replaced(item, by) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._replaced(item, by) for item in value]
        return value

    def _read_as_text(self, messages: Messages, text: str) -> list[int]:
        """Return ids of ``text`` with contents as text; [] if the template changes a special name in a content."""
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
        """A tokenizer copy with renamed special tokens, ``{its id: original id}``, and ``{original name: new name}``.

        The new names are random words, added as ordinary tokens: ``split_special_tokens`` does not split them.
        """
        reader, salt = copy.deepcopy(self._tokenizer), secrets.token_hex(8)
        words = {token.content: f"zq{salt}x{number}z" for number, token in self._special.items()}
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        reader.add_tokens(  # one call, because each rebuilds the index of all added tokens
            [
                AddedToken(words[token.content], special=False, **{flag: getattr(token, flag) for flag in flags})
                for token in self._special.values()
            ]
        )
        numbers = {reader.convert_tokens_to_ids(words[token.content]): at for at, token in self._special.items()}
        return reader, numbers, words


def prompt_tokens(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ChatTokens:
    """Return the tokens of prompts, up to the policy's turn; without a chat template, blank lines end the messages."""
    options = {"add_generation_prompt": True, "tokenize": False, **template_kwargs}
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return ChatTokens(tokenizer, partial(_prompt, tokenizer, options), add_special_tokens=not has_template)


def _prompt(tokenizer: Any, options: Mapping[str, Any], messages: Messages) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return _blank_lines(messages)
    return tokenizer.apply_chat_template(messages, **options)


def _blank_lines(messages: Messages) -> str:
    return "".join(f"{message['content']}\n\n" for message in messages)


class TurnTokens:
    """Renders and tokenises the text between two policy turns with the chat template and ``template_kwargs``.

    Without a chat template, blank lines separate a reply from the turns around it, as in prompts. If the template
    renders the role ``tool`` only after tool calls (Gemma 4, gpt-oss), calls precede the replies; if it cannot render
    that role at all, the role ``user`` replaces it, which is logged once.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> tokenizer.decode(TurnTokens(tokenizer).ids([{"role": "user", "content": "Again?"}], tokenizer.eos_token_id))
    '\\n<|im_start|>user\\nAgain?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._needs_calls = False  # whether the template renders the results of tools after calls only
        self._chat = ChatTokens(tokenizer, self._rendered)
        self._reply_ids = lru_cache(maxsize=1024)(self._tokenised)
        self._role_of = cache(self._supported)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tokenizer, self._template_kwargs)  # without the caches

    def text(self, token_ids: torch.Tensor) -> SampledText:
        """Return the text that graders read: the turn ``[R]`` decoded without end tokens and padding."""
        text = response_text(self._tokenizer, token_ids)
        return SampledText(text, token_ids.tolist(), thinks=self._chat.opens_thinking)

    def ids(self, replies: Messages, last_id: int) -> tuple[int, ...]:
        """Return the token ids between ``last_id``, the policy's last sampled token, and the policy's next turn.

        The template's end-of-turn token, and blanks before it, are omitted if the policy sampled that token.
        ``replies`` are messages with ``role`` (``user`` or ``tool``, else ValueError), ``content`` and perhaps ``name``
        and ``tool_call_id``. UserError if the template cannot render a conversation of several turns, or as
        by :meth:`ChatTokens.ids`.
        """
        is_short = sum(len(reply["content"]) for reply in replies) < _CACHED_CHARACTERS
        tokenised = self._reply_ids if is_short else self._tokenised
        ids = tokenised(tuple(tuple(reply.items()) for reply in replies))
        if last_id not in ids or last_id not in {ids[0], *end_token_ids(self._tokenizer)}:
            return ids
        end = ids.index(last_id)
        is_blank = not self._tokenizer.decode(ids[:end], skip_special_tokens=False).strip()
        return ids[end + 1 :] if is_blank else ids

    def _tokenised(self, replies: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        messages = [dict(items) for items in replies]
        for number, message in enumerate(messages):
            if message["role"] not in ("user", "tool"):
                raise ValueError(f"a reply has the role {message['role']!r}; use user or tool.")
            if self._has_template:
                message["role"] = self._role_of(message["role"])
            if message["role"] == "tool":
                message.setdefault("tool_call_id", call_id(number))  # a task's reply, without a tool call
        return self._chat.ids(messages)

    def _supported(self, role: str) -> str:
        """Return ``role``; or ``user`` if the template does not render the content of a ``tool`` message."""
        probe = {"role": role, "content": _PROBE}
        if role == "tool":
            probe |= {"name": _EARLIER, "tool_call_id": call_id(0)}
        for needs_calls in (False, True) if role == "tool" else (self._needs_calls,):
            self._needs_calls = needs_calls
            try:
                if _PROBE in self._rendered([probe]):
                    return role
                reason = "it omits the content"
            except Exception as error:  # a template is code from the model repository: it may raise anything
                reason = sentence(error).rstrip(".")
        if role == "tool":
            logger.info("The chat template has no tool messages (%s): tool results are sent as user messages.", reason)
            return self._role_of("user")
        raise UserError(
            f"The chat template cannot render a user turn after an assistant turn ({reason}); use env.max_steps=1, or "
            "a model whose template supports multi-turn conversations."
        )

    def _rendered(self, replies: Messages) -> str:
        if not self._has_template:
            return _blank_lines([{"content": f"\n\n{reply['content']}"} for reply in replies])
        before: list[dict[str, Any]] = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _EARLIER}]
        calls = [
            {
                "type": "function",
                "id": reply["tool_call_id"],
                "function": {"name": reply.get("name", "tool"), "arguments": {}},
            }
            for reply in replies
            if self._needs_calls and reply["role"] == "tool"
        ]
        if calls:
            before[1] |= {"content": "", "tool_calls": calls}
        text = self._applied([*before, *replies], add_generation_prompt=True)
        if not calls:
            return text.partition(_EARLIER)[2]
        turn = self._applied(before).rstrip()
        if not text.startswith(turn):
            raise ValueError("the results of tools change the text before them")
        ends = map(self._tokenizer.convert_ids_to_tokens, end_token_ids(self._tokenizer))
        return text[len(turn) - len(next(filter(turn.endswith, ends), "")) :]

    def _applied(self, messages: Messages, **options: Any) -> str:
        return self._tokenizer.apply_chat_template([*messages], tokenize=False, **options, **self._template_kwargs)


def opened_thinking(prompt: str) -> str:
    """Return the text that ends the thinking left open by ``prompt``, which is cut after its last message; else ''.

    >>> opened_thinking("<|assistant|><think>"), opened_thinking("<|assistant|><think></think>")
    ('</think>', '')
    """
    return next((ends for begins, ends in THINKING if prompt.rfind(begins) > prompt.rfind(ends)), "")


def num_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """Return the length of the common prefix of one or more sequences, of tokens or of characters.

    >>> num_shared([(1, 2, 3), (1, 2, 4, 5)]), num_shared(["<call>", "<call>"])
    (2, 6)
    """
    return next((at for at, tokens in enumerate(zip(*sequences)) if len({*tokens}) > 1), min(map(len, sequences)))
