"""The data of the reasoning task: either naming of the columns, splits that never overlap, a bad row named."""

from __future__ import annotations

from pathlib import Path

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.reasoning import ReasoningTask, split_gold
from tests.unit.test_tasks import shared_data, write

ROOT = Path(__file__).resolve().parents[2]


def test_files_of_either_naming_are_read_alike(tmp_path: Path) -> None:
    gsm8k = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(10)]
    boxed = [{"prompt": row["question"], "ground_truth": i + 1} for i, row in enumerate(gsm8k)]
    one = ReasoningTask.load(path=write(tmp_path / "a.jsonl", gsm8k), num_heldout=3, data_seed=5)
    other = ReasoningTask.load(path=write(tmp_path / "b.jsonl", boxed), num_heldout=3, data_seed=5)
    for left, right in ((one.train, other.train), (one.heldout, other.heldout)):
        assert [e.query for e in left] == [e.query for e in right]
        assert [split_gold(e.answer)[1] for e in left] == [split_gold(e.answer)[1] for e in right]
    assert (len(one.train), len(one.heldout)) == (7, 3)
    assert len(ReasoningTask.load(path=str(tmp_path / "a.jsonl"), num_heldout=3, max_samples=2).train) == 2


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "1+1?"}, r"row 2: there is no column 'answer' or 'ground_truth' or 'completion'; .* 'question'"),
        ({"answer": "2"}, r"row 2: there is no column 'question' or 'prompt'; the columns found are 'answer'"),
        ({"question": "1+1?", "answer": "so\n#### "}, r"row 2: the right answer is empty \(it ends in 'so\\n#### '\)"),
        ({"question": "1+1?", "answer": "  "}, r"row 2: the right answer is empty"),
        ({"question": " ", "answer": "2"}, r"row 2: the question is empty"),
        ({"question": "1+1?", "answer": "the </answer> tag"}, r"row 2: the right answer .* holds one of the tags"),
        ({"question": "1+1?", "answer": True}, r"row 2: column 'answer' holds bool, not text"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, r"row 2: column 'prompt' holds list.*env.dataset=table"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "fine?", "answer": "yes"}, row])
    with pytest.raises(DatasetError, match=sentence):
        ReasoningTask.load(path=path, num_heldout=1)


def test_a_single_row_needs_no_question() -> None:
    read = ReasoningTask().read_row
    assert read({"response": "x", "answer": "#### 2"}, "line 1") == Example("", "#### 2")
    assert read({"ground_truth": 2.5, "prompt": [{"role": "user"}]}, "line 1") == Example("", "2.5")
    assert read({"answer": None, "ground_truth": "2", "prompt": "?"}, "line 1") == Example("?", "2")
    with pytest.raises(DatasetError, match=r"^line 7: there is no column 'answer'.*'response'"):
        read({"response": "x"}, "line 7")


@pytest.mark.data
def test_every_real_gold_response_earns_the_full_reward() -> None:
    task = ReasoningTask.load(path=str(shared_data("gsm8k", "train.jsonl")))
    assert (len(task.train), len(task.heldout)) == (6961, 512)
    for example in [*task.train, *task.heldout]:
        score = task.score(task.gold_response(example), example)
        assert score.terms == {"answer": 1.0, "format": 1.0, "thinking": 0.0}, example
        assert not task.score(f"<answer>{split_gold(example.answer)[1]}1</answer>", example).success
