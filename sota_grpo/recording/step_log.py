"""What a training step writes: a row of metrics, the best and worst response of each group, a progress line, perhaps
the whole step."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.recording.metrics import info_metric, is_number, term_metric
from sota_grpo.recording.progress import Progress
from sota_grpo.recording.run_log import ExamineLog, RunLog
from sota_grpo.recording.stored_steps import Origin, StoredStep, save_step, text_pieces
from sota_grpo.rl.collate import row_list

logger = logging.getLogger(__name__)

SHARE, FREE_S = 0.03, 30.0  # of the run's time that keeping whole steps may take; seconds that are not counted
_PATIENCE = 3  # steps in a row; one alone happens to good runs, and a run may be shorter


class SignalWatch:
    """Watches the rewards of a run of ``total`` steps; each warning is given once.

    >>> watch = SignalWatch(total=2)
    >>> watch.look(0, {"advantage": 0.0, "reward": 1.0})
    >>> watch.look(1, {"advantage": 0.0, "reward": 1.0})  # logs the warning
    >>> watch.flat
    2
    """

    def __init__(self, total: int) -> None:
        self._patience = min(_PATIENCE, total)
        self.flat = 0  # steps in a row, up to the last, without a group whose rewards differ
        self._told_flat = self._told_failed = False

    def look(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Look at the metrics of a step: ``advantage`` (mean of its size), ``reward``, ``reward_errors``, responses."""
        responses = (metrics.get("dialog_turns") or 0) / (step + 1)
        failed = metrics.get("reward_errors") or 0
        self.flat = self.flat + 1 if metrics.get("advantage") == 0 else 0
        if failed and failed >= responses and not self._told_failed:
            self._told_failed = True
            logger.warning(
                "The grader failed at all %d responses of step %d, and their reward is 0: `sota-grpo check` with the "
                "same options shows its error.",
                *(failed, step + 1),
            )
        elif self.flat >= self._patience and not self._told_flat:
            self._told_flat = True
            logger.warning(
                "In %d %s in a row every group's rewards were equal (mean %.2f), so nothing was learned from them: "
                "read the responses (sota-grpo report RUN), then change the reward, the problems or the temperature.",
                *(self.flat, "step" if self.flat == 1 else "steps", metrics.get("reward") or 0.0),
            )


def batch_metrics(batch: TensorDictBase, version: int) -> dict[str, float]:
    """What the rows of a batch say by themselves; ``version`` is that of the policy that trained on them.

    Means are over responses; ``policy_age`` counts published versions between sampling and training.
    """
    rows = batch.unbind(0)
    masks = [row.get(keys.ASSISTANT_MASK) for row in rows]
    lengths = torch.stack([mask.sum() for mask in masks]).float()
    said = torch.cat(masks)  # each row begins with its prompt, so no turn goes on from one row to the next
    turns = (said[1:] & ~said[:-1]).sum() / len(rows)
    prompts = torch.tensor([row.get(keys.PROMPT_TOKENS).shape[-1] for row in rows]).float()
    reward = _column(batch, keys.REWARD)
    age = version - _column(batch, keys.POLICY_VERSION)
    values = {
        "reward": reward.mean(),
        "reward/std": reward.std(correction=0),
        "success": _column(batch, keys.SUCCESS).mean(),
        "reward_errors": _column(batch, keys.REWARD_ERROR).sum(),
        "reward_timeouts": _column(batch, keys.REWARD_TIMEOUT).sum(),
        "advantage": _column(batch, keys.ADVANTAGE).abs().mean(),
        "truncated": _column(batch, keys.TRUNCATED).mean(),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "prompt_tokens/mean": prompts.mean(),
        "turns/mean": turns,
        "policy_age/mean": age.mean(),
        "policy_age/max": age.max(),
    }
    means = {name: float(value) for name, value in values.items()}
    terms = [_terms(row) for row in rows]
    numbers = [{name: value for name, value in _info(row).items() if is_number(value)} for row in rows]
    means |= {term_metric(name): value for name, value in _means(terms).items()}
    return means | {info_metric(name): value for name, value in _means(numbers).items()}


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the entries that have it."""
    values: dict[str, list[float]] = {}
    for entry in entries:
        for name, value in entry.items():
            values.setdefault(name, []).append(float(value))
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _terms(row: TensorDictBase) -> dict[str, float]:
    terms = row.get(keys.REWARD_TERMS, None)  # missing where no term applies
    return {} if terms is None else {name: float(value) for name, value in terms.items()}


def _info(row: TensorDictBase) -> dict[str, Any]:
    return json.loads(row[keys.REWARD_INFO], parse_constant=str)  # strict JSON, which the logs are, has no NaN


def _column(batch: TensorDictBase, key: Any) -> torch.Tensor:
    return torch.stack([row.get(key) for row in batch.unbind(0)]).reshape(batch.batch_size).float()


def rollout_rows(batch: TensorDictBase, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows as plain values for ``rollouts.jsonl``; siblings have one prompt, which is decoded once."""
    prompts: dict[int, str] = {}
    plain = []
    for row in batch.unbind(0):
        group_id = int(row.get(keys.GROUP_ID))
        if group_id not in prompts:
            prompts[group_id] = tokenizer.decode(row.get(keys.PROMPT_TOKENS))
        plain.append(
            {
                "group_id": group_id,
                "sample_id": int(row.get(keys.SAMPLE_ID)),
                "query": row[keys.QUERY],
                "answer": row[keys.ANSWER],
                "prompt": prompts[group_id],
                "response": _dialog(row, tokenizer),
                "response_tokens": int(row.get(keys.ASSISTANT_MASK).sum()),
                "success": bool(row.get(keys.SUCCESS)),
                "reward": float(row.get(keys.REWARD)),
                "reward_terms": _terms(row),
                "reward_info": _info(row),
                "advantage": float(row.get(keys.ADVANTAGE)),
                "truncated": bool(row.get(keys.TRUNCATED)),
                "policy_version": int(row.get(keys.POLICY_VERSION)),
            }
        )
    return plain


def _dialog(row: TensorDictBase, tokenizer: Any) -> str:
    """The response as it was graded; where user or tool turns stand in it, all of it with the marks of its turns."""
    response = row.get(keys.RESPONSE_TOKENS)
    if bool(row.get(keys.ASSISTANT_MASK)[-len(response) :].all()):
        return row[keys.RESPONSE_TEXT]
    return tokenizer.decode(response)


@dataclass
class StepLog:
    """The ``log`` of the loop; it also adds up the seconds of each phase for the closing table."""

    run_log: RunLog
    progress: Progress
    tokenizer: Any
    publish_seconds: Callable[[], float]
    examine: ExamineLog
    stored: StoredSteps
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = SignalWatch(self.progress.total)
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The clock of a step starts here."""
        self._began = time.perf_counter()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count ``seconds`` to ``phase`` (``time/..._s``) of the closing table."""
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds

    def write(self, step: int, batch: TensorDictBase, update: Mapping[str, Any], source: Mapping[str, float]) -> None:
        """A row of ``metrics.jsonl``, picks for ``rollouts.jsonl``, a progress line, perhaps the step in ``steps/``."""
        seconds = time.perf_counter() - self._began
        metrics: dict[str, Any] = {"kl": None, "time/ref_s": 0.0}  # as it stands without a reference
        metrics |= batch_metrics(batch, version=step) | dict(source) | dict(update)
        metrics |= {"version": step + 1, "time/publish_s": self.publish_seconds(), "time/step_s": seconds}
        tokens = metrics["response_tokens/mean"] * batch.batch_size[0]
        metrics["tokens_per_s"] = tokens / seconds
        metrics["groups/trained"] = len({int(row.get(keys.GROUP_ID)) for row in batch.unbind(0)})
        metrics["dialog_turns"] = (step + 1) * batch.batch_size[0]
        for name, value in metrics.items():
            if name.startswith("time/"):
                self.add_seconds(name, value)
        self.run_log.write_step(step, metrics)
        rows = rollout_rows(batch, self.tokenizer)
        self.run_log.write_rollouts(step, rows)
        self.examine.write(step, rows)
        stored_s = self.stored.write(step, metrics, batch, rows)
        if stored_s:
            self.add_seconds("time/store_s", stored_s)
        self.progress.update(step + 1, metrics)
        self.watch.look(step, metrics)


class StoredSteps:
    """The learner as the loop sees it; every step that follows saved weights is kept whole in ``steps/``.

    Before such a step the learner is asked for the log-probs and entropies of its tokens, which cost one forward pass.
    The first step of a start is one of them: it follows the initial weights, or those of a checkpoint. Where all this
    has come to more than ``SHARE`` of the time since the start (and to more than ``FREE_S``), steps are left out until
    it is less.

    Args:
        learner: a :class:`sota_grpo.training.learner.Learner`, or its facade over several processes.
        run_dir: where ``steps/`` is.
        tokenizer: decodes the tokens one by one.
        device: ``cpu`` or ``cuda``, the learner's.
        enabled: False stores nothing.
    """

    def __init__(self, learner: Any, run_dir: Path, tokenizer: Any, *, device: str, enabled: bool):
        self.learner, self.run_dir, self.tokenizer = learner, run_dir, tokenizer
        self.device, self.enabled = device, enabled
        self.due = enabled
        self._began, self._spent_s = time.monotonic(), 0.0
        self._before: tuple[torch.Tensor, Origin, float] | None = None
        self._alone = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    @property
    def version(self) -> int:
        return self.learner.version

    def update(self, rows: TensorDictBase) -> dict[str, float | None]:
        """The learner's own, after a look at the rows of a step that will be stored."""
        self._before = None
        if self.due:
            began = time.perf_counter()
            measured = self.learner.measured(row_list(rows))
            origin = Origin(
                device=self.device,
                precision=self.learner.settings.precision,
                num_ranks=len(getattr(self.learner, "workers", ())),
                num_threads=torch.get_num_threads(),
                rng=torch.get_rng_state(),
            )
            self._before = measured, origin, time.perf_counter() - began
        self.due = False
        return self.learner.update(rows)

    def after_checkpoint(self) -> None:
        """The next step follows saved weights."""
        allowed_s = max(FREE_S, SHARE * (time.monotonic() - self._began))
        self.due = self.enabled and self._spent_s <= allowed_s

    def write(
        self, step: int, metrics: Mapping[str, float | None], batch: TensorDictBase, fields: list[dict[str, Any]]
    ) -> float:
        """Store the step whose update came last, if it is to be stored; the seconds that this took, look included.

        Args:
            fields: :func:`rollout_rows` of the batch.
        """
        if self._before is None:
            return 0.0
        began = time.perf_counter()
        measured, origin, seconds = self._before
        self._before = None
        rows = row_list(batch)
        lengths = [row.get(keys.FULL_TOKENS).shape[-1] for row in rows]
        ids = [row.get(keys.RESPONSE_TOKENS).tolist() for row in rows]
        stored = StoredStep(
            step=step,
            metrics=metrics,
            rows=rows,
            fields=fields,
            pieces=[text_pieces(each, self._decode) for each in ids],
            measured=list(measured.split(lengths, dim=-1)),
            origin=origin,
        )
        save_step(self.run_dir, stored)
        seconds += time.perf_counter() - began
        self._spent_s += seconds
        return seconds

    def _decode(self, ids: Sequence[int]) -> str:
        return self._alone(ids[0]) if len(ids) == 1 else self.tokenizer.decode(ids)
