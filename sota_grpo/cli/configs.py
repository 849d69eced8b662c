"""Commands that read a config, before a run: ``sota-grpo check`` and ``estimate``."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from sota_grpo.cli import above_zero, add_config, add_parser, config_of, whole

if TYPE_CHECKING:
    from sota_grpo.assembly.estimate import Estimate
    from sota_grpo.training.gate import Check


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``check`` and ``estimate`` to the parser of ``sota-grpo``."""
    summary = "run the start-up checks of a config, without training"
    parser = add_parser(commands, "check", summary, check.__doc__, check)
    add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder for the engine's logs and gate.json")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")

    summary = "estimate memory and steps of a run before it starts"
    parser = add_parser(commands, "estimate", summary, estimate.__doc__, estimate)
    add_config(parser)
    add, size, gpus = parser.add_argument, above_zero("a number of GiB"), whole("a number of GPUs")
    add("--memory-gb", metavar="X", type=size, help="GiB per GPU (on a CPU: of the machine); default: this machine's")
    add("--gpus", metavar="N", type=gpus, help="number of GPUs; default: this machine's, else no limit")
    count = whole("a number of tokens")
    add("--prompt-tokens", metavar="N", type=count, help="tokens of the longest prompt; default: measured on the data")
    add("--json", action="store_true", help="print the estimate as JSON")


def check(options: argparse.Namespace) -> int:
    """Run the start-up checks of training on any config, without training.

    Model, engine, reference and task are built as for training, a few responses are sampled, and each check prints what
    it measured. Files are written only to ``--run-dir``::

        sota-grpo check --config-name grpo_cpu engine=transformers
        sota-grpo check --config-name grpo_gsm8k model.name=./my-model env.dataset_path=train.jsonl

    The exit code is 0 if no check failed and 1 if one did.
    """
    from sota_grpo.assembly.preflight import announce, preflight
    from sota_grpo.recording.progress import Heartbeat
    from sota_grpo.run.entry import quiet_console

    config = config_of(options)
    preflight(config)
    quiet_console()
    began, out = time.perf_counter(), sys.stdout

    def show(check: Check) -> None:
        if not options.json:
            print(f"{check.outcome}  {check.name}: {check.sentence} ({check.seconds:.1f} s)", file=out, flush=True)

    with redirect_stdout(sys.stderr), Heartbeat():  # libraries and reward functions may print
        announce(config)
        from sota_grpo.assembly import evaluation

        checks = evaluation.check(config, run_dir=options.run_dir, on_check=show)
    made = [one.passed for one in checks if one.passed is not None]
    seconds = time.perf_counter() - began
    if options.json:
        print(json.dumps({"passed": all(made), "seconds": seconds, "checks": list(map(asdict, checks))}, indent=1))
    else:
        print(f"{sum(made)} of {len(made)} checks passed in {seconds:.1f} s")
    return 0 if all(made) else 1


def estimate(options: argparse.Namespace) -> int:
    """Estimate the memory and the number of steps of a run before it starts.

    It prints the devices of learner, engine and reference, the memory of each device in each phase of a step (with
    prompt and response of the largest size), and the number of steps. It needs no weights, and for common models no
    network::

        sota-grpo estimate --config-name grpo_gsm8k
        sota-grpo estimate hardware=eight_gpus mode=async model.name=Qwen/Qwen2.5-7B-Instruct --gpus 8 --memory-gb 80

    The exit code is 0 if the run fits. Otherwise it is 2, and the smallest change of options with which it fits (on
    ``--gpus`` GPUs) is printed, if there is one. The learner's tensors are within 15 % on a CPU and 10 % on one GPU
    (tests measure both); engines and several GPUs have not been compared. The C library's heap is not counted.
    """
    from sota_grpo.config.validators import validate

    config = config_of(options)
    validate(config)
    if "HF_HUB_OFFLINE" not in os.environ and not getproxies():  # a proxy has to know the hub's name itself
        endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        try:
            socket.getaddrinfo(endpoint.hostname, endpoint.port or 443)
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"  # else its client waits half a minute for it
    with redirect_stdout(sys.stderr):  # libraries may print
        from sota_grpo.assembly.estimate import estimate
        from sota_grpo.run.entry import quiet_console

        quiet_console()
        result = estimate(config, memory_gib=options.memory_gb, gpus=options.gpus, prompt_tokens=options.prompt_tokens)
    if options.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        _show(result)
    if result.refusal:
        print(f"sota-grpo: {result.refusal}", file=sys.stderr)
    return 0 if result.fits else 2


def _show(estimated: Estimate) -> None:
    """Print the facts, and one table per group of equal devices; without colors if stdout is no terminal."""
    from rich.console import Console

    from sota_grpo.assembly.estimate import disk_of
    from sota_grpo.recording.progress import figures

    facts, sources = estimated.as_dict(), estimated.sources
    prompt, response = estimated.largest_sample
    problems = "the data is not here" if facts["problems"] is None else f"{facts['problems']:,} problems"
    texts = {
        "model": f"{facts['model']['name']}, {estimated.model.parameters:,} parameters ({sources['model']})",
        "devices": f"{facts['placement']} ({sources['machine']})",
        "engine": facts["engine"],
        "largest sample": f"{prompt:,} prompt tokens ({sources['prompt']}) + {response:,} of the response",
        "the run": f"{facts['steps']:,} steps of {facts['responses_per_step']:,} responses ({problems}), "
        f"{facts['optimizer_steps']:,} optimizer steps; micro-batches of up to {facts['micro_batch_tokens']:,} tokens "
        f"({facts['micro_batches_per_step']:,} a step at full length)",
        "disk": disk_of(estimated.config, estimated.model).sentence,
    }
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for name, text in texts.items():
        console.print(f"{name}: {text}", markup=False, emoji=False)
    for _, alike in groupby(estimated.devices, key=lambda device: (device.roles, device.moments)):
        device, *others = alike
        names, each = (f"{device.name} to {others[-1].name}", ", each") if others else (device.name, "")
        table = figures(f"{names} ({', '.join(device.roles)}{each}), GiB", *device.moments)
        moments = list(device.moments.values())
        for entry in dict.fromkeys(entry for entries in reversed(moments) for entry in entries if entries[entry]):
            table.add_row(entry, *(_cell(entries.get(entry)) for entries in moments))
        table.add_section()
        sums = [sum(entries.values()) for entries in moments]
        table.add_row("sum", *map(_cell, sums))
        table.add_row(f"of {device.capacity / 2**30:.1f} GiB", *(f"{size / device.capacity:.0%}" for size in sums))
        console.print(table)
    full = max(device.peak / device.capacity for device in estimated.devices)
    tight = " tightly (the estimate is good to about 15 %)" if full > 0.9 else ""
    console.print(f"It fits{tight}: {full:.0%} of a device." if estimated.fits else "It does not fit.")


def _cell(size: int | None) -> str:
    gib = (size or 0) / 2**30
    return f"{gib:.2f}" if gib >= 0.01 else "<0.01" if size else "-"
