"""``sota-grpo estimate``: estimate the memory and the number of steps of a run before it starts.

It prints the devices of learner, engine and reference, the memory of each device in each phase of a step (with prompt
and response of the largest size), and the number of steps. It needs no weights, and for common models no network::

    sota-grpo estimate --config-name grpo_gsm8k
    sota-grpo estimate hardware=eight_gpus mode=async model.name=Qwen/Qwen2.5-7B-Instruct --gpus 8 --memory-gb 80

The exit code is 0 if the run fits. Otherwise it is 2, and the smallest change of options with which it fits (on
``--gpus`` GPUs) is printed, if there is one. The learner's tensors are within 15 % on a CPU and 10 % on one GPU (tests
measure both); engines and several GPUs have not been compared. The C library's heap is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from contextlib import redirect_stdout
from itertools import groupby
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from sota_grpo.cli import above_zero, add_config, add_parser, config_of, whole

if TYPE_CHECKING:
    from sota_grpo.assembly.estimate import Estimate


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``estimate`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "estimate", "estimate memory and steps of a run before it starts", __doc__, run)
    add_config(parser)
    add, size, gpus = parser.add_argument, above_zero("a number of GiB"), whole("a number of GPUs")
    add("--memory-gb", metavar="X", type=size, help="GiB per GPU (on a CPU: of the machine); default: this machine's")
    add("--gpus", metavar="N", type=gpus, help="number of GPUs; default: this machine's, else no limit")
    count = whole("a number of tokens")
    add("--prompt-tokens", metavar="N", type=count, help="tokens of the longest prompt; default: measured on the data")
    add("--json", action="store_true", help="print the estimate as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the estimate; return 0 if the run fits, else 2. ``HF_HUB_OFFLINE`` is set if the hub cannot be reached."""
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
