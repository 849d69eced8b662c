"""Rewards per second through the real reward workers, from texts to scores.

``python -m benchmarks.rewards --task gsm8k --workers 2``. Responses are made up: worked steps of the arithmetic task,
as long as the gold solutions of GSM8K's training split (their number of characters is lognormal, with mean 5.54 and
deviation 0.49 of its logarithm, 287 characters on average), with right, wrong, differently written and missing answers.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sota_grpo.rewards.grading import GradingPool, LocalGrader
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks import make_scorer, make_task

LOG_LENGTH = (5.54, 0.49)
AHEAD = 4  # groups in the queue of each worker, so that none waits for this process
Pairs = list[tuple[str, Example]]

MATHS = {  # gold answer -> what models write for it, right and wrong; A < B < C are numbers
    r"\frac{A}{B}": ("A/B", r"\dfrac{A}{B}", r"\frac{B}{A}", r"\frac{C}{B}"),
    r"\frac{\sqrt{A}}{B}": (r"\sqrt{A}/B", r"\frac{1}{B}\sqrt{A}", r"\sqrt{A}"),
    "Ax^2 - Bx + C": ("C - Bx + Ax^2", "Ax^2+Bx+C", "x(Ax - B) + C"),
    "[A, B)": ("[A,B)", r"A \le x < B", "(A, B)", "[A,C)"),
    "B": (r"B^\circ", "B.00", "A", "C", "B kg"),
    "(A, -C)": ("(A,-C)", r"x = A,\ y = -C", "(-C, A)"),
    r"A\pi": (r"A \cdot \pi", r"\pi^A", r"B\pi"),
    r"\{A, B, C\}": ("A, B, C", r"\{C,B,A\}", r"\{A, B\}"),
}


@dataclass(frozen=True)
class Rate:
    """What one measurement found.

    Args:
        rewards_per_s: scores that arrived, per second.
        driver_us: CPU time of this process per reward.
        success: share of right answers, as a sign that something is graded.
        failed: gradings that failed.
    """

    rewards_per_s: float
    driver_us: float
    success: float
    failed: int


def worked_steps(rng: random.Random, solutions: Sequence[str]) -> str:
    """Steps of several problems, about as many characters as a solution of GSM8K has."""
    length, text = round(rng.lognormvariate(*LOG_LENGTH)), ""
    while len(text) < length:
        steps = rng.choice(solutions).rpartition("\n")[0].replace("\n", ", so we get ")
        text += f"Next we see that {steps}.\n"
    return text[:length]


def number_endings(answer: str, rng: random.Random) -> tuple[str, ...]:
    """How a response may end whose right answer is a whole number."""
    number = int(answer)
    wrong = number + rng.choice((-10, -1, 1, 2, 100))
    return f"#### {number}", f"#### {number:,}", f"#### ${number}.00", f"#### {wrong}", f"The answer is {number}.", ""


def gsm8k_groups(rng: random.Random, task: Task, size: int, count: int) -> list[Pairs]:
    """Groups of siblings, graded by the number after ``####``."""
    problems = make_task("arithmetic", seed=rng.randrange(1 << 30), num_train=count, num_heldout=1).train
    solutions = [problem.answer for problem in problems]
    groups = []
    for problem in problems:
        answer = problem.answer.rpartition("####")[2].strip()
        example = task.read_row({"question": problem.query, "answer": problem.answer}, "benchmark")
        ends = [rng.choice(number_endings(answer, rng)) for _ in range(size)]
        groups.append([(f"{worked_steps(rng, solutions)}\n{end}", example) for end in ends])
    return groups


def math_groups(rng: random.Random, task: Task, size: int, count: int) -> list[Pairs]:
    """Groups of siblings, graded by their last box."""
    solutions = [problem.answer for problem in make_task("arithmetic", num_train=200, num_heldout=1).train]
    groups = []
    for _ in range(count):
        form = rng.choice(list(MATHS))
        numbers = str.maketrans(dict(zip("ABC", map(str, sorted(rng.sample(range(2, 1000), 3))))))
        gold, *others = (text.translate(numbers) for text in (form, *MATHS[form]))
        example = task.read_row({"question": "What is it?", "ground_truth": gold, "answer": gold}, "benchmark")
        answers = [rng.choice((gold, *others)) for _ in range(size)]
        groups.append([(f"{worked_steps(rng, solutions)}\nSo it is $\\boxed{{{text}}}$.", example) for text in answers])
    return groups


GROUPS: dict[str, Callable[[random.Random, Task, int, int], list[Pairs]]] = {"gsm8k": gsm8k_groups, "math": math_groups}


def measure(
    scores: Callable[[Pairs], Future[list[Score]]], groups: Sequence[Pairs], ahead: int, seconds: float
) -> Rate:
    """Request one group after the other, ``ahead`` of them at a time."""
    waiting: deque[Future[list[Score]]] = deque()
    num_requested = count = right = failed = 0
    began, cpu = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < seconds:
        while len(waiting) < ahead:
            waiting.append(scores(groups[num_requested % len(groups)]))
            num_requested += 1
        for score in waiting.popleft().result():
            count += 1
            right += score.success
            failed += score.error is not None
    busy = time.process_time() - cpu
    return Rate(count / passed, 1e6 * busy / count, right / count, failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(GROUPS), default="gsm8k")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    task = make_scorer(options.task)
    print(f"{'group':>6} {'rewards/s':>12} {'in one process':>15} {'driver us/reward':>17} {'right':>7} {'failed':>7}")
    for size in (8, 64):
        groups = GROUPS[options.task](random.Random(options.seed), task, size, 512)
        local = LocalGrader(task.score, task.term_weights)
        here = measure(local.scores, groups, ahead=1, seconds=options.seconds / 4)
        pool = GradingPool(scorer_of(task), task.term_weights, num_workers=options.workers, timeout_s=10.0)
        try:
            pool.wait_ready()
            measure(pool.scores, groups, AHEAD * options.workers, seconds=0.5)  # what graders load on their first text
            there = measure(pool.scores, groups, AHEAD * options.workers, options.seconds)
        finally:
            pool.close()
        print(
            f"{size:>6} {there.rewards_per_s:>12,.0f} {here.rewards_per_s:>15,.0f} {there.driver_us:>17.1f} "
            f"{there.success:>7.1%} {there.failed:>7}"
        )


if __name__ == "__main__":
    main()
