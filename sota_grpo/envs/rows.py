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

from sota_grpo import keys
from sota_grpo.records import Example, Sample


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


def finish_rows(prompt: TensorDictBase, samples: Sequence[Sample], tokenizer: Any) -> list[TensorDictBase]:
    """The rows of a sampled group: ids as they were sampled, masks, log-probs, versions, text, done.

    The text is decoded for grading and reading only; nothing is ever tokenised again. In a dialog of several turns it
    is that of the last one, and off the assistant mask log-probs are 0 and versions -1 whatever a sample has there.

    The rows share the prompt's tensors and texts, and what has one value per token is computed for all rows as one
    tensor: their entries are views of it, side by side, which no other row can see.

    Args:
        prompt: a row of :func:`prompt_rows`; its siblings have the same prompt.
        samples: responses ``[R_i]``, ``R_i >= 1``; sample ``i`` becomes the row of ``sample_id = i``.
        tokenizer: decodes the responses, special tokens left out.

    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(chr(96 + i) for i in ids)
    >>> (prompt,) = prompt_rows(3, Example("1 + 1?", "2"), [5, 6], repeats=1)
    >>> ids = [torch.tensor([1]), torch.tensor([2, 3])]
    >>> samples = [Sample(each, -torch.ones(len(each)), torch.full((len(each),), 7), truncated=False) for each in ids]
    >>> [(row["tokens", "full"].tolist(), row["text", "response"]) for row in finish_rows(prompt, samples, Letters())]
    [([5, 6, 1], 'a'), ([5, 6, 2, 3], 'bc')]
    """
    ids = prompt.get(keys.PROMPT_TOKENS)
    tokens = _behind(ids, [sample.token_ids for sample in samples])
    produced, log_probs, versions = _sampled(ids.shape[0], samples)
    lengths = [len(sample.token_ids) + len(ids) for sample in samples]
    attention = torch.ones_like(tokens, dtype=torch.bool)
    by_row = zip(
        samples,
        torch.arange(len(samples)).unbind(0),
        *(each.split(lengths) for each in (tokens, attention, produced, log_probs, versions)),
        *done_entries(torch.tensor([sample.truncated for sample in samples])).values(),
        strict=True,
    )
    drawn = dict(prompt.items())
    rows: list[TensorDictBase] = []
    for sample, index, full, real, said, probs, version, done, terminated, truncated in by_row:
        text = tokenizer.decode(last_turn(sample), skip_special_tokens=True)
        row = {
            **drawn,
            keys.SAMPLE_ID: index,
            "tokens": {"prompt": ids, "response": sample.token_ids, "full": full},
            "masks": {"all_attention_mask": real, "all_assistant_mask": said},
            "log_probs": {"full": probs},
            "text": {"response": NonTensorData(text)},
            "next": {
                "token_version": version,
                "policy_version": _oldest(sample),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        }
        rows.append(TensorDict(row, batch_size=[]))
    return rows


def _behind(head: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``head`` before every part, one after the other: ``[sum(P + R_i)]``."""
    return torch.cat([piece for part in parts for piece in (head, part)])


def _sampled(num_prompt_tokens: int, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Assistant mask, log-probs and versions of all rows, one after the other, prompts included."""
    off = torch.zeros(num_prompt_tokens, dtype=torch.bool)
    masks = [sample.assistant_mask for sample in samples]
    whole = [torch.ones_like(s.token_ids, dtype=torch.bool) if m is None else m for s, m in zip(samples, masks)]
    produced = _behind(off, whole)
    log_probs = _behind(off.float(), [sample.log_probs.float() for sample in samples])
    versions = _behind(off.long(), [sample.versions.long() for sample in samples])
    return produced, torch.where(produced, log_probs, 0.0), torch.where(produced, versions, -1)


def _oldest(sample: Sample) -> torch.Tensor:
    """The version of the oldest token that the policy produced."""
    versions = sample.versions.long()
    return versions.min() if sample.assistant_mask is None else versions[sample.assistant_mask].min()


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


def done_entries(truncated: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """``done``, ``terminated`` and ``truncated`` of finished responses, each a bool ``[1]`` per response.

    Args:
        truncated: bool ``[G]``.

    >>> {name: [each.item() for each in found] for name, found in done_entries(torch.tensor([True, False])).items()}
    {'done': [True, True], 'terminated': [False, True], 'truncated': [True, False]}
    """
    found = {"done": torch.ones_like(truncated), "terminated": ~truncated, "truncated": truncated}
    return {name: each.unsqueeze(1).unbind(0) for name, each in found.items()}


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
