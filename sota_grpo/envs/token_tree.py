"""The token sequences of all requests of one sample, as a tree that stores shared prefixes once.

Two requests with the prompt ``p q``, answered with ``a b`` and ``c``; a third continues the first with ``r`` and is
answered with ``d``::

    position   0  1  2  3  4  5  6
    token      p  q  a  b  c  r  d
    parent    -1  0  1  2  1  3  5
    sampled    .  .  x  x  x  .  x

A prompt shares the tokens of its longest prefix that is already in the tree, sampled or not. Sampled tokens are always
added, so that every sampled token is trained once, with the log-prob that it was sampled with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sota_grpo.rl.records import Sample, SamplingSupport


class TokenTree:
    """The prompts and responses of one sample as a tree of tokens, numbered as added; :meth:`sample` exports it.

    >>> tree, said = TokenTree(), Sample(torch.tensor([7, 8]), torch.zeros(2), torch.zeros(2), False)
    >>> end = tree.add_response(tree.add_prompt([5, 6]), said)
    >>> tree.path(end), tree.add_prompt([5, 6, 7, 9]), tree.path(4)
    ([5, 6, 7, 8], 4, [5, 6, 7, 9])
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # (parent, token): the first position of such a token
        self._responses: dict[int, Sample] = {}  # by their first position
        self.num_sampled = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add_prompt(self, token_ids: Sequence[int]) -> int:
        """Add a prompt, except its longest prefix in the tree; return its last token's position, -1 without tokens."""
        node = -1
        for token in token_ids:
            known = self._children.get((node, token))
            node = self._append(token, node) if known is None else known
        return node

    def add_response(self, node: int, response: Sample) -> int:
        """Add sampled tokens after position ``node``; return the position of the last one, ``node`` if none."""
        if len(response.token_ids):
            self._responses[len(self._tokens)] = response
            self.num_sampled += len(response.token_ids)
        for token in response.token_ids.tolist():
            node = self._append(token, node)
        return node

    def _append(self, token: int, parent: int) -> int:
        position = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._children.setdefault((parent, token), position)
        return position

    def path(self, node: int) -> list[int]:
        """Return the token ids from the root to position ``node``; empty for -1."""
        ids = []
        while node >= 0:
            ids.append(self._tokens[node])
            node = self._parents[node]
        return ids[::-1]

    @property
    def prompt(self) -> list[int]:
        """Token ids of the first prompt up to the first sampled token or fork; empty if nothing was sampled."""
        end = min(self._responses, default=0)
        line = (at for at, parent in enumerate(self._parents) if parent != at - 1)
        return self._tokens[: min(end, next(line, end))]

    def sample(self, common: int, *, truncated: bool = False, record: Mapping[str, Any] | None = None) -> Sample:
        """Return the tree as a sample: all tokens except the first ``common``, which are the group's prompt.

        Unsampled tokens without a sampled descendant are left out. ``parents`` are positions in prompt plus sample.
        """
        size = len(self._tokens)
        tokens, parents = (torch.tensor(values, dtype=torch.int64) for values in (self._tokens, self._parents))
        sampled, log_probs, versions = torch.zeros(size, dtype=torch.bool), torch.zeros(size), torch.full((size,), -1)
        counts, supports = torch.zeros(size, dtype=torch.int32), list[torch.Tensor]()
        for start, response in sorted(self._responses.items()):
            span = slice(start, start + len(response.token_ids))
            sampled[span], log_probs[span], versions[span] = True, response.log_probs, response.versions
            if response.support is not None:
                counts[span] = response.support.counts
                supports.append(response.support.ids)
        kept = [at < common or is_sampled for at, is_sampled in enumerate(sampled.tolist())]
        for at in range(size - 1, 0, -1):
            if kept[at] and self._parents[at] >= 0:
                kept[self._parents[at]] = True
        chosen = torch.tensor(kept, dtype=torch.bool)
        new = chosen.cumsum(0) - 1  # position among the tokens that are kept
        chosen[:common] = False
        return Sample(
            token_ids=tokens[chosen],
            log_probs=log_probs[chosen],
            versions=versions[chosen],
            truncated=truncated,
            assistant_mask=sampled[chosen],
            record=record,
            support=SamplingSupport(torch.cat(supports), counts[chosen]) if supports else None,
            parents=torch.where(parents < 0, -1, new[parents])[chosen],
        )
