"""TensorBoard: metrics as curves, samples as text, the config in the HParams tab, in event files beside the run."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sota_grpo.config import Config
from sota_grpo.config.spelling import flat
from sota_grpo.recording.sinks import CopySink
from sota_grpo.text import readable

FOLDER = "tensorboard"
#: What the HParams tab compares runs by.
JUDGED_BY = ("eval/accuracy", "reward")

_TEXTS = 8  # responses shown of a step; rollouts.jsonl has all that were kept
_FLUSH_S = 10  # TensorBoard reloads every 30 s by itself


class TensorBoardSink(CopySink):
    """Copies metrics, samples and the config to event files in ``tensorboard/`` of the run directory.

    A resumed run begins a new event file that says from which step on it counts; TensorBoard then hides what older
    files have of those steps. Values are stored as 32-bit floats, which is what TensorBoard shows.

    Args:
        config: plain nested values; its leaves become hyperparameters, without keys and tokens.
    """

    label, package = "TensorBoard", "tensorboard"

    def __init__(self, run_dir: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None):
        super().__init__()
        self._dir = Path(run_dir) / FOLDER
        self._config = config or {}
        self._first_step: int | None = None
        self._open: Any = None

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> TensorBoardSink:
        return cls(run_dir, config=asdict(config))

    def _rewind(self, first_step: int) -> None:
        self._close()
        self._first_step = first_step  # the next file is the one that tells TensorBoard

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "\n\n".join(as_markdown(row) for row in rows[:_TEXTS])
        self._writer.add_text("samples", text, step)

    def _finish(self, exit_code: int) -> None:
        if exit_code == 0:  # a session without an end is one that goes on or died
            self._writer.file_writer.add_summary(self._hyperparameters()[2])
        self._close()

    def _close(self) -> None:
        writer, self._open = self._open, None
        if writer is not None:
            writer.close()

    @property
    def _writer(self) -> Any:
        """The writer of this process' event file, which is made when there is something to write."""
        if self._open is None:
            from torch.utils.tensorboard import SummaryWriter

            self._open = SummaryWriter(str(self._dir), purge_step=self._first_step, flush_secs=_FLUSH_S)
            experiment, start, _ = self._hyperparameters()
            # not add_hparams, which makes a run of its own, named by the clock, beside this one
            self._open.file_writer.add_summary(experiment)
            self._open.file_writer.add_summary(start)
        return self._open

    def _hyperparameters(self) -> tuple[Any, Any, Any]:
        """What the HParams tab reads: the experiment, the start of this session, its end."""
        from torch.utils.tensorboard.summary import hparams

        values = {name: value for name, value in flat(self._config).items() if value is not None}
        plain = {name: one if isinstance(one, (bool, int, float, str)) else str(one) for name, one in values.items()}
        return hparams(plain, dict.fromkeys(JUDGED_BY, 0.0))


def as_markdown(row: Mapping[str, Any]) -> str:
    """A row of ``rollouts.jsonl`` as TensorBoard shows it: a heading, then prompt and response as they are, as code.

    >>> row = {"group_id": 7, "sample_id": 1, "reward": 1.0, "advantage": 0.5, "truncated": True, "response_tokens": 2}
    >>> print(as_markdown(row | {"prompt": "1 + 1?", "response": "*2*"}))
    **reward 1** | advantage 0.5 | 2 tokens, cut | group 7, sample 1
    <BLANKLINE>
        1 + 1?
    <BLANKLINE>
    Response:
    <BLANKLINE>
        *2*
    """

    def code(text: str) -> str:
        return textwrap.indent(readable(text), "    ", lambda line: True)

    length = f"{row['response_tokens']} tokens" + (", cut" if row["truncated"] else "")
    head = f"**reward {row['reward']:.4g}** | advantage {row['advantage']:.3g} | {length}"
    head += f" | group {row['group_id']}, sample {row['sample_id']}"
    return f"{head}\n\n{code(row['prompt'])}\n\nResponse:\n\n{code(row['response'])}"
