"""Invariants of the progress line, in a terminal, a file and a notebook, and of the closing table."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from sota_grpo.recording.progress import Progress, closing_table
from sota_grpo.text import readable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SHOWN = {"reward": 0.614, "success": 0.57, "kl": 0.00204, "tokens_per_s": 4209.7, "lr": 1e-4}


def test_the_line_reads_as_promised_with_the_time_left_by_the_mean_turn():
    now = iter([0.0, 3.0, 6.2916667])
    progress = Progress(60, first_step=10, stream=io.StringIO(), clock=lambda: next(now))
    assert progress.update(11, {"kl": None}) == "step 11/60  ETA 2:27"  # 49 steps of 3 s
    line = progress.update(12, SHOWN)  # 48 steps of 3.1458 s = 151 s
    assert line == "step 12/60  reward 0.61  success 57 %  kl 0.002  4,210 tok/s  ETA 2:31"


def test_a_success_that_is_a_reward_above_a_limit_is_not_shown() -> None:
    progress = Progress(60, stream=io.StringIO(), by_reward=True, clock=lambda: 0.0)
    assert (
        progress.update(1, {"reward": 0.61, "success": 1.0, "grader/words": 3.0}) == "step 1/60  reward 0.61  ETA 0:00"
    )
    assert "success 57 %" in progress.update(2, {"reward": 0.61, "success": 0.57, "grader/f/acc": 0.57})


def test_the_time_left_forgets_a_slow_start():
    time = 0.0
    progress = Progress(100, stream=io.StringIO(), clock=lambda: time)
    time = 1000.0
    line = progress.update(1, {})
    for done in range(2, 41):
        time += 2.0
        line = progress.update(done, {})
    assert line.endswith("ETA 2:00")  # 60 steps of 2 s: the thousand seconds of the first have left the window


def test_plain_lines_are_periodic_whole_and_without_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    time = 0.0
    stream = io.StringIO()
    with Progress(10, stream=stream, every_s=2.5, clock=lambda: time) as progress:
        for done in range(1, 11):
            time += 1.0
            progress.update(done, SHOWN)
    text = stream.getvalue()
    assert readable(text) == text
    assert text.endswith("\n")
    assert [int(line.split()[1].split("/")[0]) for line in text.splitlines()] == [1, 4, 7, 10]


def test_a_terminal_shows_one_line_redrawn_and_is_given_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(3, stream=stream) as progress:
        for done in (1, 2, 3):
            line = progress.update(done, {"reward": done / 4})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.rindex("step 3/3") > text.rindex("step 1/3")
    assert line.split("  ETA")[0] in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again


def test_the_closing_table_shows_the_gain_and_the_shares(capsys):
    before = {"eval/accuracy": 0.412, "eval/stderr": 0.016, "eval/avg_at_k": 0.38, "eval/avg_at_k_stderr": 0.011}
    after = {"eval/accuracy": 0.97, "eval/stderr": 0.005, "eval/avg_at_k": 0.96, "eval/avg_at_k_stderr": 0.004}
    text = closing_table(before, after, {"generate": 30.0, "learn": 15.0}, avg_at_k=4, wall_s=60.0)
    assert capsys.readouterr().out == text
    assert readable(text) == text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["greedy", "41.2 +/- 1.6 %", "97.0 +/- 0.5 %", "+55.8 points"] in cells
    assert ["avg@4", "38.0 +/- 1.1 %", "96.0 +/- 0.4 %", "+58.0 points"] in cells
    for row in (["generate", "30.0", "50 %"], ["learn", "15.0", "25 %"], ["other", "15.0", "25 %"]):
        assert row in cells
    assert ["total", "60.0", ""] in cells


def test_the_closing_table_shows_held_out_rewards_where_accuracy_is_not_all():
    before = {"eval/accuracy": 0.0, "eval/reward": -3.2, "eval/reward_stderr": 0.25, "eval/reward/near": -3.2}
    after = {**before, "eval/reward": -1.1, "eval/reward/near": -1.1}
    text = closing_table(before, after, {}, avg_at_k=0, wall_s=1.0)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["reward", "-3.2 +/- 0.25", "-1.1 +/- 0.25", "+2.1"] in cells
    assert "near" not in text, "the only term is the reward"
    two = closing_table({}, {**after, "eval/reward/brief": 0.5}, {}, avg_at_k=0, wall_s=1.0)
    assert "brief" in two
    assert "reward" not in closing_table({}, {"eval/accuracy": 0.5, "eval/reward": 0.5}, {}, avg_at_k=0, wall_s=1.0)


def test_the_closing_table_shows_only_what_was_measured(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = closing_table({}, {}, {"learn": 2.0}, avg_at_k=0, wall_s=2.0)
    assert "accuracy" not in text
    assert "100 %" in text
    assert "other" not in text
    assert readable(text) == text
    half = closing_table({}, {"eval/accuracy": 0.5}, {}, avg_at_k=0, wall_s=1.0)
    assert "50.0 %" in half
    assert "points" not in half


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_the_progress_of_a_run_takes_that_line(monkeypatch: Any) -> None:
    """In one place of the cell, whatever is below it."""
    shown: list[str] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        shown.append(content["text/plain"])
        return SimpleNamespace(update=lambda content, raw: shown.__setitem__(-1, content["text/plain"]))

    monkeypatch.setattr("IPython.display.display", display)
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with Progress(3, stream=stream) as progress:
        for step in (1, 2, 3):
            progress.update(step, {"reward": 0.5})
    assert stream.getvalue() == ""
    assert [line[:21] for line in shown] == ["step 3/3  reward 0.50"]


def test_a_mistake_in_a_cell_is_its_sentence_and_no_page_of_frames(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell().run_cell('import sota_grpo\nsota_grpo.train("grpo_cpu", overrides=["env.repeat=4"])')
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines == ["UserError: There is no option env.repeat; did you mean env.repeats?"]
