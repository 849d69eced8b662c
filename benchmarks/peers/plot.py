"""How time grows with the prompt, the group, the response and the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.results import CaseResult
from benchmarks.peers.work import BASE

AXES = {
    "prompt": "tokens of a prompt",
    "group": "responses per prompt",
    "response": "tokens of a response",
    "vocab": "vocabulary",
}


def varied(results: Sequence[CaseResult], axis: str) -> list[CaseResult]:
    """The cases that differ from the base case in nothing but ``axis``, the base case among them, in its order."""
    rest = [name for name in ("prompts", *AXES) if name != axis]
    alike = [measured for measured in results if all(getattr(measured.case, n) == getattr(BASE, n) for n in rest)]
    return sorted(alike, key=lambda measured: getattr(measured.case, axis))


def plot(results: Sequence[CaseResult], path: Path) -> bool:
    """Write seconds against each axis to ``path`` (PNG): whole steps above, the learn phase below; False: no two cases.

    Both axes are logarithmic, so a line's slope is the power with which time grows; dashed is the floor.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = [axis for axis in AXES if len(varied(results, axis)) > 1]
    if not axes:
        return False
    figure, grid = pyplot.subplots(2, len(axes), figsize=(4 * len(axes), 7), squeeze=False, sharey="row")
    names = list(dict.fromkeys(name for measured in results for name in measured.systems))
    for column, axis in enumerate(axes):
        for row, what in enumerate(("whole", "learn")):
            panel = grid[row][column]
            _lines(panel, varied(results, axis), axis, what, names)
            panel.set(xscale="log", yscale="log", xlabel=AXES[axis])
            panel.set_title(f"{'whole step' if what == 'whole' else 'learn phase'}, s", fontsize=9)
            panel.grid(True, which="both", alpha=0.3)
    handles = {label: line for panel in grid.flat for line, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _lines(panel, cases: Sequence[CaseResult], axis: str, what: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        measured = [(getattr(case.case, axis), case.systems[name]) for case in cases if name in case.systems]
        points = [(x, sorted(one.seconds(what))) for x, one in measured if one.seconds(what)]
        if points:
            xs, ys = zip(*((x, seconds[len(seconds) // 2]) for x, seconds in points))
            panel.plot(xs, ys, "o-", color=f"C{index}", label=name)
    floor = [(getattr(case.case, axis), case.floor_of(what)) for case in cases if case.floor]
    if floor:
        panel.plot(*zip(*floor), "k--", label="floor")
