"""The trainers' packages: pinned versions, their wheels, and single members of their files without their imports.

Most of these packages need a GPU, Ray or a serving engine to be imported. So a wheel is downloaded without its
dependencies and unpacked, and :func:`members` executes the few functions in question, from the wheel, with torch and
stand-ins for what else they read. No line of another trainer's code is in this repository.
"""

from __future__ import annotations
import __future__

import ast
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Package(NamedTuple):
    """A trainer. ``python`` is the Python whose wheel is taken; None: it is imported, installed by the extra bench."""

    title: str
    name: str
    version: str
    python: str | None = None


PACKAGES = {
    "trl": Package("TRL", "trl", "1.16.0"),
    "verl": Package("verl", "verl", "0.9.1"),
    "torchrl": Package("TorchRL", "torchrl", "0.14.1"),
    "openrlhf": Package("OpenRLHF", "openrlhf", "0.11.2", "3.11"),
    "skyrl": Package("SkyRL", "skyrl", "0.4.0", "3.12"),
    "ms_swift": Package("ms-swift", "ms-swift", "4.6.0", "3.12"),
    "areal": Package("AReaL", "areal", "1.0.4", "3.12"),
    "miles": Package("miles", "miles-rl", "0.0.2", "3.12"),
    "torchtitan": Package("torchtitan", "torchtitan", "0.3.0", "3.12"),
    "unsloth": Package("Unsloth", "unsloth-zoo", "2026.10.9", "3.12"),
    "trinity": Package("Trinity-RFT", "trinity-rft", "0.6.0", "3.12"),
    "twinkle": Package("twinkle", "twinkle-kit", "0.5.1", "3.12"),
}
#: Looked for and left out.
LEFT_OUT = {
    "NeMo-RL": "its package on PyPI (nemo-rl 0.0.0) is an empty placeholder",
    "siiRL, RLinf, ART, Cosmos-RL": "on PyPI, without an adapter so far",
    "prime-rl, open-instruct, slime, rLLM, ROLL": "not on PyPI, or the name there is another project's",
}


class NotInstalled(Exception):
    """A package is not here; the message says why."""


def root(name: str, folder: Path) -> Path:
    """The folder with the modules of a package's wheel, which is downloaded at the first call."""
    package = PACKAGES[name]
    target = folder / f"{package.name}-{package.version}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        wheel = _download(package, folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target.with_suffix(".part"))
        target.with_suffix(".part").rename(target)
    pure = target / f"{package.name.replace('-', '_')}-{package.version}.data" / "purelib"
    return pure if pure.exists() else target


def _download(package: Package, folder: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version", str(package.python), "--dest", str(folder), wanted]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600, check=False)
    found = sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotInstalled(f"pip download {wanted}: {reason}")
    return found[0]


def version(name: str) -> str:
    """The version that is judged: of a wheel the pinned one, of an imported package the installed one."""
    package = PACKAGES[name]
    if package.python:
        return package.version
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError as error:
        raise NotInstalled(f"{package.name} is not installed: pip install sota-grpo[bench]") from error


def members(file: Path, *names: str, **imports: Any) -> SimpleNamespace:
    """Top-level functions, classes and values of a file, or methods (``Class.method``), without its other contents.

    They are executed in the order of ``names``, with ``imports`` and torch as what the file has imported, and see each
    other. ``NotInstalled`` if the file has no such member: then it is another version.
    """
    space: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "nn": torch.nn, "F": torch.nn.functional}
    space |= {"__name__": __name__, **imports}
    tree = ast.parse(file.read_text())
    for name in names:
        _run([_member(tree, name, file)], file, space)
    return SimpleNamespace(**space)


def statements(file: Path, method: str, first: str, last: str) -> Any:
    """A function ``(variables) -> variables`` that runs a part of a method too long to call: from the statement that
    begins with ``first`` to the one that begins with ``last``, in the source as ``ast.unparse`` writes it."""
    body = _member(ast.parse(file.read_text()), method, file).body
    texts = [ast.unparse(node) for node in body]
    begin = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
    end = next((i for i, text in enumerate(texts) if begin is not None and i >= begin and text.startswith(last)), None)
    if begin is None or end is None:
        raise NotInstalled(f"{file.name}: {method} has no statements from {first!r} to {last!r}")

    def run(**variables: Any) -> dict[str, Any]:
        space = {"torch": torch, **variables}
        _run(body[begin : end + 1], file, space)
        return space

    return run


def _member(tree: ast.Module, name: str, file: Path) -> Any:
    body: list[ast.stmt] = tree.body
    *outer, inner = name.split(".")
    for part in outer:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        assigned = [target.id for target in targets if isinstance(target, ast.Name)]
        if getattr(node, "name", None) == inner or inner in assigned:
            return node
    raise NotInstalled(f"{file.name} has no {name}")


def _run(body: list[ast.stmt], file: Path, space: dict[str, Any]) -> None:
    module = ast.Module(body, type_ignores=[])
    exec(compile(module, str(file), "exec", __future__.annotations.compiler_flag, dont_inherit=True), space)
