"""The documents build as a site without a warning, and its reference names every option and public module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sota_grpo.config.spelling import walk
from tests.docs.markdown import ROOT

for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra docs)")


def test_the_site_builds_strictly_and_its_reference_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    options = (tmp_path / "site" / "options" / "index.html").read_text()
    assert [name for name, _, _ in walk() if f"<td><code>{name}</code></td>" not in options] == []
    written = {name for page in (tmp_path / "site" / "modules").rglob("*.html") for name in ids(page)}
    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "sota_grpo").rglob("*.py"))
    public = {".".join(file.parts).removesuffix(".__init__") for file in files}
    assert {name for name in public if "._" not in name} - written == set()


def ids(page: Path) -> set[str]:
    """The anchors of a page."""
    return set(re.findall(r'id="([\w.]+)"', page.read_text()))
