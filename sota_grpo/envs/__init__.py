"""Environments: prompts out, token ids in, rewards back (docs/design.md, "The contracts between rooms").

Every task is one (:class:`TaskEnv`); those with a name have the keywords of TorchRL's where TorchRL has the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sota_grpo.envs.prompts import PromptSource, PromptStream
from sota_grpo.envs.task_env import DialogRows, TaskEnv, Tools
from sota_grpo.rl.collate import complete_rows, finish_rows, prompt_rows
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import SUFFIXES

__all__ = [
    "ArithmeticEnv",
    "DatasetEnv",
    "DialogRows",
    "GSM8KEnv",
    "IFEvalEnv",
    "MATHEnv",
    "PromptSource",
    "PromptStream",
    "TaskEnv",
    "complete_rows",
    "finish_rows",
    "prompt_rows",
]


class DatasetEnv(TaskEnv):
    """A task with the keywords of TorchRL's dataset environments, in tokens mode; see :class:`TaskEnv` for its rows.

    The siblings of a prompt are always next to each other in one batch, whatever ``group_repeats``, and
    ``batch_size_dl``, ``ray_backend`` and ``dataloader_actor_name`` have no effect, because every environment holds the
    rows in its memory. Of a file all problems are drawn, but for ``num_heldout`` of them where that is given.

    Args:
        task: its name.
        data: the keywords that name its data.
        repeats: group size; None is 1.
        seed: of the order; None draws one.
        tokenizer: must be given.
        apply_template: True insists that the tokenizer has a chat template; it is applied whenever there is one.
        collate_fn, input_mode: nothing but the default is supported: TorchRL's wrapper is to be in tokens mode, too.
        shuffle, num_envs, device, template_kwargs, compute_reward, max_prompt_tokens, max_steps, tools, environment:
            see :class:`TaskEnv`.
        options: of the task.

    Raises:
        ValueError: a value that cannot be honoured, in one sentence.
        DatasetError: the dataset cannot be used.
        TypeError: a keyword that neither takes.
    """

    def __init__(
        self,
        task: str,
        data: Mapping[str, Any],
        *,
        shuffle: bool = True,
        num_envs: int = 1,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        apply_template: bool | None = False,
        compute_reward: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        max_steps: int = 1,
        input_mode: str = "tokens",
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
        max_prompt_tokens: int | None = None,
        tools: Tools | None = None,
        environment: str | Callable[[], Any] | None = None,
        **options: Any,
    ):
        for name, value, only in (("collate_fn", collate_fn, None), ("input_mode", input_mode, "tokens")):
            if value != only:
                raise ValueError(f"{name}={value!r} is not supported; use {name}={only!r}.")
        if tokenizer is None:
            raise ValueError(
                "tokenizer=None, but the environment's prompts are token ids; give the policy's own tokenizer."
            )
        if apply_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError("apply_template=True, but the tokenizer has no chat template; use apply_template=False.")
        if Path(str(data.get("path"))).suffix in SUFFIXES:
            options.setdefault("num_heldout", 0)
        super().__init__(
            make_task(task, **data, **options),
            tokenizer,
            max_steps=max_steps,
            tools=tools,
            environment=environment,
            num_envs=num_envs,
            repeats=1 if repeats is None else repeats,
            shuffle=shuffle,
            seed=_seed(seed),
            max_prompt_tokens=max_prompt_tokens,
            compute_reward=compute_reward,
            template_kwargs=template_kwargs,
            device=device,
        )


class GSM8KEnv(DatasetEnv):
    """GSM8K with the keywords of ``torchrl.envs.llm.GSM8KEnv``.

    Args:
        dataset: name on the hub, or a local ``.jsonl``, ``.json``, ``.parquet`` or ``.csv``.
        keywords: of :class:`DatasetEnv` and :class:`sota_grpo.tasks.questions.GSM8KTask`.

    Example::

        env = GSM8KEnv(tokenizer=tokenizer, num_envs=16, repeats=8)
        collector = LLMCollector(env, policy=wrapper, dialog_turns_per_batch=16)    # TorchRL's own
    """

    def __init__(self, *, dataset: str = "openai/gsm8k", **keywords: Any):
        super().__init__("gsm8k", {"path": dataset}, **keywords)


class MATHEnv(DatasetEnv):
    """MATH with the keywords of ``torchrl.envs.llm.MATHEnv``.

    The answer is looked for in a box, and equal expressions are equal answers
    (:func:`sota_grpo.rewards.maths.math_equal`).

    Args:
        dataset: as in :class:`GSM8KEnv`.
        keywords: of :class:`DatasetEnv` and :class:`sota_grpo.tasks.questions.MathTask`.
    """

    def __init__(self, *, dataset: str = "DigitalLearningGmbH/MATH-lighteval", **keywords: Any):
        super().__init__("math", {"path": dataset}, **keywords)


class IFEvalEnv(DatasetEnv):
    """IFEval with the keywords of ``torchrl.envs.llm.IFEvalEnv``.

    It trains on RLVR-IFeval, not on ``google/IFEval``, which is the test set and is refused. There is no system prompt
    unless one is given, and ``<answer>`` tags are graded where they are; the prompt does not require them.

    Args:
        dataset: as in :class:`GSM8KEnv`.
        eval_dataset: what is held out of training; see :meth:`sota_grpo.tasks.ifeval.IFEvalTask.load`.
        keywords: of :class:`DatasetEnv` and :class:`sota_grpo.tasks.ifeval.IFEvalTask`.
    """

    def __init__(self, *, dataset: str = "allenai/RLVR-IFeval", eval_dataset: str | None = None, **keywords: Any):
        super().__init__("ifeval", {"path": dataset, "eval_path": eval_dataset}, **keywords)


class ArithmeticEnv(DatasetEnv):
    """The procedural word problems of :class:`sota_grpo.tasks.arithmetic.ArithmeticTask` as an environment.

    Args:
        seed: of the problems and of their order; None draws one.
        difficulty: most steps of a problem, 1 to 5.
        keywords: of :class:`DatasetEnv` and of the task.
    """

    def __init__(self, *, seed: int | None = None, difficulty: int = 4, **keywords: Any):
        drawn = _seed(seed)
        super().__init__("arithmetic", {"seed": drawn, "max_steps": difficulty}, seed=drawn, **keywords)


def _seed(seed: int | None) -> int:
    return int(torch.randint(2**31, ())) if seed is None else seed
