"""Learners over several ranks: ragged rows, one learner for any number of ranks, and what a rank's process runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sota_grpo import keys
from sota_grpo.assembly import learning
from sota_grpo.config import Config
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.sharding import Ranks, join_ranks, local, shard
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.table import RowTable
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import LearnerWorker
from tests.unit.tiny_models import VOCAB, make_model, make_tokenizer


def ragged_rows(count: int, *, longest: int = 12) -> LazyStackedTensorDict:
    """Fresh random rows as a source gives them, four siblings to a prompt, with reference log-probs and text."""
    rows = []
    for index in range(count):
        if index % 4 == 0:
            prompt = torch.randint(3, VOCAB, (int(torch.randint(1, 5, ())),))
        response = torch.randint(3, VOCAB, (int(torch.randint(1, longest, ())),))
        length = len(prompt) + len(response)
        assistant = torch.arange(length) >= len(prompt)
        near = lambda assistant=assistant, length=length: torch.where(  # noqa: E731
            assistant, -3.6 + 0.2 * torch.randn(length), 0.0
        )
        row = TensorDict(
            {
                keys.FULL_TOKENS: torch.cat([prompt, response]),
                keys.ATTENTION_MASK: torch.ones(length, dtype=torch.bool),
                keys.ASSISTANT_MASK: assistant,
                keys.LOG_PROBS: near(),
                keys.REF_LOG_PROBS: near(),
                keys.ADVANTAGE: torch.randn(1, 1),
                keys.GROUP_ID: torch.tensor(index // 4),
                keys.SAMPLE_ID: torch.tensor(index % 4),
                keys.TRUNCATED: torch.tensor([False]),
            }
        )
        row.set_non_tensor(keys.RESPONSE_TEXT, f"answer {index}")
        rows.append(row)
    return lazy_stack(rows)


def learner_settings(**settings: Any) -> LearnerSettings:
    # a large eps: with 1e-8 Adam makes a whole step of a gradient that is nothing but the rounding of its sum
    chosen = {"lr": 1e-3, "eps": 1e-5, "total_steps": 40, "optim_batch_size": 5, "micro_batch_tokens": 40, **settings}
    return LearnerSettings(**chosen)


def trained_adapter(model: nn.Module, **options: Any) -> Any:
    """``model`` under an adapter as it is after some training: none of its matrices is 0."""
    adapted = add_lora(model, r=3, alpha=6, **options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return adapted


def build_learner(
    ranks: Ranks,
    dump_dir: str,
    *,
    lora: bool = False,
    dropout: float = 0.0,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    kl_coef: float = 0.05,
    in_float32: bool = False,
    family: str = "qwen2",
    shape: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Learner:
    """The same random weights for every number of ranks: rank 0's, which it sends; adapters as after some training.

    With ``in_float32`` nothing in the optimizer's step is rounded to bfloat16, as Muon's iterations are.
    """
    with torch.random.fork_rng():
        torch.manual_seed(11 + ranks.rank)
        model = make_model(family, **(shape or {})).to(dtype).train()
        if checkpointing:
            enable_gradient_checkpointing(model)
        if lora:
            model = trained_adapter(model, dropout=dropout)
    policy = CausalPolicy(model.to(device), temperature=0.8)
    if ranks.size > 1:
        shard(policy, ranks)
    loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=kl_coef)
    settings = learner_settings(**settings)
    learner = Learner(
        policy, loss, settings, pad_token_id=0, dump_dir=Path(dump_dir), ranks=ranks, tokenizer=make_tokenizer()
    )
    if in_float32:
        learner.optimizer.step = patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)(learner.optimizer.step)
    return learner


def passes_of(policy: CausalPolicy, settings: LearnerSettings, ranks: Ranks | None = None) -> Learner:
    """A learner for its plans and forward passes alone."""
    loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=0.05)
    return Learner(policy, loss, settings, pad_token_id=0, dump_dir=Path(), ranks=ranks)


class Reductions(TorchDispatchMode):
    """Counts the sums of gradients over the ranks, whatever torch's version calls the function."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


class Bench:
    """One rank's worker whose learner can be replaced, so that many invariants need two processes only."""

    def __init__(self, rank: int, size: int, init_method: str, dump_dir: str) -> None:
        self.place = {"rank": rank, "size": size, "init_method": init_method}
        self.dump_dir = dump_dir
        self.ranks: Ranks | None = None
        self.worker: LearnerWorker | None = None

    def build(self, layout: dict[str, Any], options: dict[str, Any]) -> None:
        """Put another learner in place, its ranks laid out as :class:`Ranks` says."""

        def make() -> Learner:
            if self.ranks is None:
                self.ranks = join_ranks(**self.place, device="cpu", timeout_s=300)
            ranks = Ranks(self.ranks.rank, self.ranks.size, **layout)
            return build_learner(ranks, self.dump_dir, **options)

        self.worker = LearnerWorker(make)

    def load(self, config: Config) -> None:
        """Put the learner in place that a run of ``config`` has, among the ranks that there are."""
        with patch.object(learning, "join_ranks", lambda *_, **__: self.ranks):
            place = self.place | {"device_type": "cpu", "num_threads": 1, "run_dir": self.dump_dir}
            self.worker = learning.learner_worker(config=config, **place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["worker"], name)

    def ping(self) -> float:
        return 0.0 if self.worker is None else self.worker.ping()

    def num_reductions(self, rows: RowTable) -> Future[int]:
        """How often one update sums gradients over the ranks."""

        def count() -> int:
            with Reductions() as reductions:
                self.worker.learner.update(rows)
            return reductions.count

        return self.worker._thread.submit(count)

    def num_elements(self) -> Future[tuple[int, int]]:
        """Elements that this rank keeps: of its parameters, and of its optimizer's moments."""

        def count() -> tuple[int, int]:
            learner = self.worker.learner
            moments = [entry["exp_avg"] for entry in learner.optimizer.state.values()]
            parameters = learner.policy.parameters()
            return sum(local(p).numel() for p in parameters), sum(local(m).numel() for m in moments)

        return self.worker._thread.submit(count)


def bench(**options: Any) -> Bench:
    return Bench(**options)
