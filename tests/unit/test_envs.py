"""The env draws groups, grades token ids, keeps TorchRL's contract, and refuses what it cannot honour."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchrl.envs import Compose, StepCounter, TransformedEnv, llm
from torchrl.envs.utils import check_env_specs
from transformers import PreTrainedTokenizerFast

from sota_grpo import envs, keys
from sota_grpo.envs import ArithmeticEnv, PromptStream, TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.dataset import DatasetError

SEED = random.randrange(1 << 30)
TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def char_tokenizer(*, chat_template: str | None = TEMPLATE, pad_token: str = "<pad>") -> PreTrainedTokenizerFast:
    """One token per printable character, an end and a padding token."""
    symbols = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": pad_token, "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = chat_template
    return tokenizer


def make_env(**changes) -> TaskEnv:
    task = ArithmeticTask(seed=SEED, num_train=12, num_heldout=4)
    return TaskEnv(task, char_tokenizer(), **{"num_envs": 6, "repeats": 3, "seed": SEED} | changes)


def answering(env: TaskEnv, respond: Callable[[int, TensorDictBase], str], end: bool = True) -> Callable:
    """A toy policy: row ``i`` says ``respond(i, row)``, then EOS."""

    def policy(tensordict: TensorDictBase) -> TensorDictBase:  # the name by which TorchRL knows such a policy
        for index, row in enumerate(tensordict.unbind(0)):
            ids = env.tokenizer(respond(index, row))["input_ids"] + [env.tokenizer.eos_token_id] * end
            row.set(keys.RESPONSE_TOKENS, torch.tensor(ids, dtype=torch.int64))
        return tensordict

    return policy


def test_specs_describe_the_ragged_rows_under_transforms_too() -> None:
    for num_envs, repeats in ((1, 1), (6, 3)):
        check_env_specs(make_env(num_envs=num_envs, repeats=repeats), break_when_any_done="both", seed=SEED)
    # one group, so prompts of one length: the check itself stacks the rows of a TransformedEnv densely
    check_env_specs(TransformedEnv(make_env(num_envs=3), Compose(StepCounter(max_steps=1))))
    env = make_env(compute_reward=False)
    rows = env.rollout(max_steps=1, policy=answering(env, lambda index, row: "#### 1"))
    assert keys.REWARD_TERMS not in rows.keys(True)
    assert rows["next", "done"].all()


def test_reset_draws_groups_of_siblings() -> None:
    env = make_env()
    first, second = env.reset(), env.reset()
    begin = first["group_id"].min()
    assert (first["group_id"] - begin).tolist() == [0, 0, 0, 1, 1, 1]
    assert (second["group_id"] - begin).tolist() == [2, 2, 2, 3, 3, 3]
    assert first["sample_id"].tolist() == [0, 1, 2, 0, 1, 2]
    drawn = dict(PromptStream(env.task.train, seed=SEED).draw(2))
    for row in first.unbind(0):
        example = drawn[row["group_id"].item() - begin.item()]
        assert env.stream.example_of(row["group_id"].item()) == example
        assert Example(row["query"], row["answer"], json.loads(row["extra"])) == example
        prompt = env.tokenizer.decode(row[keys.PROMPT_TOKENS].tolist())
        assert prompt == f"user: {example.query}\nassistant: "


def test_the_first_reset_is_of_all_rows() -> None:
    env = make_env()
    first_alone = TensorDict({"_reset": torch.tensor([[True], *[[False]] * 5])}, [6])
    with pytest.raises(ValueError, match="row 1 has no dialog yet; reset all rows before single ones"):
        env.reset(first_alone)
    rows = env.reset()
    before = rows["group_id"].tolist()
    after = env.reset(rows.update(first_alone))["group_id"].tolist()
    assert [old == new for old, new in zip(before, after)] == [False, *[True] * 5]


def test_environments_name_no_group_alike() -> None:
    """Of other seeds, of other examples, and once they were given a seed, whose order starts over with new names."""
    others = TaskEnv(ArithmeticTask(seed=SEED + 1, num_train=12, num_heldout=4), char_tokenizer(), seed=SEED)
    env = make_env()
    rows = [each.reset() for each in (env, make_env(seed=SEED + 1), others)]
    for each, seed in ((env, SEED + 5), (env, SEED + 5), (make_env(), 7)):
        each.set_seed(seed)
        rows.append(each.reset())
    drawn = [set(each["group_id"].tolist()) for each in rows]
    assert len(set.union(*drawn)) == sum(map(len, drawn)) == 11
    assert set(make_env().reset()["group_id"].tolist()) == drawn[0]
    assert [row["query"] for row in rows[3].unbind(0)] == [row["query"] for row in rows[4].unbind(0)]


def test_a_stream_continues_with_the_groups_that_it_named() -> None:
    env, resumed = make_env(), make_env()
    env.reset()
    resumed.stream.load_state_dict(env.stream.state_dict())
    first, second = env.reset(), resumed.reset()
    for key in ("group_id", "query"):
        assert [row[key] for row in first.unbind(0)] == [row[key] for row in second.unbind(0)]


def test_siblings_come_in_successive_resets_where_there_are_fewer_environments() -> None:
    env, whole = make_env(num_envs=1), make_env()
    names = ("group_id", "sample_id", "query")
    expected = [[str(row[key]) for key in names] for row in whole.reset().unbind(0)]
    alone = [env.reset()[0] for _ in expected]
    assert [[str(row[key]) for key in names] for row in alone] == expected
    env.reset()
    env.set_seed(5)
    assert [env.reset()["sample_id"].item() for _ in range(4)] == [0, 1, 2, 0]


def test_rollout_grades_every_answer() -> None:
    env = make_env()
    right = answering(env, lambda index, row: row["answer"] if index % 2 else "#### none")
    rows = env.rollout(max_steps=1, policy=right).reshape(-1)
    assert rows["next", "reward"].flatten().tolist() == [0.0, 1.0] * 3
    assert rows["next", "reward_terms", "correct"].flatten().tolist() == [0.0, 1.0] * 3
    assert rows["next", "success"].flatten().tolist() == [False, True] * 3
    assert not rows["next", "reward_error"].any()
    assert rows["next", "done"].all()
    assert not rows["next", "truncated"].any()


def test_a_policy_may_write_the_whole_sequence_instead() -> None:
    env = make_env()

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        for row in tensordict.unbind(0):
            answer = torch.tensor([*env.tokenizer(row["answer"])["input_ids"], env.tokenizer.eos_token_id])
            row.set(keys.FULL_TOKENS, torch.cat([row[keys.PROMPT_TOKENS], answer]))
        return tensordict

    assert env.rollout(max_steps=1, policy=policy)["next", "success"].all()
    with pytest.raises(KeyError, match="neither"):
        env.step(env.reset())


def test_an_answer_without_its_end_is_truncated() -> None:
    env = make_env()
    rows = env.rollout(max_steps=1, policy=answering(env, lambda index, row: row["answer"], end=False))
    assert rows["next", "truncated"].all()
    assert not rows["next", "terminated"].any()
    env.tokenizer = char_tokenizer(pad_token="<eos>")  # wrappers strip padding, so the end cannot be seen
    rows = env.rollout(max_steps=1, policy=answering(env, lambda index, row: row["answer"], end=False))
    assert not rows["next", "truncated"].any()


def test_a_step_asks_the_grader_for_each_group() -> None:
    grader = LocalGrader(lambda text, example: Score({"correct": float(len(text))}, False), ["correct"])
    grader.scores = Mock(wraps=grader.scores)
    env = make_env(grader=grader)
    rows = env.rollout(max_steps=1, policy=answering(env, lambda index, row: "x" * index)).reshape(-1)
    graded = [list(call.args[0]) for call in grader.scores.call_args_list]
    assert [[text for text, _ in group] for group in graded] == [["", "x", "xx"], ["xxx", "xxxx", "xxxxx"]]
    assert [{example.query for _, example in group} for group in graded] == [{rows[0]["query"]}, {rows[3]["query"]}]
    assert rows["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_batch_of_broken_groups_and_a_prompt_that_does_not_fit_are_refused() -> None:
    for num_envs, repeats, fix in ((10, 4, 8), (3, 4, 4), (0, 2, 2)):
        with pytest.raises(ValueError, match=f"num_envs={num_envs} .* repeats={repeats} .*; use num_envs={fix} "):
            make_env(num_envs=num_envs, repeats=repeats)
    for options, message in (
        ({"max_steps": 0}, "max_steps=0 allows no policy turn"),
        ({"max_steps": 1, "tools": []}, "max_steps=1 allows no policy turn after a tool"),
        ({"tools": "a.py:b", "environment": "a.py:c"}, "both tools and environment"),
    ):
        with pytest.raises(ValueError, match=message):
            make_env(**options)
    longest = make_env().check_prompts()
    assert make_env(max_prompt_tokens=longest).check_prompts() == longest
    with pytest.raises(UserError, match=f"has {longest} tokens and at most {longest - 1} fit"):
        make_env(max_prompt_tokens=longest - 1).check_prompts()


def test_prompts_are_tokenised_once() -> None:
    env = make_env()
    env.tokenizer.apply_chat_template = applied = Mock(wraps=env.tokenizer.apply_chat_template)
    env.check_prompts()
    unique = len({(e.query, str(e.extra)) for part in (env.task.train, env.task.heldout) for e in part})
    env.reset()
    assert applied.call_count == unique + 1  # and plain words, for what the template writes around them


def test_a_tokenizer_without_a_chat_template_gets_plain_text() -> None:
    env = TaskEnv(ArithmeticTask(num_train=2, num_heldout=1), char_tokenizer(chat_template=None))
    example = env.task.train[0]
    assert env.decode(torch.tensor(env.prompt_ids(example))) == f"{example.query}\n\n"


NO_COMMA = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
ROWS: dict[str, Callable[[int], dict]] = {  # of question {number}, by the environment's name
    "GSM8KEnv": lambda number: {"question": f"No. {number}?", "answer": f"<<1=1>>so\n#### {number}"},
    "MATHEnv": lambda number: {"problem": f"No. {number}?", "solution": f"It is $\\boxed{{\\frac{{{number}}}{{2}}}}$."},
    "IFEvalEnv": lambda number: {"prompt": f"No. {number}?", **NO_COMMA},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rows")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row(number)) for number in range(1, 10)))
    return {name: str(folder / f"{name}.jsonl") for name in ROWS}


@pytest.mark.parametrize(
    ("name", "options", "prompt", "responses", "rewards"),
    [
        ("GSM8KEnv", {}, "#### <number>", ("{0}", "#### -1"), [1.0, 0.0]),
        ("MATHEnv", {"correct": 2.0}, "\\boxed{<answer>}", ("so \\boxed{{{0} + 0}}", "\\boxed{{-1}}"), [2.0, -1.0]),
        ("MATHEnv", {}, "\\boxed{<answer>}", ("\\boxed{{{0}}}", "1"), [1.0, -0.5]),
        ("IFEvalEnv", {"all_weight": 0.5}, "user: No. ", ('"So it is"', "So it is"), [1.5, 0.5]),
    ],
)
def test_named_environments_take_torchrls_keywords_and_grade(files, name, options, prompt, responses, rewards) -> None:
    theirs = set(inspect.signature(getattr(llm, name).__init__).parameters) - {"self"}
    kind = getattr(envs, name)
    assert theirs <= {
        name for one in (kind, envs.DatasetEnv, envs.TaskEnv) for name in inspect.signature(one.__init__).parameters
    }
    env = kind(
        dataset=files[name], tokenizer=char_tokenizer(), num_envs=4, repeats=2, seed=SEED, num_heldout=3, shuffle=True,
        batch_size_dl=4, group_repeats=True, apply_template=True, compute_reward=True, max_steps=1, **options,
    )  # fmt: skip
    check_env_specs(env)
    policy = answering(env, lambda index, row: responses[index % 2].format(row["answer"]))
    rows = env.rollout(max_steps=1, policy=policy).reshape(-1)
    assert rows["next", "reward"].flatten().tolist() == rewards * 2
    assert rows["next", "success"].flatten().tolist() == [True, False] * 2
    assert prompt in env.decode(rows[0][keys.PROMPT_TOKENS])
    if name == "IFEvalEnv":
        infos = [json.loads(row[keys.REWARD_INFO])["follow_instruction_list_strict"] for row in rows.unbind(0)]
        assert infos == [[True, True], [True, False]] * 2


@pytest.mark.parametrize(
    ("name", "option", "error", "sentence"),
    [
        ("GSM8KEnv", {"input_mode": "history"}, ValueError, "input_mode='history' is not.*use input_mode='tokens'"),
        ("GSM8KEnv", {"collate_fn": list}, ValueError, "collate_fn=.* is not supported"),
        ("GSM8KEnv", {"tokenizer": None}, ValueError, "tokenizer=None"),
        ("GSM8KEnv", {"num_env": 2}, TypeError, "num_env"),
        ("MATHEnv", {"wrong": 5.0}, ValueError, "reward.correct=1.0 must be greater"),
        ("IFEvalEnv", {"dataset": "google/IFEval"}, DatasetError, "is the test set of IFEval"),
        ("IFEvalEnv", {"eval_dataset": "missing.jsonl"}, DatasetError, "there is no file missing.jsonl"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(files, name, option, error, sentence) -> None:
    tokenizer = char_tokenizer()
    with pytest.raises(error, match=sentence):
        getattr(envs, name)(**{"dataset": files[name], "num_heldout": 3, "tokenizer": tokenizer} | option)
    assert not envs.GSM8KEnv(dataset=files["GSM8KEnv"], tokenizer=tokenizer).task.heldout, "none is the default"
    with pytest.raises(ValueError, match="has no chat template"):
        ArithmeticEnv(tokenizer=char_tokenizer(chat_template=None), apply_template=True)


def test_the_difficulty_of_arithmetic_bounds_its_steps() -> None:
    env = ArithmeticEnv(tokenizer=char_tokenizer(), num_envs=4, repeats=2, seed=SEED, difficulty=2, num_train=20)
    assert {json.loads(row["extra"])["num_steps"] for _ in range(10) for row in env.reset().unbind(0)} <= {1, 2}
