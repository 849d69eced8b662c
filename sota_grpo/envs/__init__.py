"""TorchRL environments of tasks: reset returns prompts, step takes response token ids and grades finished dialogs.

:class:`TaskEnv` takes any task. ``GSM8KEnv``, ``MATHEnv`` and ``IFEvalEnv`` take the keywords of TorchRL's as well.
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
    """A :class:`TaskEnv` with the keywords of TorchRL's dataset environments, in tokens mode.

    The rows of a group are always adjacent in one batch, whatever ``group_repeats`` is. ``batch_size_dl``,
    ``ray_backend`` and ``dataloader_actor_name`` have no effect, because every environment holds the dataset in its
    memory. All problems of a local file are used for training, unless ``num_heldout`` is given.

    Args:
        task: name of the task.
        data: keywords of the task that select its data (such as ``path``).
        repeats: group size; None is 1.
        seed: seed of the prompt order; None draws a random seed.
        tokenizer: the policy's tokenizer; required.
        apply_template: whether to refuse a tokenizer without a chat template; an existing template is always applied.
        collate_fn, input_mode: only the default is supported; use TorchRL's wrapper in tokens mode as well.
        shuffle, num_envs, device, template_kwargs, compute_reward, max_prompt_tokens, max_steps, tools, environment:
            see :class:`TaskEnv`.
        options: further keywords of the task.

    Raises:
        ValueError: an argument has an unsupported value.
        DatasetError: the dataset cannot be used.
        TypeError: neither the environment nor the task has this keyword.
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
                "tokenizer=None, but the environment's prompts are token ids; pass the policy's tokenizer."
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
        keywords: further keywords of :class:`DatasetEnv` and :class:`sota_grpo.tasks.questions.GSM8KTask`.

    Example::

        env = GSM8KEnv(tokenizer=tokenizer, num_envs=16, repeats=8)
        collector = LLMCollector(env, policy=wrapper, dialog_turns_per_batch=16)    # TorchRL's own
    """

    def __init__(self, *, dataset: str = "openai/gsm8k", **keywords: Any):
        super().__init__("gsm8k", {"path": dataset}, **keywords)


class MATHEnv(DatasetEnv):
    """MATH with the keywords of ``torchrl.envs.llm.MATHEnv``.

    The answer is read from the last ``\\boxed{}``; equal expressions are equal answers
    (:func:`sota_grpo.rewards.maths.math_equal`).

    Args:
        dataset: as in :class:`GSM8KEnv`.
        keywords: further keywords of :class:`DatasetEnv` and :class:`sota_grpo.tasks.questions.MathTask`.
    """

    def __init__(self, *, dataset: str = "DigitalLearningGmbH/MATH-lighteval", **keywords: Any):
        super().__init__("math", {"path": dataset}, **keywords)


class IFEvalEnv(DatasetEnv):
    """IFEval with the keywords of ``torchrl.envs.llm.IFEvalEnv``.

    It trains on RLVR-IFeval and refuses ``google/IFEval``, which is the test set. There is no system prompt by default.
    The prompt does not require ``<answer>`` tags; if a response has them, their content is graded.

    Args:
        dataset: as in :class:`GSM8KEnv`.
        eval_dataset: dataset of the held-out split; see :meth:`sota_grpo.tasks.ifeval.IFEvalTask.load`.
        keywords: further keywords of :class:`DatasetEnv` and :class:`sota_grpo.tasks.ifeval.IFEvalTask`.
    """

    def __init__(self, *, dataset: str = "allenai/RLVR-IFeval", eval_dataset: str | None = None, **keywords: Any):
        super().__init__("ifeval", {"path": dataset, "eval_path": eval_dataset}, **keywords)


class ArithmeticEnv(DatasetEnv):
    """The procedural word problems of :class:`sota_grpo.tasks.arithmetic.ArithmeticTask` as an environment.

    Args:
        seed: seed of the problems and of their order; None draws a random seed.
        difficulty: maximum number of steps of a problem, 1 to 5.
        keywords: further keywords of :class:`DatasetEnv` and of the task.
    """

    def __init__(self, *, seed: int | None = None, difficulty: int = 4, **keywords: Any):
        drawn = _seed(seed)
        super().__init__("arithmetic", {"seed": drawn, "max_steps": difficulty}, seed=drawn, **keywords)


def _seed(seed: int | None) -> int:
    return int(torch.randint(2**31, ())) if seed is None else seed
