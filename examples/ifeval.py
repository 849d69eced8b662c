"""Train on prompts whose instructions a program can check. On a GPU replace ``grpo_cpu`` by ``grpo_ifeval``."""

import sota_grpo

result = sota_grpo.train(
    "grpo_cpu",
    overrides=["env.dataset=ifeval", "engine=transformers", "train.total_dialog_turns=2048"],
)
print(result.metrics[["reward", "response_tokens/mean"]])
