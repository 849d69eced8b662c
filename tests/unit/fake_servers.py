"""Small HTTP servers that speak what the real inference servers speak, with switches for what can go wrong."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CONTEXT = 64
Answer = tuple[int, Any]


class FakeServer:
    """What both kinds have in common: weights with a label, pausing, requests that can be held back.

    Args:
        key: bearer token that every request must bring; None: none.
    """

    def __init__(self, key: str | None = None):
        self.key = key
        self.label = "default"
        self.weights: dict[str, torch.Tensor] = {}
        self.paused = False
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Callable[[Any], Answer]] = {  # by path; replaced by tests
            "/v1/models": lambda _: (200, {"data": [{"max_model_len": CONTEXT}]}),
            "/update_weight_version": self._relabel,
        }
        self.hang_up_once: set[str] = set()
        self.held: dict[int, threading.Event] = {}  # by first prompt token: sampling waits for the event
        self.num_sampling = 0  # samples held back, their first half done
        self.aborted: set[str] = set()
        self.url = ""

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def load(self, folder: str) -> None:
        self.weights = load_file(Path(folder) / "model.safetensors")

    def _relabel(self, body: Any) -> Answer:
        self.label = body["new_version"]
        return 200, {"success": True}

    def sample(self, prompt: list[int], seed: int, room: int, name: str) -> tuple[list[int], list[dict[str, Any]]]:
        """``room`` tokens from ``seed``; when held back, the second half comes from the weights of afterwards."""
        before = self.label
        tokens = random.Random(seed).choices(range(10, 1000), k=room)
        if prompt[0] not in self.held:
            return tokens, [{"version": before, "start": 0, "end": room}]
        self.num_sampling += 1
        while not self.held[prompt[0]].wait(0.01):
            if name in self.aborted:
                raise InterruptedError
        half = room // 2
        spans = [{"version": before, "start": 0, "end": half}, {"version": self.label, "start": half, "end": room}]
        return tokens, spans

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class FakeVLLM(FakeServer):
    """Serves ``/inference/v1/generate`` and the control endpoints that vLLM has in dev mode."""

    def __init__(self, key: str | None = None):
        super().__init__(key)
        self.trial_log_prob = 0.0
        self.sums: dict[str, list[Any]] | None = None  # of a server that has the extension for them
        self.answers |= {
            "/weight_info": lambda _: (200, {"weight_version": self.label}),
            "/resume": lambda _: self._pause(False),
            "/pause?mode=keep&clear_cache=false": lambda _: self._pause(True),
            "/collective_rpc": self._collective_rpc,
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
        }

    def _pause(self, paused: bool) -> Answer:
        self.paused = paused
        return 200, {"status": "ok"}

    def _collective_rpc(self, body: Any) -> Answer:
        if body["method"] == "weight_sums":
            return (200, {"results": [self.sums]}) if self.sums else (500, {"error": "no such method"})
        assert body["method"] == "reload_weights"
        assert self.paused
        self.load(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def _abort(self, body: Any) -> Answer:
        self.aborted.update(name.removeprefix("generate-tokens-") for name in body["request_ids"])
        return 200, None

    def _generate(self, body: Any) -> Answer:
        params = body["sampling_params"]
        if params.get("top_k") == 1:  # the trial
            return 200, {"choices": [vllm_choice(0, [7], [self.trial_log_prob], [], "length")]}
        choices, name = [], body["request_id"]
        for index in range(params["n"]):
            try:
                tokens, spans = self.sample(body["token_ids"], params["seed"] + index, params["max_tokens"], name)
            except InterruptedError:
                return 200, {"choices": [vllm_choice(index, [], [], [], "abort")]}
            log_probs = [-token / 1000 for token in tokens]
            choices.append(vllm_choice(index, tokens, log_probs, spans, "length" if index % 2 else "stop"))
        return 200, {"choices": choices[::-1]}


class FakeSGLang(FakeServer):
    """Serves SGLang's documented ``/generate`` and weight endpoints; ``spans=False`` is an older one."""

    def __init__(self, key: str | None = None, *, spans: bool = True):
        super().__init__(key)
        self.spans = spans
        self.answers |= {
            "/health_generate": lambda _: (200, None),
            "/pause_generation": lambda _: (200, {"status": "ok"}),
            "/continue_generation": lambda _: (200, {"status": "ok"}),
            "/update_weights_from_disk": self._update,
            "/generate": self._generate,
            "/abort_request": self._abort,
        }

    def _update(self, body: Any) -> Answer:
        self.load(body["model_path"])
        self.label = body["weight_version"]
        return 200, {"success": True, "message": "", "num_paused_requests": 0}

    def _abort(self, body: Any) -> Answer:
        self.aborted.add(body["rid"])
        return 200, None

    def _generate(self, body: Any) -> Answer:
        answers = []
        for name, prompt, params in zip(body["rid"], body["input_ids"], body["sampling_params"]):
            try:
                tokens, spans = self.sample(prompt, params["sampling_seed"], params["max_new_tokens"], name)
            except InterruptedError:
                return 200, [{"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}]
            info = {
                "finish_reason": {"type": "length", "length": len(tokens)},
                "output_token_logprobs": [[-token / 1000, token, None] for token in tokens],
                "weight_version": self.label,
            }
            answers.append({"meta_info": info | ({"weight_versions": spans} if self.spans else {})})
        return 200, answers


def vllm_choice(
    index: int, tokens: list[int], log_probs: list[float], spans: list[dict[str, Any]], reason: str
) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": log_prob} for token, log_prob in zip(tokens, log_probs)]
    choice = {"index": index, "token_ids": tokens, "logprobs": {"content": content}}
    return choice | {"weight_versions": spans, "finish_reason": reason}


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(text) if text else None
            if self.path in fake.hang_up_once:
                fake.hang_up_once.discard(self.path)
                self.close_connection = True
                return
            fake.calls.append((self.path, body))
            known = fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}"
            answer = fake.answers.get(self.path, lambda _: (404, {"detail": "Not Found"}))
            status, reply = answer(body) if known else (401, {"error": "Unauthorized"})
            data = b"" if reply is None else json.dumps(reply).encode()
            try:
                self.send_response(status)
                if data:
                    self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:  # the client did not wait
                self.close_connection = True

        do_GET = do_POST = _serve

    return Handler
