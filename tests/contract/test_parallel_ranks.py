"""Ranks that divide every matrix (tensor parallelism), or hold copies (hybrid sharding), do what one rank does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sota_grpo import keys
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.collate import row_list
from sota_grpo.training.checkpoint import CheckpointStore
from tests.contract.test_fsdp_ranks import (
    CLOSE,
    LAYOUT,
    Pair,
    assert_equal_weights,
    require_equal_gate,
    require_equal_updates,
    save,
    started,
)
from tests.rank_rigs import ragged_rows

#: Halves of the vocabulary and of the MLP are odd, so that FSDP's parts of them are uneven.
DIVIDED = {"tensor_parallel": 2, "shape": {"vocab_size": 42, "intermediate_size": 30}}
LORA = DIVIDED | {"family": "qwen3", "lora": True}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


KINDS: dict[str, dict[str, Any]] = {
    "2 x 2, a tied head, a sum after each pass": DIVIDED
    | {"family": "qwen2", "reduce_once": False, "checkpointing": True, "clip_grad_norm": 0.0},
    "2 copies of 2, norms of heads, proximal": DIVIDED | {"family": "qwen3", "fsdp_size": 1, "recompute": True},
    "four parts, padded rows": {"tensor_parallel": 4, "family": "llama"}
    | {"shape": {"num_key_value_heads": 4, "vocab_size": 44, "intermediate_size": 36, "attn_implementation": "eager"}},
    "2 x 2, windows, tokens of high entropy, adapted bonus": DIVIDED
    | {"family": "mistral", "top_entropy_quantile": 0.4, "entropy_target": 9.0, "kl_coef": 0.0},
    "2 copies over 2, muon": {"fsdp_size": 2, "optimizer": "muon", "in_float32": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_equal_one_ranks(kind: str, four: Pair) -> None:
    require_equal_updates(four.learner(**KINDS[kind]), four.one(**KINDS[kind]))


def test_half_precision_rounds_no_gradient_more(four: Pair) -> None:
    """Each parameter's, by its first moment; no token is near a clip, where rounding would decide."""
    options = DIVIDED | {"family": "qwen3", "optim_batch_size": 9}
    many, rows = four.learner(**options, precision="bf16"), ragged_rows(9)
    one, exact = (four.one(**options, precision=precision) for precision in ("bf16", "fp32"))
    own = exact.measured(row_list(rows))[0].split([len(row[keys.FULL_TOKENS]) for row in row_list(rows)])
    for row, values in zip(row_list(rows), own):
        row[keys.LOG_PROBS], row[keys.ADVANTAGE] = values + 0.7, row[keys.ADVANTAGE].abs() + 0.5
    states = []
    for learner in (many, one, exact):
        learner.update(rows.clone())
        states.append(learner.state_dict()["optimizer"]["state"])
    for index in states[2]:
        actual, rounded, true = (state[index]["exp_avg"] for state in states)
        # of a norm's four numbers the roundings of one device may cancel; a sum that is missing is tens of percents
        assert (actual - true).norm() < 2 * (rounded - true).norm() + 0.05 * true.norm(), index
        assert (rounded - true).norm() > 0


@pytest.mark.parametrize("options", [DIVIDED, {"fsdp_size": 2}], ids=["tensor", "copies"])
def test_the_gate_is_answered_alike(options: dict[str, Any], four: Pair) -> None:
    many, one, rows = four.learner(**options), four.one(**options), row_list(ragged_rows(5))
    require_equal_gate(many, one, rows)
    before = many.state_dict()["model"]
    many.perturb()
    state = many.state_dict()
    assert not any(torch.equal(state["model"][name], value) for name, value in before.items())
    one.load_state_dict(state)
    torch.testing.assert_close(many.measured(rows), one.measured(rows), **CLOSE)  # copies were changed alike
    many.restore()
    assert all(torch.equal(value, before[name]) for name, value in many.state_dict()["model"].items())


def test_each_rank_keeps_a_quarter(four: Pair) -> None:
    many, one = four.learner(**DIVIDED), four.one(**DIVIDED)
    many.update(ragged_rows(4))
    whole = sum(parameter.numel() for parameter in one.parameters)
    kept = [parameters for parameters, _ in four.ask("num_elements")]
    assert max(kept) < 0.27 * whole  # norms are halved only, and the uneven parts are a row longer


def test_tokens_of_sampling_supports_are_scored_alike(four: Pair) -> None:
    many, one, rows = four.learner(**DIVIDED), four.one(**DIVIDED), row_list(ragged_rows(6))
    for row in rows:  # each token was drawn from itself and two others
        sampled = row[keys.ASSISTANT_MASK]
        drawn = row[keys.FULL_TOKENS][sampled]
        others = torch.stack([drawn, (drawn + 1) % 37, (drawn + 20) % 37], dim=1)
        row[keys.SUPPORT_IDS], row[keys.SUPPORT_COUNTS] = others.flatten().int(), sampled.int() * 3
    require_equal_gate(many, one, rows)


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_changes_the_layout(lora: bool, four: Pair, tmp_path: Path) -> None:
    """2 x 2, then one rank, then four of FSDP alone, then 2 x 2: as one rank without a break; moments too."""
    options = LORA | {"lora": lora, "schedule": "cosine", "warmup_steps": 2}
    plain = {name: value for name, value in options.items() if name not in LAYOUT}
    batches, store, whole = [ragged_rows(6) for _ in range(4)], CheckpointStore(tmp_path, keep=9), four.one(**plain)
    for batch in batches:
        whole.update(batch.clone())
    learner: Any = four.learner(**options)
    for step, (batch, build) in enumerate(
        zip(batches, (None, lambda: four.one(**plain), lambda: four.learner(**plain), lambda: four.learner(**options)))
    ):
        if build is not None:
            save(store, step, learner)
            learner = build()
            learner.load_state_dict(store.latest()[1]["learner"])
        learner.update(batch)
    assert_equal_weights(learner, whole)
    assert learner.version == whole.version == 4
    save(store, 4, learner)
    saved, again = learner.state_dict(), four.learner(**options)
    again.load_state_dict(store.latest()[1]["learner"])
    torch.testing.assert_close(again.state_dict(), saved, rtol=0.0, atol=0.0)
    sizes = [file.stat().st_size for file in tmp_path.glob("checkpoint_000004.*/rank_*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 0.4 * sum(sizes)


def test_an_export_and_packs_have_the_merged_weights(four: Pair, tmp_path: Path) -> None:
    """After an export that was refused, which the ranks survive."""
    many, one, rows = four.learner(**LORA), four.one(**LORA), ragged_rows(6)
    many.update(rows)
    one.update(rows)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not empty"):
        many.export_hf(tmp_path / "taken")
    many.export_hf(tmp_path / "hf")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    many.pack_bytes = 3000
    pack = many.weights()
    packed, expected = dict(pack), dict(engine_weights(one.policy.model))
    assert len(pack.buffers) > 2
    largest = max(value.nbytes for value in expected.values())
    assert all(buffer.nbytes <= max(3000, largest) for buffer, _ in pack.buffers)
    for name, value in expected.items():
        torch.testing.assert_close(reloaded[name], value, **CLOSE)
        torch.testing.assert_close(packed[name], value, **CLOSE)
