"""Train a policy that may call a tool. The embedded policy makes no calls before ``make agent`` has taught it to."""

import sota_grpo


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


def right(completions, answer, **columns):
    return [float(gold in completion[-1]["content"]) for completion, gold in zip(completions, answer)]


rows = [{"prompt": [{"role": "user", "content": f"How much is {n} * 7?"}], "answer": str(7 * n)} for n in range(10, 74)]
result = sota_grpo.train(
    "grpo_cpu",
    reward=right,
    dataset=rows,
    tools=[multiply],
    overrides=[
        "env.max_steps=3",
        "engine=transformers",
        "eval.mode=off",
        "train.total_dialog_turns=128",
    ],
)
print(result.metrics[["reward", "success"]])
