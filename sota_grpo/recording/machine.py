"""Describe command, code version, packages and machine of a run's start."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("sota-grpo", "torch", "torchrl", "tensordict", "transformers", "vllm", "ray", "peft")
SECRET = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)
_IN_MAPPING = re.compile(
    r"""([{,]\s*(['"]?)[^'"{},:]*(?:token|key|secret|password)\2\s*:(?!\s*null\s*[,}])\s*)  # a name
    # its value: quoted text, a list or mapping with all that follows it, or other text
    (?:'(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [{\[].* | (?:\\.|[^,}\\])+)
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_GIT_S = 5.0  # time limit of git, for slow disks
_GPUS = Path("/proc/driver/nvidia/gpus")  # GPU names; torch would initialise CUDA to read them


@lru_cache(maxsize=1)
def this_start() -> dict[str, Any]:
    """Return command (:func:`without_secrets`), commits, versions and machine of this process; computed only once.

    ``commit`` is the commit of this package's source tree, ``working_tree`` that of the current folder (each absent if
    unknown); ``-dirty`` is appended if tracked files differ. ``started`` is the time of the first call.

    >>> sorted(this_start().keys() - {"commit", "working_tree", "gpus"})
    ['command', 'cpus', 'host', 'started', 'versions']
    """
    import torch

    package = Path(__file__).parents[1]
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None  # not only below another tree
    described = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    commits = {"commit": _git(package, *described) if tracked else None, "working_tree": _git(Path.cwd(), *described)}
    lines = [line.partition(":") for path in _GPUS.glob("*/information") for line in path.read_text().splitlines()]
    models = sorted({value.strip() for name, _, value in lines if name == "Model"})
    count = torch.cuda.device_count()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(without_secrets(sys.orig_argv)),
        **{name: commit for name, commit in commits.items() if commit},
        "versions": {"python": platform.python_version()} | installed_versions(_PACKAGES),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        **({"gpus": " ".join([f"{count} x", ", ".join(models) or "GPU"])} if count else {}),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return {package: version} of those of ``packages`` that are installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with ``***`` for values (not null) of options that end in token, key, secret or password.

    >>> without_secrets(["a.py", "engine.api_key=abc", "--hub-token", "def", "extra={my_token: ghi, max_tokens: 9}"])
    ['a.py', 'engine.api_key=***', '--hub-token', '***', 'extra={my_token: ***, max_tokens: 9}']
    """
    hidden = []
    for before, argument in zip(["", *arguments], arguments):
        name, is_pair, value = argument.partition("=")
        if before.startswith("-") and "=" not in before and SECRET.search(before):
            argument = "***"
        elif is_pair and SECRET.search(name) and value not in ("", "null"):
            argument = f"{name}=***"
        hidden.append(_IN_MAPPING.sub(r"\1***", argument))
    return hidden


def in_words(start: Mapping[str, Any]) -> str:
    """Return a result of :func:`this_start`, possibly of another program version, as one line of text.

    >>> in_words({"command": "grpo.py", "commit": "abc", "versions": {"torch": "2.13.0"}, "host": "a", "cpus": 2})
    'grpo.py · commit abc · torch 2.13.0 · a · 2 cores'
    """
    versions = start.get("versions")
    numbers = [f"{name} {number}" for name, number in versions.items()] if isinstance(versions, dict) else []
    facts = {**start, "versions": " · ".join(numbers)}
    if facts.get("working_tree") == facts.get("commit"):
        facts["working_tree"] = None
    texts = {"command": "{}", "commit": "commit {}", "working_tree": "working tree {}", "versions": "{}"}
    texts |= {"host": "{}", "gpus": "{}", "cpus": "{} cores"}
    return " · ".join(text.format(facts[name]) for name, text in texts.items() if facts.get(name))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in ``folder``; None without git or a repository, or after a time-out."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
