"""What is taken off a reward: the KL to the reference, and the length of a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from sota_grpo import keys
from sota_grpo.collate import micro_batches, pad_rows, row_list, write_rows
from sota_grpo.functional.weighting import soft_overlong_penalty
from sota_grpo.transforms.base import RowTransform


class ReferenceKL(RowTransform):
    """Log-probs of the sampled tokens under the reference, and, if asked, the KL as part of the reward.

    Writes ``("next", "ref_log_probs", "full")`` (``[T_i]`` per row, 0 off the assistant mask). With a coefficient the
    reward becomes ``r - coeff * sum_t (logp_t - ref_t)``, k1 of the assistant tokens, ``logp`` of the behaviour policy;
    what was subtracted stays beside it as the reward term ``kl``.

    Args:
        reference: right-padded rows in (:func:`sota_grpo.collate.pad_rows`), log-probs ``[N, T]`` out; no gradient.
        in_reward_coeff: None leaves the reward alone.
        pad_token_id: padding of the tokens.
        token_budget: packed tokens of one forward pass; padded ones where ``reference.shared_prompt`` is False.

    Raises:
        ValueError: if the reference gives a log-prob that is not finite for a trainable token.

    Sources: in the reward, Ouyang et al. 2022 (arXiv:2203.02155, eq. 2); in the loss, Shao et al. 2024 (eq. 3, 4).

    >>> from tensordict import TensorDict
    >>> rows = TensorDict({
    ...     "tokens": {"full": torch.tensor([[4, 5, 6]])}, "log_probs": {"full": torch.tensor([[0.0, -1.0, -2.0]])},
    ...     "masks": {"all_assistant_mask": torch.tensor([[False, True, True]])}, "next": {"reward": torch.ones(1, 1)},
    ... }, [1])
    >>> reference = lambda padded: torch.full(padded["tokens", "full"].shape, -3.0)
    >>> rows = ReferenceKL(reference, in_reward_coeff=0.1, pad_token_id=0, token_budget=64)(rows)
    >>> rows["next", "ref_log_probs", "full"].tolist(), round(rows["next", "reward"].item(), 4)  # 1 - 0.1 * (2 + 1)
    ([[0.0, -3.0, -3.0]], 0.7)
    """

    written_key = keys.REF_LOG_PROBS

    def __init__(
        self,
        reference: Callable[[TensorDictBase], Tensor],
        *,
        in_reward_coeff: float | None = None,
        pad_token_id: int,
        token_budget: int,
        shared_prompt: bool = True,
    ) -> None:
        reads: list[NestedKey] = [keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK]
        writes: list[NestedKey] = [keys.REF_LOG_PROBS]
        if in_reward_coeff is not None:
            reads += [keys.LOG_PROBS, keys.REWARD]
            writes += [keys.REWARD, keys.KL_TERM, keys.GRADED_REWARD]
        super().__init__(in_keys=reads, out_keys=writes)
        self.reference, self.in_reward_coeff = reference, in_reward_coeff
        self.pad_token_id, self.token_budget, self.shared_prompt = pad_token_id, token_budget, shared_prompt

    def _write(self, rows: TensorDictBase) -> None:
        found = reference_log_probs(
            self.reference,
            row_list(rows),
            pad_token_id=self.pad_token_id,
            token_budget=self.token_budget,
            shared_prompt=self.shared_prompt,
        )
        write_reference(rows, found, in_reward_coeff=self.in_reward_coeff)


@torch.no_grad()
def reference_log_probs(
    reference: Callable[[TensorDictBase], Tensor],
    rows: Sequence[TensorDictBase],
    *,
    pad_token_id: int,
    token_budget: int,
    shared_prompt: bool = True,
) -> list[Tensor]:
    """The reference's log-probs of every row, f32 ``[T_i]``, 0 off the assistant mask, on the device of the row.

    Args:
        reference: right-padded rows in, ``[N, T]`` out.
        rows: ragged rows.
        pad_token_id: padding of the tokens.
        token_budget: packed tokens of one forward pass.
        shared_prompt: whether the reference computes packed rows; see :func:`sota_grpo.collate.micro_batches`.
    """
    found = dict[int, Tensor]()
    for part in micro_batches(rows, token_budget=token_budget, shared_prompt=shared_prompt):
        log_probs = reference(pad_rows(part, pad_token_id=pad_token_id))
        for row, values in zip(part, log_probs, strict=True):
            mask = row.get(keys.ASSISTANT_MASK)
            own = values[: mask.shape[0]].detach().to(mask.device, torch.float32)
            found[id(row)] = torch.where(mask, own, 0.0)
    return [found[id(row)] for row in rows]


def write_reference(rows: TensorDictBase, log_probs: Sequence[Tensor], *, in_reward_coeff: float | None) -> None:
    """Write the reference's log-probs, one ``[T_i]`` per row, and what follows from them: see :class:`ReferenceKL`.

    Raises:
        ValueError: a log-prob is not finite.
    """
    if not all(bool(values.isfinite().all()) for values in log_probs):
        raise ValueError("the reference gave a log-prob that is not finite for a trainable token; check its weights.")
    write_rows(rows, keys.REF_LOG_PROBS, log_probs)
    if in_reward_coeff is None:
        return
    gaps = [
        torch.where(row.get(keys.ASSISTANT_MASK), row.get(keys.LOG_PROBS) - ref, 0.0).sum()
        for row, ref in zip(row_list(rows), log_probs, strict=True)
    ]
    reward = rows.get(keys.REWARD)
    penalty = -in_reward_coeff * torch.stack(gaps).reshape(reward.shape)
    rows.set(keys.KL_TERM, penalty)
    rows.set(keys.GRADED_REWARD, reward.clone())
    rows.set(keys.REWARD, reward + penalty)


class OverlongPenalty(RowTransform):
    """DAPO's soft length penalty, added to the reward and kept as a term of its own.

    0 up to ``max_tokens - buffer_tokens`` response tokens, then linearly to ``-weight`` at ``max_tokens``. Writes
    ``("next", "reward_terms", "overlong")``, in [-1, 0].

    Args:
        max_tokens, buffer_tokens: see :func:`sota_grpo.functional.weighting.soft_overlong_penalty`.
        weight: what the term weighs in the reward.

    Raises:
        ValueError: if the buffer is not 1 to ``max_tokens`` tokens.

    Source: Yu et al. 2025 (arXiv:2503.14476, eq. 13).

    >>> from tensordict import TensorDict
    >>> masks, reward = {"all_assistant_mask": torch.ones(1, 9).bool()}, {"reward": torch.ones(1, 1)}
    >>> rows = TensorDict({"masks": masks, "next": reward}, [1])
    >>> OverlongPenalty(max_tokens=10, buffer_tokens=4)(rows)["next", "reward"].tolist()
    [[0.25]]
    """

    written_key = (*keys.REWARD_TERMS, "overlong")

    def __init__(self, max_tokens: int, buffer_tokens: int, *, weight: float = 1.0) -> None:
        super().__init__(in_keys=[keys.ASSISTANT_MASK, keys.REWARD], out_keys=[keys.REWARD, self.written_key])
        soft_overlong_penalty(torch.zeros(1), max_tokens, buffer_tokens)  # refuse impossible numbers at once
        self.max_tokens, self.buffer_tokens, self.weight = max_tokens, buffer_tokens, weight

    def _write(self, rows: TensorDictBase) -> None:
        lengths = torch.stack([row.get(keys.ASSISTANT_MASK).sum() for row in row_list(rows)])
        reward = rows.get(keys.REWARD)
        penalty = soft_overlong_penalty(lengths, self.max_tokens, self.buffer_tokens).reshape(reward.shape)
        rows.set(self.written_key, penalty)
        rows.set(keys.REWARD, reward + self.weight * penalty)
