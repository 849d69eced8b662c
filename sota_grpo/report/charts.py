"""What a page draws: a chart for each metric, and one with several lines for a metric that several tasks have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sota_grpo.recording.metrics import Metric, declared
from sota_grpo.report.data import BANDS, EVAL_TASK, EVAL_TASK_ERROR, family, place_of

#: What a chart is called where its metric's name would say too little.
TITLES = {
    "turns/mean": "Turns per dialog",
    "turn_tokens/mean": "Tokens per turn",
    "grader/tool_calls": "Tool calls per dialog",
    "grader/tool_errors": "Tool errors per dialog",
    "grader/ended_by_turns": "Dialogs ended by the most turns",
    "task/*/reward": "Reward",
    "task/*/success": "Success",
    "task/*/truncated": "Truncated responses",
    "task/*/response_tokens": "Tokens per response",
    "task/*/responses": "Responses in the batch",
    "eval/task/*": "Held-out accuracies",
}
_OF_A_TASK = "*"  # in the key of a chart: where the names of its lines stand
_BAND_OF_TASK = f"{EVAL_TASK_ERROR}.., over problems"
_LAST = ("reward/", "eval/reward/", "grader/")  # of a mixture they have a task's name before their own
Line = tuple[str, str]  # what is written beside it, and its metric


def charts(metrics: Iterable[str]) -> list[dict[str, Any]]:
    """The charts of a page, in its order; ``members`` are label and metric of each line, that of a single line empty.

    Metrics that differ in the name of a task only are one chart, of its ``name`` with ``*`` for that: those of the
    entries of a mixture, and those of the tasks within an entry.

    >>> names = ["kl", "task/a/reward", "task/b/reward", "task/b/x/reward", "task/b/y/reward", "eval/task/a", "lr"]
    >>> for chart in charts(names):
    ...     print(chart["title"] or chart["name"], chart["members"])
    Reward by task [('a', 'task/a/reward'), ('b', 'task/b/reward')]
    Held-out accuracies [('', 'eval/task/a')]
    Reward by task of b [('x', 'task/b/x/reward'), ('y', 'task/b/y/reward')]
    kl [('', 'kl')]
    lr [('', 'lr')]
    """
    lines: dict[tuple[str, str], list[Line]] = {}
    for name in sorted(metrics, key=place_of):
        key, within, label = _split(name)
        lines.setdefault((key, within), []).append((label, name))

    def place(chart: tuple[str, str]) -> tuple[int, str, int]:
        key, within = chart
        index, member = place_of(_plain(key))
        return index, within, member

    return [_chart(key, within, sorted(lines[key, within])) for key, within in sorted(lines, key=place)]


def _split(name: str) -> tuple[str, str, str]:
    """A metric's chart, the entry of a mixture that this is within (or an empty text), and the metric's label there.

    >>> [_split(name) for name in ("kl", "task/b/x/reward", "eval/task/b/x", "reward/b/correct", "reward/correct")][1:4]
    [('task/*/reward', 'b', 'x'), ('eval/task/*', 'b', 'x'), ('reward/*/correct', '', 'b')]
    """
    metric = _declared(name)
    for prefix in _LAST if metric else ():
        if name.startswith(prefix):
            task, _, last = name.removeprefix(prefix).rpartition("/")
            return (f"{prefix}{_OF_A_TASK}/{last}", "", task) if task else (name, "", "")
    before, is_family, behind = (metric.name if metric else name).partition("<")
    if metric is None or not is_family or metric.name == name:
        return name, "", ""
    after = behind.partition(">")[2]
    within, _, label = name[len(before) : len(name) - len(after)].rpartition("/")
    return f"{before}{_OF_A_TASK}{after}", within, label


def _plain(key: str) -> str:
    """The metric without its tasks, by which a chart has its place and its sentence.

    >>> _plain("grader/*/tool_calls"), _plain("task/*/reward"), _plain("eval/task/*")
    ('grader/tool_calls', 'task/*/reward', 'eval/task/*')
    """
    return key.replace(f"{_OF_A_TASK}/", "") if key.startswith(_LAST) else key


def _chart(key: str, within: str, lines: list[Line]) -> dict[str, Any]:
    metric, plain = _declared(lines[0][1]), _plain(key)
    title = TITLES.get(plain, "")
    if len(lines) == 1:
        name, lines = lines[0][1], [("", lines[0][1])]
    else:
        name = key.replace(_OF_A_TASK, f"{within}/{_OF_A_TASK}") if within else key
        what = "task" if key.startswith(_LAST) else _placeholder(metric)
        title = (title or plain) + (f" by {what}" if what != "name" else "") + (f" of {within}" if within else "")
    chart: dict[str, Any] = {
        "name": name,
        "title": title,
        "family": family(plain),
        "sentence": metric.sentence if metric else "",
        "unit": metric.unit if metric else "",
        "members": lines,
    }
    band = _BAND_OF_TASK if key.startswith(EVAL_TASK) else BANDS[key][0] if key in BANDS else None
    return chart | ({} if band is None else {"band": band})


def _placeholder(metric: Metric | None) -> str:
    return metric.name.partition("<")[2].partition(">")[0] if metric else ""


def _declared(name: str) -> Metric | None:
    try:
        return declared(name)
    except ValueError:  # of another version of the program, or written by hand
        return None
