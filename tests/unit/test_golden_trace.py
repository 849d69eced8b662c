"""Ten optimizer steps against a committed trace: a change of the numerics, wanted or not, shows here.

The rows are scripted and the model is random from a fixed seed, in float32 on one thread. Exact equality across
machines is impossible, since BLAS libraries and vector units add in different orders: without AVX the ten steps differ
by up to 1e-6 from those with it. Hence a relative 1e-5. A change that is meant to move the numbers regenerates them:
``python -m tests.unit.test_golden_trace`` prints the table to paste here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from sota_grpo import keys
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.training.learner import Learner
from tests.unit.tiny_models import VOCAB, make_model

STEPS, ROWS = 10, 8
NAMES = ("loss", "grad_norm", "kl", "ess")
TRACE = [
    (-0.74699578, 0.50426948, 0.019194406, 0.98052783),
    (-1.0136955, 0.39909172, 0.016990064, 0.98093323),
    (-0.73920672, 0.47590005, 0.018297113, 0.98029521),
    (-0.73035545, 0.44823906, 0.016615544, 0.98091747),
    (-1.015209, 0.48760438, 0.016672359, 0.98053512),
    (-0.7528363, 0.37452012, 0.016693025, 0.97633094),
    (-0.73932295, 0.44462818, 0.016474234, 0.97806771),
    (-1.0110066, 0.57895023, 0.015726976, 0.97832017),
    (-0.79376326, 0.44555125, 0.017163333, 0.98116681),
    (-0.79858733, 0.45019585, 0.015142631, 0.98183014),
]


def scripted_rows(step: int) -> list[TensorDict]:
    """Rows of unequal length by formula, no random number in them."""
    rows = []
    for index in range(ROWS):
        prompt, response = 1 + (index + step) % 4, 2 + (3 * index + step) % 7
        position = torch.arange(prompt + response)
        assistant = position >= prompt
        wave = torch.sin(position * 1.7 + index + 0.3 * step)
        rows.append(
            TensorDict(
                {
                    keys.FULL_TOKENS: 3 + (position * 11 + index * 7 + step * 5) % (VOCAB - 3),
                    keys.ATTENTION_MASK: torch.ones_like(assistant),
                    keys.ASSISTANT_MASK: assistant,
                    keys.ADVANTAGE: torch.tensor([[1.5 if (index + step) % 3 else -0.5]]),
                    keys.LOG_PROBS: torch.where(assistant, 0.2 * wave, 0.0),  # what the policy says is added later
                    keys.REF_LOG_PROBS: torch.where(assistant, 0.3 * wave.square(), 0.0),
                }
            )
        )
    return rows


@contextmanager
def one_thread(seed: int) -> Iterator[None]:
    """One thread and a fixed seed inside; both, and the random state, as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def measured_trace(dump_dir: Path) -> list[tuple[float, ...]]:
    """Loss, gradient norm, KL and effective sample size of each of the ten steps."""
    with one_thread(seed=7):
        policy = CausalPolicy(make_model().train())
        loss = GRPOLoss(policy, entropy_bonus=False, kl_to_ref_coeff=0.1)
        settings = LearnerSettings(
            lr=1e-3, total_steps=STEPS, optim_batch_size=ROWS, schedule="cosine", warmup_steps=2, micro_batch_tokens=40
        )
        learner = Learner(policy, loss, settings, pad_token_id=0, dump_dir=dump_dir)
        steps = [scripted_rows(step) for step in range(STEPS)]
        for rows in steps:  # engine and reference lie near the first policy
            for row, own in learner.scored(rows):
                for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
                    row.set(key, own + row[key])
        updates = [learner.update(lazy_stack(rows)) for rows in steps]
    return [(one["loss/objective"] + one["loss/kl"], one["grad_norm"], one["kl"], one["ess"]) for one in updates]


def test_ten_steps_follow_the_committed_trace(tmp_path: Path) -> None:
    actual = measured_trace(tmp_path)
    assert len(actual) == len(TRACE) == STEPS
    for step, (mine, committed) in enumerate(zip(actual, TRACE)):
        assert dict(zip(NAMES, mine)) == pytest.approx(dict(zip(NAMES, committed)), rel=1e-5), f"step {step}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for values in measured_trace(Path(directory)):
            print("    (" + ", ".join(f"{value:.8g}" for value in values) + "),")
