"""The collector: batches of age 0 in turns, the age bound beside the learner, every prompt exactly once."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.stepping import Streams
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.errors import UserError
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.metrics import declared
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling, Score, sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import GroupAdvantage, OverlongPenalty, zero_advantage_rows
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import Group, Refill
from sota_grpo.stopping import Interrupted
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.training.checkpoint import CheckpointStore
from tests.training_rigs import collector_of, make_env, make_saying
from tests.unit.test_row_table import same

SAMPLING = Sampling(max_tokens=24)
REPEATS = 3
tokenizer = functools.cache(lambda: load_tokenizer("tiny"))


def small_env() -> TaskEnv:
    return TaskEnv(ArithmeticTask(1, num_train=23, num_heldout=1), tokenizer(), num_envs=REPEATS, repeats=REPEATS)


@functools.cache
def right_responses() -> dict[tuple[int, ...], list[int]]:
    """The end of the right response, which has the answer, to each prompt."""
    env = small_env()
    gold = ((env.prompt_ids(one), env.task.gold_response(one)) for one in env.task.train)
    return {prompt: env.tokenizer(text)["input_ids"][-20:] for prompt, text in gold}


def random_engine(env: TaskEnv, *, right: float, seed: int) -> ScriptedEngine:
    """Answers rightly with chance ``right``, by the request's own seed and the version; wrong ones differ in length."""

    def script(request: GroupRequest, index: int, version: int) -> list[int]:
        draw = random.Random(sample_seed(seed, request.seed, index, version))
        return right_responses()[request.prompt_ids] if draw.random() < right else [5] * draw.randint(1, 9)

    return ScriptedEngine(script, eos_token_id=env.tokenizer.eos_token_id, max_model_len=2048)


class Desk(Streams):
    """Takes requests and finishes them on command, in any order."""

    name, max_model_len = "desk", 2048

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine
        self.asked: list[int] = []
        self.admitted: dict[int, int] = {}  # the version at which each group was requested
        self.open: dict[int, tuple[GroupRequest, Future[GroupOutput]]] = {}

    @property
    def version(self) -> int:
        return self.engine.version

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        future: Future[GroupOutput] = Future()
        self.asked.append(request.group_id)
        self.admitted[request.group_id] = self.version
        self.open[request.group_id] = (request, future)
        return future

    def finish(self, *group_ids: int) -> None:
        for request, future in map(self.open.pop, group_ids):
            future.set_result(next(iter(self.engine.generate([request], SAMPLING))))

    def finish_any(self) -> None:
        self.finish(random.choice(list(self.open)))


class Rig:
    """A source that is stepped by hand over a desk."""

    def __init__(self, *, right: float = 0.5, seed: int = 0, **options):
        self.env = small_env()
        self.engine = random_engine(self.env, right=right, seed=seed)
        self.desk = Desk(self.engine)
        if "grade" in options:
            self.env.grader = SimpleNamespace(scores=options.pop("grade"))
        self.desk.submit = options.pop("submit", self.desk.submit)
        given = {"num_groups": 4, "max_policy_age": 0, "transforms": [GroupAdvantage()], "dispatch": False} | options
        self.source = collector_of(self.env, self.desk, SAMPLING, beside=True, seed=seed, **given)

    def fill(self, choose: Callable[[], None] | None = None) -> None:
        while not self.source.is_ready():
            if not self.source.handle_events():  # groups that stay are handled without anything finishing
                (choose or self.desk.finish_any)()

    def step(self, version: int, *, choose: Callable[[], None] | None = None, ahead: int = 0):
        """One step of the loop; ``ahead`` more groups finish while the learner learns."""
        self.fill(choose)
        batch = self.source.next_batch()
        for _ in range(min(ahead, len(self.desk.open))):
            self.desk.finish_any()
            self.source.handle_events()
        self.engine.version = version + 1
        self.source.release()
        return batch


def ids(batch) -> list[int]:
    """The groups of a batch in its order; each must be whole."""
    actual = batch.get(keys.GROUP_ID).tolist()
    assert batch.get(keys.SAMPLE_ID).tolist() == list(range(REPEATS)) * (len(actual) // REPEATS)
    assert actual == [group for group in actual[::REPEATS] for _ in range(REPEATS)]
    return actual[::REPEATS]


def synchronous_source(*, right: float, seed: int, **options) -> PromptGroupCollector:
    """Over a real engine, which the collector drives."""
    env = small_env()
    engine = random_engine(env, right=right, seed=seed)
    return collector_of(env, engine, SAMPLING, transforms=[GroupAdvantage()], seed=seed, **options)


def synchronous_batches(*, right: float, seed: int, steps: int, num_groups: int, refill: bool, max_draws: int) -> list:
    """(batch, metrics) of each step, by hand: rounds of collections, until no group is a zero-advantage one."""
    env = small_env()
    engine = random_engine(env, right=right, seed=seed)
    rollouts = Rollouts(env, engine)
    actual = []
    for version in range(steps):
        engine.version = version
        kept, zero = [], []
        for _ in range(max_draws if refill else 1):
            if len(kept) == num_groups * REPEATS:
                break
            drawn = env.stream.draw(num_groups - len(kept) // REPEATS)
            prompts = [Prompt(group, example, REPEATS, sample_seed(seed, group)) for group, example in drawn]
            groups = {group.prompt.group_id: group.rows for group in rollouts.stream(prompts, SAMPLING)}
            rows = list(RowTable.cat([groups[prompt.group_id] for prompt in prompts]))
            alike = [refill and each for each in zero_advantage_rows(RowTable.of(rows)).tolist()]
            kept += itertools.compress(rows, [not each for each in alike])
            zero += itertools.compress(rows, alike)
        missing = num_groups * REPEATS - len(kept)
        kept = sorted(kept + zero[len(zero) - missing :], key=lambda row: int(row.get(keys.GROUP_ID)))
        batch = GroupAdvantage()(RowTable.of(kept))
        counts = {
            "groups/refilled": len(zero) - missing,
            "groups/zero_advantage": int(zero_advantage_rows(batch).sum()),
        }
        actual.append((batch, {name: count // REPEATS for name, count in counts.items()}))
    return actual


def require_equal(batches: list, expected: list) -> None:
    for batch, other in zip(batches, expected, strict=True):
        assert ids(batch) == ids(other)
        same(batch, other)


@pytest.mark.parametrize("refill", [False, True])
def test_at_age_0_the_batches_are_those_of_sync_bit_for_bit(refill: bool) -> None:
    for _ in range(3 if refill else 1):
        chosen = {"right": random.choice([0.0, 0.05, 0.2, 0.5, 0.9, 1.0]), "seed": random.getrandbits(30)}
        chosen |= {"num_groups": random.randint(1, 6), "max_draws": random.randint(1, 4), "refill": refill}
        expected = synchronous_batches(steps=4, **chosen)
        rig, driven = Rig(**chosen), synchronous_source(**chosen)
        actual: list[list] = [[], []]
        for step, (_, metrics) in enumerate(expected):
            actual[0].append(rig.step(step))
            driven.policy.version = step
            actual[1].append(driven.next_batch())
            for source in (rig.source, driven):
                assert {name: source.metrics()[name] for name in metrics} == metrics, f"{chosen}, step {step}"
            driven.release()
        for batches in actual:
            require_equal(batches, [batch for batch, _ in expected])
        assert sorted(rig.desk.asked) == list(range(len(rig.desk.asked)))


def test_sync_and_workers_continue_each_other() -> None:
    """A synchronous run may continue with workers, and back, prompts and seeds the same."""
    chosen = {"right": 0.5, "seed": random.randrange(10**6), "num_groups": 4}
    whole = synchronous_batches(**chosen, steps=5, refill=False, max_draws=1)
    actual = []

    def go_on(source: PromptGroupCollector, version: int) -> dict:
        source.policy.version = version
        actual.append(source.next_batch())
        source.release()
        return source.state_dict()

    state = go_on(synchronous_source(**chosen), 0)
    for version in (1, 3):
        rig = Rig(**chosen)
        rig.source.load_state_dict(state)
        rig.engine.version = version
        actual.append(rig.step(version))
        source = synchronous_source(**chosen)
        source.load_state_dict(rig.source.state_dict())
        state = go_on(source, version + 1)
    assert [ids(batch) for batch in actual] == [ids(batch) for batch, _ in whole]


@pytest.mark.parametrize("stage", ["sample", "grade"])
def test_in_sync_replacements_are_requested_together_once_the_last_group_is_graded(stage: str) -> None:
    """All four groups are zero-advantage ones; one is late, and what replaces the others waits for it."""
    calls: list[int] = []
    late: list[tuple[Future, Future]] = []
    looks = itertools.count()
    source = synchronous_source(right=0.0, seed=random.getrandbits(30), num_groups=4, refill=True, max_draws=2)
    start, local = source.policy._start, source.env.grader
    source.policy._start = lambda tickets, *rest: calls.append(len(tickets)) or start(tickets, *rest)

    def grade(pairs) -> Future:
        scores = local.scores(pairs)
        if stage == "sample" or pairs[0][1] != source.env.stream.example_of(0):
            return scores
        late.append((Future(), scores))
        return late[0][0]

    def tell_after_ten_looks() -> bool:
        if late and next(looks) == 10:
            late[0][0].set_result(late[0][1].result())
        return False

    if stage == "sample":
        source.policy._duration_s = lambda request: 0.1 * (request.group_id == 0)
    source.env.grader, source.should_stop = SimpleNamespace(scores=grade), tell_after_ten_looks
    assert ids(source.next_batch()) == [4, 5, 6, 7]
    assert not source.policy.num_in_flight  # so that it can sleep
    source.release()
    assert (calls, source.policy.num_in_flight) == ([4, 4], 0)  # nothing is requested during learning
    assert len(late) == (stage == "grade")


def mixed(rig: Rig) -> Callable[[], None]:
    """Finish a random group whose tokens come from the version of its admission and later ones, up to now."""

    def finish() -> None:
        group_id = random.choice(list(rig.desk.open))
        request, future = rig.desk.open.pop(group_id)
        output = next(iter(rig.engine.generate([request], SAMPLING)))
        bounds = rig.desk.admitted[group_id], rig.engine.version + 1
        versions = [torch.randint(*bounds, sample.versions.shape).sort().values for sample in output.samples]
        samples = [replace(sample, versions=own) for sample, own in zip(output.samples, versions)]
        future.set_result(GroupOutput(group_id, tuple(samples)))

    return finish


@pytest.mark.parametrize("max_policy_age", [1, 3])
def test_no_order_of_finishing_exceeds_the_age(max_policy_age: int) -> None:
    """next_batch itself raises above the bound; the worst case reaches it, and every token keeps its version."""
    worst = 0
    for _ in range(4):
        options = {"num_groups": random.randint(1, 3), "refill": random.random() < 0.5, "seed": random.getrandbits(30)}
        options |= {"right": random.choice([0.1, 0.5]), "max_draws": random.randint(1, 3)}
        rig = Rig(max_policy_age=max_policy_age, **options)
        for step in range(12):
            batch = rig.step(step, choose=mixed(rig), ahead=random.randint(0, 6))
            for row in batch:
                versions = row.get(keys.TOKEN_VERSION)[row.get(keys.ASSISTANT_MASK)]
                assert int(row.get(keys.POLICY_VERSION)) == versions.min()
                assert rig.desk.admitted[int(row.get(keys.GROUP_ID))] <= versions.min()
                assert versions.max() <= step
                worst = max(worst, step - int(versions.min()))
    assert worst == max_policy_age


def test_a_token_above_the_age_or_without_a_log_prob_is_refused() -> None:
    rig = Rig()
    rig.engine.version = -2  # an engine that serves older weights than it says
    rig.fill()
    rig.engine.version = 0
    with pytest.raises(RuntimeError, match="policy version -2 in training at version 0"):
        rig.source.next_batch()
    engine = ScriptedEngine(eos_token_id=tokenizer().eos_token_id, log_prob=float("nan"), max_model_len=2048)
    source = collector_of(small_env(), engine, SAMPLING, num_groups=2)
    with pytest.raises(ValueError, match="log-prob that is not finite for a token of group 0"):
        source.next_batch()
    source.close()


def reload(rig: Rig, tmp_path, **options) -> Rig:
    """A new source over what the old one saved, with futures of its own."""
    CheckpointStore(tmp_path).save(0, {"source": rig.source.state_dict()})
    _, state = CheckpointStore(tmp_path).latest()
    fresh = Rig(**options)
    fresh.engine.version = rig.engine.version
    fresh.source.load_state_dict(state["source"])
    return fresh


@pytest.mark.parametrize("max_policy_age", [0, 2])
@pytest.mark.parametrize("refill", [False, True])
def test_every_prompt_once_over_saves_at_random_moments(tmp_path, max_policy_age: int, refill: bool) -> None:
    chosen = {"num_groups": 3, "refill": refill, "max_draws": 3, "right": 0.15, "seed": random.getrandbits(30)}
    options = chosen | {"max_policy_age": max_policy_age}
    rig, trained, replaced, kept = Rig(**options), [], 0, 0
    for step in range(5):
        while not rig.source.is_ready():
            if random.random() < 0.2:
                finished = len(rig.source._slots.buffer.sampler)
                rig = reload(rig, tmp_path, **options)
                assert len(rig.source._slots.buffer.sampler) == finished  # with their rows: they are not sampled again
                kept += finished
                continue
            if not rig.source.handle_events():
                rig.desk.finish_any()
        trained.append(rig.source.next_batch())
        replaced += rig.source.metrics()["groups/refilled"]
        rig.engine.version = step + 1
        if random.random() < 0.3:
            rig = reload(rig, tmp_path, **options)  # a batch that was taken counts as trained
        else:
            rig.source.release()
    rig.source.is_ready()
    taken = [group for batch in trained for group in ids(batch)]
    slots = rig.source._slots
    left = [*slots.in_flight, *(group for _, _, group in sorted(slots.buffer.sampler._finished.values()))]
    assert len(set(taken + left)) == len(taken + left)
    assert kept > 0
    drawn = rig.env.stream.next_group_id
    assert set(taken + left) <= set(range(drawn))
    assert drawn == len(taken) + len(left) + slots.refill.num_held + replaced + slots.refill.num_replaced
    if not refill:
        assert sorted(taken + left) == list(range(drawn))
    for batch in trained:
        for row in batch:
            assert row[keys.QUERY] == rig.env.stream.example_of(int(row.get(keys.GROUP_ID))).query
    if max_policy_age == 0:
        require_equal(trained, [batch for batch, _ in synchronous_batches(steps=5, **chosen)])


@pytest.mark.parametrize("refill", [False, True])
def test_a_batch_that_cannot_be_trained_on_is_requested_again_after_a_resume(tmp_path, refill: bool) -> None:
    """Where the reward that it fell over is mended meanwhile, the run is the one that had no such reward."""
    options = {"num_groups": 3, "refill": refill, "right": 0.3}
    whole, rig = Rig(**options), Rig(**options)
    expected = [whole.step(step) for step in range(3)]
    rig.step(0)
    rig.source.replay_buffer.append_transform(Mock(spec=Transform, side_effect=UnusableValues("-1")))
    with pytest.raises(UnusableValues):
        rig.step(1)
    rig.source.replay_buffer._transform.pop()
    resumed = reload(rig, tmp_path, **options)
    for source in (rig, resumed):  # a source that continues does the same
        require_equal([source.step(1), source.step(2)], expected[1:])


def test_pending_groups_are_requested_first_and_in_order(tmp_path) -> None:
    rig = Rig(num_groups=2, max_policy_age=2)
    rig.step(0, ahead=2)
    pending = sorted(rig.desk.open)
    fresh = reload(rig, tmp_path, num_groups=2, max_policy_age=3)  # a larger age has room for two more
    fresh.source.is_ready()
    assert fresh.desk.asked == [*pending, 8, 9]


def test_a_state_of_another_shape_or_too_late_is_refused() -> None:
    state = Rig(max_policy_age=1).source.state_dict()
    for options in ({"num_groups": 5, "max_policy_age": 1}, {"max_policy_age": 0}):
        with pytest.raises(UserError, match="resume with the same"):
            Rig(**options).source.load_state_dict(state)
    with pytest.raises(UserError, match="as many devices as it had"):
        synchronous_source(right=0.5, seed=0, num_groups=4).load_state_dict(state)
    rig = Rig(max_policy_age=1)
    rig.source.is_ready()
    with pytest.raises(RuntimeError, match="after collection had begun"):
        rig.source.load_state_dict(state)


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_stop_interrupts_the_wait_and_changes_nothing(dispatch: bool) -> None:
    stop = threading.Event()
    rig = Rig(dispatch=dispatch, should_stop=stop.is_set)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Interrupted):
        rig.source.next_batch()
    state = rig.source.state_dict()
    assert [numbers[0] for numbers in state["in_flight"]] == [0, 1, 2, 3]
    assert state["released"]
    stop.clear()
    rig.desk.finish(0, 1, 2, 3)
    assert ids(rig.source.next_batch()) == [0, 1, 2, 3]
    rig.source.close()


def test_a_wait_in_which_nothing_moves_ends_with_a_count_by_stage() -> None:
    rig = Rig(wait_deadline_s=0.1, grade=lambda pairs: Future())
    rig.source.is_ready()
    rig.desk.finish(0)
    rig.source.handle_events()
    with pytest.raises(TimeoutError, match="3 groups are being sampled, 1 being graded, 0 are at the reference, 0 are"):
        rig.source.next_batch()


@pytest.mark.parametrize(
    ("stage", "dispatch"), [("sample", True), ("asking", True), ("grade", False), ("reference", False)]
)
def test_a_failure_in_any_stage_ends_the_wait_with_its_exception(stage: str, dispatch: bool) -> None:
    error = RuntimeError(f"{stage} failed")
    error.__cause__ = cause = KeyError("the cause")

    failed: Future = Future()
    failed.set_exception(error)
    submits = {"sample": {"submit": lambda *_: failed}, "asking": {"submit": Mock(side_effect=error)}}
    options = submits.get(stage, {stage: lambda *_: failed})
    rig = Rig(dispatch=dispatch, **options)
    if stage not in ("sample", "asking"):
        rig.source.is_ready()
        rig.desk.finish(0, 1, 2, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed") as actual:
            rig.source.next_batch()
        assert actual.value is error
        assert actual.value.__cause__ is cause
    assert len(rig.source.state_dict()["in_flight"]) == 4  # nothing is lost
    rig.source.close()


def test_graders_and_reference_work_group_by_group_and_never_on_replaced_groups() -> None:
    """Groups 0, 1, ... are sent to the reference as they are graded, replaced ones not; rows may be other objects."""
    graded: list[str] = []
    referred: list[int] = []

    def grade(pairs) -> Future:
        graded.append(pairs[0][1].query)
        return local.scores(pairs)

    def refer(rows) -> Future:
        referred.append(int(rows[0][keys.GROUP_ID]))
        future: Future = Future()
        copy = RowTable.cat([rows])
        copy.set(keys.REF_LOG_PROBS, [row[keys.LOG_PROBS] - 1 for row in rows])
        future.set_result(copy)
        return future

    local = small_env().grader
    chosen = {"num_groups": 3, "refill": True, "right": 0.3, "seed": random.getrandbits(30), "max_draws": 50}
    rig = Rig(**chosen, grade=grade, reference=refer)
    batch = rig.step(0)
    drawn = range(3 + int(rig.source.metrics()["groups/refilled"]))
    assert sorted(graded) == sorted(rig.env.stream.example_of(number).query for number in drawn)
    assert sorted(referred) == ids(batch)
    for row in batch:
        torch.testing.assert_close(row.get(keys.REF_LOG_PROBS), row.get(keys.LOG_PROBS) - 1)
        assert keys.ADVANTAGE in row


def test_a_group_in_which_a_decoupled_term_varies_is_kept() -> None:
    """Its rewards are equal (GDPO is for these), its advantages are not; a term that weighs 0 decides nothing."""

    def grade(pairs) -> Future:
        future: Future = Future()
        signs = [sum(map(ord, text)) % 2 for text, _ in pairs]
        future.set_result([Score({"a": float(sign), "b": 2.0 - 2 * sign, "c": 1.0}, False) for sign in signs])
        return future

    for decouple_terms, weights in itertools.product((True, False), ({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.0})):
        env = small_env()
        env.task.term_weights = {**weights, "c": 1.0}
        env.grader = SimpleNamespace(scores=grade)
        said = make_saying(env, lambda request, index: "ab"[index % 2])
        options = {"num_groups": 2, "refill": True, "max_draws": 2, "decouple_terms": decouple_terms}
        source = collector_of(env, said, SAMPLING, seed=0, **options)
        batch = next(iter(source))
        advantages = GroupAdvantage("none", "batch_std", decouple_terms=True, term_weights=env.task.term_weights)(batch)
        varies = bool(advantages.get(keys.ADVANTAGE).any())
        assert varies is (weights["a"] > 0)
        metrics, expected = source.metrics(), 0 if varies and decouple_terms else 2
        assert (metrics["groups/zero_advantage"], metrics["groups/refilled"]) == (expected, expected)


def test_draws_beyond_the_bound_keep_flat_groups_and_no_step_draws_more(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is ever right, four groups, three rounds: the last four of 12 draws are the batch."""
    rig = Rig(refill=True, right=0.0, max_draws=3)
    assert ids(rig.step(0)) == [8, 9, 10, 11]
    assert "12 draws of the step are used: 4 groups" in caplog.text
    metrics = rig.source.metrics()
    assert (metrics["groups/refilled"], metrics["groups/zero_advantage"]) == (8, 4)
    rig = Rig(refill=True, right=0.0, max_draws=3, num_groups=4, max_policy_age=3)
    drawn = 0
    for step in range(6):
        rig.step(step, ahead=random.randint(0, 8))
        fresh, drawn = len(rig.desk.asked) - drawn, len(rig.desk.asked)
        # release() at the end of a step draws 4 for the next, and may replace what is held over
        assert fresh <= (16 if step == 0 else 0) + 2 * 2 * 4 + 4


def test_a_zero_advantage_group_of_an_earlier_step_is_replaced_as_one_of_the_first_round() -> None:
    """K = 2, age 1, two rounds: group 3 of step 1 costs two draws, its replacement's being of the last round."""
    refill, again = (Refill(num_groups=2, slots=4, max_draws=2) for _ in range(2))
    refill.start_step()
    older = [Group(number, None, 0, *refill.begin_draw()) for number in range(4)]
    refill.start_step()
    assert [refill.begin_draw(), refill.begin_draw()] == [(2, 0), (2, 1)]
    no_rows = RowTable(0, {})
    refill.add(older[3], no_rows)
    assert refill.may_draw()
    first = Group(6, None, 1, *refill.replace())
    assert not refill.may_draw()
    refill.add(first, no_rows)
    assert refill.may_draw()
    refill.add(Group(7, None, 1, *refill.replace()), no_rows)
    assert not refill.may_draw()
    again.load_state_dict(refill.state_dict(), lambda group_id: None)
    assert {**vars(again), "_pool": None} == {**vars(refill), "_pool": None}
    assert [group.group_id for group, _ in again.settle()] == [7]


def test_the_length_penalty_does_not_make_a_zero_advantage_group_worth_training() -> None:
    """Dynamic sampling judges the graded reward; what groups go through comes after it, as in synchronous mode."""
    rig = Rig(refill=True, right=0.0, max_draws=2, group_transforms=[OverlongPenalty(10, 9)])
    batch = rig.step(0)
    assert rig.source.metrics()["groups/refilled"] > 0
    rewards, lengths = batch.get(keys.REWARD).flatten(), batch.sums(keys.ASSISTANT_MASK)
    assert torch.allclose(rewards, (1 - lengths) / 9)  # of answers that are all wrong


def test_metrics_are_in_the_glossary_and_count_what_is_left() -> None:
    rig = Rig(num_groups=2, max_policy_age=2, metrics_extra=lambda: {"groups/trained": 7.0})
    rig.source.is_ready()
    rig.desk.finish(0, 1, 2)
    rig.source.handle_events()
    rig.source.next_batch()
    metrics = rig.source.metrics()
    assert all(declared(name).name == name for name in metrics)
    assert (metrics["groups/in_flight"], metrics["groups/ready"], metrics["groups/trained"]) == (3, 1, 7.0)
    assert {"time/wait_s", "time/score_s"} <= set(metrics)
    assert metrics["time/generate_s"] > 0


@pytest.mark.parametrize("opens", [True, False])
def test_a_response_that_ends_in_the_thinking_of_its_prompt_gives_no_answer(opens: bool) -> None:
    env = make_env(num_envs=REPEATS, repeats=REPEATS, num_train=23)  # a tokenizer of its own
    env.tokenizer.chat_template += "{% if add_generation_prompt and " + str(opens).lower() + " %}<think>\n{% endif %}"
    example = env.task.train[0]
    gold = env.task.gold_response(example)
    said = [gold, f"Let me see.</think>{gold}", f"<think>Let me see.</think>{gold}"]
    engine = make_saying(env, lambda request, index: said[index])
    (group,) = Rollouts(env, engine).stream([Prompt(0, example, len(said), 0)], Sampling(max_tokens=512))
    assert [score.success for score in group.scores] == [not opens, True, True]
    turn = TurnTokens(env.tokenizer).text(torch.tensor(env.tokenizer(gold)["input_ids"]))
    assert env.task.score(turn, example).success is not opens


@pytest.mark.timeout(60)
def test_no_score_is_waited_for_while_the_engine_still_generates() -> None:
    """This grader answers after the last group only, the last one first; the rows are the same."""
    late, here = (synchronous_source(right=0.5, seed=3, num_groups=4) for _ in range(2))
    opened, local = [], late.env.grader
    late.policy._duration_s = lambda request: 0.02 * request.group_id

    def grade(pairs) -> Future:
        opened.append((Future(), local.scores(pairs)))
        for future, scores in reversed(opened) if len(opened) == 4 else ():
            future.set_result(scores.result())
        return opened[-1][0]

    late.env.grader = SimpleNamespace(scores=grade)
    same(late.next_batch(), here.next_batch())
