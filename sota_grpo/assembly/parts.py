"""What a run is made of, however it was put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from sota_grpo.assembly.learning import trainer_precision
from sota_grpo.assembly.rollout import engine_dtype, make_sampling
from sota_grpo.config import Config, turn_size
from sota_grpo.engines.base import Engine
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import DialogEngine
from sota_grpo.envs.turns import TurnTokens
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.task import Task
from sota_grpo.source.rollouts import Rollouts
from sota_grpo.source.source import RolloutSource
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.learner import Publisher


class Closable(Protocol):
    """What lives in another process or holds a device; closing it twice is fine."""

    def close(self) -> None: ...


@dataclass
class Parts:
    """Everything a run is made of.

    Attributes:
        rollouts: of the task's environment and the engine; the gate, the evaluator and the source all use them.
        learner: a :class:`~sota_grpo.training.learner.Learner`, or its facade when it spans several processes.
        transforms: what a batch goes through before it is trained on, by phase, for the gate.
        export: writes the trained model to a folder.
        exact: engine and trainer both compute in float32, so that their log-probs differ by rounding only.
        opened: closed at the end, the last one first.
    """

    task: Task
    rollouts: Rollouts
    tokenizer: Any
    learner: Any
    publisher: Publisher
    source: RolloutSource
    evaluator: Evaluator
    sampling: Sampling
    transforms: Sequence[tuple[str, Any]]
    export: Callable[[Path], object]
    exact: bool
    opened: Sequence[Closable]

    def close(self) -> None:
        """End what lives in other processes or holds a device, each even if another fails; idempotent."""
        with ExitStack() as closing:  # the last one added is closed first
            for part in self.opened:
                closing.callback(part.close)


class Crew:
    """What is started, in order; each closed again when a later one fails to start."""

    def __init__(self) -> None:
        self.parts: list[Closable] = []
        self._opened = ExitStack()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._opened.close()

    def add(self, part: Any) -> Any:
        """``part`` itself."""
        self.parts.append(part)
        self._opened.callback(part.close)
        return part


@dataclass
class Roles:
    """Who samples, learns and refers, wherever they live: all that :mod:`.local` and :mod:`.workers` have to decide.

    Attributes:
        source: options of the source that follow from where they live.
        transforms, learner, publisher, export: as in :class:`Parts`.
    """

    engine: Engine
    learner: Any
    publisher: Publisher
    source: Mapping[str, Any]
    transforms: Sequence[tuple[str, Any]]
    export: Callable[[Path], object]


logger = logging.getLogger(__name__)


def make_evaluator(config: Config, task: Task, rollouts: Rollouts) -> Evaluator:
    """The evaluator on the first held-out problems; warns where there are fewer than were asked for."""
    asked, found = config.eval.num_samples, len(task.heldout)
    if config.eval.mode == "on" and found < asked:
        logger.warning("eval.num_samples=%d, and only %d problems are held out: %d are measured.", asked, found, found)
    return Evaluator(
        rollouts,
        task.heldout[:asked],
        max_tokens=config.inference_model.max_tokens,
        avg_at_k=config.eval.avg_at_k,
        seed=config.seed,
    )


def make_rollouts(config: Config, env: TaskEnv, engine: Engine) -> Rollouts:
    """Over ``engine`` itself, or with ``env.max_steps`` above 1 over what samples whole dialogs with it."""
    if config.env.max_steps > 1:
        turns = TurnTokens(env.tokenizer, env.template_kwargs)
        engine = DialogEngine(engine, env.grader, turns, max_steps=config.env.max_steps)
    return Rollouts(env, engine)


def make_source(config: Config, rollouts: Rollouts, **options: Any) -> RolloutSource:
    """What the config says of the source, and ``options`` of :class:`~sota_grpo.source.source.RolloutSource`."""
    return RolloutSource(
        rollouts,
        make_sampling(config),
        num_groups=turn_size(config) // config.env.repeats,
        max_policy_age=config.train.max_policy_age,
        seed=config.seed,
        refill=config.algorithm.dynamic_sampling,
        max_draws=config.algorithm.dynamic_sampling_max_draws,
        **options,
    )


def make_publisher(model: nn.Module, engine: Engine, *, share_device: bool = False) -> Publisher:
    """Merged weights of ``model``, pushed to ``engine``."""
    return Publisher(lambda: engine_weights(model), [engine], share_device=share_device)


def numerics_are_exact(config: Config, device_type: str) -> bool:
    """Whether engine and trainer both compute in float32, so that their log-probs differ by rounding only."""
    engine = engine_dtype(config.inference_model.torch_dtype, device_type)
    trainer = config.train_model.torch_dtype
    return engine == "float32" and trainer_precision(config, device_type) == "fp32" and trainer in ("auto", "float32")
