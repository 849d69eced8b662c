"""What a person sees of a run: what is being started, a progress line while it trains, a closing table.

The lines of a start are records of the ``sota_grpo`` loggers: they go wherever the other sentences of a run go, whole
lines without control characters. ``training.log`` has the time at which each stage began, the short ones too.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

EVERY_S = 6.0  # with the second between two looks, and what an import blocks all threads for, a line within 10 s
_LOOK_S = 1.0
_DRAW_EVERY_S = 0.25  # in a notebook; each is a message to the browser
_WINDOW = 20  # steps of the moving average: long enough to smooth evaluations, short enough to follow the lengths
_TEXT_WIDTH = 100

logger = logging.getLogger(__name__)


def starting(stage: str) -> None:
    """Note that ``stage`` begins, and that the one before it is over."""
    logger.info("%s ...", stage, extra={"stage": stage, "file_only": True})


def started() -> None:
    """Note that nothing is being started any more."""
    logger.info("The first step is done.", extra={"stage": None, "file_only": True})


class Heartbeat(logging.Handler):
    """While it is open, and something is being started: no ``every_s`` seconds without a word on the console.

    Args:
        every_s: longest silence, to within a second.
    """

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._every_s, self._clock = every_s, clock
        self._stage: str | None = None
        self._began = self._spoke = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of what is said, by whomever."""
        now = self._clock()
        if hasattr(record, "stage"):
            self._stage, self._began = record.stage, now
        if not getattr(record, "file_only", False):
            self._spoke = now

    def beat(self) -> None:
        """Say what is being started and since when, if it is time to say something."""
        now, stage = self._clock(), self._stage
        if stage is not None and now - self._spoke >= self._every_s:
            logger.info("%s: %.0f s so far", stage, now - self._began)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.beat()

    def __enter__(self) -> Heartbeat:
        logging.getLogger("sota_grpo").addHandler(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        logging.getLogger("sota_grpo").removeHandler(self)


class Progress:
    """One line that says how far the run is and how it does.

    On a terminal and in a notebook the line is redrawn in place. Elsewhere (a file, CI) whole lines are printed,
    without any control character: the first, the last, and one every ``every_s`` seconds.

    Args:
        total_steps: steps of the whole run.
        first_step: steps done before this process (resume).
        stream: None is standard output.
        every_s: least seconds between two plain lines.

    >>> progress = Progress(60, stream=io.StringIO())
    >>> progress.update(12, {"reward": 0.61, "success": 0.57})[:43]
    'step 12/60  reward 0.61  success 57 %  ETA '
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total_steps
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque([(first_step, clock())], maxlen=_WINDOW + 1)
        self._printed_at = -float("inf")
        self._live: Live | None = None
        if is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
        self._notebook = NotebookLine() if in_notebook(self._stream) else None

    def update(self, done: int, metrics: Mapping[str, float | None]) -> str:
        """Show and return the line after ``done`` steps of the run; what was not measured is left out."""
        now = self._clock()
        self._marks.append((done, now))
        line = self._line(done, metrics)
        if self._live is not None:
            from rich.text import Text

            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._notebook is not None:
            self._notebook.show(line)
        elif done >= self.total or now - self._printed_at >= self._every_s:
            self._printed_at = now
            self._stream.write(line + "\n")
            self._stream.flush()
        return line

    def close(self) -> None:
        """Leave the last line standing and give the terminal back. Idempotent."""
        if self._live is not None:
            self._live.stop()
        if self._notebook is not None:
            self._notebook.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, done: int, metrics: Mapping[str, float | None]) -> str:
        parts = [f"step {done}/{self.total}"]
        for name, style in (
            ("reward", "reward {:.2f}"),
            ("success", "success {:.0%}"),
            ("kl", "kl {:.2g}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
        ):
            value = metrics.get(name)
            if value is not None:
                parts.append(style.format(value).replace("%", " %"))
        failed = metrics.get("reward_errors")
        if failed:
            parts.append(f"{failed:.0f} not graded")
        (first, began), (last, now) = self._marks[0], self._marks[-1]
        if last > first:
            parts.append(f"ETA {duration((self.total - last) * (now - began) / (last - first))}")
        return "  ".join(parts)


class NotebookLine:
    """Draws a line where it was drawn first, at most four times a second.

    IPython's display is used as it is, without widgets: those need a package beside the notebook, and are empty in a
    saved one.
    """

    def __init__(self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if display is None:
            import IPython.display

            display = IPython.display.display
        self._display, self._clock = display, clock
        self._handle: Any = None
        self._line: str | None = None  # what is still to be drawn
        self._drawn_at = -float("inf")

    def show(self, line: str) -> None:
        """Draw ``line`` now, or with the next one, or when the line is closed."""
        self._line = line
        if self._clock() - self._drawn_at >= _DRAW_EVERY_S:
            self._draw()

    def close(self) -> None:
        """Leave the last line standing. Idempotent."""
        if self._line is not None:
            self._draw()

    def _draw(self) -> None:
        content = {"text/plain": self._line}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._line, self._drawn_at = None, self._clock()


def in_notebook(stream: TextIO) -> bool:
    """Whether ``stream`` leads to the cell of a notebook, where it is no terminal and still can be redrawn.

    >>> import io
    >>> in_notebook(io.StringIO())
    False
    """
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def is_terminal(stream: TextIO) -> bool:
    """Whether a line on ``stream`` can be redrawn. Asked of the stream itself: colours may be forced on a file."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> duration(151), duration(3661.2), duration(0.4)
    ('2:31', '1:01:01', '0:00')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def closing_table(
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    phase_seconds: Mapping[str, float],
    *,
    avg_at_k: int = 0,
    wall_s: float | None = None,
    stream: TextIO | None = None,
) -> str:
    """Print what the run gained and where its time went; return the same as plain text, for ``training.log``.

    Args:
        before: the ``eval/*`` metrics before training; empty when nothing was evaluated.
        after: the same after training.
        phase_seconds: seconds by phase (``generate``, ``learn``, ...), summed over the run.
        avg_at_k: the k of ``eval/avg_at_k``.
        wall_s: duration of the run. Shares are of it, and the time of no phase is shown as ``other``; phases that
            overlap may add up to more than 100 %. None: shares are of the sum of the phases.
        stream: None is standard output.
    """
    from rich.console import Console, Group

    stream = stream or sys.stdout
    tables = Group(*_accuracy_table(before, after, avg_at_k), _time_table(phase_seconds, wall_s))
    plain = Console(file=io.StringIO(), width=_TEXT_WIDTH, force_terminal=False, force_jupyter=False, color_system=None)
    with plain.capture() as capture:
        plain.print(tables)
    text = capture.get()
    if is_terminal(stream):
        Console(file=stream).print(tables)
    else:
        stream.write(text)
        stream.flush()
    return text


def _accuracy_table(
    before: Mapping[str, float | None], after: Mapping[str, float | None], avg_at_k: int
) -> list[RenderableType]:
    table = figures("held-out accuracy", "before", "after", "gain")
    own = [name.removeprefix("eval/task/") for name in {**before, **after} if name.startswith("eval/task/")]
    for label, mean, stderr in (
        ("greedy", "eval/accuracy", "eval/stderr"),
        *((f"  {name}", f"eval/task/{name}", f"eval/task_stderr/{name}") for name in own),
        (f"avg@{avg_at_k}", "eval/avg_at_k", "eval/avg_at_k_stderr"),
    ):
        old, new = before.get(mean), after.get(mean)
        if old is None and new is None:
            continue
        gain = "-" if old is None or new is None else f"{100 * (new - old):+.1f} points"
        cells = [_accuracy(row.get(mean), row.get(stderr)) for row in (before, after)]
        table.add_row(label, *cells, gain)
    return [table] if table.row_count else []


def _accuracy(mean: float | None, stderr: float | None) -> str:
    if mean is None:
        return "-"
    error = "" if stderr is None else f" +/- {100 * stderr:.1f}"
    return f"{100 * mean:.1f}{error} %"


def _time_table(phase_seconds: Mapping[str, float], wall_s: float | None) -> Table:
    spent = sum(phase_seconds.values())
    total = spent if wall_s is None else wall_s
    rows = dict(phase_seconds)
    if total > spent:
        rows["other"] = total - spent
    table = figures("phase", "seconds", "share")
    for phase, seconds in rows.items():
        table.add_row(phase, f"{seconds:,.1f}", f"{100 * seconds / total:.0f} %" if total > 0 else "-")
    table.add_section()
    table.add_row("total", f"{total:,.1f}", "")
    return table


def figures(*columns: str) -> Table:
    """An empty table of plain characters: the first column has names, on the left, the others figures, on the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.ASCII)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    return table
