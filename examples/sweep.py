"""Train with two learning rates and compare the runs."""

from pathlib import Path

import sota_grpo
from sota_grpo.sweeps import as_text, read_sweep

folder = Path("multirun/learning_rates")
for lr in (1e-4, 1e-3):
    sota_grpo.train(
        "grpo_cpu",
        overrides=[f"optimizer.lr={lr}", "engine=transformers", "train.total_dialog_turns=2048"],
        run_dir=folder / f"lr_{lr}",
    )
print(as_text(read_sweep(folder)))
