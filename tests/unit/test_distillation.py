"""On-policy distillation: the exact gradient, and runs that learn from a teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sota_grpo import keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.replay import replayed
from sota_grpo.policy.load import load_model, load_tokenizer, save_hf
from sota_grpo.recording.run_files import METRICS_FILE
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.run.app import train


@pytest.mark.parametrize("objective", ["clipped", "cispo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(objective: str) -> None:
    """Whatever policy sampled; beside the task it is the weighted sum of both gradients.

    A vocabulary of 5, each token once and weighed by its probability under the policy that sampled, in float64.
    """
    logits, sampler, teacher, advantage = torch.randn(4, 5, dtype=torch.float64)
    sampler, teacher = sampler.log_softmax(0), teacher.log_softmax(0)
    logits.requires_grad_()

    def rows(values: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(values), values], 1)

    entries = {keys.FULL_TOKENS: rows(torch.arange(5)), keys.ASSISTANT_MASK: rows(torch.ones(5)).bool()}
    entries |= {keys.LOG_PROBS: rows(sampler), keys.REF_LOG_PROBS: rows(teacher), keys.LOSS_WEIGHT: rows(sampler.exp())}
    batch = TensorDict(entries | {keys.ADVANTAGE: advantage.reshape(-1, 1, 1)}, [5])
    actor = nn.Module()
    actor.forward = lambda td: td.set(keys.LOG_PROBS, rows(logits.log_softmax(0)))

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits)[0]

    options = {"objective": objective, "clip_epsilon": (1.0, 1e12), "entropy_bonus": False}
    expected = gradient((logits.softmax(0) * (logits.log_softmax(0) - teacher)).sum())
    loss = GRPOLoss(actor, distill_coeff=0.7, advantage_coeff=0.0, **options)
    alone = loss(batch)
    torch.testing.assert_close(gradient(alone.loss_objective), 0.7 * expected)
    torch.testing.assert_close(alone.reverse_kl, (sampler - teacher).mean())
    task = gradient(GRPOLoss(actor, **options)(batch).loss_objective)
    both = GRPOLoss(actor, distill_coeff=0.7, advantage_coeff=0.3, **options)(batch).loss_objective
    torch.testing.assert_close(gradient(both), 0.7 * expected + 0.3 * task)
    own = batch.set(keys.REF_LOG_PROBS, rows(logits.detach().log_softmax(0)))
    assert not gradient(loss(own).loss_objective).any()
    assert not loss.advantage_only  # groups whose rewards are all equal have a gradient


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded policy with other weights."""
    model = load_model("tiny")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.97)
    return str(save_hf(model, load_tokenizer("tiny"), tmp_path_factory.mktemp("teacher") / "hf"))


SMALL = (
    *("engine=transformers", "eval.mode=off", "train.export_hf=false", "logging.report=false", "optimizer.lr=1e-3"),
    *("env.num_envs=16", "env.repeats=4", "env.difficulty=1", "env.reward_workers=0", "env.max_samples=64"),
    *("env.num_heldout=16", "train.dialog_turns_per_batch=16", "train.optim_batch_size=16", "optimizer.warmup_steps=0"),
    *("train.total_dialog_turns=32", "train.checkpoint_frequency=1", "inference_model.max_tokens=24"),
)
ALONE = ("algorithm.distill_coef=1", "algorithm.advantage_coef=0")


def run(run_dir: Path, *overrides: str) -> list[dict]:
    train(compose("grpo_cpu", [*SMALL, *overrides]), run_dir)
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def test_a_run_learns_from_its_teacher_and_is_replayed(teacher: str, tmp_path: Path) -> None:
    """Beside the task, in two optimizer steps and epochs, through the strict gate; where no response is right, no
    group's rewards differ, and the teacher still teaches."""
    options = (
        "algorithm.distill_coef=0.5",
        "train.optim_batch_size=8",
        "train.epochs=2",
        "algorithm.entropy_coef=0.01",
    )
    rows = run(tmp_path / "run", f"ref_model.name={teacher}", *options)
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["distill/reverse_kl"] != row["kl"] > 0  # k1 and k3 of the same
    assert replayed(tmp_path / "run", 1)["agrees"]
    other = replayed(tmp_path / "run", 1, ["algorithm.distill_coef=2"])["figures"]["grad_norm"]
    assert other["run"] != other["replayed"]
    assert "rewards were equal" not in (tmp_path / "run" / "training.log").read_text()


@pytest.mark.slow
def test_a_teacher_in_a_process_says_what_one_in_this_process_says(teacher: str, tmp_path: Path) -> None:
    """On Ray beside the learner: with equal admission the first step is the same."""
    here, there = (
        run(tmp_path / name, f"ref_model.name={teacher}", *ALONE, "check.mode=off", *options)
        for name, options in (("here", ()), ("there", ("mode=async", "env.num_envs=32", "train.max_policy_age=0")))
    )
    for one, other in zip(here, there, strict=True):
        for figure in ("distill/reverse_kl", "kl", "grad_norm", "loss/objective"):
            assert other[figure] == pytest.approx(one[figure], rel=1e-3)
