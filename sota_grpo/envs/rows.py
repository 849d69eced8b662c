"""One row per response, ``batch_size=[]``, ragged: how it begins with a prompt and how a sampled response ends it.

Used by :class:`sota_grpo.envs.TaskEnv` and by the streaming collector alike. A prompt of two tokens and a response of
three, sampled by version 7 while version 8 landed::

    tokens.full               p   p   a   a   a
    masks.all_assistant_mask  .   .   x   x   x
    log_probs.full            0   0  -.4 -.1 -.9
    next.token_version       -1  -1   7   7   8      next.policy_version = 7

In a dialog of two turns, whose user turn ``u`` stands between what the policy said::

    tokens.full               p   p   a   a   u   u   a
    masks.all_assistant_mask  .   .   x   x   .   .   x
    log_probs.full            0   0  -.4 -.1  0   0  -.9
    next.token_version       -1  -1   7   7  -1  -1   8
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch.nn.functional import pad

from sota_grpo import keys
from sota_grpo.records import Example, Sample

_TRUE = torch.tensor([True])


def prompt_rows(group_id: int, example: Example, prompt_ids: Sequence[int], repeats: int) -> list[TensorDictBase]:
    """The ``repeats`` sibling rows of one drawn prompt, before anything is sampled.

    Args:
        group_id: unique per draw.
        example: the problem; its raw texts travel with the row.
        prompt_ids: the templated prompt ``[P]``.
        repeats: group size; sibling ``i`` gets ``sample_id = i``.

    >>> rows = prompt_rows(3, Example("1 + 1?", "2"), [5, 6, 7], repeats=2)
    >>> [(row["group_id"].item(), row["sample_id"].item(), row["tokens", "prompt"].tolist()) for row in rows]
    [(3, 0, [5, 6, 7]), (3, 1, [5, 6, 7])]
    """
    prompt = torch.tensor(prompt_ids, dtype=torch.int64)
    texts = {keys.QUERY: example.query, keys.ANSWER: example.answer, keys.EXTRA: json.dumps(dict(example.extra))}
    shared = {key: NonTensorData(text) for key, text in texts.items()}
    group = torch.tensor(group_id)
    return [
        TensorDict(
            {
                **shared,
                keys.GROUP_ID: group,
                keys.SAMPLE_ID: torch.tensor(index),
                "tokens": {"prompt": prompt},
            },
            batch_size=[],
        )
        for index in range(repeats)
    ]


def finish_row(row: TensorDictBase, sample: Sample, tokenizer: Any) -> TensorDictBase:
    """``row`` with its response: the ids as they were sampled, masks, log-probs, versions, text, done.

    The text is decoded for grading and reading only; nothing is ever tokenised again. In a dialog of several turns it
    is that of the last one, and off the assistant mask log-probs are 0 and versions -1 whatever ``sample`` has there.
    The result is a new row that shares the prompt's tensors and texts with ``row``.

    Args:
        row: of :func:`prompt_rows`.
        sample: the response ``[R]``, ``R >= 1``.
        tokenizer: decodes the response, special tokens left out.
    """
    prompt = row.get(keys.PROMPT_TOKENS)
    response = sample.token_ids
    past_prompt = (prompt.shape[0], 0)  # every entry starts with the prompt, where nothing was sampled
    attention = torch.ones(prompt.shape[0] + response.shape[0], dtype=torch.bool)
    produced = attention[prompt.shape[0] :] if sample.assistant_mask is None else sample.assistant_mask
    log_probs = torch.where(produced, sample.log_probs.float(), 0.0)
    versions = torch.where(produced, sample.versions.long(), -1)
    return TensorDict(
        {
            **dict(row.items()),
            "tokens": {"prompt": prompt, "response": response, "full": torch.cat([prompt, response])},
            "masks": {
                "all_attention_mask": attention,
                "all_assistant_mask": pad(produced, past_prompt, value=False),
            },
            "log_probs": {"full": pad(log_probs, past_prompt)},
            "text": {"response": NonTensorData(tokenizer.decode(last_turn(sample).tolist(), skip_special_tokens=True))},
            "next": {
                "token_version": pad(versions, past_prompt, value=-1),
                "policy_version": versions[produced].min(),
                **done_entries(sample.truncated),
            },
        },
        batch_size=[],
    )


def last_turn(sample: Sample) -> torch.Tensor:
    """The ids of the policy's last turn, which is what a grader reads; in a dialog of one turn, all of them.

    >>> ids, mask = torch.tensor([5, 6, 7, 8]), torch.tensor([True, False, True, True])
    >>> last_turn(Sample(ids, torch.zeros(4), torch.zeros(4), truncated=False, assistant_mask=mask)).tolist()
    [7, 8]
    """
    if sample.assistant_mask is None:
        return sample.token_ids
    others = (~sample.assistant_mask).nonzero()
    return sample.token_ids[int(others[-1]) + 1 :] if len(others) else sample.token_ids


def done_entries(truncated: bool) -> dict[str, torch.Tensor]:
    """``done``, ``terminated`` and ``truncated`` of a finished response, each bool ``[1]``.

    >>> {name: value.item() for name, value in done_entries(truncated=True).items()}
    {'done': True, 'terminated': False, 'truncated': True}
    """
    return {"done": _TRUE.clone(), "terminated": _TRUE & (not truncated), "truncated": _TRUE & truncated}


def response_ids(row: TensorDictBase) -> torch.Tensor:
    """The response ``[R]`` that a policy wrote: ``tokens.response``, else ``tokens.full`` past the prompt.

    Raises:
        KeyError: the policy wrote neither.
    """
    response = row.get(keys.RESPONSE_TOKENS, None)
    if response is not None:
        return response
    full = row.get(keys.FULL_TOKENS, None)
    if full is None:
        raise KeyError("the policy wrote neither ('tokens', 'response') nor ('tokens', 'full'); the env grades tokens.")
    return full[row.get(keys.PROMPT_TOKENS).shape[-1] :]


def complete_rows(rows: TensorDictBase) -> TensorDictBase:
    """Rows that TorchRL's own collector and LLM wrapper made, with what they leave out written in place.

    TorchRL's wrappers give ``log_probs.response`` and no assistant mask in tokens mode; :class:`GRPOLoss` and
    ``collate`` read ``log_probs.full`` and ``masks.all_assistant_mask``. Give it as the collector's ``postproc``.

    The log-probs are copied as they are, and ``TransformersWrapper`` of torchrl 0.14.1 writes 0 for the first token of
    every response and drops padding tokens that were sampled: train on proximal log-probs recomputed by the learner.

    Args:
        rows: lazily stacked rows of any batch shape.

    >>> row = TensorDict({"tokens": {"prompt": torch.tensor([1, 2]), "response": torch.tensor([3])},
    ...                   "log_probs": {"response": torch.tensor([-0.5])}}, [])
    >>> complete_rows(row)["log_probs", "full"].tolist(), row["masks", "all_assistant_mask"].tolist()
    ([0.0, 0.0, -0.5], [False, False, True])
    """
    if rows.batch_dims:
        for row in rows.unbind(0):
            complete_rows(row)
        return rows
    prompt, response = rows.get(keys.PROMPT_TOKENS), response_ids(rows)
    full = torch.cat([prompt, response])
    assistant = torch.zeros_like(full, dtype=torch.bool)
    assistant[prompt.shape[0] :] = True
    rows.set(keys.FULL_TOKENS, full)
    rows.set(keys.ATTENTION_MASK, torch.ones_like(assistant))
    rows.set(keys.ASSISTANT_MASK, assistant)
    sampled = rows.get(("log_probs", "response"), None)
    if sampled is not None:
        rows.set(keys.LOG_PROBS, torch.cat([sampled.new_zeros(prompt.shape[0]), sampled]))
    return rows
