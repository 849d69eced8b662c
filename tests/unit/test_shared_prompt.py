"""Packed rows that share their prompts: the same log-probs and gradients as padded rows, for every family."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel

from sota_grpo import keys
from sota_grpo.policy import causal, shared_prompt
from sota_grpo.policy.causal import ENTROPY, CausalPolicy
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.shared_prompt import (
    SHARED_ATTENTION,
    Block,
    Run,
    _FlashShared,
    _plain,
    pack,
    shared_attention,
)
from tests.pretended_cuda import kernels
from tests.rank_rigs import trained_adapter
from tests.unit.tiny_models import FAMILIES, VOCAB, make_model, make_rows


def make_groups(groups: list[tuple[int, list[int]]], *, tool_turns: bool = False) -> TensorDict:
    """Shuffled rows: each group is a prompt length and its responses' lengths (0: the row ends with its prompt)."""
    rows = []
    for prompt_length, responses in groups:
        prompt = torch.randint(3, VOCAB, (prompt_length,))
        for length in responses:
            mask = torch.ones(length, dtype=torch.bool)
            mask[2:4] = not tool_turns
            tokens = torch.cat([prompt, torch.randint(3, VOCAB, (length,))])
            rows.append((tokens, torch.cat([torch.zeros(prompt_length, dtype=torch.bool), mask])))
    rows = [rows[index] for index in torch.randperm(len(rows)).tolist()]
    pad = torch.nn.utils.rnn.pad_sequence
    entries = {
        keys.FULL_TOKENS: pad([tokens for tokens, _ in rows], batch_first=True),
        keys.ATTENTION_MASK: pad([torch.ones_like(mask) for _, mask in rows], batch_first=True),
        keys.ASSISTANT_MASK: pad([mask for _, mask in rows], batch_first=True),
    }
    return TensorDict(entries, batch_size=[len(rows)])


GROUPS = [(5, [1, 7, 7, 3]), (3, [9, 2]), (8, [4]), (2, [6, 6, 6, 6, 6, 0])]


def measured(policy: CausalPolicy, rows: TensorDict, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and the gradient of every trainable parameter."""
    policy.zero_grad()
    out = policy(rows)
    (out[keys.LOG_PROBS] * weights).sum().backward()
    actual = {name: p.grad for name, p in policy.scorer.named_parameters() if p.grad is not None}
    return {"log_probs": out[keys.LOG_PROBS].detach(), "entropy": out[ENTROPY].detach(), **actual}


def require_equal(one: CausalPolicy, other: CausalPolicy, *, tool_turns: bool = False) -> None:
    """In float64, but for the norms and positions that all these models compute, and sum up, in float32."""
    rows = make_groups(GROUPS, tool_turns=tool_turns)
    weights = torch.randn(rows[keys.FULL_TOKENS].shape, dtype=torch.float64)
    actual, expected = (measured(policy, rows, weights) for policy in (one, other))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 1e-5 * max(float(value.norm()), 1e-12), name


def policies(
    family: str, dtype: torch.dtype = torch.float64, *, attention: str = "sdpa", **changes
) -> tuple[CausalPolicy, CausalPolicy]:
    """The same weights, packed and padded; the padded one with an attention of transformers."""
    padded = make_model(family, attn_implementation=attention, **changes).to(dtype)
    packed = make_model(family, **changes).to(dtype)
    packed.load_state_dict(padded.state_dict())
    options = {"temperature": 0.7}
    return CausalPolicy(packed, **options), CausalPolicy(padded, shared_prompt=False, **options)


CASES = {
    **{family: {} for family in FAMILIES},
    "gemma2 with capped scores": {"attn_logit_softcapping": 0.5},
    "mistral with a wide window": {"sliding_window": 40},
    "one key head": {"num_key_value_heads": 1},
    "a key head for each": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_equal_padded_ones(case: str) -> None:
    family = case.split()[0] if case.split()[0] in FAMILIES else "qwen3"
    capped = family == "gemma2"  # which only the eager attention does
    packed, padded = policies(family, attention="eager" if capped else "sdpa", **CASES[case])
    assert packed.shared_prompt
    require_equal(packed, padded, tool_turns=True)


def test_rows_are_padded_once_the_attention_is_another() -> None:
    """By ``set_attn_implementation`` of this model, or of another one with the same config object."""
    packed, padded = policies("llama")
    packed.model.set_attn_implementation("eager")
    require_equal(packed, padded)


def test_scores_are_capped_where_rows_are_padded_too() -> None:
    """transformers' SDPA leaves the cap out, with ``model.attn_implementation=sdpa`` and where packing is refused."""
    capped = {"attn_logit_softcapping": 0.5}
    eager, sdpa = (make_model("gemma2", attn_implementation=name, **capped).double() for name in ("eager", "sdpa"))
    sdpa.load_state_dict(eager.state_dict())
    require_equal(*(CausalPolicy(model, shared_prompt=False) for model in (sdpa, eager)))


OF_GPUS = ("qwen3", "mistral", "mistral with a wide window", "gemma3_text", "granite", "one key head")


@pytest.mark.parametrize("case", OF_GPUS)
def test_the_operation_for_gpus_gets_the_same_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments, with plain torch in its place: its kernels have tests of their own."""
    packed, padded = policies(case.split()[0] if case.split()[0] in FAMILIES else "qwen3", head_dim=8, **CASES[case])
    plain = mock.Mock(wraps=lambda *args: kernels.packed_attention(*args)[0])
    monkeypatch.setattr(shared_prompt, "takes_kernels", lambda device, dtype, width: True)
    monkeypatch.setattr(causal, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "HALF", (torch.float64,))
    monkeypatch.setattr(shared_prompt, "packed_attention", plain)
    require_equal(packed, padded)
    assert plain.called


@pytest.mark.parametrize("lora", [False, True])
def test_checkpointing_and_adapters_change_nothing(lora: bool) -> None:
    packed, padded = policies("qwen2")
    if lora:
        models = [trained_adapter(policy.model) for policy in (packed, padded)]
        models[1].load_state_dict(models[0].state_dict())
        packed, padded = CausalPolicy(models[0]), CausalPolicy(models[1], shared_prompt=False)
    enable_gradient_checkpointing(packed.model.base_model.model if lora else packed.model)
    require_equal(packed.train(), padded)


def test_gradients_of_half_precision_are_rounded_once() -> None:
    """Within one rounding to bfloat16 of float64's, 1.7e-3 of the norm; a backward pass in bfloat16 is 3e-3 off."""
    tokens = torch.randint(1, 9, (4, 80))
    tokens[:, :30] = tokens[0, :30]
    mask = torch.arange(80).expand(4, -1) >= 30
    layout = pack(tokens, torch.ones_like(mask), mask)
    inputs = [torch.randn(1, heads, len(layout.tokens), 64).bfloat16() for heads in (4, 2, 2, 4)]

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        *leaves, pull = (each.to(dtype, copy=True) for each in inputs)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out, _ = shared_attention(torch.nn.Identity(), *leaves, None, layout=layout)
        return [each.double() for each in torch.autograd.grad(out, leaves, pull.transpose(1, 2))]

    for half, exact in zip(gradients(torch.bfloat16), gradients(torch.float64)):
        assert (half - exact).norm() < 2.4e-3 * exact.norm()


@pytest.mark.parametrize("causal_rows", [True, False])
def test_the_layout_puts_every_token_where_it_says(causal_rows: bool) -> None:
    rows = make_groups(GROUPS) if causal_rows else make_rows([4, 9, 2])
    tokens, real = rows[keys.FULL_TOKENS], rows[keys.ATTENTION_MASK]
    layout = pack(tokens, real, rows[keys.ASSISTANT_MASK])
    packed = layout.tokens
    assert torch.equal(packed[layout.packed_at][real], tokens[real])
    assert torch.equal(layout.positions[0][layout.packed_at][real], (real.long().cumsum(-1) - 1)[real])
    assert layout.packed_at[real].unique().tolist() == list(range(len(packed)))
    assert layout.longest == int(real.sum(-1).max())
    ends = [0, *(block.stop for block in layout.blocks)]
    assert [block.start for block in layout.blocks] == ends[:-1]
    assert ends[-1] == len(packed)


@pytest.mark.parametrize("piece", [1024, 64])
def test_tables_name_each_pair_of_query_and_key_once(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By queries and by keys: what a row of the padded form sees, over prompts of several tiles and pieces."""
    monkeypatch.setattr(shared_prompt, "PIECE", piece)
    rows = make_groups([(150, [1, 140, 7, 7]), (3, [9, 2]), (130, [0]), (8, [300])])
    layout = pack(*(rows[key] for key in (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK)))
    length, (starts, query_tiles, key_tiles, joins) = len(layout.tokens), layout.tables.split()
    place = torch.arange(length)
    own = (place <= place.unsqueeze(1)) & (place >= starts.unsqueeze(1))
    expected = torch.zeros(length, length, dtype=torch.int64)
    for row, real in zip(layout.packed_at, rows[keys.ATTENTION_MASK]):
        seen = row[real]
        for index, token in enumerate(seen):
            expected[token, seen[: index + 1]] = 1
    by_query, by_key = torch.zeros_like(expected), torch.zeros_like(expected)
    for first, end, prompt, prompt_end in query_tiles.tolist():
        by_query[first:end] += own[first:end]
        by_query[first:end, prompt:prompt_end] += 1
    for first, end, unmasked, masked, last, slot, _ in key_tiles.tolist():
        by_key[unmasked:masked, first:end] += own[unmasked:masked, first:end]
        by_key[masked:last, first:end] += 1
        assert (slot >= 0) == any(first == join[0] and join[4] for join in joins.tolist())
    assert torch.equal(by_query, expected)
    assert torch.equal(by_key, expected)
    slots = [slot + index for _, _, slot, stride, pieces in joins.tolist() for index in range(stride * pieces)]
    assert sorted(slots) == list(range(2, layout.tables.sizes[3]))


def test_rows_that_are_not_right_padded_are_packed_too() -> None:
    packed, padded = policies("qwen2")
    rows = make_rows([5, 7])
    left = TensorDict({key: value.flip(-1) for key, value in rows.items(True, True)}, batch_size=[2])
    left[keys.ASSISTANT_MASK] = left[keys.ATTENTION_MASK].clone()
    left[keys.ASSISTANT_MASK][:, :4] = False
    with pytest.raises(ValueError, match="right-padded"):
        pack(*(left[key] for key in packed.in_keys))
    torch.testing.assert_close(packed(left)[keys.LOG_PROBS], padded(left)[keys.LOG_PROBS])


def rolling_mlp(model: PreTrainedModel) -> None:
    """A layer that mixes neighbouring tokens outside attention."""
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, output: output + output.roll(1, dims=1))


def deaf_decoder(model: PreTrainedModel) -> None:
    def refuse(_m: object, _a: tuple, kwargs: dict) -> None:
        if "layout" in kwargs:
            raise TypeError("layout is unknown")

    model.model.register_forward_pre_hook(refuse, with_kwargs=True)


REFUSED = [
    ("its attention is eager", "qwen2", {"attn_implementation": "eager"}, None),
    ("its attention has dropout", "llama", {"attention_dropout": 0.1}, None),
    ("its attention has dropout", "gpt2", {"attn_pdrop": 0.1}, None),
    ("layers of type conv", "lfm2", {"layer_types": ["conv", "full_attention"]}, None),
    ("packed rows change its hidden states", "qwen2", {}, rolling_mlp),
    ("TypeError: layout is unknown", "qwen2", {}, deaf_decoder),
]


@pytest.mark.parametrize(("reason", "family", "changes", "change"), REFUSED)
def test_a_model_that_cannot_take_packed_rows_says_so(reason, family, changes, change, caplog) -> None:
    model = make_model(family, **changes)
    if change is not None:
        change(model)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING):
        policy = CausalPolicy(model)
    assert not policy.shared_prompt
    assert "does not compute equal prompts once" in caplog.text
    assert reason in caplog.text
    assert model.config._attn_implementation == before
    rows = make_groups([(5, [1, 4])])
    torch.testing.assert_close(
        policy(rows)[keys.LOG_PROBS], CausalPolicy(model, shared_prompt=False)(rows)[keys.LOG_PROBS]
    )


def test_without_a_layout_the_model_is_what_it_was() -> None:
    model = make_model("qwen3")
    tokens, mask = torch.randint(3, VOCAB, (2, 6)), torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    before = model(input_ids=tokens, attention_mask=mask).logits
    CausalPolicy(model)
    assert model.config._attn_implementation == SHARED_ATTENTION
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits[1, 2:], before[1, 2:])
    assert "sota_grpo" not in str(model.config.to_dict())


def test_a_mistake_in_our_own_attention_is_no_reason_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a keyword that the kernel of another torch does not know: it must not be taken for the model's."""
    monkeypatch.setattr(shared_prompt, "_flash", lambda *inputs: None)
    with pytest.raises(TypeError):
        CausalPolicy(make_model("qwen2"))


def test_what_is_not_known_is_refused() -> None:
    heads = torch.randn(1, 2, 3, 4)
    layout = pack(torch.arange(3).unsqueeze(0), torch.ones(1, 3).bool(), torch.zeros(1, 3).bool())
    unlike = "dropout, or attention that is not causal"
    for strange, reason in (({"dropout": 0.1}, unlike), ({"s_aux": heads}, "s_aux"), ({"is_causal": False}, unlike)):
        with pytest.raises(NotImplementedError, match=reason):
            shared_attention(torch.nn.Identity(), heads, heads, heads, None, layout=layout, **strange)


def test_the_sums_of_a_long_prompt_take_eight_times_its_keys_at_most() -> None:
    """However many queries read them: 2,048 keys, and 64 responses of 1,024 tokens."""
    block = Block(0, 2048, 2048 + 64 * 1024, (Run(2048, 64, 1024),))
    tables = shared_prompt.attention_tables([block], block.stop)
    assert 2048 < tables.sizes[3] - 2 <= 8 * 2048
    pieces = [row for row in tables.split()[2].tolist() if row[1] <= 2048]
    assert sum(row[4] - row[2] for row in pieces) == sum(block.stop - first for first in range(0, 2048, 128))


def test_spans_of_similar_lengths_are_attended_as_each_alone() -> None:
    """Forward and gradients in float64, with spans of 1 to 150 tokens, in fewer batches than there are lengths."""
    lengths = torch.randint(1, 150, (3, 12)).tolist()
    rows = make_groups([(0, lengths[0]), *((prompt, responses) for prompt, *responses in lengths[1:])])
    layout = pack(*(rows[key] for key in (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK)))
    end = len(layout.tokens)
    places = torch.cat([batch.positions[batch.real] for batch in layout.spans])
    assert sorted(places.tolist()) == list(range(end)), "every token is in one span"
    assert len(layout.spans) < len({length for row in lengths for length in row}) / 2
    heads = [torch.randn(1, end, count, 8, dtype=torch.float64).transpose(1, 2).requires_grad_() for count in (4, 2, 2)]
    weights, results = torch.randn(1, 4, end, 8, dtype=torch.float64), []
    for attend in (lambda: _FlashShared.apply(*heads, layout, 0.3), lambda: _plain(*heads, layout, 0.3, None, None)):
        out = attend()
        results.append([out, *torch.autograd.grad(out, heads, weights)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
