"""The parts of a small run on the embedded policy: real task, real engine, real learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchrl.envs.transforms import Compose, Transform

from sota_grpo.engines import Engine
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.prompts import Rollouts
from sota_grpo.functional import max_groups_admitted
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.records import Example, GroupRequest, Sampling, Score
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import GroupReplayBuffer, Timed
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.training.gate import TrainingComponents
from sota_grpo.training.learner import Learner
from tests.unit.graders import WEIGHTS

TEMPERATURE = 0.8


class MoodyTask(ArithmeticTask):
    """For a grader that is :func:`tests.unit.graders.moody`, in processes of its own."""

    term_weights = WEIGHTS


def score_of(env: TaskEnv, token_ids: torch.Tensor, example: Example) -> Score:
    """The score of one response ``[R]``."""
    return env.grader.scores([(env.decode(token_ids), example)]).result()[0]


def make_env(
    *,
    num_envs: int = 16,
    repeats: int = 4,
    grader: Grader | None = None,
    multi_turn: bool = False,
    kind: type[ArithmeticTask] = ArithmeticTask,
    **task,
) -> TaskEnv:
    task = kind(seed=1, **{"num_train": 200, "num_heldout": 40, **task})
    options = {"num_envs": num_envs, "repeats": repeats, "grader": grader}
    env = TaskEnv(task, load_tokenizer("tiny"), **options)
    env.multi_turn = multi_turn
    return env


def make_saying(env: TaskEnv, say: Callable[[GroupRequest, int], str], **options) -> ScriptedEngine:
    """Sample ``index`` of a request says ``say(request, index)``."""
    ids = {"eos_token_id": env.tokenizer.eos_token_id, "max_model_len": 2048}
    return ScriptedEngine(
        lambda request, index, version: env.tokenizer(say(request, index))["input_ids"], **ids, **options
    )


def make_scripted(env: TaskEnv) -> ScriptedEngine:
    """Answers rightly where group id plus sample index is even; in groups divisible by 3 always."""
    gold: dict[tuple[int, ...], str] = {}
    for example in env.task.train:
        gold[env.prompt_ids(example)] = env.task.gold_response(example)

    def say(request: GroupRequest, index: int) -> str:
        right = request.group_id % 3 == 0 or (request.group_id + index) % 2 == 0
        return gold[request.prompt_ids] if right else "no idea\n#### 1000003"

    return make_saying(env, say)


def make_components(
    tmp_path: Path,
    *,
    temperature: float = TEMPERATURE,
    engine_temperature: float | None = None,
    top_p: float = 1.0,
    adapter=None,
    engine_dtype: torch.dtype | None = None,
    max_tokens: int = 32,
    seed: int = 0,
    objective: Any = "clipped",
    **settings,
) -> TrainingComponents:
    """``engine_dtype`` or a ``precision`` other than float32 gives the bounds of half precision."""
    torch.manual_seed(0)
    env = make_env()
    base = load_model("tiny")
    tokenizer = env.tokenizer
    ids = {"eos_token_ids": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    engine = TransformersEngine(base, dtype=engine_dtype, **ids)
    model = base if adapter is None else adapter(base)
    policy = CausalPolicy(model, temperature=temperature)
    loss = GRPOLoss(policy, entropy_bonus=False, objective=objective)
    chosen = LearnerSettings(**{"lr": 1e-4, "total_steps": 4, "optim_batch_size": 24, **settings})
    learner = Learner(policy, loss, chosen, pad_token_id=tokenizer.pad_token_id, dump_dir=tmp_path)
    return TrainingComponents(
        task=env.task,
        rollouts=Rollouts(env, engine),
        learner=learner,
        weight_sync=EngineWeightSync(lambda: engine_weights(model), engine),
        sampling=Sampling(max_tokens=max_tokens, temperature=engine_temperature or temperature, top_p=top_p),
        seed=seed,
        exact=engine_dtype is None and chosen.precision == "fp32",
        num_layers=model.config.num_hidden_layers,
        transforms=[GroupAdvantage()],
    )


def collector_of(
    env: TaskEnv,
    engine: Engine,
    sampling: Sampling,
    *,
    num_groups: int,
    beside: bool = False,
    dispatch: bool = True,
    max_policy_age: int = 0,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> PromptGroupCollector:
    """As a run has it: in turns with the learner, or ``beside`` it, where ``next_batch`` is the buffer's sample."""
    batch = {"dialog_turns_per_batch": num_groups * env.repeats, "sampling": sampling}
    timed = Compose(*(Timed("score", transform) for transform in transforms))
    if not beside:
        return PromptGroupCollector(env, engine, postproc=timed, as_table=True, **batch, **options)
    slots = max_groups_admitted(max_policy_age, num_groups)
    buffer = GroupReplayBuffer(slots, num_groups, transform=timed, as_table=True)
    collector = PromptGroupCollector(
        env, engine, max_policy_age=max_policy_age, replay_buffer=buffer, **batch, **options
    )
    collector.start(dispatch=dispatch)
    return collector
