"""The rollout benchmarks run, and compare like with like."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks import collector, generation


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("engine", ["scripted", pytest.param("transformers", marks=pytest.mark.slow)])
def test_the_collector_is_measured_beside_its_engine(engine: str) -> None:
    options = Namespace(engine=engine, groups=2, size=3, tokens=5, repeat=1, tokens_per_s=1000.0)
    found = collector.measure(options)
    if engine == "scripted":  # which sleeps for as long as it is told
        assert min(found["engine_s"], found["collector_s"]) >= 0.03
    assert found["ratio"] > 0


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
