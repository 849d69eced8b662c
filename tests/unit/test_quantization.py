"""QLoRA: a policy whose frozen weights are in 4 bits is that of the dequantised weights, for every caller."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sota_grpo.errors import UserError
from sota_grpo.policy.causal import CausalPolicy, adapter_disabled
from sota_grpo.policy.load import load_tokenizer, save_hf
from sota_grpo.policy.lora import adapter_pack, dequantized, engine_weights, packed_weights, quantize
from sota_grpo.rl.collate import pad_rows
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.training.learner import Learner
from tests.rank_rigs import learner_settings, ragged_rows, trained_adapter
from tests.unit.tiny_models import make_model

pytest.importorskip("bitsandbytes")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole blocks


def adapted(model: Any) -> Any:
    """The same adapter for every model."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return trained_adapter(model)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A quantised model, and a plain one of the weights that it represents; both under one adapter."""
    plain = make_model(**WIDE).train()
    packed = quantize(copy.deepcopy(plain), getattr(request, "param", "nf4"))
    names = [name for name, module in packed.named_modules() if type(module).__name__ == "Linear4bit"]
    assert len(names) == 7 * plain.config.num_hidden_layers
    for name in names:
        before, stored = plain.get_submodule(name).weight, packed.get_submodule(name).weight
        after = dequantized(stored)
        assert (after.dtype, stored.dtype) == (before.dtype, torch.uint8)
        assert 0.01 < float((after - before.detach()).norm() / before.detach().norm()) < 0.2
        with torch.no_grad():
            before.copy_(after)
    return adapted(packed), adapted(plain)


def log_probs(model: Any, packs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    batch = pad_rows([*ragged_rows(8)], pad_token_id=0)
    policy = CausalPolicy(model, shared_prompt=packs)
    assert policy.shared_prompt == packs
    actual = policy(batch).get(("log_probs", "full"))
    return actual, actual.square().sum()


@pytest.mark.parametrize(("pair", "packs"), [("nf4", True), ("fp4", False)], indirect=["pair"])
def test_log_probs_and_gradients_are_those_of_the_dequantised_weights(pair: tuple[Any, Any], packs: bool) -> None:
    actual = []
    for model in pair:
        values, loss = log_probs(model, packs)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert gradients
        assert all("lora_" in name for name in gradients)
        actual.append((values, gradients))
    (packed, of_packed), (plain, of_plain) = actual
    torch.testing.assert_close(packed, plain, rtol=0.0, atol=1e-6)
    assert float(packed.detach().abs().max()) > 1
    for name, gradient in of_plain.items():
        torch.testing.assert_close(of_packed[name], gradient, rtol=1e-5, atol=1e-5)


def test_with_its_adapter_off_it_is_the_dequantised_base(pair: tuple[Any, Any]) -> None:
    packed, plain = pair
    with adapter_disabled(packed), adapter_disabled(plain):
        off = [log_probs(model, packs=True)[0] for model in pair]
    torch.testing.assert_close(*off, rtol=0.0, atol=1e-6)
    assert not torch.allclose(off[0], log_probs(packed, packs=True)[0])


def test_engines_are_given_dequantised_weights_with_the_adapter_merged(pair: tuple[Any, Any]) -> None:
    """By either way, whole weights or base and adapter, under the names of a plain model and no others."""
    packed = pair[0]
    mine, theirs = (dict(engine_weights(model)) for model in pair)
    assert mine.keys() == theirs.keys()
    apart = dict(adapter_pack(packed).merged(packed_weights(packed, merged=False), "cpu"))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0.0, atol=1e-7)
        if name in apart:
            assert torch.equal(apart[name], mine[name])
    assert len(apart) >= len(theirs) - 1  # the tied head


def test_an_export_is_a_plain_model_that_says_the_same(pair: tuple[Any, Any], tmp_path: Path) -> None:
    packed, _ = pair
    save_hf(packed, load_tokenizer("tiny"), tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert not hasattr(loaded.config, "quantization_config")
    torch.testing.assert_close(log_probs(loaded.train(), True)[0], log_probs(packed, True)[0], rtol=0.0, atol=1e-5)


def test_rows_of_cut_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="a scale for each 64 weights of a row, and this model has rows of 16"):
        quantize(make_model(), "nf4")


def test_a_quantised_learner_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """The checkpoint has the adapter alone; the base is quantised again from the same weights."""
    plain = make_model(**WIDE).train()

    def learner() -> Learner:
        policy = CausalPolicy(adapted(quantize(copy.deepcopy(plain), "nf4")))
        loss = GRPOLoss(policy, entropy_bonus=False)
        return Learner(policy, loss, learner_settings(), pad_token_id=0, dump_dir=tmp_path)

    one, other = learner(), learner()
    batches = [ragged_rows(8) for _ in range(3)]
    one.update(batches[0])
    torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all("lora_" in name for name in state["model"])
    other.update(batches[2])
    other.load_state_dict(state)
    for batch in batches[1:]:
        assert one.update(batch)["grad_norm"] == other.update(batch)["grad_norm"]
    assert all(torch.equal(value, other.trainable[name]) for name, value in one.trainable.items())
