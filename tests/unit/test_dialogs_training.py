"""Training on dialogs: only what the policy said counts, exactly, and whole turns of the loop run on them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import DialogEngine
from sota_grpo.envs.prompts import Rollouts
from sota_grpo.loop import run
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.collate import finish_rows, pad_rows, prompt_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.records import Example, GroupRequest, Sample, Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.wrappers import MESSAGE, think_again
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.learner import Learner
from sota_grpo.workers.rollout import FleetEngine
from tests.training_rigs import collector_of, make_saying
from tests.unit.tiny_models import VOCAB, make_model
from tests.worker_rigs import hosted

SEED = random.randrange(1 << 30)


class NoText:
    def decode(self, ids: list[int], **_: bool) -> str:
        return ""


def dialog(stream: torch.Generator, lengths: Sequence[int], *, garbage: bool = False) -> Sample:
    """Turns of the policy (even places) and of others (odd), with random ids and log-probs."""
    parts = [(length, place % 2 == 0) for place, length in enumerate(lengths)]
    mask = torch.tensor([own for length, own in parts for _ in range(length)])
    count = len(mask)
    log_probs = -3.0 + 0.5 * torch.randn(count, generator=stream)
    elsewhere = torch.tensor(math.nan if garbage else 0.0)
    return Sample(
        token_ids=torch.randint(3, VOCAB, (count,), generator=stream),
        log_probs=torch.where(mask, log_probs, elsewhere),
        versions=torch.where(mask, 3, -99 if garbage else -1),
        truncated=False,
        assistant_mask=mask,
    )


def dialog_rows(seed: int, *, garbage: bool = False) -> list[TensorDictBase]:
    """Four rows of one to three turns, with reference log-probs and advantages."""
    stream = torch.Generator().manual_seed(seed)
    rows = []
    for index, lengths in enumerate([(3, 2, 4), (5,), (1, 4, 1, 1, 3), (2, 3, 2)]):
        (prompt,) = prompt_rows(index // 2, Example("?", "!"), [5, 6, 7][: 1 + index % 3], repeats=1)
        (row,) = finish_rows(prompt, [dialog(stream, lengths, garbage=garbage)], NoText())
        mask = row.get(keys.ASSISTANT_MASK)
        reference = -3.0 + 0.5 * torch.randn(len(mask), generator=stream)
        row.set(keys.REF_LOG_PROBS, torch.where(mask, reference, math.nan if garbage else 0.0))
        row.set(keys.ADVANTAGE, torch.randn(1, 1, generator=stream))
        rows.append(row)
    return rows


def loss_and_gradients(model: torch.nn.Module, rows: list[TensorDictBase]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = GRPOLoss(CausalPolicy(model), clip_epsilon=0.2, kl_to_ref_coeff=0.1, entropy_bonus=False)
    actual = loss(pad_rows(rows, pad_token_id=0))
    total = actual.loss_objective + actual.loss_kl_to_ref
    return total.detach(), list(torch.autograd.grad(total, list(model.parameters())))


def test_what_is_next_to_inserted_tokens_changes_nothing() -> None:
    torch.manual_seed(SEED)
    model = make_model()
    clean, garbage = (set_loss_weights(dialog_rows(SEED, garbage=g), "sequence") for g in (False, True))
    for one, other in zip(clean, garbage):
        for key in (keys.LOG_PROBS, keys.TOKEN_VERSION, keys.POLICY_VERSION):
            assert torch.equal(one.get(key), other.get(key))
        inserted = ~other.get(keys.ASSISTANT_MASK)
        other.get(keys.LOG_PROBS)[inserted], other.get(keys.TOKEN_VERSION)[inserted] = math.nan, 1000
    (one, first), (other, second) = (loss_and_gradients(model, rows) for rows in (clean, garbage))
    assert one.isfinite()
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def make_env(max_steps: int = 2) -> TaskEnv:
    task = think_again(ArithmeticTask(seed=1, num_train=60, num_heldout=4))
    return TaskEnv(task, load_tokenizer("tiny"), num_envs=16, repeats=4, max_steps=max_steps)


def dialogs(engine: Engine, env: TaskEnv) -> DialogEngine:
    return DialogEngine(engine, {None: replace(env._rules, max_model_len=engine.max_model_len)})


def make_parts(engine: DialogEngine, env: TaskEnv, dump_dir: Path) -> tuple[PromptGroupCollector, Learner]:
    torch.manual_seed(0)
    model = load_model("tiny")
    policy = CausalPolicy(model, temperature=1.0)
    settings = LearnerSettings(lr=1e-4, total_steps=4, optim_batch_size=16)
    learner = Learner(policy, GRPOLoss(policy, entropy_bonus=False), settings, pad_token_id=0, dump_dir=dump_dir)
    options = {"num_groups": 4, "transforms": [GroupAdvantage()], "seed": SEED}
    sync = EngineWeightSync(lambda: engine_weights(model), engine)
    return collector_of(env, engine, Sampling(max_tokens=48), weight_sync=sync, **options), learner


def num_turns(row: TensorDictBase) -> int:
    """Of the policy."""
    mask = row.get(keys.ASSISTANT_MASK)
    return int((mask[1:] & ~mask[:-1]).sum())


def scripted_thinker(env: TaskEnv) -> ScriptedEngine:
    """Sample 0 of a group is right at once, sample 1 after the turn that says to think again, the others never."""
    gold = {env.prompt_ids(example): env.task.gold_response(example) for example in env.task.train}

    def say(request: GroupRequest, index: int) -> str:
        transcript = env.tokenizer.decode(request.prompt_ids)
        answer = next(answer for prompt, answer in gold.items() if request.prompt_ids[: len(prompt)] == prompt)
        right = "I am 1" in transcript if MESSAGE in transcript else index == 0
        return answer if right else f"I am {index}\n#### -1"

    return make_saying(env, say)


def test_the_loop_trains_on_dialogs_of_a_scripted_engine(tmp_path: Path) -> None:
    env = make_env()
    engine, log = dialogs(scripted_thinker(env), env), Mock()
    collector, learner = make_parts(engine, env, tmp_path)
    run(iter(collector), learner, collector, log, first_step=0, num_steps=2, before=id, after=lambda step: True)
    assert engine.version == 2
    assert [call.args[0] for call in log.write.call_args_list] == [0, 1]
    for step, batch, update, _ in (call.args for call in log.write.call_args_list):
        for row in batch:
            sample, mask = int(row.get(keys.SAMPLE_ID)), row.get(keys.ASSISTANT_MASK)
            gold = env.task.gold_response(Example(row[keys.QUERY], row[keys.ANSWER]))
            assert num_turns(row) == (1 if sample == 0 else 2)
            assert (MESSAGE in env.tokenizer.decode(row.get(keys.FULL_TOKENS))) == (sample > 0)
            assert row[keys.RESPONSE_TEXT] == (gold if sample < 2 else "I am 0\n#### -1")  # of the last turn
            assert float(row.get(keys.REWARD)) == float(row.get(keys.SUCCESS)) == float(sample < 2)
            assert torch.equal(row.get(keys.TOKEN_VERSION), torch.where(mask, step, -1))
        assert 0 < update["grad_norm"] < math.inf


def test_accuracy_of_the_first_turn_leaves_out_what_being_asked_again_helped() -> None:
    """Four problems: right at once, right when asked again, right when asked again, never."""
    env = make_env()
    examples = env.task.train[:4]
    prompts = [env.prompt_ids(example) for example in examples]

    def say(request: GroupRequest, index: int) -> str:
        at = next(at for at, prompt in enumerate(prompts) if request.prompt_ids[: len(prompt)] == prompt)
        again = MESSAGE in env.tokenizer.decode(request.prompt_ids)
        return env.task.gold_response(examples[at]) if at == 0 or (again and at < 3) else "#### -1"

    rollouts = Rollouts(env, dialogs(make_saying(env, say), env))
    actual = Evaluator(rollouts, examples, max_tokens=48, avg_at_k=0, seed=SEED).measure()
    assert (actual["eval/accuracy"], actual["eval/first_turn_accuracy"]) == (0.75, 0.25)


def test_engine_and_trainer_agree_on_every_token_of_a_dialog(tmp_path: Path) -> None:
    """The embedded engine's log-probs, of first turns and of later ones, are the trainer's; after a push too."""
    env = make_env(max_steps=3)
    ids = {"eos_token_ids": [env.tokenizer.eos_token_id], "pad_token_id": env.tokenizer.pad_token_id}
    engine = dialogs(TransformersEngine(load_model("tiny"), **ids), env)
    collector, learner = make_parts(engine, env, tmp_path)
    for _ in range(2):
        rows = list(collector.next_batch())
        assert sum(num_turns(row) > 1 for row in rows) >= 1
        for row, own in learner.scored(rows):
            assert (own - row[keys.LOG_PROBS])[row[keys.ASSISTANT_MASK]].abs().max() < 1e-4
        actual = learner.update(rows)
        assert actual["ess"] > 1 - 1e-6
        assert actual["clip_fraction"] == 0
        collector.update_policy_weights_(version=learner.version)


def test_a_source_with_workers_gives_the_dialogs_of_sync() -> None:
    """At age 0, through the engine of the rollout workers: the same rows in the same order."""
    envs, sampling = [make_env() for _ in range(2)], Sampling(max_tokens=48)
    options = {"num_groups": 4, "transforms": [GroupAdvantage()], "seed": SEED}
    synchronous = collector_of(envs[0], dialogs(scripted_thinker(envs[0]), envs[0]), sampling, **options)
    worker = hosted(lambda: scripted_thinker(envs[1]))
    fleet: Any = SimpleNamespace(submit=partial(worker.call, "run"), close=worker.kill)
    front = FleetEngine(fleet, name="scripted", max_model_len=2048, share=lambda value: value, deadline_s=9.0)
    there = dialogs(front, envs[1])
    workers = collector_of(envs[1], there, sampling, beside=True, wait_deadline_s=20.0, **options)
    for _ in range(2):
        for one, other in zip(synchronous.next_batch(), workers.next_batch(), strict=True):
            for key in (keys.GROUP_ID, keys.FULL_TOKENS, keys.ASSISTANT_MASK, keys.TOKEN_VERSION, keys.ADVANTAGE):
                assert torch.equal(one.get(key), other.get(key)), f"seed {SEED}"
        workers.release()
        synchronous.release()
    workers.close()
    there.close()
