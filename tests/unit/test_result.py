"""A run directory as frames: which line is a step, which an evaluation, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sota_grpo import Result, UserError
from sota_grpo.policy.load import load_model, load_tokenizer, save_hf

LINES = [
    {"step": 0, "eval/accuracy": 0.25, "eval/num_samples": 8},
    {"step": 0, "reward": 0.1, "kl": None},
    {"step": 1, "reward": 0.3, "kl": 0.5},
    {"step": 2, "eval/accuracy": 0.75, "eval/num_samples": 8},
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder / "metrics.jsonl", LINES)
    return folder


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_steps_and_evaluations_are_two_tables_up_to_the_last_whole_line(run_dir: Path) -> None:
    result = Result(str(run_dir))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward": 0.5}) + "\n" + '{"step": 3, "rew')
    assert result.metrics["reward"].to_dict() == {0: 0.1, 1: 0.3, 2: 0.5}
    assert result.metrics["kl"].isna().to_dict() == {0: True, 1: False, 2: True}
    assert "eval/accuracy" not in result.metrics
    assert result.evaluations["eval/accuracy"].to_dict() == {0: 0.25, 2: 0.75}


def test_the_summary_says_how_far_and_how_well(run_dir: Path) -> None:
    assert not Result(run_dir).finished
    (run_dir / "run.json").write_text(json.dumps({"finished": True}))
    assert repr(Result(run_dir)).splitlines() == [
        f"Result({str(run_dir)!r})",
        "  steps      2",
        "  reward     0.1 -> 0.3 (first and last step)",
        "  held out   25.0 % -> 75.0 % right of 8 problems, greedy",
    ]
    rows = [{"step": n, "eval/accuracy": 0.0, "eval/num_samples": 8, "eval/reward": n - 3.25} for n in (0, 2)]
    write(run_dir / "metrics.jsonl", rows)
    assert "0.0 % right of 8 problems, greedy\n             -3.25 -> -1.25 mean reward" in repr(Result(run_dir))
    rows[0]["eval/num_samples"] = 2  # of a quarter, with eval.target
    write(run_dir / "metrics.jsonl", rows)
    assert repr(Result(run_dir)).endswith("0.0 % right of 8 problems, greedy\n             -1.25 mean reward")
    write(run_dir / "metrics.jsonl", [{"step": n, "reward": float(n)} for n in range(100)])
    assert "reward     4.5 -> 94.5 (first and last 10 steps)" in repr(Result(run_dir))
    write(run_dir / "metrics.jsonl", [])
    write(run_dir / "rollouts.jsonl", [{"step": 1, "response": "4", "reward_terms": {"right": 1.0}}])
    empty = Result(run_dir)
    assert (len(empty.metrics), len(empty.evaluations), empty.finished) == (0, 0, True)
    assert empty.rollouts.loc[1, "reward_terms"] == {"right": 1.0}


def test_the_model_is_the_exported_one_and_loaded_once(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("model:\n  trust_remote_code: false\n")
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    model.model.norm.weight.data.fill_(0.5)
    save_hf(model, tokenizer, run_dir / "hf")
    result = Result(run_dir)
    result.config["model"]["trust_remote_code"] = True  # a copy, the reader's own
    assert result.config == {"model": {"trust_remote_code": False}}
    assert result.model is result.model
    assert result.model.model.norm.weight.unique().tolist() == [0.5]
    chat = [{"role": "user", "content": "2 + 2?"}]
    ours, theirs = (each.apply_chat_template(chat, tokenize=False) for each in (result.tokenizer, tokenizer))
    assert ours == theirs
    (run_dir / "config.yaml").write_text("seed: 1\n")  # of a hand: no section of the model
    assert Result(run_dir).tokenizer.get_vocab() == tokenizer.get_vocab()


def test_what_is_missing_is_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no run in .*nowhere \(metrics\.jsonl is missing\); give a run"):
        Result(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no hf: it is written at the end of a run, unless train\.export_hf=false"):
        _ = Result(run_dir).model
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        _ = Result(run_dir).config
