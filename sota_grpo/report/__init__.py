"""Write the report: one HTML file about one or several runs, viewable without a server or network.

It consists of a template, style and scripts (``assets/``), and the data of run directories, finished or not, as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import PATH_OPTIONS
from sota_grpo.config.spelling import flat, walk
from sota_grpo.errors import UserError, writing
from sota_grpo.files import write_text
from sota_grpo.recording.machine import SECRET
from sota_grpo.recording.run_files import INPUTS, METRICS_FILE, dicts, find_runs, read_replays
from sota_grpo.report.data import RunData, charts, curves, phases, read_runs, safe_json, shown, stride_for
from sota_grpo.report.groups import choose_groups
from sota_grpo.text import os_reason, sentence
from sota_grpo.training.runs import counted

__all__ = ["report_of", "write_report"]

REPORT_FILE = "report.html"
MAX_BYTES = 9_500_000  # size of the file; plotly is half of it
_MOST_DATA = 4_500_000
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("base", "lines", "curves", "runs", "tokens", "dialogs", "groups", "tables", "start")  # in this order
_PLACEHOLDER = re.compile(r"@@(\w+)@@")
_HIDDEN = "(hidden)"  # shown for secrets, because reports are shared

logger = logging.getLogger(__name__)


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    on_left_out: Callable[[str], object] = lambda sentence: None,
) -> Path:
    """Write one HTML page about runs, atomically, and return its path; UserError if that is not possible.

    Args:
        run_dirs: run directories, or folders that contain some (``multirun/DATE/TIME``).
        out: the file to write, in an existing folder.
        on_left_out: called with an error message for each run, or part of a run, that cannot be shown.
    """
    runs, left_out = read_runs(find_runs(run_dirs))
    library = _plotly()
    data = report_json(runs, left_out, budget=min(_MOST_DATA, MAX_BYTES - len(library.encode())))
    path = Path(out)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, for example {path / REPORT_FILE}.")
    with writing(path, "name another file"):
        write_text(path, _html(library, data))
    for reason in left_out:
        on_left_out(reason)
    return path


def _html(library: str, data: str) -> str:
    """Return the HTML page with plotly's JavaScript ``library`` and ``data``, JSON that is safe in HTML."""

    def asset(name: str) -> str:
        return (_ASSETS / name).read_text(encoding="utf-8")

    scripts = "".join(asset(f"{name}.js") for name in _SCRIPTS)
    library, script = (  # an HTML parser converts line ends and ends a script at </script
        re.sub(r"</(?=script)", r"<\\/", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE)
        for text in (library, f'(() => {{\n"use strict";\n{scripts}}})();\n')
    )
    known = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, script)]
    values = {
        "POLICY": f"default-src 'none'; script-src 'sha256-{known[0]}' 'sha256-{known[1]}'; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'",
        "STYLE": asset("report.css"),
        "DATA": data,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], asset("page.html"))


def _plotly() -> str:
    """Return plotly's JavaScript without importing plotly, which is slow; raise UserError if it is missing."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("A report needs plotly: pip install plotly.")
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({os_reason(error)}); pip install --force-reinstall plotly.") from error


def report_json(runs: Sequence[RunData], left_out: list[str], budget: int) -> str:
    """Return the page's data as JSON: all curves, and in the rest of ``budget`` bytes groups, an equal share per run.

    Error messages about unreadable groups and replays are appended to ``left_out``.
    """
    stride = stride_for(runs)
    plots = [curves(run, stride) for run in runs]
    shown_runs: list[dict[str, Any]] = []
    for run, name, plot in zip(runs, run_names(runs), plots):
        replays, sentences = read_replays(run.path)
        left_out += sentences
        about = {
            **{"name": name, "path": str(run.path), "done": run.steps, "asked": run.num_steps, "state": run.state},
            **{"note": run.note, "starts": list(run.starts), "written": _minute(run.written), "phases": phases(run)},
            **{"concurrent": run.config.get("mode") == "async", "gate": _gate(run.gate), "replays": replays},
        }
        shown_runs.append(about | plot)
    page = {
        "made": _minute(time.time()),
        "stride": stride,
        "charts": charts([plot["columns"] for plot in plots]),
        "options": options(runs),
        "seeds": seeds_of_one_config(runs),
        "left_out": left_out,
        "runs": shown_runs,
    }
    share = max(0, budget - len(safe_json(page))) // len(runs)
    for run, shown_run in zip(runs, shown_runs):
        try:
            shown_run |= choose_groups(run, share)
        except UserError as error:  # a damaged line; the curves are shown without groups
            shown_run |= {"record": {"total": 0, "stored": [], "ages": []}, "groups": []}
            left_out.append(f"The groups of {run.path}: {error}")
    return safe_json(page)


def options(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a dict per option of any run: name, help, default, values (of each run as text, None if absent), differs.

    >>> from pathlib import Path
    >>> def run(path, config): return RunData(Path(path), [], config, None, "stopped", "", None, 0.0)
    >>> a, b = (run(p, {"seed": s, "engine": {"api_key": "abc"}}) for p, s in ("a0", "b1"))
    >>> [(option["name"], option["values"], option["differs"]) for option in options([a, b])]
    [('seed', ['0', '1'], True), ('engine.api_key', ['(hidden)', '(hidden)'], False)]
    """
    configs = [flat(run.config) for run in runs]
    schema = {name: (item.metadata.get("help", ""), shown(value)) for name, item, value in walk()}
    present = dict.fromkeys(name for values in configs for name in values)
    ordered = [name for name in schema if name in present] + [name for name in present if name not in schema]
    rows = []
    for name in ordered:
        help_line, default = schema.get(name, ("", None))
        secret = SECRET.search(name)  # an option of another program, or within a mapping
        values = [
            None if name not in config else _HIDDEN if secret and config[name] is not None else shown(config[name])
            for config in configs
        ]
        differs = len(set(values)) > 1
        rows.append({"name": name, "help": help_line, "default": default, "values": values, "differs": differs})
    return rows


def seeds_of_one_config(runs: Sequence[RunData]) -> list[list[int]]:
    """Group runs that differ only in seed and options without effect on results; return a list of indices per group."""
    groups: dict[Any, list[int]] = {}
    for index, run in enumerate(runs):
        values = {name: shown(value) for name, value in counted(run.config).items() if name != "seed"}
        for name in PATH_OPTIONS if run.passed else ():  # Python inputs are compared by their digest, not their path
            if Path(values.get(name, "")).parent.name == INPUTS:
                del values[name]
        key = (frozenset(values.items()), shown(run.passed)) if values else index  # without a config: its own group
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def run_names(runs: Sequence[RunData]) -> list[str]:
    """Return short names of runs: paths relative to their common folder; for one run its last two folders.

    >>> from pathlib import Path
    >>> def run(path): return RunData(Path(path), [], {}, None, "stopped", "", None, 0.0)
    >>> run_names([run("/x/multirun/d/0"), run("/x/multirun/d/1")]), run_names([run("/x/2026-01-31/10-00-00")])
    (['0', '1'], ['2026-01-31/10-00-00'])
    """
    paths = [run.path.resolve() for run in runs]
    if len(paths) == 1:
        return ["/".join(paths[0].parts[-2:])]
    common = os.path.commonpath(paths)
    return [os.path.relpath(path, common) for path in paths]


def _minute(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _gate(record: dict[str, Any] | None) -> dict[str, Any] | None:
    if record is None:
        return None
    checks = []
    for check in dicts(record.get("checks")):
        passed = check.get("passed", False)
        texts = {name: shown(check.get(name)) for name in ("name", "sentence", "seconds")}
        checks.append(texts | {"passed": None if passed is None else bool(passed)})
    return {"mode": shown(record.get("mode")), "checks": checks}


def report_of(run_dir: Path) -> float:
    """Write ``report.html`` to the directory of a run that has metrics; return the seconds. A failure is logged."""
    metrics, began = run_dir / METRICS_FILE, time.perf_counter()
    if not metrics.is_file() or not metrics.stat().st_size:
        return 0.0
    try:
        write_report([run_dir], run_dir / REPORT_FILE)
    except Exception as error:  # a failed report must not end a run
        logger.warning(
            "The report could not be written (%s). Write it with: sota-grpo report %s",
            *(sentence(error).rstrip("."), run_dir),
        )
    return time.perf_counter() - began
