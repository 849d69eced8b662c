"""``sota_grpo.train(objective=FUNCTION)``: a surrogate that becomes a file of the run."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sota_grpo
from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.passed import take
from sota_grpo.config import Config
from sota_grpo.errors import UserError
from sota_grpo.rl.objective_files import surrogate
from tests.unit.test_api import ROWS, SMALL

OPTIONS = ["engine=transformers", "train.total_dialog_turns=16"]


def objective_of(scale: float) -> Any:
    """A function that travels as code, with what it holds."""

    def scaled(log_ratio: torch.Tensor, advantage: torch.Tensor, dual_clip: float | None = None) -> torch.Tensor:
        return -scale * advantage * log_ratio.exp()

    return scaled


def trained(run_dir: Path, scale: float, *overrides: str) -> sota_grpo.Result:
    return sota_grpo.train(
        "grpo_cpu",
        objective=objective_of(scale),
        reward=lambda completions, **_: [float(len(text) % 7) for text in completions],
        dataset=ROWS,
        overrides=[*SMALL, *OPTIONS, *overrides],
        run_dir=run_dir,
    )


def slopes(result: sota_grpo.Result) -> list[float]:
    return result.metrics["grad_norm"].tolist()


def test_it_trains_is_kept_and_goes_on_under_the_same_function_only(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", 1.0), trained(tmp_path / "two", 3.0)
    assert slopes(two)[0] == pytest.approx(3 * slopes(one)[0], rel=1e-3)
    assert one.config["algorithm"]["objective"] == f"{tmp_path}/one/inputs/objective.py:scaled"
    before = slopes(one)
    longer = trained(tmp_path / "one", 1.0, "train.total_dialog_turns=24", "train.resume=auto")
    assert (len(slopes(longer)), slopes(longer)[:2]) == (3, before)
    with pytest.raises(UserError, match=r"another"):
        trained(tmp_path / "two", 2.0, "train.resume=auto")

    moved = shutil.move(tmp_path / "one", tmp_path / "moved")
    with pytest.raises(UserError, match=rf"asks to run {moved}/inputs/objective.py \(algorithm.objective\)"):
        load_config(Path(moved), ["reward.path=null", "reward.name=null"])
    kept = surrogate(load_config(Path(moved), trust=True).algorithm.objective)
    terms = {"log_prob": torch.zeros(2), "log_ratio": torch.tensor([0.0, 1.0]), "advantage": torch.ones(2)}
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    read = {name: value for name, value in (terms | clips).items() if kept.reads(name)}
    assert list(read) == ["log_ratio", "advantage", "dual_clip"]
    torch.testing.assert_close(kept.loss(**read), -terms["log_ratio"].exp())


@pytest.mark.parametrize(
    ("objective", "overrides", "why"),
    [
        (lambda log_prob, reward: log_prob, [], "asks for reward"),
        (lambda advantage: advantage, [], "reads neither log_prob nor log_ratio"),
        (3, [], "objective is 3, which is no function"),
        (functools.partial(objective_of, threading.Lock()), [], "asks for|reads neither|cannot be written"),
        (objective_of(1.0), ["algorithm.objective=cispo"], "algorithm.objective=cispo names another"),
    ],
)
def test_what_cannot_be_one_is_a_sentence(objective: Any, overrides: list[str], why: str) -> None:
    config = Config()
    if overrides:
        config.algorithm.objective = "cispo"
    with pytest.raises(UserError, match=why):
        take(config, overrides, objective=objective)


def test_a_function_that_holds_what_no_file_can_is_a_sentence() -> None:
    held = threading.Lock()

    def locked(log_prob: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        with held:
            return -advantage * log_prob

    with pytest.raises(
        UserError, match=r"the objective locked cannot be written to the run .*make what it needs inside"
    ):
        take(Config(), [], objective=locked)


def test_a_function_without_a_name_has_one_in_the_config() -> None:
    config = Config()
    passed = take(config, [], objective=lambda log_prob, advantage: -advantage * log_prob)
    assert config.algorithm.objective.rpartition(":")[2].isidentifier()
    assert json.loads(json.dumps(passed.signature))["passed"].keys() == {"objective"}
