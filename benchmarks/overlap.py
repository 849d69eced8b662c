"""What running collection beside learning saves, and what the control plane costs, in real time.

An engine and a learner of equal duration, both only asleep, so that what is left over is this program's own work:
``python -m benchmarks.overlap``. One step is 16 groups x 8 samples x 64 tokens.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.engines.stepping import Streams
from sota_grpo.envs import TaskEnv
from sota_grpo.functional import max_groups_admitted
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import GroupReplayBuffer
from sota_grpo.tasks import make_task

GROUPS, SAMPLES, TOKENS = 16, 8, 64
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Overlap:
    """Seconds per step, and what follows from them.

    Args:
        phase_s: duration of generation, and of learning, by themselves.
        sync_s, async_s: time per step.
        ratio: ``async_s / sync_s``; perfect overlap gives 0.5.
        overhead: ``(async_s - phase_s) / async_s``, the share of a step in which neither phase's time passes.
    """

    phase_s: float
    sync_s: float
    async_s: float
    ratio: float
    overhead: float

    @classmethod
    def of(cls, phase_s: float, sync_s: float, async_s: float) -> Overlap:
        return cls(phase_s, sync_s, async_s, async_s / sync_s, (async_s - phase_s) / async_s)


def make_env() -> TaskEnv:
    env = TaskEnv(make_task("arithmetic"), load_tokenizer("tiny"), num_envs=GROUPS * SAMPLES, repeats=SAMPLES)
    for example in env.task.train[: 8 * GROUPS]:
        env.prompt_ids(example)  # a run has tokenised its prompts before it starts
    return env


def make_engine(env: TaskEnv) -> ScriptedEngine:
    return ScriptedEngine(lambda request, index, version: [7, 8, 9], eos_token_id=env.tokenizer.eos_token_id)


def steps(
    collector: PromptGroupCollector, set_version: Callable[[int], None], learn_s: float, num_steps: int
) -> list[float]:
    """Seconds of each training step; the first, which finds nothing in flight, is left out."""
    measured, began = [], time.perf_counter()
    for step in range(num_steps + 1):
        collector.next_batch()
        time.sleep(learn_s)
        set_version(step + 1)
        collector.release()
        now = time.perf_counter()
        measured.append(now - began)
        began = now
    return measured[1:]


class SleepingEngine(Streams):
    """Finishes a group every ``group_s`` seconds: an engine at its full rate, whatever is queued."""

    def __init__(self, engine: ScriptedEngine, group_s: float):
        self.engine, self._group_s = engine, group_s
        self._queue: queue.SimpleQueue[tuple[GroupRequest, Future[GroupOutput]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self.engine.version

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        future: Future[GroupOutput] = Future()
        self._queue.put((request, future))
        return future

    def _work(self) -> None:
        due = 0.0
        while (job := self._queue.get()) is not None:
            request, future = job
            due = max(due, time.perf_counter()) + self._group_s
            output = next(iter(self.engine.generate([request], SAMPLING)))
            time.sleep(max(0.0, due - time.perf_counter()))
            future.set_result(output)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def measure_sync(phase_s: float, num_steps: int) -> list[float]:
    """Seconds of each step in synchronous mode."""
    env = make_env()
    engine = make_engine(env)
    order: dict[int, float] = {}
    engine._duration_s = lambda request: order.setdefault(  # the groups of a call end one after the other
        request.group_id, (request.group_id % GROUPS + 1) * phase_s / GROUPS
    )
    collector = PromptGroupCollector(
        env,
        engine,
        sampling=SAMPLING,
        dialog_turns_per_batch=GROUPS * env.repeats,
        postproc=GroupAdvantage(),
        as_table=True,
    )
    return steps(collector, lambda version: setattr(engine, "version", version), phase_s, num_steps)


def measure_async(phase_s: float, num_steps: int, max_policy_age: int = 1) -> list[float]:
    """Seconds of each step when both run at the same time."""
    env = make_env()
    engine = make_engine(env)
    worker = SleepingEngine(engine, phase_s / GROUPS)
    slots = max_groups_admitted(max_policy_age, GROUPS)
    collector = PromptGroupCollector(
        env,
        worker,
        sampling=SAMPLING,
        dialog_turns_per_batch=GROUPS * env.repeats,
        max_policy_age=max_policy_age,
        replay_buffer=GroupReplayBuffer(slots, GROUPS, transform=GroupAdvantage(), as_table=True),
    )
    collector.start()
    try:
        return steps(collector, lambda version: setattr(engine, "version", version), phase_s, num_steps)
    finally:
        collector.close()
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase-s", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    measured = [one(options.phase_s, options.steps) for one in (measure_sync, measure_async)]
    for name, typical in (("median", statistics.median), ("best", min)):
        print(name, asdict(Overlap.of(options.phase_s, *(round(typical(seconds), 4) for seconds in measured))))


if __name__ == "__main__":
    main()
