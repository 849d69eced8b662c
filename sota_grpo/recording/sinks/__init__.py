"""Where metrics go besides the run directory: a class for each in a file of this folder, asked for by its option."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from sota_grpo.config import Config, LoggingConfig
from sota_grpo.config.validators import ConfigError
from sota_grpo.recording.sinks.base import CopySink, Sink

__all__ = ["SINKS", "CopySink", "Sink", "make_sinks", "require_sinks"]

_files = [vars(import_module(f"{__name__}.{module.name}")) for module in iter_modules(__path__)]
_classes = [value for file in _files for value in file.values() if isinstance(value, type)]
#: By their options in ``logging``.
SINKS: dict[str, type[CopySink]] = {one.option: one for one in _classes if issubclass(one, CopySink) and one.option}
_log = logging.getLogger(__name__)


def require_sinks(config: Config) -> None:
    """What was asked for by name must be there.

    Raises:
        ConfigError: it is not installed.
    """
    for sink, missing in _asked(config):
        if missing is not None and getattr(config.logging, sink.option) not in sink.may_be_missing:
            raise ConfigError(missing)


def make_sinks(config: Config, run_dir: Path) -> list[Sink]:
    """The sinks that the config asks for; without those that are not installed, of which a warning says so.

    >>> make_sinks(Config(), Path("outputs"))
    []
    """
    sinks: list[Sink] = []
    for sink, missing in _asked(config):
        if missing is None:
            sinks.append(sink.from_config(config, run_dir))
        else:
            _log.warning("%s", missing)
    return sinks


def _asked(config: Config) -> Iterator[tuple[type[CopySink], str | None]]:
    """Each sink whose option is not at its default, with a sentence where its package is not installed."""
    for option, sink in SINKS.items():
        value, off = (str(getattr(part, option)).lower() for part in (config.logging, LoggingConfig()))
        if value != off:
            missing = (
                f"logging.{option}={value} needs {option}, which is not installed: "
                f"`pip install 'sota-grpo[{option}]'`, or set logging.{option}={off}."
            )
            yield sink, missing if find_spec(option) is None else None
