"""``sota-grpo estimate``: whether a run fits and how long it takes, before anything is loaded.

Says where learner, engine and reference would stand, what each device holds at each moment with the largest sample
that the data and the options allow, how many training and optimizer steps there are, and, where the device is here, how
long they take by a short probe. Needs no weights, and for common models no hub::

    sota-grpo estimate --config-name grpo_gsm8k
    sota-grpo estimate hardware=eight_gpus mode=async model.name=Qwen/Qwen2.5-7B-Instruct --gpus 8 --memory-gb 80

The exit code is 0 when it fits and 2 when it does not; then the smallest change with which it would is named, within
``--gpus``. A full fine-tune in float32 on a CPU is right within 15 %, and the learner on one GPU within 10 % (tests
measure both); engines, adapters and several GPUs have not been compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from sota_grpo.cli import above_zero, add_config, add_parser, config_of, whole

if TYPE_CHECKING:
    from sota_grpo.assembly.estimate import Estimate

TIGHT = 0.9  # of a device: beyond it the estimate's own error may decide


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``estimate`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "estimate", "memory, steps and time of a run, before it starts", __doc__, run)
    add_config(parser)
    add = parser.add_argument
    size, count, switch = above_zero("a number of GiB"), whole("a number of tokens"), argparse.BooleanOptionalAction
    add("--memory-gb", metavar="X", type=size, help="GiB of each GPU (of the machine on a CPU); default: what is here")
    add(
        "--gpus", metavar="N", type=whole("a number of GPUs"), help="that there are; default: those here, else no limit"
    )
    add("--prompt-tokens", metavar="N", type=count, help="of the longest prompt; default: measured on the data")
    add("--probe", action=switch, default=True, help="time a few passes on this device; default: where it is here")
    add("--show-config", action="store_true", help="print the resolved config first, as YAML")
    add("--json", action="store_true", help="everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the estimate; 0 when the run fits, 2 when it does not.

    Raises:
        UserError: the config cannot be run at all.
    """
    from sota_grpo.config.validators import validate

    config = config_of(options)
    validate(config)
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_is_near():
        os.environ["HF_HUB_OFFLINE"] = "1"  # else its client waits half a minute for it
    with redirect_stdout(sys.stderr):  # libraries may print
        from sota_grpo.assembly.estimate import estimate
        from sota_grpo.run.entry import quiet_console

        quiet_console()
        logging.getLogger("sota_grpo").setLevel(logging.WARNING)  # what the probe builds says nothing of the run
        estimated = estimate(
            config,
            memory_gib=options.memory_gb,
            gpus=options.gpus,
            prompt_tokens=options.prompt_tokens,
            probe=options.probe,
        )
    if options.json:
        resolved = {"config": asdict(config)} if options.show_config else {}
        print(json.dumps(resolved | estimated.as_dict(), indent=1))
    else:
        if options.show_config:
            from omegaconf import OmegaConf

            print(OmegaConf.to_yaml(OmegaConf.structured(config)))
        show(estimated)
    if estimated.refusal:
        print(f"sota-grpo: {estimated.refusal}", file=sys.stderr)
    return 0 if estimated.fits else 2


def show(estimated: Estimate) -> None:
    """Tables on standard output, plain where it is no terminal."""
    from rich.console import Console

    from sota_grpo.recording.progress import figures

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    facts = figures("", "")
    facts.columns[1].justify, facts.show_header = "left", False
    for name, text in _facts(estimated):
        facts.add_row(name, text)
    console.print(facts)
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
    if not estimated.fits:
        console.print("It does not fit.")
    elif full > TIGHT:
        console.print(f"It fits, tightly: {full:.0%} of a device, and the estimate is good to about 15 %.")
    else:
        console.print(f"It fits: at most {full:.0%} of a device.")


def _cell(size: int | None) -> str:
    gib = (size or 0) / 2**30
    return f"{gib:.2f}" if gib >= 0.01 else "<0.01" if size else "-"


def _facts(estimated: Estimate) -> Iterator[tuple[str, str]]:
    """What is known of the run, one line each."""
    from sota_grpo.config.mixture import mean_group_size

    config, facts, places = estimated.config, estimated.as_dict(), estimated.places
    prompt, response = estimated.largest_sample
    steps, size = facts["steps"], facts["responses_per_step"]
    yield "model", f"{facts['model']['name']}, {estimated.model.parameters:,} parameters ({places['model']})"
    yield "devices", f"{facts['placement']} ({places['machine']})"
    yield "engine", facts["engine"]
    yield "largest sample", f"{prompt:,} prompt tokens ({places['prompt']}) + {response:,} of the response"
    if estimated.num_problems is None:
        yield "one epoch", "the data is not here"
    else:
        samples = round(estimated.num_problems * mean_group_size(config))
        epoch = f"{estimated.num_problems:,} problems, {samples:,} responses"
        yield "one epoch", f"{epoch}; the run goes {steps * size / samples:.3g} times through the data"
    count = facts["micro_batches_per_step"]
    run = f"{steps:,} steps of {size:,} responses, {facts['optimizer_steps']:,} optimizer steps of"
    micro_batches = f"{count:,} micro-batch" + ("" if count == 1 else "es")
    micro_batches += f" of up to {facts['micro_batch_tokens']:,} tokens"
    of_step = round(config.train.optim_batch_size * mean_group_size(config) / config.env.repeats)
    yield "the run", f"{run} {of_step:,} in {micro_batches} at full length"
    if estimated.host:
        moment = max(estimated.host, key=estimated.host.__getitem__)
        gib = estimated.host[moment] / 2**30
        yield "host memory", f"at least {gib:.3g} GiB on the machine of the learner, for {moment}"
    responses = estimated.responses
    share = responses["evaluation"] / sum(responses.values())
    yield (
        "evaluation",
        f"{facts['evaluations']} times, {responses['evaluation']:,} responses, {share:.1%} of all; the checks before "
        f"training take {responses['checks']}",
    )
    yield "disk", estimated.disk.sentence
    yield "time", _time(estimated)


def _time(estimated: Estimate) -> str:
    from sota_grpo.text import duration

    times, seconds = estimated.times, estimated.seconds
    if times is None or seconds is None:
        return "not measured" if estimated.machine.is_here else "not measured: the devices are not here"
    of_it = " and ".join(f"{duration(seconds[name])} for {name}" for name in ("evaluation", "checks"))
    return (
        f"at most {duration(sum(seconds.values()))} at full length, of it {of_it}: {times.step_s:.3g} s a step "
        f"(sampling {times.sample_s:.3g}, learning {times.learn_s:.3g}, reference {times.reference_s:.3g}), by a probe "
        f"of {times.flops_per_s / 1e9:.3g} GFLOP/s and {times.sampled_tokens_per_s:.3g} tokens/s of the embedded engine"
    )


def _hub_is_near() -> bool:
    """Whether the hub's name is known here; behind a proxy that is for the proxy to say."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    with suppress(OSError):
        return bool(getproxies() or socket.getaddrinfo(endpoint.hostname, endpoint.port or 443))
    return False
