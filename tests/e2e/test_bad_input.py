"""Bad input: one clear sentence, exit code 2, no traceback, nothing lost. See tests/unit/test_first_words.py, too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sota_grpo.recording.run_files import state_of
from tests.e2e.conftest import ROOT, SMALL, metrics, without_clock

QUICK = (*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false", "env.num_heldout=4")
LONGER = ("train.resume=auto", "train.total_dialog_turns=80")


def table(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(40)]


def case_missing_column(tmp: Path) -> tuple[list[str], str]:
    path = table(tmp / "rows.jsonl", [{"question": "1+1?", "solution": "#### 2"}])
    return ["env.dataset=gsm8k", f"env.dataset_path={path}"], "answer"


def case_empty_dataset(tmp: Path) -> tuple[list[str], str]:
    return ["env.dataset=gsm8k", f"env.dataset_path={table(tmp / 'rows.jsonl', [])}"], "has no rows"


def case_long_prompt(tmp: Path) -> tuple[list[str], str]:
    rows = [*GOOD, {"question": "word " * 3000, "answer": "#### 1"}]
    return ["env.dataset=gsm8k", f"env.dataset_path={table(tmp / 'rows.jsonl', rows)}"], "2047"


def case_gold_that_does_not_parse(tmp: Path) -> tuple[list[str], str]:
    rows = [*GOOD, {"question": "How many?", "answer": "#### many"}]
    return ["env.dataset=gsm8k", f"env.dataset_path={table(tmp / 'rows.jsonl', rows)}"], "41"


CASES = [value for name, value in sorted(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_one_sentence_and_exit_code_2(case, tmp_path: Path, grpo) -> None:
    overrides, expected = case(tmp_path)
    done = grpo(tmp_path / "run", *QUICK, *overrides)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert expected in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_default_config_without_a_gpu_names_the_command_that_runs_here(tmp_path: Path, grpo) -> None:
    done = grpo(tmp_path / "run", config="grpo_gsm8k", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "GPU" in done.stderr
    assert "python grpo.py --config-name grpo_cpu" in done.stderr
    corrected = grpo(tmp_path / "run", *QUICK)  # nothing was started there
    assert corrected.returncode == 0, corrected.stderr


def test_a_failed_gate_leaves_its_reason_and_no_run(tmp_path: Path, grpo) -> None:
    options = [option for option in QUICK if option != "check.mode=off"]  # scripted tokens are no policy's
    done = grpo(tmp_path / "run", *options)
    assert done.returncode == 2, done.stderr
    assert "The check before training failed" in done.stderr
    checks = json.loads((tmp_path / "run" / "gate.json").read_text())["checks"]
    assert [check["passed"] for check in checks][-1] is False
    state, note = state_of(tmp_path / "run")
    assert (state, note[:34]) == ("failed", "The check before training failed (")
    corrected = grpo(tmp_path / "run", *QUICK)
    assert corrected.returncode == 0, corrected.stderr
    assert state_of(tmp_path / "run") == ("finished", "")


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    """An OSError of the program is not taken for a directory that the user chose badly."""
    code = (
        "import sota_grpo.run.app as app, sota_grpo.run.entry as entry\n"
        "def deep(config, run_dir): raise OSError('deep inside')\n"
        "app.train = deep\n"
        "entry.entry('sync')"
    )
    arguments = ["--config-name=grpo_cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in deep" in done.stderr


def test_unwritable_output_directory(tmp_path: Path, grpo) -> None:
    (tmp_path / "file").write_text("in the way")
    done = grpo(tmp_path / "file" / "run", *QUICK)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr.splitlines()[-1]  # vLLM, where installed, says a line of its own


def test_a_run_directory_is_not_overwritten(tmp_path: Path, grpo) -> None:
    assert grpo(tmp_path / "run", *QUICK).returncode == 0
    before = metrics(tmp_path / "run")
    done = grpo(tmp_path / "run", *QUICK)
    assert done.returncode == 2
    assert "train.resume=auto" in done.stderr
    assert metrics(tmp_path / "run") == before


def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, grpo) -> None:
    options = (*QUICK, "train.checkpoint_frequency=1", "optimizer.schedule=constant")
    assert grpo(tmp_path / "run", *options).returncode == 0
    whole = metrics(tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").glob("checkpoint_*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    newest.write_bytes(data)
    done = grpo(tmp_path / "run", *options, *LONGER)
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr
    assert "after 3 steps" in done.stderr
    assert without_clock(metrics(tmp_path / "run")[:4]) == without_clock(whole)
    assert len(metrics(tmp_path / "run")) == 5


def test_all_checkpoints_damaged_is_a_sentence(tmp_path: Path, grpo) -> None:
    options = (*QUICK, "train.checkpoint_frequency=1", "optimizer.schedule=constant")
    assert grpo(tmp_path / "run", *options).returncode == 0
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    done = grpo(tmp_path / "run", *options, *LONGER)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "is damaged" in done.stderr


def test_an_interrupt_ends_the_gate_at_once(tmp_path: Path) -> None:
    """A reward function that hangs has an hour for each answer here; whoever notices it need not wait for that."""
    (tmp_path / "reward.py").write_text(
        "import pathlib, time\n"
        "def wait(completions, **columns):\n"
        f"    pathlib.Path({str(tmp_path / 'asked')!r}).touch()\n"
        "    time.sleep(3600)\n"
    )
    options = [option for option in QUICK if option != "check.mode=off"]
    options += ["env.reward_timeout_s=3600", f"reward.path={tmp_path / 'reward.py'}", "reward.name=wait"]
    command = [sys.executable, "grpo.py", "--config-name", "grpo_cpu", *options, f"hydra.run.dir={tmp_path / 'run'}"]
    run = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "asked").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, told
    assert "interrupted; nothing was saved" in told
