"""The sampling supports of truncated sampling: from the engine through rows, packs and dialogs to the policy."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from sota_grpo import keys
from sota_grpo.assembly.sampling import make_sampling
from sota_grpo.config import Config
from sota_grpo.engines.stepping import StopStrings
from sota_grpo.engines.vllm_engine import log_probs_and_support
from sota_grpo.envs.dialogs import Dialog
from sota_grpo.policy.causal import CausalPolicy, FrozenReference
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.policy.lora import add_lora
from sota_grpo.rl.collate import drawn_entries, group_table, pad_rows, unpad_rows
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.records import Example, GroupOutput, Sample, Sampling, SamplingSupport
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import ReferenceKL
from sota_grpo.training import gate
from sota_grpo.training.gate import run_gate
from sota_grpo.workers.base import pending_future
from sota_grpo.workers.reference import _READ, ReferenceService, ReferenceWorker
from tests.engine_rigs import (
    CONTEXT,
    PAD,
    VOCAB,
    generate,
    hf_engine,
    ragged_requests,
    require_supports,
    tiny_model,
)
from tests.training_rigs import make_components

WAYS = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.5, "top_p": 0.9, "top_k": 8, "min_p": 0.05},
}


def sampled(model: torch.nn.Module, **how: float) -> list[tuple[tuple[int, ...], Sample]]:
    """Prompts and samples, 4 of each of 3 prompts, of lengths that differ: drawn again where all run to their limit."""
    samples: list[tuple[tuple[int, ...], Sample]] = []
    while len({len(sample.token_ids) for _, sample in samples}) < 2:
        requests = ragged_requests(3, 4)
        outputs = generate(hf_engine(model), requests, Sampling(max_tokens=24, **how))
        samples = [(request.prompt_ids, sample) for request in requests for sample in outputs[request.group_id].samples]
    return samples


def rows_of(samples: list[tuple[tuple[int, ...], Sample]]) -> list[TensorDict]:
    class Silent:
        def decode(self, ids: torch.Tensor, **_: bool) -> str:
            return ""

    rows = []
    for group, (prompt, sample) in enumerate(samples):
        rows += group_table(drawn_entries(group, Example("", ""), prompt), [sample], Silent()).stack().unbind(0)
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_reports_its_sampling_support_and_log_probs_over_it(way: str) -> None:
    model = tiny_model()
    samples = sampled(model, **WAYS[way])
    require_supports(model, samples, Sampling(max_tokens=24, **WAYS[way]))
    assert max(int(sample.support.counts.max()) for _, sample in samples) > 1


def test_whole_distributions_and_greedy_ones_have_no_sets() -> None:
    model = tiny_model()
    for how in ({}, {"temperature": 0.0, "top_p": 0.5}):
        assert all(sample.support is None for _, sample in sampled(model, **how))


def test_top_p_and_min_p_keep_1024_tokens_at_most() -> None:
    config = Config()
    assert make_sampling(config).top_k == 0
    config.inference_model.min_p = 0.1
    assert make_sampling(config).top_k == 1024
    config.inference_model.top_k = 20
    assert make_sampling(config).top_k == 20


def by_hand(model: torch.nn.Module, prompt: tuple[int, ...], sample: Sample, temperature: float) -> torch.Tensor:
    """Log-prob and entropy of each token, ``[R, 2]``, from whole rows of logits."""
    logits = model(torch.tensor([[*prompt, *sample.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1] / temperature
    outside = torch.ones_like(logits, dtype=torch.bool)
    for position, own in enumerate(sample.support.ids.split(sample.support.counts.tolist())):
        outside[position, own.long()] = False
    log_q = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    entropy = -(log_q.exp() * log_q.masked_fill(outside, 0)).sum(-1)
    return torch.stack([log_q.gather(1, sample.token_ids[:, None]).squeeze(1), entropy], 1)


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_a_policy_of_other_weights_is_renormalised_over_the_sets(shared_prompt: bool) -> None:
    """Log-probs, entropies and gradients, packed and padded, are those of masked logits."""
    samples = sampled(tiny_model(), **WAYS["all"])
    batch = pad_rows(rows_of(samples), pad_token_id=PAD)
    policy = CausalPolicy(tiny_model(seed=4), temperature=1.5, shared_prompt=shared_prompt, entropy_grad=True)
    out, mask = policy(batch), batch[keys.ASSISTANT_MASK]
    actual = torch.stack([out[keys.LOG_PROBS], out["entropy"]], -1)
    expected = torch.cat([by_hand(policy.model, prompt, sample, 1.5) for prompt, sample in samples])
    torch.testing.assert_close(actual[mask], expected, rtol=1e-4, atol=1e-5)
    assert not actual[~mask].any()
    pulls = torch.randn_like(expected)
    parameters = list(policy.parameters())
    ours, theirs = (torch.autograd.grad((values * pulls).sum(), parameters) for values in (actual[mask], expected))
    for own, other in zip(ours, theirs):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)


def test_a_token_that_its_set_does_not_have_is_refused() -> None:
    rows = rows_of(sampled(tiny_model(), top_k=3))
    first = int(rows[0][keys.SUPPORT_COUNTS].sum())
    rows[0][keys.SUPPORT_IDS].copy_(torch.full((first,), VOCAB - 1))
    rows[0][keys.FULL_TOKENS][-1] = 2
    with pytest.raises(ValueError, match="are missing or repeated in"):
        CausalPolicy(tiny_model())(pad_rows(rows, pad_token_id=PAD))


def test_torchrls_wrappers_which_know_no_sets_and_no_trees_are_refused() -> None:
    """Also where only some of the rows are such."""

    class Wrapper(torch.nn.Module):
        def get_dist(self) -> None: ...

    loss = GRPOLoss(CausalPolicy(tiny_model()))
    loss.actor_network = Wrapper()
    truncated = rows_of(sampled(tiny_model(), top_k=3))
    trees = [row.exclude(keys.SUPPORT_IDS, keys.SUPPORT_COUNTS) for row in truncated]
    trees[0].set(keys.PARENTS, torch.arange(-1, len(trees[0][keys.FULL_TOKENS]) - 1))
    for rows in (truncated, trees):
        for read in (loss, ReferenceKL(Wrapper(), pad_token_id=PAD, token_budget=64)):
            with pytest.raises(ValueError, match="but TorchRL's wrappers compute log-probs over the whole vocabulary"):
                read(lazy_stack(rows))


def same(one: TensorDict, other: TensorDict) -> bool:
    names = (keys.FULL_TOKENS, keys.SUPPORT_IDS, keys.SUPPORT_COUNTS)
    return all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in names)


def test_supports_of_vllm_that_may_have_more_tokens_than_were_requested_are_refused() -> None:
    """Of two tokens three are required each; the second has all three, which is all only where there are no more."""
    ids, nothing = [5, 5, 6, 7, 8, 8, 9, 4], -torch.inf
    actual = SimpleNamespace(token_ids=ids, logprobs=[-1.0, -1.0, -0.5, nothing, -1.1, -1.1, -1.1, -1.1])
    with pytest.raises(RuntimeError, match="reports only 3 tokens"):
        log_probs_and_support(actual, num_tokens=2, vocab=10)
    log_probs, kept = log_probs_and_support(actual, num_tokens=2, vocab=3)
    torch.testing.assert_close(log_probs, torch.tensor([-1.0, -1.1]))
    assert (kept.ids.tolist(), kept.counts.tolist()) == ([5, 6, 8, 9, 4], [2, 3])


def test_packs_pads_and_pickles_keep_the_sets() -> None:
    samples = sampled(tiny_model(), top_p=0.8)
    rows = rows_of(samples)
    table = RowTable.of(rows)
    for again in (pickle.loads(pickle.dumps(table)), RowTable.of_state(table.state_dict())):
        assert all(map(same, again, rows))
    assert all(map(same, unpad_rows(pad_rows(rows, pad_token_id=PAD)).unbind(0), rows))
    group = GroupOutput(3, tuple(sample for _, sample in samples))
    for sample, again in zip(group.samples, pickle.loads(pickle.dumps(group)).samples, strict=True):
        assert all(map(torch.equal, sample.support, again.support))
        assert [part.dtype for part in again.support] == [torch.int32, torch.int32]


def test_what_others_say_in_a_dialog_has_no_set_and_a_cut_leaves_none_behind() -> None:
    kept = SamplingSupport(torch.tensor([5, 6, 9, 7, 8], dtype=torch.int32), torch.tensor([2, 1, 2], dtype=torch.int32))
    sample = Sample(torch.tensor([5, 9, 7]), -torch.ones(3), torch.zeros(3).long(), truncated=False, support=kept)
    dialog = Dialog(None, (1, 2))
    for number in range(2):
        dialog.add_turn(sample)
        if number == 0:
            dialog.add_observation([3, 4])
    whole = dialog.sample(common=2)
    assert whole.support.counts.tolist() == [2, 1, 2, 0, 0, 2, 1, 2]
    assert whole.support.ids.tolist() == [5, 6, 9, 7, 8] * 2
    plain = Dialog(None, (1, 2))
    plain.add_turn(replace(sample, support=None))
    plain.add_observation([3])
    assert plain.sample(common=2).support is None
    tokenizer = load_tokenizer("tiny")
    ids = torch.tensor(tokenizer("it is not")["input_ids"])
    sets = SamplingSupport(ids.int(), torch.ones(len(ids), dtype=torch.int32))
    long = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids)).long(), truncated=True, support=sets)
    (cut,) = StopStrings(tokenizer, ["is"]).cut(GroupOutput(0, (long,))).samples
    assert cut.support.ids.tolist() == cut.token_ids.tolist()
    assert len(cut.support.counts) == len(cut.token_ids) < len(ids)


def test_a_reference_is_renormalised_over_the_same_sets_wherever_it_lives() -> None:
    """With the policy's weights it says what the policy says: a KL of 0."""
    samples = sampled(tiny_model(), top_p=0.8)
    rows = rows_of(samples)
    batch = pad_rows(rows, pad_token_id=PAD)
    own = CausalPolicy(tiny_model())(batch)[keys.LOG_PROBS]
    torch.testing.assert_close(FrozenReference(tiny_model())(batch), own)
    worker = ReferenceWorker(tiny_model(), temperature=1.0, token_budget=CONTEXT, pad_token_id=PAD)
    for row, values in zip(own, worker.run(RowTable.of(rows).only(_READ))):
        torch.testing.assert_close(torch.tensor(values), row[: len(values)], rtol=1e-4, atol=1e-5)

    def submit(rows: RowTable) -> Future:
        future = pending_future()
        future.set_result(worker.run(rows))
        return future

    service = ReferenceService(SimpleNamespace(submit=submit), num_workers=2)
    torch.testing.assert_close(service(batch), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapter", [None, partial(add_lora, r=4, alpha=8, dropout=0.3)], ids=["whole", "lora"])
def test_a_declared_truncation_passes_the_gate(adapter, tmp_path: Path) -> None:
    components = make_components(tmp_path, temperature=2.0, top_p=0.9, max_tokens=64, adapter=adapter)
    assert [check.name for check in run_gate(components, "warn") if not check.passed] == []
    sizes = torch.cat([row[keys.SUPPORT_COUNTS][row[keys.ASSISTANT_MASK]] for row in components.rows])
    assert int(sizes.min()) >= 1
    assert float(sizes.float().mean()) > 1.5  # and not of a policy that is sure of everything


def test_a_wider_truncation_than_the_sets_say_does_not(tmp_path: Path) -> None:
    """An engine that reports the whole vocabulary and draws with a top-p of 0.8."""
    components = make_components(tmp_path, temperature=4.0, top_p=0.8, max_tokens=96)
    rows = components.sample()
    vocabulary = components.learner.policy.model.config.vocab_size
    counts = [torch.where(row[keys.ASSISTANT_MASK], vocabulary, 0).int() for row in rows]
    every = torch.arange(vocabulary, dtype=torch.int32)
    rows.set(keys.SUPPORT_COUNTS, counts)
    rows.set(keys.SUPPORT_IDS, [every.repeat(int((own > 0).sum())) for own in counts])
    components.rows = rows
    assert not gate.first_ratio_is_one(components).passed
