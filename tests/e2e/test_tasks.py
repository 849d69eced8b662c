"""Every task trains a few real steps: its preset, local data, the embedded policy, the gate before the first step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sota_grpo.run.app import train
from sota_grpo.tasks import make_task
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, metrics
from tests.e2e.test_cli import has_vllm

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
)
TABLE = (
    "env.dataset=table",
    "env.dataset_path={}",
    "env.num_heldout=4",
)


def run(folder: Path, config: str, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Steps and rollouts of a whole run."""
    place = folder / "run"
    assert train(composed(config, *TINY, *overrides), place) == 2
    rollouts = [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]
    return [row for row in metrics(place) if "grad_norm" in row], rollouts


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(count: int = 40) -> list[dict]:
    """Question, worked answer, and its number alone."""
    examples = make_task("arithmetic", seed=SEED, num_train=count, max_steps=2).train
    return [{"question": e.query, "answer": e.answer, "number": e.answer.rpartition("#### ")[2]} for e in examples]


def test_math(tmp_path: Path) -> None:
    rows = [{"question": row["question"], "ground_truth": row["number"]} for row in problems()]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    steps, rollouts = run(tmp_path, "grpo_math", f"env.dataset_path={tmp_path / 'rows.json'}", "env.max_samples=10")
    assert {row["reward"] for row in rollouts} <= {1.0, -1.0, -0.5}
    assert all(row["kl"] is not None for row in steps)  # the preset has a reference: the model under its adapter
    questions = {row["question"] for row in rows}
    assert len({row["query"] for row in rollouts} & questions) <= 10


def test_reasoning_with_a_readable_log(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", problems())
    steps, _ = run(tmp_path, "grpo_reasoning", f"env.dataset_path={path}", "train_model.lora.enabled=true")
    assert all({"reward/answer", "reward/format", "reward/thinking"} <= row.keys() for row in steps)
    assert all(row["reward/thinking"] <= 0 for row in steps)
    (log,) = (tmp_path / "run" / "debug_logs").glob("grpo_debug_*.txt")
    heads = [line for line in log.read_text().splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in heads] == ["step 0", "step 0", "step 1", "step 1"]


def test_ifeval(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    rows = [
        {
            "prompt": f"Say something about the number {i}. Use {n} words or more and no comma.",
            "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
            "kwargs": [{"relation": "at least", "num_words": n}, {}],
        }
        for i, n in enumerate(rng.randint(1, 20) for _ in range(40))
    ]
    steps, rollouts = run(tmp_path, "grpo_ifeval", f"env.dataset_path={write(tmp_path / 'rows.jsonl', rows)}")
    assert all("follow_instruction_list_strict" in row["reward_info"] for row in rollouts)
    assert all(0 <= row["success"] <= 1 for row in steps)


VERL_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's documentation has it."""
    assert data_source == "demo/sums"
    right = solution_str.rpartition("#### ")[2].strip() == ground_truth
    return {"score": float(right), "acc": right, "length": len(solution_str), "index": extra_info["index"]}
'''
TRL_REWARDS = """
def exact(prompts, completions, ground_truth, **kwargs):
    return [float(text.rpartition("#### ")[2].strip() == truth) for text, truth in zip(completions, ground_truth)]

def brief(completions, **kwargs):
    longest = max(map(len, completions))
    return [None if len(text) == longest else 1.0 for text in completions]
"""


def test_verls_parquet_and_reward_file_run_unchanged(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

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
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "reward_function.py").write_text(VERL_REWARD)
    steps, rollouts = run(
        tmp_path,
        "grpo_cpu",
        *(option.format(tmp_path / "train.parquet") for option in TABLE),
        f"reward.path={tmp_path / 'reward_function.py'}",
        "reward.name=compute_score",
    )
    assert all(row["grader/acc"] == row["success"] == row["reward/compute_score"] for row in steps)
    assert all(row["grader/length"] > 0 and row["reward_errors"] == 0 for row in steps)
    assert {row["reward_info"]["index"] for row in rollouts} <= set(range(40))


def test_reward_functions_of_trls_form_see_a_group(tmp_path: Path) -> None:
    rows = [{"prompt": row["question"], "ground_truth": row["number"]} for row in problems()]
    (tmp_path / "rewards.py").write_text(TRL_REWARDS)
    steps, rollouts = run(
        tmp_path,
        "grpo_cpu",
        *(option.format(write(tmp_path / "rows.jsonl", rows)) for option in TABLE),
        f"reward.path={tmp_path / 'rewards.py'}",
        "reward.name=[exact,brief]",
        "reward.weights=[1.0,0.5]",
    )
    assert all(row["reward/brief"] == 1.0 for row in steps)  # the mean over those to which it applies
    assert any("brief" not in row["reward_terms"] for row in rollouts)
    for row in rollouts:
        assert row["reward"] == row["reward_terms"]["exact"] + 0.5 * row["reward_terms"].get("brief", 0.0)


def test_a_wrong_answer_is_asked_again_and_the_question_is_not_trained_on(tmp_path: Path) -> None:
    dialog = ("env.reasoning=true", "env.max_steps=2", "inference_model.max_tokens=32")
    steps, rollouts = run(tmp_path, "grpo_cpu", *dialog)
    asked = [row for row in rollouts if "Think about it again" in row["response"]]
    assert asked
    assert all(row["response_tokens"] <= 2 * 32 for row in rollouts)
    assert all(row["mismatch_kl"] < 1e-8 for row in steps)  # the tokens of the inserted turn are not the policy's


@pytest.mark.vllm
@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
def test_reasoning_in_two_turns_through_the_real_vllm(tmp_path: Path, grpo) -> None:
    path = write(tmp_path / "rows.jsonl", problems())
    options = [*TINY, "engine=vllm", f"env.dataset_path={path}", "env.reasoning=true", "env.max_steps=2"]
    done = grpo(tmp_path / "run", *options, config="grpo_reasoning", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [row for row in metrics(tmp_path / "run") if "grad_norm" in row]
    assert [row["step"] for row in steps] == [0, 1]
    assert all(row["mismatch_kl"] < 1e-8 for row in steps)
    assert all(row["response_tokens/max"] > 48 for row in steps)  # more than one turn has room for
