"""The options around training: evaluation, the cluster, the gate, and where the run is seen."""

from __future__ import annotations

from dataclasses import dataclass

from sota_grpo.options import opt, part


@dataclass
class EvalConfig:
    """Accuracy on the held-out split."""

    mode: str = opt("on", "evaluate at the start and at the end", ("on", "off"))
    every: int = opt(0, "turns of the loop between evaluations; 0: only at the start and at the end")
    num_samples: int = opt(256, "held-out problems")
    avg_at_k: int = opt(4, "responses per problem at temperature 1 beside the greedy one; 0: greedy only")


@dataclass
class RayConfig:
    """The cluster on which workers run (mode=async, or several devices for a role)."""

    address: str | None = opt(None, "a running cluster (HOST:PORT, auto); null starts one on this machine")
    start_timeout_s: float = opt(
        300.0, "longest wait for the cluster's resources, and longest time in which workers that start do nothing"
    )


@dataclass
class CheckConfig:
    """The gate before the first step."""

    mode: str = opt("strict", "a failed check ends the run, warns, or is not made", ("strict", "warn", "off"))


@dataclass
class LoggingConfig:
    """Where the run is seen."""

    wandb: str = opt("disabled", "Weights & Biases", ("online", "offline", "disabled"))
    project: str = opt("sota_grpo", "W&B project")
    run_name: str | None = opt(None, "W&B name of the run; null: the run directory's name")
    tags: list[str] = part(list, "W&B tags")
    tensorboard: bool = opt(False, "write the metrics to tensorboard/ in the run directory too")
    report: bool = opt(True, "write report.html at every checkpoint and at the end")
    store_steps: bool = opt(True, "keep turn 0 and the turns after checkpoints whole in steps/, for report and replay")
    num_examine: int = opt(0, "completions per turn written out in debug_logs/, with the breakdown of their reward")
    level: str = opt("info", "least level written to training.log", ("debug", "info", "warning"))
