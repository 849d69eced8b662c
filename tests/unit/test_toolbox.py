"""The user's functions and environments: what is a tool, what a reset is given, what is refused."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sota_grpo.tasks.toolbox import Environment, Toolbox, ToolboxError, load
from sota_grpo.workers.instances import InstanceSpec

GUESS = Path(__file__).parent / "environments" / "guess.py"


class Base:
    limit = 3

    def reset(self, **row: Any) -> Any:
        self.row = row
        return row

    def inherited(self, word: str) -> str:
        """Say it.

        Args:
            word: Any.
        """
        return word


class Child(Base):
    field = staticmethod(lambda: None)
    partial = functools.partial(print)

    def __init__(self) -> None:
        self.attribute = lambda: "not of the class"

    @property
    def dear(self) -> str:
        raise AssertionError("nobody asks for properties")

    @classmethod
    def made(cls) -> None: ...

    def own(self, number: int = 3) -> int:
        """Double it.

        Args:
            number: Any.
        """
        return 2 * number

    def _private(self) -> None: ...

    def __call__(self) -> None: ...


def test_tools_are_the_public_functions_of_the_class_and_its_bases() -> None:
    """As TRL has them: neither properties, class methods nor what only the object holds."""
    child = Environment(Child())
    assert (child.call("own", {}), child.call("inherited", {"word": "x"})) == (6, "x")
    for name in ("reset", "get_reward", "_private", "__call__", "dear", "made", "attribute", "partial", "row", "limit"):
        with pytest.raises(LookupError, match=r"there is no tool '.*'; the tools are <lambda>, inherited, own"):
            child.call(name, {})
    assert not hasattr(child, "get_reward")


def test_a_reset_is_given_the_columns_that_it_takes() -> None:
    rng = random.Random(random.getrandbits(32))
    row = {name: rng.random() for name in rng.sample("abcdefgh", 5)}

    class Named:
        def reset(self, a: Any = "none", *, b: Any = "none", h: Any = "none") -> Any:
            return {"a": a, "b": b, "h": h}

    class Mixed:
        def reset(self, a: Any = "none", **others: Any) -> Any:
            return {"a": a, **others}

    assert Environment(Base()).reset(**row) == row
    assert Environment(Named()).reset(**row) == {name: row.get(name, "none") for name in "abh"}
    assert Environment(Mixed()).reset(**row) == {"a": "none", **row}


def test_a_column_that_is_missing_is_named() -> None:
    class Mixed:
        def reset(self, word: str, hint: str = "", **others: Any) -> None: ...

    with pytest.raises(ToolboxError, match=r"parameters word, which are not columns of the row \(answer, prompt\)"):
        Environment(Mixed()).reset(answer="4", prompt="?")
    with pytest.raises(ToolboxError, match=r"environment (Posix)?Path has no method reset"):
        Environment(Path())


def test_a_list_of_records_with_a_type_is_no_content() -> None:
    answers = [
        [{"type": "dog", "name": "Rex"}],
        [{"type": "text", "id": 3}],
        [{"type": "image", "size": 3}],
        [{"type": "text", "text": "a"}, {"type": "dog"}],
    ]
    box = Toolbox([lambda number: answers[number]])
    for number, answer in enumerate(answers):
        assert box.call("<lambda>", {"number": number}) == answer
    assert Toolbox([lambda: [{"type": "text", "text": "a"}, {"type": "image", "data": ""}]]).call("<lambda>", {}) == (
        "a\n[image, not shown]"
    )


def test_functions_and_factories_can_be_passed_as_objects(tmp_path: Path) -> None:
    base, path = random.randrange(100), tmp_path / "tools.pkl"

    def add(number: int) -> int:
        return number + base

    path.write_bytes(cloudpickle.dumps({"add": add, "made": lambda: Child()}))
    assert load(InstanceSpec("functions", str(path), ("add",)))().call("add", {"number": 1}) == base + 1
    assert load(InstanceSpec("factory", str(path), ("made",)))().call("own", {"number": 1}) == 2
    with pytest.raises(ToolboxError, match=r"tools.pkl has no function 'sub'"):
        load(InstanceSpec("functions", str(path), ("sub",)))


def test_the_file_is_run_once_however_many_instances_there_are(tmp_path: Path) -> None:
    note, path = tmp_path / "runs", tmp_path / "tools.py"
    path.write_text(f"open({str(note)!r}, 'a').write('x')\ndef one() -> int: return 1\ndef two() -> int: return 2")
    make = load(InstanceSpec("functions", str(path), ("two", "one")))
    toolboxes = [make() for _ in range(3)]
    assert note.read_text() == "x"
    assert len(set(map(id, toolboxes))) == 3
    assert [toolboxes[0].call(name, {}) for name in ("one", "two")] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("functions", (), r"^\S+/guess.py does not name functions; write \S+/guess.py:NAME,NAME.$"),
        ("factory", (), r"^\S+/guess.py does not name one class or function; write \S+/guess.py:NAME.$"),
        ("factory", ("A", "B"), r"^\S+/guess.py:A,B does not name one class or function; write \S+/guess.py:NAME.$"),
    ],
)
def test_a_value_without_the_names_it_needs_is_refused(kind: str, names: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ToolboxError, match=expected):
        load(InstanceSpec(kind, str(GUESS), names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"there is no file .*tools.py; correct the path \(relative to "),
        ("import json\nX = 1\ndef other(): ...", r"tools.py has no function 'tool'; it has other: correct the name."),
        ("1 / 0", r"tools.py, line 1: it cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("import sys; sys.exit('no\\nway')", r"it cannot be imported \(SystemExit: no\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "tools.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ToolboxError, match=expected) as raised:
        load(InstanceSpec("functions", str(path), ("tool",)))
    assert "\n" not in str(raised.value)
