"""Every check passes on a right run, fails on the mistake that it is there for, and leaves no trace."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional.advantages import Baseline, Scale
from sota_grpo.functional.loss_terms import SURROGATES
from sota_grpo.policy.causal import FrozenReference
from sota_grpo.policy.load import load_model
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rl.planner import groups_by_prompt, row_prompts
from sota_grpo.rl.records import TASK, Example, Score
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import GroupAdvantage, ReferenceKL
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.dataset import BaseTask
from sota_grpo.tasks.mixture import MixtureTask
from sota_grpo.tasks.reasoning_gym import ReasoningGymTask
from sota_grpo.training import gate
from sota_grpo.training.checkpoint import rng_state
from sota_grpo.training.gate import CheckError, NamedReference, graded_rows, pushed_weights_landed, run_gate
from tests.training_rigs import TEMPERATURE, make_components

Components = gate.TrainingComponents


HALF = {
    "bf16 engine": {"engine_dtype": torch.bfloat16},
    "bf16 both": {"engine_dtype": torch.bfloat16, "precision": "bf16"},
    "fp16 both": {"engine_dtype": torch.float16, "precision": "fp16"},
}


@pytest.fixture
def components(tmp_path: Path) -> Components:
    return make_components(tmp_path)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Components:
    """A right run, with the rows that its checks sample."""
    components = make_components(tmp_path_factory.mktemp("right"))
    components.rows = graded_rows(components)
    return components


@pytest.fixture
def sampled(right: Components, monkeypatch) -> Components:
    """The same with fields and rows of its own; what tests set of the parts that it shares is undone."""
    shared = {"grader": right.rollouts.env, "settings": right.learner, "shared_prompt": right.learner.policy}
    for name, owner in shared.items():
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return replace(right, rows=RowTable.cat([right.rows]))


def graded_by(components: Components, score: Callable[[str, Example], Score]) -> None:
    components.rollouts.env.grader = LocalGrader(score, ["correct"])


def failed(components: Components) -> list[str]:
    return [check.name for check in run_gate(components, "warn") if check.passed is False]


@pytest.mark.parametrize("half", [None, "bf16 engine", "fp16 both"])
def test_a_right_run_passes_and_keeps_its_state(half: str | None, tmp_path: Path) -> None:
    components = make_components(tmp_path, max_tokens=96, **HALF[half]) if half else make_components(tmp_path)
    before = {name: value.clone() for name, value in components.learner.policy.state_dict().items()}
    stream, random = components.rollouts.env.stream.state_dict(), rng_state()
    probe = components.sample(num_prompts=1, num_samples=1)[0][keys.LOG_PROBS]
    assert failed(components) == []
    after = components.learner.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert components.rollouts.env.stream.state_dict() == stream
    assert str(rng_state()) == str(random)
    assert torch.equal(components.sample(num_prompts=1, num_samples=1)[0][keys.LOG_PROBS], probe)
    assert all(parameter.grad is None for parameter in components.learner.parameters)
    assert components.rollouts.engine.version == components.learner.version == 0


def test_in_half_precision_a_push_without_a_layer_differs_from_a_whole_one(tmp_path: Path) -> None:
    """Fresh samples. Of 12 seeds, right pushes came to at most 0.49 of what is allowed, others to 1.6 and more."""
    seed = random.randrange(1 << 30)
    components = make_components(tmp_path, max_tokens=96, seed=seed, **HALF["bf16 both"])
    components.weight_sync.send(version=0)
    components.rows = graded_rows(components)
    check, push = pushed_weights_landed(components), components.weight_sync
    assert check.passed, f"seed {seed}: {check.sentence}"
    old = {name: weight.clone() for name, weight in push.policy_weights() if "layers.3." in name}
    components.weight_sync = EngineWeightSync(
        lambda: [(name, old.get(name, w)) for name, w in push.policy_weights()], push.engine
    )
    check = pushed_weights_landed(components)
    assert not check.passed, f"seed {seed}: {check.sentence}"


def test_another_temperature_in_the_engine_is_found_and_named(tmp_path: Path) -> None:
    """The trainer's is 0.8: its check says so to a few per cent, and the other two refuse the run as well."""
    components = make_components(tmp_path, engine_temperature=1.0, max_tokens=96, **HALF["bf16 both"])
    components.rows = components.sample()
    check = gate.engine_and_trainer_have_one_temperature(components)
    assert not check.passed
    assert float(check.sentence.split()[4]) == pytest.approx(0.8, abs=0.03)
    assert not gate.engine_and_trainer_agree(components).passed
    assert not gate.first_ratio_is_one(components).passed


def test_an_engine_that_leaves_tokens_out_is_found_by_the_mean_ratio(tmp_path: Path) -> None:
    """Under top-p it samples where the trainer has less than all of its mass, so that the mean ratio is below 1."""
    components = make_components(tmp_path, temperature=4.0, max_tokens=96, **HALF["bf16 both"])
    components.rows = components.sample()
    assert gate.first_ratio_is_one(components).passed
    components = make_components(tmp_path, temperature=4.0, top_p=0.9, max_tokens=96, **HALF["bf16 both"])
    components.rows = components.sample().without(keys.SUPPORT_IDS, keys.SUPPORT_COUNTS)  # and does not report which
    check = gate.first_ratio_is_one(components)
    assert not check.passed
    assert float(check.sentence.split()[1]) == pytest.approx(0.9, abs=0.03)


def test_one_layer_of_other_weights_is_found_in_half_precision(tmp_path: Path) -> None:
    """The policy is sure of most tokens: the mean gap is 0.01, a fifth of what SmolLM2's rounding alone makes."""
    components = make_components(tmp_path, max_tokens=96, **HALF["bf16 both"])
    components.rows = components.sample()
    learner = components.learner
    learner.perturb([name for name in learner.trainable_names() if "layers.3." not in name])
    assert not gate.engine_and_trainer_agree(components).passed


def test_parameters_in_half_precision_have_a_bound_of_their_own(tmp_path: Path) -> None:
    components = make_components(tmp_path, engine_dtype=torch.bfloat16)
    components.learner.policy.to(torch.bfloat16)
    assert failed(components) == []
    assert gate.allowed_gaps(components)[:2] == pytest.approx((0.1, 0.02))
    actual = components.learner.gradient_gap(components.rows[:4], (1 << 20, 1))
    assert not actual.single
    assert 1e-4 < actual.relative < 0.1


def test_one_token_far_off_in_most_responses_is_found(tmp_path: Path) -> None:
    """One wrong log-prob in some hundred may pass as a mean; in half precision one alone may be rounding.

    A trainer that is wrong in half precision alone measures that as its rounding, so what is allowed has an end.
    """
    components = make_components(tmp_path, **HALF["bf16 both"])
    components.rows = components.sample()
    log_probs = components.learner.measured_with_rounding(components.rows)[0]
    rounding = torch.full_like(log_probs[0], 0.03)  # as SmolLM2's
    components.learner.measured_with_rounding = lambda rows: (log_probs, rounding)
    for row in components.rows.rows()[:4]:  # of 8
        row[keys.LOG_PROBS][-1] -= 1.2
    check = gate.engine_and_trainer_agree(components)
    assert check.passed
    assert "largest 1.2, all but 4 within 0.0" in check.sentence
    components.rows[4][keys.LOG_PROBS][-1] -= 1.2
    assert not gate.engine_and_trainer_agree(components).passed
    assert components.gaps.abs().mean() < gate.allowed_gaps(components).gap
    components.learner.measured_with_rounding = lambda rows: (log_probs - 1, torch.ones_like(rounding))
    wrong = replace(components, rows=components.sample())
    assert gate.allowed_gaps(wrong).gap == 0.25
    assert not gate.engine_and_trainer_agree(wrong).passed


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_side_that_half_precision_moves_too_far_is_reported(precision: str, tmp_path: Path) -> None:
    """Three distances: the engine's and the trainer's from float32, and theirs from each other."""
    components = make_components(tmp_path, engine_dtype=torch.bfloat16, precision=precision)
    rows = components.rows = components.sample()
    rows.set(keys.LOG_PROBS, [row[keys.LOG_PROBS] - 0.3 * row[keys.ASSISTANT_MASK] for row in rows])
    single = make_components(tmp_path, engine_dtype=torch.bfloat16).learner.measured(rows)[0]
    mask = rows.flat(keys.ASSISTANT_MASK)
    engine = float((single - rows.flat(keys.LOG_PROBS))[mask].abs().mean())
    trainer = float((components.learner.measured(rows)[0] - single)[mask].abs().mean())
    assert (trainer == 0) == (precision == "fp32")
    check = gate.engine_and_trainer_agree(components)
    assert check.passed is False
    assert f"the engine is {engine:.2g} away and the trainer {trainer:.2g}: " in check.sentence
    assert ("use inference_model.torch_dtype=float32 train.prec" in check.sentence) == (precision == "bf16")


def test_one_token_off_or_clipped_in_float32_is_found(sampled: Components) -> None:
    assert gate.engine_and_trainer_agree(sampled).passed
    assert gate.first_ratio_is_one(sampled).passed
    sampled.diagnosis |= {"clip_fraction": 0.01}
    assert not gate.first_ratio_is_one(sampled).passed
    sampled.rows[0][keys.LOG_PROBS][-1] -= 0.0025
    check = gate.engine_and_trainer_agree(sampled)
    assert not check.passed
    assert "largest 0.0025, over" in check.sentence


def test_rows_that_are_padded_for_no_reason_are_found(sampled: Components) -> None:
    for packed, sampled.packs, passed in ((True, True, True), (False, True, False), (False, False, True)):
        sampled.learner.policy.shared_prompt = packed
        check = gate.prompts_are_computed_once(sampled)
        assert (check.passed, "rows are padded" in check.sentence) == (passed, not packed)
        del sampled.diagnosis


def test_rows_that_are_all_truncated_are_found_by_that_alone(tmp_path: Path) -> None:
    """Under ``drop_truncated`` a step on them has no gradient; the check of the split is about that, not about them."""
    components = make_components(tmp_path, drop_truncated=True, max_tokens=2)
    (check,) = (check for check in run_gate(components, "warn") if check.passed is False)
    assert check.name == "responses end and are graded"
    assert "0 of 8 responses end" in check.sentence
    assert "raise inference_model.max_tokens (now 2)" in check.sentence


def test_responses_that_are_cut_by_chance_are_not_the_rule(sampled: Components, monkeypatch) -> None:
    sampled.rows.set(keys.TRUNCATED, torch.ones(len(sampled.rows), 1, dtype=torch.bool))
    assert gate.responses_end_and_are_graded(sampled).passed  # of those that are drawn then, some end
    monkeypatch.setattr(sampled, "sample", None)
    own = sampled.sampling
    sampled.sampling = replace(own, ignore_eos=True)
    assert gate.responses_end_and_are_graded(sampled).passed  # they need not end
    sampled.sampling = replace(own, max_tokens=256)
    sampled.learner.settings = replace(sampled.learner.settings, optim_batch_size=8)
    sentence = gate.responses_end_and_are_graded(sampled).sentence
    assert "; not verified: that responses longer than the checks' 85 tokens" in sentence


def test_only_the_tasks_of_a_mixture_raise_the_number_of_prompts_that_are_sampled(sampled: Components) -> None:
    names = [f"t{number}" for number in range(6)]
    for tasks in (None, dict.fromkeys(names, 1)):  # as reasoning_gym's option env.tasks
        sampled.task = ReasoningGymTask(tasks=None)
        sampled.task.tasks = tasks
        assert sampled.num_prompts == 4
    sampled.task = MixtureTask(dict.fromkeys(names, BaseTask([Example("1?", "1")])))
    assert sampled.num_prompts == 6


def test_each_task_of_a_mixture_is_looked_at(sampled: Components) -> None:
    lost = [index in (3, 5) for index in range(8)]  # all of one task's
    sampled.rows.set(keys.REWARD_ERROR, torch.tensor(lost)[:, None])
    sampled.rows.set(keys.REWARD_INFO, ['{"error": "OSError: gone"}' if one else "{}" for one in lost])
    check = gate.responses_end_and_are_graded(sampled)
    assert check.passed
    assert check.sentence.endswith("6 are graded; the grader failed on 2 of 8, first error: OSError: gone")
    sampled.rows.set(keys.EXTRA, [json.dumps({TASK: "b" if one else "a"}) for one in lost])
    check = gate.responses_end_and_are_graded(sampled)
    assert check.passed is False
    assert "the grader failed on every response of b, first error: OSError: gone" in check.sentence


def test_a_check_over_nothing_is_not_passed_and_a_term_that_does_not_apply_counts_nothing(sampled: Components) -> None:
    graded_by(sampled, lambda text, example: Score({"correct": 1.0 if text else None}, bool(text)))
    check = gate.gold_answers_earn_the_full_reward(sampled)
    assert check.passed
    assert "104 of 104 gold answers earn the full reward of 1" in check.sentence
    sampled.task = with_gold(sampled.task, heldout=[])
    sampled.transforms = []
    graded_by(sampled, lambda text, example: Score({"correct": None}, False))
    sampled.rows.set(keys.REWARD_ERROR, torch.ones(8, 1, dtype=torch.bool))
    assert gate.gold_answers_earn_the_full_reward(sampled).passed is None
    assert gate.no_held_out_question_is_trained_on(sampled).passed is None
    assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed is None


@pytest.mark.parametrize("by", [0, 1, -1, 2])
def test_advantages_of_other_rows_or_of_the_other_sign_are_found(by: int, sampled: Components) -> None:
    def changed(rows: RowTable) -> RowTable:
        advantages = rows.get(keys.ADVANTAGE)
        rows.set(keys.ADVANTAGE, advantages.roll(by, 0) if by else -advantages)
        return rows

    sampled.transforms = [GroupAdvantage(), changed]
    assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed is False


def test_every_baseline_and_scale_passes(sampled: Components) -> None:
    """Whatever the rewards of the samples were: others are made up, no two siblings alike."""
    terms = sampled.task.term_weights
    for baseline, scale in itertools.product(get_args(Baseline), get_args(Scale)):
        sampled.transforms = [GroupAdvantage(baseline, scale)]
        assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed, (baseline, scale)
    sampled.transforms = [GroupAdvantage(decouple_terms=True, term_weights=dict.fromkeys(terms, -1.0))]
    assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed is False  # worse is better
    sampled.transforms = [GroupAdvantage(decouple_terms=True, term_weights=terms)]
    assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed


def test_scores_of_other_rows_are_found_unless_they_are_others_each_time(sampled: Components) -> None:
    graded_by(sampled, lambda text, example: Score({"correct": float(sum(map(ord, text)))}, False))
    sampled.rows = graded_rows(sampled)
    assert gate.rewards_and_advantages_belong_to_their_responses(sampled).passed
    sampled.rows.set(keys.REWARD, sampled.rows.get(keys.REWARD).roll(1, 0))
    check = gate.rewards_and_advantages_belong_to_their_responses(sampled)
    assert check.passed is False
    assert "when graded again; row" in check.sentence
    drawn = itertools.count()
    graded_by(sampled, lambda text, example: Score({"correct": float(next(drawn))}, False))
    sampled.rows = graded_rows(sampled)
    check = gate.rewards_and_advantages_belong_to_their_responses(sampled)
    assert check.passed
    assert check.sentence.startswith("0 of 0 responses")


def test_a_grader_that_fails_once_leaves_its_response_uncompared(sampled: Components) -> None:
    """It fails at one response when all are graded again; and a sibling's row has not the reward that it earned."""
    sampled.task = with_gold(sampled.task, score=NeedsEverySibling(gate.NUM_SAMPLES))
    graded_by(sampled, sampled.task.score)
    sampled.rows = graded_rows(sampled)
    sampled.rows.get(keys.REWARD)[1] += 1.0
    grade, calls = sampled.task.score.score_group, itertools.count()

    def once(asked: list[tuple[str, Example]]) -> list[Score]:
        first, *others = grade(asked)
        return [first if next(calls) else replace(first, error="OSError: busy"), *others]

    sampled.task.score.score_group = once
    check = gate.rewards_and_advantages_belong_to_their_responses(sampled)
    assert check.passed is False
    assert check.sentence.startswith("6 of 7 responses earn the reward of their row")


MASKS = {
    "the first sampled token is not trained": lambda mask, first: mask.index_fill(0, torch.tensor([first]), False),
    "the last sampled token is not trained": lambda mask, first: mask.index_fill(0, torch.tensor([-1]), False),
    "a sampled token is not trained": lambda mask, first: mask.index_fill(0, torch.tensor([first + 2]), False),
    "a token of the prompt is trained": lambda mask, first: mask.roll(-1, 0),
    "no token is trained": lambda mask, first: mask & False,
}


def test_a_sampled_token_that_is_not_trained_is_found(sampled: Components) -> None:
    assert gate.every_sampled_token_is_trained(sampled).passed
    rows = sampled.rows.rows()
    for sentence, fault in MASKS.items():
        masks = [fault(row[keys.ASSISTANT_MASK], len(row[keys.PROMPT_TOKENS])) for row in rows]
        sampled.rows.set(keys.ASSISTANT_MASK, masks)
        check = gate.every_sampled_token_is_trained(sampled)
        assert check.passed is False
        assert check.sentence.endswith(sentence)


def test_a_response_without_its_end_token_is_found_unless_it_was_cut_or_stopped(sampled: Components) -> None:
    ids = [row[keys.FULL_TOKENS].clone() for row in sampled.rows]
    assert not sampled.rows.get(keys.TRUNCATED)[0]
    ids[0][-1] = sampled.rollouts.env.tokenizer("5")["input_ids"][0]
    sampled.rows.set(keys.FULL_TOKENS, ids)
    assert gate.every_sampled_token_is_trained(sampled).sentence.endswith("the end token is not trained")
    sampled.stop = ["5"]
    assert gate.every_sampled_token_is_trained(sampled).passed
    sampled.stop = []
    sampled.rows.set(keys.TRUNCATED, torch.ones(8, 1, dtype=torch.bool))
    assert gate.every_sampled_token_is_trained(sampled).passed


def test_an_objective_of_the_wrong_sign_is_found(tmp_path: Path) -> None:
    for objective, sentence in (
        (lambda log_ratio, advantage: advantage * log_ratio.exp(), "move the other way"),
        (lambda log_ratio, advantage: -advantage * log_ratio.detach().exp(), "have no gradient"),
    ):
        components = make_components(tmp_path, objective=objective)
        with pytest.raises(CheckError, match=sentence) as raised:
            run_gate(components, "strict")
        assert raised.value.check.name == "the objective raises better responses"
    with pytest.raises(UserError, match=r"algorithm\.objective has no gradient"):  # the loss refuses the second
        run_gate(components, "warn", [gate.first_ratio_is_one, gate.gradient_does_not_depend_on_the_split])


def test_every_objective_raises_better_responses(tmp_path: Path) -> None:
    components = make_components(tmp_path, **HALF["bf16 both"])
    components.rows = graded_rows(components)
    for objective, surrogate in SURROGATES.items():
        components.learner.loss.surrogate = surrogate
        check = gate.the_objective_raises_better_responses(components)
        assert check.passed, f"{objective}: {check.sentence}"


@pytest.mark.parametrize("half", [None, "bf16 both"])
def test_another_reference_than_the_policy_is_found(half: str | None, tmp_path: Path) -> None:
    components = make_components(tmp_path, max_tokens=96, **HALF.get(half, {}))
    components.reference_exact = True
    own, rows, learner = components.transforms, components.sample(), components.learner
    for noise, temperature, passes in ((0, TEMPERATURE, True), (0.05, TEMPERATURE, False), (0, 2 * TEMPERATURE, False)):
        model, generator = load_model("tiny"), torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.data += noise * weight.data.std() * torch.randn(weight.shape, generator=generator)
        reference = FrozenReference(model, temperature=temperature, autocast=learner.autocast)
        components.transforms = [ReferenceKL(reference, pad_token_id=learner.pad_token_id, token_budget=512), *own]
        components.rows = RowTable.cat([rows])
        for transform in components.transforms:
            components.rows = transform(components.rows)
        check = gate.the_reference_is_the_policy_at_its_start(components)
        assert check.passed == passes, check.sentence
    assert half or failed(components) == [check.name]


def test_no_forward_exceeds_the_budget(tmp_path: Path, monkeypatch) -> None:
    components = make_components(tmp_path, micro_batch_tokens=1)
    learner, padded, seen = components.learner, components.learner.padded, []
    monkeypatch.setattr(learner, "padded", lambda rows, *weights: seen.append(rows) or padded(rows, *weights))
    assert failed(components) == []
    # several rows at once only where the split is compared, and there no more tokens than the two longest could have
    together = [sum(group.size[0] for group in groups_by_prompt(row_prompts(rows))) for rows in seen if len(rows) > 1]
    longest = max(row[keys.FULL_TOKENS].shape[-1] for row in components.rows)
    assert 0 < max(together) <= 2 * longest
    assert sum(map(len, seen)) - len(seen) < len(components.rows)
    learner.settings = replace(learner.settings, micro_batch_tokens=1 << 20)
    seen.clear()
    assert gate.gradient_does_not_depend_on_the_split(components).passed
    assert {*map(len, seen)} == {1, gate.NUM_COMPARED}


def without(components: Components, *stale: str) -> Components:
    """The same, with a push that leaves these tensors as they were."""
    first = {name: value.clone() for name, value in components.weight_sync.policy_weights()}
    assert {*stale} <= first.keys()
    engine, update = components.rollouts.engine, components.rollouts.engine.update_weights
    engine.update_weights = lambda weights, version: update(
        [(name, first[name] if name in stale else value) for name, value in weights], version
    )
    return components


PROJECTION = "model.layers.1.self_attn.q_proj.weight"


def test_what_half_precision_hides_is_named_by_checksums_and_so_is_what_no_engine_reports(tmp_path: Path) -> None:
    """Of a tensor that the engine holds in another order, as of an engine without checksums."""
    components = make_components(tmp_path, **HALF["bf16 both"])
    components.rows = graded_rows(components)
    engine, unknown = components.rollouts.engine, "model.norm.weight"
    own = engine.weight_sums

    def reported():
        known = {name: each for name, each in own()[engine.name].items() if name != unknown}
        return {engine.name: known | {PROJECTION: known[PROJECTION]._replace(by_row=0)}}

    for weight_sums, sentence in (
        (reported, f"not verified: {PROJECTION}, {unknown}, which the engine renames or reorders"),
        (lambda: None, f"not verified: single tensors, because {engine.name} reports no checksums"),
    ):
        engine.weight_sums = weight_sums
        check = pushed_weights_landed(components)
        assert check.passed
        assert check.sentence.endswith(sentence)
    engine.weight_sums = own
    check = pushed_weights_landed(without(components, PROJECTION))
    assert check.passed is False
    assert check.sentence.endswith(f"; the engine did not load {PROJECTION}")


def test_in_float32_what_was_not_applied_is_named_without_checksums(components: Components) -> None:
    engine, update = components.rollouts.engine, components.rollouts.engine.update_weights
    engine.weight_sums = lambda: None
    kind = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4)]
    for stale in (["model.layers.1.self_attn.v_proj.bias"], kind):
        engine.update_weights = update
        check = pushed_weights_landed(without(components, *stale))
        assert check.passed is False
        assert check.sentence.endswith(f"; the engine did not load {', '.join(stale)}")


def test_a_mean_of_micro_batch_means_is_found(sampled: Components, monkeypatch) -> None:
    """The commonest mistake of the field: each micro-batch normalised by itself."""
    padded = sampled.learner.padded

    def renormalised(rows, weights=None):
        tokens = sum(int(row[keys.ASSISTANT_MASK].sum()) for row in rows)
        return padded(rows, weights and [1 / tokens] * len(rows))

    monkeypatch.setattr(sampled.learner, "padded", renormalised)
    check = gate.gradient_does_not_depend_on_the_split(sampled)
    assert not check.passed
    assert "mixes the rows of a micro-batch" in check.sentence


def with_gold(task, gold_response=lambda example: None, **changes) -> SimpleNamespace:
    """The same task with other gold answers; without ``gold_response`` it knows none."""
    own = {name: getattr(task, name) for name in ("train", "heldout", "term_weights", "score")}
    return SimpleNamespace(gold_response=gold_response, **{**own, **changes})


def test_a_grader_that_refuses_the_gold_answer_or_pays_for_nothing_is_found(sampled: Components) -> None:
    task = sampled.task
    sampled.task = with_gold(task, lambda example: "the gold answer, in a form that the grader cannot read")
    check = gate.gold_answers_earn_the_full_reward(sampled)
    assert not check.passed
    assert task.train[0].query[:40] in check.sentence
    sampled.task = with_gold(task)  # which knows none
    check = gate.gold_answers_earn_the_full_reward(sampled)
    assert check.passed
    assert check.sentence == "not checked against gold answers, because the task has none"
    sampled.task = task
    graded_by(sampled, lambda response, example: Score({"correct": 1.0}, True))
    assert not gate.gold_answers_earn_the_full_reward(sampled).passed


@dataclass
class NeedsEverySibling:
    """As a function that shares out points among the responses of a group."""

    siblings: int

    def score_group(self, asked: list[tuple[str, Example]]) -> list[Score]:
        if len(asked) != self.siblings:
            raise ValueError(f"{len(asked)} responses")
        return [Score({"correct": 1.0}, True) for _ in asked]


def test_a_function_of_whole_groups_is_asked_about_a_whole_group(sampled: Components) -> None:
    sampled.task = with_gold(sampled.task)
    for more in (0, 1):
        sampled.task.score = NeedsEverySibling(sampled.rollouts.env.repeats + more)
        graded_by(sampled, sampled.task.score)
        check = gate.gold_answers_earn_the_full_reward(sampled)
        assert check.passed == (not more)
        assert ("failed on" in check.sentence) == bool(more)


@pytest.mark.parametrize("share_device", [True, False])
def test_on_a_shared_device_the_engine_sleeps_while_the_learner_computes(share_device, components, monkeypatch) -> None:
    """And before it wakes, this process gives back what it only holds in reserve."""
    state, computed, woken = {"asleep": False, "released": False}, set(), set()
    engine, learner = components.rollouts.engine, components.learner
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state.update(released=True))
    monkeypatch.setattr(engine, "sleep", lambda: state.update(asleep=True, released=False))
    monkeypatch.setattr(engine, "wake", lambda: (woken.add(state["released"]), state.update(asleep=False)))
    for name in ("measured", "diagnose", "gradient_gap"):
        call = getattr(learner, name)
        watched = lambda *args, call=call: (computed.add(state["asleep"]), call(*args))[1]  # noqa: E731
        monkeypatch.setattr(learner, name, watched)
    components.transforms = [lambda batch: (computed.add(state["asleep"]), batch)[1]]
    components.weight_sync.make_room = learner.give_back if share_device else None
    checks = None if share_device else [gate.gradient_does_not_depend_on_the_split, pushed_weights_landed]
    assert all(check.passed is not False for check in run_gate(components, "warn", checks))
    assert (computed, woken) == ({share_device}, {True} if share_device else set())
    assert not state["asleep"]


def test_a_strict_gate_ends_at_the_first_check_that_fails(sampled: Components) -> None:
    made, checks = [], list[gate.Check]()

    def check(passed: bool):
        return lambda components: made.append(passed) or gate.Check("one", passed, "it is so")

    with pytest.raises(CheckError, match=r"failed \(one\): it is so; check.mode=warn trains despite this"):
        gate.run_gate(sampled, "strict", [check(True), check(False), check(True)], on_check=checks.append)
    assert made == [one.passed for one in checks] == [True, False]
    assert len(gate.run_gate(sampled, "warn", [check(False)] * 2)) == 2
    assert gate.run_gate(sampled, "off") == []


def test_responses_that_cannot_be_trained_on_or_need_too_much_memory_end_in_a_sentence(components: Components) -> None:
    """MaxRL divides by a mean of rewards, of which none is below 0."""

    def full(components: Components) -> gate.Check:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried.\nand details")

    components.task.score = lambda text, example: Score({"correct": -1.0}, False)
    graded_by(components, components.task.score)
    components.transforms = [GroupAdvantage(scale="group_mean")]
    with pytest.raises(UserError, match=r"sampled by the checks cannot be trained on: .*no reward may be negative"):
        run_gate(components, "warn", [gate.every_sampled_token_is_trained])
    components.transforms = []
    with pytest.raises(RunFailed, match=r"lacks memory for the check 'full' \(CUDA .* Tried\); .*_tokens=8192 or "):
        run_gate(components, "warn", [full])


def test_a_grader_that_fails_at_every_text_is_found_without_gold_answers(sampled: Components) -> None:
    sampled.task = with_gold(sampled.task)
    grader = mock.Mock(side_effect=OSError("no judge"))
    graded_by(sampled, grader)
    check = gate.gold_answers_earn_the_full_reward(sampled)
    assert not check.passed
    assert check.sentence.endswith("the grader failed on 4 of 4 texts, first error: OSError: no judge")
    assert grader.call_count == gate.ENOUGH, "a grader that hangs may take its deadline each time"


def test_a_held_out_question_in_the_training_split_is_found(sampled: Components) -> None:
    task = sampled.task
    sampled.task = SimpleNamespace(train=[*task.train[:5], task.heldout[3]], heldout=task.heldout)
    check = gate.no_held_out_question_is_trained_on(sampled)
    assert not check.passed
    assert check.sentence.startswith("1 held-out")
    # by the normal form of the tasks, where a sharp s is a double s
    mine, theirs = map(Example, ("How many Straßen\n are  there?", "how many STRASSEN are there?"), "12")
    sampled.task = SimpleNamespace(train=[mine], heldout=[theirs])
    assert not gate.no_held_out_question_is_trained_on(sampled).passed


def test_a_reference_with_another_tokenizer_or_a_short_context_is_refused_first(sampled: Components) -> None:
    own = sampled.rollouts.env.tokenizer.get_vocab()
    right = NamedReference("TEACHER", "POLICY", {**own, "<more>": len(own)}, context=2048, longest=2048)
    sampled.reference = right
    assert gate.checks_of(sampled)[0] is gate.the_reference_reads_the_policys_tokens
    assert gate.the_reference_reads_the_policys_tokens(sampled).passed
    swapped = replace(right, vocabulary=own | {"a": own["b"], "b": own["a"]})
    for other, sentence in (
        (swapped, "638 of the 640 tokens of POLICY have the same id in TEACHER .not 'a'."),
        (replace(right, context=2047), "TEACHER reads 2047 .* have 2048: use inference_model.max_model_len=2047"),
    ):
        sampled.reference, sampled.rows = other, sampled.rows[:0]
        with pytest.raises(CheckError, match=sentence):
            run_gate(sampled, "strict")
        assert not sampled.rows  # nothing was sampled


def test_a_teacher_leaves_no_token_of_the_compared_gradients_clipped(components: Components) -> None:
    """One that finds all samples bad would: then the check would compare next to nothing."""
    learner = components.learner
    learner.loss.distill_coeff, learner.loss.advantage_coeff = 2.0, 1.0
    rows = components.sample()
    rows.set(keys.REF_LOG_PROBS, [row[keys.LOG_PROBS] - 9 * row[keys.ASSISTANT_MASK] for row in rows])
    assert learner._dry_run(learner._unclipped(rows), 1 << 20)["clip_fraction"] == 0
