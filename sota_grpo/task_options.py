"""The options of the task: its data, its dialogs, and how responses are rewarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sota_grpo.options import opt

DATASETS = ("gsm8k", "math", "ifeval", "instructions", "reasoning", "table", "arithmetic", "countdown", "calculator")


@dataclass
class EnvConfig:
    """The task, its data, and how many dialogs run at once."""

    dataset: str = opt("gsm8k", "task to train on; table is your own data", DATASETS)
    dataset_path: str | None = opt(
        None,
        "local .jsonl/.json/.parquet/.csv with the task's columns, or (table) a hub name; null: the task's own hub",
    )
    eval_path: str | None = opt(
        None, "local file of held-out problems; null: the hub's test split, or part of the data"
    )
    prompt_column: str = opt("prompt", "table: column of the prompts, text or chat lists")
    answer_column: str = opt("ground_truth", "table: column of the right answers")
    num_envs: int = opt(64, "dialogs in flight")
    repeats: int = opt(8, "group size: responses per prompt")
    shuffle: bool = opt(True, "a fresh order of the prompts every epoch, derived from the seed")
    max_samples: int | None = opt(None, "train on the first so many examples only; null: all")
    num_heldout: int = opt(512, "examples held out for evaluation where the task has no test split of its own")
    answer_format: str | None = opt(
        None,
        "where the answer stands in a response; null: where the task asks for it",
        ("hash", "boxed", "tags", "last_number", "any"),
    )
    format_weight: float | None = opt(
        None, "reward for an answer in the asked form, beside the 1.0 for a right one; null: the task's own"
    )
    system_prompt: str | None = opt(None, "replaces the task's own system prompt; an empty text leaves it out")
    difficulty: int = opt(4, "arithmetic only: most steps of a problem, 1 to 4")
    reasoning: bool = opt(False, "a wrong response is asked to think again, up to env.max_steps turns in all")
    max_steps: int = opt(1, "most turns of a dialog; inference_model.max_tokens is the length of one turn")
    reward_workers: int = opt(
        1, "processes that grade responses; 0: in the trainer, where a grader that hangs hangs the run"
    )
    reward_timeout_s: float = opt(
        60.0,
        "longest time for grading one response (a group, for functions that take groups); then its grader is replaced",
    )


@dataclass
class RewardConfig:
    """Reward functions of your own, and what the tasks' own terms weigh."""

    path: str | None = opt(None, "Python file with reward functions, which replace the task's own reward")
    name: Any = opt(None, "function in reward.path, or a list of them; null: compute_score")
    weights: list[float] | None = opt(None, "weight of each function of reward.name; null: 1 each")
    success_above: float = opt(0.0, "reward functions that do not say what is right: a greater reward is a success")
    correct: float = opt(1.0, "math: reward of a right answer")
    wrong: float = opt(-1.0, "math: reward of a wrong answer")
    no_answer: float = opt(-0.5, "math: reward of a response without an answer")
    instructions_weight: float = opt(1.0, "ifeval, instructions: weight of the share of instructions that are followed")
    all_weight: float = opt(0.0, "ifeval, instructions: reward beside it where all instructions are followed")
    thinking_weight: float = opt(0.2, "reasoning: weight of the term that penalises short thinking")
    min_think_words: int = opt(20, "reasoning: words of thinking below which it is penalised")
