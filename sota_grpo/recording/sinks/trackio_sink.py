"""Trackio: metrics as curves, samples as text and the config in a local database that `trackio show` serves."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from sota_grpo.config import Config
from sota_grpo.recording.run_files import read_rows
from sota_grpo.recording.sinks import CopySink
from sota_grpo.recording.sinks.tensorboard_sink import as_markdown

RUN_ID_FILE = "trackio_run_id.txt"
_TEXTS = 8  # responses shown of a step; rollouts.jsonl has all that were kept


class TrackioSink(CopySink):
    """Copies metrics, samples and the config to one Trackio run, which a resumed run directory replaces by its own.

    Trackio cannot take points back, so a resumed run deletes what it had there and writes it again from
    ``metrics.jsonl``: no step stands there twice. A run that failed ends with an alert.

    Args:
        run_dir: the run directory; it keeps the run's id.
        name: name of the run; None takes the last two folders of the run directory (``DATE/TIME``, ``TIME/JOB``).
        config: plain nested values, shown beside the run without keys and tokens.
    """

    label, option = "Trackio", "trackio"

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._dir, self._project = Path(run_dir), project
        self._name = name or "/".join(self._dir.resolve().parts[-2:])
        self._config = config or {}
        self._open: Any = None

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> TrackioSink:
        options = config.logging
        return cls(run_dir, project=options.project, name=options.run_name, config=asdict(config))

    def _rewind(self, first_step: int) -> None:
        from trackio.api import Run

        path = self._dir / RUN_ID_FILE
        if path.exists():
            with _quiet():
                Run(self._project, self._name, path.read_text(encoding="utf-8").strip()).delete()
        for row in read_rows(self._dir / "metrics.jsonl"):  # it ends before first_step
            self._write(row["step"], {name: value for name, value in row.items() if _is_number(name, value)})
        for step, rows in groupby(read_rows(self._dir / "rollouts.jsonl"), key=lambda row: row["step"]):
            if step % self.samples_every == 0:
                self._write_samples(step, list(rows))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        text = "\n\n---\n\n".join(as_markdown(row) for row in rows[:_TEXTS])
        self._run.log({"samples": trackio.Markdown(text)}, step=step)

    def _finish(self, exit_code: int) -> None:
        import trackio

        if self._open is None:
            return
        with _quiet():
            if exit_code:
                self._run.alert("The run failed", f"exit code {exit_code}", level=trackio.AlertLevel.ERROR)
            trackio.finish()

    @property
    def _run(self) -> Any:
        """Trackio's run, which is made when there is something to write."""
        if self._open is None:
            import trackio

            options: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
            with _quiet():
                self._open = trackio.init(self._project, self._name, config=self._config, resume="never", **options)
            (self._dir / RUN_ID_FILE).write_text(f"{self._open.id}\n", encoding="utf-8")
        return self._open


def _is_number(name: str, value: Any) -> bool:
    return name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Trackio prints what it does."""
    return contextlib.redirect_stdout(io.StringIO())
