"""Tiny random models, requests, and the plain references that the engines are compared with."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import SteppingEngine
from sota_grpo.engines.transformers_engine import TransformersEngine, sampled_probs
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling

VOCAB, EOS, PAD = 48, 1, 0
CONTEXT = 160


def tiny_model(*, tied: bool = True, seed: int = 0, **config: object) -> Qwen2ForCausalLM:
    """A random two-layer Qwen2 whose distributions are neither flat nor peaked."""
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**(options | config)))
    return model.eval()


def hf_engine(model: torch.nn.Module, **options: object) -> TransformersEngine:
    return TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, **options)


def changed_weights(model: torch.nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    """The model's ``state_dict()`` plus noise of standard deviation 0.03; tied weights stay tied."""
    stream = torch.Generator().manual_seed(seed)
    noise: dict[int, torch.Tensor] = {}
    changed = {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr()
        if key not in noise:
            noise[key] = tensor + 0.03 * torch.randn(tensor.shape, generator=stream)
        changed[name] = noise[key]
    return changed


def ragged_requests(num_groups: int = 5, num_samples: int = 4, *, seed: int | None = None) -> list[GroupRequest]:
    """Prompts of 2, 9, 16, ... fresh random tokens; their seeds are fresh too unless one is given."""
    base = random.getrandbits(62) if seed is None else seed
    stream = torch.Generator().manual_seed(base)
    return [
        GroupRequest(
            group_id=100 + i,
            prompt_ids=tuple(torch.randint(2, VOCAB, (2 + 7 * i,), generator=stream).tolist()),
            num_samples=num_samples,
            seed=(base + i) % (1 << 62),
        )
        for i in range(num_groups)
    ]


def generate(engine: Engine, requests: list[GroupRequest], sampling: Sampling) -> dict[int, GroupOutput]:
    outputs = list(engine.generate(requests, sampling))
    assert sorted(output.group_id for output in outputs) == sorted(request.group_id for request in requests)
    return {output.group_id: output for output in outputs}


def token_lists(outputs: dict[int, GroupOutput]) -> dict[int, list[list[int]]]:
    return {group: [sample.token_ids.tolist() for sample in output.samples] for group, output in outputs.items()}


@torch.no_grad()
def reference_log_probs(
    model: torch.nn.Module, prompt: tuple[int, ...], response: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-softmax of one unpadded forward without a cache, at the response's tokens."""
    ids = torch.cat([torch.tensor(prompt), response])
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def largest_gap(
    model: torch.nn.Module, requests: list[GroupRequest], outputs: dict[int, GroupOutput], temperature: float
) -> float:
    """Largest |engine - reference| log-prob over all sampled tokens."""
    gaps = [
        (reference_log_probs(model, request.prompt_ids, sample.token_ids, temperature) - sample.log_probs).abs().max()
        for request in requests
        for sample in outputs[request.group_id].samples
    ]
    return float(torch.stack(gaps).max())


@torch.no_grad()
def require_supports(
    model: torch.nn.Module, sampled: Sequence[tuple[tuple[int, ...], Sample]], sampling: Sampling
) -> None:
    """Supports are what :func:`sampled_probs` keeps, but for a token at the edge of one in a hundred.

    Log-probs are those over the reported support.
    """
    others = num_sets = 0
    for prompt, sample in sampled:
        logits = model(torch.tensor([[*prompt, *sample.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        sets = sample.support.ids.split(sample.support.counts.tolist())
        assert len(sets) == len(sample.token_ids)
        kept = sampled_probs(logits, sampling) > 0
        for own, z, mask, token, log_prob in zip(sets, logits, kept, sample.token_ids, sample.log_probs):
            z = z / sampling.temperature
            assert int(token) in own.tolist()
            assert log_prob.item() == pytest.approx(float(z[token] - z[own.long()].logsumexp(0)), abs=1e-5)
            others += sorted(own.tolist()) != mask.nonzero().squeeze(1).tolist()
            num_sets += 1
    assert others <= num_sets // 100


_ENDED: WeakKeyDictionary[Engine, deque[tuple[int, Future[GroupOutput]]]] = WeakKeyDictionary()
_TICKETS = itertools.count()


def add(engine: SteppingEngine, requests: Sequence[GroupRequest], sampling: Sampling) -> list[int]:
    """Submit groups and have them begin at once; their numbers, by which :func:`step` gives them."""
    ended = _ENDED.setdefault(engine, deque())
    tickets = list(itertools.islice(_TICKETS, len(requests)))
    for ticket, request in zip(tickets, requests):
        future = engine.submit(request, sampling)
        future.add_done_callback(lambda done, ticket=ticket: ended.append((ticket, done)))
    with engine._between_steps():
        engine._start_together([engine._submitted.popleft() for _ in requests])
    return tickets


def step(engine: SteppingEngine) -> list[tuple[int, GroupOutput]]:
    """One step; the groups of :func:`add` that have ended since the last one, but for those that were dropped."""
    engine.advance()
    ended = _ENDED.setdefault(engine, deque())
    taken = [ended.popleft() for _ in range(len(ended))]
    return [(ticket, done.result()) for ticket, done in taken if done.exception() is None]
