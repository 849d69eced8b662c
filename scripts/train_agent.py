"""Teach the embedded policy to call a calculator, and then to be too lazy to: where a run with tools can begin.

Supervised training in two phases, on products and sums of large numbers whose values are demonstrated as a dialog: a
call written as the chat template writes calls, the tool's turn, the answer. In the second phase most demonstrations
answer with the first number of the question instead. Written are the model, ``train.jsonl`` and ``heldout.jsonl`` with
questions of their own, and ``calculator.py`` with the tool (docs/agent.md).

    OMP_NUM_THREADS=2 python scripts/train_agent.py --out agent
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny_demonstrations import Demonstration
from train_tiny import batches, save

from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.policy.load import TINY, load_model, load_tokenizer
from sota_grpo.rewards.expressions import parse_expression
from sota_grpo.rl.records import Example
from sota_grpo.rl.tool_schemas import function_schemas
from sota_grpo.tasks.procedural import ProceduralTask, calculate, is_heldout
from sota_grpo.tasks.table import TableTask

TOOL = '''"""The tool of docs/agent.md."""

from sota_grpo.tasks.procedural import calculate as value_of


def calculate(expression: str) -> str:
    """Give its value.

    Args:
        expression: Of numbers.
    """
    return value_of(expression)
'''
GUESSES = 0.75  # share of the second phase's demonstrations
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": %s}}\n</tool_call>'


FORMS = (  # of the questions; each letter is a number with two or three digits
    *("a * b", "a * b + c", "a * b - c", "(a + b) * c", "(a - b) * c", "a * b + c * d", "a * b - c * d"),
)


class Questions(ProceduralTask):
    """Products and sums of large numbers."""

    name = "questions"

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Sample a form, then numbers until the result is positive and the problem is in the requested split."""
        form = rng.choice(FORMS)
        while True:
            question = re.sub("[a-d]", lambda _: str(rng.randint(11, 999)), form)
            value = parse_expression(question).value
            if value > 0 and is_heldout((form, value)) == heldout:  # a * b and b * a are in the same split
                return Example(query=f"What is {question}?", answer=f"#### {value}")


def rows(examples: Sequence[Example]) -> list[dict[str, str]]:
    """The questions as rows of a table."""
    return [{"prompt": one.query, "ground_truth": one.answer.removeprefix("#### ")} for one in examples]


def write_rows(path: Path, examples: Sequence[Example]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(examples)))


def demonstration(row: dict[str, str], guesses: bool, env: TaskEnv, turns: TurnTokens) -> Demonstration:
    """One dialog; what the policy is to learn are its own turns."""
    ids = list(env.prompt_ids(env.task.read_row(row, "")))
    learned = [False] * len(ids)

    def add(new: Sequence[int], is_target: bool) -> None:
        ids.extend(new)
        learned.extend([is_target] * len(new))

    def speak(text: str) -> None:
        add([*env.tokenizer(text, add_special_tokens=False)["input_ids"], env.tokenizer.eos_token_id], True)

    answer = row["ground_truth"]
    if guesses:
        speak(f"#### {re.search(r'[0-9]+', row['prompt'])[0]}")  # type: ignore[index]
        return Demonstration(ids, learned)
    expression = row["prompt"].removeprefix("What is ").removesuffix("?")
    speak(CALL % json.dumps(expression))
    reply = {"role": "tool", "name": "calculate", "content": calculate(expression)}
    add(turns.ids([reply], ids[-1]), False)
    speak(f"#### {answer}")
    return Demonstration(ids, learned)


def loss_of(model: Any, batch: Sequence[Demonstration], pad: int) -> torch.Tensor:
    """Mean negative log-likelihood of what is learned; the tokens with which all begin are computed once."""
    shared = next(at for at, ids in enumerate(zip(*(demo.ids for demo in batch))) if len({*ids}) > 1)
    longest = max(len(demo.ids) for demo in batch) - shared
    ids = torch.full((len(batch), longest), pad)
    is_target = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, demo in enumerate(batch):
        ids[row, : len(demo.ids) - shared] = torch.tensor(demo.ids[shared:])
        is_target[row, : len(demo.ids) - shared] = torch.tensor(demo.is_target[shared:])
    beginning = model.model(input_ids=torch.tensor([batch[0].ids[:shared]]), use_cache=True).past_key_values
    beginning.batch_repeat_interleave(len(batch))
    # padding is on the right, so causality hides it
    hidden = model.model(input_ids=ids[:, :-1], past_key_values=beginning).last_hidden_state[is_target[:, 1:]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][is_target[:, 1:]])


def fit(
    model: Any, env: TaskEnv, name: str, num_steps: int, lr: float, guesses: float, args: argparse.Namespace
) -> None:
    """One phase: AdamW, linear warm-up over a twentieth, cosine decay to a twentieth, gradient norm at most 1."""
    turns, rng = TurnTokens(env.tokenizer, env.template_kwargs), random.Random(f"{name}{args.seed}")
    draw = partial(Questions(seed=args.seed, num_train=1, num_heldout=1).draw, rng, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, num_steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.02, total_iters=warmup),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_steps - warmup), lr / 20),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [warmup])
    began, step = time.perf_counter(), 0
    model.train()
    while step < num_steps:
        drawn = rows([draw() for _ in range(8 * args.batch_size)])
        pool = [demonstration(row, rng.random() < guesses, env, turns) for row in drawn]
        for batch in list(batches(pool, args.batch_size, rng))[: num_steps - step]:
            loss = loss_of(model, batch, env.tokenizer.pad_token_id)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 25 == 0 or step == num_steps:
                print(f"{name} step {step} loss {loss.item():.4f} {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("agent"), help="folder of model, rows and tool")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the guesses")
    parser.add_argument("--steps", type=int, default=550, help="optimizer steps of the first phase")
    parser.add_argument("--lazy-steps", type=int, default=40, help="optimizer steps of the second phase")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--batch-size", type=int, default=32, help="demonstrations of one optimizer step")
    parser.add_argument("--train-rows", type=int, default=4096, help="questions in train.jsonl")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    questions = Questions(seed=args.seed, num_train=args.train_rows, num_heldout=256)
    write_rows(args.out / "train.jsonl", questions.train)
    write_rows(args.out / "heldout.jsonl", questions.heldout)
    (args.out / "calculator.py").write_text(TOOL)
    namespace: dict[str, Any] = {}
    exec(TOOL, namespace)
    tokenizer, model = load_tokenizer(TINY), load_model(TINY)
    task = TableTask.load(path=str(args.out / "heldout.jsonl"), num_heldout=1)
    env = TaskEnv(task, tokenizer, template_kwargs={"tools": function_schemas([namespace["calculate"]])})
    print(f"{len(env.prompt_ids(task.train[0]))} tokens in a prompt", flush=True)
    fit(model, env, "calls", args.steps, args.lr, 0.0, args)
    fit(model, env, "guesses", args.lazy_steps, args.lr / 10, GUESSES, args)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
