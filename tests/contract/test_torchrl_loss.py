"""TorchRL and this package read each other's batches, losses and transforms alike."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from sota_grpo import keys
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from tests.builders import ModelActor, generator, random_row, tiny_model, tiny_tokenizer


@pytest.fixture
def model() -> nn.Module:
    return tiny_model()


def wrapper(model: nn.Module, **options) -> TransformersWrapper:
    return TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False, **{"pad_output": True} | options
    )


def rows_of(model: nn.Module, shapes: list[tuple[int, int]]) -> list[TensorDict]:
    """Rows whose behaviour, reference and current log-probs lie near each other, as after one update."""
    stream = generator()
    rows = [random_row(stream, p, r, index=i).exclude("proximal_log_probs") for i, (p, r) in enumerate(shapes)]
    padded = pad_rows(rows, pad_token_id=0)
    with torch.no_grad():
        current = ModelActor(model)(padded.copy())[keys.LOG_PROBS]
    for row, values in zip(rows, current, strict=True):
        mask = row[keys.ASSISTANT_MASK]
        for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
            noise = 0.3 * torch.randn(len(mask), generator=stream)
            row.set(key, torch.where(mask, values[: len(mask)] + noise, 0.0))
    return rows


def gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


EQUAL_LENGTHS = [(3, 5)] * 6
RAGGED = [(1, 6), (4, 2), (2, 2), (3, 5), (1, 1), (2, 4)]


@pytest.mark.parametrize(("aggregation", "clip_epsilon"), [("token_mean", 0.2), ("prompt_mean", (0.1, 0.3))])
@pytest.mark.parametrize("masking_strategy", ["sft", "rlhf"])
def test_the_loss_equals_torchrls_on_an_unpadded_batch(model, aggregation, masking_strategy, clip_epsilon) -> None:
    """TorchRL divides the KL over the 6 * 5 response tokens by all 6 * 8 tokens; ours is a mean over the trained."""
    batch = lazy_stack(rows_of(model, EQUAL_LENGTHS), 0)
    options = {"aggregation": aggregation, "masking_strategy": masking_strategy, "clip_epsilon": clip_epsilon}
    options |= {"entropy_coeff": 0.05, "kl_to_ref_coeff": 0.1}
    theirs, ours = (loss(wrapper(model), **options)(batch.clone()) for loss in (TorchRLGRPOLoss, GRPOLoss))
    expected = theirs.loss_objective.mean()
    assert ours.loss_objective.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient(model, ours.loss_objective), gradient(model, expected), rtol=1e-4, atol=1e-6)
    if aggregation == "token_mean":
        assert ours.loss_entropy.item() == pytest.approx(theirs.loss_entropy.item(), rel=1e-5)
        assert ours.ESS.item() == pytest.approx(theirs.ESS.item(), rel=1e-5)
        assert ours.loss_kl_to_ref.item() == pytest.approx(theirs.loss_kl_to_ref.item() * 8 / 5, rel=1e-4)


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_ragged_rows_through_a_wrapper_equal_the_plain_policy(model, pad_output, dense) -> None:
    """Unequal prompts and responses: every way into the loss gives one value and one gradient."""
    rows = set_loss_weights(rows_of(model, RAGGED), "sequence")
    plain = GRPOLoss(ModelActor(model), entropy_bonus=False, kl_to_ref_coeff=0.1)(pad_rows(rows, pad_token_id=0))
    batch = pad_rows(rows, pad_token_id=0) if dense else lazy_stack(rows, 0)
    if dense:  # as another pipeline may bring them: the padded width of the prompts says nothing about a row's own
        prompts = [row[keys.PROMPT_TOKENS] for row in rows]
        batch.set(keys.PROMPT_TOKENS, torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True))
    wrapped = GRPOLoss(wrapper(model, pad_output=pad_output), entropy_bonus=False, kl_to_ref_coeff=0.1)(batch)
    for name in ("loss_objective", "loss_kl_to_ref"):
        torch.testing.assert_close(wrapped.get(name), plain.get(name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient(model, wrapped.loss_objective), gradient(model, plain.loss_objective), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("options", [None, {"pad_output": True}, {"pad_output": False}])
def test_each_row_of_a_ragged_batch_has_an_entry_or_none_has(model, options) -> None:
    """A weight, a proximal log-prob or a mask that a single row lacks would be ignored in all rows."""
    rows = set_loss_weights(rows_of(model, RAGGED), "sequence")
    loss = GRPOLoss(model if options is None else wrapper(model, **options), entropy_bonus=False)
    expected = loss(lazy_stack(rows, 0)).loss_objective
    for row in rows:  # one advantage per token
        row[keys.ADVANTAGE] = row[keys.ADVANTAGE].expand(len(row[keys.FULL_TOKENS]), 1)
    torch.testing.assert_close(loss(lazy_stack(rows, 0)).loss_objective, expected)
    del rows[2]["loss_weight"]
    with pytest.raises(ValueError, match=r"loss_weight is missing in 1 of 6 rows \(the first is row 2\)"):
        loss(lazy_stack(rows, 0))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", ["action", "mask"])
def test_a_key_that_the_actor_does_not_read_and_several_dimensions_are_refused(model, wrapped: bool, name: str) -> None:
    batch = lazy_stack(rows_of(model, RAGGED), 0)
    loss = GRPOLoss(wrapper(model) if wrapped else model, entropy_bonus=False)
    loss(batch)
    with pytest.raises(ValueError, match=r"the shape \[6, 1\]; pass rows \[N\]: batch.reshape\(-1\)"):
        loss(batch.reshape(-1, 1))  # as ``env.rollout`` and a collector that does not flatten give it
    loss.set_keys(**{name: ("mine", "all")})
    for row in batch.unbind(0):
        row["mine", "all"] = row[keys.FULL_TOKENS] if name == "action" else row[keys.ASSISTANT_MASK]
    with pytest.raises(ValueError, match=rf"takes {name} from mine.all, but actor_network reads only tokens.full"):
        loss(batch)


def test_an_actor_may_have_nothing_but_the_distribution(model) -> None:
    """A module of one's own, which TorchRL's loss takes too: ``get_dist`` of a wrapper that masks as it likes."""

    class Own(nn.Module):
        pad_output, input_mode = True, "tokens"

        def __init__(self) -> None:
            super().__init__()
            self.wrapped = wrapper(model)

        def get_dist(self, batch: TensorDict, logits_key: str) -> torch.distributions.Distribution:
            return self.wrapped._get_sft_dist(batch, logits_key=logits_key)

    batch = lazy_stack(rows_of(model, RAGGED), 0)
    own, known = (GRPOLoss(actor, entropy_bonus=False)(batch.clone()) for actor in (Own(), wrapper(model)))
    assert own.loss_objective.item() == known.loss_objective.item()


def test_torchrls_loss_consumes_our_rows_and_our_padded_batch(model) -> None:
    for shapes in (EQUAL_LENGTHS, RAGGED):
        rows = rows_of(model, shapes)
        padded = pad_rows(rows, pad_token_id=0)
        ours = GRPOLoss(ModelActor(model), entropy_bonus=False)(padded.clone()).loss_objective
        for batch in (padded, lazy_stack(rows, 0))[: 2 if shapes is EQUAL_LENGTHS else 1]:
            theirs = TorchRLGRPOLoss(wrapper(model), entropy_bonus=False)(batch).loss_objective
            assert theirs.item() == pytest.approx(ours.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("aggregation", ["token_mean", "none"])
def test_reducing_the_output_gives_the_loss(model, reduction: str, aggregation: str) -> None:
    """What TorchRL's recipes differentiate, ``loss.mean(reduce=True)``, with diagnostics and three terms beside it.

    The divergence from the inference policy is reported where it is a loss, in nats per token as in TorchRL's recipe.
    """
    batch = lazy_stack(rows_of(model, RAGGED), 0)
    options = {"aggregation": aggregation, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.2}
    out = GRPOLoss(wrapper(model), **options)(batch)
    terms = [value for name, value in out.items() if name.startswith("loss_")]
    assert len(terms) == 4
    expected = sum(getattr(term, reduction)() for term in terms)
    actual = getattr(out, reduction)(reduce=True)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    whole = gradient(model, getattr(GRPOLoss(wrapper(model), **options)(batch), reduction)(reduce=True))
    torch.testing.assert_close(whole, gradient(model, expected), rtol=1e-4, atol=1e-6)
    if aggregation == "token_mean":
        assert out.kl_to_inference.item() * 0.2 == pytest.approx(out.loss_kl_to_inference.item(), rel=1e-5)
        assert out.kl_to_inference.item() > 1e-3
        assert GRPOLoss(wrapper(model), entropy_bonus=False)(batch).kl_to_inference is None
