"""The user's functions and environments: what is a tool, what a reset is given, what is refused."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sota_grpo.errors import UserError
from sota_grpo.tasks.toolbox import Environment, Toolbox, ToolboxError, load
from sota_grpo.workers.instances import InstanceSpec


class Base:
    limit = 3

    def reset(self, **row: Any) -> Any:
        self.row = row
        return row

    def inherited(self, word: str) -> str:
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
    row = {name: random.random() for name in random.sample("abcdefgh", 5)}

    class Named:
        def reset(self, a: Any = "none", *, b: Any = "none", h: Any = "none") -> Any:
            return {"a": a, "b": b, "h": h}

    class Mixed:
        def reset(self, a: Any = "none", **others: Any) -> Any:
            return {"a": a, **others}

    class Strict:
        def reset(self, word: str, hint: str = "", **others: Any) -> None: ...

    assert Environment(Base()).reset(**row) == row
    assert Environment(Named()).reset(**row) == {name: row.get(name, "none") for name in "abh"}
    assert Environment(Mixed()).reset(**row) == {"a": "none", **row}
    with pytest.raises(ToolboxError, match=r"parameters word, which are not columns of the row \(answer, prompt\)"):
        Environment(Strict()).reset(answer="4", prompt="?")
    with pytest.raises(ToolboxError, match=r"environment (Posix)?Path has no method reset"):
        Environment(Path())
    with pytest.raises(UserError, match="the tool 'partial' cannot be called by name; define it with def"):
        _ = Toolbox([functools.partial(int, base=2)]).schemas


def test_a_list_of_records_with_a_type_is_no_content() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image", "data": ""}
    for answer in ([{"type": "dog"}], [{"type": "text", "id": 3}], [{"type": "image", "size": 3}], [text, {}]):
        assert Toolbox([lambda answer=answer: answer]).call("<lambda>", {}) == answer
    assert Toolbox([lambda: [text, image]]).call("<lambda>", {}) == "a\n[image, not shown]"


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
    ("text", "kind", "names", "expected"),
    [
        ("", "functions", (), r"^\S+/tools.py does not name functions; write \S+/tools.py:NAME,NAME.$"),
        ("", "factory", (), r"^\S+/tools.py does not name one class or function; write \S+/tools.py:NAME.$"),
        ("", "factory", ("A", "B"), r"^\S+/tools.py:A,B does not name one class or function; write \S+/tools.py:NAME"),
        (None, "functions", ("tool",), r"there is no file .*tools.py; correct the path \(relative to "),
        ("import json\nX = 1\ndef other(): ...", "functions", ("tool",), r"no function 'tool'; it has other: correct"),
        ("1 / 0", "functions", ("tool",), r"tools.py, line 1: it cannot be imported \(ZeroDivisionError: division by "),
        ("import sys; sys.exit('no\\nway')", "functions", ("tool",), r"it cannot be imported \(SystemExit: no\)"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, text: str | None, kind: str, names: tuple[str, ...], expected: str
) -> None:
    path = tmp_path / "tools.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ToolboxError, match=expected) as raised:
        load(InstanceSpec(kind, str(path), names))
    assert "\n" not in str(raised.value)
