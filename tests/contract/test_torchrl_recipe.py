"""TorchRL's recipe: environment, collector, buffer, advantage and loss, with our classes put in one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import UnsqueezeTransform
from torchrl.envs.llm import GSM8KEnv as TorchRLGSM8KEnv
from torchrl.objectives.llm import DAPO, CISPOLoss, MCAdvantage
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from torchrl.trainers.algorithms.grpo import GRPOTrainer
from transformers import Qwen2ForCausalLM

from sota_grpo import envs, keys
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import complete_rows
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from tests.contract.test_torchrl_env import make_policy
from tests.engine_rigs import tiny_model
from tests.unit.test_envs import char_tokenizer

NUM_ENVS, REPEATS = 4, 2
QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"<<{n}+1={n + 1}>>so\n#### {n + 1}"} for n in range(8)]


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    model = tiny_model(vocab_size=len(char_tokenizer()), eos_token_id=1, pad_token_id=0, max_position_embeddings=1024)
    model.generation_config.suppress_tokens = [0]  # TorchRL's wrapper takes padding out of responses
    return model


def our_env(tmp_path: Any) -> Any:
    path = tmp_path / "train.parquet"
    Dataset.from_list(QUESTIONS).to_parquet(path)
    return envs.GSM8KEnv(dataset=str(path), num_envs=NUM_ENVS, repeats=REPEATS, tokenizer=char_tokenizer())


def torchrl_env(tmp_path: Any) -> Any:
    """The recipe's: it is given the questions where it would download them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("datasets.load_dataset", lambda *args, **options: {"train": Dataset.from_list(QUESTIONS)})
        return TorchRLGSM8KEnv(num_envs=NUM_ENVS, repeats=REPEATS, tokenizer=char_tokenizer())


ENVS = {"ours": our_env, "TorchRL's": torchrl_env}
ADVANTAGES: dict[str, Callable[[], Any]] = {
    "GroupAdvantage": lambda: GroupAdvantage(group_size=REPEATS),
    "GroupAdvantage by query": lambda: GroupAdvantage(group_size=REPEATS, in_keys=(("next", "reward"), "query")),
    "MCAdvantage": lambda: MCAdvantage(grpo_size=REPEATS, prompt_key="query"),
}
LOSSES: dict[str, Callable[..., Any]] = {
    "ours": GRPOLoss, "GRPO": TorchRLGRPOLoss, "DAPO": DAPO, "CISPO": CISPOLoss,
}  # fmt: skip
COMBINATIONS = [
    *(("ours", "GroupAdvantage"), ("ours", "MCAdvantage")),
    *(("TorchRL's", "GroupAdvantage by query"), ("TorchRL's", "MCAdvantage")),
]


def one_batch(env: Any, sampler: Any, advantage: Any) -> TensorDictBase:
    """The recipe's loop, once, up to the loss."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(NUM_ENVS * REPEATS), sampler=SamplerWithoutReplacement(), batch_size=NUM_ENVS
    )
    buffer.append_transform(advantage)
    if isinstance(env, envs.TaskEnv) and isinstance(advantage, MCAdvantage):
        buffer.append_transform(UnsqueezeTransform(-1, in_keys=["advantage"]))  # TorchRL's rewards have one more axis
    collector = LLMCollector(
        env, policy=sampler, dialog_turns_per_batch=NUM_ENVS, total_dialog_turns=NUM_ENVS, replay_buffer=buffer,
        flatten_data=True, postproc=complete_rows,
    )  # fmt: skip
    for data in collector:
        assert data is None
    return buffer.sample()


@pytest.mark.parametrize(("env", "advantage"), COMBINATIONS)
def test_the_recipe_learns_with_each_combination(
    env: str, advantage: str, model: Qwen2ForCausalLM, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    history = {} if env == "ours" else {"input_mode": "history"}
    batch = one_batch(ENVS[env](tmp_path), make_policy(model, **history), ADVANTAGES[advantage]())
    assert batch[keys.ADVANTAGE].isfinite().all()
    for name, loss in LOSSES.items():
        model.zero_grad()
        learner = make_policy(model, generate=False, pad_output=True)
        loss(learner)(batch.clone()).mean(reduce=True).backward()
        assert model.lm_head.weight.grad.isfinite().all(), name


def test_the_trainer_of_torchrl_takes_our_collector_and_loss(model: Qwen2ForCausalLM, tmp_path: Any) -> None:
    buffer = ReplayBuffer(
        storage=LazyStackStorage(NUM_ENVS), sampler=SamplerWithoutReplacement(), batch_size=NUM_ENVS,
        transform=GroupAdvantage(),
    )  # fmt: skip
    env, sampling = our_env(tmp_path), Sampling(max_tokens=4)
    engine = TransformersEngine(copy.deepcopy(model), eos_token_ids=[1], pad_token_id=0)
    frames = {"dialog_turns_per_batch": NUM_ENVS, "total_dialog_turns": 2 * NUM_ENVS}
    trainer = GRPOTrainer(
        collector=PromptGroupCollector(env, engine, sampling=sampling, replay_buffer=buffer, **frames),
        total_frames=2 * NUM_ENVS, loss_module=GRPOLoss(model), replay_buffer=buffer, progress_bar=False,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0), empty_replay_buffer_on_weight_update=True,
    )  # fmt: skip
    trainer.train()
    assert len(trainer._log_dict["grad_norm"]) == 2
