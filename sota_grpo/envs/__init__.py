"""Environments: prompts out, token ids in, rewards back (docs/design.md, "The contracts between rooms")."""

from sota_grpo.envs.named import ArithmeticEnv, GSM8KEnv, IFEvalEnv, MATHEnv
from sota_grpo.envs.task_env import PromptStream, TaskEnv, complete_rows, finish_rows, prompt_rows

__all__ = [
    "ArithmeticEnv",
    "GSM8KEnv",
    "IFEvalEnv",
    "MATHEnv",
    "PromptStream",
    "TaskEnv",
    "complete_rows",
    "finish_rows",
    "prompt_rows",
]
