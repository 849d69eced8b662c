"""Where metrics go besides the run directory: Weights & Biases (``logging.wandb``), and those of ``logging.sinks``.

A sink is a copy, so its failure costs one warning and never the run. ``metrics.jsonl`` and ``rollouts.jsonl`` are the
record; what a sink lost can be read there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from sota_grpo.config import Config
from sota_grpo.config.validators import ConfigError
from sota_grpo.plugins import Registry
from sota_grpo.text import sentence

logger = logging.getLogger(__name__)


class CopySink:
    """Base of the sinks: whatever is raised in a copy ends the copy with one warning.

    A subclass writes ``from_config``, ``_write``, ``_write_samples``, ``_finish`` and, where it can take back what it
    was sent, ``_rewind``; the last four may raise what they like.

    >>> class Full(CopySink):
    ...     def _write(self, step, values): raise OSError("disk full")
    >>> sink = Full(); sink.log(0, {"reward": 1.0}); sink.active
    False
    """

    label = "The copy"  # name of the place, for messages
    package: str | None = None  # that it needs; its extra is called so too
    samples_every = 10  # steps between two tables of samples, each of which is a file of its own

    def __init__(self) -> None:
        self.active = True  # whether anything is still sent

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> Self:
        """The sink of a run; its package is there."""
        raise NotImplementedError

    def rewind(self, first_step: int) -> None:
        """The run writes ``first_step`` and later steps (again); what was sent of them is out of date."""
        self._attempt(lambda: self._rewind(first_step))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send the measured values of one step; None was not measured and is left out."""
        values = {name: value for name, value in metrics.items() if value is not None}
        self._attempt(lambda: self._write(step, values))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the rows of ``rollouts.jsonl`` of every ``samples_every``-th step."""
        if rows and step % self.samples_every == 0:
            self._attempt(lambda: self._write_samples(step, rows))

    def close(self, exit_code: int = 0) -> None:
        """Write out what is left; ``exit_code`` says whether the run succeeded (0)."""
        self._attempt(lambda: self._finish(exit_code))
        self.active = False

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self.active:
            return
        try:
            action()
        except Exception as error:  # services and disks raise anything, and a copy is worth no run
            self.active = False
            logger.warning("%s stopped (%s); metrics.jsonl stays the whole record.", self.label, sentence(error))

    def _rewind(self, first_step: int) -> None: ...

    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def _finish(self, exit_code: int) -> None: ...


#: By the names in ``logging.sinks``; and ``wandb``, which ``logging.wandb`` asks for.
SINKS: Registry[type[CopySink]] = Registry(
    "sota_grpo.sinks",
    {
        "wandb": "sota_grpo.recording.sinks.wandb_sink:WandbSink",
        "tensorboard": "sota_grpo.recording.sinks.tensorboard_sink:TensorBoardSink",
    },
)


def require_sinks(config: Config) -> None:
    """What was asked for by name must be there; offline, W&B may be missing.

    Raises:
        ConfigError: it is not installed.
    """
    for name in config.logging.sinks:
        if name not in SINKS or name == "wandb":
            raise ConfigError(
                f"logging.sinks={name}: no installed package has the entry point {name} of sota_grpo.sinks; there are "
                f"{', '.join(one for one in SINKS if one != 'wandb')}, and W&B is logging.wandb=online."
            )
    for name, _, missing in _asked(config):
        if missing is not None and (name, config.logging.wandb) != ("wandb", "offline"):
            raise ConfigError(missing)


def make_sinks(config: Config, run_dir: Path) -> list[CopySink]:
    """The sinks that the config asks for; without those that are not installed, of which a warning says so."""
    sinks: list[CopySink] = []
    for _, sink, missing in _asked(config):
        if missing is None:
            sinks.append(sink.from_config(config, run_dir))
        else:
            logger.warning("%s", missing)
    return sinks


def _asked(config: Config) -> Iterator[tuple[str, type[CopySink], str | None]]:
    """Name and class of each sink that is on, with a sentence where its package is not installed."""
    mode = config.logging.wandb
    asked = [("wandb", f"logging.wandb={mode}", "set logging.wandb=disabled")] if mode != "disabled" else []
    asked += [(name, f"logging.sinks=[{name}]", "leave it out") for name in dict.fromkeys(config.logging.sinks)]
    for name, given, fix in asked:
        sink, missing = SINKS[name], ""
        if sink.package is not None and find_spec(sink.package) is None:
            package = f"`pip install 'sota-grpo[{sink.package}]'`"
            missing = f"{given} needs {sink.package}, which is not installed: {package}, or {fix}."
        yield name, sink, missing or None
