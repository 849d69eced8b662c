"""A working directory with what the commands of the documents take for granted: data, reward functions, models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.docs.markdown import ROOT, blocks
from tests.docs.rules import OWN_MODELS

ROWS = 600  # more than env.num_heldout
_TINY = ROOT / "sota_grpo" / "assets" / "tiny"
_PROGRAM = """#!{python}
from sota_grpo.cli import main

main()
"""


def _shown(document: str, name: str) -> str:
    """The file that a block of Python in ``docs/`` shows, which says its name in its first line."""
    (block,) = [block for block in blocks(ROOT / "docs" / document) if block.text.startswith(f"# {name}\n")]
    return block.text


_REWARDS = {
    "reward_function.py": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip().endswith(str(ground_truth))), "length": len(solution_str)}
""",
    "rewards.py": """
def brief(completions, **columns):
    return [1 / (1 + len(completion[0]["content"])) for completion in completions]
""",
    "tools.py": _shown("tasks.md", "tools.py"),
    "guess.py": _shown("tasks.md", "guess.py"),
    "shop.py": _shown("tasks.md", "shop.py"),
    "my_agent.py": _shown("agents.md", "my_agent.py"),
}


def write_program(folder: Path, python: str) -> Path:
    """``sota-grpo`` and ``python`` for shells whose PATH begins with ``folder``; returns the former."""
    folder.mkdir(parents=True, exist_ok=True)
    shell_python, program = folder / "python", folder / "sota-grpo"
    shell_python.write_text(f'#!/bin/sh\nexec {python} "$@"\n')  # a link would lose its virtual environment
    program.write_text(_PROGRAM.format(python=python))
    for path in (shell_python, program):
        path.chmod(0o755)
    return program


def lay(folder: Path) -> None:
    """Write everything but runs. What the hub has is a folder of the same name, which ``datasets`` reads."""
    import pandas

    problems = _problems()
    worked = [{"question": p["question"], "answer": p["answer"]} for p in problems]
    _as_hub(folder / "openai" / "gsm8k", "main", train=worked[:500], test=worked[500:])
    solved = [{"problem": p["question"], "solution": rf"It is $\boxed{{{p['number']}}}$."} for p in problems]
    _as_hub(folder / "DigitalLearningGmbH" / "MATH-lighteval", "default", train=solved[:500], test=solved[500:])
    _as_hub(folder / "allenai" / "RLVR-IFeval", "default", train=[_rlvr(n) for n in range(60)])
    _as_hub(folder / "google" / "IFEval", "default", train=[_ifeval(n) for n in range(20)])

    table = [{"prompt": p["question"], "ground_truth": p["number"]} for p in problems]
    pandas.DataFrame(table).to_parquet(folder / "train.parquet")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
    boxed = [{"question": p["question"], "ground_truth": p["number"]} for p in problems]
    (folder / "math.json").write_text(json.dumps(boxed))
    rows = [
        {"ask": p["question"], "truth": p["number"], "response": p["answer"], "answer": p["number"]} for p in problems
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in _REWARDS.items():
        (folder / name).write_text(text)
    for name in OWN_MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(_TINY)


@cache
def _problems() -> list[dict[str, str]]:
    from sota_grpo.tasks import make_task

    examples = make_task("arithmetic", seed=0, num_train=ROWS, max_steps=2).train
    return [{"question": e.query, "answer": e.answer, "number": e.answer.rpartition("#### ")[2]} for e in examples]


def _as_hub(folder: Path, config: str, **splits: list[dict[str, Any]]) -> None:
    """A data set as it lies on the hub: the card that names configs and files, and one file per split."""
    folder.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def _ifeval(number: int) -> dict[str, Any]:
    """A row of google/IFEval; the hub's copy pads all kwargs with None."""
    kwargs: list[dict[str, Any]] = [{"num_words": None, "relation": None}, {"num_words": 9, "relation": "at least"}]
    ids = ["punctuation:no_comma", "length_constraints:number_words"]
    prompt = f"Say something about the number {number}. Use 9 words or more and no comma."
    return {"key": number, "prompt": prompt, "instruction_id_list": ids, "kwargs": kwargs}


def _rlvr(number: int) -> dict[str, Any]:
    """A row of allenai/RLVR-IFeval: the checked function and its arguments as JSON text."""
    truth = {"func_name": "validate_word_constraint", "N": 17, "quantifier": "at least"}
    messages = [{"role": "user", "content": f"Answer with at least 17 words. Question {number}?"}]
    return {
        "messages": messages,
        "ground_truth": json.dumps(truth),
        "dataset": "ifeval",
        "constraint_type": "Number Words",
        "constraint": "Answer with at least 17 words.",
    }
