"""A real vLLM server that is sent its weights over HTTP: parity after whole pushes and after those of an adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.inference_server import ServerProcess, start_server
from sota_grpo.engines.server_engine import server_engine
from sota_grpo.engines.vllm_server import VLLMDialect
from sota_grpo.engines.weight_upload import PATH, ReceiveWeights, WeightUpload, _delete_what_the_dead_left
from sota_grpo.http import HttpClient
from sota_grpo.policy.lora import MergedWeights, add_lora, engine_weights
from sota_grpo.rl.records import GroupRequest, Sampling
from tests.contract.test_vllm_server import EOS, LONG, POLICY
from tests.engine_rigs import add, changed_weights, generate, largest_gap, ragged_requests, step
from tests.process_rigs import members

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]


class Receiving(VLLMDialect):
    """How a user starts one on another machine."""

    def command(self, *args: Any, **options: Any) -> list[str]:
        words = super().command(*args, **options)
        words[words.index("--middleware") + 1] = f"{ReceiveWeights.__module__}.{ReceiveWeights.__name__}"
        return words


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[ServerProcess, EngineOptions]]:
    """One that runs, and what an engine needs to know of it."""
    sizes = {"max_rows": 64, "max_model_len": 1024}
    options = EngineOptions(POLICY, eos_token_ids=[EOS], dtype="float32", log_path=tmp_path / "server.log", **sizes)
    with tempfile.TemporaryDirectory() as scratch:  # a short path, for sockets
        process, url, key = start_server(Receiving(), options.resolved(), Path(scratch), on_cpu=True)
        yield process, EngineOptions(POLICY, engine="vllm_server", eos_token_ids=[EOS], url=url, api_key=key, **sizes)
        process.close()
    assert members(process.pid) == []


@pytest.mark.timeout(600)
def test_a_server_that_is_sent_its_weights_samples_from_them(
    server: tuple[ServerProcess, EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, then of an adapter, in flight; no push leaves a file, nor does a server that ends in the middle of one."""
    process, options = server
    sizes, send = [], WeightUpload.send

    def counted(upload: WeightUpload, file: Path, number: int) -> str:
        sizes.append(file.stat().st_size)
        return send(upload, file, number)

    monkeypatch.setattr(WeightUpload, "send", counted)
    before = left()
    engine = server_engine(options)
    assert engine.weight_dtype == torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(POLICY).eval()
    requests = ragged_requests(6, 4)
    weights = changed_weights(model, seed=1)
    engine.update_weights(weights.items(), 1)
    model.load_state_dict(weights)
    assert largest_gap(model, requests, generate(engine, requests, Sampling(max_tokens=40)), 1.0) < 1e-4
    adapted, served = add_lora(model, r=4, alpha=8), AutoModelForCausalLM.from_pretrained(POLICY).eval()
    for version in (2, 3):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.05)
        long = GroupRequest(group_id=9, prompt_ids=(30, 4, 5), num_samples=2, seed=version)
        short = GroupRequest(group_id=8, prompt_ids=(40, 4), num_samples=1, seed=version)
        add(engine, [long], Sampling(max_tokens=LONG, ignore_eos=True))
        add(engine, [short], Sampling(max_tokens=20, ignore_eos=True))
        while not step(engine):
            pass  # when the short one has ended, the long one has about 20 tokens
        engine.update_weights(MergedWeights.of(adapted), version)
        assert left() == before
        while engine.num_in_flight:
            ended = step(engine)
        assert {int(v) for sample in ended[0][1].samples for v in sample.versions} == {version - 1, version}
        served.load_state_dict(dict(engine_weights(adapted)))
        assert largest_gap(served, requests, generate(engine, requests, Sampling(max_tokens=40)), 1.0) < 1e-4
    whole, first, second = sizes
    assert whole == first
    own = sum(value.nbytes for _, value in engine_weights(adapted, base=False))
    assert own < second < own + 20_000 < whole  # the file's header names what it has
    client = HttpClient(options.url, api_key=options.api_key)
    client.post(f"{PATH}/unfinished/1", {"num_bytes": 600, "keep_s": 600}, timeout_s=10)
    assert len(left()) == len(before) + 1
    engine.close()
    process.close()
    _delete_what_the_dead_left(Path("/dev/shm"))  # the next push would; a server that takes long to end is killed
    assert left() == before


def left() -> set[Path]:
    return set(Path("/dev/shm").glob("sota-grpo-pushed-*"))
