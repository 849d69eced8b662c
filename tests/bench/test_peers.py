"""Ours, TRL and TorchRL do the same work: the same prompts, as many tokens, and one gradient from the same rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.ours import Ours
from benchmarks.peers.run import distance
from benchmarks.peers.work import Case, Folder, prepare
from sota_grpo import keys

pytestmark = pytest.mark.bench
trl = pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")

TINY = Case("tiny", vocab=512, prompt=12, group=4, response=9, prompts=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    return prepare(TINY, tmp_path_factory.mktemp("work"), seed=int(torch.randint(1 << 30, ())))


def gradient(system) -> dict[str, torch.Tensor]:
    """What the optimizer is given in one learn phase."""
    kept: dict[str, torch.Tensor] = {}

    def keep(*_) -> None:
        kept.update({name: parameter.grad.clone() for name, parameter in system.named_parameters().items()})

    handle = system.optimizer.register_step_pre_hook(keep)
    system.learn()
    handle.remove()
    return kept


def phases_of(system) -> dict[str, float]:
    actual = system.step()
    assert sum(seconds for phase, seconds in actual.items() if phase != "whole") <= actual["whole"] * 1.001
    assert min(actual["generate"], actual["ref"], actual["learn"]) > 0
    return actual


def test_gradients_from_the_same_rows_agree_to_five_digits(folder) -> None:
    from benchmarks.peers.torchrl import TorchRL
    from benchmarks.peers.trl import Trl

    made = [lambda: Trl(folder), lambda: Trl(folder, 2), lambda: Ours(folder, "transformers")]
    made += [lambda: TorchRL(folder, "transformers"), lambda: TorchRL(folder, "transformers", micro=3)]
    actual = []
    for make in made:
        system = make()
        actual.append(gradient(system))
        phases_of(system)
        system.close()
    reference, *others = actual
    for other in others:
        assert distance(other, reference) < 1e-5
    assert distance({name: 1.01 * value for name, value in reference.items()}, reference) > 5e-3


def test_a_step_is_the_same_prompts_and_as_many_tokens(folder) -> None:
    from benchmarks.peers.trl import Trl

    theirs, ours = Trl(folder), Ours(folder, "transformers")
    theirs.step()
    batch = ours.parts.collector.next_batch()
    lengths = [int(row[keys.ASSISTANT_MASK].sum()) for row in batch]
    metrics = theirs.trainer._metrics["train"]
    assert lengths == [TINY.response] * TINY.rows
    assert metrics["completions/min_length"] == metrics["completions/max_length"] == [TINY.response]
    assert metrics["num_tokens"] == [sum(len(row[keys.FULL_TOKENS]) for row in batch)]
    assert metrics["frac_reward_zero_std"] == [0.0]
    theirs.close()
    ours.close()
