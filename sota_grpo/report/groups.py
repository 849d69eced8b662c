"""The groups in a report: all responses with tokens from stored steps, best and worst from ``rollouts.jsonl``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import ROLLOUTS_FILE, STEPS_FOLDER, dicts, json_line, whole_lines
from sota_grpo.report.data import RunData, clipped, number, safe_json, shown
from sota_grpo.untrusted import open_file

_FIRST, _LAST = 2_500, 500  # tokens shown of a longer response: the first and the last
_DIGITS = 3
_OVERFLOW = 700.0  # largest argument of exp
_MISFITS = 50  # successive groups over the budget, after which the rest is skipped, and no more files are read
_STEP_BYTES = 400_000  # of all groups of one stored step
_MOST_TURNS, _MOST_CALLS = 200, 50  # per dialog and per turn; runs write far fewer
_MOST_NAME = 100

Group = dict[str, Any]  # see plain_group
GroupKey = tuple[int, int]  # step and group
Line = tuple[int, int, int]  # number, offset in the file, size in bytes


def token_columns(row: Mapping[str, Any], estimator: str) -> dict[str, Any] | None:
    """Return lists of values per token after the prompt, or None if the row has no tokens.

    ``pieces``: the text; ``said``: 1 for the policy's tokens, else 0 (missing if all are the policy's); ``ratio``,
    ``kl``, ``entropy``: missing if not stored, None for other tokens than the policy's. Of more than 3,000 tokens the
    middle is left out; ``gap`` is [its position from 0, its number of tokens]. ``estimator``: of the KL; unknown: k3.

    >>> row = {"pieces": ["4", "2"], "assistant": [True, True], "log_probs": [-1.0, -2.0],
    ...        "policy_log_probs": [-1.0, -1.5], "ref_log_probs": None, "entropy": [0.5, 1.0]}
    >>> token_columns(row, "k3")
    {'pieces': ['4', '2'], 'ratio': [1, 1.65], 'entropy': [0.5, 1]}
    """
    pieces, sampled = row.get("pieces"), row.get("assistant")
    if not pieces or sampled is None:
        return None
    behaviour, policy, reference = (row.get(name) for name in ("log_probs", "policy_log_probs", "ref_log_probs"))
    figures = {"ratio": None, "entropy": row.get("entropy"), "kl": None}
    if policy is not None and behaviour is not None:
        figures["ratio"] = [math.exp(min(new - old, _OVERFLOW)) for new, old in zip(policy, behaviour)]
    newest = policy or behaviour
    if newest is not None and reference is not None:
        import torch

        from sota_grpo.functional.loss_terms import KL_ESTIMATORS, kl_k3

        pair = torch.tensor([newest, reference], dtype=torch.float64)
        figures["kl"] = KL_ESTIMATORS.get(estimator, kl_k3)(*pair).tolist()
    columns: dict[str, Any] = {"pieces": _ends(pieces)}
    if not all(sampled):
        columns["said"] = _ends([int(flag) for flag in sampled])
    for name, values in figures.items():
        if values is not None:
            columns[name] = _ends([number(value, _DIGITS) if wrote else None for value, wrote in zip(values, sampled)])
    left = len(pieces) - _FIRST - _LAST
    return columns | ({"gap": [_FIRST, left]} if left > 0 else {})


def _ends(column: Sequence[Any]) -> list[Any]:
    return list(column) if len(column) <= _FIRST + _LAST else [*column[:_FIRST], *column[-_LAST:]]


def choose_groups(run: RunData, budget: int) -> dict[str, Any]:
    """Choose groups of at most ``budget`` bytes of JSON in all, from the last step, the first, then steps between them.

    Groups of stored steps, with tokens, come first; unreadable stored steps are skipped. UserError as of :func:`scan`.
    Returned are the ``groups`` and a ``record`` of all of the run: ``total``, their number in its files, shown or not;
    ``stored``, the steps of groups from stored steps; ``ages``, pairs (policy age in versions, number of responses).
    """
    path = run.path / ROLLOUTS_FILE
    lines, ages = scan(path)
    estimator = str(run.config.get("algorithm", {}).get("kl_estimator", "k3")).removesuffix("_unbiased")
    weight = sum(size for rows in lines.values() for *_, size in rows)
    stored, used = _fitting(_stored(run.path, estimator), max(budget // 2, budget - weight))
    rest = {key: lines[key] for key in _in_order(lines) if key not in stored}
    chosen = stored | _fitting(_extremes(path, rest), budget - used)[0]
    record = {"total": len(lines.keys() | chosen.keys()), "stored": sorted({step for step, _ in stored})}
    return {"groups": [chosen[key] for key in sorted(chosen)], "record": record | {"ages": sorted(ages.items())}}


def scan(path: Path) -> tuple[dict[GroupKey, list[Line]], Counter[int]]:
    """Return where the lines of each group are in ``rollouts.jsonl``, and how many responses have each policy age.

    Keys are (step, group id), ages count weight versions. UserError for an invalid line; both are empty without a file.
    """
    lines: dict[GroupKey, list[Line]] = {}
    ages: Counter[int] = Counter()
    for line_number, offset, line in whole_lines(path):
        row = json_line(line, path, line_number)
        defaults = {"group_id": 0, "policy_version": row["step"]}
        group, version = (row[name] if isinstance(row.get(name), int) else defaults[name] for name in defaults)
        lines.setdefault((row["step"], group), []).append((line_number, offset, len(line)))
        ages[row["step"] - version] += 1
    return lines, ages


def spread(count: int) -> list[int]:
    """Return 0 .. count - 1, ordered so that any first few are spread out: last, first, middle, quarters, ..

    >>> spread(9)
    [8, 0, 4, 2, 6, 1, 3, 5, 7]
    """
    last = count - 1
    parts = (2**power for power in range(last.bit_length() + 1))
    places = [last, *(last * at // part for part in parts for at in range(part + 1))]
    return list(dict.fromkeys(places)) if count else []


def plain_group(rows: Sequence[Mapping[str, Any]], *, whole: bool, estimator: str = "k3") -> dict[str, Any]:
    """Return a group's rows (``rollouts.jsonl`` or a stored step) as data for the report page.

    ``whole``: the rows are the whole group, not only its best and worst response; ``estimator``: KL estimator.
    """
    first = rows[0]
    turns = prompt_turns(first["dialog"].get("prompt")) if isinstance(first.get("dialog"), dict) else []
    return {
        "step": first["step"],
        "id": first.get("group_id"),
        **({"task": clipped_name(first["task"])} if isinstance(first.get("task"), str) else {}),
        **({"turns": turns} if turns else {}),
        "prompt": clipped(str(first.get("prompt") or first.get("query") or "")),
        "answer": clipped(str(first.get("answer") or "")),
        "whole": whole,
        "zero": len({number(row.get("reward"), digits=15) for row in rows}) == 1,
        "cut": any(bool(row.get("truncated")) for row in rows),
        "samples": [_sample(row, estimator) for row in rows],
    }


def _sample(row: Mapping[str, Any], estimator: str) -> dict[str, Any]:
    terms, notes = (one if isinstance(one, dict) else {} for one in map(row.get, ("reward_terms", "reward_info")))
    columns, dialog = token_columns(row, estimator), dialog_columns(row)
    return {
        "id": row.get("sample_id"),
        "reward": number(row.get("reward")),
        "terms": {str(name): number(value) for name, value in terms.items()},
        "notes": {str(name): clipped(shown(value)) for name, value in notes.items()},
        "advantage": number(row.get("advantage")),
        "success": bool(row.get("success")),
        "cut": bool(row.get("truncated")),
        "version": number(row.get("policy_version")),
        "length": number(row.get("response_tokens")),
        **(dialog or {}),
        **(columns or ({} if dialog and dialog["turns"] else {"text": clipped(str(row.get("response") or ""))})),
    }


def _in_order(keys: Iterable[GroupKey]) -> Iterator[GroupKey]:
    """Yield all groups of a step, then of the next; the steps are in the order of :func:`spread`."""
    steps: dict[int, list[GroupKey]] = {}
    for key in keys:
        steps.setdefault(key[0], []).append(key)
    yield from chain.from_iterable(steps[sorted(steps)[at]] for at in spread(len(steps)))


def _fitting(groups: Iterable[tuple[GroupKey, Group]], budget: int) -> tuple[dict[GroupKey, Group], int]:
    """Return the groups whose JSON fits into ``budget`` bytes together, in order, and the number of these bytes."""
    fitting: dict[GroupKey, Group] = {}
    used = misfits = 0
    for key, group in groups:
        size = len(safe_json(group).encode())
        if used + size <= budget:
            fitting[key] = group
            misfits, used = 0, used + size
        else:
            misfits += 1
            if misfits > _MISFITS:
                break
    return fitting, used


def _extremes(path: Path, lines: Mapping[GroupKey, list[Line]]) -> Iterator[tuple[GroupKey, Group]]:
    """Yield the groups whose ``lines`` of ``rollouts.jsonl`` are given."""
    if not lines:  # the file may be missing
        return
    with open_file(path) as file:
        for key, sizes in lines.items():
            rows = []
            for line_number, offset, size in sizes:
                file.seek(offset)
                rows.append(json_line(file.read(size), path, line_number))
            yield key, plain_group(rows, whole=False)


def _stored(run_dir: Path, estimator: str) -> Iterator[tuple[GroupKey, Group]]:
    """Yield the groups of stored steps, of each step those that fit into ``_STEP_BYTES``, by :func:`spread`."""
    if not (run_dir / STEPS_FOLDER).is_dir():  # without it torch is not needed
        return
    from sota_grpo.recording.stored_steps import read_step, stored_steps

    paths = list(stored_steps(run_dir).values())
    for at in spread(len(paths)):
        try:
            step = read_step(paths[at])
        except UserError:  # deleted by the run meanwhile, or damaged
            continue
        groups: dict[GroupKey, list[Mapping[str, Any]]] = {}
        for row in step.samples:
            groups.setdefault((step.step, int(row["group_id"])), []).append({**row, "step": step.step})
        plain = ((key, plain_group(rows, whole=True, estimator=estimator)) for key, rows in groups.items())
        yield from _fitting(plain, _STEP_BYTES)[0].items()


def dialog_columns(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the turns of a dialog after its prompt, or None for a response in one turn; the row is untrusted.

    ``turns``, at most 200: ``role`` (or empty), ``said`` (1: written by the policy), ``tokens`` (number), ``text``
    unless the page has the tokens, ``after`` if it begins a branch (index from 0 of the turn it follows; -1: the
    prompt, -2: none), and at most 50 ``calls`` with ``name``, ``arguments``, ``reply`` (None: no reply) and ``error``.
    ``ended``: why a dialog with tools ended; ``lost``: why its environment was lost.
    """
    dialog = row.get("dialog")
    if not isinstance(dialog, dict):
        return None

    def call(request: Mapping[str, Any]) -> dict[str, Any]:
        reply, arguments = request.get("reply"), request.get("arguments")
        fields = arguments if isinstance(arguments, dict) else {"": arguments}
        return {
            "name": clipped_name(request.get("name")),
            "arguments": {clipped_name(name): clipped(shown(value)) for name, value in fields.items()},
            "reply": None if reply is None else clipped(shown(reply)),
            "error": request.get("error") is True,
        }

    turns = []
    for turn in dicts(dialog.get("turns"))[:_MOST_TURNS]:
        calls = [call(record) for record in dicts(turn.get("calls"))[:_MOST_CALLS]]
        turns.append(
            {
                "role": clipped_name(turn.get("role")),
                "said": int(turn.get("trained") is True),
                "tokens": number(turn.get("tokens")) or 0,
                **({} if row.get("pieces") else {"text": clipped(str(turn.get("text") or ""))}),
                **({"calls": calls} if calls else {}),
                **({"after": after} if isinstance(after := number(turn.get("after")), int) else {}),
            }
        )
    ended = {"ended": clipped_name(dialog.get("ended")), "lost": clipped_name(dialog.get("error"), 500)}
    return {"turns": turns, **{name: text for name, text in ended.items() if text}}


def prompt_turns(prompt: Any) -> list[dict[str, Any]]:
    """Return ``role`` and ``text`` of the first 200 turns of a chat prompt; empty if ``prompt`` is no list of turns."""
    return [
        {"role": clipped_name(turn.get("role")), "text": clipped(shown(turn.get("content") or ""))}
        for turn in dicts(prompt)[:_MOST_TURNS]
    ]


def clipped_name(name: Any, most: int = _MOST_NAME) -> str:
    """Return a name as text of at most ``most`` characters.

    >>> clipped_name(None), clipped_name("sum"), clipped_name("a" * 200)[-3:]
    ('', 'sum', 'aa…')
    """
    text = "" if name is None else shown(name)
    return text if len(text) <= most else text[: most - 1] + "…"
