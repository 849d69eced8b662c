"""Train in lockstep: ``python grpo.py [--config-name NAME] [key=value ...]``; ``--help`` lists every option."""

from sota_grpo.app import entry

if __name__ == "__main__":
    entry(mode="sync")
