"""Tables that tests write, and the folder of real data that some read."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a table in the form that the name of its file says; return its path."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n\n".join(map(json.dumps, rows)))
    return str(path)


def shared_data(*names: str) -> Path:
    """A file or folder of real data; the test is skipped where it is not there."""
    folder = os.environ.get("SOTA_GRPO_DATA") or Path(__file__).resolve().parents[1].parent / "shared" / "data"
    path = Path(folder, *names)
    if not path.exists():
        pytest.skip(f"{path} is not there; SOTA_GRPO_DATA names the data folder")
    return path
