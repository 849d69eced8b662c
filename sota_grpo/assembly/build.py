"""One run is put together: what is cheap and can be wrong first, then learner, engine and source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from sota_grpo.assembly.cluster import visible_gpus
from sota_grpo.assembly.cuda import use_expandable_segments, why_no_gpu
from sota_grpo.assembly.devices import make_plan, resolve_device
from sota_grpo.assembly.local import build_local
from sota_grpo.assembly.parts import Parts
from sota_grpo.assembly.preflight import require_sinks
from sota_grpo.assembly.rollout import make_env, make_grader
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
    require_sinks(config)
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
    with ExitStack() as opened:
        grader = make_grader(config, task)
        opened.callback(grader.close)
        env = make_env(config, task, tokenizer, grader)
        torch.manual_seed(config.seed)
        if plan.workers:
            from sota_grpo.assembly.workers import build_workers

            parts = build_workers(config, plan, task, env, tokenizer, run_dir, should_stop)
        else:
            parts = build_local(config, plan, task, env, tokenizer, run_dir)
        if isinstance(grader, GradingPool):
            opened.callback(parts.close)
            starting("Waiting for the reward workers")
            grader.wait_ready()  # it has started beside the rest; what keeps it from starting is told before the gate
        parts.opened = [grader, *parts.opened]  # the last one closed: the others may wait for scores
        opened.pop_all()
    return parts
