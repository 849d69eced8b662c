"""TRL's GRPOTrainer with the settings that were fastest on a CPU (benchmarks/README.md has those that were not).

transformers generates (TRL's vLLM path fails on a CPU), batches of about 16k tokens, no gradient checkpointing, one
iteration, so that no old log-probs are computed, float32, nothing logged but its metrics, nothing saved.
``loss_type="grpo"`` and ``use_bias_correction_kl=False`` make its objective ours.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.peers.paced import Paced
from benchmarks.peers.work import CLIP_NORM, KL_COEF, LEARNING_RATE, Case, Folder

PHASES = {"_generate": "generate", "_calculate_rewards": "score", "_prepare_inputs": "prepared"}
NO_TOKEN = -1
BATCH_TOKENS = 16_384
DEFAULT_BATCH = 8  # per_device_train_batch_size where the user says nothing


class Trl:
    """Optimizer steps of ``trainer.train()``, which runs in a thread of its own and is let go for one at a time.

    Args:
        folder: the work.
        batch: rows per forward pass; None takes the fastest number.
        options: further settings of ``GRPOConfig``.
    """

    def __init__(self, folder: Folder, batch: int | None = None, **options: Any):
        batch = batch or fastest_batch(folder.case)
        options["per_device_train_batch_size"] = batch
        options["gradient_accumulation_steps"] = folder.case.rows // batch
        self.rows = trl_rows(folder.load_rows())
        self.trainer = make_trainer(folder, options)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for method, phase in PHASES.items():
            self._time(method, lambda *_, phase=phase: phase)
        self._time("_get_per_token_logps_and_entropies", self._whose)
        self.paced = Paced()
        self.trainer.add_callback(_Boundary(self.paced))
        self.paced.start(self.trainer.train)

    def _whose(self, model: Any, *_: Any) -> str | None:
        return "ref" if model is self.trainer.ref_model else None

    def _time(self, method: str, phase_of: Callable[..., str | None]) -> None:
        """Add the seconds of every call of ``trainer.method`` to its phase."""
        inner = getattr(self.trainer, method)

        @functools.wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                phase = phase_of(*args)
                if phase is not None:
                    self.seconds[phase] += time.perf_counter() - began

        setattr(self.trainer, method, timed)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # Accelerate wraps it

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.trainer.accelerator.unwrap_model(self.trainer.model).named_parameters())

    def learn(self) -> None:
        """Loss, backward, clip and optimizer step as its loop does them, over the given rows."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        for inputs in split(self.rows, steps):
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model_wrapped, inputs)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        self.optimizer.step()  # Accelerate's wrapper would skip it: the loop is before the first of several batches
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """One optimizer step of the training loop; what is not prepared for it is learning."""
        self.seconds.clear()
        whole = self.paced.step()
        phases = {phase: self.seconds[phase] for phase in ("generate", "score", "ref")}
        return phases | {"learn": whole - self.seconds["prepared"], "whole": whole}

    def close(self) -> None:
        self.paced.end()


class _Boundary(TrainerCallback):
    """Holds the training loop before every step until the caller lets it continue."""

    def __init__(self, paced: Paced):
        self.paced = paced

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.paced.boundary()


def fastest_batch(case: Case) -> int:
    """Rows per forward pass: all, halved until they have at most ``BATCH_TOKENS`` tokens.

    >>> fastest_batch(Case("base")), fastest_batch(Case("long", prompt=800))
    (64, 16)
    """
    batch = case.rows
    while batch * (case.prompt + case.response) > BATCH_TOKENS and batch % 2 == 0:
        batch //= 2
    return batch


def make_trainer(folder: Folder, options: dict[str, Any]) -> Any:
    """The trainer of a case, its responses never ended by EOS."""
    case = folder.case
    compute_score = folder.compute_score()

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [compute_score(None, turns[0]["content"], None) for turns in completions]

    settings: dict[str, Any] = {
        "output_dir": str(folder.path / "trl"),
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "beta": KL_COEF,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP_NORM,
        "num_generations": case.group,
        "max_completion_length": case.response,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "bf16": False,
        "use_cpu": True,
        "max_steps": 1000,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    texts = folder.texts()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]}),
        processing_class=AutoTokenizer.from_pretrained(folder.model),
    )
    trainer.eos_token_ids = [NO_TOKEN]
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = None
    return trainer


def trl_rows(rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The rows of :func:`benchmarks.peers.work.make_rows` as its loss reads them: prompts padded on the left."""
    group = len(rows["responses"]) // len(rows["prompts"])
    prompts = [prompt for prompt in rows["prompts"] for _ in range(group)]
    mask = torch.ones_like(rows["responses"])
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": rows["responses"],
        "completion_mask": mask,
        "old_per_token_logps": rows["old"],
        "ref_per_token_logps": rows["ref"],
        "advantages": rows["advantages"],
        "num_items_in_batch": mask.sum(),
    }


def split(rows: dict[str, torch.Tensor], steps: int) -> list[dict[str, torch.Tensor]]:
    """``rows`` cut into ``steps`` equal batches; what is not per row goes along with each.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(4), "n": torch.tensor(4)}, 2)]
    [[0, 1], [2, 3]]
    """
    parts = {name: value.chunk(steps) if value.dim() else [value] * steps for name, value in rows.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(steps)]
