"""``sota-grpo train``: what ``grpo.py`` is in a checkout, and with ``--async`` what ``grpo-async.py`` is.

The presets come with the package. Everything after ``train`` is Hydra's: ``--config-name NAME``, ``key=value``,
``--multirun``, ``--cfg job``, and the completion of the shell (docs/python.md)::

    sota-grpo train --config-name grpo_cpu seed=1
    sota-grpo train --async --config-name grpo_cpu
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

ASYNC = "--async"
#: How the shell asks for completions: the program, not the command, is called with it (Hydra's convention).
QUERY = "-sc"
_LINE = "COMP_LINE"  # what is typed so far
_OPTIONS = ("--async", "--cfg", "--config-dir", "--config-name", "--help", "--info", "--multirun", "--resolve")
_NO_PREFIX = "\0"  # no argument begins with it, so that all of them are Hydra's


def add_command(commands: Any) -> None:
    """Add ``train`` to the parser of ``sota-grpo``."""
    parser = commands.add_parser(
        "train", help="train: grpo.py of a checkout; --async: grpo-async.py", prefix_chars=_NO_PREFIX, add_help=False
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Hand the command line to Hydra, which ends the process with the exit code of ``grpo.py``."""
    return _hydra(options.arguments)


def complete(arguments: Sequence[str], commands: Collection[str]) -> int:
    """Print what may come next on the line that is being typed: a command, or after ``train`` what Hydra knows.

    Args:
        arguments: of the program: ``-sc query=SHELL``.
        commands: of ``sota-grpo``.
    """
    program, _, typed = os.environ.get(_LINE, "").lstrip().partition(" ")
    command, space, rest = typed.lstrip().partition(" ")
    if not space:
        print("\n".join(sorted(name for name in commands if name.startswith(command))))
        return 0
    if command != "train":
        return 0
    *before, word = rest.split(" ")
    if word.startswith("-") or before[-1:] in (["--config-name"], ["-cn"]):
        from sota_grpo.assembly.compose import preset_names

        names = _OPTIONS if word.startswith("-") else preset_names()
        print("\n".join(name for name in names if name.startswith(word)))
        return 0
    os.environ[_LINE] = " ".join([program, *(one for one in before if one != ASYNC), word])
    return _hydra(arguments)


def _hydra(arguments: Sequence[str]) -> int:
    # OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from sota_grpo.run.entry import entry

    sys.argv[1:] = [argument for argument in arguments if argument != ASYNC]
    entry(mode="async" if ASYNC in arguments else "sync", command="sota-grpo train [--async]")
    return 0
