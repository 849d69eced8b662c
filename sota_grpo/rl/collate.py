"""Samples as ragged rows, rows as padded batches, the weight of every token, and the split into micro-batches.

A response is one ragged row of a table (:mod:`sota_grpo.rl.table`). A prompt of two tokens and a response of three,
sampled by version 7 while version 8 was loaded::

    tokens.full               p   p   a   a   a
    masks.all_assistant_mask  .   .   x   x   x
    log_probs.full            0   0  -.4 -.1 -.9
    next.token_version       -1  -1   7   7   8      next.policy_version = 7

In an episode of several turns the mask is False on tokens of other roles, log-probs are 0 there and versions -1.

Three rows in (``p`` prompt, ``a`` assistant) under ``token``, so that each of the six ``a`` weighs 1/6::

    row 0   p p a a          loss_weight   0   0  1/6 1/6
    row 1   p a a a          loss_weight   0  1/6 1/6 1/6
    row 2   p p a            loss_weight   0   0  1/6

If rows 0 and 2 are siblings, ``micro_batches(rows, token_budget=8)`` is ``[[row 0, row 2], [row 1]]``: 5 packed
tokens, the prompt once, and 4. ``pad_rows`` of the three gives ``[3, 4]`` tensors, with weight 0 in the padding.
The weights are set once for a whole optimizer step, so the sums over the micro-batches do not depend on the split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sota_grpo import keys
from sota_grpo.functional.micro_batches import Aggregation, PromptGroup, fill, row_weights
from sota_grpo.policy.end_tokens import response_text
from sota_grpo.rl.records import Example, Sample
from sota_grpo.rl.table import Column, Key, Row, RowTable, in_place, row_list

# Keys of one value per token and their padding; the tokens themselves are padded with pad_token_id.
_PER_TOKEN: tuple[tuple[Key, float | bool], ...] = (
    (keys.ATTENTION_MASK, False),
    (keys.ASSISTANT_MASK, False),
    (keys.LOG_PROBS, 0.0),
    (keys.REF_LOG_PROBS, 0.0),
    (keys.PROXIMAL_LOG_PROBS, 0.0),
    (keys.LOSS_WEIGHT, 0.0),
    (keys.OBJECTIVE_MASK, False),
    (keys.TOKEN_VERSION, -1),
    (keys.SUPPORT_COUNTS, 0),
    (keys.SUPPORT_IDS, -1),  # in a width of its own
)
_PER_ROW: tuple[Key, ...] = (keys.ADVANTAGE, keys.GROUP_ID, keys.SAMPLE_ID, keys.POLICY_VERSION)


def drawn_entries(group_id: int, example: Example, prompt_ids: Sequence[int]) -> dict[Key, Any]:
    """Return the entries that a prompt ``[P]`` of this example, drawn as ``group_id``, has in each of its rows."""
    return {
        keys.QUERY: example.query,
        keys.ANSWER: example.answer,
        keys.EXTRA: json.dumps(dict(example.extra)),
        keys.GROUP_ID: torch.tensor(group_id),
        keys.PROMPT_TOKENS: torch.tensor(prompt_ids, dtype=torch.int64),
    }


def prompt_rows(group_id: int, example: Example, prompt_ids: Sequence[int], repeats: int) -> list[TensorDictBase]:
    """Return the ``repeats`` sibling rows of one prompt before sampling; sibling ``i`` has ``sample_id = i``."""
    table = _siblings(drawn_entries(group_id, example, prompt_ids), repeats)
    return row_list(table.stack())


def _siblings(drawn: Row, count: int) -> RowTable:
    columns = {key: Column.of([value] * count) for key, value in drawn.items()}
    return RowTable(count, columns | {keys.SAMPLE_ID: Column(torch.arange(count))})


def group_table(drawn: Row, samples: Sequence[Sample], tokenizer: Any) -> RowTable:
    """Return the rows of a sampled group: ids as they were sampled, masks, log-probs, versions, text, done.

    The text is decoded for grading and reading only; in an episode of several turns it is that of the last one. Off the
    assistant mask log-probs are 0 and versions -1.

    Args:
        drawn: of :func:`drawn_entries`.
        samples: responses ``[R_i]``; sample ``i`` becomes the row of ``sample_id = i``.
        tokenizer: decodes the responses without ``Sample.text``.
    """
    ids = drawn[keys.PROMPT_TOKENS]
    responses = [sample.token_ids for sample in samples]
    lengths = [len(ids) + len(response) for response in responses]

    def behind_prompt(prompt: Tensor, of_responses: Iterable[Tensor]) -> Tensor:
        return torch.cat([piece for response in of_responses for piece in (prompt, response)])

    off = torch.zeros_like(ids, dtype=torch.bool)
    masks = ((s.token_ids, s.assistant_mask) for s in samples)
    produced = behind_prompt(off, (torch.ones_like(i, dtype=torch.bool) if m is None else m for i, m in masks))
    log_probs = behind_prompt(off.float(), (sample.log_probs.float() for sample in samples))
    versions = behind_prompt(off.long(), (sample.versions.long() for sample in samples))
    versions = torch.where(produced, versions, -1)
    per_token = {
        keys.FULL_TOKENS: behind_prompt(ids, responses),
        keys.ATTENTION_MASK: torch.ones_like(produced),
        keys.ASSISTANT_MASK: produced,
        keys.LOG_PROBS: torch.where(produced, log_probs, 0.0),
        keys.TOKEN_VERSION: versions,
    }
    rows = _siblings(drawn, len(samples))
    rows.columns |= {key: Column(values, lengths) for key, values in per_token.items()}
    rows.columns[keys.RESPONSE_TOKENS] = Column(torch.cat(responses), list(map(len, responses)))
    none, ends = torch.iinfo(versions.dtype).max, list(accumulate(lengths, initial=0))
    known = torch.where(produced, versions, none).numpy()
    oldest = (known[start:end].min(initial=none) for start, end in pairwise(ends))
    rows.set(keys.POLICY_VERSION, torch.tensor([-1 if version == none else version for version in oldest]))
    for name, flags in done_entries(torch.tensor([sample.truncated for sample in samples])).items():
        rows.set(("next", name), flags)
    texts = [response_text(tokenizer, last_turn(one)) if one.text is None else one.text for one in samples]
    rows.set(keys.RESPONSE_TEXT, texts)
    rows.set(keys.DIALOG, [None if one.record is None else json.dumps(one.record) for one in samples])
    if any(sample.support is not None for sample in samples):
        rows.set(keys.SUPPORT_IDS, [one.support and one.support.ids for one in samples])
        rows.set(keys.SUPPORT_COUNTS, [one.support and torch.cat([off.int(), one.support.counts]) for one in samples])
    return rows


def finish_rows(prompt: TensorDictBase, samples: Sequence[Sample], tokenizer: Any) -> list[TensorDictBase]:
    """Return the rows of :func:`group_table` as TensorDicts, for a row of :func:`prompt_rows`."""
    (entries,) = RowTable.of([prompt]).rows()
    sampled = ("tokens", "masks", "log_probs", "text", "next")
    drawn = {key: value for key, value in entries.items() if key == keys.PROMPT_TOKENS or key[0] not in sampled}
    return row_list(group_table(drawn, samples, tokenizer).stack())


def last_turn(sample: Sample) -> Tensor:
    """Return the ids of the policy's last turn, which a grader reads."""
    if sample.assistant_mask is None:
        return sample.token_ids
    others = (~sample.assistant_mask).nonzero()
    return sample.token_ids[int(others[-1]) + 1 :] if len(others) else sample.token_ids


def done_entries(truncated: Tensor) -> dict[str, Tensor]:
    """Return ``done``, ``terminated`` and ``truncated``, each bool ``[G, 1]``, from ``truncated`` ``[G]``."""
    flags = {"done": torch.ones_like(truncated), "terminated": ~truncated, "truncated": truncated}
    return {name: flag.unsqueeze(1) for name, flag in flags.items()}


def response_ids(row: TensorDictBase) -> Tensor:
    """Return the response ``[R]``: ``tokens.response``, else ``tokens.full`` past the prompt, else KeyError."""
    response = row.get(keys.RESPONSE_TOKENS, None)
    if response is not None:
        return response
    full = row.get(keys.FULL_TOKENS, None)
    if full is None:
        raise KeyError("the policy wrote neither ('tokens', 'response') nor ('tokens', 'full'); the env grades tokens.")
    return full[..., row.get(keys.PROMPT_TOKENS).shape[-1] :]


def complete_rows(rows: TensorDictBase) -> TensorDictBase:
    """Write the entries that TorchRL's collector and LLM wrappers leave out of their rows, in place.

    TorchRL's wrappers give ``log_probs.response`` and no assistant mask in tokens mode; :class:`GRPOLoss` and
    ``collate`` read ``log_probs.full`` and ``masks.all_assistant_mask``. Use it as the collector's ``postproc``.
    ``TransformersWrapper`` of torchrl 0.14.1 drops padding tokens that were sampled.

    Args:
        rows: of any batch shape, lazily stacked where they are ragged: the collector's ``[N]``, or ``[N, 1]`` of
            ``env.rollout(1, policy)``, which the losses read after ``reshape(-1)``.

    >>> row = TensorDict({"tokens": {"prompt": torch.tensor([1, 2]), "response": torch.tensor([3])},
    ...                   "log_probs": {"response": torch.tensor([-0.5])}}, [])
    >>> complete_rows(row)["log_probs", "full"].tolist(), row["masks", "all_assistant_mask"].tolist()
    ([0.0, 0.0, -0.5], [False, False, True])
    """
    if isinstance(rows, LazyStackedTensorDict):
        for row in rows.tensordicts:  # what unbind gives may be copies
            complete_rows(row)
        return rows
    prompt, response = rows.get(keys.PROMPT_TOKENS), response_ids(rows)
    full = torch.cat([prompt, response], -1)
    assistant = torch.zeros_like(full, dtype=torch.bool)
    assistant[..., prompt.shape[-1] :] = True
    rows.set(keys.FULL_TOKENS, full)
    rows.set(keys.ATTENTION_MASK, torch.ones_like(assistant))
    rows.set(keys.ASSISTANT_MASK, assistant)
    sampled = rows.get(("log_probs", "response"), None)
    if sampled is not None:
        rows.set(keys.LOG_PROBS, torch.cat([sampled.new_zeros(prompt.shape), known_log_probs(sampled)], -1))
    return rows


def known_log_probs(sampled: Tensor) -> Tensor:
    """Return log-probs ``[.., R]`` of responses from TorchRL's wrappers, with NaN for a first one that is exactly 0.

    ``TransformersWrapper`` of torchrl 0.14.1 writes that 0 whatever the token's probability. :class:`GRPOLoss`, like
    TorchRL's own, and ``ReferenceKL`` leave out a token whose log-prob is NaN.
    """
    is_first = torch.arange(sampled.shape[-1], device=sampled.device) == 0
    return sampled.masked_fill(is_first & (sampled == 0), torch.nan)


@in_place
def set_loss_weights(
    rows: RowTable,
    aggregation: Aggregation,
    *,
    max_response_tokens: int | None = None,
    drop_truncated: bool = False,
) -> None:
    """Write ``loss_weight`` to the rows of one whole optimizer step, before any split; 0 off the assistant mask.

    Args:
        rows: the rows of the step, ragged or dense, which are returned.
        aggregation, max_response_tokens: see :func:`sota_grpo.functional.micro_batches.row_weights`.
        drop_truncated: responses that the engine stopped for length weigh 0 and count as rows without a trainable
            token (Yu et al. 2025, arXiv:2503.14476, section 3.4, overlong filtering).

    Raises:
        ValueError: an unknown aggregation, or ``constant`` without ``max_response_tokens``.

    >>> rows = [
    ...     TensorDict({"masks": {"all_assistant_mask": torch.tensor(m).bool()}})
    ...     for m in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1])
    ... ]
    >>> [round(1 / row["loss_weight"].max().item()) for row in set_loss_weights(rows, "sequence")]
    [6, 9, 3]
    """
    lengths = torch.stack([known_tokens(row).sum() for row in rows.rows(keys.ASSISTANT_MASK, keys.LOG_PROBS)])
    lengths = torch.where(graded_rows(rows), lengths, 0)
    if drop_truncated:
        lengths = torch.where(rows.get(keys.TRUNCATED).flatten(), 0, lengths)
    weights = row_weights(lengths, aggregation, max_response_tokens=max_response_tokens)
    masks = rows.cells(keys.ASSISTANT_MASK)
    rows.set(keys.LOSS_WEIGHT, [torch.where(mask, weight, 0.0) for mask, weight in zip(masks, weights, strict=True)])


def graded_rows(rows: RowTable) -> Tensor:
    """Whether a grader answered for each row, bool ``[N]``; True where the rows do not say."""
    error = rows.get(keys.REWARD_ERROR, None)
    return torch.ones(len(rows), dtype=torch.bool) if error is None else ~error.flatten()


def known_tokens(row: Row) -> Tensor:
    """Return the trained tokens, bool ``[T]``: those that the policy sampled under a finite log-prob."""
    mask, log_probs = row[keys.ASSISTANT_MASK], row.get(keys.LOG_PROBS, None)
    return mask if log_probs is None else mask & log_probs.isfinite()


def pad_rows(rows: Sequence[TensorDictBase] | Sequence[Row] | TensorDictBase, *, pad_token_id: int) -> TensorDict:
    """Return the rows as one dense batch, right-padded to the longest, with the keys that a learner reads and no text.

    Args:
        rows: at least one row, each with ``("tokens", "full")`` ``[T_i]``.
        pad_token_id: padding of the tokens; no mask covers it.

    Returns:
        TensorDict ``batch_size=[N]`` of ``[N, max T_i]`` sequences and of the rows' scalars.

    Raises:
        ValueError: there is no row, or only some rows have a key.

    >>> rows = [TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (2, 3)]
    >>> pad_rows(rows, pad_token_id=9)["tokens", "full"].tolist()
    [[0, 1, 9], [0, 1, 2]]
    """
    listed = row_list(rows)
    if not listed:
        raise ValueError("pad_rows got no rows; a batch needs at least one.")
    padded = TensorDict(batch_size=[len(listed)])
    for key, padding in ((keys.FULL_TOKENS, pad_token_id), *_PER_TOKEN, *dict.fromkeys(_PER_ROW).items()):
        values = [row.get(key, None) for row in listed]
        missing = [index for index, value in enumerate(values) if value is None]
        if len(missing) == len(values):
            continue
        if missing:
            raise ValueError(
                f"{key} is missing in {len(missing)} of {len(values)} rows (the first is row {missing[0]}); "
                "write it to all rows of a batch or to none."
            )
        padded.set(key, torch.stack(values) if padding is None else _padded(values, padding))
    return padded


def _padded(values: Sequence[Tensor], padding: float) -> Tensor:
    """Sequences ``[T_i]`` as ``[N, max T_i]``; on the CPU by numpy, which takes a tenth of torch's time per row."""
    if any(value.is_cuda or value.dtype == torch.bfloat16 or value.dim() != 1 for value in values):
        return pad_sequence(list(values), batch_first=True, padding_value=padding)
    rows = [value.numpy() for value in values]
    dense = np.full((len(rows), max(map(len, rows))), padding, rows[0].dtype)
    for target, row in zip(dense, rows):
        target[: len(row)] = row
    return torch.from_numpy(dense)


def unpad_rows(batch: TensorDictBase) -> TensorDictBase:
    """Return the inverse of :func:`pad_rows`: a lazy stack of ragged rows, cut where ``all_attention_mask`` is False.

    Entries ``[N, T, ...]`` are cut, others only split. ``("tokens", "prompt")`` and ``("tokens", "response")``, padded
    to other widths, are left out.
    """
    real = batch.get(keys.ATTENTION_MASK).bool()
    rows = []
    others = batch.exclude(keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS, keys.SUPPORT_IDS)
    for index, (mask, row) in enumerate(zip(real, others.unbind(0), strict=True)):
        cut = row.clone(recurse=False)
        for key, value in row.items(include_nested=True, leaves_only=True):
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == mask.shape[0]:
                cut.set(key, value[mask])
        if batch.get(keys.SUPPORT_IDS, None) is not None:
            cut.set(keys.SUPPORT_IDS, batch.get(keys.SUPPORT_IDS)[index, : int(row.get(keys.SUPPORT_COUNTS).sum())])
        rows.append(cut)
    return lazy_stack(rows, 0)


def micro_batches(
    rows: Sequence[TensorDictBase] | TensorDictBase, *, token_budget: int, shared_prompt: bool = True
) -> list[list[TensorDictBase]]:
    """Split rows into micro-batches of at most ``token_budget`` packed tokens, the heaviest first.

    A prompt counts once for the siblings of a micro-batch, which stay together as far as the budget allows; see
    :func:`~sota_grpo.functional.micro_batches.fill`. The heaviest comes first, so that a lack of memory shows at once.
    A row above the budget is a micro-batch of its own.

    Args:
        rows: ragged rows.
        token_budget: packed tokens of one micro-batch; below 1 it raises ``ValueError``.
        shared_prompt: False for a model that computes padded rows: the budget is then ``n * max T_i`` for n rows.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; a micro-batch needs room for at least 1 token.")
    listed = row_list(rows)
    prompts = row_prompts(listed)
    batches = filled(prompts, range(len(prompts)), token_budget=token_budget, shared_prompt=shared_prompt)
    return [[listed[index] for index in batch] for batch in batches]


def filled(
    prompts: Sequence[Prompt], chosen: Iterable[int], *, token_budget: int, shared_prompt: bool
) -> list[list[int]]:
    """Return the indices of the rows of each of :func:`micro_batches`, of the rows that are ``chosen``."""
    if shared_prompt:
        batches = fill(groups_by_prompt(prompts, chosen), token_budget=token_budget)
    else:
        alone = (PromptGroup((index,), 0, (prompts[index].tokens,)) for index in chosen)
        batches = fill(alone, token_budget=token_budget, slots_per_token=1)
    return [[index for piece in batch for index in piece.rows] for batch in batches]


class Prompt(NamedTuple):
    """The tokens before a row's first assistant token; without an assistant token, the whole row.

    ``response`` tokens follow it, of which ``sampled`` are trained on (:func:`known_tokens`).
    """

    text: bytes
    length: int
    response: int
    sampled: int = 0

    @property
    def tokens(self) -> int:
        return self.length + self.response


def row_prompts(rows: RowTable | Sequence[TensorDictBase] | Sequence[Row]) -> list[Prompt]:
    """The prompt of each row."""
    names = keys.ASSISTANT_MASK, keys.FULL_TOKENS
    listed: Any = rows.rows(*names, keys.LOG_PROBS) if isinstance(rows, RowTable) else rows
    prompts = []
    for row in listed:
        completion_mask, tokens = (row[name].cpu().numpy() for name in names)
        sampled = int(known_tokens(row).count_nonzero())
        length = int(completion_mask.argmax()) if completion_mask.any() else len(tokens)
        prompts.append(Prompt(tokens[:length].tobytes(), length, len(tokens) - length, sampled))
    return prompts


def groups_by_prompt(prompts: Sequence[Prompt], chosen: Iterable[int] | None = None) -> list[PromptGroup]:
    """Return the rows, or those that are ``chosen``, by the tokens of their prompt, in the order of their first."""
    members_of: dict[bytes, list[int]] = {}
    for index in range(len(prompts)) if chosen is None else chosen:
        members_of.setdefault(prompts[index].text, []).append(index)
    return [
        PromptGroup(tuple(members), prompts[members[0]].length, tuple(prompts[index].response for index in members))
        for members in members_of.values()
    ]
