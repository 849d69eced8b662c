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

SOURCE = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "pretended_cuda"


class NoCompiler(RuntimeError):
    """The guard is not compiled yet, and this machine cannot do it."""


def reason_to_skip() -> str | None:
    """Why this machine cannot pretend, for ``pytest.mark.skipif``; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "what runs on CUDA needs Triton, which liger-kernel brings along"
    return None if _library().exists() or shutil.which("g++") else "the pretended CUDA device is compiled by g++"


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
