"""Everything that a page shows, as one JSON text: the runs side by side, their options, their groups."""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sota_grpo.compose import PATH_OPTIONS
from sota_grpo.config import SECRETS, walk
from sota_grpo.errors import UserError
from sota_grpo.options import flat
from sota_grpo.report.curves import curves, glossary, phases, stride_for
from sota_grpo.report.encode import safe_json, shown
from sota_grpo.report.groups import Groups, choose_groups
from sota_grpo.report.read import RunData
from sota_grpo.run_record import INPUTS

_HIDDEN = "(hidden)"  # a page is passed on; a secret in it would be too


def report_json(runs: Sequence[RunData], left_out: list[str], budget: int) -> str:
    """The page's data as JSON that is safe in HTML.

    Args:
        runs: at least one.
        left_out: of each run that cannot be shown, a sentence that says why; groups that cannot be read are added.
        budget: bytes of the whole text. Curves come first, groups get what is left, each run the same.
    """
    stride = stride_for(runs)
    columns = [curves(run, stride) for run in runs]
    metrics = dict.fromkeys(name for found in columns for name in found["columns"])
    page = {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "stride": stride,
        "metrics": glossary(metrics),
        "options": options(runs),
    }
    said = [_about(run, name) | found for run, name, found in zip(runs, run_names(runs), columns)]
    head, bodies = safe_json(page), list(map(safe_json, said))
    share = max(0, budget - sum(map(len, [head, *bodies]))) // len(runs)
    told = []
    for run, body in zip(runs, bodies):
        try:
            groups = choose_groups(run, share)
        except UserError as error:  # of a damaged line: the curves are worth a page without them
            groups = Groups([], 0, [], [])
            left_out.append(f"The groups of {run.path}: {error}")
        told.append(_with_groups(body, groups))
    rest = safe_json({"seeds": seeds_of_one_config(runs), "left_out": left_out})
    return f'{head[:-1]},{rest[1:-1]},"runs":[{",".join(told)}]}}'


def options(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Every option of any run: its name, what it changes, its default, the value in each run (None: not there).

    >>> from pathlib import Path
    >>> def run(path, config): return RunData(Path(path), [], config, None, "stopped", "", None, 0.0)
    >>> a, b = (run(p, {"seed": s, "engine": {"api_key": "abc"}}) for p, s in ("a0", "b1"))
    >>> [(option["name"], option["values"], option["differs"]) for option in options([a, b])]
    [('seed', ['0', '1'], True), ('engine.api_key', ['(hidden)', '(hidden)'], False)]
    """
    given = [flat(run.config) for run in runs]
    schema = {name: (item.metadata.get("help", ""), shown(value)) for name, item, value in walk()}
    present = dict.fromkeys(name for values in given for name in values)
    ordered = [name for name in schema if name in present] + [name for name in present if name not in schema]
    found = []
    for name in ordered:
        says, default = schema.get(name, ("", None))
        values = [_value(name, values[name]) if name in values else None for values in given]
        differs = len(set(values)) > 1
        found.append({"name": name, "help": says, "default": default, "values": values, "differs": differs})
    return found


def seeds_of_one_config(runs: Sequence[RunData]) -> list[list[int]]:
    """Indices of the runs that differ in nothing but their seed and what changes no result, one alone too.

    A run without a config is alone.
    """
    if len(runs) == 1:
        return [[0]]
    from sota_grpo.runs import FREE_OPTIONS, FREE_SECTIONS  # brings torch

    free = {".".join(names) for names in FREE_OPTIONS} | {"seed"}
    groups: dict[Any, list[int]] = {}
    for index, run in enumerate(runs):
        given = flat(run.config).items()
        kept = {name: shown(value) for name, value in given if name not in free and not _was_passed(run, name, value)}
        found = frozenset(item for item in kept.items() if item[0].partition(".")[0] not in FREE_SECTIONS)
        key = (found, safe_json(run.passed)) if found else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _was_passed(run: RunData, name: str, value: Any) -> bool:
    """Whether an option names one of the run's own inputs, which its path does not distinguish."""
    return bool(run.passed) and name in PATH_OPTIONS and Path(str(value)).parent.name == INPUTS


def run_names(runs: Sequence[RunData]) -> list[str]:
    """What distinguishes the runs' paths; of a single one its last two folders.

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


def label(index: int) -> str:
    """A, B, .. Z, AA, AB, ..: what a run is called in curves and tables.

    >>> label(0), label(25), label(26), label(53)
    ('A', 'Z', 'AA', 'BB')
    """
    letters = string.ascii_uppercase
    return (label(index // 26 - 1) if index >= 26 else "") + letters[index % 26]


def _about(run: RunData, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(run.path),
        "turns": run.turns,
        "asked": run.asked,
        "state": run.state,
        "note": run.note,
        "written": f"{datetime.fromtimestamp(run.written, UTC):%Y-%m-%d %H:%M} UTC",
        "phases": phases(run),
        "concurrent": run.config.get("mode") == "async",
        "gate": _gate(run.gate),
    }


def _gate(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    listed = found.get("checks")
    checks = [
        {
            "name": str(check.get("name")),
            "passed": bool(check.get("passed")),
            "sentence": str(check.get("sentence")),
            "seconds": shown(check.get("seconds")),
        }
        for check in (listed if isinstance(listed, list) else [])
        if isinstance(check, dict)
    ]
    return {"mode": str(found.get("mode")), "checks": checks}


def _with_groups(body: str, groups: Groups) -> str:
    """The JSON of a run, with its groups added."""
    about = safe_json({"total": groups.total, "stored": groups.stored_turns, "ages": groups.ages})
    return f'{body[:-1]},"record":{about},"groups":[{",".join(groups.encoded)}]}}'


def _value(name: str, value: Any) -> str:
    secret = name in SECRETS or name.endswith(("_token", "_secret", "password", "api_key"))  # of another version, too
    return _HIDDEN if secret and value is not None else shown(value)
