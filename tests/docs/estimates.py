"""Many questions to ``sota-grpo estimate`` in one process: ``python estimates.py QUESTIONS.json`` prints the answers.

The questions are lists of arguments, the answers ``[exit code, stdout, stderr]``.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from sota_grpo.cli import main


def answer(arguments: list[str]) -> tuple[int, str, str]:
    """What the command prints, and how it ends."""
    sys.argv, code = ["sota-grpo", *arguments], 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    print(json.dumps([answer(arguments) for arguments in json.loads(Path(sys.argv[1]).read_text())]))
