"""TorchRL's LLMCollector, MCAdvantage buffer and GRPOLoss, put together as in its GRPO recipe, in one process.

What differs from the recipe, each because the recipe's part does not run here (benchmarks/README.md):

- The environment is ours. TorchRL's in tokens mode cannot stack prompts of unequal lengths, in history mode it
  tokenises the sampled text again, and it puts a chat template of its own around the prompts.
- Rows are padded before the reference and the loss, whose wrappers cannot read ragged ones in tokens mode.
- Weights go to vLLM by its ``reload_weights``: TorchRL's ways need NCCL, Ray, or an attribute that vLLM 0.32 lacks.

The entropy bonus is off, as in the other systems; the loss would otherwise be slower and another one. ``TorchRL, as it
comes`` has it on, as the loss's constructor has.
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm.grpo import MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.ours import learner_rows, make_config
from benchmarks.peers.work import CLIP_NORM, CONTEXT, KL_COEF, LEARNING_RATE, PAD, Folder
from sota_grpo import keys
from sota_grpo.assembly.sampling import task_of
from sota_grpo.envs import TaskEnv, complete_rows
from sota_grpo.rl.collate import pad_rows

LOGITS_BYTES = 1 << 28  # of one micro-batch; 8 rows of the base case were faster than 64
GROUP_KEY = "query"


class TorchRL:
    """The synchronous recipe: collect, advantages, reference, one optimizer step, weights to the engine.

    Args:
        folder: the work.
        engine: ``vllm`` or ``transformers``.
        micro: rows of a micro-batch; None takes the most up to 8 whose logits are small enough.
        entropy: leave the loss's entropy bonus on, as its constructor does, at coefficient 0: the gradient is the same.
    """

    def __init__(self, folder: Folder, engine: str, micro: int | None = None, *, entropy: bool = False):
        case, config = folder.case, make_config(folder, engine)
        self.case = case
        tokenizer = AutoTokenizer.from_pretrained(folder.model)
        self.model = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32)
        self.env = TimedEnv(task_of(config), tokenizer, num_envs=case.rows, repeats=case.group, shuffle=False)
        self.engine = start_vllm(folder) if engine == "vllm" else None
        wrap: dict[str, Any] = {"tokenizer": tokenizer, "input_mode": "tokens", "return_log_probs": True}
        self.policy = self._make_policy(wrap)
        self.collector = LLMCollector(
            self.env, policy=self.policy, dialog_turns_per_batch=case.rows, flatten_data=True, postproc=complete_rows
        )
        self.collected = iter(self.collector)
        per_row = 4 * case.vocab * (1.3 * case.prompt + case.response)
        self.micro = micro or max(1, min(8, case.group, int(LOGITS_BYTES / per_row)))
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(case.rows),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=case.group, prompt_key=GROUP_KEY),
            batch_size=self.micro,
        )
        score = {"generate": False, "pad_output": True, **wrap}
        self.reference = TransformersWrapper(copy.deepcopy(self.model).requires_grad_(False), **score)
        actor = TransformersWrapper(self.model, **score)
        self.loss = GRPOLoss(actor, entropy_bonus=entropy, entropy_coeff=0.0, masking_strategy="sft")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.rows = learner_rows(folder.load_rows())

    def _make_policy(self, wrap: dict[str, Any]) -> Any:
        response = self.case.response
        if self.engine is not None:
            sampling: dict[str, Any] = {"max_tokens": response, "ignore_eos": True, "temperature": 1.0}
            return vLLMWrapper(self.engine, generate=True, generate_kwargs=sampling, **wrap)
        # this wrapper strips padding from inside responses, so none may be sampled
        sampling = {"max_new_tokens": response, "do_sample": True, "eos_token_id": None, "suppress_tokens": [PAD]}
        return TransformersWrapper(self.model, generate=True, generate_kwargs=sampling, pad_output=False, **wrap)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def learn(self) -> None:
        """Loss, backward, clip and optimizer step over the given rows."""
        for start in range(0, len(self.rows), self.micro):
            self._backward(pad_rows(self.rows[start : start + self.micro], pad_token_id=PAD))
        self._update()

    def _backward(self, batch: TensorDictBase) -> None:
        out = self._losses(batch)
        ((out.loss_objective + out.loss_kl_to_ref) * (len(batch) / self.case.rows)).backward()

    def _losses(self, batch: TensorDictBase) -> Any:
        # TorchRL averages the KL over prompts and padding too: the coefficient makes it the mean over responses
        self.loss.kl_to_ref_coeff = KL_COEF * batch[keys.FULL_TOKENS].shape[1] / self.case.response
        return self.loss(batch)

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """One step of the recipe."""
        began = time.perf_counter()
        rows = next(self.collected)
        collected = time.perf_counter()
        phases = {"score": self.env.seconds, "generate": collected - began - self.env.seconds, "ref": 0.0, "learn": 0.0}
        self.env.seconds = 0.0
        self.buffer.empty()
        self.buffer.extend(rows)
        for sampled in self.buffer:
            started = time.perf_counter()
            batch = self._referred(sampled)
            referred = time.perf_counter()
            self._backward(batch)
            phases["ref"] += referred - started
            phases["learn"] += time.perf_counter() - referred
        updating = time.perf_counter()
        self._update()
        updated = time.perf_counter()
        self._publish()
        ended = time.perf_counter()
        phases["learn"] += updated - updating
        return phases | {"publish": ended - updated, "whole": ended - began}

    @torch.no_grad()
    def _referred(self, sampled: TensorDictBase) -> TensorDictBase:
        """The micro-batch padded, with the reference's log-probs."""
        batch = pad_rows(sampled, pad_token_id=PAD)
        batch.set(keys.ADVANTAGE, batch.get(keys.ADVANTAGE).reshape(-1, 1, 1))
        scored = self.reference(batch.select("tokens", "masks"))
        return batch.set(keys.REF_LOG_PROBS, scored.get(keys.LOG_PROBS))

    def _publish(self) -> None:
        if self.engine is None:  # it samples from the model that is trained
            return
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(self.model.state_dict().items())})
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        self.env.close()


class TimedEnv(TaskEnv):
    """Counts the seconds of its steps: decoding and grading."""

    seconds = 0.0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        began = time.perf_counter()
        measured = super()._step(tensordict)
        self.seconds += time.perf_counter() - began
        return measured


def start_vllm(folder: Folder) -> Any:
    """vLLM in this process, as ours is: its recipe turns CUDA graphs on and the prefix cache off."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    return LLM(
        str(folder.model),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,
        max_model_len=CONTEXT,
        max_num_seqs=folder.case.rows,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
