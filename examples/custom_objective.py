"""Train with an objective of your own: SAPO's soft gates (arXiv:2511.20347) in place of PPO's clip."""

import torch

import sota_grpo


def sapo(log_ratio, advantage, positive=1.0, negative=1.05):
    """Return the loss of each token, ``[N, T]``."""
    temperature = torch.where(advantage > 0, positive, negative)
    gate = torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature
    return -gate * advantage


result = sota_grpo.train(
    "grpo_cpu",
    objective=sapo,
    overrides=["engine=transformers", "train.total_dialog_turns=2048"],
)
print(result.metrics[["reward", "grad_norm"]])
