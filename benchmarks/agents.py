"""How many agents' sessions the run's server answers at once: latency, requests per second and memory.

``python -m benchmarks.agents --sessions 500`` opens that many sessions over the scripted engine, each with a client
that continues its conversation ``--requests`` times, one request after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time

import psutil

from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.envs.gateway import Gateway, Session
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import GroupRequest, Sampling


async def converse(client, session: Session, requests: int, seconds: list[float]) -> None:
    """Ask, add the reply and a turn, and ask again."""
    messages = [{"role": "user", "content": "What is 4 + 5?"}]
    headers = {"Authorization": f"Bearer {session.key}"}
    for _ in range(requests):
        began = time.perf_counter()
        async with client.post(
            f"{session.base_url}/chat/completions", json={"messages": messages}, headers=headers
        ) as answer:
            answer.raise_for_status()
            reply = (await answer.json())["choices"][0]["message"]
        seconds.append(time.perf_counter() - began)
        messages = [*messages, reply, {"role": "user", "content": "Go on."}]


async def measure(gateway: Gateway, sessions: list[Session], requests: int) -> list[float]:
    """Return the seconds of every request."""
    import aiohttp

    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(converse(client, session, requests, seconds) for session in sessions))
    return seconds


def main() -> None:
    """Print one line of JSON per number of sessions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 50, 500], help="sessions at once")
    parser.add_argument("--requests", type=int, default=8, help="requests of a session")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    args = parser.parse_args()
    tokenizer, process = load_tokenizer("tiny"), psutil.Process()
    said = tokenizer("x" * args.tokens)["input_ids"][: args.tokens]
    engine = ScriptedEngine(lambda *_: said, vocab_size=len(tokenizer), max_model_len=1 << 16)
    gateway, ends = Gateway(engine, tokenizer), threading.Event()

    def drive() -> None:
        while not ends.is_set():
            if not engine.advance():
                time.sleep(0.001)

    threading.Thread(target=drive, daemon=True).start()
    for count in args.sessions:
        before = process.memory_info().rss
        sampling = Sampling(max_tokens=args.tokens)
        sessions = [gateway.open(GroupRequest(n, (), 1, seed=n), 0, sampling, args.requests) for n in range(count)]
        began = time.perf_counter()
        seconds = sorted(asyncio.run(measure(gateway, sessions, args.requests)))
        row = {
            "sessions": count,
            "requests/s": round(len(seconds) / (time.perf_counter() - began)),
            "median_ms": round(1000 * statistics.median(seconds)),
            "p99_ms": round(1000 * seconds[int(0.99 * (len(seconds) - 1))]),
            "tokens": sum(len(session.tree) for session in sessions),
            "memory_MiB": round((process.memory_info().rss - before) / 2**20),
        }
        print(json.dumps(row))
        for session in sessions:
            session.close()
    ends.set()
    gateway.close()


if __name__ == "__main__":
    main()
