"""Accuracy and its error, against the plain formula; what is graded, and what a grader that fails costs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from sota_grpo.evaluate import Accuracy, Evaluator
from sota_grpo.records import Example, GroupOutput, GroupRequest, Sample, Sampling, Score
from sota_grpo.rewards.grading import LocalGrader
from tests.l3_parts import make_env, make_saying

SEED = random.SystemRandom().randrange(1 << 30)


def test_standard_error_of_a_share_is_the_binomial_one() -> None:
    dice = random.Random()
    outcomes = [float(dice.random() < 0.3) for _ in range(400)]
    found = Accuracy.of(outcomes)
    share = sum(outcomes) / 400
    assert found.mean == pytest.approx(share)
    assert found.stderr == pytest.approx(math.sqrt(share * (1 - share) / 399))


def measured(env, say, **options) -> dict[str, float]:
    engine, examples = make_saying(env, say), env.task.heldout[:8]
    return Evaluator(env, engine, examples, max_tokens=64, **{"avg_at_k": 0, "seed": SEED} | options).measure()


def test_accuracy_is_the_share_of_right_answers() -> None:
    env, right = make_env(), set(random.Random(SEED).sample(range(8), 3))
    examples = env.task.heldout

    def say(request: GroupRequest, index: int) -> str:
        """Greedy: right where chosen; of four samples one more than a problem's greedy answer."""
        is_right = request.group_id in right or index == 3
        return env.task.gold_response(examples[request.group_id]) if is_right else "no idea"

    found = measured(env, say, avg_at_k=4)
    assert found["eval/accuracy"] == 3 / 8
    assert found["eval/avg_at_k"] == (3 + 5 / 4) / 8


def test_failed_gradings_count_as_wrong_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    env = make_env()

    def score(response: str, example: Example) -> Score:
        if example == env.task.heldout[2]:
            raise OSError("no judge")
        return Score({"correct": 1.0}, True)

    env.grader = LocalGrader(score, ["correct"])
    assert measured(env, lambda request, index: "say")["eval/accuracy"] == 7 / 8
    assert (
        "failed at 1 of 8 responses of this evaluation, which count as wrong; the first: OSError: no judge"
        in caplog.text
    )


class Dialogs:
    """Answers every request with a dialog of two turns, between which somebody else speaks."""

    def __init__(self, ids: list[list[int]]) -> None:
        self.ids, self.requests = ids, list[GroupRequest]()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        self.requests = list(requests)
        first, user, last = self.ids
        mask = torch.tensor([True] * len(first) + [False] * len(user) + [True] * len(last))
        ids = torch.tensor([*first, *user, *last])
        sample = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids)), truncated=False, assistant_mask=mask)
        for request in requests:
            yield GroupOutput(request.group_id, (sample,) * request.num_samples)


def test_the_last_turn_of_a_dialog_is_graded() -> None:
    env, texts = make_env(multi_turn=True), []
    env.grader = LocalGrader(lambda text, example: texts.append(text) or Score({"correct": 1.0}, True), ["correct"])
    dialogs = Dialogs([env.tokenizer(text)["input_ids"] for text in ("no", "think again", "it is 4")])
    examples = env.task.heldout[:2]
    Evaluator(env, dialogs, examples, max_tokens=64, avg_at_k=0, seed=0).measure()
    assert texts == ["it is 4"] * 2
    assert [request.example for request in dialogs.requests] == list(examples)
