"""What a run left in its directory, for people who go on in Python."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError
from sota_grpo.run_record import (
    CONFIG_FILE,
    EVALUATED,
    METRICS_FILE,
    ROLLOUTS_FILE,
    read_config,
    read_evaluations,
    read_record,
    read_rows,
)

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ENDS = 10  # most turns whose mean stands for the beginning and the end of a run


class Result:
    """A run: its metrics, its samples, its model. What :func:`sota_grpo.train` returns.

    Any run directory will do: of the scripts, of a run that was interrupted, or of one that is training now. Files are
    read when they are asked for, each time anew, but for the model and its tokenizer, which are loaded once.

    Args:
        run_dir: where the run is.

    Attributes:
        run_dir: the same, as a path.

    Raises:
        UserError: there is no run.

    Example::

        result = Result("outputs/2026-01-31/10-00-00")
        result.metrics["reward"].plot()
        result.evaluations["eval/accuracy"]
        result.model.generate(...)
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        if not (self.run_dir / METRICS_FILE).is_file():
            raise UserError(f"There is no run in {self.run_dir} ({METRICS_FILE} is missing).")

    @property
    def metrics(self) -> DataFrame:
        """A row for each turn, under its number ``step``; the columns are explained in docs/logging.md.

        NaN where a quantity could not be measured.
        """
        return _frame([row for row in read_rows(self.run_dir / METRICS_FILE) if EVALUATED not in row])

    @property
    def evaluations(self) -> DataFrame:
        """A row for each evaluation on held-out problems; ``step`` is the number of turns done before."""
        return _frame(read_evaluations(self.run_dir))

    @property
    def rollouts(self) -> DataFrame:
        """The best and the worst response of each group, with prompt, reward and reward terms, under its ``step``."""
        return _frame(read_rows(self.run_dir / ROLLOUTS_FILE))

    @property
    def config(self) -> dict[str, Any]:
        """The options of the run, all of them, as nested dicts."""
        self._file(CONFIG_FILE, "it has not begun to train")
        return read_config(self.run_dir)

    @property
    def finished(self) -> bool:
        """Whether the run has done all its turns."""
        return bool((read_record(self.run_dir) or {}).get("finished"))

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model (an adapter is merged), as transformers loads it: on the CPU, in the dtype it was saved in.

        Raises:
            UserError: the run has written none.
        """
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._hf(), trust_remote_code=self._trusts_remote_code())

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, chat template included.

        Raises:
            UserError: the run has written none.
        """
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._hf(), trust_remote_code=self._trusts_remote_code())

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the report, one HTML file; see ``sota-grpo report``.

        Args:
            out: the file; None is ``report.html`` in the run directory.

        Returns:
            Its path.
        """
        from sota_grpo.report import write_report

        return write_report([self.run_dir], Path(out) if out is not None else self.run_dir / "report.html")

    def __repr__(self) -> str:
        metrics, evaluations = self.metrics, self.evaluations
        ending = "" if self.finished else ", unfinished"
        lines = [f"Result({str(self.run_dir)!r})", f"turns      {len(metrics)}{ending}"]
        if "reward" in metrics:
            count = max(1, min(_ENDS, len(metrics) // 2))
            first, last = metrics["reward"].head(count).mean(), metrics["reward"].tail(count).mean()
            ends = "turn" if count == 1 else f"{count} turns"
            lines.append(f"reward     {first:.3g} -> {last:.3g} (first and last {ends})")
        if len(evaluations):
            steps, accuracy = evaluations.index, 100 * evaluations[EVALUATED]
            shown = " -> ".join(f"{accuracy.iloc[i]:.1f} %" for i in ((0, -1) if len(steps) > 1 else (0,)))
            problems = int(evaluations["eval/num_samples"].iloc[-1])
            lines.append(f"held out   {shown} right of {problems} problems, greedy")
        if (self.run_dir / "hf").is_dir():
            lines.append(f"model      {self.run_dir / 'hf'}")
        return "\n  ".join(lines)

    def _file(self, name: str, reason: str) -> Path:
        path = self.run_dir / name
        if not path.exists():
            raise UserError(f"The run in {self.run_dir} has no {name}: {reason}.")
        return path

    def _hf(self) -> Path:
        return self._file("hf", "it is written at the end of a run, unless train.export_hf=false")

    def _trusts_remote_code(self) -> bool:
        return bool(self.config["model"]["trust_remote_code"])


def _frame(rows: list[dict[str, Any]]) -> DataFrame:
    import pandas

    frame = pandas.DataFrame(rows, columns=None if rows else ["step"])
    return frame.set_index("step")
