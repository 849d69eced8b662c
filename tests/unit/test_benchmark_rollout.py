"""The rollout benchmarks run, and compare like with like."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks import generation


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_engine_and_generate_sample_the_same_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    plain = generation.Qwen2ForCausalLM.generate

    def recording(self, **options):
        shapes.append(tuple(plain(self, **options).shape))

    monkeypatch.setattr(generation.Qwen2ForCausalLM, "generate", recording)
    options = Namespace(groups=2, size=3, tokens=4, times=1, vocab=50_000, repeat=1, cpu=False)
    generation.measure(options)
    longest = max(map(len, generation.make_prompts(2, 1, 50_000)))
    assert shapes == [(6, longest + 4)] * 2
