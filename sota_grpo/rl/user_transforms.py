"""``env.transforms``: TorchRL transforms of the user, applied to each prompt group after grading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.errors import RunFailed
from sota_grpo.files import error_line, file_reference
from sota_grpo.rl.table import Column, Key, RowTable
from sota_grpo.text import sentence

#: Entries that a transform must not change, in addition to those under ``tokens``, ``log_probs`` and ``kept``.
FIXED = (keys.GROUP_ID, keys.SAMPLE_ID, keys.QUERY, keys.ATTENTION_MASK, keys.TOKEN_VERSION, keys.POLICY_VERSION)
_FIXED_GROUPS = ("tokens", "log_probs", "kept")


class UserTransforms:
    """Applies the user's transforms to the rows of one prompt group, in place and in order.

    Each transform gets a copy of the rows as a lazily stacked TensorDict ``[G]``, one TensorDict per response. It may
    add entries, change the reward (finite), its terms and other entries that are not fixed (:data:`FIXED`), and set
    positions of the assistant mask to False. RunFailed, with the reason, if it raises or makes another change.

    Args:
        transforms: result of :func:`sota_grpo.files.load_instances`: (name in messages, transform) pairs.
    """

    def __init__(self, transforms: Sequence[tuple[str, Transform]]):
        self.transforms = transforms

    @torch.no_grad()
    def __call__(self, rows: RowTable) -> RowTable:
        for name, transform in self.transforms:
            try:
                after = RowTable.of(transform(rows.stack().clone()))
            except Exception as error:  # in the user's code
                value = name.partition("=")[2]
                path = (file_reference(value) or (Path(value),))[0]
                line = error_line(path, error)
                location = "" if line is None else f" in line {line}"
                raise RunFailed(f"{name} failed{location}: {sentence(error).rstrip('.')}.") from error
            if (fault := _fault(rows, after)) is not None:
                raise RunFailed(f"{name} {fault}.")
            rows.columns = {key: rows.columns[key] if _is_fixed(key) else new for key, new in after.columns.items()}
            if rows.has(keys.SUPPORT_IDS):
                _cut_supports(rows)
        return rows


def _cut_supports(rows: RowTable) -> None:
    """Remove the sampling supports of tokens that the assistant mask leaves out."""
    names = (keys.ASSISTANT_MASK, keys.SUPPORT_IDS, keys.SUPPORT_COUNTS)
    ids: list[Tensor | None] = []
    counts: list[Tensor | None] = []
    for mask, old_ids, old_counts in zip(*map(rows.cells, names)):
        ids.append(None if old_ids is None else old_ids[mask.repeat_interleave(old_counts)])
        counts.append(None if old_counts is None else old_counts.where(mask, 0))
    rows.set(keys.SUPPORT_IDS, ids)
    rows.set(keys.SUPPORT_COUNTS, counts)


def _is_fixed(key: Key) -> bool:
    return key in FIXED or (isinstance(key, tuple) and key[0] in _FIXED_GROUPS)


def _fault(before: RowTable, after: RowTable) -> str | None:
    """Return a message if the transform made a forbidden change, else None."""
    if len(after) != len(before):
        return (
            f"returned {len(after)} rows for a prompt group of {len(before)}; return every row once, and set a reward "
            "instead of removing a row"
        )
    missing = [key for key in before.columns if key not in after.columns]
    if missing:
        return f"removed {missing[0]}; return the input rows with all their entries"
    added = [key for key in after.columns if _is_fixed(key) and key not in before.columns]
    changed = [key for key in before.columns if _is_fixed(key) and not _equal(before.columns[key], after.columns[key])]
    if added or changed:
        return f"changed {(added + changed)[0]}, which is read-only; write to an entry of another name"
    mask, other = (table.columns[keys.ASSISTANT_MASK].flat() for table in (before, after))
    is_mask = other.values.dtype == torch.bool and other.lengths == mask.lengths
    if not is_mask or bool((other.values & ~mask.values).any()):
        return (
            f"set {keys.ASSISTANT_MASK} where the policy sampled no token, or changed its dtype or lengths; only set "
            "positions to False"
        )
    reward = after.columns[keys.REWARD]
    shape = tuple(reward.values.shape) if reward.lengths is None and reward.rows is None else None
    if shape != (len(before), 1) or not reward.values.is_floating_point() or not bool(reward.values.isfinite().all()):
        return f"wrote a {keys.REWARD} that is not a finite float of shape [1] in each row; correct the transform"
    return None


def _equal(one: Column, other: Column) -> bool:
    def plain(column: Column) -> list[object]:
        values = column.cells()
        return [value.tolist() if isinstance(value, Tensor) else value for value in values]

    return (one.rows or None) == (other.rows or None) and plain(one) == plain(other)
