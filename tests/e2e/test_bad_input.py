"""Bad input: one clear sentence, exit code 2, no traceback, nothing lost. See tests/unit/test_first_words.py, too."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from sota_grpo.assembly.evaluation import find_target, open_evaluator
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.recording.run_files import state_of
from sota_grpo.rl.table import RowTable
from sota_grpo.run.app import train
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.learner import Learner
from tests.config.test_config import composed
from tests.data_files import write_rows
from tests.e2e.conftest import SMALL, metrics, without_clock

QUICK = (
    *(*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false", "env.num_heldout=4"),
    *("env.reward_workers=0", "logging.report=false"),
)

GOOD = [{"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(40)]


def test_a_dataset_of_which_nothing_is_held_out_ends_the_start(tmp_path: Path) -> None:
    """A folder that datasets reads as a hub's dataset, with the split train alone."""
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "train.jsonl", GOOD)
    data = ("env.dataset=gsm8k", f"env.dataset_path={tmp_path / 'rows'}", "env.num_heldout=0", "eval.mode=after")
    with pytest.raises(UserError, match=r"gsm8k has no held-out problems; set env.eval_path or env.num_heldout"):
        train(composed("grpo_cpu", *QUICK, *data), tmp_path / "run")


def test_a_failed_gate_leaves_its_reason_and_no_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match=r"The check before training failed \("):  # scripted tokens are no policy's
        train(composed("grpo_cpu", *QUICK, "check.mode=strict"), run_dir)
    checks = json.loads((run_dir / "gate.json").read_text())["checks"]
    assert [check["passed"] for check in checks][-1] is False
    state, note = state_of(run_dir)
    assert (state, note[:34]) == ("failed", "The check before training failed (")
    assert train(composed("grpo_cpu", *QUICK, "train.total_dialog_turns=16"), run_dir) == 1
    assert state_of(run_dir) == ("finished", "")


def test_a_reward_that_turns_negative_under_maxrl_saves_what_was_learned_and_says_a_sentence(tmp_path: Path) -> None:
    """The third step's first response earns -0.5; the two steps before it are in a checkpoint."""
    (tmp_path / "reward.py").write_text(
        "graded = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    graded.append(solution_str)\n"
        "    return -0.5 if len(graded) == 33 else float(len(graded) % 2)\n"
    )
    options = ("algorithm=maxrl", f"reward.path={tmp_path / 'reward.py'}", "train.checkpoint_frequency=100")
    with pytest.raises(RunFailed, match=r"is -0\.5; scale 'group_mean' divides.* The steps before are saved\."):
        train(composed("grpo_cpu", *QUICK, *options), tmp_path / "run")
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["checkpoint_000002.pt"]
    assert state_of(tmp_path / "run")[0] == "failed"


@pytest.mark.parametrize(
    "options",
    [("eval.mode=off",), ("eval.every=1",), ("train.total_dialog_turns=32", "eval.mode=after")],
    ids=["training step", "evaluation", "last evaluation"],
)
def test_a_policy_that_computes_nan_ends_in_a_sentence_and_the_checkpoint_has_its_own_number(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def diverging(learner: Learner, rows: RowTable) -> dict[str, float | None]:
        metrics = update(learner, rows)
        if learner.version == 2:
            torch.nn.utils.vector_to_parameters(
                torch.full((sum(map(torch.Tensor.numel, learner.parameters)),), torch.nan), learner.parameters
            )
        return metrics

    monkeypatch.setattr(Learner, "update", diverging)
    run_dir = tmp_path / "run"
    config = composed("grpo_cpu", *QUICK, "engine=transformers", "eval.mode=on", "eval.num_samples=4", *options)
    with pytest.raises(RunFailed, match="after 2 training steps: the engine returned a log-prob that is not finite"):
        train(config, run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["checkpoint_000002.pt"]
    assert CheckpointStore(run_dir / "checkpoints").latest()[1]["learner"]["version"] == 2
    sentence = "cannot be evaluated: the engine returned a log-prob that is not finite"
    with pytest.raises(RunFailed, match=sentence), open_evaluator(find_target(str(run_dir))) as evaluator:
        evaluator.evaluate()


def test_unwritable_output_directory(tmp_path: Path, grpo) -> None:
    (tmp_path / "file").write_text("in the way")
    done = grpo(tmp_path / "file" / "run", *QUICK)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr  # libraries may say lines of their own after it


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """The newest: the one before is taken. All of them: a sentence."""
    run_dir = tmp_path / "run"
    options = (*QUICK, "train.checkpoint_frequency=1", "optimizer.schedule=constant")
    assert train(composed("grpo_cpu", *options), run_dir) == 4
    whole, log = metrics(run_dir), run_dir / "training.log"
    before = log.read_text()
    newest = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    newest.write_bytes(data)
    longer = (*options, "train.resume=auto", "train.total_dialog_turns=80")
    assert train(composed("grpo_cpu", *longer), run_dir) == 5
    after = log.read_text().removeprefix(before)
    assert newest.name in after
    assert "after 3 steps" in after
    assert without_clock(metrics(run_dir)[:4]) == without_clock(whole)
    assert len(metrics(run_dir)) == 5
    for path in (run_dir / "checkpoints").glob("checkpoint_*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFailed, match="restore one from a backup"):
        train(composed("grpo_cpu", *longer, "train.total_dialog_turns=96"), run_dir)


def test_a_finished_run_without_its_checkpoints_does_not_begin_anew(tmp_path: Path) -> None:
    """It would lose its metrics, its rollouts and its exported model."""
    run_dir, options = tmp_path / "run", (*QUICK, "optimizer.schedule=constant", "train.total_dialog_turns=32")
    assert train(composed("grpo_cpu", *options), run_dir) == 2
    shutil.rmtree(run_dir / "checkpoints")
    before, longer = metrics(run_dir), ("train.resume=auto", "train.total_dialog_turns=48")
    with pytest.raises(UserError, match=r"is finished, but has no checkpoint .*; restore one, or start another run"):
        train(composed("grpo_cpu", *options, *longer), run_dir)
    assert metrics(run_dir) == before
    record = json.loads((run_dir / "run.json").read_text())
    assert record["finished"]
    (run_dir / "run.json").write_text(json.dumps(record | {"finished": False}))
    assert train(composed("grpo_cpu", *options, *longer), run_dir) == 3
    log = (run_dir / "training.log").read_text()
    assert re.search(r"WARNING .*a new run in .*, where 2 trained steps are deleted; .* restore a checkpoint", log)


def test_an_interrupt_ends_the_gate_at_once(tmp_path: Path, signalled) -> None:
    """A reward function that hangs has an hour for each answer here; three Ctrl-C end it as one does."""
    marker = tmp_path / "asked"
    (tmp_path / "reward.py").write_text(
        f"import pathlib, time\ndef wait(completions, **columns):\n    pathlib.Path({str(marker)!r}).touch()\n"
        "    time.sleep(3600)\n"
    )
    options = (*QUICK, "check.mode=strict", "env.reward_workers=1", "env.timeout_s=3600")
    options += (f"reward.path={tmp_path / 'reward.py'}", "reward.name=wait")
    done = signalled(signal.SIGINT, marker.exists, tmp_path / "run", *options, times=3)
    assert done.code == 130, done.stderr
    assert "interrupted; nothing was saved" in done.stderr
    assert "Traceback" not in done.stderr
