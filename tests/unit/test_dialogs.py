"""Dialogs over every kind of engine: equal to a plain loop, whole, independent, and dropped when no caller waits."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from sota_grpo.engines import Engine
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.stepping import Streams, result
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import ArithmeticEnv
from sota_grpo.envs.dialogs import DialogEngine, Episode, GradedTurns, Rules
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.rl.records import Example, GroupOutput, GroupRequest, Sample, Sampling, Score, sample_seed
from sota_grpo.workers.base import pending_future, resolve
from tests.worker_rigs import hosted

SEED = random.randrange(1 << 30)
EOS, CONTEXT, MAX_STEPS = 0, 32, 4
SAMPLING = Sampling(max_tokens=9)


class Words:
    """Turns without a tokenizer: a text is its ids; a reply is an end token, unless it was said, and its own ids."""

    def text(self, token_ids: torch.Tensor) -> str:
        return " ".join(map(str, token_ids.tolist()))

    def ids(self, replies: Sequence[dict[str, str]], last_id: int) -> tuple[int, ...]:
        (reply,) = replies
        words = tuple(map(int, reply["content"].split()))
        return words if last_id == EOS else (EOS, *words)


def judge(text: str, example: Example) -> Score:
    """Three responses in four are answered, with as many ids as the response's sum says; one in sixteen fails."""
    total = sum(map(int, text.split()))
    reply = {"role": "user", "content": " ".join(str(100 + total + i) for i in range(1 + total % 3))}
    error = "ValueError: no" if total % 16 == 5 else None
    return Score({}, success=total % 4 == 0, error=error, reply=None if total % 4 == 0 else reply)


def always(text: str, example: Example) -> Score:
    return Score({}, False, reply={"role": "user", "content": "7 8"})


class Grader:
    """Grades at once, or some milliseconds later on another thread."""

    def __init__(self, score: Callable[[str, Example], Score] = judge, *, late: bool = False):
        self.score, self.late, self.asked = score, late, 0
        self._pool = ThreadPoolExecutor(3)

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        self.asked += 1
        assert all(isinstance(example, Example) for _, example in pairs)
        if self.late:
            return self._pool.submit(self._grade, pairs, random.random() / 200)
        future = pending_future()
        resolve(future, lambda: self._grade(pairs))
        return future

    def _grade(self, pairs: Sequence[tuple[str, Example]], wait_s: float = 0.0) -> list[Score]:
        time.sleep(wait_s)
        return [self.score(*pair) for pair in pairs]


def script(request: GroupRequest, index: int, version: int) -> list[int]:
    """1 to 11 tokens that depend on the request's own seed, its prompt and the sample index."""
    assert request.example is None, "an engine has no use for it"
    rng = random.Random(sample_seed(request.seed, sum(request.prompt_ids), index))
    return [rng.randint(1, 30) for _ in range(rng.randint(1, 11))]


def scripted(script: Callable[..., list[int]] = script, **options) -> ScriptedEngine:
    jitter = lambda request: random.random() / 300  # noqa: E731
    return ScriptedEngine(script, **{"eos_token_id": EOS, "max_model_len": CONTEXT, "duration_s": jitter, **options})


def five(*_: object) -> list[int]:
    """A script that always says the same."""
    return [5]


class Submitting(Streams):
    """An engine behind futures, which resolve on its own thread."""

    name, version, max_model_len, weight_dtype = "worker", 0, CONTEXT, None

    def __init__(self) -> None:
        self.worker = hosted(scripted)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        return self.worker.call("run", request, sampling)

    def update_weights(self, weights: object, version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self.worker.kill()


def ordered(may_start: Callable[[int], bool] = bool) -> ScriptedEngine:
    """One that may begin a batch whenever a turn may follow."""
    engine = scripted()
    engine.may_start = may_start
    return engine


KINDS: dict[str, Callable[[], Engine]] = {"steps": scripted, "ordered steps": ordered, "futures": Submitting}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def dialogs(engine: Engine, grader: Grader | None = None, max_steps: int = MAX_STEPS) -> DialogEngine:
    responder = GradedTurns(grader or Grader(), Words())
    return DialogEngine(engine, {None: Rules(responder, Words(), max_steps, engine.max_model_len)})


def some_requests(count: int, seed: int = SEED, *, num_samples: int = 3) -> list[GroupRequest]:
    rng = random.Random(seed)
    return [
        GroupRequest(
            group_id=10 + i,
            prompt_ids=tuple(rng.randint(1, 30) for _ in range(rng.randint(1, 12))),
            num_samples=num_samples,
            seed=rng.randrange(1 << 60),
            example=Example("?", "!"),
        )
        for i in range(count)
    ]


def plain_dialog(request: GroupRequest, index: int, log_prob: float) -> tuple[list, list, list, list, bool]:
    """One dialog in a plain loop: ids, log-probs, versions, mask, truncated."""
    ids, log_probs, versions, mask = [], [], [], []
    turn_request, number = replace(request, example=None), index
    for turn in itertools.count(1):
        room = min(SAMPLING.max_tokens, CONTEXT - len(request.prompt_ids) - len(ids))
        response = [*script(turn_request, number, 0), EOS]
        truncated, response = len(response) > room, response[:room]
        ids, mask = ids + response, mask + [True] * len(response)
        log_probs, versions = log_probs + [log_prob] * len(response), versions + [0] * len(response)
        if truncated or turn == MAX_STEPS:
            return ids, log_probs, versions, mask, truncated
        score = judge(" ".join(map(str, response)), Example("?", "!"))
        if score.reply is None or score.error is not None:
            return ids, log_probs, versions, mask, False
        reply = [int(word) for word in score.reply["content"].split()]
        if len(request.prompt_ids) + len(ids) + len(reply) >= CONTEXT:
            return ids, log_probs, versions, mask, True
        ids, mask = ids + reply, mask + [False] * len(reply)
        log_probs, versions = log_probs + [0.0] * len(reply), versions + [-1] * len(reply)
        turn_request = GroupRequest(0, (*request.prompt_ids, *ids), 1, sample_seed(request.seed, index, turn + 1))
        number = 0
    raise AssertionError


def as_lists(sample: Sample) -> tuple[list, list, list, list, bool]:
    own = sample.assistant_mask
    mask = torch.ones_like(sample.token_ids, dtype=torch.bool) if own is None else own
    columns = (sample.token_ids, sample.log_probs, sample.versions, mask)
    return (*(column.tolist() for column in columns), sample.truncated)


def require_plain(requests: Sequence[GroupRequest], outputs: Sequence[GroupOutput]) -> None:
    """Every group came out once, and every sample, counted from the request's first, is that of the plain loop."""
    by_id = {request.group_id: request for request in requests}
    assert sorted(output.group_id for output in outputs) == sorted(by_id)
    log_prob = float(torch.tensor(scripted()._log_prob))
    for output in outputs:
        request = by_id[output.group_id]
        assert len(output.samples) == request.num_samples
        for index, sample in enumerate(output.samples):
            own = replace(request, first_sample=0), request.first_sample + index
            assert as_lists(sample) == plain_dialog(*own, log_prob), f"seed {SEED}"


@pytest.mark.parametrize("late", [False, True], ids=["graded at once", "graded later"])
def test_every_sample_is_that_of_a_plain_loop(kind: str, late: bool) -> None:
    requests = [replace(request, first_sample=at % 3) for at, request in enumerate(some_requests(25))]
    engine = dialogs(KINDS[kind](), Grader(late=late))
    require_plain(requests, list(engine.generate(requests, SAMPLING)))
    engine.close()


@pytest.mark.parametrize(("context", "said"), [(7, "xx"), (8, "xx..x"), (9, "xx..xx"), (12, "xx..xx..x")])
def test_a_dialog_continues_where_the_reply_and_one_more_token_have_room(context: int, said: str) -> None:
    """A prompt of three, turns of two (with their ends), replies of two (``.``)."""
    request = replace(some_requests(1)[0], prompt_ids=(1, 2, 3))
    (output,) = dialogs(scripted(five, max_model_len=context), Grader(always)).generate([request], SAMPLING)
    for sample in output.samples:
        mask = as_lists(sample)[3]
        assert "".join("x" if own else "." for own in mask) == said
        assert sample.truncated
    (output,) = dialogs(scripted(), Grader(lambda text, example: Score({}, True))).generate([request], SAMPLING)
    assert all(sample.assistant_mask is None for sample in output.samples)  # one turn is what the engine gave


def test_streams_of_several_threads_get_their_own_groups(kind: str) -> None:
    engine = dialogs(KINDS[kind](), Grader(late=True))
    calls = [some_requests(n, seed=SEED + n) for n in (6, 7, 8)]
    with ThreadPoolExecutor(3) as pool:
        for requests, outputs in zip(calls, pool.map(lambda call: list(engine.generate(call, SAMPLING)), calls)):
            require_plain(requests, outputs)
    engine.close()


class Held:
    """A responder that begins dialogs and answers when it is let, who asked last first."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def _later(self, value: object) -> Future:
        future = pending_future()
        self.asked.append(lambda: future.set_result(value))
        return future

    async def begin(self, request: GroupRequest, index: int) -> Episode:
        await result(self._later(None))
        return await GradedTurns(self, Words()).begin(request, index)

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        total = sum(map(int, pairs[0][0].split()))
        reply = {"role": "user", "content": " ".join(str(3 + (total + i) % 90) for i in range(1 + total % 3))}
        return self._later([Score({}, success=False, reply=reply if total % 4 else None)])

    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.asked))):
            self.asked.pop()()


@pytest.mark.parametrize("max_rows", [256, 7])
def test_when_an_answer_comes_changes_no_bit_of_what_is_sampled(max_rows: int) -> None:
    """Rows of the embedded engine differ in their last bits with those beside them."""
    model, requests, seen = load_model("tiny"), some_requests(4), []
    for every, count in ((1, 100), (1, 1), (4, 2), (9, 100)):
        inner = TransformersEngine(model, eos_token_ids=[2], pad_token_id=0, max_model_len=64, max_rows=max_rows)
        responder = Held()
        engine = DialogEngine(inner, {None: Rules(responder, Words(), MAX_STEPS, inner.max_model_len)})
        futures = [engine.submit(request, Sampling(max_tokens=9)) for request in requests]
        for turn in itertools.count():
            engine.advance()
            if turn % every == 0:
                responder.answer(count)
            if all(future.done() for future in futures):
                break
        seen.append([[as_lists(sample) for sample in future.result().samples] for future in futures])
    assert all(other == seen[0] for other in seen[1:])
    assert {sum(a and not b for a, b in itertools.pairwise(s[3])) for group in seen[0] for s in group} >= {0, 1}


def refuse(engine: ScriptedEngine, error: Exception, when: Callable[[GroupRequest], bool]) -> None:
    submit = engine.submit

    def refusing(request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        if when(request):
            raise error
        return submit(request, sampling)

    engine.submit = refusing


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["cancelled", "refused"])
def test_no_dialog_waits_for_the_turn_of_a_group_that_is_gone(how: str) -> None:
    """One is cancelled before its responder has begun; or the engine refuses what it says."""
    inner, responder = ordered(), Held()
    refuse(inner, ValueError("no"), lambda request: request.group_id == 10)
    engine = DialogEngine(inner, {None: Rules(responder, Words(), MAX_STEPS, CONTEXT)})
    gone, stays = (engine.submit(request, SAMPLING) for request in some_requests(2))
    if how == "cancelled":
        del responder.asked[:3]
        assert gone.cancel()
    while not stays.done():
        engine.advance()
        responder.answer(2)
    assert len(stays.result().samples) == 3
    if how == "refused":
        with pytest.raises(ValueError, match="no"):
            gone.result(0)


@pytest.mark.timeout(120)
def test_no_sample_waits_for_a_sibling() -> None:
    """The second sample's first turn takes an hour; the others are graded after each of their turns but the last."""
    engine = scripted(five, duration_s=lambda request: 3600.0 if request.first_sample == 1 else 0.0)
    grader = Grader(always)
    dialogs(engine, grader).submit(some_requests(1)[0], SAMPLING)
    while grader.asked < 2 * (MAX_STEPS - 1) or engine.num_in_flight > 1:
        engine.advance()
    assert grader.asked == 2 * (MAX_STEPS - 1)


def test_a_refusal_cancels_the_requests_before_it() -> None:
    """As when the engine is closed while a group's samples are submitted."""
    inner, count = scripted(duration_s=3600.0), itertools.count()
    refuse(inner, RuntimeError("closed"), lambda request: next(count) == 2)
    with pytest.raises(RuntimeError, match="closed"):
        dialogs(inner).submit(some_requests(1)[0], SAMPLING)
    assert inner.num_in_flight == 0


def test_a_push_is_applied_between_the_turns_and_every_token_keeps_its_version() -> None:
    pushed, seen = [], set()

    def score(text: str, example: Example) -> Score:
        if not pushed:
            pushed.append(engine.update_weights(iter(()), 1))
        return always(text, example)

    engine = dialogs(scripted(), Grader(score))
    for output in engine.generate(some_requests(5), SAMPLING):
        for sample in output.samples:
            _, _, versions, mask, _ = as_lists(sample)
            sampled_versions = [version for version, own in zip(versions, mask) if own]
            assert sampled_versions == sorted(sampled_versions)
            assert [version == -1 for version in versions] == [not own for own in mask]
            seen |= set(sampled_versions)
    assert seen == {0, 1}


@pytest.mark.parametrize("by_future", [False, True])
@pytest.mark.parametrize("late", [None, False, True])
def test_what_the_engine_raises_in_a_later_turn_or_the_grader_is_the_callers(
    late: bool | None, by_future: bool
) -> None:
    inner = Submitting()

    def submit(request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        if late is not None or max(request.prompt_ids) < 100:
            return inner.worker.call("run", request, sampling)
        future = pending_future()
        future.set_exception(OSError("it is gone"))
        return future

    inner.submit = submit
    grader = Grader() if late is None else Grader(Mock(side_effect=OSError("it is gone")), late=late)
    engine, requests = dialogs(inner, grader), some_requests(15)
    outputs = (engine.submit(request, SAMPLING).result(60) for request in requests)
    with pytest.raises(OSError, match="it is gone"):
        list(outputs if by_future else engine.generate(requests, SAMPLING))
    engine.close()


def test_an_engine_with_nothing_to_sample_is_left_alone_while_the_grader_works() -> None:
    def slow(text: str, example: Example) -> Score:
        time.sleep(0.1)
        return always(text, example)

    engine = scripted(five, duration_s=0.0)
    engine._step = Mock(wraps=engine._step)
    list(dialogs(engine, Grader(slow, late=True)).generate(some_requests(1, num_samples=1), SAMPLING))
    assert engine._step.call_count < 3 * MAX_STEPS


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_an_abandoned_group_requests_no_further_turn(how: str) -> None:
    """Workers' futures cannot be cancelled: the turns in flight are sampled to their end, and that is all."""
    futures: list[Future] = []

    def score(text: str, example: Example) -> Score:
        if how == "failed" and len(futures) > 4 and text == "5":
            raise KeyError("the grader is gone")
        return always(text, example)

    sample = Sample(torch.tensor([5]), torch.zeros(1), torch.zeros(1, dtype=torch.int64), truncated=False)
    inner = scripted()
    inner.submit = lambda request, sampling: futures.append(pending_future()) or futures[-1]
    done = dialogs(inner, Grader(score)).submit(some_requests(1)[0], SAMPLING)
    assert len(futures) == 3
    for future in futures[:2]:
        future.set_result(GroupOutput(10, (sample,)))
    assert len(futures) == 5  # each sample continues by itself, before its sibling has begun
    if how == "cancelled":
        assert done.cancel()
    for future in futures[2:]:
        future.set_result(GroupOutput(10, (sample,)))
    assert len(futures) == 5
    if how == "failed":
        with pytest.raises(KeyError, match="the grader is gone"):
            done.result(0)


def test_a_request_that_cannot_be_a_dialog_is_refused_at_the_call() -> None:
    engine, request = dialogs(scripted()), some_requests(1)[0]
    with pytest.raises(ValueError, match=r"group 10 has 32 tokens, .* max_model_len=32"):
        engine.generate([replace(request, prompt_ids=(3,) * CONTEXT)], SAMPLING)
    with pytest.raises(ValueError, match="Group 10 has no example"):
        engine.generate([replace(request, example=None)], SAMPLING)
    with pytest.raises(ValueError, match="Group 10 has no example"):
        engine.submit(replace(request, example=None), SAMPLING)


def test_an_environment_of_several_turns_travels() -> None:
    """To the processes of TorchRL's collectors: what it draws there is what it draws here."""
    env = ArithmeticEnv(tokenizer=load_tokenizer("tiny"), num_envs=2, repeats=2, max_steps=2, num_train=10, seed=3)
    env.reset()
    there = pickle.loads(pickle.dumps(env))
    first, second = env.reset(), there.reset()
    assert [row["query"] for row in first.unbind(0)] == [row["query"] for row in second.unbind(0)]
    assert first["group_id"].tolist() == second["group_id"].tolist()
