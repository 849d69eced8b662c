"""Write the reference of every public module to ``docs/api/``, as HTML, from the docstrings (needs the extra ``docs``).

Usage: ``python scripts/api_reference.py [FOLDER]``, or ``make api``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules() -> list[str]:
    """The dotted names of all public modules, packages included."""
    found = []
    for path in sorted((ROOT / "sota_grpo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return found


def write(folder: Path) -> None:
    """One page per module, an index and a search."""
    import pdoc

    warnings.simplefilter("ignore")  # about annotations of other packages' classes
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*modules(), output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "api")
