"""What every sink has in common: it is a copy, so its failure costs one warning and never the run.

``metrics.jsonl`` and ``rollouts.jsonl`` are the record; what a sink lost can be read there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from sota_grpo.config import SECRETS, Config
from sota_grpo.text import sentence

SAMPLES_EVERY = 10  # steps between two tables of samples: each is a file of its own

SECRET_NAMES = tuple(name.rpartition(".")[2] for name in SECRETS)
_log = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """A place that gets a copy of what the run log writes. ``close`` is idempotent."""

    def rewind(self, first_step: int) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, exit_code: int = 0) -> None: ...


class CopySink:
    """Base of the sinks: whatever is raised in a copy ends the copy with one warning.

    A subclass says by which ``option`` of ``logging`` it is asked for, and writes ``from_config``, ``_write``,
    ``_write_samples``, ``_finish`` and, where it can take back what it was sent, ``_rewind``; the last four may raise
    what they like.

    Args:
        samples_every: steps between two tables of samples.

    Attributes:
        label: name of the place, for messages.
        option: of ``logging``; its package and its extra are called so too, and its default is off.
        may_be_missing: values of the option with which a run goes on where the package is not installed.
        active: whether anything is still sent.

    >>> class Full(CopySink):
    ...     def _write(self, step, values): raise OSError("disk full")
    >>> sink = Full(); sink.log(0, {"reward": 1.0}); sink.active
    False
    """

    label = "The copy"
    option = ""
    may_be_missing: tuple[Any, ...] = ()

    def __init__(self, samples_every: int = SAMPLES_EVERY):
        self.active = True
        self._samples_every = samples_every

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
        if rows and step % self._samples_every == 0:
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
            _log.warning("%s stopped (%s); metrics.jsonl stays the whole record.", self.label, sentence(error))

    def _rewind(self, first_step: int) -> None:
        """Nothing, where steps may be written twice."""

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    def _finish(self, exit_code: int) -> None:
        raise NotImplementedError


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested plain values in which keys and tokens are starred: a config that leaves the machine.

    >>> without_secrets({"engine": {"url": "http://h:1", "api_key": "abc"}, "seed": 1})
    {'engine': {'url': 'http://h:1', 'api_key': '***'}, 'seed': 1}
    """
    return {name: _starred(name, value) for name, value in config.items()}


def _starred(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return "***" if value is not None and name in SECRET_NAMES else value
