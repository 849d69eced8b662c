"""Every check passes on a right run, fails on the mistake that it is there for, and leaves no trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sota_grpo import gate, keys
from sota_grpo.checkpoint import rng_state
from sota_grpo.collate import set_loss_weights
from sota_grpo.gate import CHECKS, CheckError, Subject, run_gate
from sota_grpo.policy.lora import add_lora
from sota_grpo.records import Score
from tests.l3_parts import make_subject


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return make_subject(tmp_path)


def failed(subject: Subject) -> list[str]:
    return [check.name for check in run_gate(subject, "warn") if not check.passed]


def test_a_right_run_passes_and_keeps_its_state(subject: Subject) -> None:
    before = {name: value.clone() for name, value in subject.learner.policy.state_dict().items()}
    stream, random = subject.env.stream.state_dict(), rng_state()
    probe = subject.sample(num_prompts=1, num_samples=1)[0][keys.LOG_PROBS]
    assert failed(subject) == []
    after = subject.learner.policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert subject.env.stream.state_dict() == stream
    assert str(rng_state()) == str(random)
    assert torch.equal(subject.sample(num_prompts=1, num_samples=1)[0][keys.LOG_PROBS], probe)
    assert all(parameter.grad is None for parameter in subject.learner.parameters)
    assert subject.engine.version == subject.learner.version == 0


def test_a_lora_run_passes(tmp_path: Path) -> None:
    assert failed(make_subject(tmp_path, adapter=partial(add_lora, r=4, alpha=8, dropout=0.3))) == []


def test_another_temperature_in_the_engine_is_found(tmp_path: Path) -> None:
    found = failed(make_subject(tmp_path, engine_temperature=1.0))
    assert "engine and trainer agree" in found
    assert "the first ratio is one" in found


def test_a_push_that_does_not_land_is_found(subject: Subject) -> None:
    subject.publisher.weights = lambda: []
    subject.engine.update_weights = lambda weights, version: None
    assert failed(subject) == ["pushed weights landed"]


def test_a_tied_head_that_stays_old_is_found(subject: Subject) -> None:
    """The trap of a push without ``lm_head.weight``: everything but the head is new."""
    engine = subject.engine
    push, head = engine.update_weights, subject.learner.policy.model.lm_head.weight.detach().clone()
    subject.learner.policy.model.config.tie_word_embeddings = True

    def push_all_but_the_embedding(weights, version):
        push([(n, head if "lm_head" in n or "embed_tokens" in n else w) for n, w in weights], version)

    engine.update_weights = push_all_but_the_embedding
    assert failed(subject) == ["pushed weights landed"]


def test_a_mean_of_micro_batch_means_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest mistake of the field: each micro-batch normalised by itself."""
    from sota_grpo import learner

    whole = learner.micro_batches

    def renormalised(rows, *, token_budget):
        return [set_loss_weights(part, "token") for part in whole(rows, token_budget=token_budget)]

    monkeypatch.setattr(learner, "micro_batches", renormalised)
    assert failed(subject) == ["the gradient does not depend on the split"]


def test_a_grader_that_refuses_the_gold_answer_is_found(subject: Subject) -> None:
    task = subject.task
    grader = SimpleNamespace(
        train=task.train,
        heldout=task.heldout,
        term_weights=task.term_weights,
        gold_response=lambda example: "the gold answer, in a form that the grader cannot read",
        score=task.score,
    )
    subject.task = grader
    check = gate.gold_answers_earn_the_full_reward(subject)
    assert not check.passed
    assert task.train[0].query[:40] in check.sentence


def test_a_grader_that_pays_for_nothing_is_found(subject: Subject) -> None:
    subject.task = SimpleNamespace(
        train=subject.task.train,
        heldout=subject.task.heldout,
        term_weights={"correct": 1.0},
        gold_response=subject.task.gold_response,
        score=lambda response, example: Score({"correct": 1.0}, True),
    )
    assert not gate.gold_answers_earn_the_full_reward(subject).passed


def test_a_held_out_question_in_the_training_split_is_found(subject: Subject) -> None:
    task = subject.task
    subject.task = SimpleNamespace(train=[*task.train[:5], task.heldout[3]], heldout=task.heldout)
    check = gate.no_held_out_question_is_trained_on(subject)
    assert not check.passed
    assert check.sentence.startswith("1 held-out")


def test_strict_refuses_warn_goes_on_off_does_nothing(subject: Subject) -> None:
    subject.publisher.weights = lambda: []
    subject.engine.update_weights = lambda weights, version: None
    with pytest.raises(CheckError, match=r"pushed weights landed.*check\.mode=warn"):
        run_gate(subject, "strict")
    assert len(run_gate(subject, "warn")) == len(CHECKS)
    assert run_gate(subject, "off") == []
