"""Train on GSM8K, which the hub or the folder ``openai/gsm8k`` has. On a GPU replace ``grpo_cpu`` by ``grpo_gsm8k``."""

import sota_grpo

result = sota_grpo.train(
    "grpo_cpu",
    overrides=["env.dataset=gsm8k", "engine=transformers", "train.total_dialog_turns=2048"],
)
print(result.metrics[["reward", "success"]])
