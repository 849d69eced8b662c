"""The engines over HTTP against fake servers: requests, answers, and everything that breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sota_grpo.engines import EngineOptions
from sota_grpo.engines import server_engine as server_module
from sota_grpo.engines.server_engine import ServerDied, ServerEngine
from sota_grpo.engines.sglang_server import SGLangEngine
from sota_grpo.errors import UserError
from sota_grpo.files import _LEFTOVER as LEFTOVER
from sota_grpo.http import HttpClient, ServerError
from sota_grpo.policy.weight_pack import Checksum, WeightFolder, WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling, sample_seed
from tests.engine_rigs import add, step
from tests.process_rigs import wait_for
from tests.unit.fake_servers import CONTEXT, FakeServer, FakeSGLang, FakeVLLM, vllm_choice

SHAPES = {"embed": torch.Size([5, 2]), "head": torch.Size([5, 2]), "norm": torch.Size([2])}
SAMPLING = Sampling(max_tokens=6)
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


class Rigs:
    """Engines and their fake servers; all are closed at the end of the test."""

    def __init__(self, stack: ExitStack):
        self._stack = stack

    def engine(self, fake: FakeServer, *, key: str | None = None, **overrides: Any) -> ServerEngine:
        running = fake if fake.url else self._stack.enter_context(fake.running())
        kind = ServerEngine if isinstance(fake, FakeVLLM) else SGLangEngine
        options = EngineOptions("model", eos_token_ids=[3, 1], **overrides)
        given = {"shapes": SHAPES, "tied": {"head": "embed"}, "process": None}
        client, folder = HttpClient(running.url, api_key=key), WeightFolder(SHAPES, None)
        engine = kind(client, options, weight_folder=folder, **given)
        self._stack.callback(engine.close)
        return engine

    def held(self, kind: str = "vllm", **overrides: Any) -> tuple[ServerEngine, FakeServer]:
        """An engine whose server does not answer prompts that begin with 20 before ``fake.held[20]`` is set."""
        fake = fake_of(kind)
        fake.held = {20: threading.Event()}
        return self.engine(fake, **overrides), fake


@pytest.fixture
def rigs() -> Iterator[Rigs]:
    with ExitStack() as stack:
        yield Rigs(stack)


def fake_of(kind: str) -> FakeServer:
    return FakeVLLM() if kind == "vllm" else FakeSGLang(spans="without" not in kind)


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    embed = torch.full((5, 2), value)
    return {"embed": embed, "head": embed, "norm": torch.zeros(2)}


def request(first_token: int, *, group: int = 0, num_samples: int = 2, seed: int = 8) -> GroupRequest:
    return GroupRequest(group_id=group, prompt_ids=(first_token, 5, 6), num_samples=num_samples, seed=seed)


def steps_until(engine: ServerEngine, count: int = 1) -> list[tuple[int, GroupOutput]]:
    ended: list[tuple[int, GroupOutput]] = []
    deadline = time.monotonic() + 60
    while len(ended) < count and time.monotonic() < deadline:
        ended += step(engine)
    assert len(ended) == count
    return ended


def sampled(engine: ServerEngine, sampling: Sampling, **options: Any) -> GroupOutput:
    (output,) = engine.generate([replace(request(9), **options)], sampling)
    return output


def test_what_vllm_is_sent_and_how_its_answer_is_read(rigs: Rigs):
    """Choices come in reverse: index 1 ended for length, 0 and 2 at a stop token; sample ``i`` has ``seed + i``."""
    engine = rigs.engine(fake := FakeVLLM())
    assert engine.max_model_len == CONTEXT
    sampling = Sampling(max_tokens=100, temperature=0.5, top_p=0.9, top_k=4, min_p=0.05)
    output = sampled(engine, sampling, group_id=77, num_samples=3, first_sample=2)
    sent = fake.bodies(GENERATE["vllm"])[-1]
    assert sent["token_ids"] == [9, 5, 6]
    assert sent["sampling_params"] == {
        **{"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.05, "max_tokens": CONTEXT - 3},
        **{"seed": sample_seed(8) + 2, "stop_token_ids": [1, 3], "ignore_eos": False, "logprobs": 0},
        "detokenize": False,
    }
    assert output.group_id == 77
    assert [sample.truncated for sample in output.samples] == [False, True, False]
    for sample in output.samples:
        assert sample.token_ids.dtype == sample.versions.dtype == torch.int64
        torch.testing.assert_close(sample.log_probs, -sample.token_ids / 1000)
        assert sample.versions.tolist() == [0] * (CONTEXT - 3)
    assert len({tuple(sample.token_ids.tolist()) for sample in output.samples}) == 3
    greedy = sampled(engine, Sampling(max_tokens=4, temperature=0.0), num_samples=3).samples
    assert fake.bodies(GENERATE["vllm"])[-1]["sampling_params"]["n"] == 1
    assert [sample.token_ids.tolist() for sample in greedy] == [greedy[0].token_ids.tolist()] * 3


def test_what_sglang_is_sent_and_how_its_answer_is_read(rigs: Rigs):
    engine = rigs.engine(fake := FakeSGLang())
    output = sampled(engine, Sampling(max_tokens=7, temperature=0.5, ignore_eos=True), first_sample=3)
    (sent,) = fake.bodies("/generate")
    assert (sent["input_ids"], sent["return_logprob"]) == ([[9, 5, 6]] * 2, True)
    assert [name.rpartition(".")[2] for name in sent["rid"]] == ["0", "1"]
    params = sent["sampling_params"]
    assert [each.pop("sampling_seed") for each in params] == [sample_seed(8, index) % 2**31 for index in (3, 4)]
    expected = {"temperature": 0.5, "max_new_tokens": 7, "ignore_eos": True, "stop_token_ids": []}
    assert params[0] == params[1] == params[0] | expected
    for sample in output.samples:
        torch.testing.assert_close(sample.log_probs, -sample.token_ids / 1000)
        assert sample.versions.tolist() == [0] * 7


def test_sampling_is_refused_where_sglang_reports_other_log_probs_or_rows_do_not_fit(rigs: Rigs):
    engine = rigs.engine(fake := FakeSGLang(), max_rows=3)
    for sampling in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(ValueError, match="leave out top-p, top-k and min-p"):
            add(engine, [request(9)], Sampling(max_tokens=4, **sampling))
    with pytest.raises(ValueError, match="requests 4 samples, more than the max_rows=3"):
        add(engine, [request(9, num_samples=4)], SAMPLING)
    assert (engine.num_in_flight, fake.bodies("/generate")) == (0, [])


def test_groups_come_back_in_the_order_in_which_they_end(rigs: Rigs):
    engine, fake = rigs.held()
    fake.held[21] = threading.Event()
    slow, middle, fast = add(engine, [request(20), request(21), request(22)], SAMPLING)
    assert steps_until(engine)[0][0] == fast
    for number, group in ((21, middle), (20, slow)):
        fake.held[number].set()
        assert steps_until(engine)[0][0] == group


@pytest.mark.timeout(120)
def test_groups_need_no_more_threads_than_are_answered_at_once(rigs: Rigs, monkeypatch: pytest.MonkeyPatch):
    engine, fake = rigs.held(max_rows=2)
    before = set(threading.enumerate())
    add(engine, [request(20, group=group, num_samples=1) for group in range(30)], SAMPLING)
    wait_for(lambda: fake.num_sampling == 2)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert sum(name.startswith(f"{engine.name}-") for name in names) == 2
    fake.held[20].set()
    assert sorted(output.group_id for _, output in steps_until(engine, 30)) == list(range(30))
    monkeypatch.setattr(server_module, "_STEP_S", 3600.0)
    assert step(engine) == []


@pytest.mark.parametrize("kind", ["vllm", "sglang", "sglang without spans"])
def test_a_push_reaches_what_is_in_flight(rigs: Rigs, kind: str):
    """A server that reports no spans: all tokens have the oldest possible version."""
    engine, fake = rigs.held(kind)
    add(engine, [request(20, num_samples=1)], SAMPLING)
    wait_for(lambda: fake.num_sampling == 1)
    engine.update_weights(weights(2.5).items(), 7)
    assert engine.version == 7
    assert sorted(fake.weights) == sorted(SHAPES)  # the tied head is in the file under its own name
    assert fake.weights["head"].tolist() == [[2.5, 2.5]] * 5
    fake.held[20].set()
    ((_, output),) = steps_until(engine)
    assert output.samples[0].versions.tolist() == [0, 0, 0] + [0 if "without" in kind else 7] * 3
    assert sampled(engine, SAMPLING).samples[0].versions.tolist() == [7] * 6


def test_a_server_that_ended_with_its_folder_is_reported_by_the_push(rigs: Rigs, monkeypatch: pytest.MonkeyPatch):
    """Its launcher deletes the folder for weights, which a push may find before anything else shows the death."""
    engine = rigs.engine(FakeVLLM())
    died = ServerDied("The inference server ended before it took new weights; ...")
    process = Mock(has_ended=Mock(return_value=True), died=Mock(return_value=died))
    monkeypatch.setattr(engine, "_process", process)
    engine._weights.close()
    with pytest.raises(ServerDied, match="before it took new weights"):
        engine.update_weights(weights().items(), 7)
    with pytest.raises(RuntimeError, match=r"engine failed \(.*; build a new one"):
        engine.update_weights(weights().items(), 7)
    monkeypatch.setattr(engine, "_process", None)


@pytest.mark.parametrize(("kind", "field"), [("vllm", "cache_salt"), ("sglang", "extra_key")])
def test_cached_prompts_are_kept_apart_by_engine_and_push(rigs: Rigs, kind: str, field: str):
    fake, salts = fake_of(kind), set()
    for engine in (rigs.engine(fake), rigs.engine(fake)):
        for version in (3, 3):  # a version that is pushed twice may have other weights the second time
            engine.update_weights(weights().items(), version)
            sampled(engine, SAMPLING)
            salts.add(str(fake.bodies(GENERATE[kind])[-1][field]))
    assert len(salts) == 4


def test_vllm_is_paused_while_it_loads_and_wrong_weights_are_not_sent(rigs: Rigs):
    engine = rigs.engine(fake := FakeVLLM())
    fake.calls.clear()
    partial = weights()
    del partial["head"]
    with pytest.raises(ValueError, match="missing from the push, the first is head"):
        engine.update_weights(partial.items(), 1)
    assert (fake.calls, engine.version) == ([], 0)
    engine.update_weights(weights().items(), 1)
    pause = "/pause?mode=keep&clear_cache=false"
    assert fake.paths() == [pause, "/collective_rpc", "/update_weight_version", "/resume"]
    folder = fake.bodies("/collective_rpc")[0]["kwargs"]["weights_path"]
    with pytest.raises(FileNotFoundError):
        fake.load(folder)
    fake.hang_up_once = {GENERATE["vllm"], "/collective_rpc"}  # closed connections are opened again
    engine.update_weights(weights().items(), 2)
    assert sampled(engine, SAMPLING).samples[0].versions.tolist() == [2] * 6


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_are_read_back_from_a_server_that_can_say(rigs: Rigs, kind: str):
    engine = rigs.engine(fake := fake_of(kind))
    assert engine.weight_sums() is None
    if kind == "vllm":
        fake.sums = {"norm": ["bfloat16", 5, 1 << 60, [0, 64]]}
        assert engine.weight_sums() == {engine.name: {"norm": Checksum(torch.bfloat16, 5, 1 << 60, (0, 64))}}
        assert fake.bodies("/collective_rpc")[0]["kwargs"]["shapes"] == {"embed": [5, 2], "head": [5, 2], "norm": [2]}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_elsewhere_shares_a_folder(rigs: Rigs, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = fake_of(kind)
    monkeypatch.setattr(server_module, "is_own_address", lambda host: False)
    monkeypatch.setattr(server_module, "expected_weights", lambda *_, **__: (SHAPES, {"head": "embed"}))
    with fake.running():
        options = EngineOptions("m", eos_token_ids=[1], engine=f"{kind}_server", url=fake.url, shared_folder=tmp_path)
        engine = server_module.server_engine(options)
        engine.update_weights(weights(2.0).items(), 1)
        assert torch.equal(fake.weights["embed"], weights(2.0)["embed"])
        (folder,) = tmp_path.iterdir()
        assert (folder.stat().st_mode & 0o777, list(folder.iterdir())) == (0o700, [])
        assert LEFTOVER.fullmatch(folder.name)  # of a killed run the next start deletes it
        path = "/collective_rpc" if kind == "vllm" else "/update_weights_from_disk"
        fake.answers[path] = lambda _: (500, {"error": "no such folder"})
        with pytest.raises(ServerError, match=r"no such folder.* must be able to read the weights .*hydra\.run\.dir"):
            engine.update_weights(weights().items(), 2)
        engine.close()
    assert list(tmp_path.iterdir()) == []


def test_of_merged_weights_only_those_with_an_adapter_are_written_again(rigs: Rigs):
    base, other = (lambda: weights().items()), (lambda: weights().items())
    engine, loads = rigs.engine(fake := FakeVLLM()), []
    load = fake.load
    fake.load = lambda folder: load(folder) or loads.append(set(fake.weights))
    factors = WeightPack.of([("norm:A", torch.ones(1)), ("norm:B", torch.ones(2, 1))])
    adapter = replace(factors, scales={"norm": 2.0})
    pushes = [base, base, base, None, other, other, base]
    for version, engine.base in enumerate(pushes, 1):
        engine.update_weights(adapter if engine.base else weights().items(), version)
    fake.label = "default"  # as of a server that was started anew behind the same url
    engine.update_weights(adapter, 8)
    assert torch.equal(fake.weights["norm"], weights()["norm"] + 2)
    whole, adapted = set(SHAPES), {"norm"}
    assert loads == [whole, adapted, adapted, whole, whole, adapted, whole, whole]


def test_sglang_flushes_its_cache_only_when_nothing_is_in_flight(rigs: Rigs):
    engine, fake = rigs.held("sglang")
    engine.update_weights(weights().items(), 1)
    add(engine, [request(20)], SAMPLING)
    engine.update_weights(weights().items(), 2)
    pushes = fake.bodies("/update_weights_from_disk")
    assert [push["flush_cache"] for push in pushes] == [True, False]
    assert [push["abort_all_requests"] for push in pushes] == [False, False]
    assert fake.bodies("/pause_generation") == [{"mode": "in_place"}] * 2
    fake.held[20].set()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_group_that_is_cancelled_or_in_flight_at_the_end_is_aborted_in_the_server_too(rigs: Rigs, kind: str):
    engine, fake = rigs.held(kind)

    def sampled_now() -> set[str]:
        body = fake.bodies(GENERATE[kind])[-1]
        return {body["request_id"]} if kind == "vllm" else {*body["rid"]}

    for number, end in enumerate((lambda future: future.cancel() and engine.advance(), lambda _: engine.close()), 1):
        future = engine.submit(request(20), SAMPLING)
        engine.advance()
        wait_for(lambda number=number: fake.num_sampling == number)
        end(future)
        assert engine.num_in_flight == 0
        wait_for(lambda: sampled_now() <= fake.aborted)
        if number == 1:
            (output,) = engine.generate([request(22, group=5)], SAMPLING)  # the engine is as good as new
            assert output.group_id == 5
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        add(engine, [request(22)], SAMPLING)


STEP_FAULTS = {
    "an error": (lambda body: (500, {"error": {"message": "EngineCore has a problem"}}), "status 500: .*EngineCore"),
    "another form": (lambda body: (200, {"choices": [{"index": 0, "text": "hello"}]}), "unknown form.*hello"),
    "no label": (
        lambda body: (
            200,
            {"choices": [vllm_choice(0, [7], [-1.0], [{"version": None}], "stop")]},
        ),
        "unknown form.*NoneType",
    ),
    "fewer samples": (lambda body: (200, {"choices": []}), "returned 0 samples for a request of 2"),
    "an abort by another client": (
        lambda body: (200, {"choices": [vllm_choice(0, [], [], [], "abort")]}),
        "finish_reason=abort",
    ),
    "silence": (lambda body: (200, time.sleep(1.0)), "generate was not answered within 0.2 s"),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_faulty_response_is_an_error_that_breaks_the_engine(rigs: Rigs, fault: str, monkeypatch):
    answer, message = STEP_FAULTS[fault]
    monkeypatch.setattr(server_module, "_GENERATE_S", 0.2 if fault == "silence" else 60)
    engine = rigs.engine(fake := FakeVLLM())
    fake.answers[GENERATE["vllm"]] = answer
    add(engine, [request(9)], SAMPLING)
    with pytest.raises(ServerError, match=message):
        steps_until(engine)
    with pytest.raises(RuntimeError, match=r"engine failed \(.*; build a new one"):
        add(engine, [request(9)], SAMPLING)


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/weight_info"), ("sglang", "/health_generate")])
def test_a_hung_server_is_found_long_before_a_group(rigs: Rigs, kind: str, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "_PROBE_EVERY_S", 0.1)
    engine, fake = rigs.held(kind, timeout_s=0.3)
    add(engine, [request(20)], SAMPLING)
    for _ in range(5):
        step(engine)  # it works, and answers: no error however long a group takes
    release = threading.Event()
    fake.answers[path] = lambda _: (200, release.wait(60))
    with pytest.raises(ServerError, match=rf"GET {fake.url}{path} was not answered within 0.3 s"):
        steps_until(engine)
    release.set()
    fake.held[20].set()


@pytest.mark.parametrize(("kind", "path", "go_on"), [
    ("vllm", "/collective_rpc", "/resume"),
    ("sglang", "/update_weights_from_disk", "/continue_generation"),
])  # fmt: skip
def test_weights_that_did_not_load_break_the_engine_and_not_the_server(rigs: Rigs, kind: str, path: str, go_on: str):
    engine = rigs.engine(fake := fake_of(kind))
    fake.answers[path] = lambda _: (400 if kind == "sglang" else 500, {"success": False, "message": "out of memory"})
    fake.calls.clear()
    with pytest.raises(ServerError, match="out of memory"):
        engine.update_weights(weights().items(), 1)
    assert fake.paths()[-1] == go_on
    assert engine.version == 0
    with pytest.raises(RuntimeError, match="engine failed"):
        engine.submit(request(9), SAMPLING)
    if kind == "sglang":  # what it says is one line
        engine = rigs.engine(fake)
        fake.answers[path] = lambda _: (200, "no\n2026-01-01 ERROR sota_grpo: forged")
        with pytest.raises(ServerError, match=r"failed to load the weights in [^\n]*: no\\n2026-01-01 ERROR"):
            engine.update_weights(weights().items(), 1)


def test_weights_of_another_trainer_in_the_server_are_found(rigs: Rigs):
    mine, other = rigs.engine(fake := FakeVLLM()), rigs.engine(fake)
    other.update_weights(weights().items(), 1)
    add(mine, [request(9)], SAMPLING)
    with pytest.raises(RuntimeError, match=r"this engine's labels are .*use one server per trainer"):
        steps_until(mine)


@pytest.mark.parametrize(("kind", "path", "advice"), [
    ("vllm", "/update_weight_version", "VLLM_SERVER_DEV_MODE=1"),
    ("vllm", "/inference/v1/generate", "--enable-scale-out"),
    ("sglang", "/continue_generation", "use a newer SGLang"),
])  # fmt: skip
def test_a_server_without_what_is_needed_is_refused_with_the_remedy(rigs: Rigs, kind: str, path: str, advice: str):
    fake = fake_of(kind)
    del fake.answers[path]
    with pytest.raises(UserError, match=f"lacks an endpoint for training .*{path}.*404.*{advice}"):
        rigs.engine(fake)


def test_a_server_with_another_key_context_or_log_prob_is_refused(rigs: Rigs):
    with pytest.raises(UserError, match=r"rejected the API key; set engine.api_key"):
        rigs.engine(FakeVLLM(key="right"), key="wrong")
    assert rigs.engine(FakeVLLM(key="right"), key="right", max_model_len=20).max_model_len == 20
    with pytest.raises(UserError, match=f"context of {CONTEXT} tokens, fewer than max_model_len={CONTEXT + 1}"):
        rigs.engine(FakeVLLM(), max_model_len=CONTEXT + 1)
    raw = FakeVLLM()
    raw.trial_log_prob = -0.25
    with pytest.raises(UserError, match=r"returned -0\.25: .*--logprobs-mode processed_logprobs"):
        rigs.engine(raw)
    raw.trial_log_prob = 0.0
    raw.answers["/v1/models"] = lambda _: (200, "<html>")  # of a proxy, for example
    with pytest.raises(UserError, match=r"answers in an unknown form \(TypeError: .*; start it with"):
        rigs.engine(raw)


@pytest.mark.parametrize("name", ["vllm_server", "sglang_server"])
def test_a_url_without_an_answer_is_a_sentence(name: str):
    options = EngineOptions("model", engine=name, eos_token_ids=[1], url="http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"^No server answers at engine\.url=http://127\.0\.0\.1:1;"):
        server_module.server_engine(options)


@pytest.mark.parametrize(("has_gpu", "variable"), [(False, "TMPDIR"), (True, "VLLM_RPC_BASE_PATH")])
def test_what_a_server_leaves_ends_with_its_folder(has_gpu: bool, variable: str, monkeypatch: pytest.MonkeyPatch):
    process = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(server_module, "find_spec", lambda name: object())
    monkeypatch.setattr(server_module, "expected_weights", lambda *_, **__: (SHAPES, {}))
    monkeypatch.setattr(server_module, "ServerProcess", process)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(InterruptedError):
        server_module.server_engine(EngineOptions("model", engine="vllm_server", eos_token_ids=[1]))
    _, environment, _, scratch = process.call_args.args
    assert environment[variable] == str(scratch)
    assert not scratch.exists()
