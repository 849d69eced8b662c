"""Curricula: which level or example is drawn by what was observed, and that a resume goes on with the same draws."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sota_grpo import keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.sampling import heldout_task, make_env, task_of
from sota_grpo.config.validators import validate
from sota_grpo.envs import PromptStream, TaskEnv
from sota_grpo.envs.curriculum import Curriculum, CurriculumStream, PassRates, point, sampling_probabilities
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.metrics import declared
from sota_grpo.rewards.grading import LocalGrader, failed_score
from sota_grpo.rl.records import Example, Score
from sota_grpo.source.source import Graded, Prompt
from sota_grpo.tasks import make_task
from sota_grpo.tasks.mixture import MixedExamples
from sota_grpo.tasks.table import TableTask
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.evaluate import Evaluator, Response
from tests.unit import test_source
from tests.unit.test_group_buffer import same
from tests.unit.test_source import REPEATS, Rig, ids, reload, synchronous_source

SEED = random.randrange(1 << 30)
RNG = random.Random(SEED)


def examples(count: int, levels: int = 3) -> list[Example]:
    return [Example(f"q{index}", "", {"level": index % levels}) for index in range(count)]


def level_of(example: Example) -> int:
    return example.extra["level"]


def leveled(count: int = 30, levels: int = 3, *, seed: int = SEED, **rule) -> CurriculumStream:
    return CurriculumStream(examples(count, levels), Curriculum("level", **rule), level=level_of, seed=seed)


def by_example(count: int, *, seed: int = SEED, **rule) -> CurriculumStream:
    return CurriculumStream(examples(count), Curriculum("example", **rule), seed=seed)


def luck(group_id: int) -> int:
    """Of 8 responses, how many are right."""
    return random.Random(f"{SEED} {group_id}").randint(0, 8)


def go_round(stream: PromptStream, steps: int, groups: int = 6) -> list[tuple[int, str]]:
    """What is drawn in so many steps of the loop, where every group is graded in any order and released."""
    drawn = []
    for _ in range(steps):
        step = stream.draw(groups)
        drawn += [(group_id, example.query) for group_id, example in step]
        for group_id, _ in random.sample(step, groups):
            stream.observe(group_id, luck(group_id), 8)
        stream.update(held=())
    return drawn


@pytest.mark.parametrize("attempt", range(5))
def test_shares_are_those_of_a_loop_in_float64(attempt: int) -> None:
    count, floor = RNG.randint(1, 40), RNG.uniform(0.01, 1)
    trials = [RNG.choice([0, 0, RNG.uniform(1, 30)]) for _ in range(count)]
    passes = [RNG.choice([0.0, tried, RNG.uniform(0, tried)]) for tried in trials]
    weights = []
    for passed, tried in zip(passes, trials):
        rate = passed / tried if tried else 0.5
        weights.append(rate * (1 - rate))
    total = math.fsum(weights)
    expected = [floor / count + (1 - floor) * w / total if total else 1 / count for w in weights]
    found = sampling_probabilities(*(torch.tensor(one, dtype=torch.float64) for one in (passes, trials)), floor)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


def test_pass_rates_decay_by_hand() -> None:
    rates = PassRates(3, Curriculum("level", floor=0.3, decay=0.25), seed=SEED)
    assert rates.shares().tolist() == pytest.approx([1 / 3] * 3)  # nothing is known
    rates.add({0: (8, 8), 1: (2, 8)})
    assert rates.rates().tolist()[:2] == [1.0, 0.25]
    rates.add({1: (8, 8)})  # (0.25 * 2 + 8) / (0.25 * 8 + 8)
    assert rates.rates().tolist()[:2] == [1.0, 0.85]
    # 0, 0.85 * 0.15 and, never tried, 0.5 * 0.5: of 0.3775; and 0.1 each
    assert rates.shares().tolist() == pytest.approx([0.1, 0.1 + 0.7 * 0.1275 / 0.3775, 0.1 + 0.7 * 0.25 / 0.3775])


def test_what_is_solved_or_hopeless_falls_to_the_floor_and_returns_when_that_changes() -> None:
    stream = leveled(levels=5)

    def step(results: dict[int, int]) -> None:
        for group_id, example in stream.draw(60):
            stream.observe(group_id, results.get(level_of(example), 4), 8)
        stream.update(held=())

    def share(level: int) -> float:
        return Counter(level_of(example) for _, example in stream.draw(2500))[level] / 2500

    step({0: 8, 4: 0})
    assert [share(0), share(4)] == pytest.approx([0.04, 0.04], abs=0.01)
    step({0: 8, 4: 1})  # the second is solved now and then
    assert share(0) == pytest.approx(0.04, abs=0.01)
    assert share(4) > 0.055
    step({0: 3})
    assert share(0) > 0.055


@pytest.mark.parametrize("attempt", range(4))
def test_levels_are_drawn_as_their_shares_say_at_every_moment(attempt: int) -> None:
    rates = PassRates(RNG.randint(2, 9), Curriculum("level", floor=RNG.uniform(0.05, 1)), RNG.getrandbits(30))
    rates.add({level: (RNG.randint(0, 8), 8) for level in range(len(rates.passes))})
    shares, first = rates.shares().tolist(), RNG.randrange(10**7)
    counts = [0] * len(shares)
    for number in range(1, 1500):
        counts[rates.drawn(first + number)] += 1
        worst = max(abs(count - number * share) for count, share in zip(counts, shares))
        assert worst <= min(5, 3 + 3.53 * math.log(number)), (attempt, number)  # by chance it would be 20 to 50


def test_points_are_multiples_of_the_golden_ratio_exactly() -> None:
    seed = RNG.getrandbits(40)
    start, ratio = Fraction(point(seed, 0)), Fraction(0x9E3779B97F4A7C15, 1 << 64)
    for draw in (1, 2, 3, 10**6, 10**12):
        expected = float((start + draw * ratio) % 1)
        assert abs(point(seed, draw) - expected) in (pytest.approx(0, abs=1e-12), pytest.approx(1, abs=1e-12))
    assert 0 <= point(seed, 7) < 1
    assert point(seed, 0) != point(seed + 1, 0)


@pytest.mark.parametrize("make", [leveled, partial(by_example, 30)], ids=["level", "example"])
def test_nothing_starves_while_pass_rates_move(make) -> None:
    stream = make()
    waits, since = Counter(), Counter()
    for _, query in go_round(stream, 150, groups=16):
        name = query if stream.rule.by == "example" else int(query[1:]) % 3
        for other in since:
            since[other] += 1
        waits[name] = max(waits[name], since[name])
        since[name] = 0
    assert len(waits) == (30 if stream.rule.by == "example" else 3)
    assert max(waits.values()) < 1500  # the floor alone gives every one of 30 a draw in 150


@pytest.mark.parametrize("make", [leveled, partial(by_example, 30)], ids=["level", "example"])
def test_draws_are_a_function_of_the_seed_and_of_what_was_observed(make) -> None:
    drawn = go_round(make(), 12)
    assert drawn == go_round(make(), 12)  # graded in another order
    assert drawn[:6] != go_round(make(seed=SEED + 1), 1)
    assert [group_id for group_id, _ in drawn] == list(range(72))


def test_the_examples_of_a_level_come_once_per_epoch() -> None:
    stream = leveled(count=12, levels=2)
    drawn = [query for _, query in go_round(stream, 40)]
    for level in (0, 1):
        own = [query for query in drawn if int(query[1:]) % 2 == level]
        epochs = [own[start : start + 6] for start in range(0, len(own) - 5, 6)]
        assert all(len(set(epoch)) == 6 for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_seed_decides_the_order_of_examples() -> None:
    by_seed = set()
    for seed in range(SEED, SEED + 4):
        own = [query for _, query in go_round(leveled(count=16, levels=2, seed=seed), 6)]
        by_seed.add(tuple(query for query in own if int(query[1:]) % 2 == 0)[:8])
    assert len(by_seed) > 1
    drawn = [int(example.query[1:]) for _, example in by_example(50).draw(50)]
    steps = {(after - before) % 50 for before, after in pairwise(drawn)}
    assert len(steps) > 10  # neighbours in a file do not follow each other at equal distances


@pytest.mark.parametrize("make", [leveled, partial(by_example, 400)], ids=["level", "example"])
def test_a_stream_goes_on_where_it_was_saved(tmp_path: Path, make) -> None:
    whole, cut = make(), make()
    expected = go_round(whole, 20)
    found = go_round(cut, 7)
    CheckpointStore(tmp_path).save(0, {"stream": cut.state_dict()})
    _, state = CheckpointStore(tmp_path).latest()
    resumed = make()
    resumed.load_state_dict(state["stream"])
    assert found + go_round(resumed, 13) == expected
    assert state["stream"]["groups"] == []  # nobody asks for them again
    tried = state["stream"]["pass_rates"][""]["levels"]
    assert len(tried) <= 42 < 400  # what was drawn, not all there is


def test_a_group_in_flight_is_the_same_example_after_a_resume() -> None:
    stream = by_example(50)
    drawn = dict(stream.draw(10))
    stream.observe(3, 8, 8)
    stream.update(held={1, 4})
    resumed = by_example(50)
    resumed.load_state_dict(stream.state_dict())
    assert {group_id: resumed.example_of(group_id) for group_id in (1, 4)} == {1: drawn[1], 4: drawn[4]}
    with pytest.raises(ValueError, match="group 3 is not of this stream, or its batch was released"):
        resumed.example_of(3)


@pytest.mark.parametrize(
    "other",
    [
        partial(leveled, floor=0.4),
        partial(leveled, decay=0.1),
        partial(leveled, levels=2),
        partial(by_example, 30),
        lambda: PromptStream(examples(30), seed=SEED),
    ],
    ids=["floor", "decay", "levels", "by", "none"],
)
def test_a_state_of_another_curriculum_is_refused(other) -> None:
    with pytest.raises(ValueError, match="resume with the curriculum of the saved run"):
        leveled().load_state_dict(other().state_dict())
    with pytest.raises(ValueError, match="resume with the curriculum of the saved run"):
        other().load_state_dict(leveled().state_dict())


def test_a_single_level_is_refused() -> None:
    with pytest.raises(UserError, match=r"a single one; .* use env.curriculum=example"):
        leveled(levels=1)
    with pytest.raises(UserError, match="a single one"):
        CurriculumStream(examples(4), Curriculum("level"))


def test_responses_whose_grader_failed_say_nothing() -> None:
    stream, trials = leveled(levels=2), []
    for failed in (False, True):
        for group_id, example in stream.draw(10):
            stream.observe(group_id, 4, 0 if failed and level_of(example) else 8)
        stream.update(held=())
        trials.append(stream.state_dict()["pass_rates"][""]["trials"].tolist())
    (easy, hard), (easy_after, hard_after) = trials
    assert hard_after == hard  # nothing came, so nothing decays
    assert easy_after != easy
    assert stream.metrics()["curriculum/0/share"] == 1
    right, wrong = Score({}, success=True), Score({}, success=False)
    graded = Graded(Prompt(0, examples(1)[0], 4, 0), (), [], [right, wrong, right, failed_score(["x"], "TimeoutError")])
    assert graded.passes() == (2, 3)


def test_metrics_by_hand_and_in_the_glossary() -> None:
    stream = by_example(8, decay=0.5)
    names = {example.query: group_id for group_id, example in reversed(stream.draw(8))}
    one, two, three = list(names.values())[:3]
    for group_id, passes in ((one, 8), (two, 0), (three, 6)):
        stream.observe(group_id, passes, 8)
    stream.update(held=())
    found = stream.metrics()
    assert found == {
        **{"curriculum/seen": 3 / 8, "curriculum/solved": 1 / 8, "curriculum/unsolved": 1 / 8},
        "curriculum/pass_rate": pytest.approx((1 + 0 + 0.75) / 3),
    }
    levels = leveled()
    go_round(levels, 2)
    mixed = CurriculumStream(mixture(), Curriculum("level"), level=mixed_level, seed=SEED)
    go_round(mixed, 4)
    assert "curriculum/a/1/share" in mixed.metrics()
    for name in (*found, *levels.metrics(), *mixed.metrics()):
        declared(name)


def mixture() -> MixedExamples:
    return MixedExamples({"a": examples(30), "b": examples(7, levels=1)}, {"a": Fraction(2), "b": Fraction(1)})


def mixed_level(example: Example) -> int | None:
    return example.extra["level"] if example.extra["mixture/task"] == "a" else None


def test_of_a_mixture_the_tasks_keep_their_draws_and_one_without_levels_its_order() -> None:
    stream = CurriculumStream(mixture(), Curriculum("level"), level=mixed_level, seed=SEED)
    plain = PromptStream(mixture(), seed=SEED)
    expected = [example.extra["mixture/task"] for _, example in plain.draw(150)]
    tasks, levels, rest = [], Counter(), []
    for _ in range(15):
        for group_id, example in stream.draw(10):
            tasks.append(example.extra["mixture/task"])
            if tasks[-1] == "a":
                levels[level_of(example)] += 1
                stream.observe(group_id, 8 if level_of(example) else 4, 8)
            else:
                rest.append(example.query)
        stream.update(held=())
    assert tasks == expected
    assert levels[0] > 70  # of 100; the others are solved
    assert all(len(set(rest[start : start + 7])) == 7 for start in range(0, 49, 7))


def curriculum_env(by: str) -> TaskEnv:
    env = ORIGINAL_ENV()
    env.make_stream = partial(CurriculumStream, rule=Curriculum(by), level=env.task.level)
    env.stream = env.make_stream(env.task.train, seed=0)
    return env


ORIGINAL_ENV = test_source.small_env


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("by", ["level", "example"])
def test_at_age_0_workers_draw_what_sync_draws(by: str, refill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_source, "small_env", lambda: curriculum_env(by))
    for _ in range(3):
        chosen = {"right": RNG.uniform(0.1, 0.9), "seed": RNG.getrandbits(30), "num_groups": 4, "refill": refill}
        rig, driven = Rig(**chosen), synchronous_source(**chosen)
        for step in range(6):
            driven.engine.version = step
            one, other = driven.next_batch(step), rig.step(step)
            driven.release(one)
            assert ids(one) == ids(other), (chosen, step)
            assert all(same(*pair) for pair in zip(one, other)), (chosen, step)
            assert driven.metrics()["groups/zero_advantage"] == rig.source.metrics()["groups/zero_advantage"]
        assert same_state(driven.env.stream.state_dict(), rig.env.stream.state_dict())


def same_state(one: dict, other: dict) -> bool:
    rates, others = one.pop("pass_rates"), other.pop("pass_rates")
    equal = all(torch.equal(rates[""][name], others[""][name]) for name in rates[""])
    return equal and {**one, "groups": sorted(one["groups"])} == {**other, "groups": sorted(other["groups"])}


@pytest.mark.parametrize("max_policy_age", [0, 2])
@pytest.mark.parametrize("refill", [False, True])
def test_saves_at_random_moments_change_no_example(
    tmp_path, max_policy_age: int, refill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group id once, asked for again with the prompt that it had; at age 0 the run is the uninterrupted one."""
    monkeypatch.setattr(test_source, "small_env", lambda: curriculum_env("level"))
    chosen = {"num_groups": 3, "refill": refill, "max_draws": 3, "right": 0.2, "seed": RNG.getrandbits(30)}
    options = {**chosen, "max_policy_age": max_policy_age}
    rig, prompts, trained, reloads = Rig(**options), {}, [], 0
    for step in range(9):
        while not rig.source.is_ready():
            if random.random() < 0.15:
                rig, reloads = reload(rig, tmp_path, **options), reloads + 1
                continue
            for group_id, (request, _) in rig.desk.open.items():
                assert prompts.setdefault(group_id, request.prompt_ids) == request.prompt_ids
            if not rig.source.handle_events():
                rig.desk.finish_any()
        trained.append(rig.source.next_batch(step))
        rig.engine.version = step + 1
        if random.random() < 0.3:
            rig, reloads = reload(rig, tmp_path, **options), reloads + 1  # given out: it counts as trained, and learned
        else:
            rig.source.release(trained[-1])
        limit = 2 * rig.source._slots.count
        assert len(rig.env.stream.state_dict()["groups"]) <= limit + (limit if refill else 0)
    taken = [group for batch in trained for group in ids(batch)]
    assert len(set(taken)) == len(taken)
    assert reloads
    if max_policy_age:
        return
    driven = synchronous_source(**chosen)
    for step, batch in enumerate(trained):
        driven.engine.version = step
        expected = driven.next_batch(step)
        assert ids(batch) == ids(expected), (chosen, step)
        assert all(same(*pair) for pair in zip(batch, expected)), (chosen, step)
        driven.release(expected)


def test_what_dynamic_sampling_drops_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_source, "small_env", lambda: curriculum_env("example"))
    source = synchronous_source(right=1.0, seed=SEED, num_groups=2, refill=True, max_draws=3)
    batch = source.next_batch(0)
    source.release(batch)
    found = source.metrics()
    assert found["groups/refilled"] == 4
    drawn = {example.query for group_id, example in curriculum_env("example").stream.draw(6)}
    assert found["curriculum/solved"] == found["curriculum/seen"] == len(drawn) / 23


def config(*overrides: str):
    made = compose("grpo_cpu", ["engine=scripted", "env.reward_workers=0", *overrides])
    validate(made)
    return made


def test_a_config_gives_a_curriculum_which_stays_when_prompts_are_left_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny")

    def stream(*overrides: str) -> PromptStream:
        made = config("env.max_samples=60", "env.num_heldout=8", *overrides)
        task = task_of(made)
        return make_env(made, task, tokenizer, LocalGrader(task.score, task.term_weights)).stream

    assert type(stream()) is PromptStream
    levels = stream("env.curriculum=level", "env.difficulty=5", "env.curriculum_floor=0.3", "env.curriculum_decay=0.1")
    assert isinstance(levels, CurriculumStream)
    assert (levels.rule, list(levels._parts[""].members)) == (Curriculum("level", 0.3, 0.1), list("12345"))
    left = ("env.skip_unreadable=true", "inference_model.max_model_len=34")
    shorter = stream("env.curriculum=level", *left)
    assert isinstance(shorter, CurriculumStream)
    assert len(shorter.examples) < 60
    with pytest.raises(UserError, match="a single one"):
        stream("env.curriculum=level", "env.difficulty=1")
    one = config("env.curriculum=level", "env.difficulty=1", "env.max_samples=9")  # an evaluation draws nothing
    task = heldout_task(one)
    env = make_env(one, task, tokenizer, LocalGrader(task.score, task.term_weights), draws=False)
    assert type(env.stream) is PromptStream


def test_levels_of_tasks() -> None:
    arithmetic = make_task("arithmetic", num_train=100, num_heldout=4, max_steps=5)
    assert {arithmetic.level(example) for example in arithmetic.train} == {1, 2, 3, 4, 5}
    countdown = make_task("countdown", num_train=30, num_heldout=4, num_numbers=(2, 3))
    assert {countdown.level(example) for example in countdown.train} == {2, 3}
    for column in ("level", "grade"):
        table = TableTask(level_column=column)
        row = table.read_row({"prompt": "2+2?", "ground_truth": 4, "level": "Level 3"}, "demo, row 1")
        assert table.level(row) == ("Level 3" if column == "level" else None)


def test_an_evaluation_has_the_accuracy_of_each_level() -> None:
    task = make_task("arithmetic", num_train=4, num_heldout=40, max_steps=3)
    problems = [
        [Response("", Score({"correct": 1.0}, success=task.level(example) < 3), 1, False)] for example in task.heldout
    ]
    rollouts = SimpleNamespace(env=SimpleNamespace(task=task))
    options = {"max_tokens": 8, "avg_at_k": 0, "seed": 0}
    counts = Evaluator(rollouts, task.heldout, by_level=True, **options).benchmark(problems)
    assert {name: sum(hits for hits, _ in pairs) / len(pairs) for name, pairs in counts.items()} == {
        **{"level_1": 1, "level_2": 1, "level_3": 0}
    }
    assert sum(map(len, counts.values())) == 40
    assert Evaluator(rollouts, task.heldout, **options).benchmark(problems) == {}


def test_rows_are_those_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRL's interface draws by the curriculum, too, and learns after each collection."""
    from sota_grpo.source.collector import RolloutCollector

    env = curriculum_env("example")
    engine = test_source.random_engine(env, right=1.0, seed=SEED)
    collector = RolloutCollector(env, engine, sampling=test_source.SAMPLING, dialog_turns_per_batch=REPEATS)
    rows = collector.collect(5)
    assert len({row[keys.QUERY] for row in rows}) / 23 == env.stream.metrics()["curriculum/solved"]
