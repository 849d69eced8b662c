"""The HTML file: template, style, scripts and data put together, under its name only once complete."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sota_grpo.errors import UserError
from sota_grpo.report.data import report_json
from sota_grpo.report.read import find_runs, read_runs

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
    for sentence in left_out:
        on_left_out(sentence)
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
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        os.replace(temporary, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another file.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return out
