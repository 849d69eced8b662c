"""Every command and every Python block of README.md, CONTRIBUTING.md and docs/**/*.md does what a reader expects.

Commands are run as they are written, in a directory that has what they name, with sizes of seconds and the embedded
policy in place of models of the hub (:mod:`tests.docs.rules`). Where a command needs a GPU as it is written, a comment
above its block says so, and ``sota-grpo estimate`` has to find that it fits (:func:`is_run`).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sota_grpo.config.validators import validate
from tests.docs.markdown import DOCUMENTS, ROOT, Block, Command, blocks, commands
from tests.docs.rules import (
    ELSEWHERE,
    config_of,
    is_of_the_shell,
    is_slow,
    is_tool,
    is_training,
    needs_gpu,
    starts_workers,
    why_not_run,
)
from tests.docs.test_reference_commands import COMMANDS as REFERENCE
from tests.docs.workshop import MADE, Workshop, run_dir, without_dir

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
COMMANDS = [command for block in SHELL for command in commands(block)]
#: What the names in a command depend on: files of its document, folders of runs, tasks of reasoning-gym.
OWN = re.compile(r"\.(?:py|jsonl?|parquet)\b|outputs/|env\.tasks=")


def is_mixed(command: Command) -> bool:
    """Whether a mixture of the same document trains with its tools or its environment, from the same file."""
    named = [word.partition("=")[2] for word in command.words if word.startswith(("env.tools=", "env.environment="))]
    others = [c for c in COMMANDS if c.block.document == command.block.document]
    mixtures = " ".join(word for c in others for word in c.words if word.startswith("env.mixture="))
    return bool(named) and all(name in mixtures for name in named)


def is_run(command: Command) -> bool:
    """Whether it is run here: of the commands that train, those of the README and those with names of their own. All
    others differ from these in options only, and have to keep the rules; sweeps and what starts workers would take a
    minute each, and whole runs of that kind are in ``tests/e2e``."""
    if ELSEWHERE & set(command.block.needs):
        return False
    if not is_training(command):
        return is_tool(command) or is_of_the_shell(command)
    estimated = command.block.needs and "hub" not in command.block.needs
    own = OWN.search(" ".join(command.words[2:])) and not estimated and not is_mixed(command)
    return not is_slow(command) and (command.block.document.name == "README.md" or bool(own))


#: What ``estimate`` composes and judges as it is written. What only the hub describes cannot be estimated without it.
ESTIMATED = [
    c for c in COMMANDS if is_training(c) and "hub" not in c.block.needs and (c.block.needs or starts_workers(c))
]
#: What another document, :mod:`tests.docs.test_reference_commands` or the workshop runs as well, perhaps in another
#: directory, is run once: in a directory that later commands name.
ELSEWHERE_RUN = {without_dir(c) for c in (*REFERENCE.values(), *MADE)}
ONCE = {key: c for c in sorted(COMMANDS, key=run_dir) if (key := without_dir(c)) not in ELSEWHERE_RUN}


def test_every_block_says_its_language() -> None:
    """Those without one are not code: pictures of folders, output, pseudo-code."""
    assert {block.language for block in BLOCKS} <= {"bash", "python", "text", ""}
    assert len(SHELL) > 20


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.document.name}:{block.line}")
def test_blocks_are_valid_shell(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in ONCE.values() if is_run(c)], ids=str)
def test_commands_run(command: Command, workshop: Workshop) -> None:
    if "reasoning_gym" in command.text:
        pytest.importorskip("reasoning_gym")
    workshop.run(command).require(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if not is_run(c) and not is_training(c)], ids=str)
def test_commands_that_are_not_run_have_a_reason_and_name_what_exists(command: Command) -> None:
    assert why_not_run(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if is_training(c)], ids=str)
def test_a_comment_says_what_a_command_needs(command: Command) -> None:
    """The comment counts for the block, so a block that a GPU is needed for may hold commands that need none.

    And what is not run keeps the rules.
    """
    if not is_run(command):
        validate(config_of(command))
    if needs_gpu(command):
        assert {"gpu", "cluster"} & set(command.block.needs), f"{command}: <!-- needs: gpu --> belongs above the block"
    elif "gpu" in command.block.needs:
        assert any(needs_gpu(other) for other in commands(command.block) if is_training(other))


@pytest.mark.parametrize("command", ESTIMATED, ids=str)
def test_what_needs_gpus_or_workers_fits_as_it_is_written(command: Command, workshop: Workshop) -> None:
    workshop.estimate(command).require(f"{command}: sota-grpo estimate")


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=lambda block: f"{block.document.name}:{block.line}"
)
def test_python_blocks_run(block: Block, workshop: Workshop) -> None:
    workshop.run_python(block).require(f"{block.document.name}:{block.line}")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run_and_are_short(path: Path, workshop: Workshop) -> None:
    text = path.read_text()
    assert text.count("\n") <= 60
    workshop.run_python(Block(path, "python", text, 0)).require(path.name)
