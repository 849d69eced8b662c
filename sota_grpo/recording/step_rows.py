"""Compute a step's metrics from its batch, and convert the batch to rows of ``rollouts.jsonl``."""

from __future__ import annotations

import json
import logging
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch

from sota_grpo import keys
from sota_grpo.recording.metrics import info_metric, is_number, term_metric
from sota_grpo.rl.records import TASK, Example, metric_tasks
from sota_grpo.rl.table import Row, RowTable

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
_NUMBERS = (
    *(keys.REWARD, keys.SUCCESS, keys.TRUNCATED, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.ADVANTAGE),
    keys.POLICY_VERSION,
)


def batch_metrics(batch: RowTable, version: int) -> dict[str, float]:
    """Return a batch's metrics, with ages from ``version`` (before the step); ValueError: see :func:`term_metric`."""
    lengths = batch.sums(keys.ASSISTANT_MASK).float()
    sampled = batch.flat(keys.ASSISTANT_MASK)  # each row begins with its prompt, so no turn crosses a boundary
    begins = sampled[1:] & ~sampled[:-1]
    if keys.PARENTS in batch.columns:  # a turn of another branch may follow one of the policy's in the row
        jumps = torch.cat([_jumps(row) for row in batch.rows(keys.ASSISTANT_MASK, keys.PARENTS)])
        begins = sampled[1:] & (~sampled[:-1] | jumps[1:])
    turns = begins.sum() / len(batch)
    prompts = torch.tensor([len(ids) for ids in batch.cells(keys.PROMPT_TOKENS)]).float()
    numbers = {key: batch.get(key).flatten().float() for key in _NUMBERS}
    reward, success, truncated = numbers[keys.REWARD], numbers[keys.SUCCESS], numbers[keys.TRUNCATED]
    versions = numbers[keys.POLICY_VERSION]
    age = version - versions.where(versions != -1, version)  # -1: an agent that made no request
    values = {
        "reward": reward.mean(),
        "reward/std": reward.std(correction=0),
        "success": success.mean(),
        "reward_errors": numbers[keys.REWARD_ERROR].sum(),
        "reward_timeouts": numbers[keys.REWARD_TIMEOUT].sum(),
        "advantage": numbers[keys.ADVANTAGE].abs().mean(),
        "truncated": truncated.mean(),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "prompt_tokens/mean": prompts.mean(),
        "turns/mean": turns,
        "turn_tokens/mean": lengths.mean() / turns.clamp(min=1 / len(batch)),  # 0 without a turn
        "policy_age/mean": age.mean(),
        "policy_age/max": age.max(),
    }
    if keys.SUPPORT_COUNTS in batch.columns:
        values["kept_tokens"] = batch.flat(keys.SUPPORT_COUNTS).sum() / sampled.sum().clamp(min=1)
    means = {name: float(value) for name, value in values.items()}
    for name in sorted(batch.names(keys.REWARD_TERMS)):
        terms = batch.columns[*keys.REWARD_TERMS, name].cells()  # of the responses to which the term applies
        means[term_metric(name)] = statistics.fmean(map(float, terms))
    rows = batch.rows(keys.EXTRA, keys.REWARD_INFO)
    extras = _extras(rows)
    infos: dict[str, list[float]] = {}
    named: dict[str, str] = {}  # the grader's name of each metric
    for row, extra in zip(rows, extras, strict=True):
        for name, value in json.loads(row[keys.REWARD_INFO], parse_constant=str).items():
            if not is_number(value):
                continue
            metric = info_metric(name, extra.get(TASK))
            if (first := named.setdefault(metric, name)) == name:
                infos.setdefault(metric, []).append(float(value))
            else:
                _warn_of_one_name(metric, first, name)
    means |= {name: statistics.fmean(infos[name]) for name in sorted(infos)}
    columns = {"reward": reward, "success": success, "truncated": truncated, "response_tokens": lengths}
    tasks = [metric_tasks(extra) for extra in extras]
    for task in sorted({task for names in tasks for task in names}):
        mask = torch.tensor([task in names for names in tasks])
        means |= {f"task/{task}/{name}": float(column[mask].mean()) for name, column in columns.items()}
        means[f"task/{task}/responses"] = float(mask.sum())
    return means


@lru_cache
def _warn_of_one_name(metric: str, logged: str, name: str) -> None:
    """Log, once per process, that a grader's number ``name`` has no metric, because ``logged`` has its name."""
    logger.warning("%s is the grader's %r; its %r would have that name: rename one to log both.", metric, logged, name)


def _jumps(row: Row) -> torch.Tensor:
    """Return bool ``[T]``: tokens of a tree that do not follow the token before them in the row."""
    line = torch.arange(-1, len(row[keys.ASSISTANT_MASK]) - 1)
    return row[keys.PARENTS] != line if keys.PARENTS in row else torch.zeros_like(line, dtype=torch.bool)


def _extras(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """Return ``Example.extra`` of each row; equal JSON texts in consecutive rows are parsed once."""
    read = lru_cache(maxsize=1)(json.loads)
    return [read(row[keys.EXTRA]) if keys.EXTRA in row else {} for row in rows]


def rollout_rows(
    batch: RowTable, tokenizer: Any, messages: Callable[[Example], Messages] | None = None
) -> list[dict[str, Any]]:
    """Return a row of ``rollouts.jsonl`` per response; ``messages`` (``Task.messages``): of each dialog's prompt."""
    prompts: dict[int, str] = {}
    plain: list[dict[str, Any]] = []
    rows = batch.rows()
    for row, extra in zip(rows, _extras(rows), strict=True):
        group_id = int(row[keys.GROUP_ID])
        if group_id not in prompts:
            prompts[group_id] = tokenizer.decode(row[keys.PROMPT_TOKENS])
        response = row[keys.RESPONSE_TOKENS]
        at_one_go = bool(row[keys.ASSISTANT_MASK][len(row[keys.ASSISTANT_MASK]) - len(response) :].all())
        plain.append(
            {
                "group_id": group_id,
                "sample_id": int(row[keys.SAMPLE_ID]),
                "query": row[keys.QUERY],
                "answer": row[keys.ANSWER],
                "prompt": prompts[group_id],
                # the graded text; with user or tool turns, the decoded tokens, special tokens included
                "response": row[keys.RESPONSE_TEXT] if at_one_go else tokenizer.decode(response),
                "response_tokens": int(row[keys.ASSISTANT_MASK].sum()),
                "success": bool(row[keys.SUCCESS]),
                "reward": float(row[keys.REWARD]),
                "reward_terms": {key[-1]: float(term) for key, term in row.items() if key[:-1] == keys.REWARD_TERMS},
                "reward_info": json.loads(row[keys.REWARD_INFO], parse_constant=str),  # without NaN: the logs are JSON
                "advantage": float(row[keys.ADVANTAGE]),
                "truncated": bool(row[keys.TRUNCATED]),
                "policy_version": int(row[keys.POLICY_VERSION]),
            }
        )
        if tasks := metric_tasks(extra):
            plain[-1]["task"] = tasks[-1]
        if not at_one_go or keys.DIALOG in row:
            dialog, example = dialog_of(row, tokenizer), Example(row[keys.QUERY], row[keys.ANSWER], extra)
            plain[-1]["dialog"] = dialog if messages is None else {"prompt": messages(example), **dialog}
    return plain


def dialog_of(row: Row, tokenizer: Any) -> dict[str, Any]:
    """Return the turns of a dialog after its prompt.

    ``turns``, in token order, have ``role``, ``trained`` (sampled from the policy; others are masked out of the loss),
    ``tokens`` (their number), ``text`` (with special tokens) and, for tool calls outside a tree, ``calls``: a list with
    ``name``, ``arguments``, ``reply`` (or None) and ``error`` (whether the call failed). In a tree, only a turn that
    does not follow the turn before it has ``after``: the index (from 0) of the turn that it follows, -1: it follows the
    prompt, -2: it follows nothing.
    With tools or an agent, ``ended`` is why the dialog ended, ``error`` why its environment or agent failed.

    Three tokens of the policy, two of a tool, one of the policy::

        mask    1 1 1 0 0 1
        turns   assistant 3, tool 2, assistant 1
    """
    ids = row[keys.RESPONSE_TOKENS]
    start, before = 0, len(row[keys.ASSISTANT_MASK]) - len(ids)
    sampled, jumps = row[keys.ASSISTANT_MASK][before:], _jumps(row)[before:]
    record = json.loads(row[keys.DIALOG], parse_constant=str) if keys.DIALOG in row else {}
    turns: list[dict[str, Any]] = []
    of_turns = record if keys.PARENTS not in row else {}  # the messages of a tree are those of one branch
    calls_and_replies, replied = iter(_calls(of_turns)), ["user"]  # turns before the policy's first are a user's
    ends: list[int] = []
    for (trained, _), run in groupby(zip(sampled.tolist(), jumps.cumsum(0).tolist())):
        count = len(list(run))
        text = tokenizer.decode(ids[start : start + count])
        turn = {"role": "assistant", "trained": trained, "tokens": count, "text": text}
        if jumps[start]:
            parent = int(row[keys.PARENTS][before + start])
            turn["after"] = bisect_right(ends, parent - before) if parent >= before else -1 if parent >= 0 else -2
        if trained:
            calls, replied = next(calls_and_replies, ([], []))
            turn |= {"calls": calls} if calls else {}
        else:
            turn["role"] = " and ".join(dict.fromkeys(replied)) or ("context" if keys.PARENTS in row else "unknown")
        turns.append(turn)
        start += count
        ends.append(start)
    ended = {name: record[name] for name in ("ended", "error") if name in record}
    return {"turns": turns, **ended}


def _calls(record: Mapping[str, Any]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Yield (tool calls, roles of the replies) for each turn of the policy."""
    for replies in record.get("replies", ()):
        yield [], [reply["role"] for reply in replies]
    messages, failed = record.get("messages", ()), set(record.get("failed", ()))
    at = 0
    while at < len(messages):
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        called = [call["function"] for call in messages[at].get("tool_calls", ())]
        answers = [(messages[i]["content"], i in failed) for i in range(at + 1, end)]
        answers += [(None, False)] * (len(called) - len(answers))
        yield (
            [{**call, "reply": reply, "error": error} for call, (reply, error) in zip(called, answers)],
            [message["role"] for message in messages[at + 1 : end]],
        )
        at = end
