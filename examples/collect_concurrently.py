"""A TorchRL loop over the trainer's replay buffer, filled concurrently: no token is older than one version."""

import torch
from transformers import AutoModelForCausalLM

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import ArithmeticEnv
from sota_grpo.policy.load import load_tokenizer, resolve_model_path
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import GroupReplayBuffer

tokenizer = load_tokenizer("tiny")
model = AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"))
env = ArithmeticEnv(tokenizer=tokenizer, num_envs=16, repeats=4, num_train=200)
engine = TransformersEngine(model, eos_token_ids=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id)
buffer = GroupReplayBuffer(max_groups=8, num_groups=4, transform=GroupAdvantage())  # (age + 1) batches of four groups
collector = PromptGroupCollector(
    env,
    engine,
    sampling=Sampling(max_tokens=40),
    dialog_turns_per_batch=16,
    max_policy_age=1,
    replay_buffer=buffer,
)
collector.start()
loss_fn = GRPOLoss(model, entropy_bonus=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, rows in enumerate(buffer):  # waits until the groups that were admitted first are finished
    loss = loss_fn(pad_rows(rows, pad_token_id=tokenizer.pad_token_id))
    loss.loss_objective.backward()
    optimizer.step()
    optimizer.zero_grad()
    collector.update_policy_weights_(model)
    if step == 2:
        break
collector.shutdown()
