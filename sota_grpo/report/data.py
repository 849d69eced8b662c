"""Everything that a page shows, as one JSON text: the runs side by side, their options, their groups."""

from __future__ import annotations

import math
import os
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import PATH_OPTIONS
from sota_grpo.config import SECRETS, flat, walk
from sota_grpo.errors import UserError
from sota_grpo.recording.metrics import METRICS, declared
from sota_grpo.recording.run_record import INPUTS
from sota_grpo.report.groups import Groups, choose_groups
from sota_grpo.report.read import RunData, number, safe_json, shown

Row = Mapping[str, Any]
NUMBERS = 250_000  # of all curves of a page: 2 MB; beyond it turns are left out
#: Where a metric is shown: a title, and the names or, with a slash at their end, the families of names below it.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What it learned", ("eval/accuracy", "reward", "success", "eval/avg_at_k")),
    ("Policy", ("kl", "entropy", "clip_fraction", "ess", "mismatch_kl", "kl_approx", "correction_fraction")),
    ("Responses", ("response_tokens/", "truncated", "turns/mean", "prompt_tokens/mean")),
    ("Rewards and advantages", ("reward/", "grader/", "advantage", "reward_errors", "reward_timeouts")),
    ("Groups, policy age and workers", ("groups/", "policy_age/", "workers/")),
    ("Optimisation", ("loss/", "grad_norm", "lr", "loss_scale", "skipped_steps", "packed")),
    ("Evaluation beside its accuracy", ("eval/",)),
    ("Speed", ("tokens_per_s", "time/")),
)
_OTHER = "Other"
_NO_CURVE = frozenset(("step", "version", "dialog_turns", "optimizer_steps", "eval/stderr", "eval/avg_at_k_stderr"))
_TASK, _TASK_ERROR = "eval/task/", "eval/task_stderr/"
#: Where each curve's band comes from.
BANDS: dict[str, tuple[str, Callable[[Row], float | None]]] = {
    "reward": ("reward/std over the root of the responses", lambda row: _of_mean(row.get("reward/std"), row)),
    "success": ("that of a share, responses taken as independent", lambda row: _of_share(row.get("success"), row)),
    "truncated": ("that of a share, responses taken as independent", lambda row: _of_share(row.get("truncated"), row)),
    "eval/accuracy": ("eval/stderr, over problems", lambda row: row.get("eval/stderr")),
    "eval/avg_at_k": ("eval/avg_at_k_stderr, over problems", lambda row: row.get("eval/avg_at_k_stderr")),
}


def curves(run: RunData, stride: int = 1) -> dict[str, Any]:
    """The run's columns, ready for JSON.

    ``steps``, ``responses`` and ``seconds`` are the three x-axes, aligned; ``columns`` and ``errors`` hold by metric
    either ``{"v": values}``, aligned with them, or ``{"i": positions, "v": values}`` where most turns lack it.

    Args:
        stride: every how many turns one is kept; evaluations and the last turn always are.
    """
    seconds, kept = 0.0, []
    last = len(run.rows) - 1
    for index, row in enumerate(run.rows):
        seconds += _number(row, "time/step_s") + _number(row, "time/eval_s")
        if index % stride == 0 or index == last or "eval/accuracy" in row:
            kept.append((row, seconds))
    rows = [row for row, _ in kept]
    columns = {name: _column([row.get(name) for row in rows]) for name in names(rows)}
    of_tasks = {name: _column([row.get(_error_of(name)) for row in rows]) for name in columns if name.startswith(_TASK)}
    errors = of_tasks | {name: _column([error(row) for row in rows]) for name, (_, error) in BANDS.items()}
    return {
        "steps": [row["step"] for row in rows],
        "responses": _known([row.get("dialog_turns") for row in rows]),
        "seconds": [number(spent) for _, spent in kept],
        "columns": {name: column for name, column in columns.items() if column},
        "errors": {name: column for name, column in errors.items() if column},
    }


def names(rows: Iterable[Row]) -> list[str]:
    """The metrics with a curve, those of the glossary first, in its order.

    >>> names([{"step": 0, "zeal": 1, "kl": None}, {"step": 1, "reward": 0.5, "version": 1}])
    ['reward', 'kl', 'zeal']
    """
    found = dict.fromkeys(name for row in rows for name in row)
    order = {name: index for index, name in enumerate(METRICS)}
    shown = (name for name in found if name not in _NO_CURVE and not name.startswith(_TASK_ERROR))
    return sorted(shown, key=lambda name: order.get(name, len(order)))


def stride_for(runs: Sequence[RunData]) -> int:
    """Every how many turns one is kept, so that all curves together stay below ``NUMBERS``."""
    total = sum(len(run.rows) * len(names(run.rows)) for run in runs)
    return max(1, math.ceil(total / NUMBERS))


def glossary(found: Iterable[str]) -> dict[str, dict[str, str]]:
    """What is said of each metric: its family, sentence, unit, how its band is computed; in the order of the page.

    >>> list(glossary(["time/step_s", "reward", "kl", "eval/accuracy"]))
    ['eval/accuracy', 'reward', 'kl', 'time/step_s']
    """
    return {name: {"family": family(name), **_said(name)} for name in sorted(found, key=_place)}


def family(name: str) -> str:
    """The title under which the metric is shown; a full name counts before a family of names.

    >>> family("reward"), family("reward/format"), family("eval/num_samples"), family("zeal")
    ('What it learned', 'Rewards and advantages', 'Evaluation beside its accuracy', 'Other')
    """
    for title, members in FAMILIES:
        if name in members:
            return title
    for title, members in FAMILIES:
        if any(member.endswith("/") and name.startswith(member) for member in members):
            return title
    return _OTHER


def phases(run: RunData) -> dict[str, Any]:
    """Seconds by phase, summed over the run, and of the turns and evaluations as a whole.

    >>> from pathlib import Path
    >>> row = {"step": 0, "time/learn_s": 2.0, "time/generate_s": 5.0, "time/step_s": 8.0, "time/eval_s": 1.0}
    >>> phases(RunData(Path("."), [row, row], {}, None, "stopped", "", None, 0.0))
    {'total': 18, 'parts': {'generate': 10, 'learn': 4, 'eval': 2}, 'other': 2}
    """
    parts: dict[str, float] = {}
    for name in METRICS:
        spent = sum(_number(row, name) for row in run.rows) if name.startswith("time/") else 0.0
        if spent and name != "time/step_s":
            parts[name[len("time/") : -len("_s")]] = spent
    total = sum(_number(row, "time/step_s") + _number(row, "time/eval_s") for row in run.rows)
    rest = max(0.0, total - sum(parts.values()))
    return {
        "total": number(total),
        "parts": {name: number(spent) for name, spent in parts.items()},
        "other": number(rest),
    }


def _place(name: str) -> tuple[int, int]:
    for index, (title, members) in enumerate(FAMILIES):
        if title == family(name):
            return index, members.index(name) if name in members else len(members)
    return len(FAMILIES), 0


def _said(name: str) -> dict[str, str]:
    try:
        metric = declared(name)
    except ValueError:  # of another version of the program, or written by hand
        return {"sentence": "", "unit": ""}
    band = {"band": BANDS[name][0]} if name in BANDS else {}
    if name.startswith(_TASK):
        band = {"band": f"{_error_of(name)}, over problems"}
    return {"sentence": metric.sentence, "unit": metric.unit, **band}


def _error_of(name: str) -> str:
    return _TASK_ERROR + name.removeprefix(_TASK)


def _column(values: Sequence[Any]) -> dict[str, Any]:
    plain = [number(value) for value in values]
    present = [index for index, value in enumerate(plain) if value is not None]
    if not present:
        return {}
    if 2 * len(present) > len(plain):
        return {"v": plain}
    return {"i": present, "v": [plain[index] for index in present]}


def _known(values: Sequence[Any]) -> list[float | int]:
    """With what was known before in the place of what is missing."""
    found: list[float | int] = []
    for value in values:
        plain = number(value)
        found.append(plain if plain is not None else found[-1] if found else 0)
    return found


def _number(row: Row, name: str) -> float:
    return number(row.get(name), digits=15) or 0.0


def _responses(row: Row) -> float:
    """Responses of the turn: ``dialog_turns`` counts those of all turns up to it, which are of one size."""
    return _number(row, "dialog_turns") / (row["step"] + 1)


def _of_mean(std: Any, row: Row) -> float | None:
    """Standard error of a mean over the turn's responses."""
    spread, count = number(std, digits=15), _responses(row)
    return None if spread is None or count <= 0 else spread / math.sqrt(count)


def _of_share(share: Any, row: Row) -> float | None:
    part, count = number(share, digits=15), _responses(row)
    return None if part is None or count <= 0 or not 0 <= part <= 1 else math.sqrt(part * (1 - part) / count)


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
    from sota_grpo.training.runs import FREE_OPTIONS, FREE_SECTIONS  # brings torch

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
