"""A run directory is untrusted data: nothing in it runs, asks a server, hangs a reader or leads out of it."""

from __future__ import annotations

import json
import logging
import os
import pickle
from hashlib import sha256
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from sota_grpo import Result
from sota_grpo.assembly.compose import UNUSED_WITHOUT_LOSS, UNUSED_WITHOUT_SAMPLES, load_config
from sota_grpo.assembly.evaluation import find_target
from sota_grpo.cli import main
from sota_grpo.config.spelling import overrides_of
from sota_grpo.errors import UserError
from sota_grpo.files import atomic_file
from sota_grpo.migration.export import _new_folder, write_hf, write_verl
from sota_grpo.recording import run_files
from sota_grpo.recording.run_files import is_held, read_config, read_json, read_rows
from sota_grpo.recording.stored_steps import read_step
from sota_grpo.report import write_report
from sota_grpo.sweeps import as_text, read_sweep
from sota_grpo.text import ReadableFormatter
from sota_grpo.training.checkpoint import CheckpointError, CheckpointStore
from sota_grpo.training.runs import RunRefused, open_run
from tests.report_rigs import write_run

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
ASKS = {
    "reward.path": ("reward: {path: /nowhere/inputs/reward.pkl}", "run RUN/inputs/reward.pkl"),
    "algorithm.objective": ("algorithm: {objective: /nowhere/mine.py:fn}", "run /nowhere/mine.py"),
    "model.trust_remote_code": ("model: {name: tiny, trust_remote_code: true}", "run the Python files of its model"),
    "engine.url": ("engine: {name: vllm_server, url: 'http://h:1'}", "send prompts and weights to http://h:1"),
    "inference_model.engine_kwargs": (
        "inference_model: {engine_kwargs: {kv_transfer_config: {kv_ip: 1.2.3.4}}}",
        "load its model with {'kv_transfer_config': {'kv_ip': '1.2.3.4'}}",
    ),
    "model.load_kwargs": ("model: {load_kwargs: {use_kernels: true}}", "load its model with {'use_kernels': True}"),
    "reward.judge.url": (
        "reward: {judge: {kind: chat, url: 'http://h:1'}}",
        "send prompts and responses to http://h:1",
    ),
    "reward.judge.rubric": (
        "reward: {judge: {kind: chat, rubric: /home/me/notes.txt}}",
        "send what is in /home/me/notes.txt to its judge",
    ),
    "ray.address": ("ray: {address: 'h:6379'}", "join the Ray cluster h:6379"),
}
MUCH = "\n".join(ASKS[option][0] for option in ("reward.path", "algorithm.objective", "model.trust_remote_code"))


class Attack:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of untrusted origin, with a pickle that must not be read."""
    run_dir = write_run(tmp_path / "run", steps=1)
    (run_dir / "inputs").mkdir()
    (run_dir / "inputs" / "reward.pkl").write_bytes(pickle.dumps(Attack(tmp_path / "PWNED")))
    return run_dir


def saved(run_dir: Path, text: str) -> Path:
    (run_dir / "config.yaml").write_text(text)
    return run_dir


@pytest.mark.parametrize("option", ASKS)
def test_code_and_files_of_a_config_need_trust_or_to_be_passed_again(option: str, run_dir: Path) -> None:
    text, deed = ASKS[option]
    saved(run_dir, text)
    deed = deed.replace("RUN", str(run_dir))
    for other in ("seed=3", "reward.name=f", "model.name=smollm2"):
        with pytest.raises(UserError) as refused:
            load_config(run_dir, [other])
        assert f"asks to {deed}" in str(refused.value)
        assert f"({option})" in str(refused.value)
    value = attrgetter(option)(load_config(run_dir, trust=True))
    assert value == attrgetter(option)(load_config(run_dir, overrides_of({option: value})))
    for unused in (UNUSED_WITHOUT_SAMPLES, UNUSED_WITHOUT_LOSS):
        if option in unused:
            load_config(run_dir, unused=unused)


def test_commands_refuse_before_they_execute(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(run_dir, MUCH)
    for command in ("eval RUN --k 0", "export RUN --to verl", "replay RUN"):
        with pytest.raises(SystemExit) as ended:
            main(command.replace("RUN", str(run_dir)).split())
        assert ended.value.code == 2
        output = capsys.readouterr().err
        assert "(model.trust_remote_code)" in output
        assert ("run /nowhere/mine.py (algorithm.objective)" in output) == (command == "replay RUN")
        assert "; if you trust its author, add --trust-run" in output
    (run_dir / "hf").mkdir()
    for act in (
        lambda: find_target(str(run_dir)),
        lambda: write_hf(run_dir, tmp_path / "out"),
        lambda: write_verl(run_dir, tmp_path / "out"),
        lambda: Result(run_dir).model,
    ):
        with pytest.raises(UserError, match=r"asks to .*model.trust_remote_code"):
            act()
    assert not (tmp_path / "PWNED").exists()


def test_an_evaluation_on_another_task_needs_no_consent_to_a_reward_that_it_leaves_behind(run_dir: Path) -> None:
    saved(run_dir, "model: {name: tiny}\nreward: {path: /nowhere/inputs/reward.pkl}")
    with pytest.raises(UserError, match="has no checkpoint; resume"):
        find_target(str(run_dir), task="arithmetic")


@pytest.mark.parametrize("option", ["dataset_path", "eval_path"])
def test_an_export_copies_no_rows_of_this_machine_unasked(option: str, run_dir: Path) -> None:
    from pyarrow.parquet import read_table

    private, own, out = run_dir.parent / "diary.jsonl", run_dir / "inputs" / "train.jsonl", run_dir.parent / "out"
    for path in (private, own):
        path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "answer": "4"}) + "\n" for i in range(9)))

    def export(out: Path, *, trust: bool = False, **paths: str) -> str:
        env = {"dataset": "table", "num_heldout": 2, "dataset_path": str(own), **paths}
        write_verl(saved(run_dir, json.dumps({"model": {"name": "tiny"}, "env": env})), out, trust=trust)
        return str(read_table(out / "train.parquet"))

    with pytest.raises(UserError, match=rf"copy the rows of {private} into the export \(env.{option}\)"):
        export(out, **{"eval_path": str(own), option: str(private)})
    assert not out.exists()
    assert "diary" not in export(out)
    assert "diary" in export(out / "again", trust=True, dataset_path=str(private))


def test_an_interpolation_is_refused_by_name_and_not_resolved(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush")
    for text in ("env: {system_prompt: 'Hi ${oc.env:SECRET}'}", "logging: {sinks: ['${oc.env:SECRET}']}"):
        with pytest.raises(UserError, match=r"(env.system_prompt|logging.sinks) has an interpolation") as refused:
            load_config(saved(run_dir, text))
        assert "hush" not in str(refused.value)


def aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [aliases(), f"a: {'[' * 5_000}", f"a: {'x' * (2 << 20)}"], ids=["many", "deep", "big"])
def test_yaml_that_would_grow_is_a_sentence(text: str, run_dir: Path) -> None:
    saved(run_dir, text)
    for read in (load_config, read_config):
        with pytest.raises(UserError, match=r"config.yaml"):
            read(run_dir)
    assert write_report([run_dir, write_run(run_dir.parent / "sound", steps=1)], run_dir / "report.html").is_file()


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_pipes_devices_and_links_out_of_the_run_are_refused(kind: str, run_dir: Path) -> None:
    def damage(path: Path, outside: Path) -> None:
        outside.write_bytes(path.read_bytes() if path.exists() else b"{}")  # a good file of the same kind
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else outside)

    for name in ("metrics.jsonl", "run.json", "config.yaml", ".lock"):
        damage(run_dir / name, run_dir.parent / f"of {name}")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(it is "):
        read_rows(run_dir / "metrics.jsonl")
    with pytest.raises(UserError, match=r"config.yaml"):
        read_config(run_dir)
    assert read_json(run_dir / "run.json") == {}
    assert not is_held(run_dir)
    readers = ("steps", read_step, UserError), ("checkpoints", CheckpointStore.load, CheckpointError)
    for folder, read, error in readers:
        (run_dir / folder).mkdir(exist_ok=True)
        path = run_dir / folder / "step_000000.pt"
        damage(path, run_dir.parent / folder)
        with pytest.raises(error, match="cannot be read: it is "):
            read(path)


def test_a_link_within_the_run_and_a_run_that_is_linked_as_a_whole_are_read(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").rename(run_dir / "rows")
    (run_dir / "metrics.jsonl").symlink_to("rows")
    (run_dir.parent / "latest").symlink_to(run_dir)
    assert read_rows(run_dir.parent / "latest" / "metrics.jsonl")


def test_a_line_without_an_end_is_not_read_into_memory(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_LINE_BYTES", 1000)
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 0, "text": "x" * 2000}) + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(line 1 has more than"):
        read_rows(run_dir / "metrics.jsonl")


@pytest.mark.parametrize("name", ["hf/training_args.bin", "inputs/train.jsonl"])
def test_what_libraries_open_and_exports_copy_leads_nowhere_else(name: str, run_dir: Path) -> None:
    (run_dir / "hf").mkdir()
    (run_dir / name).symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=rf"{name}: it is a link that leaves the run directory"):
        load_config(saved(run_dir, "seed: 1"))


def test_what_libraries_keep_in_a_run_directory_is_their_own(run_dir: Path) -> None:
    """W&B 0.31 links its log into the user's cache; a run neither reads nor writes there. Its folder is no link."""
    (run_dir / "run.json").write_text('{"signature": "x", "num_steps": 1, "finished": false}')
    cache = run_dir.parent / "cache"
    cache.mkdir()
    logs = run_dir / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(cache / "core.log")
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "trace").symlink_to("/tmp")
    with pytest.raises(RunRefused, match="another config"):  # the directory itself is in order
        open_run(run_dir, {"train": {}}, str(run_dir), num_steps=1)
    for name in ("tensorboard", "steps/step_000000.pt", "debug_logs/a.txt"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).symlink_to(cache)
        with pytest.raises(UserError, match=rf"{name}: it is a link that leaves the run directory"):
            open_run(run_dir, {"train": {}}, str(run_dir), num_steps=1)
        (run_dir / name).unlink()


def test_a_prepared_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for temporary in (".a.txt.tmp", f".a.txt.{os.getpid()}.tmp"):
        (tmp_path / temporary).symlink_to(victim)
    with atomic_file(tmp_path / "a.txt") as path:
        path.write_text("new")
    assert (victim.read_text(), (tmp_path / "a.txt").read_text()) == ("mine", "new")


def test_a_checkpoint_that_needs_consent_is_a_sentence_and_the_one_before_is_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"learner": 1})
    store.save(2, {"other": 2})
    path = store.save(3, {"learner": 3})
    torch.save(Attack(tmp_path / "PWNED"), path)
    body = path.read_bytes()
    path.write_bytes(body + b"SGRPOck1" + sha256(body).digest())
    with pytest.raises(CheckpointError, match="has unexpected content") as refused:
        CheckpointStore.load(path)
    assert "weights_only" not in str(refused.value)
    assert refused.value.__suppress_context__
    assert store.latest(["learner"]) == (1, {"learner": 1})
    assert not (tmp_path / "PWNED").exists()


def test_an_export_replaces_its_own_folder_and_fills_an_empty_one(run_dir: Path, monkeypatch) -> None:
    """Only what is in the run's own ``export/`` is replaced, which is no link."""

    def export(out: Path, *names: str) -> None:
        with _new_folder(out, run_dir) as folder:
            for name in names:
                (folder / name).touch()

    own, other = run_dir / "export" / "verl", run_dir.parent / "projects" / "verl"
    for out, name in ((own, "old"), (own, "new"), (Path(), "newer")):
        export(out, name)
        assert [path.name for path in own.iterdir()] == [name]
        monkeypatch.chdir(own)
    (other / ".sota_grpo_export_killed").mkdir(parents=True)
    monkeypatch.chdir(other)
    export(Path(), "config.json", "work.py")
    own.parent.rename(run_dir / "earlier")
    own.parent.symlink_to(other.parent)
    with pytest.raises(UserError, match="is not an empty folder"):
        export(own)
    assert sorted(path.name for path in other.iterdir()) == ["config.json", "work.py"]


def test_no_control_sequence_of_a_run_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for seed in ("0", "1"):
        run_dir = write_run(tmp_path / "sweep" / seed, steps=1)
        (run_dir / "failure.json").write_text(json.dumps({"reason": ESCAPE}))
        (run_dir / "run.json").unlink(missing_ok=True)
        (run_dir / ".hydra").mkdir()
        (run_dir / ".hydra" / "overrides.yaml").write_text(json.dumps([f"seed={seed}{ESCAPE}", f"{ESCAPE}={seed}"]))
    sweep = read_sweep(tmp_path / "sweep")
    assert "\\x1b[2J" in as_text(sweep)
    assert "\x1b" not in as_text(sweep)
    saved(tmp_path / "sweep" / "0", json.dumps({"seed": ESCAPE}))
    with pytest.raises(SystemExit):
        main(["replay", str(tmp_path / "sweep" / "0")])
    output = capsys.readouterr().err
    assert "config.yaml" in output
    assert "\x1b" not in output
    assert "\x1b" not in ReadableFormatter().format(logging.makeLogRecord({"msg": ESCAPE}))
