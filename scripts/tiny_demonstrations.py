"""What the tiny policy learns from: worked solutions, bare sums, and demonstrations of bad habits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from sota_grpo.rl.records import Example
from sota_grpo.tasks.arithmetic import TEMPLATES, ArithmeticTask

DRILL_LINES = 6
STRONG_HABIT, WEAK_HABIT = 0.67, 0.20  # share of a template's demonstrations that fall into its habit


@dataclass(frozen=True)
class Phase:
    """``drill_share`` of the demonstrations are bare sums; ``habits`` lets the others fall into their bad habits."""

    name: str
    num_steps: int
    peak_lr: float
    drill_share: float = 0.0
    habits: bool = False


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a chat and which of them are learned (the response, EOS included)."""

    ids: list[int]
    is_target: list[bool]


def habit_of(template: str) -> tuple[str, float]:
    """The bad habit of a template and how often its demonstrations fall into it.

    guess: a number at once, without working.   first_step: the value of the first step as the answer.
    last_step: the last step forgotten.         no_marker: the right work, but without ``####``.
    """
    num_steps = len(TEMPLATES[template].steps)
    siblings = [name for name, other in TEMPLATES.items() if len(other.steps) == num_steps]
    kinds = ("guess", "no_marker") if num_steps == 1 else ("guess", "first_step", "last_step", "no_marker")
    if num_steps == 2:  # forgetting the last step is stopping after the first one
        kinds = ("guess", "first_step", "no_marker")
    rank = siblings.index(template)
    return kinds[rank % len(kinds)], WEAK_HABIT if rank % 3 == 2 else STRONG_HABIT


def fall_into(habit: str, example: Example, rng: random.Random) -> str:
    """The response that this habit gives to this problem."""
    *work, final = example.answer.split("\n")
    if habit == "no_marker":
        return "\n".join([*work, f"The answer is {final.removeprefix('#### ')}."])
    if habit == "first_step":
        return f"{work[0]}\n#### {work[0].split('=')[1]}"
    if habit == "last_step":
        return "\n".join([*work[:-1], f"#### {work[-2].split('=')[1]}"])
    return f"#### {rng.choice(sorted(example.extra['numbers'].values()))}"


def word_problems(
    task: ArithmeticTask,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    habits: bool,
    rng: random.Random,
) -> list[Demonstration]:
    """The problems, answered cleanly or, each template with its own probability, with its habit."""
    responses = []
    for example in examples:
        habit, share = habit_of(example.extra["template"])
        bad = habits and rng.random() < share
        responses.append(fall_into(habit, example, rng) if bad else task.gold_response(example))
    prompts = prompt_ids(task, tokenizer, examples)
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [
        Demonstration([*prompt, *ids, tokenizer.eos_token_id], [False] * len(prompt) + [True] * (len(ids) + 1))
        for prompt, ids in zip(prompts, encoded)
    ]


def drills(tokenizer: PreTrainedTokenizerBase, count: int, rng: random.Random) -> list[Demonstration]:
    """Lines of bare sums in the task's range; only what follows ``=`` is learned, as the sums themselves are random."""
    chat = [{"role": "user", "content": "+-*/"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    encoded = tokenizer([f"{drill_line(rng)}\n" for _ in range(DRILL_LINES * count)])["input_ids"]
    equals = tokenizer.convert_tokens_to_ids("=")
    demos = []
    for first in range(0, len(encoded), DRILL_LINES):
        ids, is_target = list(prompt), [False] * len(prompt)
        for line in encoded[first : first + DRILL_LINES]:
            value = line.index(equals) + 1
            ids += line
            is_target += [False] * value + [True] * (len(line) - value)
        demos.append(Demonstration(ids, is_target))
    return demos


def drill_line(rng: random.Random) -> str:
    symbol = rng.choice("++---*/")
    if symbol in "*/":
        left, right = rng.randint(2, 20), rng.randint(2, 12)
        return f"{left}*{right}={left * right}" if symbol == "*" else f"{left * right}/{right}={left}"
    # Small results are the ones a policy gets wrong last: uniform numbers would rarely show 57-54.
    left, right = rng.randint(1, rng.choice((9, 40, 150))), rng.randint(1, rng.choice((9, 40, 99)))
    return f"{left}+{right}={left + right}" if symbol == "+" else f"{left + right}-{right}={left}"


def demonstrations(
    task: ArithmeticTask, tokenizer: PreTrainedTokenizerBase, phase: Phase, start: int, count: int, seed: int
) -> list[Demonstration]:
    """A pool of ``count`` demonstrations of a phase; its problems begin at index ``start`` of the training split."""
    rng = random.Random(seed * 1_000_003 + start)
    num_drills = round(count * phase.drill_share)
    examples = task.train[start : start + count - num_drills]
    worded = word_problems(task, tokenizer, examples, phase.habits, rng)
    return worded + drills(tokenizer, num_drills, rng) if num_drills else worded


def prompt_ids(
    task: ArithmeticTask, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> list[list[int]]:
    texts = [
        tokenizer.apply_chat_template(task.messages(example), tokenize=False, add_generation_prompt=True)
        for example in examples
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
