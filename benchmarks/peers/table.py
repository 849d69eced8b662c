"""Results as text: what was measured, beside what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.host import LEARN, STEP
from benchmarks.peers.results import WHOLE, CaseResult, Measured
from benchmarks.peers.systems import OURS, OURS_VLLM, PHASES, TORCHRL, TORCHRL_AS_IT_COMES, TRL, TRL_DEFAULT_BATCH
from benchmarks.peers.work import BASE, LONG, VOCAB

MEMORY = "memory"
NONE = "-"
SETTINGS = {TRL: (TRL, TRL_DEFAULT_BATCH)}  # of one peer, the faster of which counts
SAME_WORK = 1e-4  # largest relative distance of two gradients of equal work


@dataclass(frozen=True)
class Promise:
    """``system`` is at least ``bound`` times better than ``peer`` at ``what`` (``learn``, ``whole``, ``memory``).

    Where a peer was measured in several settings, the faster one counts.
    """

    what: str
    case: str
    peer: str
    system: str
    bound: float

    def ratio(self, results: Sequence[CaseResult]) -> float | None:
        """What was measured; None where it was not."""
        result = self._case(results)
        if result is None:
            return None
        if self.what == MEMORY:
            return result.memory_ratio(self.peer, self.system)
        measured = [result.ratio(self.what, peer, self.system) for peer in SETTINGS.get(self.peer, (self.peer,))]
        return min((ratio for ratio in measured if ratio is not None), default=None)

    def _case(self, results: Sequence[CaseResult]) -> CaseResult | None:
        return next((result for result in results if result.case.name == self.case), None)

    def is_same_work(self, results: Sequence[CaseResult]) -> bool:
        """Whether no gradient of either is known to differ by more than rounding."""
        result = self._case(results)
        systems = () if result is None else (result.systems.get(name) for name in (self.peer, self.system))
        gaps = [measured.gradient_distance for measured in systems if measured is not None]
        return all(gap is None or gap <= SAME_WORK for gap in gaps)

    def line(self, results: Sequence[CaseResult]) -> str:
        """The verdict in one line."""
        value = self.ratio(results)
        verdict = "not measured" if value is None else "holds" if value >= self.bound else "FALLS SHORT"
        verdict = verdict if self.is_same_work(results) else "OTHER WORK"
        measured = NONE if value is None else f"{value:.2f}x"
        kind = {"learn": "learn phase", WHOLE: "whole step", MEMORY: "learner's peak memory"}[self.what]
        return f"| {kind}, {self.case}: {self.system} against {self.peer} | {self.bound:g}x | {measured} | {verdict} |"


PROMISES = (
    Promise("learn", BASE.name, TRL, OURS, 3.5),
    Promise("learn", LONG.name, TRL, OURS, 9.0),
    Promise("learn", BASE.name, TORCHRL, OURS, 10.0),
    Promise("learn", BASE.name, TORCHRL_AS_IT_COMES, OURS, 10.0),
    Promise(WHOLE, BASE.name, TRL, OURS_VLLM, 2.5),
    Promise(WHOLE, LONG.name, TRL, OURS_VLLM, 5.0),
    Promise(WHOLE, BASE.name, TRL, OURS, 1.7),
    Promise(WHOLE, LONG.name, TRL, OURS, 3.0),
    Promise(MEMORY, VOCAB.name, TRL, OURS, 3.0),
    Promise(MEMORY, VOCAB.name, TRL_DEFAULT_BATCH, OURS, 3.0),  # with TRL as frugal as its own defaults
)


def case_tables(result: CaseResult) -> str:
    """Both tables of a case: whole steps by phase, and the learn phase by itself."""
    case = result.case
    head = (
        f"### {case.name}: {case.prompts} prompts of about {case.prompt} tokens x {case.group} responses of "
        f"{case.response}, vocabulary {case.vocab:,}"
    )
    parts = [head, _steps(result), _learning(result)]
    return "\n\n".join(part for part in parts if part)


def _steps(result: CaseResult) -> str:
    header = ("whole step, s", *PHASES, "rest", WHOLE, "x faster than TRL", "x floor", "peak MB", "runs")
    rows = [_step_row(result, name, measured) for name, measured in result.systems.items() if STEP in measured.asked]
    if not rows:
        return ""
    floor = [_number(result.floor_of(phase)) if phase in ("generate", "ref", "learn") else NONE for phase in PHASES]
    rates = " / ".join(_rate(result.floor_of(name)) for name in ("rate_narrow", "rate_wide"))
    rows.append(["floor", *floor, NONE, _number(result.floor_of(WHOLE)), NONE, "1.0", NONE, str(len(result.floor))])
    return f"{_table(header, rows)}\n\nMatrix products ran at {rates} GFLOP/s (decoding / all else)."


def _step_row(result: CaseResult, name: str, found: Measured) -> list[str]:
    whole = found.phase(WHOLE)
    return [
        name,
        *(_number(found.phase(phase)) for phase in PHASES),
        _number(found.rest()),
        _number(whole),
        _number(result.ratio(WHOLE, TRL, name)),
        _over(whole, result.floor_of(WHOLE)),
        _megabytes(found.step_bytes),
        _runs(len(found.steps), found.failure),
    ]


def _learning(result: CaseResult) -> str:
    header = ("learn phase, s", "median", "x faster than TRL", "x floor", "peak MB", "gradient from TRL's", "runs")
    rows = [_learn_row(result, name, measured) for name, measured in result.systems.items() if LEARN in measured.asked]
    return _table(header, rows) if rows else ""


def _learn_row(result: CaseResult, name: str, found: Measured) -> list[str]:
    median = found.learn_median()
    return [
        name,
        _number(median),
        _number(result.ratio("learn", TRL, name)),
        _over(median, result.floor_of("learn")),
        _megabytes(found.learn_bytes),
        NONE if found.gradient_distance is None else f"{found.gradient_distance:.0e}",
        _runs(len(found.learn), found.failure),
    ]


def _runs(count: int, failure: str | None) -> str:
    if failure is None:
        return str(count)
    return f"{count}, then {failure}" if count else f"0: {failure}"


def promises(results: Sequence[CaseResult]) -> str:
    """Every promise with what was measured."""
    header = ("promise", "at least", "measured", "verdict")
    lines = [promise.line(results) for promise in PROMISES]
    return "\n".join([_table(header, []), *lines])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns aligned so that it reads as text too."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _over(seconds: float | None, floor: float | None) -> str:
    return NONE if seconds is None or not floor else f"{seconds / floor:.1f}"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value / 1e9:.0f}"


def _megabytes(value: int | None) -> str:
    return NONE if value is None else f"{value / 1e6:.0f}"
