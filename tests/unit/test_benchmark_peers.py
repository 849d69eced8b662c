"""The benchmark against the peers, without the peers: its work, its floor, its order of things, its tables."""

from __future__ import annotations

import doctest
import importlib
import json
from typing import ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peers import floor
from benchmarks.peers.history import compare_and_store, ratios
from benchmarks.peers.host import LEARN, STEP
from benchmarks.peers.report import history_line
from benchmarks.peers.results import CaseResult, Measured
from benchmarks.peers.run import Plan, Runner
from benchmarks.peers.systems import OURS, OURS_VLLM, TORCHRL, TORCHRL_AS_IT_COMES, TRL, TRL_DEFAULT_BATCH
from benchmarks.peers.table import PROMISES, promises
from benchmarks.peers.work import BASE, LONG, VOCAB, Case, draw_prompts, make_model, make_rows
from sota_grpo.functional.flops import Load, forward_flops

TINY = Case("tiny", vocab=512, prompt=10, group=4, response=6, prompts=2)


OF_TRL = ("learning", "learning_trl", "trainer_trl", "peers.trl")
NAMES = ("corridors", "soak", "presets", "simulation", "trainer_work", *OF_TRL)
OF_PEERS = ("floor", "history", "memory", "ours", "paced", "results", "run", "work")


@pytest.mark.parametrize("name", [*NAMES, *(f"peers.{name}" for name in OF_PEERS)])
def test_the_examples_in_the_docstrings_hold(name) -> None:
    if name in OF_TRL:
        pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")
    actual = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert actual.attempted
    assert not actual.failed


def test_rows_have_signal_in_every_group_and_ratios_on_both_sides_of_the_clip() -> None:
    seed = int(torch.randint(1 << 30, ()))
    rows = make_rows(TINY, draw_prompts(TINY, TINY.prompts, seed), seed)
    grouped = rows["advantages"].view(TINY.prompts, TINY.group)
    torch.testing.assert_close(grouped.sum(1), torch.zeros(TINY.prompts), atol=1e-5, rtol=0)
    assert (grouped.abs().amax(1) > 1e-3).all()
    model = make_model(TINY.vocab, seed)
    with torch.no_grad():
        logits = model(torch.stack([rows["prompts"][0][:7]] * TINY.rows)).logits[:, -1]
    log_p = logits.log_softmax(-1).gather(1, rows["responses"][:, :1])
    ratio = (log_p - rows["old"]).exp()
    assert (ratio < 0.8).any()
    assert (ratio > 1.2).any()


def test_the_floor_counts_the_operations_that_torch_counts() -> None:
    """On one row, where nothing is shared, with logits everywhere and attention over the whole square."""
    length = int(torch.randint(3, 12, ()))
    model = make_model(TINY.vocab)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, length), dtype=torch.int64))
    square = Load(positions=length, pairs=length * length, predicted=length)
    # torch also counts the products that make the rotary angles, one per position and pair of dimensions
    rotary = 2 * length * (32 // 2)
    assert counter.get_total_flops() - forward_flops(floor.model_shape(TINY), square) in (0, rotary)


def test_the_floor_of_a_step_shares_prompts_and_learns_in_three_passes(monkeypatch) -> None:
    monkeypatch.setattr(floor, "matmul_seconds", lambda rows, inner, columns: 2 * rows * inner * columns / 1e9)
    actual = floor.Floor(TINY, [10, 12]).measure()
    assert actual["rate_wide"] == pytest.approx(1e9)
    assert actual["learn"] == pytest.approx(3 * actual["ref"])
    alone = floor.Floor(Case("one", vocab=512, prompt=10, group=1, response=6, prompts=2), [10, 12]).measure()
    assert actual["ref"] < 4 * alone["ref"], "four responses per prompt cost less than four times one"


class FakeHost:
    """Answers at once, with a second for ours and four for another; records each request."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, name, folder, log):
        self.name = name

    def ready(self) -> None: ...

    def ask(self, question, **options):
        self.asked.append((self.name, question))
        seconds = 1.0 if self.name == OURS else 4.0
        return {"seconds": seconds, "whole": 2 * seconds, "bytes": 5 if options["memory"] else None}

    def close(self) -> None:
        self.asked.append((self.name, "close"))


def test_systems_take_turns_and_the_order_turns_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.peers.run.missing_packages", lambda name: [])
    monkeypatch.setattr(floor, "matmul_seconds", lambda rows, inner, columns: 1e-3)
    plan = Plan(TINY, dict.fromkeys((OURS, TORCHRL), (LEARN, STEP)), repeats=2)
    actual = Runner(plan, tmp_path / "case", lambda line: None, FakeHost).run()
    learned = [name for name, question in FakeHost.asked if question == LEARN]
    assert learned == [OURS, TORCHRL, OURS, TORCHRL, TORCHRL, OURS]
    assert actual.systems[OURS].learn == [1.0, 1.0], "the first run is not counted"
    assert actual.systems[OURS].learn_bytes == actual.systems[OURS].step_bytes == 5
    assert actual.ratio("learn", TORCHRL, OURS) == actual.ratio("whole", TORCHRL, OURS) == 4.0
    assert len(actual.floor) == 3
    assert FakeHost.asked[-2:] == [(OURS, "close"), (TORCHRL, "close")]


def result(case: Case, learn: dict[str, float], whole: dict[str, float], **memory: int) -> CaseResult:
    systems = {name: Measured(learn=[seconds]) for name, seconds in learn.items()}
    for name, seconds in whole.items():
        systems.setdefault(name, Measured()).steps = [{"learn": seconds / 2, "whole": seconds}]
    for name, actual in systems.items():
        actual.learn_bytes = memory.get(name)
    actual = dict.fromkeys(("generate", "ref", "learn", "whole"), 0.5) | {"rate_wide": 2e11, "rate_narrow": 1e11}
    return CaseResult(case, systems, [actual])


def test_promises_are_distinguished_from_measurements() -> None:
    base = result(
        BASE, {OURS: 1.0, TRL: 3.6, TORCHRL: 9.9, TORCHRL_AS_IT_COMES: 11.0}, {OURS_VLLM: 2.0, OURS: 4.0, TRL: 5.0}
    )
    vocab = result(VOCAB, {OURS: 1.0, TRL: 3.6}, {}, **{OURS: 100, TRL: 299})
    lines = promises([base, vocab]).splitlines()[2:]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["3.60x", "holds |"], ["-", "not measured |"], ["9.90x", "FALLS SHORT |"], ["11.00x", "holds |"],
        ["2.50x", "holds |"], ["-", "not measured |"], ["1.25x", "FALLS SHORT |"], ["-", "not measured |"],
        ["2.99x", "FALLS SHORT |"], ["-", "not measured |"],
    ]  # fmt: skip
    assert {promise.case for promise in PROMISES} == {BASE.name, LONG.name, VOCAB.name}
    base = result(BASE, {OURS: 1.0, TRL: 4.0}, {})
    assert "holds" in promises([base])
    base.systems[OURS].gradient_distance = 0.5
    assert "holds" not in promises([base])
    assert "OTHER WORK" in promises([base])
    base = result(BASE, {OURS: 1.0, TRL: 4.0, TRL_DEFAULT_BATCH: 3.0}, {})  # the faster setting of a peer counts
    assert "| 3.5x | 3.00x | FALLS SHORT |" in promises([base])


def test_a_ratio_that_falls_is_compared_with_lines_of_the_same_cpu_and_stored(tmp_path) -> None:
    file = tmp_path / "history.jsonl"

    def stored(cpu: str, learn: float) -> list[str]:
        base = result(BASE, {OURS: 1.0, TRL: learn}, {OURS_VLLM: 2.0, OURS: 4.0, TRL: 8.0}, **{OURS: 100, TRL: 250})
        return compare_and_store(history_line(ratios([base])) | {"cpu": cpu}, file)

    assert [stored("A", 4.0), stored("A", 4.2), stored("A", 3.4), stored("B", 2.0)] == [[], [], [], []]
    (sentence,) = stored("A", 3.0)
    assert sentence.startswith(f"learn: {OURS} is 3.00 times TRL, 25 % below 4.00, the median of the last 3 on this")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["cpu"] for line in lines] == ["A", "A", "A", "B", "A"]
    expected = {f"learn: {OURS}": 3.0, f"whole: {OURS_VLLM}": 4.0, f"whole: {OURS}": 2.0, f"memory: {OURS}": 2.5}
    assert lines[-1]["ratios"] == expected
    assert lines[-1].keys() == {"commit", "date", "cpu", "versions", "ratios"}
