"""Every stage of the proof on one GPU goes through on the pretended one, so that no minute of a real one is lost."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.gpu_proof import STAGES, checks_of
from tests.pretended_cuda import guard

CHECKS = {
    "kernels": [],  # all of them
    "memory": [],
    "processes": [],
    "speed": ["layers"],
    "runs": ["demonstration", "kill_and_resume"],
}


@pytest.mark.slow
@pytest.mark.longest(3)
@pytest.mark.timeout(1800)
@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
@pytest.mark.parametrize("stage", sorted({*STAGES} - {"engine"}))
def test_a_stage_goes_through(stage: str, tmp_path: Path) -> None:
    only = CHECKS[stage] or [check.__name__ for check in checks_of(stage)]
    script = ("-m", "tests.pretended_cuda", "scripts/gpu_proof.py")
    assert f'"stage": "{stage}"' in stages_said(*script, stage, "--out", str(tmp_path), "--only", *only)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_stage_of_vllm_goes_through_on_a_cpu(tmp_path: Path) -> None:
    args = ("--device", "cpu", "--only", "vllm_engine", "preset")
    assert '"stage": "engine"' in stages_said("scripts/gpu_proof.py", "engine", "--out", str(tmp_path), *args)


def stages_said(*args: str) -> str:
    """What the script has printed, in which nothing failed."""
    done = subprocess.run(
        [sys.executable, *args, "--small", "--limit", "1200"],
        cwd=guard.ROOT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "FAIL" not in done.stdout
    return done.stdout
