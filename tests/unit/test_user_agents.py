"""Agents of users in worker processes: their rewards, their errors, and what becomes of their samples."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import urllib3

from sota_grpo import keys
from sota_grpo.assembly.compose import compose, needs_consent
from sota_grpo.envs.agents import AgentEngine, Agents
from sota_grpo.envs.gateway import Gateway, SessionQueue
from sota_grpo.envs.prompts import Prompt, PromptSource, Rollouts
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rl.records import GroupOutput, GroupRequest, SampledText, Sampling
from sota_grpo.rl.task import scorer_of
from sota_grpo.tasks import make_task
from sota_grpo.tasks.agents import AGENT, Agent
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.tasks.wrappers import with_tools
from sota_grpo.workers.instances import Instances
from tests.process_rigs import is_gone, wait_for
from tests.unit.test_gateway import Rig

pytest.importorskip("aiohttp", reason="needs aiohttp (the extra agents)")

pytestmark = pytest.mark.usefixtures("workers_fork")
CODE = """
import asyncio, json, os, sys, time, urllib.request

def ask(url, key, messages, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers))
    return json.loads(answer.read())["choices"][0]["message"]

def run(row, base_url, api_key):
    messages = list(row["prompt"])
    for _ in range(2):
        messages.append(ask(base_url, api_key, messages))
        messages.append({"role": "user", "content": "Again."})
    return {"reward": 0.5, "asked": len(messages)}

async def later(row, base_url, api_key):
    await asyncio.sleep(0.01)
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    return 2

def careful(row, base_url, api_key):
    try:
        ask(base_url, api_key, row["prompt"])
    except Exception:
        return 0.0

def fails(row, base_url, api_key):
    ask(base_url, api_key, row["prompt"])
    raise KeyError("no such answer")

def silent(row, base_url, api_key):
    return 1.0

def wordy(row, base_url, api_key):
    return "well done"

def huge(row, base_url, api_key):
    return 10**400

def rich(row, base_url, api_key):
    import numpy
    entries = {"log": "x" * 70_000, "hops": numpy.int64(3), "loss": float("nan"), "acc": numpy.bool_(False)}
    return {**entries, "reward": numpy.float32(0.5)}

async def rich_later(row, base_url, api_key):
    return rich(row, base_url, api_key)

def hangs(row, base_url, api_key):
    ask(base_url, api_key, row["prompt"])
    time.sleep(3600)

def dies(row, base_url, api_key):
    os._exit(3)

if __name__ == "__main__":
    row = json.load(open(sys.argv[-1]))
    print("asking")
    ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["prompt"])
    print(json.dumps({"reward": 0.25}))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "my_agent.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def run(file: Path) -> Iterator[Callable[..., GroupOutput]]:
    """Run an agent on the first example, ``num_samples`` times."""
    rig = Rig()
    rig.texts, opened = ["It is 9.", "No, 8."], []
    task = make_task("arithmetic", num_train=4, num_heldout=2)
    env = PromptSource(task, rig.tokenizer, repeats=2, grader=LocalGrader(scorer_of(task), task.term_weights))

    def run_agent(name: str, num_samples: int = 1, timeout_s: float = 20.0, max_turns: int = 8) -> GroupOutput:
        value = name if " " in name else f"{file}:{name}"
        instances = Instances(instance_spec(value, AGENT), timeout_s=timeout_s, per_worker=2)
        opened.append(instances)
        instances.wait_ready()
        engine = AgentEngine(rig.engine, rig.gateway, env, {None: Agents(instances, max_turns)})
        request = GroupRequest(0, (), num_samples, seed=1, example=task.train[0])
        return engine.submit(request, Sampling(max_tokens=30)).result(timeout=120)

    run_agent.rig, run_agent.env, run_agent.task = rig, env, task  # type: ignore[attr-defined]
    yield run_agent
    for instances in opened:
        instances.close()
    rig.close()


def test_an_agents_requests_are_one_sample_with_its_reward(run) -> None:
    output = run("run", num_samples=2)
    for sample in output.samples:
        assert sample.record["reward"] == 0.5
        assert sample.record["info"] == {"asked": 5}
        assert [message["role"] for message in sample.record["messages"]] == ["user", "assistant"] * 2
        assert int(sample.assistant_mask.sum()) in range(8, 40)
        first = len(output.prompt_ids) - 1
        assert sample.parents.tolist() == [*range(first, first + len(sample.parents))]
    assert output.prompt_ids == run.env.prompt_ids(run.task.train[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", "no such answer"),
        ("wordy", "no finite reward"),
        ("huge", "no finite reward"),
        ("hangs", "TimeoutError"),
        ("dies", "WorkerDied"),
        ("false now", "status 1"),
        ("run", "400"),  # too many requests
    ],
)
def test_an_agent_that_fails_has_an_error_and_no_reward(run, name, words) -> None:
    (sample,) = run(name, timeout_s=3.0 if name == "hangs" else 60.0, max_turns=1).samples
    assert words in sample.record["error"]
    assert sample.record["reward"] is None
    assert name != "run" or int(sample.assistant_mask.sum()) > 0
    assert not run.rig.gateway.sessions


PRINTED = "import json; print(json.dumps(dict(log='x' * 70_000, hops=3, loss=float('nan'), acc=False, reward=0.5)))"
# arrays' numbers are numbers, NaN is null; a text without room is left out
KEPT = {"hops": 3, "loss": None, "acc": False}


@pytest.mark.parametrize(
    ("name", "reward", "info"),
    [
        *(("later", 2.0, None), ("command", 0.25, None), ("silent", 1.0, None), ("rich", 0.5, KEPT)),
        ("sh -c 'sleep 600 & echo 0.75'", 0.75, None),  # its child in the background holds its output
        *(("rich_later", 0.5, KEPT), (shlex.join([sys.executable, "-c", PRINTED]), 0.5, KEPT)),
    ],
    ids=["later", "command", "silent", "rich", "leaves_a_child", "rich_later", "rich_command"],
)
def test_an_agent_may_be_async_a_command_make_no_request_or_return_any_entries(run, file, name, reward, info) -> None:
    (sample,) = run(f"{sys.executable} {file}" if name == "command" else name).samples
    assert (sample.record["reward"], sample.record["error"], sample.record.get("info")) == (reward, None, info)
    assert (len(sample.token_ids) == 0) == (name not in ("later", "command"))


def test_the_server_is_asked_without_a_proxy_however_many_episodes_there_are(monkeypatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")
    for _ in range(3):
        Agent(f"{sys.executable} -c pass")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,127.0.0.1"


def test_a_command_that_has_ended_is_not_killed_later(monkeypatch) -> None:
    """Its number may be another process's by then."""
    agent, killed = Agent(f"{sys.executable} -c 'print(1)'"), []
    assert agent.call("run", {"base_url": "http://127.0.0.1:1/v1", "api_key": "k"}) == 1
    monkeypatch.setattr(os, "killpg", lambda *what: killed.append(what))
    agent.kill()
    assert killed == []


def test_the_engines_failure_is_not_the_agents_reward(run) -> None:
    run.rig.fails = True
    with pytest.raises(RuntimeError, match="out of order"):
        run("careful")


def test_a_command_ends_with_all_that_it_started_when_its_episode_is_dropped(run, tmp_path) -> None:
    pids = tmp_path / "pids"
    program = "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
    program += f"print(os.getpid(), child.pid, file=open({str(pids)!r}, 'w')); time.sleep(600)"
    spec = instance_spec(shlex.join([sys.executable, "-c", program]), AGENT)
    with closing(Instances(spec, timeout_s=600.0)) as instances:
        instances.wait_ready()
        engine = AgentEngine(run.rig.engine, run.rig.gateway, run.env, {None: Agents(instances, 8)})
        future = engine.submit(GroupRequest(0, (), 1, seed=1, example=run.task.train[0]), Sampling(max_tokens=30))
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        assert future.cancel()
        for pid in map(int, pids.read_text().split()):
            wait_for(lambda pid=pid: is_gone(pid))


def test_rows_of_agents_are_graded_by_their_rewards(run, file) -> None:
    task = with_tools(run.task, has_reward=True, adds_task_terms=False)
    grader = LocalGrader(scorer_of(task), task.term_weights)
    env = PromptSource(task, run.rig.tokenizer, repeats=2, grader=grader, multi_turn=True)
    with closing(Instances(instance_spec(f"{file}:run", AGENT), timeout_s=60.0)) as instances:
        instances.wait_ready()
        engine = AgentEngine(run.rig.engine, run.rig.gateway, env, {None: Agents(instances, 8)})
        (graded,) = Rollouts(env, engine).stream([Prompt(0, task.train[0], 2, 5)], Sampling(max_tokens=30))
    assert graded.rows.get(keys.REWARD).flatten().tolist() == [0.5, 0.5]
    assert graded.rows.has(keys.PARENTS)
    assert [score.success for score in graded.scores] == [True, True]


@pytest.mark.parametrize("name", ["openai_agent", "anthropic_agent"])
def test_the_tool_of_an_example_answers_whatever_a_policy_writes(name: str) -> None:
    members = runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}.py"))
    assert [members["calculate"](one) for one in ("7 * 7", 84)] == ["49", "84"]
    assert all(members["calculate"](one).startswith("error") for one in (None, ["7"], {"a": 1}, "7 ** 7", "7 +"))


def test_what_an_agent_returns_besides_its_reward_is_information_of_its_score(run) -> None:
    """Numbers there are metrics; a verdict decides success, as one of a reward function does."""
    for adds_task_terms in (False, True):
        task = with_tools(run.task, has_reward=True, adds_task_terms=adds_task_terms)
        for info, success in (({"hops": 3}, True), ({"hops": 3, "acc": False}, False), ({"hops": 3, "acc": 1}, True)):
            record = {"reward": 0.5, "error": None, "info": info, "ended": "answer", "requests": 2}
            text = run.task.gold_response(run.task.train[0])
            score = task.score(SampledText(text, (), record), run.task.train[0])
            assert (score.success, score.info["hops"], score.info["requests"]) == (success, 3, 2)


def test_outside_programs_run_episodes_and_end_them_with_a_reward(run) -> None:
    rig, queue = run.rig, SessionQueue(2.0, "outside")
    with closing(Gateway(rig.engine, rig.tokenizer, queue=queue)) as gateway:
        engine = AgentEngine(rig.engine, gateway, run.env, {None: Agents(queue, 8)})

        def post(path: str, key: str, body: object = None) -> urllib3.BaseHTTPResponse:
            headers = {"Authorization": f"Bearer {key}"}
            return urllib3.request("POST", gateway.url + path, json=body or {}, headers=headers, retries=False)

        assert post("/v1/sessions", "wrong").status == 401
        request = GroupRequest(0, (), 3, seed=1, example=run.task.train[0])
        future = engine.submit(request, Sampling(max_tokens=30))
        for reward in (0.5, {"reward": 2, "steps": 3, "loss": float("nan")}, None):
            episode = post("/v1/sessions", "outside").json()
            assert episode["base_url"] == f"{gateway.url}/v1"
            messages = {"messages": episode["row"]["prompt"]}
            assert post("/v1/chat/completions", episode["api_key"], messages).status == 200
            if reward is not None:  # the last program is silent
                assert post("/v1/sessions/end", episode["api_key"], reward).status == 200
        records = [sample.record for sample in future.result(timeout=60).samples]
    assert [record["reward"] for record in records] == [0.5, 2.0, None]
    assert "TimeoutError" in records[2]["error"]
    assert records[1]["info"] == {"steps": 3, "loss": None}


def test_a_saved_config_runs_its_agent_with_consent_only() -> None:
    config = compose("grpo_cpu", [])
    for agent, asks in (("python my_agent.py", "run the command python my_agent.py"), ("a.py:run", "run a.py")):
        config.env.agent = agent
        assert needs_consent(config) == {"env.agent": asks}
