"""Compiles ``guard.cpp`` against the installed torch and loads it, which must be done before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_name("guard.cpp")
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).with_name("site")
CACHE = ROOT / ".cache" / "pretended_cuda"


#: An H100 SXM, as torch describes it.
H100 = {
    **{"name": "NVIDIA H100", "major": 9, "minor": 0, "gcnArchName": "", "is_integrated": 0, "warp_size": 32},
    **{"total_memory": 85_029_158_912, "multi_processor_count": 132, "L2_cache_size": 52_428_800},
    **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65_536},
    **{"shared_memory_per_block": 49_152, "shared_memory_per_block_optin": 232_448},
}


class NoCompiler(RuntimeError):
    """The guard is not compiled yet, and this machine cannot do it."""


def reason_to_skip() -> str | None:
    """Why this machine cannot pretend, for ``pytest.mark.skipif``; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "what runs on CUDA needs Triton, which the bench extra installs"
    torch = importlib.util.find_spec("torch")  # not imported
    if torch is not None and torch.origin and list(Path(torch.origin).parent.glob("lib/libtorch_cuda*")):
        return "the pretended device needs a torch built for CPUs, and this one is built for CUDA"
    return None if _library().exists() or shutil.which("g++") else "the pretended CUDA device is compiled by g++"


def environment() -> dict[str, str]:
    """The variables of a process that pretends."""
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(SITE), *before, str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}  # Triton's kernels run line by line, in numpy


def become(arguments: list[str]) -> NoReturn:
    """This process begins anew as a Python with ``arguments`` that pretends.

    Raises:
        NoCompiler: see :func:`compiled`.
    """
    compiled()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment())


def pretending() -> bool:
    """Whether this process was started to pretend."""
    return str(SITE) in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def load() -> None:
    """Make the process's torch believe in one CUDA device.

    Raises:
        NoCompiler: there is no g++, or it refused.
        RuntimeError: torch is imported already, and has taken note that there is no such device.
    """
    if "torch._C" in sys.modules:
        raise RuntimeError("torch was imported before the guard; use python -m tests.pretended_cuda")
    ctypes.CDLL(str(compiled()))


def compiled() -> Path:
    """The shared library, compiled unless it is there; several processes may ask at once."""
    library = _library()
    if library.exists():
        return library
    if shutil.which("g++") is None:
        raise NoCompiler(reason_to_skip())
    torch = _torch()
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(unfinished), *include, *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoCompiler(f"{' '.join(command)}\n{done.stderr}")
    unfinished.replace(library)
    return library


def _torch() -> Path:
    """The folder of torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoCompiler("torch is not installed")
    return Path(spec.origin).parent


def _library() -> Path:
    key = f"{importlib.metadata.version('torch')}{_torch()}{SOURCE.read_text()}"
    return CACHE / f"guard-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
