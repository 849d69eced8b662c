"""Whole dialogs as rows, of the steps that TorchRL's rollouts and collectors give of a dialog environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from sota_grpo import keys
from sota_grpo.envs.dialogs import Dialog, num_shared
from sota_grpo.envs.task_env import DRAWN, finish_rows, response_ids
from sota_grpo.rl.records import Sample

_GRADED = (keys.REWARD, keys.REWARD_TERMS, keys.SUCCESS, keys.REWARD_ERROR, keys.REWARD_TIMEOUT, keys.REWARD_INFO)


@dataclass
class _Gathered:
    """What is known of a dialog; ``last`` is its last step, once it is there."""

    dialog: Dialog
    has_log_probs: bool = True
    has_versions: bool = True
    last: TensorDictBase | None = None


class DialogRows:
    """Makes one row of the steps of each dialog, as :func:`~sota_grpo.envs.finish_rows` makes it of a sample.

    A dialog's row has all that was said, the assistant mask on what the policy sampled, and the reward of the last
    step. Rows come as whole groups, as soon as the last sibling has ended; what has not ended waits for the next
    steps. The row's prompt is what the siblings' prompts begin with alike.

    Read of a step are ``tokens.response`` (or ``tokens.full``), and where they are there ``log_probs.response`` (or
    ``log_probs.full``) and ``next.policy_version`` (TorchRL's ``PolicyVersion`` with integers); without them the rows
    lack ``log_probs`` or the versions.

    Args:
        tokenizer: of the environment.
        group_size: its ``repeats``.

    Example::

        rows = DialogRows(tokenizer, group_size=8)
        for steps in collector:
            for row in rows.add(steps): ...
    """

    def __init__(self, tokenizer: Any, group_size: int = 1):
        self._tokenizer, self._group_size = tokenizer, group_size
        self._groups: dict[int, dict[int, _Gathered]] = {}

    def add(self, steps: TensorDictBase) -> list[TensorDictBase]:
        """The rows of the groups whose last dialog has ended in these steps.

        Args:
            steps: of any batch shape, in which the steps of a dialog are in order: ``[N, T]`` of a rollout or a
                collector, also flattened; those that a rollout repeats because their row had ended are left out.

        Raises:
            ValueError: a dialog's beginning is missing, or its prompt is not what was said before.
        """
        ended: set[tuple[int, int]] = set()
        complete: list[int] = []
        for step in _each(steps):
            group_id, sample_id = int(step[keys.GROUP_ID]), int(step[keys.SAMPLE_ID])
            if (group_id, sample_id) in ended:
                continue
            group = self._groups.setdefault(group_id, {})
            gathered = self._added(group, sample_id, step)
            if step[keys.DONE].any():
                gathered.last = step
                ended.add((group_id, sample_id))
                if sum(one.last is not None for one in group.values()) == self._group_size:
                    complete.append(group_id)
        return [row for group_id in complete for row in self._finished(self._groups.pop(group_id))]

    def _added(self, group: dict[int, _Gathered], sample_id: int, step: TensorDictBase) -> _Gathered:
        prompt, turn = step[keys.PROMPT_TOKENS].tolist(), int(step.get(keys.TURN, torch.zeros(())))
        if turn == 0:
            group[sample_id] = _Gathered(Dialog(None, prompt))
        gathered = group.get(sample_id)
        if gathered is None or gathered.dialog.num_turns != turn or gathered.last is not None:
            raise ValueError(
                f"turn {turn} of group {int(step[keys.GROUP_ID])}, sample {sample_id}, does not follow what was added "
                "before it; add all steps of a dialog, in order."
            )
        dialog = gathered.dialog
        if prompt[: len(dialog.ids)] != dialog.ids:
            raise ValueError(
                f"the prompt of turn {turn} of group {int(step[keys.GROUP_ID])}, sample {sample_id}, does not begin "
                "with what was said before; never tokenise a dialog again."
            )
        if turn:
            dialog.hear(prompt[len(dialog.ids) :])
        dialog.speak(self._turn(gathered, step, len(prompt)))
        return gathered

    def _turn(self, gathered: _Gathered, step: TensorDictBase, num_before: int) -> Sample:
        ids = response_ids(step).cpu()
        log_probs = step.get(("log_probs", "response"), None)
        if log_probs is None and (full := step.get(keys.LOG_PROBS, None)) is not None:
            log_probs = full[num_before:]
        version = step.get(("next", "policy_version"), None)
        if log_probs is None:
            gathered.has_log_probs, log_probs = False, torch.zeros(len(ids))
        if not isinstance(version, torch.Tensor):
            gathered.has_versions, version = False, torch.zeros(())
        return Sample(ids, log_probs.cpu(), version.cpu().long().expand(len(ids)), bool(step[keys.TRUNCATED].any()))

    def _finished(self, group: dict[int, _Gathered]) -> list[TensorDictBase]:
        siblings = [one for _, one in sorted(group.items())]
        common = num_shared([one.dialog.prompt_ids for one in siblings])
        samples = [one.dialog.sample(common) for one in siblings]
        rows = []
        for one, sample in zip(siblings, samples, strict=True):
            assert one.last is not None
            prompt = TensorDict({key: one.last.get(key) for key in DRAWN}, [])
            prompt[keys.PROMPT_TOKENS] = torch.tensor(one.dialog.prompt_ids[:common], dtype=torch.int64)
            (row,) = finish_rows(prompt, [sample], self._tokenizer)
            row[keys.SAMPLE_ID] = one.last.get(keys.SAMPLE_ID)
            rows.append(_graded(row, one))
        return rows


def _graded(row: TensorDictBase, gathered: _Gathered) -> TensorDictBase:
    """With what the last step earned, and without what no step has."""
    assert gathered.last is not None
    for key in _GRADED:
        if (value := gathered.last.get(key, None)) is not None:
            row.set(key, value)
    terms = row.get(keys.REWARD_TERMS, None)
    for name in [] if terms is None else [name for name, value in terms.items() if value.isnan().any()]:
        del row[(*keys.REWARD_TERMS, name)]  # it does not apply
    if not gathered.has_log_probs:
        row.pop("log_probs")
    if not gathered.has_versions:
        del row[keys.TOKEN_VERSION], row[keys.POLICY_VERSION]
    return row


def _each(steps: TensorDictBase) -> Iterator[TensorDictBase]:
    """The single steps, by rows and then by time."""
    if not steps.batch_dims:
        yield steps
        return
    for part in steps.unbind(0):
        yield from _each(part)
