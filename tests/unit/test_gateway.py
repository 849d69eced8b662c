"""The agents' server: real clients of OpenAI and Anthropic, continued ids, branches, and clients that misbehave."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
import urllib3

from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs.gateway import LARGEST_REQUEST, Gateway, Session
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling
from tests.process_rigs import wait_for

pytest.importorskip("aiohttp", reason="needs aiohttp (the extra agents)")

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 5}}</tool_call>'
QUESTION = {"role": "user", "content": "What is 4 + 5?"}
TOKENIZER = load_tokenizer("tiny")


def asks(**options: object) -> dict[str, object]:
    return {"messages": [QUESTION], **options}


class Rig:
    """A gateway over a scripted engine, which says ``texts`` in turn and notes the prompts that it gets."""

    def __init__(self) -> None:
        self.tokenizer, self.prompts, self.texts, self.fails = TOKENIZER, [], [CALL, "It is 9."], False
        ids = {"eos_token_id": self.tokenizer.eos_token_id, "vocab_size": 300, "max_model_len": 600}
        self.engine = ScriptedEngine(self._said, **ids)
        self.gateway, self.stopped = Gateway(self.engine, self.tokenizer, stop=("STOP",)), threading.Event()
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.thread.start()

    def _said(self, request: GroupRequest, sample: int, version: int) -> list[int]:
        self.prompts.append(request.prompt_ids)
        if self.fails:
            raise RuntimeError("the engine is out of order")
        if not self.texts:
            return random.Random(request.seed).choices(range(10, 250), k=20)
        return self.tokenizer(self.texts[(len(self.prompts) - 1) % len(self.texts)])["input_ids"]

    def _drive(self) -> None:
        while not self.stopped.is_set():
            with suppress(RuntimeError):
                if not self.engine.advance():
                    time.sleep(0.001)

    def session(self, max_turns: int = 16) -> Session:
        return self.gateway.open(GroupRequest(0, (), 2, seed=3), 0, Sampling(max_tokens=120), max_turns)

    def post(self, session: Session, body: object, path: str = "/v1/chat/completions", **headers: str):
        headers = {"Authorization": f"Bearer {session.key}", **headers}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return urllib3.request("POST", self.gateway.url + path, body=data, headers=headers, retries=False)

    def close(self) -> None:
        self.gateway.close()
        self.stopped.set()
        self.thread.join()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Rig()) as rig:
        yield rig


def spoken(rig: Rig, session: Session) -> list[str]:
    """The text of each branch of the session's tree."""
    leaves = {*range(len(session.tree))} - {*session.tree._parents}
    return [rig.tokenizer.decode(session.tree.path(leaf)) for leaf in sorted(leaves)]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_continues_its_ids_with_tools(rig, stream) -> None:
    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    session = rig.session()
    client = openai.OpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)

    def ask(messages: list) -> dict:
        if not stream:
            return client.chat.completions.create(model="any", messages=messages, tools=[TOOL]).choices[0].message
        with client.chat.completions.stream(model="any", messages=messages, tools=[TOOL]) as events:
            return events.get_final_completion().choices[0].message

    first = ask([QUESTION])
    (call,) = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 4, "b": 5})
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    second = ask([QUESTION, first.model_dump(exclude_none=True), result])
    assert second.content == "It is 9."
    earlier, later = rig.prompts
    sampled = [*rig.tokenizer(CALL)["input_ids"], rig.tokenizer.eos_token_id]
    assert [*later[: len(earlier) + len(sampled)]] == [*earlier, *sampled]
    assert rig.tokenizer.decode(later[len(earlier) + len(sampled) :]).count("9") == 1
    (text,) = spoken(rig, session)
    assert text.endswith("It is 9.<|im_end|>")
    assert session.tree.num_sampled == len(sampled) + len(rig.tokenizer("It is 9.")["input_ids"]) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_continues_its_ids_with_tools(rig, stream) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client")
    session = rig.session()
    client = anthropic.Anthropic(base_url=session.base_url.removesuffix("/v1"), api_key=session.key, max_retries=0)
    function = TOOL["function"]
    tool = {"name": "add", "description": function["description"], "input_schema": function["parameters"]}
    given = {"model": "any", "max_tokens": 100, "system": "You add.", "tools": [tool]}

    def ask(messages: list):
        if not stream:
            return client.messages.create(messages=messages, **given)
        with client.messages.stream(messages=messages, **given) as events:
            return events.get_final_message()

    first = ask([QUESTION])
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 4, "b": 5})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "9"}]}
    content = [block.model_dump(exclude_none=True) for block in first.content]
    second = ask([QUESTION, {"role": "assistant", "content": content}, result])
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 9.")
    assert rig.prompts[1][: len(rig.prompts[0])] == rig.prompts[0]
    assert len(spoken(rig, session)) == 1


def test_a_retry_several_replies_a_sub_agent_and_a_changed_history_are_branches(rig) -> None:
    session = rig.session()
    rig.texts = ["one", "two", "three", "four", "five"]
    sub = [{"role": "system", "content": "You are a sub-agent."}, QUESTION]
    changed = [QUESTION, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "Go on."}]
    said = [rig.post(session, body).json() for body in (asks(), asks(n=2), {"messages": sub}, {"messages": changed})]
    assert [body["choices"][0]["message"]["content"] for body in said] == ["one", "two", "four", "five"]
    ends = sorted(text.rpartition("assistant\n")[2] for text in spoken(rig, session))
    assert ends == sorted(f"{word}<|im_end|>" for word in rig.texts)
    last = rig.tokenizer.decode(rig.prompts[-1])
    assert ("something else" in last, "one" in last) == (True, False)
    assert session.num_turns == 5
    assert session.tree.num_sampled == sum(len(rig.tokenizer(text)["input_ids"]) + 1 for text in rig.texts)
    assert session.tree.prompt == [*rig.prompts[0]]


def of_parts(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def calls(made: object) -> dict[str, object]:
    return {"messages": [{**QUESTION, "tool_calls": made}]}


NUMBER = [{"function": {"name": 5}}]
REPLY = {"role": "assistant", "content": "It"}
IMAGE = {"type": "image", "text": "hello"}


BAD = {
    "no JSON": (b"{", "not JSON"),
    "no object": ([], "not a JSON object"),
    "no messages": ({}, "messages"),
    "an unknown role": ({"messages": [{"role": "judge", "content": "x"}]}, "'judge'"),
    "an image with a text": (of_parts(IMAGE), "content of the type 'image' is not"),
    "a null as a text": (of_parts({"type": "text", "text": None}), "the text of a part of content is a NoneType"),
    "a part without a type": (of_parts({"text": "hello"}), "a part of content has no type"),
    "a part that is a string": (of_parts("hello"), "a part of content is a str, not a JSON object"),
    "a bias": (asks(logit_bias={"5": 100}), "logit_bias"),
    "a form": (asks(response_format={"type": "json_object"}), "response_format"),
    "another stop string": (asks(stop=["END"]), "inference_model.stop"),
    "a forced call": (asks(tools=[TOOL], tool_choice="required"), "tool_choice"),
    "a tool without a name": (asks(tools=[{"function": {}}]), "name"),
    "a tool whose name is a number": (asks(tools=NUMBER), "not a string"),
    "a call whose name is a number": (calls(NUMBER), "a tool call has no name, or one that is not a string"),
    "a reply at the end": ({"messages": [QUESTION, REPLY]}, "the last message is the assistant's"),
    "a limit of 0": (asks(max_completion_tokens=0), "max_completion_tokens=0 must be"),
    "a stop that is a number": (asks(stop=5), "stop must be"),
    "options of a stream as text": (asks(stream_options="x"), "stream_options"),
    "calls that are a number": (calls(5), "tool_calls is a int, not"),
    "tools that are a number": (asks(tools=5), "tools is a int, not a JSON array"),
    "content that is a number": ({"messages": [{"role": "user", "content": 5}]}, "content is a int, not"),
    "messages without an entry": ({"messages": []}, "messages has no entry"),
    "far too long": ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "too long"),
    "calls far too long": (calls([{"function": {"name": "add", "arguments": {"x": "x" * 40_000}}}]), "too long"),
    "tools far too long": (asks(tools=[{"function": {"name": "add", "description": "x" * 40_000}}]), "too long"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 900}]}, "max_model_len"),
    "too many": (asks(n=99), "env.max_steps"),
    "too large": (b"x" * (LARGEST_REQUEST + 1), "bytes"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with closing(Rig()) as rig:
        yield rig


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_a_sentence_and_loses_nothing(shared, name) -> None:
    session = shared.session()
    body, words = BAD[name]
    answer = shared.post(session, body)
    assert answer.status == (413 if name == "too large" else 400)
    assert words in answer.json()["error"]["message"]
    assert (session.num_turns, len(session.tree)) == (0, 0)
    assert shared.post(session, asks(stop=["STOP"], temperature=0.1)).status == 200
    assert session.num_turns == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_text_in_parts_is_joined_and_any_other_part_is_refused(rig, path) -> None:
    session, texts = rig.session(), [{"type": "text", "text": text} for text in ("What is ", "4 + 5?")]
    assert rig.post(session, of_parts(*texts) | {"max_tokens": 9}, path).status == 200
    assert "What is 4 + 5?" in rig.tokenizer.decode(rig.prompts[0])
    for wrong in (of_parts(*texts, IMAGE), {"messages": [], "system": "Add."}):
        assert rig.post(session, wrong | {"max_tokens": 9}, path).status == 400
    assert len(rig.prompts) == 1


def test_a_reply_ends_before_its_stop_string_and_is_continued_with_all_its_ids(rig) -> None:
    session = rig.session()
    rig.texts = ["Nine STOP more", "Yes."]
    said = rig.post(session, asks()).json()["choices"][0]["message"]
    assert said["content"] == "Nine "
    assert rig.post(session, {"messages": [QUESTION, said, {"role": "user", "content": "Sure?"}]}).status == 200
    assert "STOP more" in rig.tokenizer.decode(rig.prompts[1])


def test_a_call_of_a_known_tool_is_a_call_whether_its_arguments_fit_and_any_other_is_text(rig) -> None:
    needs = {**TOOL["function"]["parameters"], "required": ["a", "b"]}
    tool = {**TOOL, "function": {**TOOL["function"], "parameters": needs}}

    def said(text: str) -> dict:
        rig.texts = [text]
        return rig.post(session, asks(tools=[tool])).json()["choices"][0]["message"]

    session = rig.session()
    other = said(CALL.replace("add", "multiply"))
    assert "tool_calls" not in other
    assert '"a": 4' in other["content"]
    for arguments in ({}, {"a": "four"}):
        made = said(f'<tool_call>{{"name": "add", "arguments": {json.dumps(arguments)}}}</tool_call>')
        assert [json.loads(call["function"]["arguments"]) for call in made["tool_calls"]] == [arguments]
    stopped = said(f"I add. {CALL} STOP")
    assert (stopped["content"].strip(), len(stopped["tool_calls"])) == ("I add.", 1)


def test_only_the_key_of_an_open_session_is_answered(rig) -> None:
    session, other = rig.session(), rig.session()
    assert rig.post(session, asks(), Authorization="Bearer no").status == 401
    session.close()
    answer = rig.post(session, asks())
    assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert rig.post(other, asks()).status == 200
    assert rig.post(other, asks(), "/v1/other").status == 404
    key = {"Authorization": f"Bearer {other.key}"}
    models, named = (urllib3.request("GET", f"{other.base_url}/models{path}", headers=key) for path in ("", "/a/b"))
    assert models.json()["data"][0]["id"] == "policy"
    assert named.json()["id"] == "a/b"


def test_an_error_of_the_engine_is_an_answer(rig) -> None:
    session, rig.fails = rig.session(), True
    answer = rig.post(session, asks())
    assert (answer.status, answer.json()["error"]["type"]) == (500, "server_error")
    assert len(session.tree) == 0
    assert session.failure is not None


def test_requests_that_a_client_gave_up_are_no_responses(rig) -> None:
    """Clients retry by themselves: each retry samples other tokens, and only answers count for the limit."""
    session, asked, rig.texts = rig.session(max_turns=2), [], []
    rig.engine._duration_s = lambda request: asked.append(request.seed) or (0.1 if len(asked) > 2 else 600.0)
    url, headers = f"{rig.gateway.url}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
    for _ in range(2):
        with pytest.raises(urllib3.exceptions.TimeoutError):
            urllib3.request("POST", url, json=asks(), headers=headers, retries=False, timeout=0.3)
        wait_for(lambda: session.num_turns == 0)
    for _ in range(2):
        assert rig.post(session, asks()).status == 200
    assert (session.is_full, session.num_turns, session.failure) == (True, 2, None)
    assert len({*asked}) == 4
    impatient = rig.session(max_turns=1)
    impatient._num_requested = 4  # as of clients that left
    answer = rig.post(impatient, asks())
    assert (answer.status, "gave up 4 responses" in answer.json()["error"]["message"]) == (400, True)
    assert impatient.num_turns == 0


def test_a_response_that_comes_after_its_session_is_none(rig) -> None:
    """An engine in workers cannot cancel it, so it comes; the sample's record does not depend on when."""
    session, late = rig.session(max_turns=1), Future()
    rig.gateway.engine = SimpleNamespace(submit=lambda request, sampling: late)
    late.set_running_or_notify_cancel()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rig.post, session, asks())
        wait_for(lambda: session._num_pending == 1)
        session.close()
        assert (session.num_turns, session.is_full) == (0, False)
        sample = Sample(torch.tensor([5]), torch.zeros(1), torch.zeros(1), False)
        late.set_result(GroupOutput(0, (sample,), None))
        assert answer.result(60).status == 401
    assert (session.num_turns, session.is_full) == (0, False)


def test_a_client_that_does_not_read_holds_up_no_other(rig) -> None:
    session, other = rig.session(), rig.session()
    address, body = urlsplit(rig.gateway.url), json.dumps(asks()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    with socket.create_connection((address.hostname, address.port)) as silent:
        silent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        half = socket.create_connection((address.hostname, address.port))  # sends half a request
        half.sendall(head.encode())
        assert rig.post(other, asks()).status == 200
        half.close()
    rig.gateway.close()
    assert not rig.gateway.sessions


def test_a_seed_decides_what_a_request_samples() -> None:
    def sampled(index: int) -> list[int]:
        with closing(Rig()) as rig:
            rig.texts = []  # random tokens of the request's seed
            session = rig.gateway.open(GroupRequest(0, (), 2, seed=3), index, Sampling(max_tokens=20), 4)
            for _ in range(2):
                assert rig.post(session, asks()).status == 200
            sample = session.tree.sample(0)
            return sample.token_ids[sample.assistant_mask].tolist()

    assert sampled(0) == sampled(0) != sampled(1)
    assert len({*sampled(0)}) > 20
