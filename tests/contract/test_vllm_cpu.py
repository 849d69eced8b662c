"""The real vLLM against transformers: log-prob parity before and after a push, versions in flight, its known traps."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sota_grpo.engines import Engine, EngineOptions, make_engine
from sota_grpo.engines.vllm_engine import PROVIDER, VLLMEngine, shorten
from sota_grpo.errors import RunFailed
from sota_grpo.policy.load import load_model
from sota_grpo.policy.lora import packed_weights
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupRequest, Sampling
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.training.gate import graded_rows, pushed_weights_landed
from tests.builders import generator
from tests.engine_rigs import (
    EOS,
    VOCAB,
    add,
    changed_weights,
    generate,
    largest_gap,
    ragged_requests,
    require_supports,
    step,
    tiny_model,
)
from tests.training_rigs import make_components

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]


class Rig:
    """One vLLM engine and the transformers model whose weights it serves."""

    def __init__(self, folder: Path, *, tied: bool, in_flight: int):
        self.tied, self.in_flight = tied, in_flight  # batches that vLLM has launched and not fetched between two steps
        self.model = tiny_model(tied=tied, seed=7, max_position_embeddings=512)
        self.model.save_pretrained(folder)
        self.base = copy.deepcopy(self.model)
        self.state_before = process_state()
        self.engine = VLLMEngine(EngineOptions(str(folder), eos_token_ids=[EOS]))
        self.state_after = process_state()

    def push(self, seed: int) -> None:
        weights = changed_weights(self.base, seed)
        self.engine.update_weights(weights.items(), self.engine.version + 1)
        self.model.load_state_dict(weights)


def process_state() -> list[object]:
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [*drawn, torch.get_num_threads(), torch.set_num_threads]


TIED = "tied"
#: Of tests of what does not depend on how vLLM schedules: one engine is enough.
on_one_engine = pytest.mark.parametrize("rig", [TIED], indirect=True)


@pytest.fixture(scope="module", params=[TIED, "untied-asynchronous"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The second is scheduled as vLLM does on CUDA and, unless it is made to, never on a CPU."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == TIED:
        rig = Rig(folder, tied=True, in_flight=0)
    else:
        with pytest.MonkeyPatch.context() as patch:
            schedule_asynchronously(patch)
            rig = Rig(folder, tied=False, in_flight=1)
        assert rig.engine._engine.engine_core.engine_core.batch_queue is not None
    yield rig
    rig.engine.close()


def schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def configured(vllm_config: Any) -> None:
        configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(configured))


def test_starting_it_leaves_random_state_and_threads_alone(rig: Rig):
    assert rig.state_after == rig.state_before


@on_one_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_are_vllms_kernels_and_equal_float64(rig: Rig, dtype: torch.dtype):
    """Strided rows and a weight of another dtype are left to the native implementation."""
    from vllm import ir

    normal = functools.partial(torch.randn, generator=generator())
    x, residual, weight = (normal(shape).to(dtype) for shape in ((9, 80), (9, 80), (80,)))
    bound = 1e-6 if dtype == torch.float32 else 6e-3
    ops = (ir.ops.rms_norm, (x,), x), (ir.ops.fused_add_rms_norm, (x, residual), x.double() + residual.double())
    for op, activations, whole in ops:
        rows = whole.double()
        expected = weight.double() * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
        assert op.dispatch(*activations, weight, 1e-5).provider == PROVIDER
        actual = op(*activations, weight, 1e-5)
        normed = actual if torch.is_tensor(actual) else actual[0]
        assert (normed.double() - expected).norm() < bound * expected.norm()
        if normed is not actual:
            assert (actual[1].double() - rows).norm() < bound * rows.norm()
        strided = [part.t().contiguous().t() for part in activations]
        assert op.dispatch(*strided, weight, 1e-5).provider == "native"
        assert op.dispatch(*activations, weight.double(), 1e-5).provider == "native"


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_log_probs_equal_transformers(rig: Rig, temperature: float):
    requests = ragged_requests(6, 4)
    sampling = Sampling(max_tokens=40, temperature=temperature)
    outputs = generate(rig.engine, requests, sampling)
    assert largest_gap(rig.model, requests, outputs, temperature or 1.0) < 1e-5


@pytest.mark.parametrize("top_k", [0, 3])
def test_shorter_ways_through_vllm_change_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch, top_k: int):
    """Tokens, log-probs and versions over a push, with them and without; the calls that they spare are counted.

    While a group with top-k runs, every row has several log-probs a token, of which vLLM makes outputs.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.engine.logprobs import LogprobsProcessor

    calls: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: calls.update([name]) or whole(*args, **named))

    counted(LogprobsProcessor, "update_from_output")
    counted(KVCacheCoordinator, "allocate_new_blocks")
    engine = rig.engine._engine
    owners = engine.output_processor, engine.engine_core.engine_core.scheduler.kv_cache_manager
    samplings = [Sampling(max_tokens=60), Sampling(max_tokens=60, top_k=top_k)]

    def sampled() -> tuple[list[Any], Counter[str]]:
        rig.push(3)
        calls.clear()
        requests = ragged_requests(6, 4, seed=11)
        futures = [rig.engine.submit(each, samplings[index == 5]) for index, each in enumerate(requests)]
        for _ in range(20):
            rig.engine.advance()
        rig.push(4)
        while rig.engine.advance():
            pass
        samples = [sample for future in futures for sample in future.result().samples]
        first = min(int(sample.versions.min()) for sample in samples)
        contents = [(s.token_ids.tolist(), s.log_probs.tolist(), (s.versions - first).tolist()) for s in samples]
        return contents, Counter(calls)

    short, few = sampled()
    for owner, name in zip((owners[0], owners[1], owners[1]), ("process_outputs", "allocate_slots", "cache_blocks")):
        delattr(owner, name)  # the class's is there again
    try:
        whole, many = sampled()
    finally:
        shorten(engine)
    assert short == whole
    assert {version for _, _, versions in short for version in versions} == {0, 1}
    assert top_k or few["update_from_output"] <= 2 * len(short) < many["update_from_output"]
    assert few["allocate_new_blocks"] < many["allocate_new_blocks"] / 4


def held(
    weights: dict[str, torch.Tensor], sums: dict[str, Checksum], dtype: torch.dtype = torch.float32
) -> dict[str, Checksum]:
    """Checksums of the columns that the engine read."""
    return {name: Checksum.of(weight, dtype, sums[name].columns) for name, weight in weights.items()}


def test_every_weight_is_read_back_by_name(rig: Rig):
    """Those of fused layers too, and as they are computed with: on a CPU vLLM packs its matrices."""
    rig.push(8)
    sums = rig.engine.weight_sums()["vllm"]
    assert sums == held(rig.model.state_dict(), sums)
    stale = {"model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"}
    own, new = rig.model.state_dict(), changed_weights(rig.base, 9)
    left_out = {name: own[name] if name in stale else weight for name, weight in new.items()}
    rig.engine.update_weights(left_out.items(), rig.engine.version + 1)
    sums = rig.engine.weight_sums()["vllm"]
    wanted = held(new, sums)
    assert {name for name in wanted if sums[name] != wanted[name]} == stale
    rig.push(8)


@on_one_engine
def test_a_push_reads_some_columns_of_packed_matrices_and_the_next_push_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sota_grpo.engines.vllm_server._FEWEST_COLUMNS", 24)
    stale = "model.layers.1.self_attn.q_proj.weight"
    width = rig.model.state_dict()[stale].shape[1]
    weight_sync = EngineWeightSync(lambda: rig.model.state_dict().items(), rig.engine)
    ranges = [(start, min(start + 24, width)) for start in range(0, width, 24)]
    actual = set()
    for _ in ranges:
        weight_sync.send()
        actual.add(rig.engine.weight_sums()["vllm"][stale].columns)
    assert actual == {*ranges}
    before, update = rig.model.state_dict()[stale].clone(), rig.engine.update_weights
    rig.model.load_state_dict(changed_weights(rig.base, 10))
    with monkeypatch.context() as patch:
        keep = lambda pairs: [(name, before if name == stale else weight) for name, weight in pairs]  # noqa: E731
        patch.setattr(rig.engine, "update_weights", lambda pairs, version: update(keep(pairs), version))
        with pytest.raises(RunFailed, match=rf"vllm has .* the learner has .* of {stale}, and 1 of"):
            weight_sync.send()
    rig.push(8)


def test_a_push_while_groups_run_is_seen_in_their_versions(rig: Rig):
    old = rig.engine.version
    long = GroupRequest(group_id=0, prompt_ids=(3, 4) * 60, num_samples=4, seed=4)
    short = GroupRequest(group_id=1, prompt_ids=(3, 5) * 249, num_samples=1, seed=5)  # room for 14 tokens
    stream = rig.engine.generate([long, short], Sampling(max_tokens=60, ignore_eos=True))
    first = next(stream)
    assert first.group_id == 1
    assert set(first.samples[0].versions.tolist()) == {old}
    rig.push(4)
    (second,) = stream
    for sample in second.samples:
        by_old = 14 + rig.in_flight
        assert sample.versions.tolist() == [old] * by_old + [old + 1] * (60 - by_old)
    # The prompt cache could not be reset under the running group: its old blocks must not serve the next one.
    requests = [GroupRequest(group_id=2, prompt_ids=long.prompt_ids, num_samples=2, seed=6)]
    assert largest_gap(rig.model, requests, generate(rig.engine, requests, Sampling(max_tokens=20)), 1.0) < 1e-5


def test_every_token_is_labelled_with_the_version_that_sampled_it(rig: Rig):
    """Behind a head of zeros every token has the log-prob of a uniform choice; behind no other head has it any."""
    rig.push(6)
    old = rig.engine.version
    requests = ragged_requests(3, 4)
    lengths = {
        request.group_id: 9 + 8 * i for i, request in enumerate(requests)
    }  # the first ends before the push, or in it
    for request in requests:
        add(rig.engine, [request], Sampling(max_tokens=lengths[request.group_id], ignore_eos=True))
    ended = [output for _ in range(9) for _, output in step(rig.engine)]
    assert len(ended) == 1 - rig.in_flight
    weights = changed_weights(rig.base, 6)
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    if rig.tied:
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    rig.engine.update_weights(weights.items(), old + 1)
    while rig.engine.num_in_flight:
        ended += [output for _, output in step(rig.engine)]
    assert sorted(output.group_id for output in ended) == [request.group_id for request in requests]
    for output in ended:
        for sample in output.samples:
            uniform = (sample.log_probs + math.log(VOCAB)).abs() < 1e-5
            assert torch.equal(uniform, sample.versions == old + 1)
            assert len(sample.versions) == lengths[output.group_id]
            assert int(uniform.sum()) == len(uniform) - 9
    rig.push(6)  # what the engine serves is the rig's model again


@on_one_engine
def test_a_push_without_the_head_of_a_tied_model_is_refused(rig: Rig):
    weights = changed_weights(rig.base, 5)
    del weights["lm_head.weight"]
    version, requests = rig.engine.version, ragged_requests(2, 2)
    with pytest.raises(ValueError, match=r"missing .* lm_head\.weight.* push the whole state_dict"):
        rig.engine.update_weights(weights.items(), version + 1)
    assert rig.engine.version == version
    outputs = generate(rig.engine, requests, Sampling(max_tokens=10))
    assert largest_gap(rig.model, requests, outputs, 1.0) < 1e-5


@on_one_engine
def test_more_prompt_tokens_than_one_batch_holds(rig: Rig):
    """Seeded requests whose prefill vLLM cuts in pieces fail on CPU; here the prefills exceed its 4,096-token batch."""
    requests = [
        GroupRequest(i, tuple(torch.randint(2, VOCAB, (450,)).tolist()), num_samples=2, seed=i) for i in range(12)
    ]
    outputs = generate(rig.engine, requests, Sampling(max_tokens=3))
    assert largest_gap(rig.model, requests, outputs, 1.0) < 1e-5


@pytest.mark.parametrize("how", [{"top_k": 2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5}])
def test_sampling_supports_are_reported_and_log_probs_are_over_them(rig: Rig, how: dict[str, Any]):
    requests, sampling = ragged_requests(3, 4), Sampling(max_tokens=10, **how)
    outputs = generate(rig.engine, requests, sampling)
    sampled = [(request.prompt_ids, sample) for request in requests for sample in outputs[request.group_id].samples]
    require_supports(rig.model, sampled, sampling)


@on_one_engine
def test_tokens_that_tie_with_the_last_of_top_k_are_reported_too(rig: Rig):
    weights = {name: torch.zeros_like(tensor) for name, tensor in rig.model.state_dict().items()}
    rig.engine.update_weights(weights.items(), rig.engine.version + 1)
    (output,) = generate(rig.engine, ragged_requests(1, 2), Sampling(max_tokens=4, top_k=2)).values()
    rig.push(7)
    for sample in output.samples:
        assert sample.support.counts.tolist() == [VOCAB] * len(sample.token_ids)
        torch.testing.assert_close(sample.log_probs, torch.full_like(sample.log_probs, -math.log(VOCAB)))


@pytest.fixture(scope="module")
def half() -> Iterator[Engine]:
    """The embedded policy in half precision."""
    engine = make_engine(EngineOptions("tiny", engine="vllm", eos_token_ids=[2], dtype="bfloat16", max_model_len=256))
    yield engine
    engine.close()


def test_weights_rounded_beforehand_are_what_vllm_would_have_made_of_them(half: Engine):
    assert half.weight_dtype == torch.bfloat16
    model = load_model("tiny").eval()
    model.load_state_dict(changed_weights(model))
    requests, sampling = ragged_requests(4, 4, seed=5), Sampling(max_tokens=20)
    served = []
    for dtype in (None, half.weight_dtype):
        half.update_weights(packed_weights(model, dtype=dtype), half.version + 1)
        served.append(generate(half, requests, sampling))  # its own weights cannot be read: it packs them
    sums = half.weight_sums()["vllm"]
    assert sums == held(model.state_dict(), sums, torch.bfloat16)
    for by_vllm, beforehand in zip(*(outputs.values() for outputs in served)):
        for one, other in zip(by_vllm.samples, beforehand.samples):
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.log_probs, other.log_probs)


def test_the_gate_names_a_tensor_whose_effect_half_precision_hides(
    half: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    components = make_components(tmp_path, engine_dtype=torch.bfloat16)
    components.rollouts.engine, components.weight_sync.engine = half, half
    components.weight_sync.send(version=0)
    components.rows = graded_rows(components)
    push, first = half.update_weights, {name: w.clone() for name, w in components.weight_sync.policy_weights()}
    for stale in (None, "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        keep = lambda pairs, stale=stale: [(name, first[name] if name == stale else w) for name, w in pairs]  # noqa: E731
        monkeypatch.setattr(half, "update_weights", lambda pairs, version, keep=keep: push(keep(pairs), version))
        check = pushed_weights_landed(components)
        assert check.passed is (stale is None), check.sentence
        assert ("not verified" in check.sentence, "did not load" in check.sentence) == (False, stale is not None)
        assert stale is None or check.sentence.endswith(f"; the engine did not load {stale}")


def test_stop_strings_and_further_arguments(tmp_path: Path) -> None:
    """vLLM ends a response itself; what it would have said without them, up to there, is what comes out."""
    argument = {"max_num_batched_tokens": 512}
    stop = ("e", "11")
    options = EngineOptions(
        "tiny", engine="vllm", eos_token_ids=[2], stop=stop, engine_kwargs=argument, max_model_len=256
    )
    engine = make_engine(options)
    try:
        assert engine._engine.vllm_config.scheduler_config.max_num_batched_tokens == 512
        requests = [replace(one, num_samples=8) for one in ragged_requests(3)]
        sampling = Sampling(max_tokens=48, temperature=1.5, ignore_eos=True)
        ended = generate(engine, requests, sampling)
        stops, engine.stops, engine._stop = engine.stops, None, {}
        own = {group: stops.cut(output) for group, output in generate(engine, requests, sampling).items()}
        assert any(not sample.truncated for output in own.values() for sample in output.samples)
        for group, output in own.items():
            for one, other in zip(output.samples, ended[group].samples, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert (one.truncated, len(one.versions)) == (other.truncated, len(other.versions))
                torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-3, atol=1e-3)
    finally:
        engine.close()
