"""A judge that is a real vLLM server on CPU: reward models give what transformers gives."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import urllib3
from transformers import AutoConfig, AutoModelForSequenceClassification

import sota_grpo
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rewards.judge.client import JudgeClient, JudgedGrader, Rules, VerdictCache
from sota_grpo.rewards.judge.questions import Endpoint
from sota_grpo.rl.records import Example, Score
from tests.process_rigs import wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]
TINY = Path(sota_grpo.__file__).parent / "assets" / "tiny"
EXAMPLE = Example("2 + 2?", "4")


class Sums:
    term_weights: Mapping[str, float] = {}

    def messages(self, example: Example) -> list[dict[str, str]]:
        return [{"role": "user", "content": example.query}]


@contextmanager
def served(model: str, log_path: Path, *arguments: str) -> Iterator[str]:
    """The url of a vLLM server with ``model``, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", model, "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", *arguments]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, log_path.read_text()[-3000:]
        with suppress(urllib3.exceptions.HTTPError):
            return urllib3.request("GET", f"{url}/health", retries=False, timeout=5.0).status == 200
        return False

    with log_path.open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(answers, 300.0)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def grader_of(client: JudgeClient) -> JudgedGrader:
    own = LocalGrader(lambda text, example: Score({}, False), ())
    return JudgedGrader(own, client, Sums(), {None: Rules(rubric="Right?")})


def values(grader: JudgedGrader, texts: list[str]) -> list[float]:
    scores = grader.scores([(text, EXAMPLE) for text in texts]).result(300)
    assert [score.error for score in scores] == [None] * len(texts)
    return [score.terms["judge"] for score in scores]


def test_a_reward_model_gives_what_transformers_gives(tmp_path: Path) -> None:
    """Of one label; of several the last counts: tests/unit/test_judge.py."""
    torch.manual_seed(random.randrange(1 << 20))
    config = AutoConfig.from_pretrained(TINY)
    config.num_labels = 1
    model, tokenizer = AutoModelForSequenceClassification.from_config(config).eval(), load_tokenizer("tiny")
    model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    name, texts = str(tmp_path / "rm"), [f"It is {random.random()}." for _ in range(6)]

    def logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    def as_turns(text: str) -> Sequence[int]:
        turns = [{"role": "user", "content": EXAMPLE.query}, {"role": "assistant", "content": text}]
        return tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]

    def as_pair(text: str) -> Sequence[int]:
        return tokenizer(f"user: {EXAMPLE.query}", text)["input_ids"]

    with served(name, tmp_path / "log", "--runner", "pooling", "--no-enable-prefix-caching") as url:
        for kind in ("classify", "score"):
            client = JudgeClient(url, Endpoint(kind, ""), VerdictCache(None))
            client.connect()
            assert not client.endpoint.as_text
            grader = grader_of(client)
            ids = as_turns if kind == "classify" else as_pair
            actual = values(grader, texts)
            grader.close()
            assert actual == pytest.approx([float(logits(ids(text)).sigmoid()[0]) for text in texts], abs=1e-4)


def test_a_small_chat_model_is_asked_and_what_it_says_is_kept(tmp_path: Path) -> None:
    """The embedded policy gives no verdict in the form requested, mostly; then the response is an error."""
    with served(str(TINY), tmp_path / "log", "--served-model-name", "tiny") as url:
        endpoint = Endpoint("chat", "", extra_body={"max_tokens": 48})
        client = JudgeClient(url, endpoint, VerdictCache(tmp_path / "judge.jsonl"))
        client.connect()
        assert client.endpoint.model == "tiny"
        grader, pairs = grader_of(client), [("4", EXAMPLE), ("Five, I think.", EXAMPLE)]
        first = grader.scores(pairs).result(300)
        for score in first:
            assert (score.error or "Unreadable: ").startswith("Unreadable: ")
            assert score.error or 0 <= score.terms["judge"] <= 1
        paid = grader.metrics()["judge/requests"]
        assert 2 <= paid <= 4
        assert grader.scores(pairs).result(300) == first
        assert grader.metrics()["judge/requests"] == 0
        grader.close()
