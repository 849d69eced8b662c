"""Our system, assembled as ``grpo.py`` assembles it: the defaults of the config, and the work."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from benchmarks.peers.work import CLIP_NORM, CONTEXT, KL_COEF, LEARNING_RATE, Folder
from sota_grpo import keys
from sota_grpo.assembly.build import build
from sota_grpo.assembly.sampling import make_sampling
from sota_grpo.config import Config
from sota_grpo.config.validators import validate

PHASES = ("generate", "score", "ref")


class Ours:
    """Synchronous training steps of :func:`sota_grpo.loop.run`, one per :meth:`step`.

    Args:
        folder: the work.
        engine: ``vllm`` or ``transformers``.
    """

    def __init__(self, folder: Folder, engine: str):
        run_dir = folder.path / f"run_{engine}"
        run_dir.mkdir(exist_ok=True)
        # every response as long as the case says, for which a run has no option
        with patch(
            "sota_grpo.assembly.sampling.make_sampling", lambda config: replace(make_sampling(config), ignore_eos=True)
        ):
            self.parts = build(make_config(folder, engine), run_dir)
        self.parts.weight_sync.send(version=self.parts.learner.version)
        self.rows = learner_rows(folder.load_rows())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.parts.learner.optimizer

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.parts.learner.policy.model.named_parameters())

    def learn(self) -> None:
        """The learner's part of a step."""
        self.parts.learner.update(lazy_stack(self.rows))

    def step(self) -> dict[str, float]:
        """A whole training step, but for its log."""
        parts = self.parts
        if parts.rollouts.engine.version != parts.learner.version:  # a learn phase by itself came before
            parts.weight_sync.send(version=parts.learner.version)
        began = time.perf_counter()
        batch = next(iter(parts.collector))
        collected = time.perf_counter()
        parts.learner.update(batch)
        learned = time.perf_counter()
        parts.collector.update_policy_weights_(version=parts.learner.version)
        published = time.perf_counter()
        measured = parts.collector.metrics()
        phases = {phase: measured.get(f"time/{phase}_s", 0.0) for phase in PHASES}
        phases |= {"learn": learned - collected, "publish": published - learned}
        return phases | {"whole": time.perf_counter() - began}

    def close(self) -> None:
        self.parts.close()


def make_config(folder: Folder, engine: str) -> Config:
    """The run of a case; whatever is not named here is the default of a user's run."""
    case, config = folder.case, Config(device="cpu")
    config.engine.name = engine
    config.model.name = str(folder.model)
    config.env.dataset, config.env.dataset_path = "table", str(folder.prompts)
    config.env.num_envs, config.env.repeats = case.rows, case.group
    config.env.eval_path, config.env.shuffle = str(folder.heldout), False
    config.reward.path = str(folder.reward)
    config.inference_model.max_tokens = case.response
    config.inference_model.max_model_len = CONTEXT
    config.policy.kl_coef = KL_COEF
    config.algorithm.dual_clip = None  # the others do not bound the ratio of a negative advantage
    config.optimizer.lr, config.optimizer.clip_grad_norm = LEARNING_RATE, CLIP_NORM
    config.train.dialog_turns_per_batch = config.train.optim_batch_size = case.rows
    config.train.total_dialog_turns = 1000 * case.rows
    config.eval.mode = config.check.mode = "off"
    validate(config)
    return config


def learner_rows(rows: dict[str, Any]) -> list[TensorDictBase]:
    """The rows of :func:`benchmarks.peers.work.make_rows` as a source hands them to the learner.

    >>> rows = {"prompts": [torch.tensor([5, 6])], "responses": torch.tensor([[7]]), "advantages": torch.ones(1)}
    >>> row, = learner_rows(rows | {"old": torch.tensor([[-1.0]]), "ref": torch.tensor([[-2.0]])})
    >>> row[keys.FULL_TOKENS].tolist(), row[keys.LOG_PROBS].tolist(), row[keys.ADVANTAGE].shape
    ([5, 6, 7], [0.0, 0.0, -1.0], torch.Size([1, 1]))
    """
    group = len(rows["responses"]) // len(rows["prompts"])
    measured: list[TensorDictBase] = []
    for index, response in enumerate(rows["responses"]):
        prompt = rows["prompts"][index // group]
        full = torch.cat([prompt, response])
        sampled = torch.arange(len(full)) >= len(prompt)
        nothing = torch.zeros(len(prompt))
        row = TensorDict({}, batch_size=[])
        row.set(keys.FULL_TOKENS, full)
        row.set(keys.PROMPT_TOKENS, prompt)
        row.set(keys.ATTENTION_MASK, torch.ones_like(sampled))
        row.set(keys.ASSISTANT_MASK, sampled)
        row.set(keys.LOG_PROBS, torch.cat([nothing, rows["old"][index]]))
        row.set(keys.REF_LOG_PROBS, torch.cat([nothing, rows["ref"][index]]))
        row.set(keys.ADVANTAGE, rows["advantages"][index].reshape(1, 1))
        row.set(keys.GROUP_ID, torch.tensor(index // group))
        row.set(keys.SAMPLE_ID, torch.tensor(index % group))
        row.set(keys.TRUNCATED, torch.tensor([True]))
        measured.append(row)
    return measured
