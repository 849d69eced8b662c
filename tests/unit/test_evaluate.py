"""Accuracy and its error, against the plain formula; what is graded, and what a grader that fails costs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sota_grpo.envs.prompts import Rollouts
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rl.records import Example, GroupRequest, Score
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.training.evaluate import MISSED, Evaluator, Response, accuracy, is_out_of_reach, num_needed, pass_at_k
from tests.training_rigs import make_env, make_saying

SEED = random.randrange(1 << 30)


def evaluator_of(env, say=lambda request, index: "say", **options) -> Evaluator:
    options = {"examples": env.task.heldout[:8], "max_tokens": 64, "avg_at_k": 0, "seed": SEED} | options
    return Evaluator(Rollouts(env, make_saying(env, say)), **options)


@pytest.mark.parametrize("reason", ["OSError: no judge", "NoReward: no term of the reward applies"])
def test_failed_gradings_count_as_wrong_and_are_reported(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    env = make_env()

    def score(response: str, example: Example) -> Score:
        if example != env.task.heldout[2]:
            return Score({"correct": 1.0}, True)
        if "judge" in reason:
            raise OSError("no judge")
        return Score({"correct": None}, False)

    env.grader = LocalGrader(score, ["correct"])
    assert evaluator_of(env).measure()["eval/accuracy"] == 7 / 8
    warning = f"failed on 1 of 8 responses of this evaluation, and these count as wrong. First error: {reason}"
    assert warning in caplog.text


def test_rewards_are_measured_and_a_success_that_cannot_vary_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Rewards of 0 and minus 1, two terms, one of which applies to half of the responses."""
    env = make_env()
    examples = list(env.task.heldout[:8])
    env.task.term_weights = {"near": 1.0, "rare": 10.0}

    def score(response: str, example: Example) -> Score:
        odd = examples.index(example) % 2
        return Score({"near": -float(odd), "rare": 0.0 if odd else None}, False)

    env.grader = LocalGrader(score, ["near", "rare"])
    evaluator = evaluator_of(env)
    actual = evaluator.measure()
    assert (actual["eval/reward"], actual["eval/reward/near"], actual["eval/reward/rare"]) == (-0.5, -0.5, 0.0)
    assert actual["eval/reward_stderr"] == pytest.approx(math.sqrt(0.25 / 7))
    assert evaluator.evaluate()["greedy"]["reward"] == -0.5
    assert "accuracy is not informative" not in caplog.text
    assert evaluator.sentence(3, actual) == "Held-out accuracy after 3 steps: 0.0 %, mean reward -0.5"
    evaluator.success_above = -0.75
    actual["eval/accuracy"] = 0.5
    evaluator.measure()
    expected = "Held-out mean reward after 3 steps: -0.5 (50.0 % of the responses above reward.success_above=-0.75)"
    assert evaluator.sentence(3, actual) == expected, "nothing but the limit says what is right"
    env.grader = LocalGrader(lambda *pair: replace(score(*pair), info={"near/acc": 0.0}), ["near", "rare"])
    evaluator.measure()
    assert evaluator.sentence(3, actual) == "Held-out accuracy after 3 steps: 50.0 %, mean reward -0.5"
    evaluator.success_above = 0.0
    evaluator.measure()
    assert "accuracy is not informative" not in caplog.text, "the reward function reports verdicts"
    env.grader = LocalGrader(score, ["near", "rare"])
    evaluator.measure()
    warning = "rewards of all 8 greedy held-out responses, from -1 to 0, are not above reward.success_above=0: accuracy"
    assert warning in caplog.text


@pytest.mark.parametrize("num_samples", [1, 5])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(num_samples: int) -> None:
    for right in range(num_samples + 1):
        outcomes = [True] * right + [False] * (num_samples - right)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert pass_at_k(right, num_samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="need 1 <= k"):
        pass_at_k(1, num_samples, num_samples + 1)


@pytest.mark.parametrize("target", [0.37, 0.5, 0.7])
def test_a_subset_rarely_misses_a_target_that_is_reached(target: float) -> None:
    """Of all subsets of 5 of 10 problems, whatever share of them is right; fewer right ones are missed more often."""
    needed = num_needed(target, 10)
    assert needed / 10 >= target > (needed - 1) / 10
    shares = []
    for right in range(11):
        hits = [sum(problem < right for problem in subset) for subset in itertools.combinations(range(10), 5)]
        shares.append(statistics.fmean(is_out_of_reach(each, 5, 10, target) for each in hits))
        assert right < needed or shares[-1] < MISSED
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1


@pytest.mark.parametrize(("num_right", "count"), [(2, 10), (3, 40)])
def test_a_target_is_confirmed_on_all_problems_or_refuted_by_few(num_right: int, count: int) -> None:
    """At half of 40, 2 of the first 10 are too few (p = 0.032), 3 are not (p = 0.14)."""
    env, seen = make_env(), list[int]()
    examples = (list(env.task.heldout) * 2)[:40]

    def say(request: GroupRequest, index: int) -> str:
        seen.append(request.group_id)
        return env.task.gold_response(examples[request.group_id]) if request.group_id < num_right else "no idea"

    evaluator = evaluator_of(env, say, examples=examples)
    metrics = evaluator.measure(0.5)
    assert metrics["eval/num_samples"] == count
    assert metrics["eval/accuracy"] == num_right / count
    assert sorted(seen) == list(range(count)), "no problem is sampled twice"
    assert (f"on the first {count} of 40 problems" in evaluator.sentence(3, metrics)) == (count < 40)


def test_every_response_is_handed_over_once_with_its_problem() -> None:
    env, texts = make_env(), dict[int, list[str]]()
    evaluator = evaluator_of(env, lambda request, index: f"{request.group_id} {index}", avg_at_k=3)

    def graded(problem: int, responses: Sequence[Response]) -> None:
        assert problem not in texts
        texts[problem] = [response.text for response in responses]

    problems = evaluator.responses(3, temperature=1.0, on_graded=graded)
    assert texts == {problem: [f"{problem} {index}" for index in range(3)] for problem in range(8)}
    assert [[response.text for response in part] for part in problems] == [texts[problem] for problem in range(8)]
    assert all(response.num_tokens > 0 and not response.truncated for part in problems for response in part)


def test_the_measures_of_an_evaluation_are_those_of_its_responses() -> None:
    """Problem p has p % 5 right ones of 4 samples, and a right greedy answer where p is even."""
    env = make_env()
    examples = env.task.heldout[:10]

    def say(request: GroupRequest, index: int) -> str:
        greedy = request.num_samples == 1
        is_right = request.group_id % 2 == 0 if greedy else index < request.group_id % 5
        return env.task.gold_response(examples[request.group_id]) if is_right else "no idea"

    evaluator = evaluator_of(env, say, examples=examples, avg_at_k=4)
    actual = evaluator.evaluate()
    assert actual["num_problems"] == 10
    assert actual["greedy"]["accuracy"] == 0.5
    assert actual["sampled"]["accuracy"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 5 / 4)
    accuracies = {k: part["accuracy"] for k, part in actual["pass_at_k"].items()}
    assert accuracies == pytest.approx({"1": 0.5, "2": (0 + 3 / 6 + 5 / 6 + 1 + 1) / 5, "4": 0.8})
    assert actual["pass_at_k"]["4"]["stderr"] == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    measures = evaluator.measure()
    assert measures["eval/accuracy"] == actual["greedy"]["accuracy"]
    assert measures["eval/avg_at_k"] == actual["sampled"]["accuracy"]


def test_an_accuracy_of_the_task_may_have_the_name_of_another_figure() -> None:
    env = make_env()
    env.task.counts = lambda score, example: dict.fromkeys(("reward", "stderr", "accuracy"), (1.0, 2.0))
    actual = evaluator_of(env).measure()
    assert (actual["eval/task/reward"], actual["eval/task/stderr"]) == (0.5, 0.5)
    assert (actual["eval/reward"], actual["eval/stderr"], actual["eval/accuracy"]) == (0.0, 0.0, 0.0)


CLUSTERS = [(2, 2), (0, 1), (1, 3), (0, 2), (1, 1)]  # instructions followed, and requested, of five prompts


def test_shares_of_unequal_prompts_have_the_ratio_estimators_error_and_a_gain_is_paired() -> None:
    """4 of 9; residuals y - 4/9 m are 10/9, -4/9, -3/9, -8/9, 5/9, whose squares add up to 214/81.

    What two evaluations share cancels; with one trial each the error is that of the mean of the differences.
    """
    error = math.sqrt(5 / 4 * 214 / 81) / 9
    assert accuracy(CLUSTERS) == {"accuracy": pytest.approx(4 / 9), "stderr": pytest.approx(error)}
    assert accuracy(CLUSTERS, CLUSTERS) == {"accuracy": 0.0, "stderr": 0.0}
    before, after = [(0, 1), (1, 1), (0, 1), (1, 1)], [(1, 1), (1, 1), (1, 1), (0, 1)]
    assert accuracy(after, before)["stderr"] == pytest.approx(statistics.stdev([1, 0, 1, -1]) / 2)
    with pytest.raises(ValueError, match="zip"):
        accuracy(after[:3], before)


def test_the_accuracies_of_ifeval_are_counted_over_prompts_and_over_instructions() -> None:
    """Two, one and one instructions, the grader failing at the last; the first is followed without its last line."""
    task, env = IFEvalTask(), make_env()
    ids = ["punctuation:no_comma", "startend:end_checker"]
    rows = [(ids, [{}, {"end_phrase": "Bye."}]), (ids[:1], [{}]), (ids[:1], [{}])]
    task.heldout = [
        task.read_row({"prompt": str(number), "instruction_id_list": names, "kwargs": kwargs}, "row")
        for number, (names, kwargs) in enumerate(rows)
    ]
    responses = ["Good day.\nBye.\nYours, Bob", "Yes.", "No."]

    def score(response: str, example: Example) -> Score:
        if response == "No.":
            raise OSError("no judge")
        return task.score(response, example)

    env.task, env.grader = task, LocalGrader(score, list(task.term_weights))
    evaluator = evaluator_of(env, lambda request, index: responses[request.group_id], examples=task.heldout)
    actual = evaluator.measure()
    shares = {name.removeprefix("eval/task/"): actual[name] for name in actual if name.startswith("eval/task/")}
    assert shares == pytest.approx(
        {"prompt_strict": 1 / 3, "prompt_loose": 2 / 3, "instruction_strict": 1 / 4, "instruction_loose": 3 / 4}
    )
    assert actual["eval/accuracy"] == actual["eval/task/prompt_strict"]
    assert actual["eval/task_stderr/prompt_strict"] == actual["eval/stderr"]
    greedy = evaluator.evaluate()["greedy"]
    assert greedy["instruction_strict"]["stderr"] == actual["eval/task_stderr/instruction_strict"]
