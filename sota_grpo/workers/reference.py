"""The frozen reference model in worker processes: computes the log-probs of rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.policy.causal import FrozenReference
from sota_grpo.policy.load import load_model
from sota_grpo.rl.collate import unpad_rows
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import reference_log_probs, write_reference
from sota_grpo.workers.base import pending_future
from sota_grpo.workers.fleet import Fleet

_READ = (
    keys.FULL_TOKENS,
    keys.ATTENTION_MASK,
    keys.ASSISTANT_MASK,
    keys.PARENTS,
    keys.SUPPORT_IDS,
    keys.SUPPORT_COUNTS,
)
MAX_ATTEMPTS = 3  # if three workers died with the same rows, a fourth would too
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class ReferenceWorker:
    """Worker that computes the log-probs of rows under a frozen model.

    Args:
        model: the reference model, which is frozen in place.
        temperature: the policy's sampling temperature.
        precision: autocast ``fp32``, ``bf16`` or ``fp16``; use the policy's, so that equal weights have a KL of 0.
        token_budget: most packed tokens per forward pass (padded ones unless ``shared_prompt``), at least 1; a longer
            row has a forward pass of its own.
        pad_token_id: any id of the vocabulary.
        shared_prompt, fused: see :class:`~sota_grpo.policy.causal.CausalPolicy`.
        gives_back: release cached CUDA memory after each call, for colocated engines.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        precision: str = "fp32",
        token_budget: int,
        pad_token_id: int = 0,
        shared_prompt: bool = True,
        fused: bool = False,
        gives_back: bool = False,
    ) -> None:
        dtype = _AUTOCAST[precision]
        device_type = next(model.parameters()).device.type
        self._autocast = partial(torch.autocast, device_type, dtype=dtype, enabled=dtype is not None)
        self._reference = FrozenReference(model, temperature=temperature, shared_prompt=shared_prompt, fused=fused)
        self._token_budget, self._pad_token_id, self._gives_back = token_budget, pad_token_id, gives_back
        self._since: float | None = None  # when the running call started or last finished a forward pass

    def ping(self) -> float:
        """Return the seconds since the running call started or last finished a forward pass; 0 when idle."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def run(self, rows: RowTable) -> list[np.ndarray]:
        """Return the log-probs of each row, float32 ``[T_i]`` for ``T_i`` tokens, 0 off its assistant mask.

        RunFailed if the device lacks memory.
        """
        self._since = time.monotonic()
        try:
            log_probs = reference_log_probs(
                self._forward,
                rows,
                pad_token_id=self._pad_token_id,
                token_budget=self._token_budget,
                shared_prompt=self._reference.shared_prompt,
            )
        finally:
            self._since = None
        if self._gives_back:
            torch.cuda.empty_cache()
        return [values.numpy() for values in log_probs]

    def _forward(self, padded: TensorDictBase) -> torch.Tensor:
        with self._autocast():
            log_probs = self._reference(padded)
        self._since = time.monotonic()
        return log_probs


def reference_worker(*, model: Mapping[str, Any], num_threads: int | None = None, **options: Any) -> ReferenceWorker:
    """Worker factory: load the reference model (UserError if it cannot be loaded); return its :class:`ReferenceWorker`.

    Args:
        model: arguments of :func:`sota_grpo.policy.load.load_model`.
        num_threads: torch's CPU threads in this process; None: not set.
        options: keyword arguments of :class:`ReferenceWorker`.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return ReferenceWorker(load_model(**model), **options)


class ReferenceService:
    """Computes reference log-probs with a fleet of :class:`ReferenceWorker`.

    :meth:`submit` adds the log-probs to the rows of a group in the background. Calling the object (as a
    :class:`sota_grpo.policy.causal.ReferencePolicy`) splits padded rows over the workers and waits. Log-probs equal
    those of a local reference up to rounding, because padding differs. A dead or hanging worker is replaced.

    Args:
        fleet: the reference workers; :meth:`close` closes them.
        num_workers: most slices into which a call splits its rows.
        in_reward_coeff: see :class:`sota_grpo.rl.transforms.ReferenceKL`; if set, submitted rows must have rewards.
    """

    shared_prompt = True  # each worker splits its rows as its own model requires

    def __init__(self, fleet: Fleet, *, num_workers: int, in_reward_coeff: float | None = None) -> None:
        self.fleet, self._num_workers, self._in_reward_coeff = fleet, num_workers, in_reward_coeff

    def submit(self, rows: RowTable) -> Future[RowTable]:
        """Compute the columns of :class:`sota_grpo.rl.transforms.ReferenceKL` and write them into ``rows``, in place.

        Return a future of ``rows`` at once. A table that has reference log-probs is not changed. The future fails with
        ValueError if a log-prob is NaN or infinite, or as :meth:`sota_grpo.workers.fleet.Fleet.run`.
        """

        async def complete() -> RowTable:
            log_probs = [torch.tensor(values) for values in await self.fleet.run(rows.only(_READ))]
            write_reference(rows, log_probs, in_reward_coeff=self._in_reward_coeff)
            return rows

        if keys.REF_LOG_PROBS not in rows.columns:
            return self.fleet.start(complete())
        done = pending_future()
        done.set_result(rows)
        return done

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probs ``[N, T]`` of padded rows, on the device of the rows."""
        real = rows.get(keys.ATTENTION_MASK).bool().cpu()
        table = RowTable.of(unpad_rows(rows.select(*_READ, strict=False)))
        count = min(self._num_workers, len(table))  # every n-th row: equal slices even if rows are sorted by length
        answers = [self.fleet.submit(table.take(range(first, len(table), count))) for first in range(count)]
        log_probs = torch.zeros(real.shape)
        for first, answer in enumerate(answers):
            for index, values in zip(range(first, len(table), count), answer.result(), strict=True):
                log_probs[index, real[index]] = torch.tensor(values)
        return log_probs.to(rows.get(keys.FULL_TOKENS).device)

    def close(self) -> None:
        self.fleet.close()
