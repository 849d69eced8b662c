"""HTTP to servers that drip, talk without end, and redirect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import urllib3

from sota_grpo.errors import UserError
from sota_grpo.http import HttpClient, ServerError, ServerSilent


class Odd(BaseHTTPRequestHandler):
    """Does what the path says."""

    protocol_version = "HTTP/1.1"
    drops: int
    num_asked: int

    def do_GET(self) -> None:
        type(self).num_asked += 1
        if self.path == "/hello":
            self._begin(200, 3)
            self.wfile.write(b"[1]")
        elif self.path == "/long":
            self._begin(200, 1001)
            self.wfile.write(b"x" * 1001)
        elif self.path == "/away":
            self._begin(302, 0, Location="/hello")
        else:
            self._begin(200, 1000)
            self.close_connection = True
            with suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x")
                    type(self).drops += 1
                    time.sleep(0.02)

    def _begin(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def client() -> Iterator[HttpClient]:
    Odd.drops = Odd.num_asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    client = HttpClient(f"http://127.0.0.1:{server.server_address[1]}/", max_bytes=1000)
    yield client
    client.close()
    server.shutdown()
    server.server_close()


def test_an_answer_that_comes_byte_by_byte_has_one_deadline(client: HttpClient) -> None:
    with pytest.raises(ServerSilent, match=r"GET .*/drip was not answered within 0\.2 s") as raised:
        client.get("/drip", timeout_s=0.2)
    assert raised.value.is_late
    assert Odd.drops < 500, "the client has waited for the end"


def test_a_repeated_request_and_each_read_have_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 s the broken connection took 4 s, and the first bytes of the second answer 3 s."""
    now, given = [0.0], []
    monkeypatch.setattr("sota_grpo.http.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = HttpClient("http://127.0.0.1:1")

    def read1(size: int) -> bytes:
        now[0] += 3
        return b"" if now[0] > 7 else b"[]"

    def urlopen(*_: object, timeout: urllib3.Timeout, **__: object) -> SimpleNamespace:
        given.append(timeout.total)
        if len(given) == 1:
            now[0] += 4
            raise urllib3.exceptions.ProtocolError("closed")
        connection = SimpleNamespace(sock=SimpleNamespace(settimeout=given.append))
        of_response = {"status": 200, "headers": {}, "release_conn": lambda: None, "close": lambda: None}
        return SimpleNamespace(read1=read1, connection=connection, **of_response)

    monkeypatch.setattr(client._pool, "urlopen", urlopen)
    assert client.get("/", timeout_s=10.0) == []
    assert given == [10, 6, 3]


def test_an_answer_is_no_longer_than_is_read(client: HttpClient) -> None:
    with pytest.raises(ServerError, match=r"GET .*/long was answered with more than 1000 bytes"):
        client.get("/long", timeout_s=20.0)
    assert client.get("/hello", timeout_s=20.0) == [1], "the connection of the long one is not used again"


@pytest.mark.parametrize("url", ["localhost", "ftp://a", "http://[::1", "http://a:99999", "http://a b:80", "http://"])
def test_what_is_no_address_is_a_sentence(url: str) -> None:
    with pytest.raises(UserError, match=r"^option=.* is not the address of a server; write http://HOST:PORT\.$"):
        HttpClient(url, option="option")


def test_a_redirect_is_not_followed(client: HttpClient) -> None:
    with pytest.raises(ServerError, match="status 302"):
        client.get("/away", timeout_s=20.0)
    assert Odd.num_asked == 1
