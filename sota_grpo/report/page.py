"""The HTML file: template, style, scripts and data put together, under its name only once complete."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import write_text
from sota_grpo.recording.run_record import METRICS_FILE
from sota_grpo.report.data import report_json
from sota_grpo.report.read import find_runs, read_runs
from sota_grpo.text import sentence

MAX_BYTES = 9_500_000  # of the file; plotly is half of it
_MOST_DATA = 4_500_000
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("base.js", "lines.js", "curves.js", "runs.js", "tokens.js", "groups.js", "tables.js", "start.js")
_PLACE = re.compile(r"@@(\w+)@@")


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    on_left_out: Callable[[str], object] = lambda sentence: None,
) -> Path:
    """Write one page about these runs, and about all runs below a folder of runs; returns its path.

    The page is complete when it gets its name, and an older one of that name is replaced. It holds plotly's JavaScript,
    and the browser is told to run nothing but the page's own scripts and to ask nobody for anything.

    Args:
        run_dirs: run directories, or folders that hold some (``multirun/DATE/TIME``).
        out: the file; its folder exists.
        on_left_out: given, for each run or part of one that cannot be shown, the sentence that stands on the page too.

    Raises:
        UserError: there is no run, or something cannot be read or written.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> _ = (run_dir / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\\n')
    >>> write_report([run_dir], run_dir / "report.html").name
    'report.html'
    """
    runs, left_out = read_runs(find_runs(run_dirs))
    library = _plotly()
    data = report_json(runs, left_out, budget=min(_MOST_DATA, MAX_BYTES - len(library.encode())))
    path = _write(Path(out), page(library, data))
    for reason in left_out:
        on_left_out(reason)
    return path


def page(library: str, data: str) -> str:
    """The HTML of a page.

    Args:
        library: plotly's JavaScript.
        data: JSON, safe in HTML.
    """
    script = _script(f'(() => {{\n"use strict";\n{"".join(map(_asset, _SCRIPTS))}}})();\n')
    library = _script(library)
    parts = {
        "POLICY": f"default-src 'none'; script-src {_digest(library)} {_digest(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'",
        "STYLE": _asset("report.css"),
        "DATA": data,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """As it can stand in an HTML file: the parser makes one line end of two characters, and looks for ``</script``."""
    return re.sub(r"</(?=script)", r"<\\/", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE)


def _digest(script: str) -> str:
    """By which the page's security policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _plotly() -> str:
    """The library's JavaScript; found without importing its Python, which nobody needs here and takes a while."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("A report needs plotly: pip install plotly.")
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); pip install --force-reinstall plotly.") from error


def _write(out: Path, text: str) -> Path:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file in it, {out / 'report.html'}.")
    try:
        write_text(out, text)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another file.") from error
    return out


REPORT_FILE = "report.html"
_SHARE = 0.005  # of the run's time at most
_FIRST_S = 0.3  # what the first page is taken to cost

logger = logging.getLogger(__name__)


class TrainingReport:
    """``report.html`` in a run's directory.

    Args:
        run_dir: of the run; before its first line of metrics nothing is written.
        enabled: False writes nothing.
        write: makes the page.
        clock: seconds, monotonic.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> _ = (run_dir / METRICS_FILE).write_text('{"step": 0, "reward": 0.5}\\n')
    >>> seconds = TrainingReport(run_dir).finish()
    >>> (run_dir / REPORT_FILE).is_file()
    True
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        enabled: bool = True,
        write: Callable[[Sequence[Path], Path], Any] = write_report,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_dir, self._enabled, self._write, self._clock = Path(run_dir), enabled, write, clock
        self._began, self._spent, self._last = clock(), 0.0, _FIRST_S

    def checkpoint(self) -> float:
        """:meth:`finish`, unless pages would then have cost more than half a percent of the time since the start."""
        due = self._spent + self._last <= _SHARE * (self._clock() - self._began)
        return self.finish() if due else 0.0

    def finish(self) -> float:
        """Write the page; the seconds that this took. A failure is a warning, and the last attempt."""
        metrics = self._run_dir / METRICS_FILE
        if not self._enabled or not metrics.is_file() or not metrics.stat().st_size:
            return 0.0
        began = self._clock()
        try:
            self._write([self._run_dir], self._run_dir / REPORT_FILE)
        except Exception as error:  # whatever is wrong with a page, it is not worth a run
            self._enabled = False
            logger.warning(
                "The report could not be written (%s); training goes on, and sota-grpo report %s writes it later.",
                *(sentence(error), self._run_dir),
            )
        self._last = self._clock() - began
        self._spent += self._last
        return self._last
