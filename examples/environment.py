"""Train in an environment of several turns, of TRL's protocol: its public methods are the tools of the policy.

The embedded policy makes no calls before ``make agent`` has taught it to.
"""

import sota_grpo


class Guess:
    """Find a number between 1 and 9."""

    def reset(self, ground_truth: str, **row) -> str:
        self.secret, self.found = int(ground_truth), False
        return "I think of a number between 1 and 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self.found = self.found or number == self.secret
        return "Right." if self.found else "Higher." if number < self.secret else "Lower."

    def get_reward(self) -> float:
        return float(self.found)


rows = [
    {"prompt": [{"role": "user", "content": f"Round {n}: guess."}], "ground_truth": str(1 + n % 9)} for n in range(64)
]
result = sota_grpo.train(
    "grpo_cpu",
    dataset=rows,
    environment=Guess,
    overrides=[
        "env.max_steps=3",
        "engine=transformers",
        "eval.mode=off",
        "train.total_dialog_turns=1024",
    ],
)
print(result.metrics[["reward", "response_tokens/mean"]])
