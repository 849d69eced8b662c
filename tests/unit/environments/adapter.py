"""An adapter between an instance and the client of another library, whose methods are asynchronous."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any


class Adapter:
    schemas = [{"type": "function", "function": {"name": "shout", "parameters": {"type": "object"}}}]  # noqa: RUF012

    def __init__(self, note: str) -> None:
        self._note = Path(note)

    async def reset(self, **row: Any) -> str:
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._client = asyncio.create_task(self._work())
        return f"{sorted(row)}"

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        await self._queue.put(f"{name} {arguments}")
        return self._queue.qsize()

    async def get_reward(self) -> float:
        await self._queue.join()
        return 0.25

    async def close(self) -> None:
        self._client.cancel()
        self._note.write_text("closed")

    async def _work(self) -> None:
        while True:
            await self._queue.get()
            self._queue.task_done()
