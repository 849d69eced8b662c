"""Texts that end a response (``inference_model.stop``), for engines that see ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sota_grpo.rl.records import GroupOutput, Sample

_MARGIN = 8  # tokens before a stop string's own bytes, so that it never begins where a decoder begins


class StopStrings:
    """Knows where a response has said one of ``texts``: it ends with the token that completes the first of them.

    That token is kept, with what else it says, as its log-prob and every one before it are those of what was sampled;
    such a response is not truncated. Special tokens count as what they are called.

    Args:
        tokenizer: of the policy.
        texts: none of them empty, nor with U+FFFD, which a half character is decoded to.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> stops, ids = StopStrings(tokenizer, ["is"]), tokenizer("it is not")["input_ids"]
    >>> tokenizer.decode(ids[: stops.end(ids)])
    'it is'
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self.window = max(len(text.encode()) for text in texts) + _MARGIN  # a token has a byte at least

    def _holds(self, ids: Sequence[int]) -> bool:
        # without the clean-up of spaces, text that has been said never changes any more, but for a half character
        said = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(text in said for text in self._texts)

    def completed(self, ids: Sequence[int]) -> bool:
        """Whether the last of ``ids`` has completed one, of a response that had not said one before.

        The last ``window`` of them will do.
        """
        return self._holds(ids[-self.window :])

    def end(self, ids: Sequence[int]) -> int | None:
        """The length of the shortest beginning of ``ids`` that says one; None where all of them say none."""
        return (
            bisect_left(range(len(ids)), True, key=lambda at: self._holds(ids[: at + 1])) + 1
            if self._holds(ids)
            else None
        )

    def cut(self, output: GroupOutput) -> GroupOutput:
        """A group whose responses end where they have to."""
        return replace(output, samples=tuple(map(self._cut, output.samples)))

    def _cut(self, sample: Sample) -> Sample:
        end = self.end(sample.token_ids.tolist())
        if end is None:
            return sample
        parts = {name: getattr(sample, name)[:end].clone() for name in ("token_ids", "log_probs", "versions")}
        kept = None if sample.kept is None else sample.kept.first(end)
        return replace(sample, **parts, kept=kept, truncated=False)
