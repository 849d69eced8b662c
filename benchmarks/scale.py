"""Scale by simulation (docs/scale.md): ``python -m benchmarks.scale control|memory|staleness|profile``.

The source, the buffer, the prompts and the rows are the real ones; workers and learner are events on a virtual clock.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.simulation import Outcome, Scenario, Simulation
from sota_grpo.envs import TaskEnv
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.tasks import make_task
from sota_grpo.training.checkpoint import CheckpointStore

AGES = (0, 1, 2, 3, 4)
RATIOS = (0.5, 1.0, 2.0)


def make_env(group_size: int) -> TaskEnv:
    env = TaskEnv(make_task("arithmetic"), load_tokenizer("tiny"), num_envs=group_size, repeats=group_size)
    env.check_prompts()  # as a run does before it starts
    return env


def fleet(num_workers: int, **options: float) -> Scenario:
    """Workers with 10 places each, all of them filled by the slots of age 4."""
    chosen = {"groups_per_worker": 10, "max_policy_age": 4, "num_groups": 2 * num_workers, "num_steps": 4, **options}
    return Scenario(num_workers=num_workers, **chosen)  # type: ignore[arg-type]


def tune_gc() -> None:
    """As a run does before its first step (:meth:`sota_grpo.run.app.Run.train`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> None:
    """A table in Markdown."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---:|" * len(header))
    for row in rows:
        assert len(row) == len(header), f"{len(row)} cells under {len(header)} headings: {row}"
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def control(max_workers: int, repeat: int) -> None:
    """CPU time of the control plane, and how many workers one process can serve; the best of ``repeat`` runs.

    Above 100 workers one run is long enough.
    """
    env = make_env(8)
    tune_gc()
    cases = [(tokens, workers) for tokens in (16, 512) for workers in (10, 100, 1000, 2000) if workers <= max_workers]
    header = ("workers", "in flight", "tokens", "groups/s", "main ms/group", "dispatcher ms/group", "of it gc")
    rows = (_control_row(env, fleet(workers, response_tokens=float(tokens)), repeat) for tokens, workers in cases)
    table(rows, (*header, "step s (virtual)", "share of step", "workers served"))


def _control_row(env: TaskEnv, scenario: Scenario, repeat: int) -> Sequence[object]:
    times = repeat if scenario.num_workers < 1000 else 1
    runs = [_run_and_watch_gc(env, scenario) for _ in range(times)]
    one, swept = max(runs, key=lambda run: run[0].groups_per_cpu_s)
    served = one.groups_per_cpu_s * scenario.group_s(env.repeats) / scenario.groups_per_worker
    per_group = [f"{1e3 * seconds / scenario.num_groups:.2f}" for seconds in (one.main_s, one.dispatcher_s)]
    share = f"{(one.main_s + one.dispatcher_s) / one.step_s:.0%}"
    size = (scenario.num_workers, one.most_in_flight, f"{scenario.response_tokens:g}")
    return (
        *size,
        f"{one.groups_per_cpu_s:.0f}",
        *per_group,
        f"{swept:.0%}",
        f"{one.step_s:.2f}",
        share,
        f"{served:.0f}",
    )


def _run_and_watch_gc(env: TaskEnv, scenario: Scenario) -> tuple[Outcome, float]:
    """What came of it, and the share of the CPU time that went into Python's garbage collector."""
    began, spent = 0.0, 0.0

    def watch(phase: str, info: object) -> None:
        nonlocal began, spent
        if phase == "start":
            began = time.thread_time()
        else:
            spent += time.thread_time() - began

    started = time.thread_time()
    gc.callbacks.append(watch)
    try:
        measured = Simulation(env, scenario).run()
    finally:
        gc.callbacks.remove(watch)
    return measured, spent / (time.thread_time() - started)


def memory(groups: int) -> None:
    """Memory of groups in flight, finished and in a checkpoint, each case in a process of its own."""
    case = ("groups", "group size", "tokens")
    header = (
        *case,
        *(f"KiB per group {where}" for where in ("in flight", "finished", "saved")),
        "ms per group to save",
    )
    measured = []
    for size, tokens in ((8, 16), (8, 512), (16, 16)):
        command = [sys.executable, "-m", "benchmarks.scale", "memory-case"]
        command += ["--groups", str(groups), "--size", str(size), "--tokens", str(tokens)]
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        measured.append((groups, size, tokens, *line.split()))
    table(measured, header)


def memory_case(groups: int, size: int, tokens: int) -> None:
    scenario = fleet(groups // 10, response_tokens=float(tokens), sigma=0.0)
    simulation = Simulation(make_env(size), scenario)
    before = resident_kib()
    simulation.collector.is_ready()
    admitted = resident_kib()
    while simulation.workers.in_flight:
        simulation.clock.run_next()
        simulation.collector.handle_events()
    finished = resident_kib()
    began = time.thread_time()
    with tempfile.TemporaryDirectory() as folder:
        path = CheckpointStore(folder).save(0, simulation.collector.state_dict())
        saved = path.stat().st_size / 1024
    seconds = time.thread_time() - began
    sizes = (admitted - before, finished - before, saved)
    print(*(f"{size / groups:.1f}" for size in sizes), f"{1e3 * seconds / groups:.2f}")


def resident_kib() -> float:
    gc.collect()
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return float(fields.split()[0])


def staleness(plot: Path | None) -> None:
    """Age and idle time against ``max_policy_age``, the ratio of generation to learning, and the tail of lengths."""
    env = make_env(8)
    measured: list[tuple[float, float, int, Outcome]] = []
    for sigma, ratio in [(1.0, ratio) for ratio in RATIOS] + [(0.5, 1.0)]:
        for age in AGES:
            scenario = Scenario(max_policy_age=age, generation_ratio=ratio, sigma=sigma, num_steps=28)
            measured.append((sigma, ratio, age, Simulation(env, scenario).run()))
    header = ("sigma", "generation / learning", "max_policy_age", "age mean", "age max", "token age")
    table([_staleness_row(*one) for one in measured], (*header, "learner idle", "workers idle", "step s"))
    if plot is not None:
        draw(measured, plot)


def _staleness_row(sigma: float, ratio: float, age: int, one: Outcome) -> Sequence[object]:
    ages = (f"{one.policy_age_mean:.2f}", one.policy_age_max, f"{one.token_age_mean:.2f}")
    return (sigma, ratio, age, *ages, f"{one.learner_idle:.0%}", f"{one.worker_idle:.0%}", f"{one.step_s:.2f}")


def draw(found: Sequence[tuple[float, float, int, Outcome]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2))
    for ratio in RATIOS:
        chosen = [one for sigma, other, _, one in found if (sigma, other) == (1.0, ratio)]
        for axis, name in zip(axes, ("learner_idle", "worker_idle", "token_age_mean")):
            axis.plot(AGES, [getattr(one, name) for one in chosen], marker="o", label=f"{ratio:g}")
    for axis, title in zip(axes, ("learner idle (share)", "workers idle (share)", "mean age of a token (versions)")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("max_policy_age")
        axis.set_xticks(AGES)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(title="generation / learning", fontsize=8, title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def profile() -> None:
    """Where the control plane spends its time, at 1,000 groups in flight."""
    simulation = Simulation(make_env(8), fleet(100, num_steps=4))
    profiler, plain = cProfile.Profile(), simulation._cost

    def cost(thread, work):
        profiler.enable()
        try:
            return plain(thread, work)
        finally:
            profiler.disable()

    simulation._cost = cost  # type: ignore[method-assign]
    simulation.run()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("sota_grpo|decode", 25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["control", "memory", "memory-case", "staleness", "profile"])
    parser.add_argument("--max-workers", type=int, default=1000, help="control: largest fleet")
    parser.add_argument(
        "--repeat", type=int, default=1, help="control: runs per case below 1,000 workers; the best counts"
    )
    parser.add_argument("--groups", type=int, default=2000, help="memory: groups held")
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--plot", type=Path, default=None, help="staleness: SVG to write")
    options = parser.parse_args()
    match options.what:
        case "control":
            control(options.max_workers, options.repeat)
        case "memory":
            memory(options.groups)
        case "memory-case":
            memory_case(options.groups, options.size, options.tokens)
        case "staleness":
            staleness(options.plot)
        case "profile":
            profile()


if __name__ == "__main__":
    main()
