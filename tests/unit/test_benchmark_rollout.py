"""The rollout benchmarks run, and compare like with like."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import generation


def test_engine_and_generate_sample_the_same_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    plain = generation.Qwen2ForCausalLM.generate

    def recording(self, **options):
        shapes.append(tuple(plain(self, **options).shape))

    monkeypatch.setattr(generation.Qwen2ForCausalLM, "generate", recording)
    options = Namespace(groups=2, size=3, tokens=4, times=1, vocab=500, repeat=1, cpu=False)
    generation.measure(options)
    longest = max(map(len, generation.make_prompts(2, 1, 500)))
    assert shapes == [(6, longest + 4)] * 2
