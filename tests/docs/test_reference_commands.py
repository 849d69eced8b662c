"""The usage lines of TorchRL's GRPO recipe work unchanged, without the folder before the script's name.

Nothing is added to them but sizes and, for a model of the hub, the embedded policy (:data:`tests.docs.rules.SIZES`).
Of the two with workers the concurrent one is run; ``estimate`` judges both (``OPTIONS``) and, in docs/migration.md, the
one that names another model. Of the two sweeps the grid is run.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.docs.markdown import Command
from tests.docs.rules import WHOLE, is_slow
from tests.docs.workshop import Workshop, typed

WORKERS = "train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2"
LINES = {
    "sync": f"VLLM_USE_V1=0 python grpo.py {WORKERS}",
    "async": f"VLLM_USE_V1=0 python grpo-async.py {WORKERS}",
    "ifeval_config": "python grpo.py --config-name grpo_ifeval",
    "dataset": "python grpo.py env.dataset=ifeval",
    "optimizer": "python grpo.py optimizer.lr=2e-5 optimizer.weight_decay=0.01",
    "sweep": "python grpo.py --multirun optimizer.lr=1e-4,1e-5,1e-6",
    "grid": "python grpo.py --multirun \\\n  optimizer.lr=1e-4,1e-5 \\\n  policy.kl_coef=0.01,0.1",
}
COMMANDS = {name: typed(line, f"reference_{name}") for name, line in LINES.items()}
#: Fragments that its text tells the reader to add to a command.
OPTIONS = (
    WORKERS,
    "train_model.devices=[0,1] ref_model.devices=[2,3] inference_model.devices=[4,5]",
    "inference_model.gpu_memory_utilization=0.4 env.num_envs=64 train.optim_batch_size=64",
    "train.total_dialog_turns=1024 train.checkpoint_frequency=5",
)
WITH_OPTIONS = [
    typed(f"python {script} {options}", "reference_options")
    for script, options in itertools.product(("grpo.py", "grpo-async.py"), OPTIONS)
]


def marked(name: str, command: Command) -> object:
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.longest(3)] if is_slow(command) else [])


def ran(name: str, workshop: Workshop) -> list[Path]:
    """Run the command; returns its run directories, in the order of a sweep's runs."""
    if name == "async":
        pytest.importorskip("ray")
    done = workshop.run(COMMANDS[name])
    done.require(name)
    if name == "async":
        assert "VLLM_USE_V1=0 is accepted and has no effect" in done.stderr
        assert "Placement: 2 learner ranks, 2 engines, 2 reference workers on the CPU." in done.stderr
        assert re.search(r"Checks before training: (\d+) of \1 passed", done.stdout)
    desk, folder = workshop.desk(f"reference_{name}"), "multirun" if "--multirun" in LINES[name] else "outputs"
    return sorted(path.parent for path in desk.glob(f"{folder}/**/metrics.jsonl"))


def steps(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


@pytest.mark.parametrize("name", [marked(*each) for each in COMMANDS.items() if each[0] not in ("sync", "sweep")])
def test_usage_lines_train(name: str, workshop: Workshop) -> None:
    actual, num_steps = ran(name, workshop), 4 if COMMANDS[name].block.document.name == WHOLE else 1
    assert len(actual) == (4 if name == "grid" else 1)
    for run_dir in actual:
        assert len(steps(run_dir)) == num_steps
        assert (run_dir / ".hydra" / "config.yaml").is_file()
        assert [path.name for path in (run_dir / "checkpoints").glob("*.pt")] == [f"checkpoint_{num_steps:06d}.pt"]
        assert (run_dir / "hf" / "model.safetensors").exists()


def test_options_reach_the_run(workshop: Workshop) -> None:
    """What a line requires is in the config of its run, and a config name chooses the data."""
    from omegaconf import OmegaConf

    (first,), (second,) = ran("ifeval_config", workshop), ran("dataset", workshop)
    for run_dir in (first, second):
        assert OmegaConf.load(run_dir / "config.yaml").env.dataset == "ifeval"
        assert all("reward/instructions" in row for row in steps(run_dir))
    (changed,) = ran("optimizer", workshop)
    config = OmegaConf.load(changed / "config.yaml")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-5, 0.01)


@pytest.mark.parametrize("command", WITH_OPTIONS, ids=lambda command: command.text[:50])
def test_options_of_the_text_are_known_and_fit(command: Command, workshop: Workshop) -> None:
    workshop.estimate(command).require(command.text)
