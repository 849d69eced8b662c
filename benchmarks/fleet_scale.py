"""10,000 engines and 70B weights, by arithmetic: ``python -m benchmarks.fleet_scale model|fleet|source``.

``model`` measures what this program costs on this machine (:mod:`benchmarks.fleet_constants`), and computes a training
step from that, from the shape of the model and from a cluster that is declared (:class:`Cluster`): where its time goes,
what bounds it, how long a publish takes each way, what driver and nodes hold. ``fleet`` runs the real fleet over up to
10,000 workers that answer at once, ``source`` the real source over as many on a virtual clock.

A step of ``K`` groups is estimated as the largest of (:func:`bounds`), with ``P`` places in the engines, ``g`` the mean
time of a group, ``M`` that of the longest of a batch, ``A`` the bound on the age, and ``D`` what passes from a batch
that is taken to the publish that frees its slots::

    all engines busy    K g / P
    the learner         D = control + rows to ranks + learning + publish + copy for a checkpoint
    the tail            (D + M) / (A + 1)      a group is requested at a publish and is due A + 1 batches later
    the driver          CPU seconds of its threads, which share one interpreter lock, over the share that pings leave

The first three are those of the event simulation (:mod:`benchmarks.simulation`), and the largest is its step exactly
where the slots, ``(A + 1) K``, are no more than the places and all responses are equally long. Of a real step they are
estimates, no bounds. Too high: every token takes as long as in a full engine, in the tail too, where few rows are left;
Ray's own threads count as if they held the lock. Too low: nothing waits in a queue, for the lock or for a
retransmission; digests, metrics and logs of the driver cost nothing; nothing fails.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from benchmarks.fleet_constants import GROUP, Measured, fleet_costs, measure
from benchmarks.roofline_rates import DEVICES
from benchmarks.scale import make_env, resident_kib, table, tune_gc
from benchmarks.simulation import Outcome, Scenario, Simulation
from sota_grpo.assembly.estimate import Learning, MicroBatch, kv_bytes_per_token, learner_memory, vllm_pool_bytes
from sota_grpo.envs import TaskEnv
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.staleness import max_groups_admitted
from sota_grpo.policy.model_sizes import Architecture, architecture_of

MODELS = {"7B": ("qwen2.5-7b", 1), "70B": ("qwen2.5-72b", 8)}  # shape, and GPUs of an engine
ENGINES = (100, 1000, 10_000)
_ADAPTER_RANK = 16
_PING_S = 30.0  # of engines: of a silence of 120 s, a quarter
_RANK_PING_S = 10.0  # of ranks, by the thread that waits for them or polls them (sota_grpo.training.remote_learner)
_SMALL = 16  # engines of the event simulation beside the arithmetic
_SMALL_TOKENS = 32


@dataclass(frozen=True)
class Cluster:
    """A cluster of H100 nodes; every figure is an input with its source, or assumed; none was measured by us.

    Args:
        gpus_per_node: of a DGX or HGX H100 (NVIDIA's data sheet).
        network: bytes per second between two nodes, each way: 50e9 is one 400 Gb/s link of a DGX H100 (data sheet), 3e9
            a 25 Gb/s Ethernet.
        links: of a node that its GPUs have together (DGX H100: 8 of 400 Gb/s); a stream from one host or GPU has one.
        device_link: bytes per second from a host to one of its GPUs; assumed, of the 64e9 of PCIe 5 x16.
        gpu_bytes: memory of a GPU (H100 SXM: 80 GB, data sheet).
        engine_share: of it that vLLM takes; assumed, as in its documents (``inference_model.gpu_memory_utilization``).
        decode_efficiency: bytes per second while decoding, over the rate of :data:`benchmarks.roofline_rates.DEVICES`;
            assumed.
        allreduce_s: of one layer's half among the GPUs of an engine, two for each layer and token; assumed.
        mfu: of the learner; assumed (prime-rl has published 27 % at 64k tokens, ours is predicted at 22 to 27, eager).
        disk: bytes per second of one node to the file system that all share; assumed.
        gpu_failure_h: GPU hours between two failures (Llama 3, arXiv:2407.21783: 419 in 54 days on 16,384 GPUs).
    """

    gpus_per_node: int = 8
    network: float = 50e9
    links: int = 8
    device_link: float = 50e9
    gpu_bytes: float = 80e9
    engine_share: float = 0.9
    decode_efficiency: float = 0.6
    allreduce_s: float = 15e-6
    mfu: float = 0.3
    disk: float = 2e9
    gpu_failure_h: float = 50_000.0


@dataclass(frozen=True)
class Job:
    """A run of GRPO on a cluster, with what the program costs.

    Args:
        name: of :data:`MODELS`.
        engines: rollout workers.
        cluster: where.
        costs: measured.
        groups_per_engine: places of an engine; 8 groups are 64 rows.
        groups: per step; 0: as many as there are places.
        max_policy_age: as the option.
        prompt, tokens: mean lengths; responses are log-normal and cut at 8 means, as in the simulation.
        sigma: of the logarithm of the length.
        checkpoint_every: steps.
        learner_gpus: 0: as many as learn a batch in the time in which busy engines sample it.
        publish: ``store`` (every node pulls from the driver's), ``tree`` (nodes pull from nodes), ``adapter``.
    """

    name: str
    engines: int
    cluster: Cluster
    costs: Measured
    groups_per_engine: int = 8
    groups: int = 0
    max_policy_age: int = 3
    prompt: int = 512
    tokens: int = 2048
    sigma: float = 1.0
    checkpoint_every: int = 10
    learner_gpus: int = 0
    publish: str = "store"

    @cached_property
    def model(self) -> Architecture:
        measured = architecture_of(MODELS[self.name][0])
        assert measured is not None
        return measured

    @property
    def parallel(self) -> int:
        """GPUs of an engine."""
        return MODELS[self.name][1]

    @property
    def nodes(self) -> int:
        """Of the engines."""
        return math.ceil(self.engines * self.parallel / self.cluster.gpus_per_node)

    @property
    def per_step(self) -> int:
        """Groups of a step."""
        return self.groups or self.engines * self.groups_per_engine

    @property
    def weight_bytes(self) -> int:
        """Of one copy as engines compute with it, in half precision."""
        return 2 * self.model.parameters

    @cached_property
    def rows(self) -> int:
        """That an engine samples at once, at most: all its places, or what the slots give it."""
        slots = max_groups_admitted(self.max_policy_age, self.per_step)
        return max(1, GROUP * min(self.groups_per_engine, math.ceil(slots / self.engines)))

    @cached_property
    def token_s(self) -> float:
        """Of one token of every row of an engine: weights, keys and values are read once, halves are summed."""
        share, cached = self.cluster.engine_share * self.cluster.gpu_bytes, kv_bytes_per_token(self.model, 2)
        held = self.rows * (self.prompt / GROUP + self.tokens / 2) * cached
        pool = vllm_pool_bytes(self.model, int(share), number_bytes=2, rows=self.rows, parallel=self.parallel)
        if held > pool * self.parallel:
            raise ValueError(f"{self.rows} rows of {self.name} need {held:.3g} bytes and have {pool * self.parallel}.")
        read = (self.weight_bytes + held) / self.parallel
        summed = 2 * self.model.layers * self.cluster.allreduce_s if self.parallel > 1 else 0.0
        return read / (DEVICES["h100"].memory * self.cluster.decode_efficiency) + summed

    def scenario(self, learn_s: float = 1.0, publish_s: float = 0.0, **changes: float) -> Scenario:
        """The same run for the event simulation."""
        whole = Scenario(
            num_workers=self.engines,
            groups_per_worker=self.groups_per_engine,
            num_groups=self.per_step,
            max_policy_age=self.max_policy_age,
            response_tokens=float(self.tokens),
            sigma=self.sigma,
            token_s=self.token_s,
            publish_s=publish_s,
        )
        whole = replace(whole, **changes)  # type: ignore[arg-type]
        return replace(whole, generation_ratio=whole.batch_s(GROUP) / learn_s)


def longest_s(scenario: Scenario, group_size: int) -> float:
    """Mean seconds of the longest response of a batch; of large batches that is the cut.

    >>> longest_s(Scenario(response_tokens=10, sigma=0.0, token_s=0.5), 8)
    5.0
    """
    draw, count = random.Random(scenario.seed), min(20_000, scenario.num_groups * group_size)
    longest = [max(scenario.length(draw) for _ in range(count)) for _ in range(max(1, 40_000 // count))]
    return statistics.fmean(longest) * scenario.token_s


def bounds(scenario: Scenario, group_size: int, between_s: float) -> dict[str, float]:
    """Three of a step's bounds (see the module); ``between_s`` is ``D``.

    Two batches of 4 groups (age 1) in 8 places, 5 s each, learning and publish 2 s: (2 + 5) / 2 is the most.

    >>> scenario = Scenario(1, 8, num_groups=4, max_policy_age=1, response_tokens=10, sigma=0.0, token_s=0.5)
    >>> bounds(scenario, 8, between_s=2.0)
    {'sampling': 2.5, 'learner': 2.0, 'tail': 3.5}
    """
    tail = (between_s + longest_s(scenario, group_size)) / (scenario.max_policy_age + 1)
    return {"sampling": scenario.batch_s(group_size), "learner": between_s, "tail": tail}


def sharding(model: Architecture, cluster: Cluster) -> tuple[Learning, int]:
    """How the model is divided, and tokens of a micro-batch: the largest, over as few GPUs as hold it all.

    At least the GPUs of a node; gradients are divided too where they do not fit whole.
    """
    for tokens, doubled, sums in product((16_384, 8192, 4096), range(8), (False, True)):
        ranks = cluster.gpus_per_node << doubled
        how = Learning(product_bytes=2, checkpointing=True, on_cpu=False, ranks=ranks, shard_gradients=sums)
        rows = [MicroBatch(tokens, tokens, tokens)] * 2
        if sum(learner_memory(model, how, rows).values()) <= cluster.gpu_bytes:
            return how, tokens
    raise ValueError("the model is too large for the learner on any number of these GPUs")


@dataclass(frozen=True)
class Learner:
    """What a step costs the ranks."""

    gpus: int
    copies: int  # of the sharded model
    how: Learning
    learn_s: float  # passes, and gathering of weights where that takes longer
    gradients_s: float  # summed between nodes, once for a step


def learner_of(job: Job, within_s: float) -> Learner:
    """The learner that is given, or the smallest that computes its passes ``within_s``."""
    model, cluster = job.model, job.cluster
    how, micro_tokens = sharding(model, cluster)
    fabric = cluster.links * cluster.network
    load = shared_load(job.prompt, [job.tokens] * GROUP).times(job.per_step)
    shape = ModelShape(
        trainable_weights=model.layers * model.layer_matrices,
        frozen_weights=0,
        attention_width=model.layers * model.query_width,
        head_weights=model.head_weights,
        head_trainable=True,
    )
    gpu_s = step_flops(shape, load) / (DEVICES["h100"].peak * cluster.mfu)
    copies = max(1, math.ceil((job.learner_gpus or gpu_s / within_s) / how.ranks))
    gpus, whole = copies * how.ranks, 4 * model.parameters
    shards = how.ranks // cluster.gpus_per_node  # nodes of one copy
    passes = math.ceil(load.positions / gpus / micro_tokens)
    gathered = passes * (3 if how.shard_gradients else 2) * whole / fabric if shards > 1 else 0.0
    summed = whole / fabric if shards > 1 and not how.shard_gradients else 0.0
    summed += 2 * whole / shards / fabric if copies > 1 else 0.0
    return Learner(gpus, copies, how, max(gpu_s / gpus, gathered), summed)


@dataclass(frozen=True)
class Publish:
    """One way of new weights to all engines.

    Args:
        seconds: of it, parts by name.
        driver_bytes, node_bytes: that the hosts of driver and engines hold for it.
    """

    seconds: Mapping[str, float]
    driver_bytes: float
    node_bytes: float

    @property
    def all_s(self) -> float:
        return sum(self.seconds.values())


def publish_of(job: Job, way: str) -> Publish:
    """Of one way (:class:`Job`)."""
    cluster, costs, size, nodes = job.cluster, job.costs, float(job.weight_bytes), job.nodes
    notify_s = job.engines * costs.call_s
    if way == "adapter":
        size = 4.0 * job.model.adapter_parameters(_ADAPTER_RANK)
    out = size / cluster.device_link + size / costs.pack_bytes_per_s  # off rank 0's GPU, into one block
    load = size / cluster.device_link
    stored = 2 * size / costs.put_bytes_per_s + size / cluster.network  # rank 0's answer, and the driver's own copy
    hops = math.ceil(math.log2(nodes + 1)) if way == "tree" else nodes
    parts = {"tell": notify_s, "send": out + stored + hops * size / cluster.network, "load": load}
    return Publish(parts, 2 * size, size)


@dataclass(frozen=True)
class Step:
    """What a step of a job takes, in seconds, and what hosts hold, in bytes."""

    job: Job
    learner: Learner
    published: Publish
    serial: Mapping[str, float] = field(default_factory=dict)  # parts of D
    floors: Mapping[str, float] = field(default_factory=dict)  # all bounds
    work_s: float = 0.0  # CPU seconds of the driver's threads, without pings

    @property
    def pings(self) -> float:
        """CPU seconds of the driver per second, for asking engines and ranks whether they live."""
        job = self.job
        return job.costs.call_s * (job.engines / _PING_S + self.learner.gpus / _RANK_PING_S)

    @property
    def driver_s(self) -> float:
        """Of the driver for a step; infinite where its pings alone take all its time."""
        return self.work_s / (1 - self.pings) if self.pings < 1 else math.inf

    @property
    def step_s(self) -> float:
        return max(self.floors.values())

    @property
    def bottleneck(self) -> str:
        """The largest bound; of the learner's turn the largest part."""
        first = max(self.floors, key=self.floors.__getitem__)
        return max(self.serial, key=self.serial.__getitem__) if first == "learner" else first

    @property
    def busy(self) -> float:
        """Share of the engines' places that sample, in [0, 1]."""
        return self.floors["sampling"] / self.step_s

    @property
    def drivers(self) -> int:
        """Processes that would keep up with engines that never wait, if work and pings could be divided evenly."""
        return math.ceil(self.work_s / self.floors["sampling"] + self.pings)

    @property
    def driver_bytes(self) -> float:
        """At most: every slot finished, the batch once more on its way to the ranks, and the weights."""
        job, costs = self.job, self.job.costs
        slots = max_groups_admitted(job.max_policy_age, job.per_step)
        return slots * costs.finished_bytes + job.per_step * costs.rows_bytes + self.published.driver_bytes

    @property
    def rank_bytes(self) -> float:
        """Of a checkpoint, that one rank copies and writes; one copy of the model does it."""
        model, how = self.job.model, self.learner.how
        return (how.trained_bytes(model) + how.optimizer_bytes(model)) / how.ranks

    @property
    def written_s(self) -> float:
        """From a checkpoint's copy to its last byte, behind the training."""
        cluster = self.job.cluster
        return self.rank_bytes / min(self.job.costs.shard_bytes_per_s, cluster.disk / cluster.gpus_per_node)


def step_of(job: Job) -> Step:
    """The step of a job; ``D`` and all bounds by name."""
    costs, cluster, count = job.costs, job.cluster, job.per_step
    scenario = job.scenario()
    learner, published = learner_of(job, scenario.batch_s(GROUP)), publish_of(job, job.publish)
    half = Step(job, learner, published)
    waiting = job.max_policy_age * count  # at most: groups that wait, finished, when a checkpoint is written
    saved = waiting * costs.save_s + half.rank_bytes / cluster.device_link
    sent = count * costs.rows_s + learner.gpus * costs.call_s + count * costs.rows_bytes / cluster.network
    serial = {
        "control": count * costs.main_s,
        "rows": sent,
        "learning": learner.learn_s + learner.gradients_s,
        "publish": published.all_s,
        "checkpoint": saved / job.checkpoint_every,
    }
    notify_s = published.seconds["tell"] + learner.gpus * costs.call_s
    each = costs.main_s + costs.dispatcher_s + costs.task_s + costs.ray_s + costs.rows_s
    half = replace(half, work_s=count * each + notify_s + waiting * costs.save_s / job.checkpoint_every)
    floors = bounds(scenario, GROUP, sum(serial.values())) | {"driver": half.driver_s}
    return replace(half, serial=serial, floors=floors)


def simulated(step: Step) -> Outcome:
    """The event simulation of the same ratios with few engines, short responses and nothing of the driver's CPU."""
    job = step.job
    scale = _SMALL / job.engines
    small = {
        "num_workers": _SMALL,
        "num_groups": max(1, round(job.per_step * scale)),
        "response_tokens": float(_SMALL_TOKENS),
        "token_s": job.token_s * job.tokens / _SMALL_TOKENS,
        "num_steps": 12,
    }
    publish_s = step.serial["publish"]
    learn_s = sum(step.serial.values()) - publish_s
    return Simulation(make_env(GROUP), job.scenario(learn_s, publish_s, **small)).run()


def print_steps(steps: Sequence[Step]) -> None:
    """Where the time goes, what bounds it, and what is held."""
    names = ("model", "engines", "publish")
    seconds = ("sampling s", "tail s", "driver s", *_PARTS, "step s")
    table((step_row(one) for one in steps), (*names, *seconds, "bound by", "engines busy"))
    print()
    table((_run_row(one) for one in steps), (*names, *_RUN_NAMES))
    print()
    table((_held_row(one) for one in steps), (*names, *_HELD_NAMES))


_PARTS = ("control", "rows", "learning", "publish", "checkpoint")
_RUN_NAMES = ("nodes", "learner GPUs", "groups", "token age, simulated", "busy, simulated", "step s, simulated")
_HELD_NAMES = (
    *("driver GB", "node GB", "drivers", "pings", "GB of a rank's file", "s until it is written"),
    *("minutes between an engine's failures", "of a rank"),
)


def step_row(step: Step) -> Sequence[object]:
    """Seconds of a step; without figures for what a driver that only pings would take."""
    seconds = [step.floors["sampling"], step.floors["tail"], step.driver_s, *(step.serial[part] for part in _PARTS)]
    figures = [f"{value:.3g}" for value in (*seconds, step.step_s)]
    end = (step.bottleneck, f"{step.busy:.0%}")
    if math.isinf(step.driver_s):
        figures[2] = figures[-1] = "unbounded"
        end = (f"pings, {step.pings:.0%} of the driver", "-")
    return step.job.name, step.job.engines, step.job.publish, *figures, *end


def _run_row(step: Step) -> Sequence[object]:
    job, outcome = step.job, simulated(step)
    ages = (f"{outcome.token_age_mean:.2f}", f"{1 - outcome.worker_idle:.0%}", f"{outcome.step_s:.3g}")
    return job.name, job.engines, job.publish, job.nodes, step.learner.gpus, job.per_step, *ages


def _held_row(step: Step) -> Sequence[object]:
    job = step.job
    held = [f"{value / 1e9:.3g}" for value in (step.driver_bytes, step.published.node_bytes)]
    written = (f"{step.rank_bytes / 1e9:.3g}", f"{step.written_s:.3g}")
    lost_min = [60 * job.cluster.gpu_failure_h / gpus for gpus in (job.engines * job.parallel, step.learner.gpus)]
    ends = (step.drivers, f"{step.pings:.1%}", *written, *(f"{minutes:.3g}" for minutes in lost_min))
    return job.name, job.engines, job.publish, *held, *ends


def print_publishes(jobs: Sequence[Job]) -> None:
    """Every way of the weights."""
    rows = []
    for job in jobs:
        for way in ("store", "tree", "adapter"):
            one = publish_of(job, way)
            parts = [f"{one.seconds[name]:.3g}" for name in ("tell", "send", "load")]
            sizes = [f"{value / 1e9:.3g}" for value in (one.driver_bytes, one.node_bytes)]
            rows.append((job.name, job.engines, way, *parts, f"{one.all_s:.3g}", *sizes))
    names = ("model", "engines", "way", "tell s", "send s", "load s", "all s", "driver GB", "node GB")
    table(rows, names)


def measured(tokens: int, file: Path | None) -> Measured:
    """The constants, from a file where they were kept."""
    if file is not None and file.exists():
        return Measured(**json.loads(file.read_text()))
    costs = measure(tokens)
    if file is not None:
        file.write_text(json.dumps(asdict(costs), indent=1))
    return costs


def model(options: argparse.Namespace) -> None:
    """Measure, declare, compute."""
    costs = measured(options.tokens, options.costs)
    table(costs.described(), ("measured here", "per group, call or byte"))
    cluster = Cluster(**{each.name: getattr(options, each.name) for each in fields(Cluster)})
    print()
    table([(each.name, f"{getattr(cluster, each.name):g}") for each in fields(Cluster)], ("declared", "value"))
    own = ("groups_per_engine", "groups", "max_policy_age", "prompt", "tokens", "sigma", "checkpoint_every")
    chosen = {name: getattr(options, name) for name in (*own, "learner_gpus")}
    print("\n" + ", ".join(f"{name} {value}" for name, value in chosen.items()))
    jobs = [Job(name, count, cluster, costs, **chosen) for name in options.models for count in options.engines]
    print("tokens per second of an engine: " + ", ".join(f"{j.name} {j.rows / j.token_s:.0f}" for j in jobs) + "\n")
    print_steps([step_of(replace(job, publish=way)) for job in jobs for way in ("store", "tree")])
    print()
    print_publishes(jobs)


def fleet(fleets: Sequence[int]) -> None:
    """The real fleet over workers that answer at once: what grows with their number."""
    names = ("start of all, s", "µs per task", "µs per worker of a call to all")
    table((_fleet_row(count) for count in fleets), ("workers", *names))


def _fleet_row(count: int) -> Sequence[object]:
    started, task_s, call_s = fleet_costs(count, tasks=2000)
    return count, f"{started:.2f}", f"{1e6 * task_s:.0f}", f"{1e6 * call_s:.1f}"


def source(fleets: Sequence[int], tokens: int) -> None:
    """The real source, one group in flight for each worker, on a virtual clock; three batches after the first."""
    env = make_env(GROUP)
    tune_gc()
    names = ("main ms/group", "dispatcher ms/group", "age max", "token age", "workers busy", "GiB resident after")
    table((_source_row(env, count, tokens) for count in fleets), ("workers", "in flight", *names))


def _source_row(env: TaskEnv, count: int, tokens: int) -> Sequence[object]:
    options = {"num_groups": count // 2, "max_policy_age": 1, "num_steps": 4, "response_tokens": float(tokens)}
    scenario = Scenario(num_workers=count, groups_per_worker=1, **options)  # type: ignore[arg-type]
    one = Simulation(env, scenario).run()
    each = [f"{1e3 * seconds / scenario.num_groups:.2f}" for seconds in (one.main_s, one.dispatcher_s)]
    ages = (one.policy_age_max, f"{one.token_age_mean:.2f}", f"{1 - one.worker_idle:.0%}")
    return count, one.most_in_flight, *each, *ages, f"{resident_kib() / 2**20:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "fleet", "source"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--engines", nargs="+", type=int, default=list(ENGINES))
    parser.add_argument("--costs", type=Path, help="model: JSON of the constants; read where it exists, else written")
    for each in (*fields(Job), *fields(Cluster)):
        if isinstance(each.default, (int, float)):
            name = "--" + each.name.replace("_", "-")
            parser.add_argument(name, type=type(each.default), default=each.default)
    options = parser.parse_args()
    match options.what:
        case "model":
            model(options)
        case "fleet":
            fleet(options.engines)
        case "source":
            source(options.engines, options.tokens)


if __name__ == "__main__":
    main()
