"""``debug_logs/``: a few completions of every turn, written out for people, with the breakdown of their reward."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from sota_grpo.errors import RunFailed
from sota_grpo.text import one_line, readable

DEBUG_FOLDER = "debug_logs"
Row = Mapping[str, Any]

_RULE = "=" * 100
_ROUNDING = 5e-5  # of rewards, which are kept in float32, and of the four digits written here


class ExamineLog:
    """Appends completions to ``<run_dir>/debug_logs/grpo_debug_<UTC time of the first write>.txt``.

    Every start of a run writes a file of its own; the turns that a resumed run does again stand in both. A turn is
    flushed whole. Model text cannot drive the terminal that shows it, nor pass for a line of the log: every character
    without a picture is escaped, every line of it begins with a bar, and none is wrapped.

    Args:
        run_dir: of the run; nothing is created in it before the first write.
        num_examine: completions per turn; 0 writes nothing at all.
        term_weights: of the task; a term that is not in it (a penalty) weighs 1.
        clock: the time of day.

    >>> import tempfile
    >>> row = {"group_id": 7, "sample_id": 0, "query": "9 * 2?", "answer": "#### 18", "response": "#### 18",
    ...        "reward": 1.0, "reward_terms": {"correct": 1.0}, "advantage": 0.5, "success": True}
    >>> with ExamineLog(tempfile.mkdtemp(), 2, {"correct": 1.0}) as log:
    ...     log.write(3, [row])
    >>> [line for line in log.path.read_text().splitlines() if "correct" in line or "turn" in line]
    ['turn 3, group 7, sample 0: best of 1', 'correct                 1.0000 x   1.0000 =   1.0000']
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        num_examine: int,
        term_weights: Mapping[str, float],
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.folder, self.num_examine = Path(run_dir) / DEBUG_FOLDER, num_examine
        self.path: Path | None = None  # until the first write
        self._term_weights, self._clock = dict(term_weights), clock
        self._file: TextIO | None = None

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Append ``num_examine`` of the rows (:func:`sota_grpo.recording.step_log.rollout_rows`) of turn ``step``.

        Raises:
            RunFailed: the file cannot be written.
        """
        if not self.num_examine or not rows:
            return
        picked = pick(rows, self.num_examine, step)
        text = "".join(described(step, row, why, self._term_weights) for why, row in picked)
        try:
            file = self._opened()
            file.write(text)
            file.flush()
        except OSError as error:
            raise RunFailed(
                f"{self.path or self.folder} cannot be written ({error.strerror}); free space there, or set "
                "logging.num_examine=0; train.resume=auto then continues from the last checkpoint."
            ) from error

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> ExamineLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> TextIO:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path = self.folder / f"grpo_debug_{self._clock():%Y%m%d_%H%M%S}.txt"
            self._file = self.path.open("a", encoding="utf-8")
        return self._file


def pick(rows: Sequence[Row], count: int, step: int) -> list[tuple[str, Row]]:
    """``count`` rows and why each was picked: the best, the worst, then others at random, as far as there are any.

    Chance decides among equals too, so that it is not always the first group that is shown. It depends on ``step``
    alone: a turn that is done again shows the same.

    >>> rows = [{"sample_id": i, "reward": reward} for i, reward in enumerate([0.5, 1.0, 0.0, 0.5])]
    >>> [(why, row["sample_id"]) for why, row in pick(rows, 2, step=0)]
    [('best of 4', 1), ('worst of 4', 2)]
    """
    rest = random.Random(step).sample(list(rows), len(rows))
    picked: list[tuple[str, Row]] = []
    for why, choose in (("best", max), ("worst", min)):
        if rest and len(picked) < count:
            row = choose(rest, key=lambda row: row["reward"])
            rest = [other for other in rest if other is not row]
            picked.append((f"{why} of {len(rows)}", row))
    return picked + [(f"drawn at random of {len(rows)}", row) for row in rest[: count - len(picked)]]


def described(step: int, row: Row, why: str, term_weights: Mapping[str, float]) -> str:
    """One completion with all that is known of it, for people."""
    tokens = f", {row['response_tokens']} tokens" if "response_tokens" in row else ""
    cut = ", cut for length" if row.get("truncated") else ""
    parts = [
        f"{_RULE}\nturn {step}, group {row['group_id']}, sample {row['sample_id']}: {why}\n{_RULE}",
        f"question\n{_quoted(row['query'])}",
        f"gold answer\n{_quoted(row['answer'])}",
        f"completion{tokens}{cut}\n{_quoted(row['response'])}",
        "reward\n" + "\n".join(_reward_lines(row, term_weights)),
        "\n".join(_facts(row)),
    ]
    return "\n\n".join(parts) + "\n\n\n"


def _quoted(text: str) -> str:
    return "\n".join(f"  | {line}" for line in readable(text).split("\n"))


def _line(value: object) -> str:
    return one_line(str(value), limit=None)


def _reward_lines(row: Row, term_weights: Mapping[str, float]) -> list[str]:
    """A line per term: value, weight, contribution; then what else changed the reward, and the total."""
    terms = dict.fromkeys(term_weights) | dict(row["reward_terms"])
    lines, total = [], 0.0
    for name, value in terms.items():
        weight = term_weights.get(name, 1.0)
        if value is None:
            lines.append(f"{_line(name):<20}  does not apply")
            continue
        total += weight * value
        lines.append(f"{_line(name):<20}  {value:8.4f} x {weight:8.4f} = {weight * value:8.4f}")
    if abs(row["reward"] - total) > _ROUNDING * max(1.0, abs(total)):
        lines.append(f"{'(other)':<20}  {'':>22}{row['reward'] - total:8.4f}")
    return [*lines, f"{'total':<20}  {'':>22}{row['reward']:8.4f}"]


def _facts(row: Row) -> list[str]:
    lines = [f"advantage {row['advantage']:.4f}"]
    if "success" in row:
        lines.append(f"success {'yes' if row['success'] else 'no'}")
    if "policy_version" in row:
        lines.append(f"policy version {row['policy_version']}")
    return lines + [f"grader: {_line(name)} = {_line(value)}" for name, value in row.get("reward_info", {}).items()]
