"""The blocks of a Markdown document that a reader would type, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r" *```(\w*)\s*")
_NEEDS = re.compile(r"<!-- needs: (\w+(?:, \w+)*)(?:, (?:(\d+) x )?(\d+) GiB)? -->\s*")
_VENV = ".venv/bin/"
_ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the number of its first line, and what the comment above it says.

    The comment may give the memory of each GPU as well, and how many there are: ``<!-- needs: gpu, 8 x 180 GiB -->``.
    """

    document: Path
    language: str
    text: str
    line: int
    needs: tuple[str, ...] = ()
    gpus: str | None = None
    gpu_gib: str = "80"


@dataclass(frozen=True)
class Command:
    """One command of a shell block.

    ``text`` is as written, on several lines perhaps; ``words`` are those of the shell, without the assignments before
    the program, which are in ``environment``, and without the virtual environment that the program is in.
    """

    block: Block
    line: int
    text: str
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.block.document.name}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order; a ``needs`` comment counts for the block right below it."""
    actual, opened, heading, lines = [], None, None, []
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        fence = _FENCE.fullmatch(line)
        if opened is None and fence:
            opened, lines = (fence[1], number + 1), []
        elif opened is None:
            heading = _NEEDS.fullmatch(line) or (None if line.strip() else heading)
        elif fence and not fence[1]:
            needs = (tuple(heading[1].split(", ")), heading[2], heading[3] or Block.gpu_gib) if heading else ()
            actual.append(Block(document, opened[0], "\n".join(lines) + "\n", opened[1], *needs))
            opened = heading = None
        else:
            lines.append(line)
    assert opened is None, f"{document}: the block of line {opened} is not closed"
    return actual


def commands(block: Block) -> Iterator[Command]:
    """The commands of a shell block: lines joined at a backslash and inside quotes, comments cut."""
    text, first = "", 0
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        text, first = (f"{text}\n{line}", first) if text else (line, number)
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            yield Command(block, first, text, *_assigned(words))
        text = ""
    assert not text, f"{block.document.name}:{first}: a quote is not closed"


def _assigned(words: list[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    environment = []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        environment.append((match[1], match[2]))
        words = words[1:]
    words = [word.removeprefix(_VENV) if place == 0 else word for place, word in enumerate(words)]
    return tuple(words), tuple(environment)
