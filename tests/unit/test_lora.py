"""LoRA: identity at the start, an exact base model underneath, merged weights that engines can load."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sota_grpo import keys
from sota_grpo.errors import UserError
from sota_grpo.policy.causal import AdapterOffReference, CausalPolicy, adapter_disabled, base_model
from sota_grpo.policy.lora import adapter_pack, add_lora, engine_weights, packed_weights
from tests.rank_rigs import trained_adapter
from tests.unit.tiny_models import make_model, make_rows


def log_probs(model, rows):
    return CausalPolicy(model)(rows)[keys.LOG_PROBS]


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains():
    model, rows = make_model(), make_rows([8, 5])
    before = log_probs(model, rows).detach()
    adapted = add_lora(model, r=3, alpha=6)
    actual = log_probs(adapted, rows)
    assert torch.equal(actual, before)
    actual.sum().backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == ("lora_" in name), name


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_adapter_off_reference_is_the_base_model_bit_for_bit(family):
    model, rows = make_model(family), make_rows([8, 5], holes=True)
    before = log_probs(model, rows).detach()
    policy = CausalPolicy(trained_adapter(model, dropout=0.5))
    policy.train()
    adapted = policy(rows)[keys.LOG_PROBS]
    reference = AdapterOffReference(policy)
    actual = reference(rows)
    assert torch.equal(actual, before)
    assert not actual.requires_grad
    assert not torch.allclose(adapted.detach(), before)
    adapted.sum().backward()  # a reference call between forward and backward does not break the graph
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    assert policy.training
    reference.close()
    with pytest.raises(RuntimeError, match="closed"):
        reference(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_engine_weights_load_into_a_plain_model_and_give_the_same_log_probs(tied):
    plain = make_model(tie_word_embeddings=tied).double()
    names = list(plain.state_dict())
    fresh = make_model(tie_word_embeddings=tied).double()
    adapted, rows = trained_adapter(plain), make_rows([8, 5])
    parameters = {name: value.detach().clone() for name, value in adapted.named_parameters()}
    weights = dict(engine_weights(adapted))
    assert list(weights) == names
    assert not any(value.requires_grad for value in weights.values())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]) == tied
    fresh.load_state_dict(weights)
    torch.testing.assert_close(log_probs(fresh, rows), log_probs(adapted, rows), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(value, parameters[name]) for name, value in adapted.named_parameters())


def test_without_the_base_only_what_trains_is_sent():
    plain = make_model()
    assert dict(engine_weights(plain, base=False)).keys() == dict(engine_weights(plain)).keys()
    assert "lm_head.weight" in dict(engine_weights(plain))
    adapted = trained_adapter(plain)
    sent = dict(engine_weights(adapted, base=False))
    assert sent
    assert all(name.startswith("model.layers.") and name.endswith("_proj.weight") for name in sent)
    every = dict(engine_weights(adapted))
    assert all(torch.equal(value, every[name]) for name, value in sent.items())


def test_bf16_weights_are_merged_in_float32_and_rounded_once():
    adapted = trained_adapter(make_model().to(torch.bfloat16))
    layer = base_model(adapted).model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.float32
    expected = (layer.base_layer.weight.float() + 2.0 * (b @ a)).to(torch.bfloat16)
    assert torch.equal(dict(engine_weights(adapted))["model.layers.0.self_attn.q_proj.weight"], expected)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_that_travels_alone_is_merged_to_the_same_bits(dtype, tied, device):
    model = trained_adapter(make_model(tie_word_embeddings=tied).to(dtype)).to(device)
    base = packed_weights(model, merged=False)
    actual, expected = dict(adapter_pack(model).merged(base, device)), dict(engine_weights(model))
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name].cpu()) for name in expected)
    assert any(not torch.equal(actual[name], weight) for name, weight in base.tensors())


def test_an_adapter_of_a_model_with_transposed_weights_is_merged_alike():
    plain = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=16))
    model = trained_adapter(plain)  # its attention has weights [8, 8] and [8, 24]
    actual = dict(adapter_pack(model).merged(packed_weights(model, merged=False), "cpu"))
    for name, weight in engine_weights(model):
        torch.testing.assert_close(actual[name], weight, rtol=0.0, atol=1e-6)


def test_what_cannot_work_is_refused():
    model, use = make_model(), "use some of q_proj, k_proj, v_proj"
    for options, message in (
        ({"r": 0}, "rank is 0"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
        ({"target_modules": []}, rf"target_modules=\[\] names no layer; {use}, .*, or null for all"),
        ({"target_modules": ["q_proj", "query"]}, f"_modules has query, which cannot .*; {use}"),
        ({"target_modules": ["q_proj", "lm_head"]}, f"_modules has lm_head, which cannot .*; {use}"),
    ):
        error = UserError if "target_modules" in options else ValueError
        with pytest.raises(error, match=message):
            add_lora(model, **{"r": 2, "alpha": 4, **options})
    for without in (adapter_disabled, adapter_pack, lambda model: AdapterOffReference(CausalPolicy(model))):
        with pytest.raises(ValueError, match="Qwen2ForCausalLM has no adapter"):
            without(model)


def test_an_adapter_is_on_the_layers_that_are_named():
    adapted = trained_adapter(make_model(), target_modules=["q_proj", "v_proj"])
    on = {name.split(".lora_")[0].rpartition(".")[2] for name, one in adapted.named_parameters() if one.requires_grad}
    assert on == {"q_proj", "v_proj"}
