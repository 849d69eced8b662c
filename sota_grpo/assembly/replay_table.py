"""What a replay shows: stored and replayed figures side by side, and what another algorithm would have changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sota_grpo import keys
from sota_grpo.assembly.replay import FIGURES, Replay, Turn, open_turn, replay
from sota_grpo.assembly.replay_options import replay_configs, replay_notes

TOLERANCE = 1e-6  # relative, of what agrees in float32
_LOSSES = ("loss/objective", "loss/kl", "loss/entropy")
_JUDGED = (*_LOSSES, "grad_norm")
_SAME_ADVANTAGE = 1e-6

logger = logging.getLogger(__name__)


def replayed(run_dir: Path, step: int | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Replay a stored turn as the run did it and, with ``overrides``, under other options; plain values throughout.

    Args:
        run_dir: of the run; nothing is written there.
        step: the turn; None: the last that can be replayed.
        overrides: such as ``["algorithm=dapo"]``.

    Returns:
        ``figures``: by name ``stored``, ``replayed`` and ``difference``, with overrides also ``other`` and
        ``other_difference`` (from ``replayed``); None where nothing was measured. ``agrees``: losses and gradient norm
        are the stored ones to ``TOLERANCE``. ``worst``: which of them is furthest from it and how far, relatively; None
        where only one side has it. ``notes``: sentences. With overrides ``advantages`` and ``clip``: what changed.

    Raises:
        UserError: the turn cannot be replayed, or not under these options.
    """
    turn = open_turn(run_dir, step)
    configs = replay_configs(turn, run_dir, overrides)
    logger.info("Computing turn %d as the run did.", turn.stored.step)
    own = replay(turn, configs.own)
    other = None
    if configs.other is not None:
        logger.info("Computing it under %s.", " ".join(overrides))
        other = replay(turn, configs.other)
    rows = turn.stored.rows
    name, distance = worst_distance(turn.stored.metrics, own.figures)
    found = {
        "run": str(run_dir),
        "step": turn.stored.step,
        "checkpoint": None if turn.checkpoint is None else turn.checkpoint.name,
        "samples": len(rows),
        "groups": len({int(row.get(keys.GROUP_ID)) for row in rows}),
        "optimizer_steps": own.optimizer_steps,
        "overrides": list(overrides),
        "figures": _figures(turn, own, other),
        "agrees": distance <= TOLERANCE,
        "worst": {"name": name, "relative_difference": distance if math.isfinite(distance) else None},
        "notes": replay_notes(turn, configs.left),
    }
    if other is not None:
        found |= {"advantages": _advantages(turn, own, other), "clip": _clip(own, other)}
    return found


def worst_distance(stored: Mapping[str, float | None], found: Mapping[str, float | None]) -> tuple[str, float]:
    """The loss term, or the gradient norm, that is furthest from the stored one, and how far, relatively.

    A loss is a sum of advantages that may cancel, so its distance is in units of the mean absolute advantage where that
    is larger. A figure that only one side has is infinitely far.

    >>> stored = {"loss/objective": 0.0, "grad_norm": 2.0, "advantage": 0.5}
    >>> worst_distance(stored, {"loss/objective": 1e-7, "grad_norm": 2.0})
    ('loss/objective', 2e-07)
    """
    worst = ("grad_norm", 0.0)
    for name in _JUDGED:
        one, two = stored.get(name), found.get(name)
        if one is None and two is None:
            continue
        floor = (stored.get("advantage") or 0.0) if name in _LOSSES else 0.0
        distance = float("inf")
        if one is not None and two is not None:
            distance = abs(two - one) / max(abs(one), floor, 1e-30)
        if distance > worst[1]:
            worst = (name, distance)
    return worst


def _figures(turn: Turn, own: Replay, other: Replay | None) -> dict[str, dict[str, float | None]]:
    found = {}
    for name in FIGURES:
        sources = [turn.stored.metrics, own.figures, *([] if other is None else [other.figures])]
        if all(source.get(name) is None for source in sources):
            continue
        stored, again = turn.stored.metrics.get(name), own.figures.get(name)
        found[name] = {"stored": stored, "replayed": again, "difference": _minus(again, stored)}
        if other is not None:
            value = other.figures.get(name)
            found[name] |= {"other": value, "other_difference": _minus(value, again)}
    return found


def _minus(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def _advantages(turn: Turn, own: Replay, other: Replay) -> dict[str, Any]:
    """How many samples have another advantage, and which changed most."""
    gaps = (other.advantages - own.advantages).abs()
    most = int(gaps.argmax())
    row = turn.stored.rows[most]
    changed = int((gaps > _SAME_ADVANTAGE).sum())
    largest = {
        "group_id": int(row.get(keys.GROUP_ID)),
        "sample_id": int(row.get(keys.SAMPLE_ID)),
        "replayed": own.advantages[most].item(),
        "other": other.advantages[most].item(),
    }
    return {"changed": changed, "samples": len(gaps), "largest": largest if changed else None}


def _clip(own: Replay, other: Replay) -> dict[str, int | None]:
    """Uses of tokens in the turn's steps, and of how many the clip took the gradient.

    ``newly`` and ``no_longer`` are None where the two do not train on the same tokens.
    """
    one, two = own.clipped, other.clipped
    same = one.keys() == two.keys() and all(
        [each.shape for each in one[name]] == [each.shape for each in two[name]] for name in one
    )
    found: dict[str, int | None] = {"newly": None, "no_longer": None}
    if same:
        before, after = _joined(one), _joined(two)
        found = {"newly": int((after & ~before).sum()), "no_longer": int((before & ~after).sum())}
    counts = {"tokens": len(_joined(one)), "replayed": int(_joined(one).sum()), "other": int(_joined(two).sum())}
    return {**counts, **found}


def _joined(clipped: dict[tuple[int, int], list[torch.Tensor]]) -> torch.Tensor:
    """All tokens in one order, by row and use."""
    parts = [each for name in sorted(clipped) for each in clipped[name]]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)
