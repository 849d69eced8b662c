"""What every source of batches does with a group: ask for it, make its rows, judge its age and its signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.envs import TaskEnv, finish_rows
from sota_grpo.functional import constant_groups
from sota_grpo.rl.records import Example, GroupOutput, GroupRequest


def group_request(env: TaskEnv, group_id: int, example: Example, *, num_samples: int, seed: int) -> GroupRequest:
    """What an engine is asked for a prompt, with its example where the dialog needs that between its turns.

    Args:
        seed: of the group's random streams.
    """
    known = example if env.multi_turn else None
    return GroupRequest(group_id, env.prompt_ids(example), num_samples, seed, known)


def finish_group(prompts: Sequence[TensorDictBase], output: GroupOutput, tokenizer: Any) -> list[TensorDictBase]:
    """The rows of a sampled group, one per sample, not graded yet; the first of ``prompts`` stands for its siblings."""
    return finish_rows(prompts[0], output.samples, tokenizer)


def require_age(rows: Sequence[TensorDictBase], version: int, max_policy_age: int) -> None:
    """Assert the bound on the age of every row's oldest token.

    Raises:
        RuntimeError: a token is older than ``max_policy_age`` versions, or all are newer than ``version``.
    """
    oldest = min(int(row.get(keys.POLICY_VERSION)) for row in rows)
    if not 0 <= version - oldest <= max_policy_age:
        raise RuntimeError(
            f"A token of policy version {oldest} arrived at version {version}; train.max_policy_age is "
            f"{max_policy_age}."
        )


def apply_transforms(
    transforms: Sequence[tuple[str, Transform]], rows: TensorDictBase, seconds: dict[str, float]
) -> TensorDictBase:
    """``rows`` after each ``(phase, transform)`` in order, whose time is added to ``seconds[phase]``."""
    for phase, transform in transforms:
        began = time.perf_counter()
        rows = transform(rows)
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
    return rows


def constant_rows(rows: Sequence[TensorDictBase]) -> list[bool]:
    """For each row, whether all graded rewards of its group are equal."""
    key = keys.GRADED_REWARD if keys.GRADED_REWARD in rows[0].keys(include_nested=True) else keys.REWARD
    rewards = torch.stack([row.get(key).reshape(()) for row in rows])
    groups = torch.stack([row.get(keys.GROUP_ID).reshape(()) for row in rows])
    return constant_groups(rewards, groups).tolist()
