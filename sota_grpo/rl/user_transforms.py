"""``env.transforms``: the user's own TorchRL transforms of a prompt group, applied once its rewards are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import error_line, load_python
from sota_grpo.rl.custom_objectives import file_reference
from sota_grpo.rl.table import Column, Key, RowTable

#: Entries that a transform may read but not change, besides those below ``tokens``, ``log_probs`` and ``kept``.
FIXED = (keys.GROUP_ID, keys.SAMPLE_ID, keys.QUERY, keys.ATTENTION_MASK, keys.TOKEN_VERSION, keys.POLICY_VERSION)
_FIXED_GROUPS = ("tokens", "log_probs", "kept")


def load_transforms(named: Sequence[str]) -> list[tuple[str, Transform]]:
    """Load the transforms of ``env.transforms``, each ``FILE.py:NAME``; a file is run once.

    ``NAME`` is a transform, or a class or function that makes one without arguments.

    Raises:
        UserError: there is no such file or name, the file cannot be imported, or the name gives no transform.
    """
    modules: dict[Path, dict[str, Any]] = {}
    loaded = []
    for value in named:
        path, name = file_reference(value) or (Path(value), "")
        option = f"env.transforms={value}"
        if path not in modules:
            modules[path] = load_python(path, option, UserError)
        if name not in modules[path]:
            raise UserError(f"{option} names {name}, which the file does not define; correct the name.")
        made = modules[path][name]
        if not isinstance(made, Transform) and callable(made):
            try:
                made = made()
            except Exception as error:
                line = error_line(path, error)
                location = "" if line is None else f" (line {line})"
                raise UserError(f"{option} cannot be made{location}: {type(error).__name__}: {error}.") from error
        if not isinstance(made, Transform):
            raise UserError(
                f"{option} gives a {type(made).__name__}, not a torchrl.envs.transforms.Transform; name a transform, "
                "its class, or a function without parameters that returns one."
            )
        loaded.append((option, made))
    return loaded


class UserTransforms:
    """Apply the user's transforms to the rows of one prompt group, in place and in order.

    Each transform gets the rows as a lazily stacked TensorDict ``[G]``, one TensorDict per response, whose tensors are
    copies. It may change the reward, its terms and all other entries under ``next``, clear positions of the assistant
    mask, and add entries of its own.

    Args:
        transforms: of :func:`load_transforms`, with their names for messages.

    Raises:
        RunFailed: a transform raises, changes tokens, log-probs, group ids or the number of rows, adds tokens to the
            assistant mask, removes an entry, or gives a reward that is not a finite float per row.
    """

    def __init__(self, transforms: Sequence[tuple[str, Transform]]):
        self.transforms = transforms

    @torch.no_grad()
    def __call__(self, rows: RowTable) -> RowTable:
        for name, transform in self.transforms:
            try:
                after = RowTable.of(transform(rows.stack().clone()))
            except Exception as error:  # of the user's program
                value = name.partition("=")[2]
                path = (file_reference(value) or (Path(value),))[0]
                line = error_line(path, error)
                location = "" if line is None else f" in line {line}"
                raise RunFailed(f"{name} failed{location}: {type(error).__name__}: {error}.") from error
            if (fault := _fault(rows, after)) is not None:
                raise RunFailed(f"{name} {fault}.")
            rows.columns = {key: rows.columns[key] if _is_fixed(key) else new for key, new in after.columns.items()}
        return rows


def _is_fixed(key: Key) -> bool:
    return key in FIXED or (isinstance(key, tuple) and key[0] in _FIXED_GROUPS)


def _fault(before: RowTable, after: RowTable) -> str | None:
    """Say what the transform must not have done; None where all is well."""
    if len(after) != len(before):
        return f"returned {len(after)} rows for a prompt group of {len(before)}; set a reward instead of removing rows"
    missing = [key for key in before.columns if key not in after.columns]
    if missing:
        return f"removed {missing[0]}; return the rows that it was given, with its entries added"
    added = [key for key in after.columns if _is_fixed(key) and key not in before.columns]
    changed = [key for key in before.columns if _is_fixed(key) and not _equal(before.columns[key], after.columns[key])]
    if added or changed:
        return f"changed {(added + changed)[0]}, which is as it was sampled; write to an entry of another name"
    mask, other = (table.columns[keys.ASSISTANT_MASK].flat() for table in (before, after))
    is_mask = other.values.dtype == torch.bool and other.lengths == mask.lengths
    if not is_mask or bool((other.values & ~mask.values).any()):
        return f"set {keys.ASSISTANT_MASK} where the policy sampled no token; it can only be cleared"
    reward = after.columns[keys.REWARD]
    shape = tuple(reward.values.shape) if reward.lengths is None and reward.rows is None else None
    if shape != (len(before), 1) or not reward.values.is_floating_point() or not bool(reward.values.isfinite().all()):
        return f"gave a {keys.REWARD} that is not a finite float of shape [1] in each row"
    return None


def _equal(one: Column, other: Column) -> bool:
    def plain(column: Column) -> list[object]:
        values = column.cells()
        return [value.tolist() if isinstance(value, Tensor) else value for value in values]

    return (one.rows or None) == (other.rows or None) and plain(one) == plain(other)
