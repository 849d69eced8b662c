"""What the gate looks at, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.batches import finish_group, group_request
from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv, prompt_rows
from sota_grpo.errors import UserError
from sota_grpo.publish import Publisher
from sota_grpo.records import GradientGap, Sampling, sample_seed
from sota_grpo.schedule import LearnerSettings
from sota_grpo.tasks.base import Task

NUM_PROMPTS, NUM_SAMPLES = 4, 2  # that the checks are made on


class CheckError(UserError):
    """The gate found something that would make the training wrong."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check; the sentence carries the measured figures."""

    name: str
    passed: bool
    sentence: str
    seconds: float = 0.0


class Answers(Protocol):
    """What the gate asks of a learner, in this process or another: see :class:`sota_grpo.learner.Learner`."""

    settings: LearnerSettings
    version: int

    def measured_with_rounding(self, rows: Sequence[TensorDictBase]) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def log_prob_gaps(self, rows: Sequence[TensorDictBase]) -> torch.Tensor: ...

    def diagnose(self, rows: Sequence[TensorDictBase]) -> dict[str, float | None]: ...

    def gradient_gap(self, rows: Sequence[TensorDictBase], token_budgets: tuple[int, int]) -> GradientGap: ...

    def perturb(self) -> None: ...

    def restore(self) -> None: ...


@dataclass
class Subject:
    """What is checked: the parts of the run as they will train.

    ``transforms`` are those of the source (reference log-probs, advantages). ``exact`` says that engine and trainer
    both compute in float32, ``packs`` that the policy is of a family whose rows are known to be packed, and that nobody
    asked for padded ones.
    """

    task: Task
    env: TaskEnv
    engine: Generates
    learner: Answers
    publisher: Publisher
    sampling: Sampling
    seed: int
    exact: bool
    transforms: Sequence[Callable[[TensorDictBase], TensorDictBase]] = ()
    packs: bool = False
    rows: list[TensorDictBase] = field(default_factory=list)

    @cached_property
    def diagnosis(self) -> dict[str, float | None]:
        """What the learner says of the rows; see :meth:`sota_grpo.learner.Learner.diagnose`."""
        return self.learner.diagnose(self.rows)

    @cached_property
    def _measured(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.learner.measured_with_rounding(self.rows)

    @property
    def said(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's log-prob of every sampled token of the rows, and its entropy there, flat, in nats."""
        log_probs, entropies = self._measured[0][:, self._sampled]
        return log_probs, entropies

    @property
    def rounding(self) -> torch.Tensor | None:
        """What half precision alone does to the trainer's log-probs of the sampled tokens; None: nobody can say."""
        found = self._measured[1]
        return None if found is None else found[self._sampled]

    @property
    def gaps(self) -> torch.Tensor:
        """Trainer's minus engine's log-prob of every sampled token of the rows, flat, in nats."""
        return self.said[0] - torch.cat([row.get(keys.LOG_PROBS) for row in self.rows])[self._sampled]

    @property
    def _sampled(self) -> torch.Tensor:
        return torch.cat([row.get(keys.ASSISTANT_MASK) for row in self.rows])

    def sample(
        self,
        num_prompts: int = NUM_PROMPTS,
        num_samples: int = NUM_SAMPLES,
        salt: int = 0,
        max_tokens: int | None = None,
    ) -> list[TensorDictBase]:
        """Fresh graded rows of the first training prompts, outside the run's own stream of prompts.

        Args:
            salt: another one draws other samples.
            max_tokens: of a response at most; None: as in training.
        """
        limit = self.sampling.max_tokens if max_tokens is None else min(max_tokens, self.sampling.max_tokens)
        sampling = replace(self.sampling, max_tokens=limit)
        examples = list(self.task.train[:num_prompts])
        requests = [
            group_request(
                self.env, index, example, num_samples=num_samples, seed=sample_seed(self.seed, index, 2 + salt)
            )
            for index, example in enumerate(examples)
        ]
        grading = []
        for output in self.engine.generate(requests, sampling):
            example = examples[output.group_id]
            prompts = prompt_rows(output.group_id, example, self.env.prompt_ids(example), num_samples)
            grading.append(self.env.begin_grading(finish_group(prompts, output, self.env.tokenizer)))
        return [row for rows in grading for row in rows.result()]
