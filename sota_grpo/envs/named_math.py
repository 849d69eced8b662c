"""MATH by name, with the keywords of TorchRL's environment where TorchRL has the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sota_grpo.envs.named import _check_tokenizer, _refuse, _seed
from sota_grpo.envs.task_env import TaskEnv
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import SUFFIXES
from sota_grpo.tasks.math import HUB_NAME


class MATHEnv(TaskEnv):
    """MATH with the keywords of ``torchrl.envs.llm.MATHEnv``, in tokens mode; see :class:`TaskEnv` for its rows.

    The answer is looked for in a box, and equal expressions are equal answers
    (:func:`sota_grpo.rewards.maths.math_equal`). The siblings of a prompt always stand next to each other in one batch,
    whatever ``group_repeats``, and ``batch_size_dl`` changes nothing, because the rows are held in memory.

    Args:
        dataset: name on the hub, or a local ``.jsonl``, ``.json``, ``.parquet`` or ``.csv``.
        shuffle: a fresh order every epoch.
        num_envs: dialogs at once, a multiple of ``repeats``.
        repeats: group size; None is 1.
        batch_size_dl: taken for compatibility, without effect.
        seed: of the order; None draws one.
        group_repeats: taken for compatibility, without effect.
        tokenizer: must be given.
        device: of the tensors.
        template_kwargs: further arguments of the chat template.
        apply_template: True insists that the tokenizer has a chat template; it is applied whenever there is one.
        compute_reward: False leaves the reward to your own transforms.
        collate_fn: not supported.
        max_steps: 1.
        input_mode: ``"tokens"``.
        ray_backend: not supported.
        dataloader_actor_name: not supported.
        max_prompt_tokens: longest prompt allowed.
        num_heldout: rows of a local file that are not trained on.
        answer_format, format_weight, system_prompt, correct, wrong, no_answer: see
            :class:`sota_grpo.tasks.math.MathTask`.

    Raises:
        ValueError: a value that cannot be honoured, in one sentence.
        DatasetError: the dataset cannot be used.

    Example::

        env = MATHEnv(tokenizer=tokenizer, num_envs=16, repeats=8)
        collector = LLMCollector(env, policy=wrapper, dialog_turns_per_batch=16)    # TorchRL's own
    """

    def __init__(
        self,
        *,
        dataset: str = HUB_NAME,
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
        num_heldout: int = 512,
        answer_format: str = "boxed",
        format_weight: float = 0.0,
        system_prompt: str | None = None,
        correct: float = 1.0,
        wrong: float = -1.0,
        no_answer: float = -0.5,
    ):
        _refuse("collate_fn", collate_fn, None, "the columns of MATH are read as they are")
        _refuse("max_steps", max_steps, 1, "a problem is answered in one turn")
        _refuse("input_mode", input_mode, "tokens", "ids that were sampled are never tokenised again")
        _refuse("ray_backend", ray_backend, False, "every environment holds its rows itself")
        _refuse("dataloader_actor_name", dataloader_actor_name, None, "there is no Ray actor")
        _check_tokenizer(tokenizer, apply_template)
        task = make_task(
            "math",
            **({"path": dataset} if Path(dataset).suffix in SUFFIXES else {"source": dataset}),
            num_heldout=num_heldout,
            answer_format=answer_format,
            format_weight=format_weight,
            system_prompt=system_prompt,
            correct=correct,
            wrong=wrong,
            no_answer=no_answer,
        )
        super().__init__(
            task,
            tokenizer,
            num_envs=num_envs,
            repeats=1 if repeats is None else repeats,
            shuffle=shuffle,
            seed=_seed(seed),
            max_prompt_tokens=max_prompt_tokens,
            compute_reward=compute_reward,
            template_kwargs=template_kwargs,
            device=device,
        )
