"""Convert samples to ragged rows and rows to padded batches; set loss weights.

A response is one ragged row of a table (:mod:`sota_grpo.rl.table`). For example, a prompt of two tokens and a response
of three, during which the engine's weights were updated from version 7 to 8::

    tokens.full               p   p   a   a   a
    masks.all_assistant_mask  .   .   x   x   x
    log_probs.full            0   0  -.4 -.1 -.9
    next.token_version       -1  -1   7   7   8      next.policy_version = 7

In dialogs, tokens that the policy did not sample have mask False, log-prob 0 and version -1.

Loss weights of three rows (``p`` prompt, ``a`` assistant) with the aggregation ``token``, 1/6 for each of six ``a``::

    row 0   p p a a          loss_weight   0   0  1/6 1/6
    row 1   p a a a          loss_weight   0  1/6 1/6 1/6
    row 2   p p a            loss_weight   0   0  1/6

``pad_rows`` of the three gives ``[3, 4]`` tensors, with weight 0 in the padding. The weights are set once per optimizer
step, so sums over micro-batches do not depend on the split (:mod:`sota_grpo.rl.planner`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sota_grpo import keys
from sota_grpo.functional.loss_terms import Aggregation, row_weights
from sota_grpo.policy.causal import response_text
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
    (keys.PARENTS, -1),
    (keys.SUPPORT_COUNTS, 0),
    (keys.SUPPORT_IDS, -1),  # padded to a separate width
)
NO_MASK = "a row has no tokens.full or no masks.all_assistant_mask, which complete_rows writes on TorchRL's rows."
OPTIONAL = (keys.PARENTS, keys.SUPPORT_IDS, keys.SUPPORT_COUNTS)  # some rows of a batch may lack these
_PER_ROW: tuple[Key, ...] = (keys.ADVANTAGE, keys.GROUP_ID, keys.SAMPLE_ID, keys.POLICY_VERSION)


def drawn_entries(group_id: int, example: Example, prompt_ids: Sequence[int]) -> dict[Key, Any]:
    """Return the entries that all rows of a prompt share: texts, ``extra`` as JSON, group id and prompt token ids."""
    return {
        keys.QUERY: example.query,
        keys.ANSWER: example.answer,
        keys.EXTRA: json.dumps(dict(example.extra)),
        keys.GROUP_ID: torch.tensor(group_id),
        keys.PROMPT_TOKENS: torch.tensor(prompt_ids, dtype=torch.int64),
    }


def prompt_rows(group_id: int, example: Example, prompt_ids: Sequence[int], repeats: int) -> list[TensorDictBase]:
    """Return ``repeats`` rows of one prompt, without responses; row ``i`` has ``sample_id = i``."""
    drawn = drawn_entries(group_id, example, prompt_ids)
    table = RowTable.of([{**drawn, keys.SAMPLE_ID: torch.tensor(index)} for index in range(repeats)])
    return row_list(table.stack())


def group_table(drawn: Row, samples: Sequence[Sample], tokenizer: Any) -> RowTable:
    """Return the rows of a sampled group: token ids, masks, log-probs, versions, response text and done flags.

    The text is only for grading and display; in a multi-turn dialog it is that of the last turn. Where the assistant
    mask is False, log-probs are 0 and versions -1. ValueError if the ``parents`` of a sample begin after the prompt.

    Args:
        drawn: entries of the prompt, from :func:`drawn_entries`.
        samples: at least one response; ``samples[i]`` becomes the row with ``sample_id = i``.
        tokenizer: decodes the responses that have no ``Sample.text``.
    """
    ids = drawn[keys.PROMPT_TOKENS]
    responses = [sample.token_ids for sample in samples]
    lengths = [len(ids) + len(response) for response in responses]
    off = torch.zeros_like(ids, dtype=torch.bool)
    masks = ((s.token_ids, s.assistant_mask) for s in samples)
    pieces: dict[Key, tuple[Tensor, Iterable[Tensor]]] = {  # values of the prompt's tokens, and of each response's
        keys.FULL_TOKENS: (ids, responses),
        keys.ATTENTION_MASK: (~off, (torch.ones_like(response, dtype=torch.bool) for response in responses)),
        keys.ASSISTANT_MASK: (off, (torch.ones_like(i, dtype=torch.bool) if m is None else m for i, m in masks)),
        keys.LOG_PROBS: (off.float(), (sample.log_probs.float() for sample in samples)),
        keys.TOKEN_VERSION: (off.long(), (sample.versions.long() for sample in samples)),
    }
    per_token = {
        key: torch.cat([piece for response in of_responses for piece in (prompt, response)])
        for key, (prompt, of_responses) in pieces.items()
    }
    produced = per_token[keys.ASSISTANT_MASK]
    per_token[keys.LOG_PROBS] = torch.where(produced, per_token[keys.LOG_PROBS], 0.0)
    versions = per_token[keys.TOKEN_VERSION] = torch.where(produced, per_token[keys.TOKEN_VERSION], -1)
    rows = RowTable(len(samples), {key: Column.of([value] * len(samples)) for key, value in drawn.items()})
    rows.columns[keys.SAMPLE_ID] = Column(torch.arange(len(samples)))
    rows.columns |= {key: Column(values, lengths) for key, values in per_token.items()}
    rows.columns[keys.RESPONSE_TOKENS] = Column(torch.cat(responses), list(map(len, responses)))
    none, ends = torch.iinfo(versions.dtype).max, list(accumulate(lengths, initial=0))
    known = torch.where(produced, versions, none).numpy()
    oldest = (known[start:end].min(initial=none) for start, end in pairwise(ends))
    rows.set(keys.POLICY_VERSION, torch.tensor([-1 if version == none else version for version in oldest]))
    truncated = torch.tensor([[sample.truncated] for sample in samples])
    rows.set(keys.DONE, torch.ones_like(truncated))
    rows.set(keys.TERMINATED, ~truncated)
    rows.set(keys.TRUNCATED, truncated)
    texts = [response_text(tokenizer, last_turn(one)) if one.text is None else one.text for one in samples]
    rows.set(keys.RESPONSE_TEXT, texts)
    rows.set(keys.DIALOG, [None if one.record is None else json.dumps(one.record) for one in samples])
    if any(sample.parents is not None for sample in samples):
        rows.set(keys.PARENTS, [_parents(len(ids), sample) for sample in samples])
    if any(sample.support is not None for sample in samples):
        rows.set(keys.SUPPORT_IDS, [one.support and one.support.ids for one in samples])
        rows.set(keys.SUPPORT_COUNTS, [one.support and torch.cat([off.int(), one.support.counts]) for one in samples])
    return rows


def _parents(num_prompt_tokens: int, sample: Sample) -> Tensor:
    """Return the position of each token's predecessor in a sample's row, int64 ``[P + R]`` (``keys.PARENTS``)."""
    line = torch.arange(-1, num_prompt_tokens + len(sample.token_ids) - 1)
    if sample.parents is not None and len(sample.parents) and int(sample.parents[0]) >= num_prompt_tokens:
        raise ValueError("a sample's first parent is after the prompt; set GroupOutput.prompt_ids to its prompt")
    return line if sample.parents is None else torch.cat([line[:num_prompt_tokens], sample.parents])


def finish_rows(prompt: TensorDictBase, samples: Sequence[Sample], tokenizer: Any) -> list[TensorDictBase]:
    """Return one TensorDict per sample: its :func:`group_table` row, with the entries of a :func:`prompt_rows` row."""
    (entries,) = RowTable.of([prompt]).rows()
    sampled = ("tokens", "masks", "log_probs", "text", "next")
    drawn = {key: value for key, value in entries.items() if key == keys.PROMPT_TOKENS or key[0] not in sampled}
    return row_list(group_table(drawn, samples, tokenizer).stack())


def last_turn(sample: Sample) -> Tensor:
    """Return the token ids that graders read: all after the last one that the policy did not sample, or all."""
    if sample.assistant_mask is None:
        return sample.token_ids
    others = (~sample.assistant_mask).nonzero()
    return sample.token_ids[int(others[-1]) + 1 :] if len(others) else sample.token_ids


def response_ids(row: TensorDictBase) -> Tensor:
    """Return the response ``[R]``: ``tokens.response``, or ``tokens.full`` after the prompt; KeyError without both."""
    response = row.get(keys.RESPONSE_TOKENS, None)
    if response is not None:
        return response
    full = row.get(keys.FULL_TOKENS, None)
    if full is None:
        raise KeyError("the policy wrote neither ('tokens', 'response') nor ('tokens', 'full'); use tokens mode.")
    return full[..., row.get(keys.PROMPT_TOKENS).shape[-1] :]


def without_padding(row: TensorDictBase, values: Tensor) -> Tensor:
    """Return a response's ``values [R]`` without those of padding, which wrappers with ``pad_output=True`` write."""
    real = row.get(keys.ATTENTION_MASK, None)
    prompt = row.get(keys.PROMPT_TOKENS).shape[-1]
    is_whole = real is not None and real.shape[-1] == prompt + len(values)  # not a mask of the prompt alone
    return values[real[prompt:].bool()] if is_whole else values


def complete_rows(rows: TensorDictBase) -> TensorDictBase:
    """Add, in place, the entries that rows of TorchRL's collector and LLM wrappers lack; return the rows.

    The attention mask of wrappers with ``pad_output=True`` is kept, other masks are overwritten; a first log-prob of 0
    becomes NaN (:func:`known_log_probs`). KeyError if the rows have neither ``tokens.response`` nor ``tokens.full``.

    Use it as the collector's ``postproc``: :class:`GRPOLoss` and this module read ``log_probs.full`` and
    ``masks.all_assistant_mask``, but TorchRL's wrappers in tokens mode write ``log_probs.response`` and no such mask.
    (A bug of torchrl 0.14.1 remains: ``TransformersWrapper`` drops padding tokens that were sampled.)

    Args:
        rows: any batch shape; ragged rows are lazily stacked. A collector gives ``[N]``, ``env.rollout(1, policy)``
            ``[N, 1]``, which needs ``reshape(-1)`` before the losses.

    >>> row = TensorDict({"tokens": {"prompt": torch.tensor([1, 2]), "response": torch.tensor([3])},
    ...                   "log_probs": {"response": torch.tensor([-0.5])}}, [])
    >>> complete_rows(row)["log_probs", "full"].tolist(), row["masks", "all_assistant_mask"].tolist()
    ([0.0, 0.0, -0.5], [False, False, True])
    """
    if isinstance(rows, LazyStackedTensorDict):
        for row in rows.tensordicts:  # unbind may give copies
            complete_rows(row)
        return rows
    prompt, response = rows.get(keys.PROMPT_TOKENS), response_ids(rows)
    full, real = torch.cat([prompt, response], -1), rows.get(keys.ATTENTION_MASK, None)
    real = real.bool() if real is not None and real.shape == full.shape else torch.ones_like(full, dtype=torch.bool)
    assistant = real.clone()
    assistant[..., : prompt.shape[-1]] = False
    rows.set(keys.FULL_TOKENS, full)
    rows.set(keys.ATTENTION_MASK, real)
    rows.set(keys.ASSISTANT_MASK, assistant)
    sampled = rows.get(("log_probs", "response"), None)
    if sampled is not None:
        log_probs = torch.cat([sampled.new_zeros(prompt.shape), known_log_probs(sampled)], -1)
        rows.set(keys.LOG_PROBS, torch.where(assistant, log_probs, 0.0))
    return rows


def known_log_probs(sampled: Tensor) -> Tensor:
    """Return log-probs ``[.., R]`` of TorchRL's wrappers, with NaN instead of an exact 0 at the response's first token.

    ``TransformersWrapper`` of torchrl 0.14.1 always writes 0 there, whatever the token's probability. :class:`GRPOLoss`
    (like TorchRL's) and ``ReferenceKL`` ignore tokens whose log-prob is NaN.
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
    """Write ``loss_weight``, 0 outside the assistant mask, to all rows of an optimizer step in place; return the rows.

    Args:
        rows: all rows of the step, ragged or dense, not yet micro-batches; rows with a grader error get weight 0.
        aggregation, max_response_tokens: see :func:`sota_grpo.functional.loss_terms.row_weights`.
        drop_truncated: truncated responses get weight 0 and count as rows without trainable tokens (overlong
            filtering; Yu et al. 2025, arXiv:2503.14476, section 3.4); without ``("next", "truncated")`` none is.

    ValueError for an unknown aggregation, or ``constant`` without ``max_response_tokens``; KeyError without a mask.

    >>> rows = [
    ...     TensorDict({"masks": {"all_assistant_mask": torch.tensor(m).bool()}})
    ...     for m in ([0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1])
    ... ]
    >>> [round(1 / row["loss_weight"].max().item()) for row in set_loss_weights(rows, "sequence")]
    [6, 9, 3]
    """
    try:
        lengths = torch.stack([known_tokens(row).sum() for row in rows.rows(keys.ASSISTANT_MASK, keys.LOG_PROBS)])
    except KeyError as error:
        raise KeyError(NO_MASK) from error
    lengths = torch.where(graded_rows(rows), lengths, 0)
    if drop_truncated and (truncated := rows.get(keys.TRUNCATED)) is not None:
        lengths = torch.where(truncated.flatten(), 0, lengths)
    weights = row_weights(lengths, aggregation, max_response_tokens=max_response_tokens)
    masks = rows.cells(keys.ASSISTANT_MASK)
    rows.set(
        keys.LOSS_WEIGHT, [torch.where(mask.bool(), weight, 0.0) for mask, weight in zip(masks, weights, strict=True)]
    )


def graded_rows(rows: RowTable) -> Tensor:
    """Return bool ``[N]``: False for rows with a grader error; all True if the rows have no ``reward_error``."""
    error = rows.get(keys.REWARD_ERROR, None)
    return torch.ones(len(rows), dtype=torch.bool) if error is None else ~error.flatten()


def known_tokens(row: Row) -> Tensor:
    """Return a bool mask ``[T]`` of the tokens to train on: sampled by the policy, with a finite log-prob if known."""
    mask, log_probs = row[keys.ASSISTANT_MASK].bool(), row.get(keys.LOG_PROBS, None)
    return mask if log_probs is None else mask & log_probs.isfinite()


def pad_rows(rows: Sequence[TensorDictBase] | Sequence[Row] | TensorDictBase, *, pad_token_id: int) -> TensorDict:
    """Return rows as one dense batch, right-padded to the longest, with only the tensors that a learner reads.

    The TensorDict has ``batch_size=[N]``: sequences ``[N, max T_i]``, support ids ``[N, most of a row]`` and scalars
    per row. ValueError if there are no rows, or some rows lack a key that others have and that has no default.

    Args:
        rows: at least one row, each with ``("tokens", "full")`` ``[T_i]``.
        pad_token_id: token id of the padding, on which all masks are False.

    >>> rows = [TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (2, 3)]
    >>> pad_rows(rows, pad_token_id=9)["tokens", "full"].tolist()
    [[0, 1, 9], [0, 1, 2]]
    """
    listed = row_list(rows)
    if not listed:
        raise ValueError("pad_rows got no rows; a batch needs at least one.")
    return TensorDict(padded_entries(listed, pad_token_id), batch_size=[len(listed)])


def padded_entries(rows: Sequence[TensorDictBase] | Sequence[Row], pad_token_id: int) -> dict[Any, Tensor]:
    """Return the entries of :func:`pad_rows` by key, for at least one row; for ValueError see there."""
    paddings = ((keys.FULL_TOKENS, pad_token_id), *_PER_TOKEN, *dict.fromkeys(_PER_ROW, 0).items())
    entries = {key: padded_entry(rows, key, padding) for key, padding in paddings}
    return {key: values for key, values in entries.items() if values is not None}


def padded_entry(
    rows: Sequence[TensorDictBase] | Sequence[Row], key: Key, padding: float, side: Literal["left", "right"] = "right"
) -> Tensor | None:
    """Return an entry of all rows as one tensor, with padding on ``side`` where lengths differ; None if no row has it.

    It has the dtype that holds the values of all rows. ValueError if some rows lack it and have no default for it.
    """
    values = [row.get(key, None) for row in rows]
    missing = [index for index, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    for index in missing:
        values[index] = _absent(key, rows[index])
    missing = [index for index in missing if values[index] is None]
    if missing:
        raise ValueError(
            f"{key} is missing in {len(missing)} of {len(values)} rows (the first is row {missing[0]}); "
            "write it to all rows of a batch or to none."
        )
    if key in _PER_ROW and len({value.shape[:1] == (1,) for value in values}) > 1:
        raise ValueError(f"{key} has one number in some rows and one per token in others; write the same to all rows.")
    dtype = reduce(torch.promote_types, {value.dtype for value in values})  # torch and numpy would take the first row's
    values = [value.to(dtype) for value in values]
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    if any(value.is_cuda or value.dim() != 1 for value in values) or dtype == torch.bfloat16 or side == "left":
        return pad_sequence(values, batch_first=True, padding_value=padding, padding_side=side)
    arrays = [value.numpy() for value in values]  # ten times faster than torch
    dense = np.full((len(arrays), max(map(len, arrays))), padding, arrays[0].dtype)
    for target, array in zip(dense, arrays):
        target[: len(array)] = array
    return torch.from_numpy(dense)


def _absent(key: Key, row: Row) -> Tensor | None:
    """Return a missing entry's default: parents of a line, no support in a row without assistant tokens; else None."""
    mask = row.get(keys.ASSISTANT_MASK, None)
    if key == keys.PARENTS:
        return torch.arange(-1, len(row[keys.FULL_TOKENS]) - 1)
    if key not in OPTIONAL or mask is None or bool(mask.any()):
        return None
    return torch.zeros(0 if key == keys.SUPPORT_IDS else len(mask), dtype=torch.int32)


def require_plain(rows: Sequence[Row]) -> None:
    """Raise ValueError for rows of which TorchRL's wrappers give other log-probs: of truncated sampling, and trees."""
    kinds = {keys.SUPPORT_COUNTS: "were sampled by top-p, top-k or min-p", keys.PARENTS: "are trees of tokens"}
    for key, what in kinds.items():
        if any(row.get(key, None) is not None for row in rows):
            raise ValueError(
                f"The rows {what}, but TorchRL's wrappers compute log-probs over the whole vocabulary, of tokens in a "
                "line; use a CausalPolicy (FrozenReference for a reference)."
            )


def unpad_rows(batch: TensorDictBase) -> TensorDictBase:
    """Undo :func:`pad_rows`: return a lazy stack of rows without the positions where ``all_attention_mask`` is False.

    Entries ``[N, T, ...]`` and support ids are cut, others only split. ``("tokens", "prompt")`` and
    ``("tokens", "response")`` are dropped, because they are padded to other widths. KeyError without the mask.
    """
    if (real := batch.get(keys.ATTENTION_MASK, None)) is None:
        raise KeyError("the batch has no masks.all_attention_mask, so its padding is unknown; write it to the rows.")
    rows = []
    others = batch.exclude(keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS, keys.SUPPORT_IDS)
    for index, (mask, row) in enumerate(zip(real.bool(), others.unbind(0), strict=True)):
        cut = row.clone(recurse=False)
        for key, value in row.items(include_nested=True, leaves_only=True):
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == mask.shape[0]:
                cut.set(key, value[mask])
        if batch.get(keys.SUPPORT_IDS, None) is not None:
            cut.set(keys.SUPPORT_IDS, batch.get(keys.SUPPORT_IDS)[index, : int(row.get(keys.SUPPORT_COUNTS).sum())])
        rows.append(cut)
    return lazy_stack(rows, 0)
