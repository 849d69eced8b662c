"""One run is put together: what is cheap and can be wrong first, then learner, engine and source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from sota_grpo.assembly.cluster import visible_gpus
from sota_grpo.assembly.cuda import use_expandable_segments, why_no_gpu
from sota_grpo.assembly.devices import make_plan, resolve_device
from sota_grpo.assembly.local import roles_here
from sota_grpo.assembly.parts import (
    Crew,
    Parts,
    make_evaluator,
    make_rollouts,
    make_source,
    numerics_are_exact,
)
from sota_grpo.assembly.rollout import make_env, make_grader, make_sampling
from sota_grpo.assembly.tasks import task_of
from sota_grpo.config import Config, model_name
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.heartbeat import starting
from sota_grpo.rewards.function_file import Functions
from sota_grpo.rewards.grading import GradingPool

logger = logging.getLogger(__name__)


def build(
    config: Config,
    run_dir: Path,
    should_stop: Callable[[], bool] = lambda: False,
    functions: Functions | None = None,
) -> Parts:
    """Assemble the run. What is cheap and can be wrong (data, prompts, devices) comes before what is slow.

    Args:
        should_stop: asked while a batch is waited for; true ends the wait (``Interrupted``).
        functions: reward functions that were passed as objects (:mod:`sota_grpo.assembly.passed`).
    """
    device = resolve_device(config)
    if device == "cuda":
        use_expandable_segments(config)
    elif config.device == "auto" and (reason := why_no_gpu()):
        logger.warning("Training on the CPU. %s", reason)
    plan = make_plan(config, device, lambda: visible_gpus(config))
    for note in plan.notes:
        logger.info(note)
    logger.info("Device %s, engine %s.", device, plan.engine)
    starting("Reading the tokenizer and the data")
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    task = task_of(config, functions)
    with Crew() as crew:
        # the last one closed: the others may wait for scores
        grader = crew.add(make_grader(config, task))
        env = make_env(config, task, tokenizer, grader)
        torch.manual_seed(config.seed)
        if plan.workers:
            from sota_grpo.assembly.workers import roles_in_workers

            roles = roles_in_workers(config, plan, env, tokenizer, run_dir, should_stop, crew)
        else:
            roles = roles_here(config, plan, tokenizer, run_dir, crew)
        rollouts = make_rollouts(config, env, roles.engine)
        source = crew.add(make_source(config, rollouts, **roles.source))
        if isinstance(grader, GradingPool):
            starting("Waiting for the reward workers")
            grader.wait_ready()  # it has started beside the rest; what keeps it from starting is told before the gate
        return Parts(
            task=task,
            rollouts=rollouts,
            tokenizer=tokenizer,
            learner=roles.learner,
            publisher=roles.publisher,
            source=source,
            evaluator=make_evaluator(config, task, rollouts),
            sampling=make_sampling(config),
            transforms=roles.transforms,
            export=roles.export,
            exact=numerics_are_exact(config, plan.device_type),
            opened=crew.parts,
        )
