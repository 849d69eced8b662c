"""Where metrics go besides the run directory: a small protocol, and Weights & Biases behind it.

A sink is a copy. ``metrics.jsonl`` and ``rollouts.jsonl`` are the record, so a sink that fails is dropped with one
warning and training goes on.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from sota_grpo.validators import ConfigError

MODES = ("online", "offline", "disabled")
RUN_ID_FILE = "wandb_run_id.txt"

_log = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 120.0  # an upload that never ends must not keep a finished run alive


@runtime_checkable
class Sink(Protocol):
    """A place that gets a copy of what the run log writes. ``close`` is idempotent."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, exit_code: int = 0) -> None: ...


def has_api_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether W&B can log in without asking: a key or token file in the environment, or a netrc entry for its host."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    paths = [environ["NETRC"]] if environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    for path in map(os.path.expanduser, paths):
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):  # a missing, unreadable or broken file holds no usable key
            continue
        if entry and entry[2]:
            return True
    return False


class WandbSink:
    """Copies metrics and a table of samples to one W&B run, which a resumed run directory continues.

    Never prompts. ``online`` without a key, or without an answer from the server, becomes ``offline``; what is recorded
    offline is uploaded later with ``wandb sync``. Steps are W&B's x-axis through their own field, because a resumed run
    writes some steps again, which W&B's own counter would refuse.

    Args:
        mode: ``online``, ``offline`` or ``disabled``. The attribute ``mode`` afterwards is the mode in effect.
        project: W&B project.
        run_dir: the run directory; it keeps the run's id and W&B's files.
        name: name of the run; None takes the run directory's.
        tags: W&B tags.
        config: plain nested values, shown beside the run.
        samples_every: steps between tables of samples, each of which W&B stores as a file.

    Raises:
        ConfigError: the mode is unknown, or ``online`` was asked for and wandb is not installed.

    >>> sink = WandbSink("disabled", project="demo", run_dir="outputs")
    >>> sink.log(0, {"reward": 1.0}); sink.close(); sink.mode
    'disabled'
    """

    def __init__(
        self,
        mode: str,
        *,
        project: str,
        run_dir: str | os.PathLike[str],
        name: str | None = None,
        tags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        samples_every: int = 10,
    ):
        if mode not in MODES:
            raise ConfigError(f"logging.wandb={mode} is not one of {', '.join(MODES)}.")
        self.mode = mode
        self._dir = Path(run_dir)
        self._samples_every = samples_every
        self._run: Any = None
        if mode == "disabled":
            return
        wandb = _import_wandb(mode)
        if wandb is None:
            self.mode = "disabled"
            return
        self._wandb = wandb
        if mode == "online" and not has_api_key():
            self._go_offline("no API key was found (WANDB_API_KEY or netrc)")
        options = {"project": project, "name": name or self._dir.resolve().name, "tags": list(tags)}
        self._start(options | {"config": dict(config or {})})

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send the measured values of one step."""
        self._send({"step": step, **{name: value for name, value in metrics.items() if value is not None}})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the rows of ``rollouts.jsonl`` of every ``samples_every``-th step as one table."""
        if self._run is None or not rows or step % self._samples_every:
            return
        columns = list(rows[0])
        try:
            table = self._wandb.Table(columns=columns, data=[[_cell(row[name]) for name in columns] for row in rows])
        except Exception as error:  # wandb checks types its own way; a copy may fail, training may not
            self._give_up(error)
            return
        self._send({"step": step, "samples": table})

    def close(self, exit_code: int = 0) -> None:
        """Finish the W&B run as succeeded (0) or failed; waits at most two minutes for its upload."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:  # the run is over and its record is on disk: nothing is left to protect by raising
            _log.warning("W&B could not finish its run (%s); metrics.jsonl is complete.", _sentence(error))

    def _start(self, options: dict[str, Any]) -> None:
        settings = self._wandb.Settings(silent=True, console="off", finish_timeout=_FINISH_TIMEOUT_S)
        place = {"dir": str(self._dir), "id": self._run_id(), "resume": "allow", "settings": settings}
        try:
            self._run = self._wandb.init(mode=self.mode, **place, **options)
        except Exception as error:  # a dead network or a refused key raises many types, none of them worth a run
            if self.mode == "offline":
                self._give_up(error)
                return
            self._go_offline(f"the server could not be used ({_sentence(error)})")
            self._start(options)
            return
        self._run.define_metric("*", step_metric="step")
        if self.mode == "online":
            _log.info("W&B run: %s", self._run.url)

    def _go_offline(self, why: str) -> None:
        self.mode = "offline"
        pattern = shlex.quote(str(self._dir / "wandb")) + "/offline-run-*"
        _log.warning("W&B records offline, because %s; upload later with: wandb sync %s", why, pattern)

    def _run_id(self) -> str:
        path = self._dir / RUN_ID_FILE
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if not known:
            known = secrets.token_hex(4)
            self._dir.mkdir(parents=True, exist_ok=True)
            path.write_text(known + "\n", encoding="utf-8")
        return known

    def _send(self, values: dict[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(values)
        except Exception as error:  # its service process may be gone, and it raises its own and built-in types alike
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.mode, self._run = "disabled", None
        _log.warning("W&B stopped (%s); training goes on and metrics.jsonl stays complete.", _sentence(error))


def _import_wandb(mode: str) -> ModuleType | None:
    try:
        import wandb
    except ImportError as error:  # an optional extra: its absence is the user's choice unless they asked to be online
        install = "pip install 'sota-grpo[wandb]'"
        if mode == "online":
            raise ConfigError(f"logging.wandb=online needs wandb: {install}, or set logging.wandb=disabled.") from error
        _log.warning("W&B is off, because wandb is not installed: %s.", install)
        return None
    return wandb


def _cell(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
