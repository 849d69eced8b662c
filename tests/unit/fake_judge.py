"""A judge on loopback that does what a test says: slow, refusing, garbage, gone and back; it counts its answers."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sota_grpo.rewards.judge.questions import Question

_TASK = re.compile(r"^Verdict ([0-9a-f]+): N$", re.MULTILINE)


@dataclass
class Say:
    """One answer."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang_up: bool = False


def chat(said: str, *, finish_reason: str = "stop") -> dict[str, Any]:
    """What a chat endpoint answers."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 7},
    }


def nonce_of(body: Any) -> str:
    """The word of the verdict that a chat requires."""
    return _TASK.findall(body["messages"][-1]["content"])[-1]


def shown(body: Any, name: str) -> str:
    """What a chat shows under ``name``: what is between the lines with the nonce."""
    nonce = nonce_of(body)
    text = body["messages"][-1]["content"]
    return text.split(f"<<< {name} {nonce}\n")[1].split(f"\n>>> {name} {nonce}")[0]


def score_of(text: str) -> int:
    """What the judge thinks of a text."""
    return sum(text.encode()) % 11


def fair(body: Any) -> Say:
    """Scores by :func:`score_of`."""
    if body.get("max_tokens") == 1:
        return Say(chat("ok"))
    return Say(chat(f"So:\nVerdict {nonce_of(body)}: {score_of(shown(body, 'response'))}"))


class FakeJudge:
    """Serves on one port, as often as it is started.

    Attributes:
        answer: of a chat; replaced by tests.
        asked: how often each question came; ``answered``: how often a verdict was sent, by the question's key.
        gate: answers wait for it.
    """

    def __init__(self, key: str | None = None) -> None:
        self.answer: Callable[[Any], Say] = fair
        self.models: Say = Say({"data": [{"id": "judge-1"}]})
        self.others: dict[str, Callable[[Any], Say]] = {}
        self.key = key
        self.bodies: list[tuple[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock, self._open = threading.Lock(), set[socket.socket]()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> FakeJudge:
        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def kill(self) -> None:
        """No client listens any more, and every connection breaks."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        with self._lock:
            broken, self._open = self._open, set()
        for one in broken:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FakeJudge:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.kill()

    def said(self, path: str, body: Any, key: str | None) -> Say:
        if self.key is not None and key != f"Bearer {self.key}":
            return Say({"error": "who are you?"}, 401)
        if path == "/v1/models":
            return self.models
        self.bodies.append((path, body))
        self.asked[Question(path, body, Say).key] += 1
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.gate.wait(60)
            return self.answer(body) if path == "/v1/chat/completions" else self.others[path](body)
        finally:
            with self._lock:
                self._at_once -= 1


def _handler(fake: FakeJudge) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            fake._open.add(self.connection)

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(text) if text else None
            say = fake.said(self.path, body, self.headers.get("Authorization"))
            if say.hang_up:
                self.close_connection = True
                return
            data = say.body if isinstance(say.body, bytes) else json.dumps(say.body).encode()
            try:
                self.send_response(say.status)
                for name, value in {"Content-Length": str(len(data)), **say.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:  # the client is gone, or this server was killed
                self.close_connection = True
                return
            if say.status == 200 and body is not None and self.connection in fake._open:
                fake.answered[Question(self.path, body, Say).key] += 1

        do_GET = do_POST = _serve

    return Handler
