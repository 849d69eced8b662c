"""The policy equals the textbook computation on full logits; the references are frozen, exact and mortal."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sota_grpo import keys
from sota_grpo.errors import UserError
from sota_grpo.functional import log_probs as functional_log_probs
from sota_grpo.policy import load
from sota_grpo.policy.causal import CausalPolicy, FrozenReference
from sota_grpo.policy.load import ModelNotFoundError, load_model, load_tokenizer, resolve_model_path, save_hf
from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.tensor_files import write_model
from tests.rank_rigs import trained_adapter
from tests.unit.tiny_models import FAMILIES, LONG_ROPE, SIZES, VOCAB, make_model, make_rows, make_tokenizer


def full_logits_reference(model, rows, temperature):
    """One unpadded row at a time, full logits, plain loops."""
    log_probs = torch.zeros(rows[keys.FULL_TOKENS].shape, dtype=torch.float64)
    entropy = torch.zeros_like(log_probs)
    for n, row in enumerate(rows.unbind(0)):
        tokens = row[keys.FULL_TOKENS][row[keys.ATTENTION_MASK]]
        log_softmax = (model(input_ids=tokens[None]).logits[0].double() / temperature).log_softmax(-1)
        for t in range(1, len(tokens)):
            if row[keys.ASSISTANT_MASK][t]:
                log_probs[n, t] = log_softmax[t - 1, tokens[t]]
                entropy[n, t] = -(log_softmax[t - 1].exp() * log_softmax[t - 1]).sum()
    return log_probs, entropy


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("family", "dtype"), [*product(FAMILIES, [torch.float64]), ("qwen2", torch.float32)])
def test_equals_full_logits_with_every_gradient(family, dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functional_log_probs, "LOGITS_BYTES_ON_CPU", 400)
    model = make_model(family).to(dtype)
    rows = make_rows([9, 4, 12, 7], holes=True)
    # padded, as the reference is: packed rows go through the float32 norms in another order (test_shared_prompt.py)
    policy = CausalPolicy(model, temperature=0.7, entropy_grad=True, shared_prompt=False)
    out = policy(rows)
    log_probs, entropy = full_logits_reference(model, rows, 0.7)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(out[keys.LOG_PROBS].double(), log_probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out["entropy"].double(), entropy, rtol=tolerance, atol=tolerance)
    assert (out[keys.LOG_PROBS][~rows[keys.ASSISTANT_MASK]] == 0).all()

    weights = torch.randn(2, *log_probs.shape, dtype=torch.float64)
    ours = gradients(model, (weights[0] * out[keys.LOG_PROBS]).sum() + (weights[1] * out["entropy"]).sum())
    theirs = gradients(model, (weights[0] * log_probs).sum() + (weights[1] * entropy).sum())
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, gradient in theirs.items():
        scale = gradient.abs().max().item()
        # Gemma's norms sum their weight gradient in float32 whatever the dtype of the model.
        close = 1e-4 if dtype == torch.float32 or family.startswith(("gemma", "cohere")) else 1e-10
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=close * scale, msg=name)


@pytest.mark.parametrize(("shared_prompt", "masks"), [(True, torch.int64), (False, torch.bool)])
@pytest.mark.parametrize("truncated", [False, True])
def test_padding_may_be_anywhere(shared_prompt, masks, truncated):
    """Before the prompt, between prompt and response (where the token before the response is padding), in a turn."""
    policy = CausalPolicy(make_model("gemma2").double(), shared_prompt=shared_prompt, entropy_grad=True)
    rows = make_rows([6, 9, 9], width=12)
    by_token = list(policy.in_keys)
    if truncated:
        drawn = (row[keys.FULL_TOKENS][row[keys.ASSISTANT_MASK]] for row in rows)
        ids = [torch.stack([tokens, (tokens + 1) % VOCAB], 1).flatten().int() for tokens in drawn]
        rows[keys.SUPPORT_IDS] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
        rows[keys.SUPPORT_COUNTS] = rows[keys.ASSISTANT_MASK].int() * 2
        by_token.append(keys.SUPPORT_COUNTS)
    places = [[3, 4, 5, 6, 7, 8], [0, 1, 4, 5, 6, 7, 8, 9, 10], [2, 3, 4, 5, 7, 8, 9, 10, 11]]
    order = torch.tensor([place + sorted({*range(12)} - {*place}) for place in places])
    moved = rows.clone()
    for key in by_token:
        values = torch.zeros_like(rows[key]).scatter(1, order, rows[key])
        moved[key] = values.to(masks) if values.dtype == torch.bool else values
    results = []
    for given, at in ((moved, order), (rows, torch.arange(12).expand(3, -1))):
        values = policy(given).select(keys.LOG_PROBS, "entropy")
        assert not any(value[~given[keys.ASSISTANT_MASK].bool()].any() for value in values.values(True, True))
        loss = sum((value**2).sum() for value in values.values(True, True))
        found = [value.gather(1, at) for value in values.values(True, True)]
        results.append([*found, *gradients(policy, loss).values()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)  # the norms compute in float32


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_row_of_padding_alone_is_zeros_and_changes_no_other(family):
    policy, rows = CausalPolicy(make_model(family)), make_rows([5, 7])
    alone = policy(rows[1:])[keys.LOG_PROBS][0]
    rows[keys.ATTENTION_MASK][0] = rows[keys.ASSISTANT_MASK][0] = False
    actual = policy(rows)[keys.LOG_PROBS]
    assert (actual[0] == 0).all()
    torch.testing.assert_close(actual[1], alone)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_rows_without_assistant_tokens_give_zeros_and_finite_gradients(family):
    model = make_model(family)
    policy = CausalPolicy(model, entropy_grad=True)
    some, none = make_rows([7, 2, 5]), make_rows([2, 1])
    for rows in (some, none):
        out = policy(rows)
        assert (out[keys.LOG_PROBS][~rows[keys.ASSISTANT_MASK]] == 0).all()
        actual = gradients(model, out[keys.LOG_PROBS].sum() + out["entropy"].sum())
        assert actual
        assert all(torch.isfinite(gradient).all() for gradient in actual.values())
    assert all((gradient == 0).all() for gradient in actual.values())


def test_the_entropy_is_detached_by_default_and_the_input_rows_are_untouched():
    model, rows = make_model(), make_rows([6, 4])
    rows[keys.LOG_PROBS] = torch.full((2, 6), -9.0)
    out = CausalPolicy(model)(rows)
    assert not out["entropy"].requires_grad
    assert (rows[keys.LOG_PROBS] == -9.0).all()
    assert "entropy" not in rows
    assert CausalPolicy(model, entropy_grad=True)(rows)["entropy"].requires_grad
    assert CausalPolicy(model, with_entropy=False).out_keys == [keys.LOG_PROBS]


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_no_tensor_of_rows_times_vocabulary_is_made_or_kept(family, monkeypatch: pytest.MonkeyPatch):
    """3 * 38 positions over 200 words; the largest tensors are the head's gradient and the MLP's activations."""
    model, rows = make_model(family, vocab_size=200), make_rows([40, 40, 40])
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    sizes.append(value.numel())
            return result

    monkeypatch.setattr(functional_log_probs, "LOGITS_BYTES_ON_CPU", 800)
    policy = CausalPolicy(model)
    with Watch():
        policy(rows)[keys.LOG_PROBS].sum().backward()
    assert 200 * SIZES["hidden_size"] <= max(sizes) < 114 * 200 / 3


def test_what_cannot_be_answered_is_refused_with_a_sentence():
    rows = make_rows([5, 5])
    rows[keys.ASSISTANT_MASK][1, 0] = True
    with pytest.raises(ValueError, match="row 1 begins with an assistant token"):
        CausalPolicy(make_model())(rows)
    rows = make_rows([5, 3])
    rows[keys.ASSISTANT_MASK][:, 2:] = True  # as by a prompt's length alone, so that padding would be trained on
    with pytest.raises(ValueError, match="position 3 of row 1 is padding"):
        CausalPolicy(make_model())(rows)
    left = rows.apply(lambda values: values.flip(1))
    with pytest.raises(ValueError, match="row 0 begins with an assistant token"):  # after its padding
        CausalPolicy(make_model())(left[1:].set(keys.ASSISTANT_MASK, left[keys.ATTENTION_MASK][1:]))
    with pytest.raises(KeyError, match="all_attention_mask"):
        CausalPolicy(make_model())(make_rows([5]).exclude(keys.ATTENTION_MASK))
    with pytest.raises(ValueError, match="temperature is 0"):
        CausalPolicy(make_model(), temperature=0)


def test_a_row_for_which_positions_of_others_would_change_is_refused():
    policy, rows = CausalPolicy(make_model("phi3", **LONG_ROPE)), make_rows([8, 5, 9])
    alone = policy(rows[1:2])[keys.LOG_PROBS]
    torch.testing.assert_close(policy(rows[:2])[keys.LOG_PROBS][1:], alone)
    with pytest.raises(ValueError, match="a row has 9 tokens, and above 8 the rotary positions of Phi3ForCausalLM"):
        policy(rows)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model folder whose configuration requires dropout."""
    model = make_model("llama", attention_dropout=0.5)
    return str(save_hf(model, make_tokenizer(), tmp_path_factory.mktemp("model") / "llama")), model


def test_a_loaded_model_computes_the_same_in_training_mode(saved):
    path, model = saved
    loaded = load_model(path)
    rows = make_rows([8, 5])
    assert loaded.training
    expected = CausalPolicy(model)(rows)[keys.LOG_PROBS]  # in evaluation mode
    torch.testing.assert_close(CausalPolicy(loaded)(rows)[keys.LOG_PROBS], expected)
    assert load_model(path, dtype="bfloat16", attn_implementation="eager").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'half'"):
        load_model(path, dtype="half")


@pytest.mark.parametrize(("checkpointing", "runs"), [(False, 1), (True, 2)])
def test_gradient_checkpointing_really_recomputes(saved, checkpointing, runs):
    model, plain = load_model(saved[0], gradient_checkpointing=checkpointing), saved[1]
    policy, rows, calls = CausalPolicy(model), make_rows([8, 5]), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    actual = gradients(model, policy(rows)[keys.LOG_PROBS].sum())
    assert len(calls) == runs
    expected = gradients(plain, CausalPolicy(plain)(rows)[keys.LOG_PROBS].sum())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


def test_a_model_without_checkpointable_layers_is_refused(saved, monkeypatch):
    monkeypatch.setattr(type(saved[1]), "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match=r"no layer that supports .*train_model.gradient_checkpointing=false"):
        load_model(saved[0], gradient_checkpointing=True)


def test_a_missing_model_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ModelNotFoundError, match=r"is not a folder with a config.json; give .*model.name=tiny"):
        load_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"^ref_model.name=\S+ is not a folder .* ref_model.name=tiny"):
        load_model(str(tmp_path), option="ref_model.name")
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelNotFoundError, match=r"^ref_model.name=\S+ could not be loaded .* ref_model.name=tiny"):
        load_model(str(tmp_path), option="ref_model.name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for loader in (load_model, load_tokenizer):
        with pytest.raises(ModelNotFoundError, match=r"model.name=no-such/model .*check the network") as caught:
            loader("no-such/model")
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(load, "files", lambda _package: tmp_path)
    with pytest.raises(ModelNotFoundError, match="packaged policy is missing"):
        resolve_model_path("tiny")


def test_weights_that_a_folder_does_not_hold_or_are_damaged_are_one_sentence(saved, tmp_path):
    """What a folder's files lack would be made of random numbers, without end."""
    folder = shutil.copytree(saved[0], tmp_path / "model")
    config, weights = folder / "config.json", folder / "model.safetensors"
    described = config.read_text()
    for option in ("vocab_size", "num_hidden_layers", "intermediate_size"):
        config.write_text(json.dumps(json.loads(described) | {option: 10**9}))
        with pytest.raises(ModelNotFoundError, match=r"weights of \d{10,} elements or more, but all weight files have"):
            load_model(str(folder))
    config.write_text(described)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelNotFoundError, match=r"could not be loaded from .*model"):
        load_model(str(folder))


def test_the_tokenizer_pads_and_keeps_its_chat_template(saved):
    tokenizer = load_tokenizer(saved[0])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1 w2"}], tokenize=False) == "w1 w2 "


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # with a tied head, and with one of its own
def test_an_export_reloads_to_equal_logits(family, tmp_path):
    model = make_model(family)
    tokens = make_rows([7, 7])[keys.FULL_TOKENS]
    before = model(input_ids=tokens).logits
    for _ in range(2):  # the second one replaces the first
        save_hf(model, make_tokenizer(), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(reloaded(input_ids=tokens).logits, before)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == make_tokenizer().chat_template
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years")
    with pytest.raises(ValueError, match="holds no exported model"):
        save_hf(model, make_tokenizer(), tmp_path / "mine")


def test_an_export_has_the_dropout_of_the_model_that_was_trained(tmp_path: Path) -> None:
    """It is off in training; who trains the export further finds the configuration that the model came with."""
    config = GPT2Config(vocab_size=len(make_tokenizer()), n_embd=8, n_layer=1, n_head=1, n_positions=32, attn_pdrop=0.2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"))
    exported = AutoConfig.from_pretrained(save_hf(model, make_tokenizer(), tmp_path / "hf"))
    assert (exported.attn_pdrop, exported.resid_pdrop) == (0.2, 0.1)
    assert (model.config.attn_pdrop, model.config.resid_pdrop) == (0.0, 0.0)


@pytest.mark.parametrize(("adapter", "most_bytes"), [(False, 10**6), (True, 10**6), (True, 10**9)])
def test_an_export_that_is_written_weight_by_weight_is_what_transformers_writes(
    adapter: bool, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_model("tiny")
    model = trained_adapter(base) if adapter else base
    base.save_pretrained(tmp_path / "theirs", state_dict=dict(engine_weights(model)))
    monkeypatch.setattr(load, "write_model", partial(write_model, most_bytes=most_bytes))
    monkeypatch.setattr(base, "save_pretrained", partial(only_its_configuration, base.save_pretrained))
    save_hf(model, load_tokenizer("tiny"), tmp_path / "ours")
    several = len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert several == (tmp_path / "ours" / "model.safetensors.index.json").exists() == (most_bytes == 10**6)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()


@pytest.mark.parametrize(
    ("stored", "trained", "asked", "written", "adapter", "own"),  # own: by transformers, not weight by weight
    [
        ("bfloat16", "float32", None, "bfloat16", False, False),
        ("bfloat16", "float32", "float32", "float32", True, True),
        ("bfloat16", "float32", "float16", "float16", True, False),
        ("float32", "bfloat16", None, "bfloat16", False, True),
        ("float16", "bfloat16", None, "bfloat16", True, False),
    ],
)
def test_an_export_has_the_dtype_of_the_model_that_was_trained(
    stored: str, trained: str, asked: Any, written: str, adapter: bool, own: bool, tmp_path: Path
) -> None:
    load_model("tiny").to(getattr(torch, stored)).save_pretrained(tmp_path / "base")
    model = load_model(str(tmp_path / "base"), dtype=trained)
    model._weight_conversions = None if own else []
    policy = trained_adapter(model) if adapter else model
    save_hf(policy, load_tokenizer("tiny"), tmp_path / "hf", dtype=asked)
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == getattr(torch, written)
    learned = dict(engine_weights(policy))
    for name, weight in load_file(tmp_path / "hf" / "model.safetensors").items():
        torch.testing.assert_close(weight, learned[name].to(getattr(torch, written)), rtol=0, atol=0)
    assert model.dtype == getattr(torch, trained)


def only_its_configuration(save: Any, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
    assert state_dict == {}
    save(folder, state_dict=state_dict)


def test_a_frozen_reference_does_not_follow_the_policy():
    model, rows = make_model(), make_rows([8, 5])
    policy = CausalPolicy(model, temperature=0.7)
    before = policy(rows)[keys.LOG_PROBS].detach()
    reference = FrozenReference(copy.deepcopy(model), temperature=0.7)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(torch.randn_like(model.model.embed_tokens.weight))
    actual = reference(rows)
    assert torch.equal(actual, before)
    assert not actual.requires_grad
    assert not torch.allclose(policy(rows)[keys.LOG_PROBS], before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    reference.close()
    reference.close()
    with pytest.raises(RuntimeError, match="closed"):
        reference(rows)
