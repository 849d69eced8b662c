"""From a config to the parts of a run, each room given plain values only; part of the one assembly with ``app.py``."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sota_grpo.assembly.devices import device_name, make_placement, resolve_device
from sota_grpo.assembly.learning import add_adapter, make_learner, make_model, make_reference, make_transforms
from sota_grpo.assembly.rollout import (
    engine_dtype,
    make_env,
    make_sampling,
    start_engine,
    task_of,
)
from sota_grpo.collectors import RolloutCollector, SyncSource
from sota_grpo.config import Config
from sota_grpo.engines.base import Engine
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.evaluate import Evaluator
from sota_grpo.learner import Learner
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.reference import ReferencePolicy
from sota_grpo.publish import Publisher
from sota_grpo.records import Sampling
from sota_grpo.tasks.base import Task

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """Everything a run is made of."""

    task: Task
    env: TaskEnv
    tokenizer: Any
    model: nn.Module
    engine: Engine
    reference: ReferencePolicy | None
    learner: Learner
    publisher: Publisher
    source: SyncSource
    evaluator: Evaluator
    sampling: Sampling
    exact: bool

    def close(self) -> None:
        """End what lives in other processes or holds a device, the one even if the other fails; idempotent."""
        with ExitStack() as closing:  # the last one added is closed first
            if self.reference is not None:
                closing.callback(self.reference.close)
            closing.callback(self.engine.close)


def build(config: Config, run_dir: Path) -> Parts:
    """Assemble the run. What is cheap and can be wrong (data, prompts, devices) comes before what is slow."""
    _require_wandb(config)
    device_type = resolve_device(config)
    placement = make_placement(config, device_type)
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    task = task_of(config)
    env = make_env(config, task, tokenizer)
    torch.manual_seed(config.seed)
    device = torch.device(device_name(device_type, placement.train))
    with ExitStack() as opened:  # closes what was started when a later part fails
        base = make_model(config, device)
        # the engine copies the model while that has no adapter
        engine = start_engine(config, device_name(device_type, placement.inference), tokenizer, base)
        opened.callback(engine.close)
        model = add_adapter(config, base)
        policy = CausalPolicy(
            model,
            temperature=config.inference_model.temperature,
            entropy_grad=config.algorithm.entropy_coef > 0,
        )
        reference = make_reference(config, policy, placement, device_type)
        if reference is not None:
            opened.callback(reference.close)
        learner = make_learner(config, policy, tokenizer.pad_token_id, device_type, run_dir)
        parts = Parts(
            task=task,
            env=env,
            tokenizer=tokenizer,
            model=model,
            engine=engine,
            reference=reference,
            learner=learner,
            publisher=Publisher(lambda: engine_weights(model), [engine]),
            source=_source(config, env, engine, reference, learner, placement.colocated and device_type == "cuda"),
            evaluator=_evaluator(config, task, env, engine),
            sampling=make_sampling(config),
            exact=_is_exact(config, learner, device_type),
        )
        opened.pop_all()
    return parts


def _require_wandb(config: Config) -> None:
    if config.logging.wandb == "online" and find_spec("wandb") is None:
        raise UserError(
            "logging.wandb=online needs wandb, which is not installed: `pip install 'sota-grpo[wandb]'`, or set "
            "logging.wandb=disabled."
        )


def _source(
    config: Config,
    env: TaskEnv,
    engine: Engine,
    reference: ReferencePolicy | None,
    learner: Learner,
    sleep_engine: bool,
) -> SyncSource:
    collector = RolloutCollector(
        env,
        engine,
        sampling=make_sampling(config),
        dialog_turns_per_batch=config.train.dialog_turns_per_batch,
        total_dialog_turns=config.train.total_dialog_turns,
        seed=config.seed,
    )
    return SyncSource(
        collector,
        make_transforms(config, reference, learner),
        num_groups=config.train.dialog_turns_per_batch // config.env.repeats,
        max_policy_age=config.train.max_policy_age,
        refill=config.algorithm.dynamic_sampling,
        max_draws=config.algorithm.dynamic_sampling_max_draws,
        sleep_engine=sleep_engine,
    )


def _evaluator(config: Config, task: Task, env: TaskEnv, engine: Engine) -> Evaluator:
    asked, found = config.eval.num_samples, len(task.heldout)
    if config.eval.mode == "on" and found < asked:
        logger.warning("eval.num_samples=%d, and only %d problems are held out: %d are measured.", asked, found, found)
    return Evaluator(
        env,
        engine,
        task.heldout[:asked],
        max_tokens=config.inference_model.max_tokens,
        avg_at_k=config.eval.avg_at_k,
        seed=config.seed,
    )


def _is_exact(config: Config, learner: Learner, device_type: str) -> bool:
    """Whether engine and trainer both compute in float32, so that their log-probs differ by rounding only."""
    engine = engine_dtype(config.inference_model.torch_dtype, device_type)
    trainer = config.train_model.torch_dtype
    return engine == "float32" and learner.settings.precision == "fp32" and trainer in ("auto", "float32")
