"""Invariants of the glossary and of the record: what was written is what is read, whatever was killed."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.recording.metrics import METRICS, declared, reduce_updates, term_metric
from sota_grpo.recording.run_files import METRICS_FILE
from sota_grpo.recording.run_log import ROLLOUT_FIELDS, RunLog, setup_logging

HOSTILE = "π ≈ 3,14 \n\r\t\x1b[31m\x85\u2028\u2029\x9b2J 日本 🎲 \ud800 \x00 \\u2028"


def rollout(group_id: int, sample_id: int, reward: float, text: str = "text") -> dict:
    texts, graded = [text] * 4, [9, reward > 0.5, reward, {"correct": reward}, {}]
    values = [group_id, sample_id, *texts, *graded, 0.5, False, 3]
    return dict(zip(ROLLOUT_FIELDS, values, strict=True))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Copies:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def rewind(self, first_step):
        self.calls.append(("rewind", first_step))

    def log(self, step, metrics):
        self.calls.append(("log", step, dict(metrics)))

    def log_samples(self, step, rows):
        self.calls.append(("samples", step, [row["sample_id"] for row in rows]))

    def close(self, exit_code=0):
        self.calls.append(("close", exit_code))


# --- the glossary ---------------------------------------------------------------------------------------------------


def test_a_metric_is_measured_by_the_clock_exactly_when_its_name_says_so():
    for name, metric in METRICS.items():
        assert (name.startswith("time/") or name.endswith(("_per_s", "/latency_s"))) == (
            metric.unit in ("s", "tokens/s")
        ), name


def test_an_undeclared_name_is_refused(tmp_path):
    for name in ("rewards", "reward/", "reward/a b", "reward/<term>", "time/foo_s", "eval/acuracy"):
        with RunLog(tmp_path) as log, pytest.raises(ValueError, match="not declared") as refused:
            log.write_step(0, {name: 1.0})
    assert "'eval/accuracy'" in str(refused.value)


def test_a_reward_term_cannot_overwrite_another_metric():
    assert declared(term_metric("format")) is METRICS["reward/<term>"]
    for term in ("std", "a b", ""):
        with pytest.raises(ValueError, match="rename"):
            term_metric(term)


def test_updates_are_reduced_as_declared():
    updates = [
        {"kl": 0.25, "policy_age/max": 3, "skipped_steps": 1, "lr": 0.2, "grad_norm": None, "entropy": None},
        {"kl": 0.75, "policy_age/max": 1, "skipped_steps": 2, "lr": 0.1, "grad_norm": 2.0, "entropy": None},
    ]
    reduced = {"kl": 0.5, "policy_age/max": 3, "skipped_steps": 3, "lr": 0.1, "grad_norm": 2.0, "entropy": None}
    assert reduce_updates(updates) == reduced


# --- the run log ----------------------------------------------------------------------------------------------------


def test_a_row_reads_back_as_written_and_is_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path)
    log.write_step(3, {"reward": 0.1 + 0.2, "kl": None, "version": np.int64(4), "lr": np.float32(0.5)})
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {"step": 3, "reward": 0.1 + 0.2, "kl": None, "version": 4, "lr": 0.5},
    ]
    log.close()


@pytest.mark.parametrize("value", [-math.inf, np.float32("nan")])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(value, tmp_path):
    with RunLog(tmp_path) as log:
        with pytest.raises(ValueError, match=r"grad_norm at step 2"):
            log.write_step(2, {"reward": 1.0, "grad_norm": value})
        with pytest.raises(TypeError, match="str, not a number"):
            log.write_step(0, {"reward": "1"})
        with pytest.raises(ValueError, match=r"sample 1 of group 5 at step 2"):
            log.write_rollouts(2, [rollout(5, 0, 1.0), rollout(5, 1, value)])
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "rollouts.jsonl").read_bytes() == b""


def test_hostile_text_reads_back_and_holds_one_line(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_rollouts(0, [rollout(1, 0, 1.0, HOSTILE)])
    (line,) = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["response"] == HOSTILE
    assert "日本 🎲" in line  # readable wherever it can be


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
    until_step_2 = {
        name: sum(len(line) + 1 for line in data.split(b"\n")[:-1] if json.loads(line)["step"] < 2)
        for name, data in whole.items()
    }
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in files:
        for cut in range(until_step_2[name] + random.randrange(31), len(whole[name]) + 1, 31):
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
    def fail_at_the_end(sink: Copies) -> None:
        with RunLog(tmp_path, sinks=[sink]) as log:
            log.rewind(0)
            log.write_step(0, {"reward": 1.0, "kl": None})
            log.write_rollouts(0, [rollout(1, sample, reward) for sample, reward in enumerate([0.5, 1.0, 0.0])])
            raise RuntimeError

    sink = Copies()
    with pytest.raises(RuntimeError):
        fail_at_the_end(sink)
    written = [("log", 0, {"reward": 1.0, "kl": None}), ("samples", 0, [1, 2])]
    assert sink.calls == [("rewind", 0), *written, ("close", 1)]


@pytest.mark.parametrize("make", [RunLog, setup_logging])
def test_a_directory_that_cannot_be_written_is_one_sentence(make, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*taken.*hydra\.run\.dir=PATH\.$") as caught:
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


def test_a_full_disk_is_a_sentence_and_closing_says_nothing_more(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        (tmp_path / METRICS_FILE).unlink()
        (tmp_path / METRICS_FILE).symlink_to("/dev/full")
        with pytest.raises(RunFailed, match=r"metrics.jsonl cannot be written .No space left"):
            log.write_step(0, {"reward": 0.5})
