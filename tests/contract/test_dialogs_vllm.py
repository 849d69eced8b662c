"""Dialogs of the embedded policy through the real vLLM, in this process: what was inserted, and every log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec

import pytest
import torch

from sota_grpo import keys
from sota_grpo.engines import EngineOptions
from sota_grpo.envs import TaskEnv, finish_rows, prompt_rows
from sota_grpo.envs.dialogs import DialogEngine, TurnTokens
from sota_grpo.envs.task_env import last_turn
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.rl.records import Example, GroupOutput, GroupRequest, Sampling, Score
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.wrappers import MESSAGE, ThinkAgain
from sota_grpo.workers.base import promised
from tests.engine_rigs import changed_weights, reference_log_probs
from tests.l3_parts import score_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]

TEMPERATURE, MAX_STEPS = 0.8, 3


def test_every_token_of_a_dialog_has_the_trainers_log_prob() -> None:
    """Before and after a push, which leaves nothing of the old weights in the prompts of later turns."""
    from sota_grpo.engines.vllm_engine import VLLMEngine

    task, tokenizer = ThinkAgain(ArithmeticTask(num_train=6, num_heldout=1)), load_tokenizer("tiny")
    env, model = TaskEnv(task, tokenizer), load_model("tiny").eval()
    inner = VLLMEngine(EngineOptions("tiny", eos_token_ids=[tokenizer.eos_token_id], max_model_len=512))
    engine = DialogEngine(inner, InProcess(task), TurnTokens(tokenizer), max_steps=MAX_STEPS)
    try:
        first = list(engine.generate(requests(env), Sampling(max_tokens=64, temperature=TEMPERATURE)))
        check(env, model, first, version=0)
        weights = changed_weights(model)
        engine.update_weights(list(weights.items()), 1)
        model.load_state_dict(weights)
        second = list(engine.generate(requests(env), Sampling(max_tokens=64, temperature=TEMPERATURE)))
        check(env, model, second, version=1)
    finally:
        engine.close()


class InProcess:
    """A grader without processes."""

    def __init__(self, task: ThinkAgain):
        self._task = task

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        future = promised()
        future.set_result([self._task.score(*pair) for pair in pairs])
        return future


def requests(env: TaskEnv) -> list[GroupRequest]:
    return [GroupRequest(i, env.prompt_ids(e), 4, seed=i, example=e) for i, e in enumerate(env.task.train)]


def check(env: TaskEnv, model: torch.nn.Module, outputs: Sequence[GroupOutput], *, version: int) -> None:
    """Whole rows: the trainer's log-probs where the policy spoke, the message where it did not, and nothing else."""
    assert sorted(output.group_id for output in outputs) == list(range(6))
    turns = []
    for output in outputs:
        example = env.task.train[output.group_id]
        (prompt,) = prompt_rows(output.group_id, example, env.prompt_ids(example), repeats=1)
        rows = finish_rows(prompt, output.samples, env.tokenizer)
        for row, sample in zip(rows, output.samples, strict=True):
            ids, num_prompt = sample.token_ids, len(env.prompt_ids(example))
            said = row[keys.ASSISTANT_MASK][num_prompt:]
            own = reference_log_probs(model, env.prompt_ids(example), ids, TEMPERATURE)
            assert (own - sample.log_probs)[said].abs().max() < 1e-4
            assert (sample.versions[said] == version).all()
            assert (sample.versions[~said] == -1).all()
            assert (sample.log_probs[~said] == 0).all()
            between = f"\n<|im_start|>user\n{MESSAGE}<|im_end|>\n<|im_start|>assistant\n"
            count = int((said[1:] & ~said[:-1]).sum())
            assert env.tokenizer.decode(ids[~said].tolist()) == between * count
            turns.append(count + 1)
            assert sample.truncated or turns[-1] == MAX_STEPS or score_of(env, last_turn(sample), example).success
    assert max(turns) == MAX_STEPS
