"""TRL's GRPOTrainer as :mod:`benchmarks.trainer` drives it: its loss, backward, clip and optimizer on given rows.

Its best settings: as few micro-batches as memory allows (a step that runs out of it is tried again with twice as many),
Liger's layer kernels where they are installed, and its own fused LM head, which is always on. It pads, prompts on the
left and responses on the right, and computes every row's prompt; GRPOTrainer offers no padding-free form.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast
from transformers.integrations.liger import apply_liger_kernel

from benchmarks.trainer_work import PAD, Case, kept_tensors, make_model, padded_load
from sota_grpo import keys


class Trl:
    """One optimizer step as the loop of ``trainer.train()`` takes it, without its data and generation."""

    name = "trl"

    def __init__(self, case: Case, rows: Sequence[TensorDict], folder: Path):
        liger = case.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
        core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        self.trainer = trl.GRPOTrainer(
            model=make_model(case),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=str(folder),
                loss_type="grpo",
                beta=0.0,
                learning_rate=1e-6,
                max_grad_norm=1.0,
                num_generations=2,
                per_device_train_batch_size=2,
                max_completion_length=case.response,
                gradient_checkpointing=case.checkpointing,
                bf16=case.precision == "bf16",
                use_cpu=case.device == "cpu",
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["<eos>"]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"),
        )
        self.layer_kernels = LayerKernels(self.trainer.model)
        if liger:
            with self.layer_kernels:
                # not its head: that replaces the forward in which TRL's own fused head is
                apply_liger_kernel(self.trainer.model, {"fused_linear_cross_entropy": False})
        self.trainer.create_optimizer()
        self.trainer.model, self.trainer.optimizer = self.trainer.accelerator.prepare(
            self.trainer.model, self.trainer.optimizer
        )
        self.batch = {name: value.to(case.device) for name, value in padded_rows(rows).items()}
        num_rows, width = len(rows), sum(self.batch[name].shape[1] for name in ("prompt_ids", "completion_ids"))
        predicted = self.batch["completion_ids"].numel()
        self.load = padded_load(num_rows, width, predicted=predicted)
        self.num_micro_batches = 1

    def step(self) -> float:
        while True:
            try:
                with self.layer_kernels:
                    return self._step()
            except torch.OutOfMemoryError:
                if self.num_micro_batches >= len(self.batch["prompt_ids"]):
                    raise
            self.trainer.optimizer.zero_grad()
            torch.cuda.empty_cache()
            self.num_micro_batches *= 2

    def _step(self) -> float:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = self.num_micro_batches
        for part in split(self.batch, self.num_micro_batches):
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, part)
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(norm)

    def tensors(self) -> Sequence[torch.Tensor]:
        return kept_tensors(self.trainer.model, self.trainer.optimizer.optimizer)


class LayerKernels:
    """What a library puts into the module of a model's class while it is entered, and only then.

    liger-kernel replaces the rotary function and the norms and MLPs for the whole process. A caller that takes
    turns with TRL, or builds a model after it, would compute with them too.
    """

    def __init__(self, model: torch.nn.Module):
        self.module = sys.modules[type(model).__module__]
        self.replaced: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.before = dict(vars(self.module))
        vars(self.module).update(self.replaced)

    def __exit__(self, *error: object) -> None:
        self.replaced = {name: value for name, value in vars(self.module).items() if value is not self.before.get(name)}
        vars(self.module).update(self.before)


def padded_rows(rows: Sequence[TensorDict]) -> dict[str, torch.Tensor]:
    """The rows as TRL's loss reads them: prompts padded on the left, responses on the right."""
    masks = [row[keys.ASSISTANT_MASK] for row in rows]

    def pad(values: list[torch.Tensor], side: str) -> torch.Tensor:
        return pad_sequence(values, batch_first=True, padding_value=PAD, padding_side=side)

    def spoken(key: Any) -> torch.Tensor:
        return pad([row[key][mask] for row, mask in zip(rows, masks)], "right")

    prompts = [row[keys.FULL_TOKENS][~mask] for row, mask in zip(rows, masks)]
    return {
        "prompt_ids": pad(prompts, "left"),
        "prompt_mask": pad([torch.ones_like(prompt) for prompt in prompts], "left"),
        "completion_ids": spoken(keys.FULL_TOKENS),
        "completion_mask": spoken(keys.ASSISTANT_MASK).long(),
        "old_per_token_logps": spoken(keys.LOG_PROBS),
        "advantages": torch.stack([row[keys.ADVANTAGE].flatten()[0] for row in rows]),
    }


def split(batch: dict[str, torch.Tensor], num_parts: int) -> list[dict[str, torch.Tensor]]:
    """The batch in nearly equal parts.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(5)}, 2)]
    [[0, 1, 2], [3, 4]]
    """
    parts = {name: value.tensor_split(num_parts) for name, value in batch.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(num_parts)]
