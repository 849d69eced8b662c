"""Train synchronously: ``python grpo.py [--config-name NAME] [key=value ...]``; ``--help`` lists every option."""

import os

# OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sota_grpo.run.entry import entry

if __name__ == "__main__":
    entry(mode="sync")
