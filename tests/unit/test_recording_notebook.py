"""The progress line of a notebook: drawn in place, not too often, and complete in the end."""

from __future__ import annotations

import io
from typing import Any

import pytest

from sota_grpo.recording import progress
from sota_grpo.recording.progress import NotebookLine, in_notebook


class Cell:
    """Stands for IPython's display: what the cell shows, and in how many messages it came."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.messages = 0

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.shown.append("")
        self.update(content, raw=raw)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown[-1] = content["text/plain"]
        self.messages += 1


def test_there_is_one_line_whatever_is_drawn() -> None:
    cell, now = Cell(), iter(range(100))
    line = NotebookLine(cell.display, clock=lambda: float(next(now)))
    for turn in range(5):
        line.show(f"step {turn}")
        assert cell.shown == [f"step {turn}"]


def test_fast_turns_are_drawn_four_times_a_second_and_the_last_one_stays() -> None:
    cell, now = Cell(), 0.0
    line = NotebookLine(cell.display, clock=lambda: now)
    for turn in range(1, 101):
        now += 0.01  # a second in all
        line.show(f"step {turn}")
    assert cell.messages == 4
    line.close()
    line.close()
    assert cell.shown == ["step 100"]
    assert cell.messages == 5


def test_only_the_stream_of_a_kernel_is_a_notebook() -> None:
    kernels = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    assert in_notebook(kernels())
    assert not in_notebook(io.StringIO())


def test_the_progress_of_a_run_takes_that_line(monkeypatch: Any) -> None:
    cell = Cell()
    monkeypatch.setattr(progress, "NotebookLine", lambda: NotebookLine(cell.display))
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with progress.Progress(3, stream=stream) as shown:
        for turn in (1, 2, 3):
            shown.update(turn, {"reward": 0.5})
    assert stream.getvalue() == ""
    assert len(cell.shown) == 1
    assert cell.shown[0].startswith("step 3/3  reward 0.50")


def test_a_mistake_in_a_cell_is_its_sentence_and_no_page_of_frames(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell().run_cell('import sota_grpo\nsota_grpo.train("grpo_cpu", overrides=["env.repeat=4"])')
    told = capsys.readouterr().out.strip().splitlines()
    assert told == ["UserError: There is no option env.repeat; did you mean env.repeats?"]
