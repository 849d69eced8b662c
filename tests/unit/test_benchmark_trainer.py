"""The trainer benchmark: its models are those it names, its work is what it says, and both trainers do the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers.models.auto import CONFIG_MAPPING

from benchmarks.trainer import Ours, measure
from benchmarks.trainer_work import SHAPES, Case, make_model, make_rows, padded_load, shared_loads
from sota_grpo import keys
from sota_grpo.functional.flops import Load
from sota_grpo.policy.load import architecture_from
from sota_grpo.rl.planner import groups_by_prompt, row_prompts

SMALL = Case(tokens=140, prompt=20, response=10, group=4)


@pytest.mark.parametrize(("shape", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen2.5-1.5b", 1_543_714_304)])
def test_the_named_models_have_their_published_numbers_of_parameters(shape: str, parameters: int) -> None:
    family, sizes = SHAPES[shape]
    assert architecture_from(CONFIG_MAPPING[family](**sizes)).parameters == parameters


def test_rows_fill_the_packed_tokens() -> None:
    """20 + 4 * 10, twice, leave 20 of 140: no room for another prompt and a response."""
    rows = make_rows(SMALL)
    assert [(group.prompt, group.responses) for group in groups_by_prompt(row_prompts(rows))] == [(20, (10,) * 4)] * 2
    pairs = 2 * (20 * 21 // 2 + 4 * (10 * 20 + 10 * 11 // 2))
    assert shared_loads(rows) == Load(positions=120, pairs=pairs, predicted=80)


def test_measured_figures_are_those_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s, 1e9 operations per second: utilisation and distance from the floor by hand."""
    rows = make_rows(SMALL)
    ours = Ours(SMALL, rows, tmp_path)
    monkeypatch.setattr("benchmarks.trainer.timed_step", lambda system, device: (2.0, None))
    (actual,) = measure(SMALL, [ours], rows, ours.learner.shape, 1e9, repeat=3)
    load, shape = shared_loads(rows), ours.learner.shape
    weights = shape.trainable_weights * load.positions + shape.head_weights * load.predicted
    flops = 6 * weights + 12 * shape.attention_width * load.pairs
    assert actual["mfu"] == pytest.approx(flops / 2e9, abs=1e-4)
    assert actual["times_floor"] == pytest.approx(2e9 / flops, abs=1e-3)
    assert (actual["packed_tokens_per_s"], actual["row_tokens_per_s"]) == (60, 120)


@pytest.mark.bench
@pytest.mark.parametrize("lora", [0, 2])
def test_trl_does_the_same_work(lora: int, tmp_path: Path) -> None:
    """From the same weights and rows both find the same gradient, and TRL's layout is the padded one."""
    pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")
    from benchmarks.trainer_trl import Trl

    case = Case(tokens=140, prompt=20, response=10, group=4, ragged=0.6, lora=lora)
    rows = make_rows(case)
    ours, peer = Ours(case, rows, tmp_path), Trl(case, rows, tmp_path)
    assert peer.step() == pytest.approx(ours.step(), rel=1e-3)
    longest = max(row[keys.FULL_TOKENS].shape[0] for row in rows)
    assert peer.load == padded_load(len(rows), longest, predicted=len(rows) * (longest - 20))
    kept = [sum(tensor.numel() for tensor in system.tensors()) for system in (ours, peer)]
    assert kept[0] == kept[1]


@pytest.mark.bench
def test_a_library_replaces_layers_for_its_own_steps_only() -> None:
    pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")
    from benchmarks.trainer_trl import LayerKernels

    model = make_model(SMALL)
    module = sys.modules[type(model).__module__]
    before, kernels = dict(vars(module)), LayerKernels(model)
    with kernels:
        module.apply_rotary_pos_emb = module.Qwen2MLP = "theirs"
    assert dict(vars(module)) == before
    with kernels:
        assert (module.apply_rotary_pos_emb, module.Qwen2MLP) == ("theirs", "theirs")
    assert dict(vars(module)) == before
    assert set(kernels.replaced) == {"apply_rotary_pos_emb", "Qwen2MLP"}
