"""Ours, TRL and TorchRL on identical work.

``python -m benchmarks.peers`` takes about 25 minutes on two quiet cores, ``--quick`` under 3, ``--full`` an hour or
more. Ctrl-C ends it and prints what there is. The tables, ``results.json`` and ``growth.png`` are written to ``--out``.
"""

from __future__ import annotations

import argparse
import os

# before torch is imported, here and in every process started from here: equal threads for all, and none that spin
# while another system is measured
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# a process that is killed leaves its semaphores to be cleaned up, which Python does and complains about
os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the base case only")
    parser.add_argument("--full", action="store_true", help="cases in between, every system on every case")
    parser.add_argument("--cases", nargs="*", help="names of cases; default: all of the plan")
    parser.add_argument("--systems", nargs="*", help="names of systems; default: all of the plan")
    parser.add_argument("--repeats", type=int, help="repetitions of everything that fits into its budget of time")
    parser.add_argument("--out", help="folder of the results; default: outputs/bench/<date>")
    options = parser.parse_args(arguments)
    from benchmarks.peers.report import measure  # imports torch

    return measure(options)


if __name__ == "__main__":
    raise SystemExit(main())
