"""The frozen reference as a servant: ragged rows in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.policy.load import DType, load_model
from sota_grpo.policy.reference import FrozenReference
from sota_grpo.transforms.penalties import reference_log_probs
from sota_grpo.workers.servant_thread import ServantThread

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class RaggedRows(NamedTuple):
    """Rows as plain arrays, one after the other: what travels to a reference worker.

    ``lengths`` int64 ``[N]``; ``tokens`` int32, ``attention`` and ``assistant`` bool, each ``[sum of lengths]``.

    >>> row = TensorDict({"tokens": {"full": torch.tensor([7, 8, 9])}, "masks": {
    ...     "all_attention_mask": torch.ones(3).bool(), "all_assistant_mask": torch.tensor([False, True, True])}})
    >>> ragged = RaggedRows.of([row, row])
    >>> ragged.tokens.tolist(), ragged.lengths.tolist(), ragged.unpack()[1]["masks", "all_assistant_mask"].tolist()
    ([7, 8, 9, 7, 8, 9], [3, 3], [False, True, True])
    """

    lengths: np.ndarray
    tokens: np.ndarray
    attention: np.ndarray
    assistant: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[TensorDictBase]) -> RaggedRows:
        """Pack rows, at least one."""

        def joined(key: Any) -> torch.Tensor:
            return torch.cat([row.get(key) for row in rows]).cpu()

        return cls(
            lengths=np.array([row.get(keys.FULL_TOKENS).shape[0] for row in rows], dtype=np.int64),
            tokens=joined(keys.FULL_TOKENS).int().numpy(),
            attention=joined(keys.ATTENTION_MASK).bool().numpy(),
            assistant=joined(keys.ASSISTANT_MASK).bool().numpy(),
        )

    def unpack(self) -> list[TensorDictBase]:
        """The rows, with the keys that a reference reads."""
        lengths = self.lengths.tolist()
        flat = (torch.tensor(self.tokens).long(), torch.tensor(self.attention), torch.tensor(self.assistant))
        return [
            TensorDict({keys.FULL_TOKENS: tokens, keys.ATTENTION_MASK: attention, keys.ASSISTANT_MASK: assistant})
            for tokens, attention, assistant in zip(*(values.split(lengths) for values in flat), strict=True)
        ]


class ReferenceServant:
    """Answers rows with the log-probabilities of a frozen model, on a thread of its own.

    Args:
        model: taken over and frozen.
        temperature: the policy's sampling temperature.
        precision: autocast, ``fp32``, ``bf16`` or ``fp16``; that of the policy makes the KL of equal weights 0.
        token_budget: packed tokens of one forward pass; padded ones for a model that cannot be packed.
        pad_token_id: padding of the tokens; any id of the vocabulary will do.
        shared_prompt, fused: as in :class:`~sota_grpo.policy.causal.CausalPolicy`.

    Raises:
        ValueError: an unknown precision.
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
    ) -> None:
        if precision not in _AUTOCAST:
            raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(_AUTOCAST)}")
        self._device_type = next(model.parameters()).device.type
        self._autocast = _AUTOCAST[precision]
        self._reference = FrozenReference(model, temperature=temperature, shared_prompt=shared_prompt, fused=fused)
        self._token_budget, self._pad_token_id = token_budget, pad_token_id
        self._thread = ServantThread("reference")

    def run(self, rows: RaggedRows) -> Future[list[np.ndarray]]:
        """Log-probabilities of every row, f32 ``[T_i]``, 0 off its assistant mask."""
        return self._thread.submit(self._answer, rows)

    def ping(self) -> float:
        """Seconds for which the forward pass at hand has been running."""
        return self._thread.silent_s()

    def close(self) -> None:
        self._thread.close()

    def _answer(self, rows: RaggedRows) -> list[np.ndarray]:
        found = reference_log_probs(
            self._forward,
            rows.unpack(),
            pad_token_id=self._pad_token_id,
            token_budget=self._token_budget,
            shared_prompt=self._reference.shared_prompt,
        )
        return [values.numpy() for values in found]

    def _forward(self, padded: TensorDictBase) -> torch.Tensor:
        with torch.autocast(self._device_type, dtype=self._autocast, enabled=self._autocast is not None):
            log_probs = self._reference(padded)
        self._thread.progress()
        return log_probs


def reference_servant(
    *,
    model_name: str,
    dtype: DType = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: str = "cpu",
    num_threads: int | None = None,
    **options: Any,
) -> ReferenceServant:
    """Load the model and serve it: the factory of a :class:`~sota_grpo.workers.base.ServantSpec`.

    Args:
        model_name: as :func:`sota_grpo.policy.load.load_model` takes it; so are the next four.
        num_threads: CPU threads of this process; None leaves them.
        options: of :class:`ReferenceServant`.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model = load_model(
        model_name,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        device=device,
    )
    return ReferenceServant(model, shared_prompt=attn_implementation is None, **options)
