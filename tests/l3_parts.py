"""The parts of a small run on the embedded policy: real task, real engine, real learner."""

from __future__ import annotations

from pathlib import Path

import torch

from sota_grpo.engines.hf import TransformersEngine
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs import TaskEnv
from sota_grpo.gate import Subject
from sota_grpo.learner import Learner
from sota_grpo.objectives import GRPOLoss
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.policy.lora import engine_weights
from sota_grpo.publish import Publisher
from sota_grpo.records import Sampling
from sota_grpo.schedule import LearnerSettings
from sota_grpo.tasks.arithmetic import ArithmeticTask

TEMPERATURE = 0.8


def make_env(*, num_envs: int = 16, repeats: int = 4, **task) -> TaskEnv:
    task = ArithmeticTask(seed=1, **{"num_train": 200, "num_heldout": 40, **task})
    return TaskEnv(task, load_tokenizer("tiny"), num_envs=num_envs, repeats=repeats)


def make_scripted(env: TaskEnv) -> ScriptedEngine:
    """Answers rightly where group id plus sample index is even; in groups divisible by 3 always."""
    tokenizer = env.tokenizer
    gold: dict[tuple[int, ...], str] = {}
    for example in env.task.train:
        gold[env.prompt_ids(example)] = env.task.gold_response(example)

    def script(request, index: int, version: int) -> list[int]:
        right = request.group_id % 3 == 0 or (request.group_id + index) % 2 == 0
        text = gold[request.prompt_ids] if right else "no idea\n#### 1000003"
        return tokenizer(text)["input_ids"]

    return ScriptedEngine(script, eos_token_id=tokenizer.eos_token_id, max_model_len=2048)


def make_subject(
    tmp_path: Path,
    *,
    engine_temperature: float = TEMPERATURE,
    adapter=None,
    engine_dtype: torch.dtype | None = None,
    max_tokens: int = 32,
    seed: int = 0,
    **settings,
) -> Subject:
    """``engine_dtype`` or a ``precision`` other than float32 gives the tolerance of half precision."""
    torch.manual_seed(0)
    env = make_env()
    base = load_model("tiny")
    tokenizer = env.tokenizer
    ids = {"eos_token_ids": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    engine = TransformersEngine(base, dtype=engine_dtype, **ids)
    model = base if adapter is None else adapter(base)
    policy = CausalPolicy(model, temperature=TEMPERATURE)
    loss = GRPOLoss(policy, entropy_bonus=False)
    chosen = LearnerSettings(**{"lr": 1e-4, "total_steps": 4, "optim_batch_size": 16, **settings})
    learner = Learner(policy, loss, chosen, pad_token_id=tokenizer.pad_token_id, dump_dir=tmp_path)
    return Subject(
        task=env.task,
        env=env,
        engine=engine,
        learner=learner,
        publisher=Publisher(lambda: engine_weights(model), [engine]),
        sampling=Sampling(max_tokens=max_tokens, temperature=engine_temperature),
        seed=seed,
        tolerance=1e-4 if engine_dtype is None and chosen.precision == "fp32" else 5e-2,
    )
