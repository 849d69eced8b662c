"""A whole asynchronous run on a virtual clock: the real collector, buffer, prompts and rows, workers that only wait.

For questions that no test machine has the processes for: a thousand rollout workers, ten thousand groups in flight,
what ``max_policy_age`` buys when responses have a long tail. Nothing sleeps; time passes from event to event. What
the program itself costs is measured beside it, in seconds of CPU.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import torch

from sota_grpo import keys
from sota_grpo.engines.stepping import Streams
from sota_grpo.envs import TaskEnv
from sota_grpo.functional import max_groups_admitted
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.replay_buffer import GroupReplayBuffer

T = TypeVar("T")

_WARM_UP = 0.25  # share of the steps that the averages leave out: a run begins with all slots empty
_TAIL = 8.0  # longest response, in means


@dataclass(frozen=True)
class Scenario:
    """What is simulated. Lengths of responses are log-normal and cut at 8 means, as a limit on tokens would.

    Args:
        num_workers: rollout workers.
        groups_per_worker: groups that one samples at the same time; a group is done with its longest response.
        num_groups: groups per step.
        max_policy_age: of the source.
        response_tokens: mean length of a response.
        sigma: of the logarithm of the length.
        token_s: seconds per token, whatever the load.
        generation_ratio: time in which all workers, never idle, sample a batch, over the time to learn from it.
        publish_s: time from the end of learning to the new weights in every worker; rollouts continue meanwhile.
        num_steps: training steps.
        seed: of lengths and prompts.
    """

    num_workers: int = 16
    groups_per_worker: int = 4
    num_groups: int = 64
    max_policy_age: int = 1
    response_tokens: float = 16.0
    sigma: float = 1.0
    token_s: float = 0.02
    generation_ratio: float = 1.0
    publish_s: float = 0.0
    num_steps: int = 24
    seed: int = 0

    def length(self, draw: random.Random) -> int:
        """Tokens of one response."""
        factor = draw.lognormvariate(-(self.sigma**2) / 2, self.sigma)  # of mean 1
        return max(1, round(self.response_tokens * min(factor, _TAIL)))

    def group_s(self, group_size: int) -> float:
        """Mean seconds in which a worker samples one group: those of its longest response."""
        draw = random.Random(self.seed)
        longest = [max(self.length(draw) for _ in range(group_size)) for _ in range(2000)]
        return statistics.fmean(longest) * self.token_s

    def batch_s(self, group_size: int) -> float:
        """Seconds in which all workers, never idle, sample the groups of one step."""
        return self.group_s(group_size) * self.num_groups / (self.num_workers * self.groups_per_worker)


@dataclass(frozen=True)
class Outcome:
    """What came of it, without the first quarter of the steps.

    Args:
        step_s: mean virtual time of a step.
        learner_idle, worker_idle: shares of the virtual time, in [0, 1].
        policy_age_mean, policy_age_max: of the responses' oldest tokens when they are trained.
        token_age_mean: of all trained tokens.
        most_in_flight: most groups in flight at once, the first quarter included.
        main_s: CPU seconds per step of the main thread: taking a batch, its transforms, admission.
        dispatcher_s: CPU seconds per step of the dispatcher: rows, grades, buffer.
        groups_per_cpu_s: groups over the CPU seconds of both.
    """

    step_s: float
    learner_idle: float
    worker_idle: float
    policy_age_mean: float
    policy_age_max: int
    token_age_mean: float
    most_in_flight: int
    main_s: float
    dispatcher_s: float
    groups_per_cpu_s: float


class VirtualClock:
    """Runs actions in the order of their times, which never go back.

    >>> clock, seen = VirtualClock(), []
    >>> clock.at(2.0, lambda: seen.append(clock.now))
    >>> clock.at(1.0, lambda: seen.append(clock.now))
    >>> clock.run_next(), clock.run_next(), seen
    (None, None, [1.0, 2.0])
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run ``action`` at ``when``; those of one time in the order given."""
        heapq.heappush(self._due, (when, next(self._order), action))

    def next_time(self) -> float:
        """When something happens next; infinity when nothing will."""
        return self._due[0][0] if self._due else math.inf

    def run_next(self) -> None:
        """Go to the next action and run it."""
        when, _, action = heapq.heappop(self._due)
        self.now = max(self.now, when)
        action()


class Workers(Streams):
    """Rollout workers that finish a group when its longest response would be done.

    Weights arrive while groups are being sampled: a token has the version that was served at its own time.

    Args:
        clock: on which everything happens.
        scenario: how many and how fast.
        token_ids: what responses are cut from; the last one ends each.
        decode: of the tokenizer.
    """

    def __init__(self, clock: VirtualClock, scenario: Scenario, token_ids: torch.Tensor, decode: Callable[..., str]):
        self._said = lru_cache(maxsize=None)(partial(_response, token_ids, decode))
        self.clock, self.scenario = clock, scenario
        self.version = 0
        self.in_flight = self.most_in_flight = 0
        self._served = [0.0]  # when each version arrived
        self._places = scenario.num_workers * scenario.groups_per_worker
        self._busy, self._busy_s, self._since = 0, 0.0, 0.0
        self._queue: deque[tuple[GroupRequest, Future[GroupOutput]]] = deque()

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """As an engine; the work begins as an event of its own."""
        future: Future[GroupOutput] = Future()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._queue.append((request, future))
        self.clock.at(self.clock.now, self._start)
        return future

    def serve(self) -> None:
        """The next version is held by every worker."""
        self.version += 1
        self._served.append(self.clock.now)

    def busy_s(self) -> float:
        """Seconds in which a place sampled, summed over places."""
        self._count(0)
        return self._busy_s

    def _count(self, change: int) -> None:
        self._busy_s += self._busy * (self.clock.now - self._since)
        self._busy, self._since = self._busy + change, self.clock.now

    def _start(self) -> None:
        while self._busy < self._places and self._queue:
            request, future = self._queue.popleft()
            self._count(1)
            draw = random.Random(sample_seed(self.scenario.seed, request.seed))
            lengths = [self.scenario.length(draw) for _ in range(request.num_samples)]
            end = partial(self._end, request, future, lengths, self.clock.now)
            self.clock.at(self.clock.now + max(lengths) * self.scenario.token_s, end)

    def _end(self, request: GroupRequest, future: Future[GroupOutput], lengths: list[int], began: float) -> None:
        self._count(-1)
        self.in_flight -= 1
        self._start()
        future.set_result(GroupOutput(request.group_id, tuple(self._sample(length, began) for length in lengths)))

    def _sample(self, length: int, began: float) -> Sample:
        ids, text = self._said(length)
        times = began + self.scenario.token_s * torch.arange(length, dtype=torch.float64)
        versions = torch.bucketize(times, torch.tensor(self._served, dtype=torch.float64), right=True) - 1
        return Sample(ids.clone(), torch.full((length,), -1.0), versions, truncated=False, text=text)


def _response(token_ids: torch.Tensor, decode: Callable[..., str], length: int) -> tuple[torch.Tensor, str]:
    """The ids of a response, and the text that its worker sends with them."""
    script = token_ids[:-1]
    body = script.repeat(-(-length // len(script)))[: length - 1]
    return torch.cat([body, token_ids[-1:]]), decode(body, skip_special_tokens=True)


class Simulation:
    """One run of ``scenario`` over ``env``, whose group size and grader are used.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> from sota_grpo.tasks import make_task
    >>> env = TaskEnv(make_task("arithmetic"), load_tokenizer("tiny"), num_envs=2, repeats=2)
    >>> found = Simulation(env, Scenario(num_workers=2, num_groups=4, max_policy_age=0, num_steps=4)).run()
    >>> found.policy_age_max, found.most_in_flight, 0 < found.learner_idle < 1
    (0, 4, True)
    """

    def __init__(self, env: TaskEnv, scenario: Scenario):
        self.scenario = scenario
        self.clock = VirtualClock()
        token_ids = [*env.tokenizer("#### 17")["input_ids"], env.tokenizer.eos_token_id]
        self.workers = Workers(self.clock, scenario, torch.tensor(token_ids), env.tokenizer.decode)
        slots = max_groups_admitted(scenario.max_policy_age, scenario.num_groups)
        self.collector = PromptGroupCollector(
            env,
            self.workers,
            sampling=Sampling(max_tokens=1),
            dialog_turns_per_batch=scenario.num_groups * env.repeats,
            max_policy_age=scenario.max_policy_age,
            replay_buffer=GroupReplayBuffer(slots, scenario.num_groups, transform=GroupAdvantage(), as_table=True),
            seed=scenario.seed,
        )
        self.collector.start(dispatch=False)
        self.learn_s = scenario.batch_s(env.repeats) / scenario.generation_ratio
        self.cpu_s = {"main": 0.0, "dispatcher": 0.0}
        self.waited_s = 0.0
        self.ages: list[int] = []
        self.token_ages: list[float] = []

    def run(self) -> Outcome:
        """Make ``num_steps`` training steps."""
        steps, skip = self.scenario.num_steps, int(_WARM_UP * self.scenario.num_steps)
        began, busy = 0.0, 0.0
        for step in range(steps):
            if step == skip:
                began, busy, self.waited_s = self.clock.now, self.workers.busy_s(), 0.0
                self.cpu_s = dict.fromkeys(self.cpu_s, 0.0)
                self.ages, self.token_ages = [], []
            self._turn(step)
        return self._outcome(steps - skip, self.clock.now - began, self.workers.busy_s() - busy)

    def _turn(self, step: int) -> None:
        began = self.clock.now
        while not self._cost("main", self.collector.is_ready):
            self._happen()
        self.waited_s += self.clock.now - began
        batch = self._cost("main", lambda: self.collector.next_batch())
        self._look(batch, step)
        self._pass(self.learn_s + self.scenario.publish_s)
        self.workers.serve()
        self._cost("main", self.collector.release)

    def _pass(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.next_time() <= end:
            self._happen()
        self.clock.now = end

    def _happen(self) -> None:
        self.clock.run_next()
        self._cost("dispatcher", self.collector.handle_events)

    def _cost(self, thread: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        done = work()
        self.cpu_s[thread] += time.thread_time() - began
        return done

    def _look(self, batch: RowTable, step: int) -> None:
        for row in batch:
            self.ages.append(step - int(row[keys.POLICY_VERSION]))
            versions = row[keys.TOKEN_VERSION][row[keys.ASSISTANT_MASK]]
            self.token_ages.append(step - float(versions.double().mean()))

    def _outcome(self, steps: int, seconds: float, busy_s: float) -> Outcome:
        scenario = self.scenario
        places = scenario.num_workers * scenario.groups_per_worker
        cpu_s = sum(self.cpu_s.values())
        return Outcome(
            step_s=seconds / steps,
            learner_idle=self.waited_s / seconds,
            worker_idle=1 - busy_s / (places * seconds),
            policy_age_mean=statistics.fmean(self.ages),
            policy_age_max=max(self.ages),
            token_age_mean=statistics.fmean(self.token_ages),
            most_in_flight=self.workers.most_in_flight,
            main_s=self.cpu_s["main"] / steps,
            dispatcher_s=self.cpu_s["dispatcher"] / steps,
            groups_per_cpu_s=steps * scenario.num_groups / cpu_s,
        )
