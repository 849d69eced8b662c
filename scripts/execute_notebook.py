"""Execute notebooks and save them with what they show.

What libraries write to stderr (warnings with paths, bars) differs from one machine to the next and is left out.

Usage: ``python scripts/execute_notebook.py docs/python.ipynb`` (needs the ``test`` extra).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def executed(path: Path, folder: Path, timeout_s: float = 600.0) -> Any:
    """The notebook ``path``, executed in ``folder``, without what it wrote to stderr.

    Raises:
        CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def save(notebook: Any, path: Path) -> None:
    """Write the notebook; of its metadata only the kernel stays."""
    import nbformat

    notebook.metadata = nbformat.from_dict(KERNEL)
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            save(executed(Path(name), Path(folder)), Path(name))
        print(f"{name}: executed.")


if __name__ == "__main__":
    main(sys.argv[1:])
