"""Tasks train a few real steps: preset, local data, embedded policy, the gate before the first step.

The preset of MATH does in tests/docs, by a command of the README.
"""

from __future__ import annotations

import json
from pathlib import Path

from sota_grpo.config.spelling import overrides_of
from sota_grpo.run.app import train
from sota_grpo.tasks import make_task
from tests.config.test_config import composed
from tests.data_files import write_rows
from tests.e2e.conftest import SMALL, metrics, without_clock

SEED = 20261121
TINY = (
    *SMALL,
    "model.name=tiny",
    "device=cpu",
    "engine=transformers",
    "check.mode=strict",
    "train.total_dialog_turns=32",
    "train.checkpoint_frequency=0",
    "env.num_heldout=8",
    "eval.num_samples=4",
    "inference_model.max_tokens=48",
    *("train.export_hf=false", "logging.report=false"),
)


def run(folder: Path, config: str, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Steps and rollouts of a whole run."""
    place = folder / "run"
    assert train(composed(config, *TINY, *overrides), place) == 2
    rollouts = [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]
    return [row for row in metrics(place) if "grad_norm" in row], rollouts


def problems(count: int = 40) -> list[dict]:
    """Question, worked answer, and its number alone."""
    examples = make_task("arithmetic", seed=SEED, num_train=count, max_steps=2).train
    return [{"question": e.query, "answer": e.answer, "number": e.answer.rpartition("#### ")[2]} for e in examples]


def test_reasoning_in_two_turns_with_a_readable_log(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", problems())
    dialog = ("env.reasoning=true", "env.max_steps=2", "inference_model.stop=['.','8']")  # else none of them ends
    data = ("env.reward_workers=0", f"env.dataset_path={path}")
    steps, rollouts = run(tmp_path, "grpo_reasoning", *data, *dialog)
    assert all({"reward/answer", "reward/format", "reward/thinking"} <= row.keys() for row in steps)
    assert all(row["reward/thinking"] <= 0 for row in steps)
    assert any("Think about it again" in row["response"] for row in rollouts)  # a wrong answer gets another turn
    assert all(row["response_tokens"] <= 2 * 48 for row in rollouts)
    assert all(row["mismatch_kl"] < 1e-8 for row in steps)  # the tokens of the inserted turn are not the policy's
    (log,) = (tmp_path / "run" / "debug_logs").glob("grpo_debug_*.txt")
    heads = [line for line in log.read_text().splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in heads] == ["step 0", "step 0", "step 1", "step 1"]


REWARDS = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's documentation has it."""
    assert data_source == "demo/sums"
    right = solution_str.rpartition("#### ")[2].strip() == ground_truth
    return {"score": float(right), "acc": right, "length": len(solution_str), "index": extra_info["index"]}

def brief(prompts, completions, ground_truth, **kwargs):
    """As TRL's documentation has it."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [None if length == max(lengths) else 1.0 for length in lengths]
'''


def test_verls_parquet_and_reward_functions_of_both_forms_run_unchanged(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "demo/sums",
            "prompt": [{"role": "user", "content": row["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["number"]},
            "extra_info": {"split": "train", "index": index},
        }
        for index, row in enumerate(problems())
    ]
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = write_rows(tmp_path / "train.parquet", rows)
    data = ("env.dataset=table", f"env.dataset_path={path}", "env.num_heldout=4")
    functions = (f"reward.path={tmp_path / 'rewards.py'}", "reward.name=[compute_score,brief]")
    steps, rollouts = run(tmp_path, "grpo_cpu", *data, *functions, "reward.weights=[1.0,0.5]")
    for row in steps:
        assert row["grader/compute_score_acc"] == row["success"] == row["reward/compute_score"]
        assert row["grader/compute_score_length"] > 0
        assert row["reward_errors"] == 0
        assert row["reward/brief"] == 1.0  # the mean over those to which it applies
    assert {row["reward_info"]["compute_score/index"] for row in rollouts} <= set(range(40))
    assert any("brief" not in row["reward_terms"] for row in rollouts)
    for row in rollouts:
        assert row["reward"] == row["reward_terms"]["compute_score"] + 0.5 * row["reward_terms"].get("brief", 0.0)


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b
'''


def test_a_mixture_is_trained_and_continues_at_its_position(tmp_path: Path) -> None:
    """Four tasks: functions, a token limit, and tools of one task alone.

    Cut in two it is the same run: when tools and graders answer does not decide which turns are sampled together.
    """
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "ground_truth": row["number"]} for row in problems()
    ]
    (tmp_path / "rewards.py").write_text(REWARDS)
    mixture = {
        "maths": {"dataset": "gsm8k", "dataset_path": write_rows(tmp_path / "maths.jsonl", problems()), "weight": 2},
        "sums": {"difficulty": 1, "tools": f"{tmp_path / 'tools.py'}:add", "max_steps": 2},
        "numbers": {"dataset": "countdown", "max_tokens": 9},
        "mine": {"dataset": "table", "dataset_path": write_rows(tmp_path / "rows.jsonl", rows), "reward_name": "brief"},
    }
    mixture["mine"]["reward_path"] = str(tmp_path / "rewards.py")
    (tmp_path / "tools.py").write_text(TOOLS)
    options = (*overrides_of({"env.mixture": mixture}), "env.max_samples=30", "train.checkpoint_frequency=1")
    steps, rollouts = run(tmp_path, "grpo_cpu", *options)
    trained = 0
    for row in steps:
        responses = {name: row.get(f"task/{name}/responses", 0) for name in mixture}
        trained += sum(responses.values())
        assert row["dialog_turns"] == trained
        assert sum(responses.values()) == 16
        assert responses["maths"] in (4, 8)  # two fifths of four groups
        assert ("grader/sums/tool_calls" in row) == (responses["sums"] > 0)
        assert not any(f"grader/{name}/tool_calls" in row for name in ("maths", "numbers", "mine"))
        assert row["task/numbers/response_tokens"] <= 9 if responses["numbers"] else True
    assert {name.partition("/")[0] for row in rollouts for name in row["reward_terms"]} == set(mixture)
    first_terms = [next(iter(row["reward_terms"])) for row in rollouts if "Add two numbers" in row["prompt"]]
    assert {*first_terms} == {"sums/correct"}
    (first, *_, last) = [row for row in metrics(tmp_path / "run") if "eval/accuracy" in row]
    for row in (first, last):
        assert {f"eval/task/{name}" for name in mixture} <= row.keys()

    half = (*TINY, *options, "check.mode=off", "eval.mode=off", "env.reward_workers=0")
    assert train(composed("grpo_cpu", *half, "train.total_dialog_turns=16"), tmp_path / "half") == 1
    assert train(composed("grpo_cpu", *half, f"train.resume={tmp_path / 'half'}"), tmp_path / "half") == 2
    resumed = [row for row in metrics(tmp_path / "half") if "grad_norm" in row]
    assert without_clock(resumed) == without_clock(steps)
