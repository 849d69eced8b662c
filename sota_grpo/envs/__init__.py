"""TorchRL environments of tasks: reset returns prompts, step takes response token ids and grades finished dialogs.

:class:`TaskEnv` takes any task. ``GSM8KEnv``, ``MATHEnv`` and ``IFEvalEnv`` take the keywords of TorchRL's as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sota_grpo.envs.prompts import PromptSource, PromptStream
from sota_grpo.envs.task_env import DialogRows, TaskEnv
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


_OF_ENV = {*inspect.signature(TaskEnv.__init__).parameters} - {"self"}


class DatasetEnv(TaskEnv):
    """A :class:`TaskEnv` with the keywords of TorchRL's dataset environments, in tokens mode.

    ``group_repeats`` has no effect: the rows of a group are always adjacent. ``batch_size_dl``, ``ray_backend`` and
    ``dataloader_actor_name`` have none either, because every environment holds the dataset in its memory.
    ``num_heldout`` is 0 by default for a local file. ValueError for an unsupported value, TypeError for an unknown
    keyword; UserError if the dataset, the tools or the chat template cannot be used.

    Args:
        task: name of the task.
        data: keywords of the task that select its data (such as ``path``).
        repeats: group size; None is 1.
        seed: seed of the prompt order; None draws a random seed.
        tokenizer: the policy's tokenizer; required.
        apply_template: whether to refuse a tokenizer without a chat template; an existing template is always applied.
        collate_fn, input_mode: only the default is supported; use TorchRL's wrapper in tokens mode as well.
        options: keywords of :class:`TaskEnv` (``shuffle``, ``num_envs``, ``device``, ``template_kwargs``,
            ``compute_reward``, ``max_prompt_tokens``, ``max_steps``, ``tools``, ``environment`` ..), and of the task.
    """

    def __init__(
        self,
        task: str,
        data: Mapping[str, Any],
        *,
        repeats: int | None = None,
        batch_size_dl: int = 1,
        seed: int | None = None,
        group_repeats: bool = False,
        tokenizer: Any = None,
        apply_template: bool | None = False,
        collate_fn: Callable[..., Any] | None = None,
        input_mode: str = "tokens",
        ray_backend: bool = False,
        dataloader_actor_name: str | None = None,
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
        of_env = {name: options.pop(name) for name in _OF_ENV & options.keys()}
        if Path(str(data.get("path"))).suffix in SUFFIXES:
            options.setdefault("num_heldout", 0)
        made = make_task(task, **data, **options)
        super().__init__(made, tokenizer, repeats=1 if repeats is None else repeats, seed=_seed(seed), **of_env)


class GSM8KEnv(DatasetEnv):
    """GSM8K with the keywords of ``torchrl.envs.llm.GSM8KEnv``.

    ``dataset`` is a name on the hub, or a local ``.jsonl``, ``.json``, ``.parquet`` or ``.csv``. Further keywords:
    :class:`DatasetEnv` and :class:`sota_grpo.tasks.questions.GSM8KTask`.

    Example::

        env = GSM8KEnv(tokenizer=tokenizer, num_envs=16, repeats=8)
        collector = LLMCollector(env, policy=wrapper, dialog_turns_per_batch=16)    # TorchRL's own
    """

    def __init__(self, *, dataset: str = "openai/gsm8k", **keywords: Any):
        super().__init__("gsm8k", {"path": dataset}, **keywords)


class MATHEnv(DatasetEnv):
    """MATH with the keywords of ``torchrl.envs.llm.MATHEnv``; ``dataset`` is as in :class:`GSM8KEnv`.

    By default the answer is read from the last ``\\boxed{}``; equal expressions are equal answers
    (:func:`sota_grpo.rewards.maths.math_equal`). Further keywords: :class:`DatasetEnv` and
    :class:`sota_grpo.tasks.questions.MathTask`.
    """

    def __init__(self, *, dataset: str = "DigitalLearningGmbH/MATH-lighteval", **keywords: Any):
        super().__init__("math", {"path": dataset}, **keywords)


class IFEvalEnv(DatasetEnv):
    """IFEval with the keywords of ``torchrl.envs.llm.IFEvalEnv``; ``dataset`` is as in :class:`GSM8KEnv`.

    By default it trains on RLVR-IFeval without a system prompt; it refuses to train on ``google/IFEval``, the test set.
    The prompt does not require ``<answer>`` tags; if a response has them, their content is graded. ``eval_dataset`` is
    the ``eval_path`` of the task. Further keywords: :class:`DatasetEnv` and :class:`sota_grpo.tasks.ifeval.IFEvalTask`.
    """

    def __init__(self, *, dataset: str = "allenai/RLVR-IFeval", eval_dataset: str | None = None, **keywords: Any):
        super().__init__("ifeval", {"path": dataset, "eval_path": eval_dataset}, **keywords)


class ArithmeticEnv(DatasetEnv):
    """The procedural word problems of :class:`sota_grpo.tasks.arithmetic.ArithmeticTask` as an environment.

    ``seed`` is that of the problems and of their order (None draws one), ``difficulty`` the task's ``max_steps``.
    Further keywords: :class:`DatasetEnv` and the task.
    """

    def __init__(self, *, seed: int | None = None, difficulty: int = 4, **keywords: Any):
        drawn = _seed(seed)
        super().__init__("arithmetic", {"seed": drawn, "max_steps": difficulty}, seed=drawn, **keywords)


def _seed(seed: int | None) -> int:
    return int(torch.randint(2**31, ())) if seed is None else seed
