"""One contract, every engine: what a collector may rely on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sota_grpo.engines import Engine, EngineOptions, make_engine
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from tests.engine_rigs import (
    CONTEXT,
    EOS,
    PAD,
    VOCAB,
    add,
    changed_weights,
    generate,
    ragged_requests,
    step,
    tiny_model,
    token_lists,
)

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
MODEL = tiny_model()
SAMPLING = Sampling(max_tokens=40)


@pytest.fixture(
    scope="module", params=["scripted", "transformers", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(folder)
    options = EngineOptions(str(folder), engine=request.param, eos_token_ids=[EOS], pad_token_id=PAD, device="cpu")
    engine = make_engine(replace(options, model=MODEL))
    yield engine
    engine.close()
    engine.close()


def test_every_group_comes_out_once_with_samples_of_ids_log_probs_and_versions_of_one_length(engine: Engine):
    assert isinstance(engine, Engine)
    assert engine.max_model_len == CONTEXT
    requests = [*ragged_requests(4, 3), GroupRequest(group_id=7, prompt_ids=(5,), num_samples=1, seed=3)]
    outputs = generate(engine, requests, SAMPLING)
    assert {group: len(output.samples) for group, output in outputs.items()} == {100: 3, 101: 3, 102: 3, 103: 3, 7: 1}
    for output in outputs.values():
        for sample in output.samples:
            length = len(sample.token_ids)
            assert 1 <= length <= SAMPLING.max_tokens
            assert sample.token_ids.dtype == torch.int64
            assert int(sample.token_ids.min()) >= 0
            assert int(sample.token_ids.max()) < VOCAB
            assert sample.log_probs.shape == sample.versions.shape == (length,)
            assert sample.log_probs.dtype == torch.float32
            assert sample.log_probs.isfinite().all()
            assert (sample.log_probs <= 0).all()
            assert (sample.versions == engine.version).all()
    behaviour = outputs[7].samples[0].log_probs
    current = behaviour.clone().requires_grad_()
    ((current - behaviour).exp() * behaviour).sum().backward()  # samples can enter autograd
    assert torch.equal(current.grad, behaviour)


def test_truncated_says_whether_the_engine_stopped_for_length(engine: Engine):
    requests = ragged_requests(8, 4, seed=0)
    outputs = generate(engine, requests, SAMPLING)
    samples = [sample for output in outputs.values() for sample in output.samples]
    for sample in samples:
        assert EOS not in sample.token_ids[:-1]
        assert sample.truncated == (int(sample.token_ids[-1]) != EOS)
        assert not sample.truncated or len(sample.token_ids) == SAMPLING.max_tokens
    assert {sample.truncated for sample in samples} == {True, False}
    length = min(len(sample.token_ids) for sample in samples)  # the end token may be the last that is allowed
    again = generate(engine, requests, replace(SAMPLING, max_tokens=length))
    assert not all(sample.truncated for output in again.values() for sample in output.samples)


def test_without_an_end_token_samples_go_to_the_limit_or_the_end_of_the_context(engine: Engine):
    short = GroupRequest(group_id=0, prompt_ids=(5,) * (CONTEXT - 3), num_samples=2, seed=0)
    outputs = generate(engine, [short, *ragged_requests(2)], Sampling(max_tokens=60, ignore_eos=True))
    lengths = {group: [len(sample.token_ids) for sample in output.samples] for group, output in outputs.items()}
    assert lengths == {0: [3, 3], 100: [60] * 4, 101: [60] * 4}
    assert all(sample.truncated for output in outputs.values() for sample in output.samples)
    long = GroupRequest(group_id=9, prompt_ids=(5,) * CONTEXT, num_samples=1, seed=0)  # refused before any is sampled
    with pytest.raises(ValueError, match=rf"group 9 has {CONTEXT} tokens, .* max_model_len={CONTEXT}"):
        engine.generate([*ragged_requests(), long], SAMPLING)


def test_equal_calls_give_equal_samples_and_siblings_differ_unless_they_are_greedy(engine: Engine):
    requests = ragged_requests(seed=5)  # fixed: two siblings that both begin with EOS would be equal
    first, second = (generate(engine, requests, SAMPLING) for _ in range(2))
    assert token_lists(first) == token_lists(second)
    for group, output in first.items():
        for a, b in zip(output.samples, second[group].samples):
            # vLLM may read from its prompt cache what it computed the first time: equal up to rounding
            tolerance = 1e-5 if engine.name == "vllm" else 0.0
            torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0.0, atol=tolerance)
        assert len({tuple(sample.token_ids.tolist()) for sample in output.samples}) == len(output.samples)
    greedy = Sampling(max_tokens=20, temperature=0.0)
    (samples,) = token_lists(generate(engine, [GroupRequest(0, (5, 6, 7), 3, seed=11)], greedy)).values()
    assert samples[0] == samples[1] == samples[2]


def test_a_push_changes_the_samples_and_their_version_and_is_a_copy_that_survives_sleep(engine: Engine):
    requests, weights = ragged_requests(), changed_weights(MODEL)
    before = token_lists(generate(engine, requests, SAMPLING))
    version = engine.version + 1
    engine.update_weights(iter(weights.items()), version)
    assert engine.version == version
    after = generate(engine, requests, SAMPLING)
    assert token_lists(after) != before
    assert {int(v) for output in after.values() for s in output.samples for v in s.versions} == {version}
    for tensor in weights.values():
        tensor.zero_()
    engine.sleep()
    engine.wake()
    assert token_lists(generate(engine, requests, SAMPLING)) == token_lists(after)
    engine.update_weights(MODEL.state_dict().items(), version + 1)


def drained(engine: Engine, tickets: list[int]) -> dict[int, GroupOutput]:
    """Steps until every ticket has come out, once."""
    actual: dict[int, GroupOutput] = {}
    while len(actual) < len(tickets):
        for ticket, output in step(engine):
            assert ticket not in actual
            actual[ticket] = output
    assert actual.keys() == set(tickets)
    return actual


def test_samples_that_are_requested_one_by_one_are_those_of_the_group(engine: Engine):
    requests = ragged_requests(seed=4)  # fixed, as below
    expected = token_lists(generate(engine, requests, SAMPLING))
    parts = [replace(one, num_samples=1, first_sample=index) for one in requests for index in range(one.num_samples)]
    tickets = add(engine, parts, SAMPLING)
    samples = drained(engine, tickets)
    each = [samples[ticket].samples[0].token_ids.tolist() for ticket in tickets]
    assert each == [tokens for request in requests for tokens in expected[request.group_id]]


def test_two_streams_at_once_a_stepper_and_two_threads_get_their_own_groups(engine: Engine):
    calls = [(ragged_requests(n, 2, seed=n), Sampling(max_tokens=10 * n)) for n in (2, 3, 4)]
    expected = [token_lists(generate(engine, *call)) for call in calls]
    tickets = add(engine, *calls[0])
    streams = [engine.generate(*call) for call in calls[1:]]
    outputs: list[list[GroupOutput]] = [[], []]
    for turn in itertools.cycle((0, 1)):
        outputs[turn] += itertools.islice(streams[turn], 1)
        if [len(actual) for actual in outputs] == [3, 4]:
            break
    added = drained(engine, tickets).values()
    actual = [token_lists({output.group_id: output for output in part}) for part in (added, *outputs)]
    assert actual == expected
    with ThreadPoolExecutor(2) as pool:
        threads = list(pool.map(lambda call: token_lists(generate(engine, *call)), calls[1:]))
    assert threads == expected[1:]


SHORT = GroupRequest(group_id=0, prompt_ids=(5,) * (CONTEXT - 3), num_samples=1, seed=0)  # room for 3 tokens
LONG = Sampling(max_tokens=40, ignore_eos=True)


def test_a_stream_that_is_left_takes_its_groups_along(engine: Engine):
    tickets = add(engine, ragged_requests(1, 2), LONG)
    stream = engine.generate([SHORT, *ragged_requests(2)], LONG)
    next(stream)
    del stream
    assert engine.num_in_flight <= len(tickets)  # the scripted engine's groups take no time: it had ended
    drained(engine, tickets)
    assert not engine.advance()
