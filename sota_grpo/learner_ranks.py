"""One rank of a learner, in a process of its own: what :class:`sota_grpo.remote_learner.RemoteLearner` talks to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from transformers import PreTrainedTokenizerBase

from sota_grpo.learner import Learner
from sota_grpo.policy.export import save_hf
from sota_grpo.policy.lora import packed_weights
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.records import GradientGap, sample_seed
from sota_grpo.workers.packing import RowPack, StatePack
from sota_grpo.workers.servant_thread import ServantThread
from sota_grpo.workers.weight_ends import WeightLayout, WeightSender
from sota_grpo.workers.weight_group import Meeting


class LearnerServant:
    """A :class:`sota_grpo.learner.Learner` as a servant (see :class:`sota_grpo.workers.base.ServantSpec`).

    Contract. Consumes: the same calls, in the same order, as the other ranks' servants. Produces: futures; what is
    gathered (states, weights) is rank 0's answer and None on the others. Waits for: the other ranks, in every
    collective. When one of them dies this one waits for it until it is killed, or until the deadline of the process
    group.

    Everything that computes runs on one thread, on which the learner is built too: collectives must not overlap, and
    the choice of a CUDA device belongs to a thread.

    Args:
        make_learner: joins the other ranks and builds this rank's learner
            (:func:`sota_grpo.policy.sharding.join_ranks`, :func:`sota_grpo.policy.sharding.shard`).
        tokenizer: written beside the exported model; None where nothing is exported.
    """

    def __init__(self, make_learner: Callable[[], Learner], tokenizer: PreTrainedTokenizerBase | None = None):
        self.tokenizer = tokenizer
        self._thread = ServantThread("learner")
        self.learner: Learner = self._thread.submit(make_learner).result()
        self.learner.policy.register_forward_hook(lambda *_: self._thread.progress())
        leads = self.learner.ranks.leads
        self._sender = WeightSender(self.learner.policy.model, leads=leads, progress=self._thread.progress)

    def update(self, rows: RowPack) -> Future[dict[str, float | None]]:
        """:meth:`Learner.update`. The random stream, which adapters' dropout reads, is this turn's and this rank's."""

        def update() -> dict[str, float | None]:
            learner = self.learner
            torch.manual_seed(sample_seed(learner.seed, learner.version, learner.ranks.rank))
            return learner.update(rows.rows())

        return self._thread.submit(update)

    def state_dict(self) -> Future[StatePack | None]:
        """:meth:`Learner.state_dict`."""

        def state_dict() -> StatePack | None:
            state = self.learner.state_dict(progress=self._thread.progress)
            return StatePack.of(state) if self.learner.ranks.leads else None

        return self._thread.submit(state_dict)

    def load_state_dict(self, state: StatePack) -> Future[None]:
        """:meth:`Learner.load_state_dict`."""
        return self._thread.submit(lambda: self.learner.load_state_dict(state.state()))

    def weights(self, base: bool = True, dtype: torch.dtype | None = None) -> Future[WeightPack | None]:
        """What engines load: :func:`sota_grpo.policy.lora.packed_weights`."""

        def weights() -> WeightPack | None:
            model, progress = self.learner.policy.model, self._thread.progress
            pack = packed_weights(model, base=base, dtype=dtype, progress=progress)
            return pack if self.learner.ranks.leads else None

        return self._thread.submit(weights)

    def weight_layout(self, dtype: torch.dtype | None) -> Future[WeightLayout]:
        """:meth:`WeightSender.weight_layout`."""
        return self._thread.submit(self._sender.weight_layout, dtype)

    def send_weights(self, meeting: Meeting | None, version: int, dtype: torch.dtype | None) -> Future[str | None]:
        """:meth:`WeightSender.send_weights`."""
        return self._thread.submit(self._sender.send_weights, meeting, version, dtype)

    def kept_weights(self) -> tuple[WeightPack, int]:
        """:meth:`WeightSender.kept_weights`, at once, whatever the learner is at."""
        return self._sender.kept_weights()

    def export_hf(self, folder: str) -> Future[None]:
        """:func:`sota_grpo.policy.export.save_hf`, written by rank 0."""
        if self.tokenizer is None:
            raise ValueError("this learner was built without a tokenizer, which an export needs")
        tokenizer = self.tokenizer
        return self._thread.submit(lambda: save_hf(self.learner.policy.model, tokenizer, folder) and None)

    def log_prob_gaps(self, rows: RowPack) -> Future[torch.Tensor]:
        """:meth:`Learner.log_prob_gaps`."""
        return self._thread.submit(lambda: self.learner.log_prob_gaps(rows.rows()))

    def measured(self, rows: RowPack) -> Future[torch.Tensor]:
        """:meth:`Learner.measured`."""
        return self._thread.submit(lambda: self.learner.measured(rows.rows()))

    def measured_with_rounding(self, rows: RowPack) -> Future[tuple[torch.Tensor, torch.Tensor | None]]:
        """:meth:`Learner.measured_with_rounding`."""
        return self._thread.submit(lambda: self.learner.measured_with_rounding(rows.rows()))

    def base_log_probs(self, rows: RowPack) -> Future[torch.Tensor]:
        """:meth:`Learner.base_log_probs`, joined over the rows."""
        return self._thread.submit(lambda: torch.cat(self.learner.base_log_probs(rows.rows())))

    def diagnose(self, rows: RowPack) -> Future[dict[str, float | None]]:
        """:meth:`Learner.diagnose`."""
        return self._thread.submit(lambda: self.learner.diagnose(rows.rows()))

    def gradient_gap(self, rows: RowPack, token_budgets: tuple[int, int]) -> Future[GradientGap]:
        """:meth:`Learner.gradient_gap`."""
        return self._thread.submit(lambda: self.learner.gradient_gap(rows.rows(), token_budgets))

    def perturb(self) -> Future[None]:
        """:meth:`Learner.perturb`."""
        return self._thread.submit(self.learner.perturb)

    def restore(self) -> Future[None]:
        """:meth:`Learner.restore`."""
        return self._thread.submit(self.learner.restore)

    def ping(self) -> float:
        """Seconds since the last forward pass or gathered weight of a call that is running; 0 when idle."""
        return self._thread.silent_s()

    def close(self) -> None:
        """End after what is queued."""
        self._thread.close()
