"""The judge in a config: its task, consent, what a continuation may change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, anchor_paths, compose, load_config, needs_consent
from sota_grpo.assembly.sampling import CACHE_FILE, judged_task, make_grader, task_of
from sota_grpo.config import Config
from sota_grpo.config.spelling import overrides_of
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import own_grader
from sota_grpo.rewards.judge.client import JudgedGrader
from sota_grpo.rl.records import total_reward
from sota_grpo.training.runs import signature
from tests.unit.fake_judge import FakeJudge, score_of

CHAT = ("reward.judge.kind=chat", "env.max_samples=4", "env.num_heldout=4", "env.reward_workers=0")


def config_of(*overrides: str) -> Config:
    config = compose("grpo_cpu", list(overrides))
    validate(config)
    return config


def judged(config: Config, run_dir: Path | None = None):
    return judged_task(config, task_of(config), lambda task: make_grader(config, task), run_dir)


def test_a_run_without_a_judge_is_as_it_was() -> None:
    config = config_of(*CHAT[1:])
    task = task_of(config)
    same, grader = judged_task(config, task, lambda task: make_grader(config, task), None)
    assert same is task
    assert own_grader(grader) is grader


def test_a_judge_stands_beside_the_task_or_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOTA_GRPO_JUDGE_KEY", "sk-1")
    (tmp_path / "rubric.md").write_text("Is it kind?\n")
    with FakeJudge("sk-1") as fake:
        options = (*CHAT, f"reward.judge.url={fake.url}", f"reward.judge.rubric={tmp_path / 'rubric.md'}")
        task, grader = judged(config_of(*options, "reward.judge.weight=0.5"), tmp_path)
        example, text = task.train[0], task.train[0].answer
        assert isinstance(grader, JudgedGrader)
        assert (task.term_weights, task.gold_response(example)) == ({"correct": 1.0, "judge": 0.5}, None)
        (score,) = grader.scores([(text, example)]).result(60)
        assert score.success
        assert total_reward(score.terms, task.term_weights) == 1 + 0.5 * score_of(text) / 10
        assert "Is it kind?" in fake.bodies[0][1]["messages"][-1]["content"]
        grader.close()
        assert (tmp_path / CACHE_FILE).read_text().count("\n") == 1
        for above in (score_of(text) / 10 - 0.01, score_of(text) / 10):
            config = config_of(*options, "reward.judge.alone=true", f"reward.success_above={above}")
            task, grader = judged(config, tmp_path)
            (score,) = grader.scores([(text, example)]).result(60)
            assert (score.terms, task.term_weights) == ({"judge": score_of(text) / 10}, {"judge": 1.0})
            assert score.success == (above < score_of(text) / 10)
            grader.close()
        assert sum(fake.asked.values()) == 1
    with pytest.raises(UserError, match="No judge answers at"):
        judged(config_of(*options))


def test_a_rubric_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" ")
    for name in ("missing.md", "empty.txt"):
        with pytest.raises(UserError, match=f"reward.judge.rubric={tmp_path / name} "):
            judged(config_of(*CHAT, "reward.judge.url=http://127.0.0.1:9", f"reward.judge.rubric={tmp_path / name}"))


ASKS = {
    "reward.judge.url": ("http://h:1", "send prompts and responses to http://h:1"),
    "reward.judge.rubric": ("/home/me/notes.txt", "send what is in /home/me/notes.txt to its judge"),
}


@pytest.mark.parametrize("option", ASKS)
def test_a_judge_of_somebody_elses_run_needs_consent(option: str, tmp_path: Path) -> None:
    value, deed = ASKS[option]
    (tmp_path / "config.yaml").write_text(f"reward: {{judge: {{kind: chat, {option.rpartition('.')[2]}: '{value}'}}}}")
    with pytest.raises(UserError, match=f"asks to {deed} .{option}."):
        load_config(tmp_path)
    assert needs_consent(load_config(tmp_path, overrides_of({option: value}))) == {option: deed}
    load_config(tmp_path, unused=UNUSED_WITHOUT_SAMPLES)


def test_a_rubric_of_text_needs_none_and_one_in_an_entry_does(tmp_path: Path) -> None:
    config = Config()
    config.reward.judge.rubric = "Is it kind? See\nnotes.txt"
    assert needs_consent(config) == {}
    config.env.mixture = {"a": {"judge_rubric": "/etc/passwd.txt"}}
    assert needs_consent(config) == {
        "env.mixture.a.judge_rubric": "send what is in /etc/passwd.txt to its judge",
    }


def test_files_of_a_judge_are_written_in_full_and_count_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rubric.md").write_text("a")
    mixture = "env.mixture={a: {judge_rubric: rubric.md}}"
    config = config_of(*CHAT, "reward.judge.url=http://h:1", "reward.judge.rubric=rubric.md", mixture)
    anchor_paths(config)
    assert config.reward.judge.rubric == config.env.mixture["a"]["judge_rubric"] == str(tmp_path / "rubric.md")
    first = signature(asdict(config))
    config.reward.judge.url = "http://other:2"
    assert signature(asdict(config)) == first
    (tmp_path / "rubric.md").write_text("b")
    assert signature(asdict(config)) != first
    config.reward.judge.rubric = "x" * 5000  # no name of a file
    anchor_paths(config)
    signature(asdict(config))
