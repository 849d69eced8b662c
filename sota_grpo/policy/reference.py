"""The frozen reference policy of the KL term, where it lives in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.lora import adapter_disabled


class ReferencePolicy(Protocol):
    """Padded rows in, log-probabilities ``[N, T]`` out: float32, 0 off the assistant mask, on the device of the rows.

    Attributes:
        shared_prompt: whether it computes packed rows, so that a call's cost counts each prompt once.
    """

    shared_prompt: bool

    def __call__(self, rows: TensorDictBase) -> torch.Tensor: ...

    def close(self) -> None: ...  # idempotent


Context = Callable[[], AbstractContextManager[Any]]  # in which a reference computes


class _Computed:
    """Log-probabilities of a policy of this process, until it is closed."""

    def __init__(self, policy: CausalPolicy, autocast: Context, context: Context = nullcontext) -> None:
        self._policy: CausalPolicy | None = policy
        self._autocast, self._context, self.shared_prompt = autocast, context, policy.shared_prompt

    @torch.no_grad()
    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return log-probabilities [N, T] on the device of the rows.

        Raises:
            RuntimeError: the reference was closed.
        """
        if self._policy is None:
            raise RuntimeError("the reference policy was closed and cannot answer any more")
        with self._autocast(), self._context():
            log_probs, _ = self._policy.log_probs(rows)
        return log_probs.to(rows.get(keys.FULL_TOKENS).device)

    def close(self) -> None:
        self._policy = None


class FrozenReference(_Computed):
    """A reference with weights of its own, on the device of its model.

    Args:
        model: taken over: frozen and put in evaluation mode. Give a copy of a model that still trains.
        temperature, shared_prompt, fused: as in :class:`~sota_grpo.policy.causal.CausalPolicy`.
        autocast: of the learner: the KL of equal weights is 0 then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        shared_prompt: bool = True,
        fused: bool = False,
        autocast: Context = nullcontext,
    ) -> None:
        frozen = model.requires_grad_(False).eval()
        options = {"with_entropy": False, "shared_prompt": shared_prompt, "fused": fused}
        super().__init__(CausalPolicy(frozen, temperature=temperature, **options), autocast)


class AdapterOffReference(_Computed):
    """The base model under a LoRA policy: its adapter is off for the length of a call. No weights of its own.

    Raises:
        ValueError: the policy's model has no adapter.
    """

    def __init__(self, policy: CausalPolicy, *, autocast: Context = nullcontext) -> None:
        with adapter_disabled(policy.model):
            pass  # refuses a model without an adapter now rather than in the first step
        super().__init__(policy, autocast, partial(adapter_disabled, policy.model))
