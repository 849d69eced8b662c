"""Random agents over the embedded policy: every sampled token is trained, under the log-prob of its sampling."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from sota_grpo import keys
from sota_grpo.engines import EngineOptions, make_engine
from sota_grpo.envs.agents import AgentEngine, Agents
from sota_grpo.envs.gateway import Gateway
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.policy.causal import CausalPolicy, end_token_ids
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.rl.collate import drawn_entries, group_table, pad_rows
from sota_grpo.rl.planner import micro_batches
from sota_grpo.rl.records import GroupRequest, Sampling
from sota_grpo.tasks import make_task
from sota_grpo.workers.instances import Answer, Opened

pytest.importorskip("aiohttp", reason="needs aiohttp (the extra agents)")


def ask(base_url: str, api_key: str, messages: list, **more: object) -> list[dict]:
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return [choice["message"] for choice in json.loads(answer.read())["choices"]]


def wander(rng: random.Random, row: dict, base_url: str, api_key: str) -> float:
    """Continue, retry, fork, change or begin conversations at random."""
    begun = [list(row["prompt"])]
    for _ in range(rng.randrange(1, 6)):
        messages = rng.choice(begun)
        kind = rng.random()
        if kind < 0.15:  # a sub-agent
            messages = [{"role": "system", "content": f"Agent {rng.randrange(3)}."}, *row["prompt"]]
        elif kind < 0.3 and len(messages) > 1:  # a history that was changed
            messages = [*messages[:-1], {"role": "user", "content": "Never mind."}]
        replies = ask(base_url, api_key, messages, n=rng.randrange(1, 3), max_tokens=rng.randrange(3, 13))
        begun += [[*messages, reply, {"role": "user", "content": rng.choice(["Go on.", "Why?"])}] for reply in replies]
    return rng.random()


class InThreads:
    """Agents in threads of this process, where a test needs thousands of them."""

    def __init__(self) -> None:
        self._pool, self._rows = ThreadPoolExecutor(64), {}

    def open(self, row: dict) -> Future:
        opened: Future = Future()
        key = len(self._rows)
        self._rows[key] = row
        opened.set_result(Opened(key, None))
        return opened

    def call(self, key: int, calls: list) -> Future:
        return self._pool.submit(self._run, key, calls[0][1])

    def _run(self, key: int, called: dict) -> list[Answer]:
        return [Answer(json.dumps(wander(random.Random(key), self._rows[key], **called)), is_error=False)]

    def drop(self, key: int) -> None: ...

    def close(self) -> None:
        self._pool.shutdown()


class Counted:
    """An engine that counts the tokens which it samples."""

    def __init__(self, engine) -> None:
        self.engine, self.sampled, self._lock = engine, 0, threading.Lock()

    def submit(self, request, sampling: Sampling) -> Future:
        future = self.engine.submit(request, sampling)
        future.add_done_callback(lambda done: self._add(sum(len(one.token_ids) for one in done.result().samples)))
        return future

    def _add(self, number: int) -> None:
        with self._lock:
            self.sampled += number

    def __getattr__(self, name: str):
        return getattr(self.engine, name)


@pytest.mark.slow
def test_log_probs_of_random_episodes_are_those_that_were_sampled() -> None:
    tokenizer, model = load_tokenizer("tiny"), load_model("tiny")
    options = EngineOptions("tiny", engine="transformers", device="cpu", eos_token_ids=end_token_ids(tokenizer))
    engine = Counted(make_engine(options))
    task = make_task("arithmetic", num_train=100, num_heldout=2)
    grader = SimpleNamespace(scores=None)
    env = PromptSource(task, tokenizer, repeats=4, grader=grader, multi_turn=True)
    policy = CausalPolicy(model)
    trained = 0
    with closing(Gateway(engine, tokenizer)) as gateway, closing(InThreads()) as instances:
        agents = AgentEngine(engine, gateway, env, {None: Agents(instances, 64)})
        requests = [GroupRequest(n, env.prompt_ids(one), 4, n, one) for n, one in enumerate(task.train)]
        for output in agents.generate(requests, Sampling(max_tokens=12)):
            example = task.train[output.group_id]
            drawn = drawn_entries(output.group_id, example, output.prompt_ids)
            rows = group_table(drawn, output.samples, tokenizer)
            for micro in micro_batches(rows.stack(), token_budget=4096):
                padded = pad_rows(micro, pad_token_id=0)
                with torch.no_grad():
                    computed = policy(padded)[keys.LOG_PROBS]
                mask = padded[keys.ASSISTANT_MASK]
                assert float((computed - padded[keys.LOG_PROBS])[mask].abs().max()) < 1e-4
                trained += int(mask.sum())
        assert len(requests) * 4 == 400
        assert trained == engine.sampled > 4_000
