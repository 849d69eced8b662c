"""The token ids between two turns of the policy: the end of its turn, what it is answered, the start of its next turn.

In a ChatML template, after the policy ended its turn with ``<|im_end|>`` itself, the reply ``Think again.`` is::

    sampled      ...  18  <|im_end|>
    inserted     \\n  <|im_start|>user  \\n  Think again.  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      I see, it is 19  <|im_end|>

What was sampled stays as it is, also where a template would render an earlier turn differently (without its thinking).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from sota_grpo.errors import UserError

logger = logging.getLogger(__name__)

_EARLIER = "earlierassistantturn"  # plain letters, which every template and every filter in it leaves alone
_PROBE = "laterturn"


class TurnTokens:
    """Reads the turns of a policy and writes the turns that answer them, as the chat template frames them.

    Without a chat template a reply stands between blank lines, as the turns of a prompt do. A template that cannot
    render the role ``tool`` is given a user turn instead, which is said once in the log.

    Args:
        tokenizer: of the policy.
        template_kwargs: further arguments of ``apply_chat_template``.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> tokenizer.decode(TurnTokens(tokenizer).ids({"role": "user", "content": "Again?"}, tokenizer.eos_token_id))
    '\\n<|im_start|>user\\nAgain?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._reply_ids = functools.lru_cache(maxsize=1024)(self._tokenised)
        self._role_of = functools.cache(self._supported)

    def text(self, token_ids: torch.Tensor) -> str:
        """One turn of the policy ``[R]`` as its grader reads it: special tokens left out."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def ids(self, reply: Mapping[str, str], last_id: int) -> tuple[int, ...]:
        """What stands between the policy's last token and its next turn.

        The end-of-turn token with which the template begins is left out where the policy has sampled it.

        Args:
            reply: ``role`` (``user`` or ``tool``) and ``content``. Names of special tokens in the content become
                those tokens, as in every chat template, so it should not repeat what a model wrote.
            last_id: last token that the policy sampled.

        Raises:
            UserError: the chat template cannot render a conversation of several turns.
        """
        ids = self._reply_ids(reply["role"], reply["content"])
        return ids[1:] if ids and ids[0] == last_id else ids

    def _tokenised(self, role: str, content: str) -> tuple[int, ...]:
        if role not in ("user", "tool"):
            raise ValueError(f"a reply has the role {role!r}; use user or tool.")
        text = f"\n\n{content}\n\n"
        if getattr(self._tokenizer, "chat_template", None):
            text = self._rendered(self._role_of(role), content)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _supported(self, role: str) -> str:
        """``role``, or ``user`` where the template does not show what a ``tool`` says."""
        try:
            if _PROBE in self._rendered(role, _PROBE):
                return role
            reason = "leaves it out"
        except Exception as error:  # a template is a program that came with the model: it raises what it likes
            reason = f"{type(error).__name__}: {error}"
        if role == "tool":
            logger.info("The chat template has no tool turns (%s): what a tool says is a user turn.", reason)
            return self._role_of("user")
        raise UserError(
            f"The chat template cannot render a user turn after an assistant turn ({reason}); use env.max_steps=1, or "
            "a model whose template is made for conversations."
        )

    def _rendered(self, role: str, content: str) -> str:
        conversation = [
            {"role": "user", "content": _PROBE},
            {"role": "assistant", "content": _EARLIER},
            {"role": role, "content": content},
        ]
        text = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        return text.partition(_EARLIER)[2]
