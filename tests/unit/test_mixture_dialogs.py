"""Tasks of a mixture with turns, tools and environments of their own: which requests each gets."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from sota_grpo import keys
from sota_grpo.assembly.build import with_dialogs
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.sampling import open_env, task_of
from sota_grpo.config import Config
from sota_grpo.config.mixture import longest_response, task_configs, turns_of_tasks
from sota_grpo.config.validators import validate
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import TASK, GroupRequest, Sampling
from tests.tool_rigs import written

pytestmark = pytest.mark.usefixtures("workers_fork")
TOOLS = '''
def double(number: int) -> int:
    """Twice as much.

    Args:
        number: Of what.
    """
    return 2 * number
'''
WORLD = '''
class World:
    def reset(self, **row):
        self.said = 0
        assert "mixture/task" not in row and "number" in row, row
        return f" Say {row['number']}."

    def say(self, number: int) -> str:
        """Say it.

        Args:
            number: What is said.
        """
        self.said = number
        return f"You said {number}."

    def get_reward(self) -> float:
        return self.said / 2
'''


@cache
def composed() -> Config:
    return compose("grpo_cpu", ["env.num_heldout=2", "env.max_samples=6", "env.reward_workers=0"])


def mixed_config(folder: Path) -> Config:
    """Tools in one task, an environment in another, a task that asks again, and one of a single turn."""
    (folder / "tools.py").write_text(TOOLS)
    (folder / "world.py").write_text(WORLD)
    for name, ask, truth in (("rows", "Number", None), ("eights", "Twice four, time", "8")):
        rows = [{"prompt": f"{ask} {at}?", "ground_truth": truth or str(at), "number": at} for at in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = copy.deepcopy(composed())
    config.env.mixture = {
        "ask": {"reasoning": True, "max_steps": 2},
        "once": {"dataset": "countdown"},
        "tool": {
            **{"dataset": "table", "dataset_path": str(folder / "eights.jsonl"), "max_steps": 3},
            "tools": f"{folder / 'tools.py'}:double",
        },
        "world": {
            **{"dataset": "table", "dataset_path": str(folder / "rows.jsonl"), "max_steps": 2},
            "environment": f"{folder / 'world.py'}:World",
        },
    }
    validate(config)
    return config


def test_each_task_has_its_own_prompts_responder_and_reward(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    tokenizer, requests = load_tokenizer("tiny"), list[GroupRequest]()
    with ExitStack() as opened:
        env, instances = open_env(config, task_of(config), tokenizer, opened)
        assert set(instances) == {"tool", "world"}
        examples = {example.extra[TASK]: example for example in env.task.train[:4]}
        texts = {name: tokenizer.decode(env.prompt_ids(example)) for name, example in examples.items()}
        assert {name: ("double" in text, '"say"' in text) for name, text in texts.items()} == {
            **{"ask": (False, False), "once": (False, False), "tool": (True, False), "world": (False, True)}
        }
        turns = {
            "tool": [written("double", number=3), written("double", number=4), "#### 8"],
            "world": [written("say", number=1), "Done."],
        }
        turns |= {"ask": ["#### -1", env.task.gold_response(examples["ask"])], "once": ["#### -1", "never"]}

        def script(request: GroupRequest, index: int, version: int) -> list[int]:
            requests.append(request)
            text = tokenizer.decode(request.prompt_ids)
            (name,) = [name for name, example in examples.items() if example.query in text]
            num_turns = text.count("<|im_start|>assistant") - texts[name].count("<|im_start|>assistant")
            return tokenizer(turns[name][num_turns])["input_ids"]

        engine = ScriptedEngine(script, eos_token_id=tokenizer.eos_token_id, max_model_len=2048)
        rollouts = Rollouts(env, with_dialogs(config, env, engine, instances, opened))
        prompts = [Prompt(at, one, env.repeats, at) for at, one in enumerate(examples.values())]
        streamed = rollouts.stream(prompts, Sampling(max_tokens=200))
        graded = {group.prompt.example.extra[TASK]: group for group in streamed}
    once = [request for request in requests if request.num_samples > 1]
    assert {(request.num_samples, request.example) for request in once} == {(8, None)}  # whole, and asked once
    rewards = {name: [float(row[keys.REWARD]) for row in group.rows] for name, group in graded.items()}
    assert rewards == {"ask": [1.0] * 8, "once": [0.0] * 8, "tool": [1.0] * 8, "world": [0.5] * 8}
    info = {name: group.scores[0].info for name, group in graded.items()}
    assert (info["tool"]["tool_calls"], info["world"]["tool_calls"], info["once"]) == (2, 1, {})
    assert graded["world"].scores[0].success
    terms = graded["world"].scores[0].terms
    assert [name for name, value in terms.items() if value is not None] == ["world/environment"]
    transcript = tokenizer.decode(graded["tool"].rows[0][keys.FULL_TOKENS])
    assert all(f"{answer}<|im_end|>" in transcript for answer in (6, 8))
    assert "Say 0." in tokenizer.decode(graded["world"].rows[0][keys.FULL_TOKENS])
    no_dialog = graded["once"].rows[0]
    assert bool(no_dialog[keys.ASSISTANT_MASK][len(no_dialog[keys.PROMPT_TOKENS]) :].all())


def test_what_a_task_does_not_give_is_the_runs_where_it_means_something(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    config.env.max_steps, config.env.tools = 4, "t.py:f"
    config.env.mixture |= {"plain": {"tools": None}, "both": {}}
    for name in ("ask", "once"):
        config.env.mixture[name]["tools"] = None
    validate(config)
    actual = task_configs(config)
    of_tasks = {name: (one.env.tools, one.env.environment) for name, one in actual.items()}
    assert of_tasks == dict.fromkeys(("ask", "once", "plain"), (None, None)) | {
        "tool": (f"{tmp_path / 'tools.py'}:double", None),
        "world": (None, f"{tmp_path / 'world.py'}:World"),
        "both": ("t.py:f", None),
    }
    assert turns_of_tasks(config) == {name: one.env.max_steps for name, one in actual.items()}
    assert turns_of_tasks(config) == {"ask": 2, "both": 4, "once": 4, "plain": 1, "tool": 3, "world": 2}
    assert longest_response(config) == 4 * 64
