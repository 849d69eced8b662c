"""Several tasks in one run: the order of their prompts, who grades what, and what is written of each."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from sota_grpo.assembly.compose import anchor_paths, compose, load_config, needs_consent
from sota_grpo.assembly.sampling import heldout_task, task_of
from sota_grpo.config import Config
from sota_grpo.config.mixture import task_configs, weights
from sota_grpo.config.spelling import flat, overrides_of
from sota_grpo.config.validators import validate
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs import PromptStream, TaskEnv
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.metrics import METRICS, declared
from sota_grpo.recording.run_log import batch_metrics
from sota_grpo.rewards.grading import LocalGrader, guarded_scores
from sota_grpo.rl.records import SUBTASK, TASK, Example, Sampling, Score, total_reward
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import scorer_of
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import BaseTask, DatasetError
from sota_grpo.tasks.mixture import MixedExamples, MixtureTask, task_of_draw
from sota_grpo.tasks.wrappers import with_tools
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.runs import signature
from tests.config.test_config import composed

OF_TASK = [name.rpartition("/")[2] for name in METRICS if name.startswith("task/")]
SEED = random.randrange(1 << 30)
RNG = random.Random(SEED)


def examples(name: str, count: int) -> list[Example]:
    return [Example(f"{name}{index}", "", {"level": index}) for index in range(count)]


def mixed(sizes: dict[str, int], shares: dict[str, str] | None = None) -> MixedExamples:
    parts = {name: examples(name, count) for name, count in sizes.items()}
    return MixedExamples(parts, {name: Fraction((shares or {}).get(name, "1")) for name in parts})


def queries(stream: PromptStream, count: int) -> list[str]:
    return [example.query for _, example in stream.draw(count)]


def test_draws_are_numbered_without_gaps_and_follow_the_weights_at_every_moment() -> None:
    for _ in range(4):
        shares = [Fraction(RNG.randint(1, 60), RNG.randint(1, 9)) for _ in range(RNG.randint(1, 7))]
        seen, total = [0] * len(shares), sum(shares)
        for draw in range(200):
            task, number = task_of_draw(shares, draw)
            assert number == seen[task]
            seen[task] += 1
            worst = max(abs(count - (draw + 1) * share / total) for count, share in zip(seen, shares))
            assert worst <= Fraction(len(shares) - 1, 2)
    whole = [RNG.randint(1, 9) for _ in range(4)]  # a batch of as many draws as they add up to has just these
    for batch in range(5):
        draws = range(batch * sum(whole), (batch + 1) * sum(whole))
        counted = Counter(task_of_draw([Fraction(weight, 7) for weight in whole], draw)[0] for draw in draws)
        assert [counted[task] for task in range(4)] == whole


def test_parts_take_turns_and_those_that_are_used_up_pass() -> None:
    sizes = [RNG.randint(0, 6) for _ in range(5)]
    naive = [(part, turn) for turn in range(6) for part, size in enumerate(sizes) if turn < size]
    parts = mixed({f"part{part}-": size for part, size in enumerate(sizes)})
    queries = [f"part{part}-{turn}" for part, turn in naive]
    assert [one.query for one in parts] == queries == [one.query for one in parts[:99]]
    assert (len(parts), parts[-1].query) == (sum(sizes), queries[-1])
    assert mixed({"a": 1, "b": 3})[0].extra == {TASK: "a", "level": 0}


def test_each_task_draws_all_of_its_examples_once_an_epoch_in_an_order_that_is_its_own() -> None:
    shares = {"a": "2", "b": "0.5", "c": "1.5"}
    drawn = queries(PromptStream(mixed({"a": 7, "b": 3, "c": 5}, shares), seed=SEED), 200)
    for name, size in (("a", 7), ("b", 3), ("c", 5)):
        own = [query for query in drawn if query[0] == name]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert len(epochs) > 1
        assert all(sorted(epoch) == [f"{name}{index}" for index in range(size)] for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1
    larger = queries(PromptStream(mixed({"a": 7, "b": 4, "c": 99}, shares), seed=SEED), 200)
    assert [query for query in larger if query[0] == "a"] == [query for query in drawn if query[0] == "a"]
    assert [query[0] for query in larger] == [query[0] for query in drawn]
    in_order = PromptStream(mixed({"a": 2, "b": 2}), shuffle=False)
    assert sorted(queries(in_order, 4)[::2]) in (["a0", "a1"], ["b0", "b1"])


@pytest.mark.parametrize("before", [1, 64])
def test_resume_at_any_draw_equals_uninterrupted(before: int) -> None:
    sizes, shares = {"a": 5, "b": 11, "c": 2}, {"a": "0.1", "b": "3"}
    stream, resumed = (PromptStream(mixed(sizes, shares), seed=SEED) for _ in range(2))
    stream.draw(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed.draw(3)
    resumed.load_state_dict(state)
    assert resumed.draw(40) == stream.draw(40)
    assert resumed.example_of(before + 3) == stream.example_of(before + 3)


def test_the_state_of_another_mixture_is_refused() -> None:
    state = PromptStream(mixed({"a": 5, "b": 3}), seed=SEED).state_dict()
    for other in (mixed({"a": 5, "b": 3}, {"a": "2"}), mixed({"a": 4, "b": 4})):
        with pytest.raises(ValueError, match=r"has mixture=\{'a': \[5, '1'\], 'b': \[3, '1'\]\}, but this stream has"):
            PromptStream(other, seed=SEED).load_state_dict(state)
    with pytest.raises(ValueError, match="this stream has mixture=None"):
        PromptStream(examples("a", 8), seed=SEED).load_state_dict(state)
    with pytest.raises(ValueError, match="no examples"):
        PromptStream(mixed({"a": 5, "b": 0}))


class Shortest(BaseTask):
    """A grader of groups, which fails at a response that says so."""

    name = "shortest"

    def __post_init__(self) -> None:
        self.score, self.term_weights = GroupScorer(), {"short": 2.0}


class GroupScorer:
    def __call__(self, response: str, example: Example) -> Score:
        return self.score_group([(response, example)])[0]

    def score_group(self, pairs) -> list[Score]:
        assert all(TASK not in example.extra for _, example in pairs), "a task sees its own examples"
        if any(response == "fail" for response, _ in pairs):
            raise OSError("no judge")
        least = min(len(response) for response, _ in pairs)
        return [Score({"short": float(len(response) == least)}, len(response) == least) for response, _ in pairs]


def mixture_task(**options) -> MixtureTask:
    cd, sums = (make_task(name, seed=SEED, num_train=6, num_heldout=3) for name in ("countdown", "arithmetic"))
    return MixtureTask({"sums": sums, "cd": cd, "brief": Shortest(*[examples("brief", 4)] * 2)}, **options)


def test_each_response_is_graded_by_the_task_of_its_prompt_alone() -> None:
    task = mixture_task()
    assert list(task.term_weights) == ["brief/short", "cd/correct", "cd/format", "sums/correct"]
    scorer = pickle.loads(pickle.dumps(scorer_of(task)))
    for example in task.train[:12]:
        name, own_task, own = task.resolve(example)
        gold = task.gold_response(example)
        assert task.messages(example) == own_task.messages(own)
        (actual,) = guarded_scores(scorer, task.term_weights, [(gold or "ok", example)])
        applies = {term for term, value in actual.terms.items() if value is not None}
        assert applies == {f"{name}/{term}" for term in own_task.term_weights}
        expected = own_task.score(gold or "ok", own)
        assert total_reward(actual.terms, task.term_weights) == total_reward(expected.terms, own_task.term_weights)
        assert actual.success is expected.success is True


def test_a_group_is_given_to_a_grader_of_groups_and_a_failure_costs_its_own_task_alone() -> None:
    task = mixture_task()
    brief, cd = task.train[0], task.train[1]
    actual = guarded_scores(task.score, task.term_weights, [("one", brief), ("three", brief)])
    assert [score.terms["brief/short"] for score in actual] == [1.0, 0.0]
    actual = guarded_scores(task.score, task.term_weights, [("one", brief), ("fail", brief), ("three", brief)])
    assert [score.error for score in actual] == [None, "OSError: no judge", None]
    assert actual[1].terms == {"brief/short": 0.0, "cd/correct": None, "cd/format": None, "sums/correct": None}
    both = guarded_scores(task.score, task.term_weights, [("x", cd), ("x", brief), (task.gold_response(cd), cd)])
    assert [score.success for score in both] == [False, True, True]


def test_dialogs_with_tools_and_reward_functions_see_the_tasks_own_columns(tmp_path: Path) -> None:
    task = with_tools(mixture_task(), has_reward=False, adds_task_terms=True)
    (actual,) = guarded_scores(task.score, task.term_weights, [(task.gold_response(task.train[1]), task.train[1])])
    assert actual.success
    (tmp_path / "r.py").write_text(
        "def near(prompts, completions, ground_truth, **columns):\n"
        "    assert not any('mixture' in name for name in columns)\n"
        "    return [float(len(text)) for text, truth in zip(completions, ground_truth)]\n"
    )
    entries = {"mine": {"reward_path": str(tmp_path / "r.py"), "reward_name": "near"}, "sums": {}}
    task = task_of(configured(mixture=entries, max_samples=4, num_heldout=2))
    mine, sums = task.train[:2]
    actual = [score.terms for score in guarded_scores(task.score, task.term_weights, [("ab", mine), ("ab", mine)])]
    assert actual == [{"mine/near": 1.0, "sums/correct": None}] * 2  # one turn of a chat
    assert guarded_scores(task.score, task.term_weights, [("ab", sums)])[0].terms["sums/correct"] == 0.0


def env_of(task: MixtureTask) -> TaskEnv:
    return TaskEnv(task, load_tokenizer("tiny"), grader=LocalGrader(task.score, task.term_weights))


def test_a_task_has_a_token_limit_of_its_own_in_training_and_evaluation() -> None:
    task = mixture_task(max_tokens={"cd": 3, "sums": 100})
    env = env_of(task)
    engine = ScriptedEngine(lambda *_: [7] * 50, eos_token_id=env.tokenizer.eos_token_id, max_model_len=2048)
    prompts = [Prompt(index, example, 2, index) for index, example in enumerate(task.train[:6])]
    for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=9)):
        limit = 3 if group.prompt.example.extra[TASK] == "cd" else 9  # a task's own may only be lower
        assert [len(sample.token_ids) for sample in group.samples] == [limit] * 2
        assert all(sample.truncated for sample in group.samples)
    assert len(env_of(mixture_task()).reset()) == 1


def test_an_evaluation_measures_each_task() -> None:
    task = mixture_task()
    env = env_of(task)
    gold = {env.prompt_ids(example): task.gold_response(example) for example in task.heldout}

    def say(request, index: int, version: int) -> list[int]:
        right = gold[request.prompt_ids] if request.group_id % 2 else "no"
        return env.tokenizer(right or "no")["input_ids"]

    engine = ScriptedEngine(say, eos_token_id=env.tokenizer.eos_token_id, max_model_len=2048)
    held = task.heldout[:9]
    assert Counter(example.extra[TASK] for example in held) == {"brief": 3, "cd": 3, "sums": 3}
    actual = Evaluator(Rollouts(env, engine), held, max_tokens=99, avg_at_k=0, seed=SEED).measure()
    assert actual["eval/task/brief"] == 1.0  # alone, each is the shortest
    right = {name: [index % 2 for index, one in enumerate(held) if one.extra[TASK] == name] for name in ("cd", "sums")}
    assert [actual[f"eval/task/{name}"] for name in right] == [pytest.approx(sum(r) / 3) for r in right.values()]
    assert {"eval/task_stderr/cd", "eval/reward/brief/short", "eval/reward/sums/correct"} <= actual.keys()
    assert all(declared(name) for name in actual)


def test_what_a_benchmark_counts_is_below_its_task() -> None:
    chat = make_task("instructions", seed=SEED, num_train=2, num_heldout=2)
    task = MixtureTask({"chat": chat})
    example, own = task.heldout[0], chat.heldout[0]
    counted = chat.counts(chat.score("a, b", own), own)
    assert len(counted) == 4
    actual = task.counts(task.score("a, b", example), example)
    assert actual == {"chat": (counted["prompt_strict"][0], 1.0), **{f"chat/{name}": counted[name] for name in counted}}


def test_metrics_of_a_batch_by_task() -> None:
    def row(task: str, term: str, value: float, length: int, subtask: str | None = None) -> TensorDict:
        graded = {"reward": [value], "success": [value > 0], "truncated": [length > 3], "policy_version": 0}
        after = {name: torch.tensor(of) for name, of in (graded | {"reward_error": [False]}).items()}
        after |= {"reward_timeout": torch.tensor([False]), "reward_info": NonTensorData(json.dumps({"acc": value}))}
        return TensorDict(
            {
                "extra": NonTensorData(json.dumps({TASK: task, SUBTASK: subtask})),
                "tokens": {"prompt": torch.zeros(2, dtype=torch.long)},
                "masks": {"all_assistant_mask": torch.arange(2 + length) >= 2},
                "advantage": torch.tensor([[0.0]]),
                "next": after | {"reward_terms": {f"{task}/{term}": torch.tensor([value])}},
            }
        )

    rows = [row("a", "right", 1.0, 2, "x"), row("a", "right", 0.0, 4), row("b-2", "right", -1.0, 6, "of/</script>")]
    actual = batch_metrics(RowTable.of(rows), version=0)
    assert all(declared(name) for name in actual)
    assert {name: actual[f"task/a/{name}"] for name in OF_TASK} == {
        **{"reward": 0.5, "success": 0.5, "truncated": 0.5, "response_tokens": 3.0, "responses": 2.0}
    }
    assert (actual["task/b-2/reward"], actual["reward/a/right"], actual["reward/b-2/right"]) == (-1.0, 0.5, -1.0)
    assert (actual["grader/a/acc"], actual["grader/b-2/acc"]) == (0.5, -1.0)
    assert {name: actual[f"task/a/x/{name}"] for name in OF_TASK} == {
        **{"reward": 1.0, "success": 1.0, "truncated": 0.0, "response_tokens": 2.0, "responses": 1.0}
    }
    of_tasks = {name.rpartition("/")[0] for name in actual if name.startswith("task/")}
    assert of_tasks == {"task/a", "task/a/x", "task/b-2"}


def configured(**env: Any) -> Config:
    config = composed("grpo_cpu")
    return replace(config, env=replace(config.env, **env))


def test_a_task_has_the_runs_options_but_for_its_own() -> None:
    mixture = "{hard: {difficulty: 4}, maths: {dataset: gsm8k, weight: 0.1, max_tokens: 9}, own: {reward_path: a}}"
    others = ("env.difficulty=2", "reward.path=b", "reward.name=f", "reward.success_above=1")
    config = compose("grpo_cpu", [f"env.mixture={mixture}", *others])
    validate(config)
    actual = task_configs(config)
    assert {name: (one.env.dataset, one.env.difficulty) for name, one in actual.items()} == {
        **{"hard": ("arithmetic", 4), "maths": ("gsm8k", 4), "own": ("arithmetic", 2)}
    }
    assert [actual["maths"].inference_model.max_tokens, actual["hard"].inference_model.max_tokens] == [9, 64]
    functions = [(one.reward.path, one.reward.name, one.reward.success_above) for one in actual.values()]
    assert functions == [("b", "f", 1.0), ("b", "f", 1.0), ("a", None, 0.0)]
    assert weights(config) == {"hard": 1, "maths": Fraction(1, 10), "own": 1}
    assert config.env.mixture["maths"]["weight"] == 0.1  # nothing was changed


def test_files_of_a_mixture_are_the_runs_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchored, signed by their contents; code and servers need consent."""
    options = {
        "mine": {"dataset": "table", "dataset_path": "rows.jsonl", "reward_path": "r.py"},
        "tool": {"tools": "tools.py:double", "max_steps": 3},
        "far": {"environment": "openenv+http://127.0.0.1:9", "max_steps": 2},
    }
    names, here = ("rows.jsonl", "r.py", "tools.py"), f"{tmp_path}/"
    for name in names:
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    config = compose("grpo_cpu", overrides_of({"env.mixture": options}))
    anchor_paths(config)
    mixture = config.env.mixture
    assert mixture["mine"] == {"dataset": "table", "dataset_path": here + "rows.jsonl", "reward_path": here + "r.py"}
    assert (mixture["tool"]["tools"], mixture["far"]) == (here + "tools.py:double", options["far"])
    acts = needs_consent(config)
    assert "127.0.0.1:9" in acts.pop("env.mixture.far.environment")
    assert acts == {
        "env.mixture.mine.reward_path": f"run {here}r.py",
        "env.mixture.tool.tools": f"run {here}tools.py",
    }
    before = signature(asdict(config))
    moved = asdict(config)
    moved["env"]["mixture"] = dict(reversed(moved["env"]["mixture"].items()))  # no order
    assert signature(moved) == before
    for name in names:
        (tmp_path / name).write_text("other")
        assert signature(asdict(config)) != before
        (tmp_path / name).write_text(name)
    (tmp_path / "config.yaml").write_text("env: {mixture: {mine: {dataset: table, reward_path: /nowhere/r.py}}}")
    with pytest.raises(UserError, match=r"asks to run /nowhere/r.py \(env.mixture.mine.reward_path\); if you trust"):
        load_config(tmp_path)
    again = load_config(tmp_path, ["env.mixture.mine.reward_path=/nowhere/r.py", "env.mixture.mine.weight=2"])
    assert again.env.mixture == {"mine": {"dataset": "table", "reward_path": "/nowhere/r.py", "weight": 2}}
    load_config(tmp_path, unused=["reward.path"])
    load_config(tmp_path, trust=True)


def test_data_that_cannot_be_read_are_reported_with_the_name_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?"}\n')
    config = configured(mixture={"m": {"dataset": "gsm8k", "dataset_path": str(tmp_path / "bad.jsonl")}})
    with pytest.raises(DatasetError, match=r"env\.mixture\.m: "):
        task_of(config)
    config = configured(mixture={"m": {"dataset": "gsm8k", "eval_path": str(tmp_path / "held.jsonl")}, "a": {}})
    assert [one.query for one in heldout_task(config).heldout if one.extra[TASK] == "m"] == ["1 + 1?"]


def test_no_task_trains_on_what_another_holds_out(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(20)]
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("rows", "held", "more")}
    for name, text in (("rows", "\n".join(rows)), ("held", rows[3]), ("more", rows[4])):
        Path(paths[name]).write_text(text)
    one = {"dataset": "gsm8k", "dataset_path": paths["rows"], "eval_path": paths["held"]}
    other = {"dataset": "reasoning", "dataset_path": paths["rows"]}
    task = task_of(configured(mixture={"one": one, "other": other}, num_heldout=2))
    trained, held = ({example.query for example in examples} for examples in (task.train, task.heldout))
    assert len(held) >= 2
    assert "3 + 1?" in held
    assert not trained & held
    assert len(trained | held) == 20
    assert all(len(task.train.examples_of[name]) == len(trained) for name in ("one", "other"))
    other |= {"dataset_path": paths["held"], "eval_path": paths["more"]}
    with pytest.raises(UserError, match=r"env\.mixture\.other has no question that no task holds out"):
        task_of(configured(mixture={"one": one, "other": other}))


TEXTS = ("Think, then say it.", "It's 4.", "null", "1e9", "{", "a\nb", "x=1", "é", "\\", "Add.")
WORDS = ("adamw_8bit", "my/task.py:Mine", "http://127.0.0.1:8000/v1", "org/model-1.5b@main")
FOR_TEXTS = """
env.system_prompt env.dataset_path env.eval_path env.prompt_column env.answer_column env.tools env.environment env.agent
reward.path reward.judge.rubric train.sampler model.name reward.judge.url reward.judge.model
"""


def test_options_are_written_on_the_command_line_as_they_are() -> None:
    """Plain words without quotes."""
    mixture = {
        "a": {"dataset": "table", "dataset_path": "/my files/rows, 2.jsonl", "reward_name": ["f", "g"], "weight": 0.5},
        "b-1": {"system_prompt": 'It\'s \\ {so}: "null", 5 = x\\', "answer_column": "null", "max_samples": 5},
        "c": {"system_prompt": "", "prompt_column": "7", "eval_path": None},
    }
    texts = dict(zip(FOR_TEXTS.split(), (*TEXTS, *WORDS), strict=True))
    written = overrides_of({**texts, "env.mixture": mixture})
    config = compose("grpo_cpu", written)
    assert config.env.mixture == mixture
    actual = flat(asdict(config))
    assert {name: actual[name] for name in texts} == texts
    assert [line.partition("=")[2] for line in written[len(TEXTS) : -1]] == [*WORDS]


def test_prompts_that_do_not_fit_are_left_out_of_their_task() -> None:
    short, long, held, brief, terse = (
        Example(text, "") for text in ("short", "l " * 500, "h " * 500, "brief", "terse")
    )
    task = MixtureTask({"a": Shortest([short, long], [held]), "b": Shortest(*[[brief, terse]] * 2)})
    examples = task.train
    env = TaskEnv(task, load_tokenizer("tiny"), max_prompt_tokens=100, seed=SEED)
    with pytest.raises(UserError, match="at most 100 fit"):
        env.check_prompts()
    env.check_prompts(skip=True)
    assert [(one.extra[TASK], one.query) for one in task.train] == [("a", "short"), ("b", "brief"), ("b", "terse")]
    assert [one.query for one in task.heldout] == ["brief", "terse"]
    assert Counter(one.query for _, one in env.stream.draw(8)) == {"short": 4, "brief": 2, "terse": 2}
    with pytest.raises(DatasetError, match=r"No training problem of env\.mixture\.b is left"):
        examples.only([one for one in examples if one.extra[TASK] == "a"], may_be_empty=False)
