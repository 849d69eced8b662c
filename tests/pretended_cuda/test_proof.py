"""Every stage of the proof on one GPU goes through on the pretended one, so that no minute of a real one is lost."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.gpu_proof import STAGES
from tests.pretended_cuda import guard

ROOT = Path(__file__).resolve().parents[2]
FEWER = {"runs": ["demonstration", "kill_and_resume"], "speed": ["small_model"]}


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
@pytest.mark.parametrize("stage", sorted({*STAGES} - {"engine"}))
def test_a_stage_goes_through(stage: str, tmp_path: Path) -> None:
    only = ["--only", *FEWER[stage]] if stage in FEWER else []
    check_stage("-m", "tests.pretended_cuda", "scripts/gpu_proof.py", stage, "--out", str(tmp_path), *only)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_stage_of_vllm_goes_through_on_a_cpu(tmp_path: Path) -> None:
    given = ("--device", "cpu", "--only", "vllm_engine", "preset")
    check_stage("scripts/gpu_proof.py", "engine", "--out", str(tmp_path), *given)


def check_stage(*given: str) -> None:
    done = subprocess.run(
        [sys.executable, *given, "--small", "--limit", "1200"],
        cwd=ROOT, capture_output=True, text=True, timeout=590, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert '"stage": ' in done.stdout
    assert "FAIL" not in done.stdout
