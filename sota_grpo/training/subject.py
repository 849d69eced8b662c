"""What the checks before training are made of, and what one says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from sota_grpo import keys
from sota_grpo.errors import UserError
from sota_grpo.rl.records import Sampling, sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import Task
from sota_grpo.source.rollouts import Prompt, Rollouts
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import RemoteLearner

NUM_PROMPTS, NUM_SAMPLES = 4, 2  # that the checks are made on; of a mixture at least one prompt of each task
ROWS_TRAINED = 3  # training on so many costs as much as all checks of one: each passes forward nine times at most
FEWEST_TOKENS = 64  # of a response, however small a step is


@dataclass(frozen=True)
class Check:
    """The outcome of one check; the sentence carries the measured figures.

    ``passed`` is None where there was nothing to look at: that is no failure, and it does not count as passed.
    """

    name: str
    passed: bool | None
    sentence: str
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return {True: "passed", False: "FAILED", None: "not made"}[self.passed]


class CheckError(UserError):
    """The gate found something that would make the training wrong: ``check``."""

    def __init__(self, check: Check) -> None:
        failed = f"The check before training failed ({check.name}): {check.sentence}"
        super().__init__(f"{failed}; check.mode=warn trains all the same.")
        self.check = check


@dataclass(frozen=True)
class NamedReference:
    """A reference, or a teacher, called ``name``, that is not the policy at its start.

    ``vocabulary`` gives its tokens with their ids; it reads at most ``context`` tokens (None: not known), and prompt
    and response of the run may have ``longest`` together.
    """

    name: str
    policy: str
    vocabulary: Mapping[str, int]
    context: int | None
    longest: int


@dataclass
class Subject:
    """The components of the run as they will train.

    Args:
        exact: engine and trainer both compute in float32.
        num_layers: of the policy's decoder.
        transforms: those of the collector (reference log-probs, advantages).
        packs: the policy is of a family whose rows are known to be packed, and padded ones were not asked for.
        reference: where it is another model.
        reference_exact: whether the weights of a reference that is the policy at its start have the dtype of the
            policy's; None: there is no such reference, or training has begun.
        stop: texts that end a response beside the end tokens.
    """

    task: Task
    rollouts: Rollouts
    learner: Learner | RemoteLearner
    weight_sync: EngineWeightSync
    sampling: Sampling
    seed: int
    exact: bool
    num_layers: int
    transforms: Sequence[Callable[[RowTable], RowTable]] = ()
    packs: bool = False
    rows: RowTable = field(default_factory=lambda: RowTable(0, {}))
    reference: NamedReference | None = None
    reference_exact: bool | None = None
    stop: Sequence[str] = ()

    @cached_property
    def diagnosis(self) -> dict[str, float | None]:
        """See :meth:`sota_grpo.training.learner.Learner.diagnose`."""
        return self.learner.diagnose(self.rows)

    @cached_property
    def _measured(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.learner.measured_with_rounding(self.rows)

    @property
    def said(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's log-prob of every sampled token of the rows, and its entropy there, flat, in nats."""
        log_probs, entropies = self._measured[0][:, sampled_tokens(self.rows)]
        return log_probs, entropies

    @property
    def rounding(self) -> torch.Tensor | None:
        """What half precision alone does to the trainer's log-probs of the sampled tokens; None: not known."""
        of_all = self._measured[1]
        return None if of_all is None else of_all[sampled_tokens(self.rows)]

    @property
    def gaps(self) -> torch.Tensor:
        """Trainer's minus engine's log-prob of every sampled token of the rows, flat, in nats."""
        return self.said[0] - self.rows.flat(keys.LOG_PROBS)[sampled_tokens(self.rows)]

    @property
    def num_prompts(self) -> int:
        """That the checks are made on."""
        return max(NUM_PROMPTS, len(getattr(self.task, "tasks", ())))

    @property
    def max_tokens(self) -> int:
        """Of a response that the checks sample: as in training, where they cost no more than an optimizer step then."""
        step = self.sampling.max_tokens * self.learner.settings.optim_batch_size
        affordable = step // (ROWS_TRAINED * self.num_prompts * NUM_SAMPLES)
        return min(self.sampling.max_tokens, max(affordable, FEWEST_TOKENS))

    def sample(
        self,
        num_prompts: int = NUM_PROMPTS,
        num_samples: int = NUM_SAMPLES,
        salt: int = 0,
        max_tokens: int | None = None,
    ) -> RowTable:
        """Fresh graded rows of the first training prompts, outside the run's own stream of prompts.

        Args:
            salt: another one draws other samples.
            max_tokens: of a response at most; None: :attr:`max_tokens`.
        """
        num_prompts = max(num_prompts, self.num_prompts)
        sampling = replace(self.sampling, max_tokens=min(max_tokens or self.max_tokens, self.max_tokens))
        prompts = [
            Prompt(index, example, num_samples, sample_seed(self.seed, index, 2 + salt))
            for index, example in enumerate(self.task.train[:num_prompts])
        ]
        groups = sorted(self.rollouts.stream(prompts, sampling), key=lambda group: group.prompt.group_id)
        return RowTable.cat([group.rows for group in groups])


def sampled_tokens(rows: RowTable) -> torch.Tensor:
    """Return which tokens of the flat rows the policy sampled, bool ``[sum T_i]``."""
    return rows.flat(keys.ASSISTANT_MASK)
