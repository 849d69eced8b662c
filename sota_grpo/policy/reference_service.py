"""The reference policy as a service: frozen models in processes of their own answer while others sample and learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack

from sota_grpo import keys
from sota_grpo.transforms.penalties import write_reference
from sota_grpo.workers.base import Launcher, ServantSpec
from sota_grpo.workers.fleet import Fleet, starter
from sota_grpo.workers.futures import promised, resolve
from sota_grpo.workers.reference import RaggedRows

_READ: tuple[Any, ...] = (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK)
_MAX_ATTEMPTS = 3  # rows that three workers died of will cost a fourth one its life too


class ReferenceService:
    """Client of a fleet of :class:`sota_grpo.workers.reference.ReferenceServant`.

    Contract. Consumes: whole groups (:meth:`submit`), which it completes in the background, or padded rows (a call,
    as any :class:`sota_grpo.policy.reference.ReferencePolicy`), which it splits over the workers and waits for.
    Produces: the same log-probabilities as a reference in this process, to the rounding of another padding. Waits for:
    the fleet, whose deadlines bound every wait. A worker that dies or falls silent is replaced and its rows are
    answered by another; :class:`~sota_grpo.workers.base.WorkerDied` only when that happened ``max_attempts`` times to
    the same rows or no worker can start.

    Args:
        fleet: of reference workers; closed with the service.
        num_workers: into how many parts a call is split.
        in_reward_coeff: see :class:`sota_grpo.transforms.ReferenceKL`; with one, groups come with their reward.

    Attributes:
        fleet: of the workers; it counts their replacements.
    """

    shared_prompt = True  # a worker cuts what it is given by what its own model can

    def __init__(self, fleet: Fleet, *, num_workers: int, in_reward_coeff: float | None = None) -> None:
        self.fleet, self._num_workers, self._in_reward_coeff = fleet, num_workers, in_reward_coeff

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        options: Mapping[str, Any],
        *,
        num_workers: int = 1,
        timeout_s: float,
        in_reward_coeff: float | None = None,
        placements: Sequence[Mapping[str, Any]] = (),
    ) -> ReferenceService:
        """Start workers and return their service; the models load in the background.

        Args:
            launcher: of the workers; closed by whoever made it.
            options: of :func:`sota_grpo.workers.reference.reference_servant`.
            num_workers: number of models.
            timeout_s: a worker that is at one forward pass for longer is replaced.
            in_reward_coeff: as above.
            placements: see :func:`sota_grpo.workers.fleet.starter`.
        """
        spec = ServantSpec("sota_grpo.workers.reference:reference_servant", options)
        start = starter(launcher, "reference", spec, placements)
        # Two tasks each: the next one is there when a worker has answered the first.
        fleet = Fleet("reference", start, num_workers, capacity=2, silence_s=timeout_s, max_attempts=_MAX_ATTEMPTS)
        return cls(fleet, num_workers=num_workers, in_reward_coeff=in_reward_coeff)

    def wait_ready(self) -> None:
        """Return when every worker has its model.

        Raises:
            WorkerDied: one cannot start; the message has the cause.
        """
        self.fleet.wait_ready()

    def submit(self, rows: Sequence[TensorDictBase]) -> Future[list[TensorDictBase]]:
        """The same rows, once what :class:`sota_grpo.transforms.ReferenceKL` writes is written in them, in place.

        Rows that have their reference log-probs already pass unchanged. The future fails with ValueError when the
        model gives a log-prob that is not finite.
        """
        listed, done = list(rows), promised()
        if listed[0].get(keys.REF_LOG_PROBS, None) is not None:
            done.set_result(listed)
            return done
        answer = self.fleet.submit(RaggedRows.of(listed))
        answer.add_done_callback(lambda found: resolve(done, lambda: self._write(listed, found.result())))
        return done

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities [N, T] on the device of the rows."""
        tokens, real = rows.get(keys.FULL_TOKENS), rows.get(keys.ATTENTION_MASK).bool()
        ends = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(-1).clamp(min=1)
        cut = [row.select(*_READ).auto_batch_size_()[:end] for row, end in zip(rows.unbind(0), ends.tolist())]
        count = min(self._num_workers, len(cut))  # every n-th row, so that rows sorted by length give equal parts
        answers = [self.fleet.submit(RaggedRows.of(cut[first::count])) for first in range(count)]
        found = torch.zeros(tokens.shape)
        for first, answer in enumerate(answers):
            for index, values in zip(range(first, len(cut), count), answer.result(), strict=True):
                found[index, : len(values)] = torch.tensor(values)
        return found.to(tokens.device)

    def close(self) -> None:
        self.fleet.close()

    def _write(self, rows: list[TensorDictBase], found: Sequence[np.ndarray]) -> list[TensorDictBase]:
        log_probs = [torch.tensor(values) for values in found]
        write_reference(lazy_stack(rows), log_probs, in_reward_coeff=self._in_reward_coeff)
        return rows
