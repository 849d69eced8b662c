"""The output of a run on a console: stages of its start, a progress line, warnings, closing lines.

Stages are records of the ``sota_grpo`` loggers; ``training.log`` has the time at which each of them began.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO, cast

from sota_grpo.rl.records import VERDICTS
from sota_grpo.text import Output, duration, is_terminal

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

EVERY_S = (6.0, 12.0, 30.0, 60.0)  # longest silences of a stage; the last is repeated
_LOOK_S = 1.0
_WINDOW = 20  # steps of the moving average: it smooths evaluations and follows the lengths
_PATIENCE = 3  # steps in a row; one alone happens to good runs, and a run may be shorter

logger = logging.getLogger(__name__)


def starting(stage: str) -> None:
    """Log that ``stage`` of the run's start begins, which ends the previous stage."""
    logger.info("%s ...", stage, extra={"stage": stage, "file_only": True})


def started() -> None:
    """Log that the run's start is over, which ends the last stage."""
    logger.info("The first step is done.", extra={"stage": None, "file_only": True})


class Heartbeat(logging.Handler):
    """Context manager that logs how long the current stage of a start has lasted, if the console prints nothing.

    It logs after ``every_s[0]`` silent seconds, then after ``every_s[1]`` more, and so on; the last one is repeated.
    """

    def __init__(self, every_s: Sequence[float] = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._every_s, self._clock = every_s, clock
        self._stage: str | None = None
        self._beats = 0  # of this stage
        self._began = self._spoke = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the stage that a record begins, and the time of a record that the console shows."""
        now = self._clock()
        if hasattr(record, "stage"):
            self._stage, self._began, self._beats = record.stage, now, 0
        if not getattr(record, "file_only", False):
            self._spoke = now

    def beat(self) -> None:
        """Log the stage and its duration, if there is a stage and the console has printed nothing for long enough."""
        now, stage = self._clock(), self._stage
        if stage is not None and now - self._spoke >= self._every_s[min(self._beats, len(self._every_s) - 1)]:
            self._beats += 1
            logger.info("%s: %.0f s so far", stage, now - self._began, extra={"redrawn": True})

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


def in_notebook(stream: TextIO) -> bool:
    """Return whether ``stream`` is the output of a notebook's cell, which can be redrawn though it is no terminal."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class Progress:
    """The progress line of a run or an evaluation, redrawn on a terminal (with a bar) and in a notebook.

    Elsewhere a line is printed at most every ``every_s`` seconds, and after the last step. ``stream`` None is standard
    output; ``unit`` is the noun before the count. ``by_reward`` hides the success unless the reward function reports
    one: else success means a reward above a limit.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        unit: str = "step",
        by_reward: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._unit, self._by_reward = unit, by_reward
        self.total = total_steps
        self._stream = cast(TextIO, Output(stream))
        self._every_s = every_s
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=_WINDOW + 1)
        self._printed_at = -float("inf")
        self._live: Live | None = None
        if is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            # prints the log, and what user code prints, above the line, while there is one
            console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
            out, err = map(is_terminal, (sys.stdout, sys.stderr))
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=out, redirect_stderr=err)
        self._in_notebook, self._cell = in_notebook(stream or sys.stdout), None

    def update(self, done: int, metrics: Mapping[str, float | None]) -> str:
        """Return the line after ``done`` steps, without metrics that were not measured; show the line if it is due."""
        now = self._clock()
        self._marks.append((done, now))
        verdicts = (name for name in metrics if name.startswith("grader/") and name.rpartition("/")[2] in VERDICTS)
        hidden = {"success"} if self._by_reward and not any(verdicts) else set()
        parts = [f"{self._unit} {done}/{self.total}"]
        for name, style in (
            ("reward", "reward {:.2f}"),
            ("success", "success {:.0%}"),
            ("kl", "kl {:.2g}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
        ):
            value = None if name in hidden else metrics.get(name)
            if value is not None:
                parts.append(style.format(value).replace("%", " %"))
        if failed := metrics.get("reward_errors"):
            parts.append(f"{failed:.0f} not graded")
        (first, began), (last, now) = self._marks[0], self._marks[-1]
        if last > first and last < self.total:  # the first step is no measure: an evaluation comes before it
            parts.append(f"ETA {duration((self.total - last) * (now - began) / (last - first))}")
        line = "  ".join(parts)
        if self._live is not None:
            from rich.progress_bar import ProgressBar
            from rich.table import Column, Table

            row = Table.grid(Column(max_width=30), Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1))
            row.add_row(ProgressBar(self.total, done), line)
            self._live.start()
            self._live.update(row, refresh=True)
        elif self._in_notebook:  # without widgets, which need another package and are empty in a saved notebook
            import IPython.display

            content = {"text/plain": line}
            if self._cell is None:
                self._cell = IPython.display.display(content, raw=True, display_id=True)
            else:
                self._cell.update(content, raw=True)
        elif done >= self.total or now - self._printed_at >= self._every_s:
            self._printed_at = now
            self._stream.write(line + "\n")
        return line

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal; the last line stays."""
        if self._live is not None:
            self._live.stop()


class ZeroAdvantageWatch:
    """Warns of steps whose advantages are all 0, and of a grader that fails at every response; each at most once."""

    def __init__(self, total: int) -> None:
        self._patience = min(_PATIENCE, total)
        self.num_steps = 0  # steps in a row, up to the last, without a group whose rewards differ
        self._warned_equal = self._warned_failed = False

    def look(self, step: int, metrics: Mapping[str, float | None], responses: int) -> None:
        """Warn if the grader failed at all ``responses`` of a step, or if 3 steps in a row had only advantages of 0.

        ``step`` is counted from 0. A shorter run needs fewer steps. With a teacher, advantages cause no warning.
        """
        failed = metrics.get("reward_errors") or 0
        learns = metrics.get("advantage") != 0 or "distill/reverse_kl" in metrics
        self.num_steps = 0 if learns else self.num_steps + 1
        if failed and failed >= responses and not self._warned_failed:
            self._warned_failed = True
            logger.warning(
                "The grader failed at all %d responses of step %d, and their terms are 0: look for its error in "
                "training.log, or run `sota-grpo check` with the same options.",
                *(failed, step + 1),
            )
        elif self.num_steps >= self._patience and not self._warned_equal:
            self._warned_equal = True
            logger.warning(
                "All advantages of the last %s were 0 (last mean reward %.2f), so the rewards taught nothing: "
                "read the responses (sota-grpo report RUN), then change the reward, the problems or the temperature.",
                *("step" if self.num_steps == 1 else f"{self.num_steps} steps", metrics.get("reward") or 0.0),
            )


def closing_lines(
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    phase_seconds: Mapping[str, float],
    *,
    avg_at_k: int,
    wall_s: float,
) -> list[str]:
    """Return a line of held-out figures before and after training, if there are any, and one of the time by phase.

    ``before`` and ``after`` are ``eval/*`` metrics, empty when nothing was evaluated; ``avg_at_k`` is the k of that
    figure. Overlapping phases may exceed 100 %; ``other`` is the time of no phase and of phases below 1 %.
    """
    tasks = dict.fromkeys(name.removeprefix("eval/task/") for name in {**before, **after} if "eval/task/" in name)
    is_accuracy = all(row.get("eval/reward") == row.get("eval/accuracy") for row in (before, after))
    gains = []
    for label, mean, stderr in (
        ("greedy", "eval/accuracy", "eval/stderr"),
        *((name, f"eval/task/{name}", f"eval/task_stderr/{name}") for name in tasks),
        (f"avg@{avg_at_k}", "eval/avg_at_k", "eval/avg_at_k_stderr"),
        *(() if is_accuracy else (("reward", "eval/reward", "eval/reward_stderr"),)),
    ):
        ends = [(value, row.get(stderr)) for row in (before, after) if (value := row.get(mean)) is not None]
        gain = ends[-1][0] - ends[0][0] if ends else 0.0
        if mean == "eval/reward":
            shown = [f"{value:.3g}" + ("" if error is None else f" +/- {error:.2g}") for value, error in ends]
            gained = f"{gain:+.3g}"
        else:
            shown, gained = [percent(*end) for end in ends], f"{100 * gain:+.1f} points"
        if ends:
            gains.append(f"{label} {' -> '.join(shown)}" + (f" ({gained})" if len(ends) > 1 else ""))
    phases = {name: share for name, seconds in phase_seconds.items() if (share := seconds / wall_s) >= 0.01}
    phases = dict(sorted(phases.items(), key=lambda phase: -phase[1]))
    phases |= {"other": other} if (other := 1 - sum(phases.values())) >= 0.005 else {}
    times = f"Time: {duration(wall_s)}, of which " + ", ".join(f"{n} {share:.0%}" for n, share in phases.items())
    return [*([f"Held out: {', '.join(gains)}"] if gains else []), times.replace("%", " %")]


def percent(share: float | None, error: float | None = None) -> str:
    """Return a share in [0, 1] and its standard error as text in percent; ``-`` without a share.

    >>> percent(0.613, 0.03), percent(0.5), percent(None)
    ('61.3 +/- 3.0 %', '50.0 %', '-')
    """
    if share is None:
        return "-"
    return f"{100 * share:.1f}" + ("" if error is None else f" +/- {100 * error:.1f}") + " %"


def figures(*columns: str) -> Table:
    """Return a rich table with ASCII borders and no rows; columns after the first are right-aligned, for figures."""
    from rich import box
    from rich.table import Column, Table

    first, *others = columns
    return Table(Column(first, no_wrap=True), *(Column(name, justify="right") for name in others), box=box.ASCII)
