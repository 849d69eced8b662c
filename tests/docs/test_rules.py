"""How documents are read and what becomes of their commands, on documents made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import Command, blocks, commands
from tests.docs.rules import why_not_run
from tests.docs.workshop import typed

DOCUMENT = """
Text, and `code` in it.

<!-- needs: gpu, 180 GiB -->
```bash
A=1 python grpo.py \\
  seed=1 # a comment
.venv/bin/pip install -e ".[ray]"
python -c "
print('# no comment')
"
```

```
a picture
```
"""


def read(folder: Path, text: str) -> list[Command]:
    (folder / "demo.md").write_text(text)
    return [command for block in blocks(folder / "demo.md") for command in commands(block)]


def test_commands_are_what_a_shell_would_read(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, DOCUMENT)[:3]
    assert (first.words, first.environment, first.line) == (("python", "grpo.py", "seed=1"), (("A", "1"),), 6)
    assert (second.words, second.line) == (("pip", "install", "-e", ".[ray]"), 8)
    assert third.words[:2] == ("python", "-c")
    assert "# no comment" in third.words[2]
    assert str(third) == "demo.md:9"
    one, other = blocks(tmp_path / "demo.md")  # a comment counts for the block below it alone
    assert (one.language, one.needs, one.gpu_gib) == ("bash", ("gpu",), "180")
    assert (other.language, other.needs) == ("", ())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rm -rf outputs", "no rule knows"),
        ("make demos", "make demos does not exist"),
        ("pip install 'sota-grpo[rays]'", "rays"),
        ("python scripts/train_tiny.py --outs tiny", "--outs"),
    ],
)
def test_what_is_not_run_needs_a_rule_and_names_what_exists(text: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        why_not_run(typed(text))
