"""``sota-grpo train`` is the scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import sota_grpo.run.app
from sota_grpo.cli import main
from sota_grpo.config import Config, num_steps
from sota_grpo.run import entry


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (("train", "--config-name", "grpo_cpu", "seed=3"), "sync"),
        (("train", "--async", "--config-name", "grpo_cpu", "seed=3"), "async"),
        (("train", "seed=3", "--config-name=grpo_cpu", "--async"), "async"),
    ],
)
def test_the_mode_is_the_commands_and_the_rest_is_hydras(
    arguments: tuple[str, ...], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual: list[Config] = []

    def train(config: Config, run_dir: Path, passed: object = None, **_: object) -> int:
        actual.append(config)
        return num_steps(config)

    monkeypatch.setattr(entry, "quiet_console", lambda: None)
    monkeypatch.setattr(sota_grpo.run.app, "train", train)
    monkeypatch.setattr(sys, "argv", ["/bin/sota-grpo", *arguments, f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(SystemExit, match="0"):
        main()
    (config,) = actual
    assert (config.mode, config.seed, config.model.name) == (mode, 3, "tiny")
