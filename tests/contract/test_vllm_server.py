"""The engine over HTTP with a real vLLM server on CPU: parity, pushes in flight, who may ask, how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import urllib3
from transformers import AutoModelForCausalLM, PreTrainedModel

import sota_grpo
from sota_grpo.engines import EngineOptions
from sota_grpo.engines.server_engine import ServerEngine, server_engine
from sota_grpo.policy.lora import adapter_pack, add_lora, engine_weights
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupRequest, Sampling
from tests.engine_rigs import (
    add,
    changed_weights,
    generate,
    largest_gap,
    ragged_requests,
    reference_log_probs,
    step,
)
from tests.process_rigs import members, wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,  # the protocol against a server made here: tests/unit/test_server_engines.py
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]
POLICY = str(Path(sota_grpo.__file__).parent / "assets" / "tiny")
LONG = 900  # tokens of a sample that is not to end while something else is done
EOS = 2


class Rig:
    """One vLLM server with the embedded policy, whose head is tied, and transformers' model of the same weights."""

    def __init__(self, log_path: Path):
        self.log_path = log_path
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(POLICY).eval()
        options = EngineOptions(
            POLICY, engine="vllm_server", eos_token_ids=[EOS], max_rows=64, max_model_len=1024, log_path=log_path
        )
        self.engine: ServerEngine = server_engine(options)
        assert self.engine._process is not None
        self.group = self.engine._process.pid

    def push(self, seed: int) -> None:
        weights = changed_weights(self.model, seed)
        self.engine.update_weights(weights.items(), self.engine.version + 1)
        self.model.load_state_dict(weights)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("run") / "vllm_server.log")
    yield rig
    rig.engine.close()
    assert members(rig.group) == []


def test_log_probs_equal_transformers_after_each_push(rig: Rig):
    requests = ragged_requests(6, 4)  # the last prompt, of 37 tokens, is cached: not to be used after a push
    for seed in (1, 2):
        before = generate(rig.engine, requests, Sampling(max_tokens=40))
        rig.push(seed)
        assert largest_gap(rig.model, requests, before, 1.0) > 0.01
        for temperature in (0.7, 0.0, 1.0):
            after = generate(rig.engine, requests, Sampling(max_tokens=40, temperature=temperature))
            assert largest_gap(rig.model, requests, after, temperature or 1.0) < 1e-4
        versions = {int(v) for output in after.values() for sample in output.samples for v in sample.versions}
        assert versions == {rig.engine.version}
        ((_, sums),) = rig.engine.weight_sums().items()
        weights = rig.model.state_dict().items()
        assert sums == {name: Checksum.of(weight, columns=sums[name].columns) for name, weight in weights}


def test_a_push_while_groups_run_is_seen_in_their_versions_and_ends_none(rig: Rig):
    old = rig.engine.version
    requests = [GroupRequest(group_id=i, prompt_ids=(30 + i, 4, 5), num_samples=2, seed=i) for i in range(3)]
    short = GroupRequest(group_id=9, prompt_ids=(40, 4), num_samples=1, seed=9)
    before = AutoModelForCausalLM.from_pretrained(POLICY).eval()
    before.load_state_dict(rig.model.state_dict())
    add(rig.engine, requests, Sampling(max_tokens=LONG, ignore_eos=True))
    add(rig.engine, [short], Sampling(max_tokens=20, ignore_eos=True))
    ended = []
    while not ended:
        ended += step(rig.engine)  # the short one: by then the long ones have about 20 tokens
    assert [output.group_id for _, output in ended] == [9]
    rig.push(4)
    while rig.engine.num_in_flight:
        ended += step(rig.engine)
    assert sorted(output.group_id for _, output in ended) == [0, 1, 2, 9]
    for _, output in ended[1:]:
        for sample in output.samples:
            num_old = int((sample.versions == old).sum())
            assert 0 < num_old < LONG
            assert sample.versions.tolist() == [old] * num_old + [old + 1] * (LONG - num_old)
            first = sample.token_ids[:num_old]
            wanted = reference_log_probs(before, requests[output.group_id].prompt_ids, first, 1.0)
            assert float((wanted - sample.log_probs[:num_old]).abs().max()) < 1e-4


def test_of_merged_weights_those_without_an_adapter_stay(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Whole first, then the merged layers alone: vLLM keeps what the file leaves out."""
    sizes, write = [], rig.engine._weights.write

    def counted(weights: dict[str, torch.Tensor]) -> Path:
        folder = write(weights)
        sizes.append((folder / "model.safetensors").stat().st_size)
        return folder

    monkeypatch.setattr(rig.engine._weights, "write", counted)
    adapted = add_lora(AutoModelForCausalLM.from_pretrained(POLICY).eval(), r=4, alpha=8)
    rig.engine.base = partial(engine_weights, adapted, merged=False)
    served, requests = AutoModelForCausalLM.from_pretrained(POLICY).eval(), ragged_requests(6, 4)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.05)
        rig.engine.update_weights(adapter_pack(adapted), rig.engine.version + 1)
        served.load_state_dict(dict(engine_weights(adapted)))
        assert largest_gap(served, requests, generate(rig.engine, requests, Sampling(max_tokens=40)), 1.0) < 1e-4
    whole, again = sizes
    own = sum(value.nbytes for _, value in engine_weights(adapted, base=False))
    assert own < again < own + 20_000 < whole  # the file's header names what it has
    rig.push(4)


def test_an_aborted_group_frees_the_server(rig: Rig):
    endless = GroupRequest(group_id=1, prompt_ids=(5, 6), num_samples=60, seed=1)
    future = rig.engine.submit(endless, Sampling(max_tokens=900, ignore_eos=True))
    for _ in range(5):
        rig.engine.advance()
    future.cancel()
    rig.engine.advance()
    assert rig.engine.num_in_flight == 0
    metrics = rig.engine._client.get  # vLLM's own count of what runs
    wait_for(lambda: "num_requests_running{" in (text := metrics("/metrics", timeout_s=5)) and _running(text) == 0)


def _running(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_no_other_user_of_the_machine_can_push_weights(rig: Rig):
    url = rig.engine._client.url
    assert url.startswith("http://127.0.0.1:")
    for path in ("/collective_rpc", "/pause", "/update_weight_version", "/inference/v1/generate", "/v1/models"):
        assert urllib3.request("POST", url + path, json={}, timeout=100, retries=False).status == 401
    key = rig.engine._client._headers["Authorization"].removeprefix("Bearer ")
    for pid in members(rig.group):
        assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
