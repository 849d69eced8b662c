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
from tests.builders import generator

VOCAB = 4


class TwoTokens(nn.Module):
    """A policy over all ``VOCAB ** 2`` responses of two tokens: a table of logits for the first and for the second."""

    def __init__(self, stream: torch.Generator):
        super().__init__()
        draw = {"generator": stream, "dtype": torch.float64}
        self.first, self.second = (nn.Parameter(torch.randn(*size, **draw)) for size in ((VOCAB,), (VOCAB, VOCAB)))

    def log_probs(self) -> Tensor:
        """``[VOCAB ** 2, 2]``, of both tokens of every response."""
        first, second = self.first.log_softmax(-1), self.second.log_softmax(-1)
        return torch.stack([first.repeat_interleave(VOCAB), second.flatten()], dim=-1)

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set(keys.LOG_PROBS, nn.functional.pad(self.log_probs(), (1, 0)))  # behind a prompt of one token

    def kl(self, other: TwoTokens, visits: Tensor) -> Tensor:
        """Sum over states of KL(self, other) of the next token, each as often as ``visits`` (its first is 1)."""
        each = [
            (mine.log_softmax(-1).exp() * (mine.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1)
            for mine, theirs in ((self.first[None], other.first[None]), (self.second, other.second))
        ]
        return (visits * torch.cat(each)).sum()


def every_response(behaviour: TwoTokens, teacher: TwoTokens, advantage: Tensor) -> TensorDict:
    """One row for each response; a token weighs as much as the response is probable, so that sums are expectations."""
    sampled, judged = behaviour.log_probs().detach(), teacher.log_probs().detach()
    masks = torch.tensor([False, True, True]).expand(VOCAB**2, 3)
    wide = {"log_probs": sampled, "ref": judged, "weight": sampled.sum(-1, keepdim=True).exp().expand(-1, 2)}
    columns = {name: nn.functional.pad(value, (1, 0)) for name, value in wide.items()}
    return TensorDict(
        {
            "tokens": {"full": torch.zeros(VOCAB**2, 3, dtype=torch.int64)},
            "masks": {"all_assistant_mask": masks, "all_attention_mask": torch.ones_like(masks)},
            "log_probs": {"full": columns["log_probs"]},
            "next": {"ref_log_probs": {"full": columns["ref"]}},
            "advantage": advantage.reshape(-1, 1, 1),
            "loss_weight": columns["weight"],
        },
        batch_size=[VOCAB**2],
    )


def gradient(value: Tensor, policy: TwoTokens) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, [policy.first, policy.second])])


@pytest.mark.parametrize("objective", ["clipped", "cispo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_in_every_visited_state(objective: str) -> None:
    """Whatever policy sampled; beside the task it is the weighted sum of both gradients."""
    stream = generator()
    policy, behaviour, teacher = (TwoTokens(stream) for _ in range(3))
    advantage = torch.randn(VOCAB**2, generator=stream, dtype=torch.float64)
    batch = every_response(behaviour, teacher, advantage)
    options = {"objective": objective, "clip_epsilon": (1.0, 1e12), "entropy_bonus": False}
    visits = torch.cat([torch.ones(1), behaviour.first.detach().softmax(-1)])
    expected = gradient(policy.kl(teacher, visits), policy)
    alone = GRPOLoss(policy, distill_coeff=0.7, advantage_coeff=0.0, **options)(batch)
    torch.testing.assert_close(gradient(alone.loss_objective, policy), 0.7 * expected)
    torch.testing.assert_close(alone.reverse_kl, (behaviour.log_probs() - teacher.log_probs()).mean().detach())
    task = gradient(GRPOLoss(policy, **options)(batch).loss_objective, policy)
    both = GRPOLoss(policy, distill_coeff=0.7, advantage_coeff=0.3, **options)(batch).loss_objective
    torch.testing.assert_close(gradient(both, policy), 0.7 * expected + 0.3 * task)
    still = GRPOLoss(policy, distill_coeff=0.7, advantage_coeff=0.0, **options)
    assert not gradient(still(every_response(behaviour, policy, advantage)).loss_objective, policy).any()
    assert not still.advantage_only  # groups whose rewards are all equal have a gradient


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
