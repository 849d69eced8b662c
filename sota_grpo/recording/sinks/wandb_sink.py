"""Weights & Biases: metrics, a table of samples and the config in one W&B run, online or offline."""

from __future__ import annotations

import json
import logging
import netrc
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sota_grpo.config import Config
from sota_grpo.recording.machine import this_start, without_secrets
from sota_grpo.recording.sinks import CopySink
from sota_grpo.text import readable, sentence

RUN_ID_FILE = "wandb_run_id.txt"

logger = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 120.0  # an upload that never ends must not keep a finished run alive


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


class WandbSink(CopySink):
    """Copies metrics and a table of samples to one W&B run, which a resumed run directory continues.

    Never prompts. ``online`` without a key, or without an answer from the server, becomes ``offline``; what is recorded
    offline is uploaded later with ``wandb sync``. Steps are W&B's x-axis through their own field, because a resumed run
    writes some steps again, which W&B's own counter would refuse.

    Args:
        mode: ``online`` or ``offline``. The attribute ``mode`` afterwards is the mode it began in.
        run_dir: the run directory; it keeps the run's id and W&B's files.
        name: name of the run; None takes the last two folders of the run directory (``DATE/TIME``, ``TIME/JOB``).
        config: plain nested values, shown beside the run without keys and tokens.
    """

    label, package = "W&B", "wandb"

    def __init__(
        self,
        mode: str,
        *,
        project: str,
        run_dir: str | os.PathLike[str],
        name: str | None = None,
        tags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._dir, self.mode = Path(run_dir), mode
        if mode == "online" and not has_api_key():
            self._go_offline("no API key was found (WANDB_API_KEY or netrc)")
        title = name or "/".join(self._dir.resolve().parts[-2:])
        options = {"project": project, "name": title, "tags": list(tags), "config": config or {}}
        self._attempt(lambda: self._start(options))

    @classmethod
    def from_config(cls, config: Config, run_dir: Path) -> WandbSink:
        options = config.logging
        named: dict[str, Any] = {"project": options.project, "name": options.run_name, "tags": options.tags}
        return cls(options.wandb, run_dir=run_dir, config=asdict(config) | {"start": this_start()}, **named)

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
        has_secret = sys.argv != without_secrets(sys.argv)  # in the command line of a user's script
        quiet: dict[str, Any] = {"silent": True, "console": "off", "x_disable_meta": has_secret}
        settings = wandb.Settings(finish_timeout=_FINISH_TIMEOUT_S, **quiet)
        run: dict[str, Any] = {"dir": str(self._dir), "id": self._run_id(), "resume": "allow", "mode": self.mode}
        try:
            self._run = wandb.init(settings=settings, **run, **options)
        except Exception as error:  # a dead network or a refused key raises many types, none of them worth a run
            if self.mode == "offline":
                raise
            self._go_offline(f"the server could not be used ({sentence(error)})")
            self._start(options)
            return
        self._run.define_metric("*", step_metric="step")
        if self.mode == "online":
            logger.info("W&B run: %s", self._run.url)

    def _go_offline(self, why: str) -> None:
        self.mode = "offline"
        pattern = shlex.quote(str(self._dir / "wandb")) + "/offline-run-*"
        logger.warning("W&B records offline, because %s; upload later with: wandb sync %s", why, pattern)

    def _run_id(self) -> str:
        path = self._dir / RUN_ID_FILE
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if not known:
            known = secrets.token_hex(4)
            self._dir.mkdir(parents=True, exist_ok=True)
            path.write_text(known + "\n", encoding="utf-8")
        return known
