"""Weights survive the packing bit for bit, whatever their dtype, and a view costs no copy."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.errors import RunFailed
from sota_grpo.policy.lora import adapter_pack, add_lora, packed_weights
from sota_grpo.policy.weight_pack import Checksum, WeightPack
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.workers.base import ThreadLauncher, WorkerSpec
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.rollout import FleetEngine, RolloutWorker
from tests.builders import generator
from tests.engine_rigs import EOS, PAD, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def random_weights() -> dict[str, torch.Tensor]:
    shapes = [(), (3,), (2, 5), (0,), (1, 2, 3)]
    return {
        f"{dtype}.{i}": (10 * torch.randn(shape)).to(dtype) for dtype in DTYPES for i, shape in enumerate(shapes)
    } | {"transposed": torch.randn(4, 3).t()}


def test_every_tensor_comes_back_bit_for_bit_in_order() -> None:
    """Counted first, copied as it comes, and by pickle's protocol 5, which carries the buffer out of band."""
    weights = random_weights()
    counted = WeightPack.of(weights.items())
    size = counted.buffers[0][0].nbytes
    filled = WeightPack.of(((name, tensor.clone()) for name, tensor in weights.items()), room=10 * size)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(counted, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == filled.buffers[0][0].nbytes == size
    assert len(body) < 10_000
    for pack in (counted, filled, pickle.loads(body, buffers=buffers)):
        actual = dict(pack.tensors())
        assert list(actual) == list(weights)
        torch.testing.assert_close(actual, weights, rtol=0, atol=0)


def test_a_tied_tensor_is_stored_once_and_temporaries_that_reuse_memory_are_not_taken_for_tied_ones() -> None:
    """A merged LoRA weight lives only until the next one is computed, often at the same address."""
    embedding = torch.randn(16, 8)
    pack = WeightPack.of([("embed", embedding), ("head", embedding), ("other", embedding.clone())])
    assert pack.buffers[0][0].nbytes == 2 * embedding.numel() * 4
    assert [name for name, tensor in pack.tensors() if torch.equal(tensor, embedding)] == ["embed", "head", "other"]
    values = torch.randn(50)
    pack = WeightPack.of((str(i), torch.full((64,), float(value))) for i, value in enumerate(values))
    assert [float(tensor[0]) for _, tensor in pack.tensors()] == values.tolist()


@pytest.mark.parametrize("lora", [False, True])
def test_weights_rounded_before_they_travel_are_what_the_engine_would_have_made_of_them(lora: bool) -> None:
    model: Any = tiny_model(tied=True, seed=2)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, dtype=torch.bfloat16)
    assert engine.weight_dtype == torch.bfloat16
    if lora:
        model = add_lora(model, r=2, alpha=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    sizes, served = [], []
    for dtype in (None, engine.weight_dtype):
        pack = packed_weights(model, dtype=dtype) if lora else WeightPack.of(model.state_dict().items(), dtype=dtype)
        engine.update_weights(pack, len(served) + 1)
        sizes.append(pack.buffers[0][0].nbytes)
        served.append([value.clone() for value in engine._model.state_dict().values()])
    assert sizes[1] < 0.52 * sizes[0]
    assert all(map(torch.equal, *served))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pushed", ["packs of several ranks", "an adapter"])
def test_what_an_engine_holds_is_compared_by_name_however_it_came(pushed: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model(seed=2)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, dtype=dtype)
    if pushed == "an adapter":
        model = add_lora(model, r=2, alpha=4)
        engine.base = packed_weights(model, merged=False).tensors
        weight_sync = EngineWeightSync(partial(adapter_pack, model), engine, whole=partial(packed_weights, model))
    else:
        named = list(model.state_dict().items())
        halves = lambda: WeightPack(WeightPack.of(named[:5]).buffers + WeightPack.of(named[5:]).buffers)  # noqa: E731
        weight_sync = EngineWeightSync(halves, engine)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data.neg_().add_(1.0)
    weight_sync.send(version=1)
    assert weight_sync.compared().equal == engine._model.state_dict().keys()
    name, held = list(engine._model.named_parameters())[3]
    held.data[0] *= 1.1
    assert weight_sync.compared().differing.keys() == {name}
    if pushed == "an adapter":  # only workers can be compared with each other, and there is one
        assert not EngineWeightSync(partial(adapter_pack, model), engine).compared().reported


def test_a_single_ready_worker_does_not_end_the_comparison_of_adapters(caplog: pytest.LogCaptureFixture) -> None:
    """In the second push one of two workers is being replaced; in the third, its successor has other weights."""
    good, other = ({"w": Checksum.of(torch.full((2,), value))} for value in (1.0, 2.0))
    held = iter([{"a": good, "b": good}, {"a": good}, {"a": good, "c": other}])
    engine = SimpleNamespace(name="workers", version=0, weight_sums=lambda: next(held), wake=lambda: None)
    engine.update_weights = lambda weights, version: setattr(engine, "version", version)
    adapter = partial(adapter_pack, add_lora(tiny_model(seed=2), r=2, alpha=4))
    weight_sync = EngineWeightSync(adapter, engine)
    weight_sync.send()
    weight_sync.send()
    assert not caplog.text
    weight_sync.send()
    assert "1 of 1 weights differ" in caplog.text


NORM = "model.norm.weight"


class ForgetfulEngine(TransformersEngine):
    """One bit of one weight differs after each push, as in a faulty memory."""

    def update_weights(self, weights: Any, version: int) -> None:
        super().update_weights(weights, version)
        self._model.state_dict()[NORM].view(torch.int32)[5] ^= 1


class SilentEngine(TransformersEngine):
    def weight_sums(self) -> None:
        return None


def worker_of(kind: str) -> RolloutWorker:
    engine = {"sound": TransformersEngine, "forgetful": ForgetfulEngine, "silent": SilentEngine}[kind]
    return RolloutWorker(engine(tiny_model(seed=2), eos_token_ids=[EOS], pad_token_id=PAD))


@pytest.fixture
def five() -> Iterator[Callable[[str], FleetEngine]]:
    """Starts five workers, of which the fourth is of another kind."""
    with ExitStack() as opened:

        def start(fourth: str) -> FleetEngine:
            launcher = opened.enter_context(closing(ThreadLauncher()))
            kinds = ["sound", "sound", "sound", fourth, "sound"]
            specs = [WorkerSpec("tests.unit.test_weight_pack:worker_of", {"kind": kind}) for kind in kinds]
            fleet = Fleet("rollout", lambda slot: launcher.start(f"rollout-{slot}", specs[slot]), 5, capacity=1)
            opened.callback(fleet.close)
            fleet.wait_ready()
            return FleetEngine(fleet, name="transformers", max_model_len=64, share=lambda value: value, deadline_s=60.0)

        yield start


@pytest.mark.parametrize("pushed", ["all", "an adapter"])
def test_a_worker_with_another_weight_is_found_at_the_push(
    pushed: str, five: Callable[[str], FleetEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in one of five workers ends the run, with the worker, the weight and both checksums.

    Of an adapter, which each worker merges, it is a warning: machines of two kinds round differently.
    """
    model: Any = tiny_model(seed=2)
    right, bits = model.state_dict()[NORM].clone(), model.state_dict()[NORM].clone()
    bits.view(torch.int32)[5] ^= 1
    engine = five("forgetful")
    if pushed == "an adapter":
        model = add_lora(model, r=2, alpha=4)
        engine.base = partial(packed_weights, model, merged=False)
        EngineWeightSync(partial(adapter_pack, model), engine).send(version=1)
        owner, found = "rollout-0", caplog.text
    else:
        with pytest.raises(RunFailed) as raised:
            EngineWeightSync(model.state_dict().items, engine).send(version=1)
        owner, found = "the learner", str(raised.value)
    values = f"rollout-3 has {Checksum.of(bits)}, {owner} has {Checksum.of(right)} as the checksum of {NORM}, and 1 of "
    assert values in found


def test_five_equal_workers_are_verified_at_every_push(five: Callable[[str], FleetEngine], caplog: Any) -> None:
    model: Any = tiny_model(seed=2)
    engine = five("sound")
    weight_sync = EngineWeightSync(lambda: iter(model.state_dict().items()), engine)  # read twice, as merged ones are
    with caplog.at_level("INFO"):
        for version in (1, 2):
            model.get_parameter(NORM).data += 1.0
            weight_sync.send(version=version)
        weight_sync.send(iter(model.state_dict().items()))  # of a caller: can be read once
    assert (engine.version, len(weight_sync.compared().equal)) == (3, len(model.state_dict()))
    assert "checksum" not in caplog.text


def test_an_engine_that_cannot_report_says_so_once(five: Callable[[str], FleetEngine], caplog: Any) -> None:
    model: Any = tiny_model(seed=2)
    weight_sync = EngineWeightSync(model.state_dict().items, five("silent"))
    with caplog.at_level("INFO", logger="sota_grpo.source"):
        weight_sync.send()
        weight_sync.send()
    (said,) = [message for message in caplog.messages if "checksum" in message]
    assert said.startswith("Engine transformers: the checksums of its weights cannot be compared, so wrong values")


@pytest.mark.parametrize("other", ["no checksum", "another checksum"])
def test_the_name_of_a_weight_that_a_worker_reports_is_logged_on_one_line(other: str, caplog: Any) -> None:
    sums = {"w\n2026-01-01 ERROR sota_grpo: forged": Checksum.of(torch.zeros(2))}
    others = {"no checksum": {}, "another checksum": dict.fromkeys(sums, Checksum.of(torch.ones(2)))}
    engine = SimpleNamespace(name="mixed", version=1, update_weights=lambda *_: None)
    engine.weight_sums = lambda: {"a": sums, "b": others[other]}
    pack = replace(WeightPack.of([("w:A", torch.ones(1))]), scales={"w": 2.0})
    with caplog.at_level("INFO", logger="sota_grpo.source"):
        EngineWeightSync(lambda: pack, engine).send(version=1)
    (message,) = caplog.messages
    assert "w\\n2026-01-01 ERROR" in message
    assert "\n" not in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_depends_on_every_bit_and_on_the_order_of_rows(dtype: torch.dtype) -> None:
    """Whatever the memory's layout, in parts of any size, and for ranges of columns."""
    matrix = torch.randn(6, 8, generator=generator()).to(dtype)
    whole = Checksum.of(matrix)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for index in range(matrix.numel()):
        for bit in (0, 7):
            changed = matrix.clone()
            changed.view(bits).view(-1)[index] ^= 1 << bit
            assert Checksum.of(changed).total != whole.total
    turned = Checksum.of(matrix.flip(0))
    assert (turned.total, turned == whole) == (whole.total, False)
    assert Checksum.of(matrix.t().contiguous().t()) == whole
    assert Checksum.of(matrix, columns=(2, 7)) == Checksum.of(matrix[:, 2:7])._replace(columns=(2, 7))
    zero, minus_zero = (matrix.float().where(matrix != matrix[0, 0], value) for value in (0.0, -0.0))
    assert Checksum.of(zero) == Checksum.of(minus_zero)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sota_grpo.policy.weight_pack._CACHED_BYTES", 1)
        assert Checksum.of(matrix) == whole


def test_a_transposed_square_weight_is_not_compared() -> None:
    """As an engine may store it; all its numbers are right, so a run must not end."""
    model: Any = tiny_model(seed=2)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD)
    name = next(name for name, value in model.state_dict().items() if value.ndim == 2 and len(set(value.shape)) == 1)
    sums = engine.weight_sums()
    sums[engine.name][name] = Checksum.of(model.state_dict()[name].t())
    engine.weight_sums = lambda: sums  # type: ignore[method-assign]
    compared = EngineWeightSync(model.state_dict().items, engine).compared()
    assert (compared.unread, compared.differing) == ({name}, {})
