"""What travels between two processes: a pickled value whose large buffers are sent beside it, as they are."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


class Message:
    """A head that always can be read, a pickled body, and the body's large buffers beside it."""

    def __init__(self, head: tuple[Any, ...], body: bytes, buffers: list[Any]) -> None:
        self._head, self._body, self._buffers = head, body, buffers

    @classmethod
    def of(cls, head: tuple[Any, ...], value: Any) -> Message:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(head, body, [buffer.raw() for buffer in buffers])

    def send(self, connection: Connection) -> None:
        connection.send_bytes(pickle.dumps((self._head, self._body, [len(buffer) for buffer in self._buffers])))
        for buffer in self._buffers:
            connection.send_bytes(buffer)

    @classmethod
    def receive(cls, connection: Connection) -> tuple[tuple[Any, ...], Message]:
        head, body, sizes = pickle.loads(connection.recv_bytes())
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            connection.recv_bytes_into(buffer)
        return head, cls(head, body, buffers)

    def load(self) -> Any:
        return pickle.loads(self._body, buffers=self._buffers)


class Shared:
    """A value that is pickled once, however often it is sent; at the other end it is the value."""

    def __init__(self, value: Any) -> None:
        self._message = Message.of((), value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        message = self._message
        return _unshare, (message._body, [pickle.PickleBuffer(buffer) for buffer in message._buffers])


def _unshare(body: bytes, buffers: list[Any]) -> Any:
    return pickle.loads(body, buffers=buffers)
