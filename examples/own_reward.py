"""Train with rows and a reward function of your own."""

import sota_grpo


def brief(completions, **columns):
    """Return one number per response of a group; ``columns`` has the columns of the rows."""
    return [1 / (1 + len(text)) for text in completions]


rows = [{"prompt": f"How much is {n} + 1?", "answer": str(n + 1)} for n in range(64)]
result = sota_grpo.train(
    "grpo_cpu",
    reward=brief,
    dataset=rows,
    overrides=["engine=transformers", "eval.mode=off", "train.total_dialog_turns=1024"],
)
print(result.metrics[["reward", "response_tokens/mean"]])
