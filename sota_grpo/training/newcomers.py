"""Engines that come when the run is under way: each is checked as those before it were, before it gets a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.table import RowTable
from sota_grpo.source.source import Graded, Prompt, Rollouts
from sota_grpo.stopping import Interrupted
from sota_grpo.training.gate import PROBE_TOKENS, pushed_weights_landed, run_gate
from sota_grpo.training.learner import Publisher
from sota_grpo.training.remote_learner import LearnerDied
from sota_grpo.training.subject import CheckError, Subject
from sota_grpo.workers.base import WorkerDied
from sota_grpo.workers.elastic import ElasticFleet, Newcomer
from sota_grpo.workers.rollout import FleetEngine

logger = logging.getLogger(__name__)


class Newcomers:
    """Makes the gate's check of landed weights on every engine that comes after the gate has begun.

    Contract. Consumes: workers that the fleet holds (:meth:`~sota_grpo.workers.elastic.ElasticFleet.hold_newcomers`).
    Produces: workers with the weights that are served, admitted or refused. Waits for: the worker, for two pushes and
    three short samples. When it dies or hangs meanwhile, the fleet replaces it.

    The check changes the learner's weights and puts them back, so it is made by whoever has the learner, while that
    rests: :meth:`attend` is called before each batch, and again and again while one, or an evaluation, is waited for.

    Args:
        fleet: of the engines.
        front: the same as one engine.
        weights: what a push hands over, the whole or an adapter (:class:`~sota_grpo.training.learner.Publisher`).
        mode: ``check.mode``; with ``off`` nobody is held.
    """

    def __init__(self, fleet: ElasticFleet, front: FleetEngine, weights: Callable[[], Any], mode: str):
        self._fleet, self._front, self._weights, self._mode = fleet, front, weights, mode
        self._subject: Subject | None = None
        if mode != "off":
            fleet.hold_newcomers()

    def begin(self, subject: Subject) -> None:
        """The gate has passed ``subject``; those who come are checked from now on."""
        self._subject = replace(subject, rows=RowTable(0, {}))

    def attend(self) -> None:
        """Check and admit those that are there.

        Before :meth:`begin` they are admitted only where the gate has no other engine left, and it checks them itself.
        """
        for newcomer in self._fleet.newcomers():
            if self._subject is not None:
                self._examine(newcomer, self._subject)
            elif self._fleet.num_live == 0:
                self._fleet.admit(newcomer)

    def _examine(self, newcomer: Newcomer, run: Subject) -> None:
        alone = self._front.over(newcomer)
        subject = replace(run, rollouts=_Samples(run.rollouts.env, alone), publisher=Publisher(self._weights, [alone]))
        logger.info("Checking the weights of %s, which joins the run.", newcomer.worker.name)
        try:
            subject.rows = subject.sample(max_tokens=PROBE_TOKENS)
            run_gate(subject, self._mode, [pushed_weights_landed])
        except CheckError as error:
            self._fleet.refuse(newcomer, f"{error.check.name}: {error.check.sentence}")
        except (LearnerDied, Interrupted):
            raise
        except (WorkerDied, TimeoutError) as error:
            self._fleet.lose(newcomer, f"it was lost while its weights were checked: {error}")
        except Exception as error:  # an actor's own, of any class: the other engines go on
            self._fleet.refuse(newcomer, f"its weights cannot be checked: {type(error).__name__}: {error}")
        else:
            self._fleet.admit(newcomer)


class _Samples(Rollouts):
    """What an engine says, not graded: tools, judges and reward functions have no part in where weights are."""

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        requests = [replace(self.request(prompt), example=None) for prompt in prompts]
        groups = [self.engine.submit(request, sampling) for request in requests]
        for prompt, request, group in zip(prompts, requests, groups, strict=True):
            samples = group.result().samples
            drawn = drawn_entries(prompt.group_id, prompt.example, request.prompt_ids)
            yield Graded(prompt, samples, group_table(drawn, samples, self.env.tokenizer), ())
