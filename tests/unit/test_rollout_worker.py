"""The engine loop: results as of the bare engine, weights loaded in flight, silence, failures that reach all."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers import base
from sota_grpo.workers.base import ThreadWorker, WorkerDied
from sota_grpo.workers.rollout import FleetEngine, RolloutWorker, rollout_worker
from tests.engine_rigs import CONTEXT, EOS, PAD, hf_engine, largest_gap, ragged_requests, tiny_model
from tests.process_rigs import wait_for
from tests.worker_rigs import hosted

REQUEST = GroupRequest(group_id=0, prompt_ids=(5, 6), num_samples=2, seed=3)
NO_WEIGHTS = WeightPack.of([])
WAIT_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., ThreadWorker]]:
    workers: list[ThreadWorker] = []

    def start(*args: Any) -> ThreadWorker:
        workers.append(hosted(*args))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


class HeldEngine(ScriptedEngine):
    """Its steps wait until ``go`` is set, and fail when ``failure`` is."""

    def __init__(self, **options: object):
        super().__init__(**options)
        self.go, self.stepping = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.num_steps = 0
        self.num_steps_at_push: list[int] = []
        self.closed = False

    def advance(self) -> bool:
        if not self.num_in_flight:
            return False
        self.num_steps += 1
        self.stepping.set()
        self.go.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        return super().advance()

    def update_weights(self, weights, version: int) -> None:
        self.num_steps_at_push.append(self.num_steps)
        super().update_weights(weights, version)

    def close(self) -> None:
        super().close()
        self.closed = True


def outputs_of(futures: list[Future[GroupOutput]]) -> dict[int, GroupOutput]:
    return {output.group_id: output for output in (future.result(WAIT_S) for future in futures)}


def test_requests_that_wait_are_added_together(start):
    engine = HeldEngine()
    batches: list[int] = []
    begin = engine._start
    engine._start = lambda tickets, *rest: batches.append(len(tickets)) or begin(tickets, *rest)
    worker = start(lambda: engine)
    first = worker.call("run", REQUEST, Sampling(max_tokens=2))
    assert engine.stepping.wait(WAIT_S)
    others = [worker.call("run", replace(REQUEST, group_id=i), Sampling(max_tokens=2)) for i in range(1, 6)]
    engine.go.set()
    assert len(outputs_of([first, *others])) == 6
    assert batches == [1, 5]


def test_a_push_waits_for_one_step_at_most(start):
    engine = HeldEngine(duration_s=10.0)
    engine.go.set()
    worker = start(lambda: engine)
    worker.call("run", REQUEST, Sampling(max_tokens=2))
    assert engine.stepping.wait(WAIT_S)
    for version in range(1, 6):
        future = worker.call("update_weights", NO_WEIGHTS, version)
        before = engine.num_steps
        assert future.result(WAIT_S) == version
        assert engine.num_steps_at_push[-1] - before <= 1


def test_ping_is_0_when_idle_and_grows_when_a_step_hangs(start, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: now_s[0], process_time=time.process_time))
    engine = HeldEngine()
    worker = start(lambda: engine)
    assert worker.call("ping").result(WAIT_S) == 0.0
    worker.call("run", REQUEST, Sampling(max_tokens=2))
    assert engine.stepping.wait(WAIT_S)
    now_s[0] += 51.0
    assert worker.call("ping").result(WAIT_S) == 51.0
    engine.go.set()
    wait_for(lambda: worker.call("ping").result(WAIT_S) == 0.0)


def test_a_failing_step_fails_everything_with_its_cause(start):
    engine = HeldEngine()
    engine.failure = MemoryError("no room for 7 GiB")
    worker = start(lambda: engine)
    flying = worker.call("run", REQUEST, Sampling(max_tokens=2))
    assert engine.stepping.wait(WAIT_S)
    waiting = [worker.call("run", REQUEST, Sampling(max_tokens=2)), worker.call("update_weights", NO_WEIGHTS, 1)]
    engine.go.set()
    for future in [flying, *waiting]:
        with pytest.raises(WorkerDied, match=r"scripted engine failed.*MemoryError: no room for 7 GiB"):
            future.result(WAIT_S)
    for later in (worker.call("run", REQUEST, Sampling(max_tokens=2)), worker.call("update_weights", NO_WEIGHTS, 1)):
        with pytest.raises(WorkerDied, match="no room for 7 GiB"):
            later.result(WAIT_S)
    with pytest.raises(WorkerDied, match="no room for 7 GiB") as caught:
        worker.call("sleep").result(WAIT_S)
    assert caught.value.__cause__ is engine.failure
    assert "in advance" in pickle.loads(pickle.dumps(caught.value)).__notes__[0]
    assert engine.closed


def test_an_engine_that_takes_no_adapters_gets_weights_merged_where_its_own_lie(start, monkeypatch):
    engine, served, merged_on, merge = ScriptedEngine(), {}, [], WeightPack.merged
    engine.device = torch.device("cuda:0")

    def merged(self, base, device):
        merged_on.append(device)
        return merge(self, base, torch.device("cpu"))

    monkeypatch.setattr(WeightPack, "merged", merged)
    monkeypatch.setattr(engine, "update_weights", lambda weights, version: served.update(weights))
    worker = start(lambda: engine)
    worker.call("set_base", WeightPack.of([("layer.weight", torch.ones(2, 2))]))
    factors = [("layer.weight:A", torch.tensor([[1.0, 2.0]])), ("layer.weight:B", torch.tensor([[3.0], [0.0]]))]
    worker.call("update_weights", replace(WeightPack.of(factors), scales={"layer.weight": 2.0}), 1).result(WAIT_S)
    assert {name: value.tolist() for name, value in served.items()} == {"layer.weight": [[7.0, 13.0], [1.0, 1.0]]}
    assert merged_on == [torch.device("cuda:0")]


def test_a_failing_push_breaks_the_worker_and_a_refused_one_does_not(start):
    model = tiny_model()
    worker = start(lambda: hf_engine(model))
    with pytest.raises(ValueError, match="weights are missing"):
        worker.call("update_weights", NO_WEIGHTS, 1).result(WAIT_S)
    assert len(worker.call("run", REQUEST, Sampling(max_tokens=2)).result(WAIT_S).samples) == 2

    @dataclass
    class Torn:
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise OSError("shared memory is gone")

    with pytest.raises(WorkerDied, match="OSError: shared memory is gone"):
        worker.call("update_weights", Torn(), 1).result(WAIT_S)
    with pytest.raises(WorkerDied):
        worker.call("run", REQUEST, Sampling(max_tokens=2)).result(WAIT_S)


def test_a_refused_request_fails_alone(start):
    engine = HeldEngine(max_model_len=CONTEXT)
    worker = start(lambda: engine)
    first = worker.call("run", REQUEST, Sampling(max_tokens=2))
    assert engine.stepping.wait(WAIT_S)  # so that the next three are added together
    requests = [REQUEST, replace(REQUEST, prompt_ids=(5,) * CONTEXT), REQUEST]
    good, long, fine = (worker.call("run", request, Sampling(max_tokens=2)) for request in requests)
    engine.go.set()
    with pytest.raises(ValueError, match=f"{CONTEXT} tokens"):
        long.result(WAIT_S)
    assert all(len(future.result(WAIT_S).samples) == 2 for future in (first, good, fine))


def two_tokens(request: GroupRequest, index: int, version: int) -> list[int]:
    return [10 + index, 20 + version]


def test_responses_arrive_with_the_text_that_their_readers_would_decode(start) -> None:
    tokenizer = load_tokenizer("tiny")
    token_ids = [*tokenizer("4 is é")["input_ids"], tokenizer.eos_token_id]
    worker = start(lambda: ScriptedEngine(lambda request, index, version: token_ids), tokenizer)
    group = worker.call("run", REQUEST, Sampling(max_tokens=len(token_ids))).result(WAIT_S)
    for sample in (*group.samples, *pickle.loads(pickle.dumps(group)).samples):
        assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True) == "4 is é"


def test_a_response_that_cannot_be_decoded_arrives_without_text(start) -> None:
    """Its reader decodes it, and there the error is seen; a call without an answer would be waited for."""
    broken = Mock()
    broken.decode.side_effect = OverflowError
    worker = start(lambda: ScriptedEngine(two_tokens), broken)
    group = worker.call("run", REQUEST, Sampling(max_tokens=2)).result(WAIT_S)
    assert [sample.text for sample in group.samples] == [None] * len(group.samples)


def answered(worker: RolloutWorker, requests: list[GroupRequest], length: int) -> dict[int, GroupOutput]:
    """The groups; one that is in flight when the worker is closed fails."""
    futures = [worker.run(request, Sampling(max_tokens=length)) for request in requests]
    while worker.advance():
        pass
    late = worker.run(REQUEST, Sampling(max_tokens=2))
    worker.close()
    worker.close()
    with pytest.raises(WorkerDied, match="closed"):
        late.result(0.0)
    assert not worker.advance()
    return outputs_of(futures)


def test_the_factory_takes_plain_values(tmp_path: Path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    shared = EngineOptions(str(tmp_path), eos_token_ids=(EOS,), pad_token_id=PAD, device="cpu")
    options = replace(shared, engine="scripted", script=two_tokens)
    output = answered(rollout_worker(pickle.loads(pickle.dumps(options))), [REQUEST], 8)[0]
    assert [sample.token_ids.tolist() for sample in output.samples] == [[10, 20, EOS], [11, 20, EOS]]
    worker = rollout_worker(replace(shared, engine="transformers", max_rows=6, attn_implementation="sdpa"))
    requests = ragged_requests(3, 2)
    assert largest_gap(model, requests, answered(worker, requests, 10), 1.0) < 1e-5


@pytest.mark.parametrize("others", [torch.bfloat16, torch.float32, None])
def test_weights_come_in_the_dtype_that_all_engines_have(others: torch.dtype | None) -> None:
    fleet = Mock()
    fleet.broadcast.return_value = {"0": torch.bfloat16, "1": others}
    engine = FleetEngine(fleet, name="vllm", max_model_len=8, share=lambda value: value, deadline_s=1.0)
    assert engine.weight_dtype == (torch.bfloat16 if others == torch.bfloat16 else None)
