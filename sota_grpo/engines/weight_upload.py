"""Weights for a vLLM server on another machine: a file in buckets over HTTP, and what takes them beside the server.

The file is cut into buckets of equal size. Each travels by itself, with its SHA-256, and is asked for again where it
came damaged or not at all; so what a broken link costs is a bucket. The server goes on sampling meanwhile. When all are
there, the file gets the name under which vLLM reads it, and :mod:`sota_grpo.engines.vllm_server` has it loaded as if it
lay on this machine.

::

    GET    /sota_grpo/weights                        what the server computes in, and how large buckets are
    POST   /sota_grpo/weights/SESSION/NUMBER         begin a push of so many bytes
    PUT    /sota_grpo/weights/SESSION/NUMBER/INDEX   one bucket, its digest in the header
    POST   /sota_grpo/weights/SESSION/NUMBER/whole   all are there: the folder to load from
    DELETE /sota_grpo/weights/SESSION/NUMBER         it is loaded, or given up

All may be repeated. This module needs nothing that a vLLM server has not (``pip install --no-deps sota-grpo``).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.engines.inference_server import refused_key
from sota_grpo.engines.vllm_server import RequireKey
from sota_grpo.http import HttpClient, ServerError, ServerSilent

logger = logging.getLogger(__name__)
PATH = "/sota_grpo/weights"
DIGEST = "x-sha256"
BUCKET_BYTES = 16 << 20
WEIGHT_FILE = "model.safetensors"  # as a model's folder has it
_UNFINISHED = "model.part"
_MEMORY = Path("/dev/shm")
_FOLDER = "sota-grpo-pushed-"
_DTYPES = ("float32", "bfloat16", "float16")
_DAMAGED, _NO_ROOM = 422, 507
_PASSES = (_DAMAGED, 502, 503, 504)  # what may be over at the next attempt; a proxy's answers too
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before something is sent again


@dataclass(frozen=True)
class WeightUpload:
    """The trainer's end.

    Args:
        client: of the server.
        session: names this trainer's pushes; never used before.
        bucket_bytes: as the server wants them.
        dtype: in which the server computes, by torch's name.
        timeout_s: longest wait for the answer to one bucket.
        keep_s: a push of which the server hears nothing for so long is deleted there.
    """

    client: HttpClient
    session: str
    bucket_bytes: int
    dtype: str
    timeout_s: float
    keep_s: float

    @classmethod
    def to(cls, client: HttpClient, session: str, *, timeout_s: float, keep_s: float) -> WeightUpload | None:
        """None where the server was started without :class:`ReceiveWeights`.

        Raises:
            UserError: the key is not the server's.
            ServerError: it has another fault.
        """
        try:
            said = client.get(PATH, timeout_s=timeout_s)
        except ServerError as error:
            if error.status == 401:
                raise refused_key(client) from error
            if error.status not in (404, 405):
                raise
            return None
        match said:
            case {"dtype": str(dtype), "bucket_bytes": int(bucket_bytes)} if bucket_bytes > 0:
                pass
            case _:
                return None  # somebody else answers at this path
        if dtype not in _DTYPES:
            raise ServerError(f"The server at {client.url} computes in {dtype}, which no weights are sent in.")
        return cls(client, session, bucket_bytes, dtype, timeout_s, keep_s)

    def send(self, file: Path, number: int) -> str:
        """Bring a safetensors file to the server's machine; the folder in which it lies there.

        Args:
            file: its contents.
            number: of the push, above those of this session before.

        Raises:
            ServerError: no room there, a later push has begun, or something did not arrive in five attempts.
        """
        num_bytes, push = file.stat().st_size, self._push(number)
        self._insist(self.client.post, push, {"num_bytes": num_bytes, "keep_s": self.keep_s})
        with file.open("rb") as opened:
            for index in range(num_buckets(num_bytes, self.bucket_bytes)):
                data = opened.read(self.bucket_bytes)
                headers = {DIGEST: hashlib.sha256(data).hexdigest()}
                self._insist(self.client.put, f"{push}/{index}", data, headers=headers)
        return str(self._insist(self.client.post, f"{push}/whole")["folder"])

    def forget(self, number: int) -> None:
        """Have the server delete what is there of a push; it does so by itself, later, where it is not reached."""
        with suppress(ServerError):
            self.client.delete(self._push(number), timeout_s=self.timeout_s)

    def _push(self, number: int) -> str:
        return f"{PATH}/{self.session}/{number}"

    def _insist(self, ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for pause_s in _PAUSES_S:
            try:
                return ask(*args, **options, timeout_s=self.timeout_s)
            except ServerError as error:
                if not (isinstance(error, ServerSilent) or error.status in _PASSES):
                    raise
                logger.warning("Sending weights is tried again in %g s: %s", pause_s, error)
                time.sleep(pause_s)
        return ask(*args, **options, timeout_s=self.timeout_s)


def num_buckets(num_bytes: int, bucket_bytes: int) -> int:
    """How many a file is cut into.

    >>> num_buckets(32, 16), num_buckets(33, 16)
    (2, 3)
    """
    return -(-num_bytes // bucket_bytes)


class Refused(Exception):
    """What a request is answered with, instead of being done."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class ReceivedPush:
    """One push as it arrives: a folder that only this user can read, in shared memory where that has room.

    The folder is locked for as long as this process lives, so that another one can tell what a killed server left.

    Args:
        num_bytes: of the whole file.

    Raises:
        OSError: no room.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.keeper: asyncio.TimerHandle | None = None  # deletes it when nothing is heard of it
        self._missing = set(range(num_buckets(num_bytes, BUCKET_BYTES)))
        for base in {_MEMORY, Path(tempfile.gettempdir())}:
            _delete_what_the_dead_left(base)
        memory = _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > num_bytes else None
        base = memory or Path(tempfile.gettempdir())
        if shutil.disk_usage(base).free <= num_bytes:
            raise OSError(f"a push takes {num_bytes / 2**30:.2f} GiB, and neither {_MEMORY} nor {base} has them free")
        hidden = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=base))
        self._lock = os.open(hidden, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = hidden.rename(base / hidden.name[1:])
        self._delete = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # at the exit too
        self._file: int | None = os.open(self.folder / _UNFINISHED, os.O_CREAT | os.O_WRONLY, 0o600)
        os.truncate(self._file, num_bytes)

    def size_of(self, index: int) -> int:
        """Bytes of a bucket.

        Raises:
            Refused: there is none of this index.
        """
        if not 0 <= index < num_buckets(self.num_bytes, BUCKET_BYTES):
            raise Refused(404, f"There is no bucket {index} of {self.num_bytes} bytes.")
        return min(BUCKET_BYTES, self.num_bytes - index * BUCKET_BYTES)

    def write(self, index: int, data: bytes) -> None:
        """Put a bucket where it belongs, once it is known to be whole.

        Raises:
            Refused: the file is loaded already.
            OSError: no room.
        """
        if self._file is None:
            raise Refused(409, "This push is whole, and takes no more buckets.")
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._file, view, index * BUCKET_BYTES + len(data) - len(view)) :]
        self._missing.discard(index)

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            Refused: buckets are missing.
        """
        if self._missing:
            raise Refused(
                409, f"{len(self._missing)} buckets of this push are missing, the first is {min(self._missing)}."
            )
        if self._file is not None:
            os.close(self._file)
            self._file = None
            (self.folder / _UNFINISHED).rename(self.folder / WEIGHT_FILE)

    def drop(self) -> None:
        """Delete everything; idempotent."""
        if self.keeper is not None:
            self.keeper.cancel()
        if self._delete.alive:
            self._delete()
            os.close(self._lock)
            if self._file is not None:
                os.close(self._file)


def _delete_what_the_dead_left(base: Path) -> None:
    for left in base.glob(f"{_FOLDER}*"):
        with suppress(OSError):  # somebody else's, or its server lives
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


class ReceiveWeights(RequireKey):
    """ASGI middleware: the server's end, which asks for the key like everything else (:class:`RequireKey`).

    Contract. Consumes: buckets of one push at a time. Produces: a folder with a whole file, for ``reload_weights``. A
    later push, or another trainer's, ends the one before, and nothing of that is taken any more; a push of which
    nothing is heard is deleted. One process has to answer all requests: vLLM's ``--api-server-count 1``.

    Raises:
        RuntimeError: the server has no key.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        super().__init__(app)
        self._session, self._newest, self._keep_s = "", -1, 0.0
        self._push: ReceivedPush | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        mine = scope["type"] == "http" and scope["path"].startswith(PATH)
        if not (mine and self._has_key(scope)):
            await super().__call__(scope, receive, send)
            return
        try:
            status, answer = 200, await self._answer(scope, receive)
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            status, answer = 400, {"error": f"This is not how weights are sent here: {error!r}."}
        except OSError as error:
            self._drop()
            status, answer = _NO_ROOM, {"error": f"The weights cannot be written: {error.strerror or error}."}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, scope: Any, receive: Any) -> Any:
        match scope["method"], *scope["path"].removeprefix(PATH).strip("/").split("/"):
            case ["GET", ""]:
                dtype = str(scope["app"].state.vllm_config.model_config.dtype).removeprefix("torch.")
                return {"dtype": dtype, "bucket_bytes": BUCKET_BYTES}
            case ["POST", session, number]:
                return self._begin(session, int(number), json.loads(await _body(receive, 1 << 10)))
            case ["PUT", session, number, index]:
                return await self._take(self._current(session, int(number)), int(index), scope, receive)
            case ["POST", session, number, "whole"]:
                push = self._current(session, int(number))
                push.finish()
                return {"folder": str(push.folder)}
            case ["DELETE", session, number]:
                if (session, int(number)) == (self._session, self._newest):
                    self._drop()
                return {}
        raise Refused(404, f"There is no {scope['method']} {scope['path']}.")

    def _begin(self, session: str, number: int, said: Any) -> Any:
        if session == self._session and number < self._newest:
            raise Refused(409, f"Push {number} came after push {self._newest}, which is newer.")
        self._drop()
        self._session, self._newest = session, number
        self._push, self._keep_s = ReceivedPush(int(said["num_bytes"])), float(said["keep_s"])
        self._heard()
        return {}

    def _current(self, session: str, number: int) -> ReceivedPush:
        if self._push is None or (session, number) != (self._session, self._newest):
            raise Refused(409, f"Push {number} of {session} is not the one that this server is taking.")
        self._heard()
        return self._push

    async def _take(self, push: ReceivedPush, index: int, scope: Any, receive: Any) -> Any:
        size = push.size_of(index)
        data = await _body(receive, size)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if len(data) != size or digest.encode() != dict(scope["headers"]).get(DIGEST.encode()):
            raise Refused(_DAMAGED, f"Bucket {index} came damaged: {len(data)} bytes of {size}, SHA-256 {digest}.")
        if push is not self._push:
            raise Refused(409, "Another push has begun meanwhile.")
        push.write(index, data)
        return {}

    def _heard(self) -> None:
        assert self._push is not None
        if self._push.keeper is not None:
            self._push.keeper.cancel()
        self._push.keeper = asyncio.get_running_loop().call_later(self._keep_s, self._drop)

    def _drop(self) -> None:
        push, self._push = self._push, None
        if push is not None:
            push.drop()


async def _body(receive: Any, most: int) -> bytes:
    """What a request brings.

    Raises:
        Refused: it brings more than ``most`` bytes, or its sender hung up.
    """
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(_DAMAGED, "The connection broke in the middle.")
        data += message.get("body", b"")
        more = message.get("more_body", False)
        if len(data) > most:
            raise Refused(413, f"More than {most} bytes came.")
    return bytes(data)
