"""What the documents point to exists, and what they were generated from still says the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.preset_table import PRESETS, TRL, VERL, WHY_NOT, table
from sota_grpo.config.validators import RULES
from tests.docs.markdown import DOCUMENTS, ROOT

PAGES = [*DOCUMENTS, ROOT / "benchmarks" / "README.md", ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    text = _FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def public(path: Path) -> list[tuple[str, ast.AST]]:
    """The module itself, and its classes and functions without an underscore."""
    tree = ast.parse(path.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [("", tree), *((n.name, n) for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} (there is {sorted(anchors(target))})"


RULE_NAMES = {rule.__name__ for rule in RULES}


def test_every_public_name_has_a_docstring() -> None:
    """Modules, classes and functions; methods are described by their class. A rule's name is its sentence."""
    missing = []
    for path in sorted((ROOT / "sota_grpo").rglob("*.py")):
        if "presets" in path.parts:
            continue
        bare = [name for name, node in public(path) if not ast.get_docstring(node)]
        missing += [f"{path.relative_to(ROOT)} {name}" for name in bare if name not in RULE_NAMES]
    assert missing == []


def test_the_table_of_presets_is_what_they_say() -> None:
    """Where this fails: python scripts/preset_table.py prints what belongs there."""
    text = (ROOT / "docs" / "algorithm.md").read_text()
    assert text.split("<!-- presets -->")[1].strip() == table().strip()


def test_every_preset_has_a_peer_or_a_reason() -> None:
    presets = {path.stem for path in PRESETS.glob("*.yaml")}
    for peer, having in (("trl", TRL), ("verl", VERL)):
        without = {name for name, other in WHY_NOT if other == peer}
        assert set(having) | without == presets
        assert not set(having) & without


@pytest.mark.slow
def test_the_table_of_hardware_is_what_estimate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails: python scripts/hardware_table.py prints what belongs there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from scripts.hardware_table import table

    text = (ROOT / "docs" / "hardware.md").read_text()
    assert text.split("<!-- hardware -->")[1].strip() == table().strip()
