"""Dialogs under TorchRL's own loops: token for token those of training, whenever their rows end."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.utils import check_env_specs

from sota_grpo import keys
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs import DialogRows, GSM8KEnv, PromptStream, TaskEnv
from sota_grpo.envs.dialogs import DialogEngine
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import GroupRequest, Sampling, sample_seed
from sota_grpo.rl.table import row_list
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.wrappers import think_again
from sota_grpo.workers.instances import InstanceLost
from tests.tool_rigs import written

pytestmark = pytest.mark.usefixtures("workers_fork")
SEED = random.randrange(1 << 30)
NUM_ENVS, REPEATS, MAX_STEPS = 6, 3, 4
SAMPLING = Sampling(max_tokens=120)
TOKENIZER = load_tokenizer("tiny")
COUNTER = '''
import random


class Counter:
    def reset(self, **row):
        self.total = random.randint(0, 99)
        return f" You begin with {self.total}." if self.total % 2 else None

    def add(self, amount: int) -> int:
        """Add to the total.

        Args:
            amount: What is added.
        """
        self.total += amount + random.randint(0, 9)
        return self.total

    def get_reward(self):
        return float(self.total)
'''


def call(amount: object) -> str:
    return written("add", amount=amount)


def script(request: GroupRequest, sample: int, version: int) -> list[int]:
    """A call, two, one that does not fit, an answer right or wrong, or more than is allowed; by the request alone."""
    rng = random.Random(sample_seed(request.seed, sum(request.prompt_ids), sample))
    texts = [call(rng.randrange(9)), call(1) + call(2), call("no"), "#### 8", f"#### {rng.randrange(9)}", "0" * 200]
    return TOKENIZER(rng.choices(texts, [4, 2, 2, 1, 4, 1])[0])["input_ids"]


class Policy:
    """The engine behind a dialog's turns, as a policy of TorchRL's."""

    def __init__(self, env: TaskEnv) -> None:
        self.seed, self.engine = env.stream.seed, engine(env)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        active = tensordict.get("_step", torch.ones(tensordict.shape, dtype=torch.bool)).flatten()
        for row in itertools.compress(tensordict.unbind(0), active):  # without those that have ended
            (sample,) = next(iter(self.engine.generate([self.request(row)], SAMPLING))).samples
            row.set(keys.RESPONSE_TOKENS, sample.token_ids)
            row.set(("log_probs", "response"), sample.log_probs)
        return tensordict

    def request(self, row: TensorDictBase) -> GroupRequest:
        group, sample, turn = (int(row[key]) for key in (keys.GROUP_ID, keys.SAMPLE_ID, keys.TURN))
        seed, ids = sample_seed(self.seed, group), tuple(row[keys.PROMPT_TOKENS].tolist())
        if turn:
            return GroupRequest(group, ids, 1, sample_seed(seed, sample, turn + 1))
        return GroupRequest(group, ids, 1, seed, first_sample=sample)


def engine(env: TaskEnv) -> ScriptedEngine:
    length = (env.max_prompt_tokens or 4095) + 1
    return ScriptedEngine(script, eos_token_id=TOKENIZER.eos_token_id, log_prob=-0.25, max_model_len=length)


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "counter.py"
    path.write_text(COUNTER)
    return f"{path}:Counter"


@pytest.fixture(params=["environment", "replies"], scope="module")
def env(request: pytest.FixtureRequest, counter: str) -> Iterator[TaskEnv]:
    made = make_env(environment=counter) if request.param == "environment" else make_env()
    yield made
    made.close()


def make_env(**changes: Any) -> TaskEnv:
    task: Any = ArithmeticTask(seed=SEED, num_train=12, num_heldout=4)
    has_tools = bool(changes.keys() & {"environment", "tools"})
    options = {"num_envs": NUM_ENVS, "repeats": REPEATS, "seed": SEED, "max_steps": MAX_STEPS}
    options["max_prompt_tokens"] = 540 if has_tools else 340  # so that some dialogs fill it
    return TaskEnv(task if has_tools else think_again(task), TOKENIZER, **options | changes)


def trained(env: TaskEnv, last_group: int) -> dict[int, list[TensorDictBase]]:
    """The rows of training, by group: of the engine's dialogs with the environment's responder."""
    rules = env._rules
    inner = engine(env)
    dialogs = DialogEngine(inner, {None: replace(rules, max_model_len=inner.max_model_len)})
    stream = PromptStream(env.task.train, seed=env.stream.seed)
    stream.name_apart()
    drawn = stream.draw(last_group + 1 - stream.next_group_id)
    prompts = [Prompt(group, example, REPEATS, sample_seed(env.stream.seed, group)) for group, example in drawn]
    groups = Rollouts(env, dialogs).stream(prompts, SAMPLING)
    return {graded.prompt.group_id: row_list(graded.rows.stack()) for graded in groups}


def values(row: TensorDictBase) -> dict[Any, Any]:
    items = {key: row.get(key) for key in row.keys(True, True)}
    return {key: item.tolist() if isinstance(item, torch.Tensor) else str(item) for key, item in items.items()}


def at_once(env: TaskEnv) -> Iterator[TensorDictBase]:
    while True:
        yield env.rollout(MAX_STEPS, Policy(env), break_when_all_done=True)


def collected(kind: type, **options: Any) -> Callable[[TaskEnv], Iterator[TensorDictBase]]:
    def steps(env: TaskEnv) -> Iterator[TensorDictBase]:
        version = PolicyVersion(version_type="int")
        transformed = TransformedEnv(env, version) if kind is Collector else env
        collector = kind(transformed, policy=Policy(env), **options)
        yield from collector

    return steps


LOOPS = {
    "rollout": at_once,
    "collector": collected(Collector, frames_per_batch=2 * NUM_ENVS, total_frames=-1, use_buffers=False),
    "llm_collector": collected(LLMCollector, dialog_turns_per_batch=NUM_ENVS, flatten_data=True),
    "trajectories": collected(LLMCollector, dialog_turns_per_batch=9, yield_completed_trajectories=True),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_rows_are_those_of_training(env: TaskEnv, loop: str) -> None:
    """Also where rows end at different times, and siblings begin at different times."""
    gathered, actual = DialogRows(TOKENIZER, REPEATS), dict[int, list[TensorDictBase]]()
    for steps in LOOPS[loop](env):
        for row in gathered.add(steps):
            actual.setdefault(int(row[keys.GROUP_ID]), []).append(row)
        if len(actual) >= 6:
            break
    expected = trained(env, max(actual))
    lengths = set()
    for group, rows in actual.items():
        for row, own in zip(rows, expected[group], strict=True):
            if keys.TOKEN_VERSION not in row.keys(True):
                del own[keys.TOKEN_VERSION], own[keys.POLICY_VERSION]
            assert values(row) == values(own)
            lengths.add(int(row[keys.ASSISTANT_MASK].diff().sum()))
    assert len(lengths) > 1, "dialogs of one length would show little"


def test_specs_describe_dialogs(env: TaskEnv) -> None:
    check_env_specs(env, break_when_any_done="both", seed=SEED)


def test_an_answer_makes_the_next_prompt_longer_and_is_no_end(counter: str) -> None:
    env = make_env(environment=counter, num_envs=1, repeats=1)
    row = env.reset()
    before = row[0]["tokens", "prompt"].tolist()
    total = int(TOKENIZER.decode(before).partition("begin with ")[2].partition(".")[0] or -1)
    token_ids = ids_of(call(5))
    row = env.step(act(row, call(5)))["next"]
    assert not row["done"].any()
    assert row["reward"].tolist() == [[0.0]]
    assert row["turn"].tolist() == [1]
    now = row[0]["tokens", "prompt"].tolist()
    assert now[: len(before + token_ids)] == before + token_ids
    between = TOKENIZER.decode(now[len(before + token_ids) :])
    reply = between.removeprefix("\n<|im_start|>tool\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert 5 <= int(reply) - max(total, 0) <= 14 + 99 * (total < 0)
    last = env.step(act(row, "Done."))["next"]
    assert (last["done"].item(), last["terminated"].item(), last["truncated"].item()) == (True, True, False)
    assert last["reward"].item() == float(reply)
    assert json.loads(last[0]["reward_info"])["tool_calls"] == 1
    env.close()


def ids_of(text: str) -> list[int]:
    return [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]


def act(row: TensorDictBase, text: str) -> TensorDictBase:
    """Every row says the text."""
    row = row.exclude("reward")
    for each in row.unbind(0):
        each.set(keys.RESPONSE_TOKENS, torch.tensor(ids_of(text)))
    return row


def test_rows_that_are_reset_alone_keep_to_their_own_sample_of_the_next_prompts() -> None:
    env = make_env()
    steps = env.rollout(24, Policy(env), break_when_any_done=False)
    begin = int(steps[keys.GROUP_ID].min())
    for index, row in enumerate(steps.unbind(0)):
        groups = [group for group, _ in itertools.groupby(int(step[keys.GROUP_ID]) for step in row.unbind(0))]
        assert groups == [begin + 2 * episode + index // REPEATS for episode in range(len(groups))]
        for step in row.unbind(0):
            assert int(step[keys.SAMPLE_ID]) == index % REPEATS
            assert step["query"] == env.stream.example_of(int(step[keys.GROUP_ID])).query
    first = int(env.reset()[keys.GROUP_ID].min())
    assert first > int(steps[keys.GROUP_ID].max()), "a full reset begins together, with prompts that nobody has had"


def test_versions_are_those_of_the_steps() -> None:
    env, version = make_env(), PolicyVersion(version_type="int")
    transformed, policy = TransformedEnv(env, version), Policy(env)

    def newer(tensordict: TensorDictBase) -> TensorDictBase:
        version.increment_version()
        return policy(tensordict)

    rows = DialogRows(TOKENIZER, REPEATS).add(transformed.rollout(MAX_STEPS, newer, break_when_all_done=True))
    assert len(rows) == NUM_ENVS
    for row in rows:
        mask, versions = row[keys.ASSISTANT_MASK], row[keys.TOKEN_VERSION]
        begins = torch.cat([mask[:1], mask[1:] & ~mask[:-1]]).cumsum(0)
        assert versions.tolist() == torch.where(mask, versions[mask].min() + begins - 1, -1).tolist()
        assert row[keys.POLICY_VERSION] == versions[mask].min()


def test_what_is_done_needs_a_reset_and_prompts_may_not_change() -> None:
    env = make_env(max_steps=2)
    row = env.step(act(env.reset(), "#### 7777"))["next"]
    with pytest.raises(ValueError, match=r"tokens\.prompt of row 0 is not"):
        env.step(act(env.reset(), "#### 7777").update(row.select(keys.PROMPT_TOKENS)))
    row = env.step(act(env.reset(), "#### 7777"))["next"]
    last = env.step(act(row, "#### 7777"))["next"]
    assert last["done"].all()
    with pytest.raises(ValueError, match="row 0 is over"):
        env.step(act(last, "#### 7777"))


def test_steps_that_do_not_follow_are_refused_and_those_after_the_end_are_ignored() -> None:
    env = make_env(max_steps=2, num_envs=2, repeats=2)
    first = env.step(act(env.reset(), "#### 7777"))
    last = env.step(act(first["next"].copy(), "#### 7777"))
    with pytest.raises(ValueError, match=r"turn 1 of group \d+, sample 0, does not follow"):
        DialogRows(TOKENIZER).add(last)
    rows = DialogRows(TOKENIZER, group_size=2)
    assert rows.add(first) == []
    retold = last[0].clone().set(keys.PROMPT_TOKENS, last[0]["tokens", "prompt"].flip(0))
    with pytest.raises(ValueError, match="does not begin with the tokens of the dialog so far"):
        rows.add(lazy_stack([retold]))
    assert rows.add(last[:1]) + rows.add(last[:1]) == []
    assert [int(row[keys.SAMPLE_ID]) for row in rows.add(last)] == [0, 1]


def test_tools_are_functions_too_and_end_with_the_environment() -> None:
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: any
        """
        return 2 * number

    env = make_env(tools=[double], num_envs=1, repeats=1)
    row = env.step(act(env.reset(), written("double", number=21)))["next"]
    assert "tool\n42<|im_end|>" in TOKENIZER.decode(row[0]["tokens", "prompt"])
    episode = env._dialogs[0].episode
    instances, key = episode._responder.instances, episode._key
    env.reset()
    with pytest.raises(InstanceLost, match="dropped"):
        instances.call(key, [("double", {"number": 1})]).result()
    env.close()
    with pytest.raises(Exception, match="closed"):
        instances.open({}).result()


def test_named_environments_take_them(counter: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}) + "\n")
    env = GSM8KEnv(
        dataset=str(tmp_path / "rows.jsonl"), tokenizer=TOKENIZER, max_steps=2, environment=counter, num_envs=1
    )
    assert '"add"' in TOKENIZER.decode(env.reset()[0]["tokens", "prompt"])
    env.close()
