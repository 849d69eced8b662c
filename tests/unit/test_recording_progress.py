"""Invariants of the progress line, in a terminal, a file and a notebook, of colours, and of the closing lines."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sota_grpo.recording.progress import Heartbeat, Progress, closing_lines
from sota_grpo.text import GREEN, ConsoleHandler, readable, say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SHOWN = {"reward": 0.614, "success": 0.57, "kl": 0.00204, "tokens_per_s": 4209.7, "lr": 1e-4}


def test_the_line_reads_as_promised_with_the_time_left_by_the_mean_step():
    now = iter([1000.0, 1003.0, 1006.2916667, 1300.0])
    progress = Progress(60, stream=io.StringIO(), clock=lambda: next(now))
    assert progress.update(11, {"kl": None}) == "step 11/60"  # the slow first step says nothing about the others
    assert progress.update(12, {}) == "step 12/60  ETA 2:24"  # 48 steps of 3 s
    line = progress.update(13, SHOWN)  # 47 steps of 3.1458 s = 148 s
    assert line == "step 13/60  reward 0.61  success 57 %  kl 0.002  4,210 tok/s  ETA 2:28"
    assert progress.update(60, {}) == "step 60/60"
    assert Progress(9, stream=io.StringIO(), unit="graded").update(1, {}) == "graded 1/9"
    # a success that is a reward above a limit is not shown
    progress = Progress(60, stream=io.StringIO(), by_reward=True, clock=lambda: 0.0)
    assert progress.update(1, {"reward": 0.61, "success": 1.0, "grader/words": 3.0}) == "step 1/60  reward 0.61"
    assert "success 57 %" in progress.update(2, {"reward": 0.61, "success": 0.57, "grader/f/acc": 0.57})


def test_the_time_left_forgets_slow_steps():
    times = iter([0.0, *(1000.0 + 2 * step for step in range(39))])
    progress = Progress(100, stream=io.StringIO(), clock=lambda: next(times))
    *_, line = (progress.update(done, {}) for done in range(1, 41))
    assert line.endswith("ETA 2:00")  # 60 steps of 2 s: the thousand seconds have left the window


def test_plain_lines_are_periodic_whole_and_without_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream, times = io.StringIO(), itertools.count()
    with Progress(10, stream=stream, every_s=2.5, clock=lambda: next(times)) as progress:
        for done in range(1, 11):
            progress.update(done, SHOWN)
    text = stream.getvalue()
    assert readable(text) == text
    assert text.endswith("\n")
    assert [int(line.split()[1].split("/")[0]) for line in text.splitlines()] == [1, 4, 7, 10]


def made_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make a terminal of 100 columns standard output and standard error; pytest sets both between fixture and test."""
    terminal = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows, without colours; the cursor moves within its line only."""
    lines, column = [""], 0
    for sign in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|.|\n", written):
        if sign in "\r\n":
            lines += [""] if sign == "\n" else []
            column = 0
        elif sign == "\x1b[2K":
            lines[-1] = ""
        elif sign[0] != "\x1b":
            lines[-1] = lines[-1][:column].ljust(column) + sign + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_a_bar_and_one_line_redrawn_below_the_log_and_is_given_back(monkeypatch: Any) -> None:
    terminal = made_terminal(monkeypatch)
    console = ConsoleHandler()  # made before the live line, as by the commands
    with Progress(4) as progress:
        for done in (1, 2):
            line = progress.update(done, {"reward": done / 4})
        console.handle(logging.makeLogRecord({"msg": "a sentence", "levelno": logging.WARNING}))
        *above, last = screen(terminal.getvalue())
        assert above == ["a sentence"]
        assert last == f"{'━' * 15}╺{'━' * 14} {line}"
    text = terminal.getvalue()
    assert "\x1b[33ma sentence" in text, "yellow"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again
    say("the end")
    assert screen(terminal.getvalue())[1:] == [last, "the end", ""]


def test_a_terminal_that_is_lost_while_the_line_is_live_ends_nothing(monkeypatch: Any) -> None:
    """The warning of the loss is printed to stderr, which the live line then is: once, and not within itself."""
    leader, follower = os.openpty()
    terminal = os.fdopen(follower, "w")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    records: list[str] = []
    package, console = logging.getLogger("sota_grpo"), ConsoleHandler()
    console.addFilter(lambda record: records.append(record.getMessage()) is None)
    package.addHandler(console)
    try:
        with Progress(9) as progress:
            progress.update(1, SHOWN)
            os.close(leader)
            package.warning("a sentence")
            progress.update(2, SHOWN)
    finally:
        package.removeHandler(console)
    assert [record.partition(" (")[0].rpartition(" ")[2] for record in records] == ["sentence", "written"]
    terminal.close()


def test_what_is_printed_above_the_line_is_text(monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with Progress(9) as progress:
        progress.update(1, SHOWN)
        print("[/x] :smile:", end="", flush=True)  # no markup of the library that draws the line
        progress.update(2, SHOWN)
    assert "[/x] :smile:" in terminal.getvalue()


def test_a_process_without_stderr_logs_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    ConsoleHandler().emit(logging.makeLogRecord({"msg": "so far", "redrawn": True, "levelno": logging.INFO}))


def test_a_line_too_long_for_a_terminal_is_cut_and_its_bar_shrinks(monkeypatch: Any) -> None:
    terminal = made_terminal(monkeypatch)
    for columns, shown in (("64", "━━━╸━ step 3/4  reward 0.61"), ("40", "step 3/4  reward 0.61")):
        monkeypatch.setenv("COLUMNS", columns)
        with Progress(4) as progress:
            progress.update(3, SHOWN)
            line = screen(terminal.getvalue())[-1]
        assert len(line) == int(columns)
        assert line.startswith(shown)
    assert line.endswith("kl…")


def test_colours_are_for_terminals_that_want_them(monkeypatch: Any) -> None:
    terminal = made_terminal(monkeypatch)
    plain = io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    say("ok", plain, colour=GREEN)
    assert plain.getvalue() == "ok\n"
    say("ok", colour=GREEN)
    assert "\x1b[32mok\x1b[m\n" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.truncate(0)
    say("ok", colour=GREEN)
    ConsoleHandler().handle(logging.makeLogRecord({"msg": "no", "levelno": logging.ERROR}))
    with Progress(2) as progress:
        progress.update(1, SHOWN)
    assert not re.search(r"\x1b\[[0-9;]*[1-9]m", terminal.getvalue()), "no colour"


def test_a_stage_on_a_terminal_is_one_line(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    terminal = made_terminal(monkeypatch)
    now = 0.0
    heartbeat, console = Heartbeat(every_s=(1.0,), clock=lambda: now), ConsoleHandler()
    heartbeat.emit(logging.makeLogRecord({"stage": "Loading the policy"}))
    with caplog.at_level(logging.INFO, logger="sota_grpo"):
        for second in (1.0, 20.0):
            now = second
            heartbeat.beat()
    for record in caplog.records:
        console.handle(record)
    assert screen(terminal.getvalue()) == ["Loading the policy: 20 s so far"]
    say("ready")
    assert screen(terminal.getvalue()) == ["ready", ""]
    plain = io.StringIO()
    ConsoleHandler(plain).handle(caplog.records[0])
    assert plain.getvalue() == "Loading the policy: 1 s so far\n"


def test_the_closing_lines_show_what_was_measured():
    before = {"eval/accuracy": 0.412, "eval/stderr": 0.016, "eval/avg_at_k": 0.38, "eval/avg_at_k_stderr": 0.011}
    after = {"eval/accuracy": 0.97, "eval/stderr": 0.005, "eval/avg_at_k": 0.96, "eval/avg_at_k_stderr": 0.004}
    before, after = before | {"eval/task/a": 0.25}, after | {"eval/task/a": 0.5, "eval/task_stderr/a": 0.1}
    assert closing_lines(before, after, {"learn": 15.0, "ref": 0.5, "generate": 30.0}, avg_at_k=4, wall_s=60.0) == [
        "Held out: greedy 41.2 +/- 1.6 % -> 97.0 +/- 0.5 % (+55.8 points), a 25.0 % -> 50.0 +/- 10.0 % (+25.0 points), "
        "avg@4 38.0 +/- 1.1 % -> 96.0 +/- 0.4 % (+58.0 points)",
        "Time: 1:00, of which generate 50 %, learn 25 %, other 25 %",
    ]
    # held-out rewards where accuracy is not all
    before = {"eval/accuracy": 0.0, "eval/reward": -3.2, "eval/reward_stderr": 0.25, "eval/reward/near": -3.2}
    after = {**before, "eval/reward": -1.1, "eval/reward/near": -1.1}
    line, _ = closing_lines(before, after, {}, avg_at_k=0, wall_s=1.0)
    assert line == "Held out: greedy 0.0 % -> 0.0 % (+0.0 points), reward -3.2 +/- 0.25 -> -1.1 +/- 0.25 (+2.1)"

    assert closing_lines({}, {}, {"learn": 2.0}, avg_at_k=0, wall_s=2.0) == ["Time: 0:02, of which learn 100 %"]
    half = closing_lines({}, {"eval/accuracy": 0.5, "eval/reward": 0.5}, {}, avg_at_k=0, wall_s=1.0)
    assert half == ["Held out: greedy 50.0 %", "Time: 0:01, of which other 100 %"]


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
