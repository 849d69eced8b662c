"""Invariants of the glossary and of the record: what was written is what is read, whatever was killed."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.recording import run_log
from sota_grpo.recording.metrics import METRICS, declared, reduce_updates, term_metric
from sota_grpo.recording.run_files import METRICS_FILE
from sota_grpo.recording.run_log import ROLLOUT_FIELDS, RunLog, described, pick, setup_logging
from sota_grpo.recording.sinks import CopySink
from sota_grpo.text import ConsoleHandler


def rollout(group_id: int, sample_id: int, reward: float, text: str = "text") -> dict[str, Any]:
    texts, graded = [text] * 4, [9, reward > 0.5, reward, {"correct": reward}, {}]
    values = [group_id, sample_id, *texts, *graded, 0.5, False, 3]
    return dict(zip(ROLLOUT_FIELDS, values, strict=True))


def row(**changes: Any) -> dict[str, Any]:
    texts = {
        "query": "9 x 2?",
        "answer": "9*2=18\n#### 18",
        "response": "<think>Twice.</think>\n<answer>18</answer>",
    }
    terms = {"reward_terms": {"answer": 1.0, "format": 1.0, "thinking": -0.25}, "reward_info": {"think_words": 1}}
    return rollout(4, 1, 1.15) | texts | terms | {"advantage": 0.75, "policy_version": 11} | changes


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_metric_is_measured_by_the_clock_exactly_when_its_name_says_so():
    for name, metric in METRICS.items():
        says_so = name.startswith("time/") or name.endswith(("_per_s", "/latency_s"))
        assert says_so == (metric.unit in ("s", "tokens/s")), name


def test_an_undeclared_name_is_refused(tmp_path):
    for name in ("rewards", "reward/", "reward/a b", "time/foo_s", "eval/acuracy"):
        with RunLog(tmp_path) as log, pytest.raises(ValueError, match="not declared") as refused:
            log.write_step(0, {name: 1.0})
    assert "'eval/accuracy'" in str(refused.value)
    for family in (name for name in METRICS if "<" in name):
        with pytest.raises(ValueError, match="is a family, which has no values"):
            declared(family)


def test_a_reward_term_cannot_overwrite_another_metric():
    assert declared(term_metric("format")) is METRICS["reward/<term>"]
    with pytest.raises(ValueError, match="another metric has that name; rename it"):
        term_metric("std")
    for term in ("a b", "", "2nd", ".a", "a/2nd", "<term>", "é"):
        with pytest.raises(ValueError, match="and begins with a letter or _; rename it"):
            term_metric(term)


def test_updates_are_reduced_as_declared():
    updates = [
        {"kl": 0.25, "policy_age/max": 3, "skipped_steps": 1, "lr": 0.2, "grad_norm": None, "entropy": None},
        {"kl": 0.75, "policy_age/max": 1, "skipped_steps": 2, "lr": 0.1, "grad_norm": 2.0, "entropy": None},
    ]
    reduced = {"kl": 0.5, "policy_age/max": 3, "skipped_steps": 3, "lr": 0.1, "grad_norm": 2.0, "entropy": None}
    assert reduce_updates(updates) == reduced


@pytest.mark.parametrize("value", [-math.inf, np.float32("nan")])
def test_a_row_is_on_disk_at_once_as_written_and_one_that_is_not_finite_is_refused(value, tmp_path):
    with RunLog(tmp_path) as log:
        log.write_step(3, {"reward": 0.1 + 0.2, "kl": None, "version": np.int64(4), "lr": np.float32(0.5)})
        written = {"step": 3, "reward": 0.1 + 0.2, "kl": None, "version": 4, "lr": 0.5}
        assert rows_of(tmp_path / "metrics.jsonl") == [written]
        with pytest.raises(ValueError, match=r"grad_norm at step 4"):
            log.write_step(4, {"reward": 1.0, "grad_norm": value})
    assert rows_of(tmp_path / "metrics.jsonl") == [written]


def write_run(log: RunLog, steps: range) -> None:
    for step in steps:
        if step % 2 == 0:
            log.write_step(step, {"eval/accuracy": step / 10})
        log.write_step(step, {"reward": step / 7})
        log.write_rollouts(step, [rollout(step, 0, 1.0, "é🎲"), rollout(step, 1, 0.0, "é🎲")])


def test_a_kill_at_any_byte_then_a_resume_gives_the_uninterrupted_files(tmp_path):
    with RunLog(tmp_path / "whole") as log:
        write_run(log, range(4))
    files = ("metrics.jsonl", "rollouts.jsonl")
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in files}
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in files:
        kept = sum(len(line) for line in whole[name].splitlines(keepends=True) if json.loads(line)["step"] < 2)
        for cut in range(kept + random.randrange(31), len(whole[name]) + 1, 31):
            for other in files:
                (killed / other).write_bytes(whole[other][: cut if other == name else None])
            with RunLog(killed) as log:
                log.rewind(2)
                write_run(log, range(2, 4))
            assert {name: (killed / name).read_bytes() for name in files} == whole, (name, cut)


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"[1]\n", b'{"reward": 1.0}\n', b'{"step": null}\n'])
def test_damage_that_no_kill_does_is_named_and_left_alone(damage, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'{"step": 1}\n')
    before = path.read_bytes()
    with RunLog(tmp_path) as log, pytest.raises(UserError, match="Line 2 of"):
        log.rewind(1)
    assert path.read_bytes() == before


def test_sinks_get_what_was_written_and_how_the_run_ended(tmp_path):
    sink = Mock(spec=CopySink)
    log = RunLog(tmp_path, sinks=[sink])
    log.rewind(0)
    log.write_step(0, {"reward": 1.0, "kl": None})
    log.write_rollouts(0, [rollout(1, sample, reward) for sample, reward in enumerate([0.5, 1.0, 0.0])])
    log.__exit__(RuntimeError)
    assert [name for name, *_ in sink.mock_calls] == ["rewind", "log", "log_samples", "close"]
    sink.log.assert_called_once_with(0, {"reward": 1.0, "kl": None})
    assert [row["sample_id"] for row in sink.log_samples.call_args.args[1]] == [1, 2]
    sink.close.assert_called_once_with(1)


@pytest.mark.parametrize("make", [RunLog, setup_logging])
def test_a_directory_that_cannot_be_written_is_one_sentence(make, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"taken.* cannot be written .*hydra\.run\.dir=PATH\.$") as caught:
        make(tmp_path / "taken" / "run")
    assert "\n" not in str(caught.value)
    for name in ("metrics.jsonl", "training.log"):
        (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(UserError, match="Is a directory"):
        make(tmp_path / "run")


def test_a_second_run_of_a_process_replaces_the_log_of_the_first_alone(tmp_path, monkeypatch, capsys):
    from sota_grpo.run.entry import quiet_console

    logger, foreign = logging.getLogger("sota_grpo"), logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [foreign])
    before = logger.level, logging.root.level
    try:
        quiet_console()
        setup_logging(tmp_path / "first")
        last = setup_logging(tmp_path)
        for digit, weight in enumerate((logging.DEBUG, logging.INFO, logging.WARNING)):
            logging.getLogger("sota_grpo.loop").log(weight, "once π %d", digit)
        assert logger.handlers == [foreign, last]
        last.close()
    finally:
        logger.setLevel(before[0])
        logging.root.setLevel(before[1])
    assert re.findall(r" (\d)$", capsys.readouterr().err, re.M) == ["1", "2"]
    assert (tmp_path / "first" / "training.log").read_text() == ""
    assert re.findall(r" (\d)$", (tmp_path / "training.log").read_text(encoding="utf-8"), re.M) == ["1", "2"]


def test_a_log_on_a_full_disk_is_one_warning_and_no_traceback(tmp_path, monkeypatch, capsys) -> None:
    logger = logging.getLogger("sota_grpo")
    monkeypatch.setattr(logging.root, "handlers", [ConsoleHandler()])
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.INFO)
    (tmp_path / "training.log").symlink_to("/dev/full")
    setup_logging(tmp_path)
    for text in ("one", "two"):
        logger.info(text)
    warning = f"{tmp_path / 'training.log'} cannot be written (No space left on device); records are missing there."
    assert capsys.readouterr().err.splitlines() == [warning, "one", "two"]
    setup_logging(tmp_path / "next").close()  # what is left of the first cannot be written either


def test_a_full_disk_is_a_sentence_and_closing_says_nothing_more(tmp_path, monkeypatch) -> None:
    full = r"metrics.jsonl cannot be written .No space left on device"
    with RunLog(tmp_path) as log:
        for step in (0, 1):
            log.write_step(step, {"reward": 0.5})
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / METRICS_FILE))
        monkeypatch.setattr(run_log, "atomic_file", Mock(side_effect=error))
        with pytest.raises(RunFailed, match=rf"{full}.*train\.resume=auto"):
            log.rewind(1)
        assert [row["step"] for row in rows_of(tmp_path / METRICS_FILE)] == [0, 1]
        (tmp_path / METRICS_FILE).unlink()
        (tmp_path / METRICS_FILE).symlink_to("/dev/full")
        with pytest.raises(RunFailed, match=full):
            log.write_step(2, {"reward": 0.5})


WEIGHTS = {"answer": 1.0, "format": 0.2, "thinking": 0.2}


def test_every_requirement_is_in_the_text() -> None:
    failed = row(success=False, truncated=True, reward_info={"error": "TimeoutError: 5 s"})
    penalised = row(reward_terms={"answer": 1.0, "kl": -0.5}, reward=0.5)
    first, second, third = (described(12, one, "best of 8", WEIGHTS) for one in (row(), failed, penalised))
    for text, lines in (
        (first, "step 12, group 4, sample 1: best of 8"),
        (first, "question\n  | 9 x 2?"),
        (first, "gold answer\n  | 9*2=18\n  | #### 18"),
        (first, "completion, 9 tokens\n  | <think>Twice.</think>\n  | <answer>18</answer>"),
        (first, "answer                  1.0000 x   1.0000 =   1.0000"),
        (first, "format                  1.0000 x   0.2000 =   0.2000"),
        (first, "thinking               -0.2500 x   0.2000 =  -0.0500"),
        (first, "total                                         1.1500"),
        (first, "advantage 0.7500\nsuccess yes\npolicy version 11\ngrader: think_words = 1"),
        (second, "completion, 9 tokens, cut for length\n"),
        (second, "success no"),
        (second, "grader: error = TimeoutError: 5 s"),
        (third, "kl                     -0.5000 x   1.0000 =  -0.5000"),
    ):
        assert lines in text, lines
    assert "error" not in first


def test_text_of_a_model_cannot_pass_for_the_log_or_drive_a_terminal() -> None:
    rng = random.Random(random.getrandbits(32))
    bits = [*map(chr, range(0x20)), *"\x7f\x9b\x85\u2028\u202e\ud800\U000e0041", "\r\n", "=" * 100]
    bits += ["\ntotal     9.0000", "step 1, group 1", "\x1b]0;title\x07", "é", "漢字", "😀", "\t", "\n"]
    for _ in range(60):
        hostile = "".join(rng.choices(bits, k=rng.randrange(40)))
        place = rng.choice(["query", "answer", "response", "info", "name"])
        changes = {"info": {"reward_info": {"found": hostile}}, "name": {"reward_info": {hostile: 1}}}
        text = described(1, row(**changes.get(place, {place: hostile})), "best of 1", WEIGHTS)
        assert all(sign.isprintable() or sign in "\n\t" for sign in text)
        text.encode("utf-8")
        free = [line for line in text.split("\n") if not line.startswith("  | ")]
        begun = [sum(line.startswith(begin) for line in free) for begin in ("step ", "total ")]
        assert (begun, free.count("=" * 100)) == ([1, 1], 2)


def test_the_best_the_worst_then_others_each_once() -> None:
    rng = random.Random(random.getrandbits(32))
    for _ in range(50):
        rows = [row(sample_id=i, reward=rng.choice([0.0, 0.5, 1.0])) for i in range(rng.randrange(1, 12))]
        count, step = rng.randrange(1, 14), rng.randrange(1000)
        picked = pick(rows, count, step)
        actual = [one for _, one in picked]
        assert len(actual) == len({one["sample_id"] for one in actual}) == min(count, len(rows))
        assert actual[0]["reward"] == max(one["reward"] for one in rows)
        if len(actual) > 1:
            assert actual[1]["reward"] == min(one["reward"] for one in rows if one is not actual[0])
        assert [why.split()[0] for why, _ in picked] == (["best", "worst"] + ["random"] * 12)[: len(actual)]
        assert pick(rows, count, step) == picked  # a step that is done again shows the same
    equal = [row(sample_id=i, reward=1.0) for i in range(4)]
    assert {pick(equal, 1, step)[0][1]["sample_id"] for step in range(100)} == {0, 1, 2, 3}


def test_a_step_is_on_disk_when_write_returns_and_a_restart_writes_a_file_of_its_own(tmp_path, monkeypatch) -> None:
    noon, clock = datetime(2031, 2, 3, 12, 0, 5, tzinfo=UTC), Mock()
    clock.now.return_value = noon
    monkeypatch.setattr(run_log, "datetime", clock)
    RunLog(tmp_path).write_rollouts(0, [row()])
    folder = tmp_path / "debug_logs"
    folder.touch()
    with pytest.raises(RunFailed, match=r"debug_logs cannot be written \(File exists\).*logging.num_examine=0"):
        RunLog(tmp_path, num_examine=1).write_rollouts(0, [row()])
    folder.unlink()
    log = RunLog(tmp_path, num_examine=2, term_weights=WEIGHTS)
    log.write_rollouts(0, [row(), row(sample_id=2), row(sample_id=3)])
    first, second = (folder / f"grpo_debug_20310203_1{hour}0005.txt" for hour in (2, 3))
    assert re.findall(r"^step (\d+)", first.read_text(), re.MULTILINE) == ["0", "0"]
    clock.now.return_value = noon.replace(hour=13)
    log.write_rollouts(1, [row()])
    assert re.findall(r"^step (\d+)", first.read_text(), re.MULTILINE) == ["0", "0", "1"]
    for step in (1, 2):  # two starts within a second; the first was killed
        RunLog(tmp_path, num_examine=1).write_rollouts(step, [row()])
    assert re.findall(r"^step (\d+)", second.read_text(), re.MULTILINE) == ["1", "2"]
