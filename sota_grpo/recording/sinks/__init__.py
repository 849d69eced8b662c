"""Where metrics go besides the run directory: a class for each in a file of this folder, asked for by its option.

A sink is a copy, so its failure costs one warning and never the run. ``metrics.jsonl`` and ``rollouts.jsonl`` are the
record; what a sink lost can be read there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Self

from sota_grpo.config import Config, LoggingConfig
from sota_grpo.config.validators import ConfigError
from sota_grpo.plugins import Registry
from sota_grpo.text import sentence

logger = logging.getLogger(__name__)


class CopySink:
    """Base of the sinks: whatever is raised in a copy ends the copy with one warning.

    A subclass says by which ``option`` of ``logging`` it is asked for, and writes ``from_config`` and what it can do of
    ``_write``, ``_write_samples``, ``_rewind`` (take back what it was sent) and ``_finish``, which may raise anything.

    >>> class Full(CopySink):
    ...     def _write(self, step, values): raise OSError("disk full")
    >>> sink = Full(); sink.log(0, {"reward": 1.0}); sink.active
    False
    """

    label = "The copy"  # name of the place, for messages
    option = ""  # of ``logging``; its package and its extra are called so too, and its default is off
    may_be_missing: tuple[Any, ...] = ()  # values of the option with which a run goes on without the package
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


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
#: By their options in ``logging``.
SINKS: dict[str, type[CopySink]] = {sink.option: sink for sink in CopySink.__subclasses__()}
#: Those of installed packages, by the names in ``logging.sinks``.
INSTALLED: Registry[type[CopySink]] = Registry("sota_grpo.sinks", {})


def require_sinks(config: Config) -> None:
    """What was asked for by name must be there; else a ``ConfigError``."""
    for name in config.logging.sinks:
        if name not in INSTALLED:
            raise ConfigError(
                f"logging.sinks={name}: no installed package has the entry point {name} of sota_grpo.sinks."
            )
    for sink, missing in _asked(config):
        if missing is not None and getattr(config.logging, sink.option) not in sink.may_be_missing:
            raise ConfigError(missing)


def make_sinks(config: Config, run_dir: Path) -> list[CopySink]:
    """The sinks that the config asks for; without those that are not installed, of which a warning says so."""
    sinks: list[CopySink] = []
    for sink, missing in _asked(config):
        if missing is None:
            sinks.append(sink.from_config(config, run_dir))
        else:
            logger.warning("%s", missing)
    return sinks + [INSTALLED[name].from_config(config, run_dir) for name in config.logging.sinks]


def _asked(config: Config) -> Iterator[tuple[type[CopySink], str | None]]:
    """Each sink whose option is not at its default, with a sentence where its package is not installed."""
    for option, sink in SINKS.items():
        value, off = (str(getattr(section, option)).lower() for section in (config.logging, LoggingConfig()))
        if value != off:
            missing = (
                f"logging.{option}={value} needs {option}, which is not installed: "
                f"`pip install 'sota-grpo[{option}]'`, or set logging.{option}={off}."
            )
            yield sink, missing if find_spec(option) is None else None
