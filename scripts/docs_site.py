"""Hooks of mkdocs (``make site``): generate the home page and the reference, and rewrite links that leave ``docs/``.

The home page is README.md; the page of options comes from the config schema, a page per room from the docstrings.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

from sota_grpo.config import Config
from sota_grpo.config.spelling import walk

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`(?!\])", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc|obj):(?=`)")
_DOCTEST = re.compile(r"^>>> .*\n(?:.+\n)*", re.MULTILINE)
_TABLE = re.compile(r"^=+ +=.*\n(?:.+\n)*", re.MULTILINE)


def modules() -> list[str]:
    """The dotted names of all public modules, packages included."""
    measured = []
    for path in sorted((ROOT / "sota_grpo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            measured.append(".".join(parts))
    return measured


def rooms() -> dict[str, list[str]]:
    """The public modules by their page: a subpackage each, and ``sota_grpo`` for the modules at the top."""
    pages: dict[str, list[str]] = {}
    for name in modules():
        room = name.split(".")[1:2]
        is_package = room and (ROOT / "sota_grpo" / room[0]).is_dir()
        pages.setdefault(room[0] if is_package else "sota_grpo", []).append(name)
    return pages


def options_page() -> str:
    """Every option with its default and its help, a table per section."""
    lines = ["# Options", "", "Give an option as `section.name=value`, on the command line or in a YAML file."]
    section = None
    for name, item, value in walk(Config()):
        of = name.rpartition(".")[0]
        if of != section:
            section = of
            lines += ["", f"## {of or 'The run'}", "", "| option | default | what it is |", "|---|---|---|"]
        default = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        meta = item.metadata
        values = ", ".join(f"`{choice}`" for choice in meta["choices"] or () if choice)
        limits = ", ".join(f"{words} {limit:g}" for words, limit in meta["limits"].items())
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        notes = [meta["help"], values and f"values: {values}", limits if number else ""]
        text = "; ".join(filter(None, notes)).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | `{default or repr(default)}` | {text} |")
    return "\n".join(lines) + "\n"


def room_page(room: str, names: list[str]) -> str:
    """The docstrings of a room's modules, read by mkdocstrings."""
    return f"# {room}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def on_config(config: Any) -> Any:
    """Fill the parts of the navigation that have a page per file: the rooms and the log."""
    logs = sorted((ROOT / "docs" / "log").glob("2*.md"), reverse=True)
    pages = {
        "Python API": [{room: f"modules/{room}.md"} for room in rooms()],
        "Log": ["log/index.md", *(f"log/{path.name}" for path in logs)],
    }

    def fill(nav: list[Any]) -> None:
        for entry in nav:
            for title, inner in entry.items() if isinstance(entry, dict) else ():
                if title in pages:
                    entry[title] = pages[title]
                elif isinstance(inner, list):
                    fill(inner)

    fill(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    pages = {"index.md": (ROOT / "README.md").read_text(), "options.md": options_page()}
    pages |= {f"modules/{room}.md": room_page(room, names) for room, names in rooms().items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links to files of the repository outside ``docs/``: to their address, or to text if there is none."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    address = next((url for title, url in urls.items() if title.lower() in ("repository", "source", "homepage")), None)
    home = page.file.src_uri == "index.md"
    folder = ROOT if home else (ROOT / "docs" / page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        name, hash_, anchor = link.partition("#")
        if not name or re.match(r"[a-z]+:", link):
            return match[0]
        path = (folder / name).resolve()
        if path == ROOT / "README.md":
            path = ROOT / "docs" / "index.md"
        if path.is_relative_to(ROOT / "docs"):
            inside = path.relative_to(ROOT / "docs").as_posix()
            return f"{mark}[{text}]({inside}{hash_}{anchor})" if home else match[0]
        inside = path.relative_to(ROOT).as_posix()
        return f"[{text}]({address}/blob/main/{inside}{hash_}{anchor})" if address else f"{text} (`{inside}`)"

    written, at = [], 0
    for code in _CODE.finditer(markdown):
        written += [_LINK.sub(rewrite, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*written, _LINK.sub(rewrite, markdown[at:])])


class Docstrings(griffe.Extension):
    """Make Markdown of docstrings: fenced doctests and tables, and no Sphinx role before a name."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute before it is parsed."""
        if obj.docstring:
            text = _ROLE.sub("", obj.docstring.value + "\n")
            text = _TABLE.sub(r"\n```text\n\g<0>```\n", text)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = _DOCTEST.sub(r"\n```pycon\n\g<0>```\n", text)
