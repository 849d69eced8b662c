"""Copy metrics and samples to Weights & Biases (``logging.wandb``), TensorBoard and others (``logging.sinks``).

A failing sink stops with one warning and never ends the run; ``metrics.jsonl`` and ``rollouts.jsonl`` stay complete.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Self

from sota_grpo.config import PROJECT, Config
from sota_grpo.config.validators import ConfigError
from sota_grpo.plugins import Registry
from sota_grpo.recording.machine import this_start, without_secrets
from sota_grpo.text import readable, sentence

logger = logging.getLogger(__name__)

RUN_ID_FILE = "wandb_run_id.txt"
FOLDER = "tensorboard"
_FINISH_TIMEOUT_S = 120.0  # longest wait for an upload after the run has finished
_FLUSH_S = 10  # TensorBoard reloads every 30 s


class CopySink:
    """Base class of sinks: after an exception the sink is inactive, with one warning.

    A subclass defines ``from_config``, ``_write``, ``_write_samples``, ``_finish`` and, if it can delete steps,
    ``_rewind``. All but ``from_config`` may raise any exception.

    >>> class Full(CopySink):
    ...     def _write(self, step, values): raise OSError("disk full")
    >>> sink = Full(); sink.log(0, {"reward": 1.0}); sink.active
    False
    """

    label = "The copy"  # name in messages
    package: str | None = None  # required package, also the name of the extra that installs it
    samples_every = 10  # training steps from one table of samples to the next

    def __init__(self) -> None:
        self.active = True

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> Self:
        """Create the sink of a run; called only if its package is installed."""
        raise NotImplementedError

    def rewind(self, first_step: int) -> None:
        """Delete or hide, if the sink can, the copies of ``first_step`` and later steps, which the run writes again."""
        self._attempt(lambda: self._rewind(first_step))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy the step's metrics, except those that are None."""
        values = {name: value for name, value in metrics.items() if value is not None}
        self._attempt(lambda: self._write(step, values))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Copy a step's rows of ``rollouts.jsonl``; no-op unless the step number is a multiple of ``samples_every``."""
        if rows and step % self.samples_every == 0:
            self._attempt(lambda: self._write_samples(step, rows))

    def close(self, exit_code: int = 0) -> None:
        """Finish the copy; ``exit_code`` is 0 if the run succeeded. Idempotent; later calls of the sink do nothing."""
        self._attempt(lambda: self._finish(exit_code))
        self.active = False

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self.active:
            return
        try:
            action()
        except Exception as error:  # services and disks raise anything
            self.active = False
            logger.warning("%s stopped (%s); metrics.jsonl gets all metrics.", self.label, sentence(error).rstrip("."))

    def _rewind(self, first_step: int) -> None: ...

    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def _finish(self, exit_code: int) -> None: ...


def has_api_key() -> bool:
    """Return whether W&B has credentials: a key or token file in the environment, or a password in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    from requests.utils import get_netrc_auth  # as W&B does, which brings it

    login = get_netrc_auth(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    return login is not None and bool(login[1])


class WandbSink(CopySink):
    """A sink that copies metrics, tables of samples and the config to one W&B run, which a resumed run continues.

    The constructor starts the W&B run. Without an API key or a working server, ``online`` becomes ``offline`` (see
    attribute ``mode``); upload later with ``wandb sync``. The x-axis is the metric ``step``, because W&B's own counter
    rejects the steps that a resumed run repeats.

    Args:
        run_dir: folder for the id of the W&B run and for W&B's files.
        config: nested config without keys and tokens.
        arguments: further arguments of ``wandb.init``; by default the project is ``sota_grpo``, and the last two
            folders of ``run_dir`` (``DATE/TIME``, ``TIME/JOB``) name the run.
    """

    label, package = "W&B", "wandb"

    def __init__(
        self,
        mode: str,
        *,
        run_dir: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._dir, self.mode = Path(run_dir), mode
        if mode == "online" and not has_api_key():
            self._go_offline("no API key was found (WANDB_API_KEY or netrc)")
        named = {"project": PROJECT, "name": "/".join(self._dir.resolve().parts[-2:]), "config": config or {}}
        self._attempt(lambda: self._start(named | dict(arguments or {})))

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> WandbSink:
        options = config.logging
        values = asdict(config) | {"start": this_start()}
        return cls(options.wandb, run_dir=run_dir, config=values, arguments=options.wandb_kwargs)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def _write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        def cell(value: Any) -> Any:
            if isinstance(value, Mapping):
                return json.dumps(value, sort_keys=True)
            return readable(value) if isinstance(value, str) else value

        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[cell(row[name]) for name in columns] for row in rows])
        self._run.log({"step": step, "samples": table})

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def _start(self, options: dict[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        has_secret = sys.argv != without_secrets(sys.argv)  # the command line of a user's script may have one
        signature(wandb.init).bind_partial(**options)  # a TypeError of a name that it lacks
        quiet: dict[str, Any] = {"silent": True, "console": "off", "x_disable_meta": has_secret}
        settings = wandb.Settings(finish_timeout=_FINISH_TIMEOUT_S, **quiet)
        run: dict[str, Any] = {"dir": str(self._dir), "id": self._run_id(), "resume": "allow", "mode": self.mode}
        try:
            self._run = wandb.init(settings=settings, **run, **options)
        except Exception as error:  # a network failure or a rejected key raises many types
            if self.mode == "offline":
                raise
            self._go_offline(f"the server could not be used ({sentence(error).rstrip('.')})")
            self._start(options)
            return
        self._run.define_metric("*", step_metric="step")
        if self.mode == "online":
            logger.info("W&B run: %s", self._run.url)

    def _go_offline(self, why: str) -> None:
        self.mode = "offline"
        pattern = shlex.quote(str(self._dir / "wandb")) + "/offline-run-*"
        logger.warning("W&B logs offline, because %s; upload later with: wandb sync %s", why, pattern)

    def _run_id(self) -> str:
        path = self._dir / RUN_ID_FILE
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if not known:
            known = secrets.token_hex(4)
            self._dir.mkdir(parents=True, exist_ok=True)
            path.write_text(known + "\n", encoding="utf-8")
        return known


class TensorBoardSink(CopySink):
    """A sink that copies metrics to event files in ``tensorboard/`` of the run directory.

    A resumed run begins a new event file; TensorBoard hides the older files' steps from its first step on.
    """

    label, package = "TensorBoard", "tensorboard"

    def __init__(self, run_dir: str | os.PathLike[str]):
        super().__init__()
        self._dir = Path(run_dir) / FOLDER
        self._first_step: int | None = None
        self._writer: Any = None  # of this process's event file, from the first write on

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> TensorBoardSink:
        return cls(run_dir)

    def _rewind(self, first_step: int) -> None:
        self._finish(0)
        self._first_step = first_step  # first step of the next event file

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._dir), purge_step=self._first_step, flush_secs=_FLUSH_S)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self, exit_code: int) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


#: The sinks by their name in ``logging.sinks``; ``wandb`` is chosen by ``logging.wandb`` instead.
SINKS: Registry[type[CopySink]] = Registry("sota_grpo.sinks", {"wandb": WandbSink, "tensorboard": TensorBoardSink})


def require_sinks(config: Config) -> None:
    """Raise UserError if a sink is unknown, missing or broken; ``logging.wandb=offline`` does not require wandb."""
    for name in config.logging.sinks:
        if name not in SINKS or name == "wandb":
            raise ConfigError(
                f"logging.sinks={name}: no installed package has this entry point in the group sota_grpo.sinks; "
                f"use {', '.join(one for one in SINKS if one != 'wandb')}, or logging.wandb=online for W&B."
            )
    for name, _, missing in _configured(config):
        if missing is not None and (name, config.logging.wandb) != ("wandb", "offline"):
            raise ConfigError(missing)


def make_sinks(config: Config, run_dir: Path) -> list[CopySink]:
    """Create the configured sinks; a sink whose package is not installed is left out, with a warning."""
    sinks: list[CopySink] = []
    for _, sink, missing in _configured(config):
        if missing is None:
            sinks.append(sink.from_config(config, run_dir))
        else:
            logger.warning("%s", missing)
    return sinks


def _configured(config: Config) -> Iterator[tuple[str, type[CopySink], str | None]]:
    """Yield name and class of each configured sink, and an error message if its package is not installed."""
    mode = config.logging.wandb
    configured = [("wandb", f"logging.wandb={mode}", "set logging.wandb=disabled")] if mode != "disabled" else []
    configured += [(name, f"logging.sinks=[{name}]", "leave it out") for name in dict.fromkeys(config.logging.sinks)]
    for name, setting, fix in configured:
        sink, missing = SINKS[name], ""
        if sink.package is not None and find_spec(sink.package) is None:
            package = f"`pip install 'sota-grpo[{sink.package}]'`"
            missing = f"{setting} needs {sink.package}, which is not installed: {package}, or {fix}."
        yield name, sink, missing or None
