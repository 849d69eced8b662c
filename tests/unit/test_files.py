"""Files and folders are whole or not at all: what fails on the way leaves what was there, and nothing beside it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from sota_grpo.engines import EngineOptions
from sota_grpo.errors import UserError
from sota_grpo.files import atomic_file, atomic_folder, drop_leftovers, run_python, system_errors
from sota_grpo.migration.export import _new_folder
from sota_grpo.policy.load import load_tokenizer, save_hf
from tests.unit.tiny_models import make_model


def write(path: Path, text: str, *, durable: bool, fails: bool) -> None:
    with atomic_file(path, durable=durable) as temporary:
        temporary.write_text(text)
        if fails:
            raise OSError("full")


def fill(path: Path, *, fails: bool) -> None:
    with atomic_folder(path) as temporary:
        (temporary / "new").touch()
        if fails:
            raise OSError("full")


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_that_fails_leaves_the_one_before(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="full"):
        write(path, "half", durable=durable, fails=True)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "before")]
    write(path, "after", durable=durable, fails=False)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "after")]


@pytest.mark.parametrize("fails", ["the block", "the last step"])
def test_a_folder_that_fails_leaves_the_one_before(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").touch()
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError("full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="full"):
        fill(path, fails=fails == "the block")
    assert [one.relative_to(tmp_path).as_posix() for one in sorted(tmp_path.rglob("*"))] == ["model", "model/old"]
    monkeypatch.setattr(Path, "rename", rename)
    fill(path, fails=False)
    assert [one.relative_to(tmp_path).as_posix() for one in sorted(tmp_path.rglob("*"))] == ["model", "model/new"]


@pytest.mark.parametrize("is_file", [False, True])
def test_killed_at_any_rename_a_folder_has_its_old_or_its_new_content(is_file: bool, tmp_path, monkeypatch) -> None:
    path, rename = tmp_path / "run" / "model", Path.rename
    path.parent.mkdir()
    path.write_text("old") if is_file else path.mkdir()

    def recorded(source: Path, target: Path) -> Path:
        renamed = rename(source, target)
        shutil.copytree(path.parent, tmp_path / f"killed_{len(list(tmp_path.iterdir()))}")
        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", recorded)
        fill(path, fails=False)
    contents = []
    for killed in (*sorted(tmp_path.glob("killed_*")), path.parent):
        if killed != path.parent:
            drop_leftovers(killed)
        assert [one.name for one in killed.iterdir()] == ["model"]
        contents.append((killed / "model" / "new").exists())
    assert contents == [False, True, True]


def test_a_full_disk_under_a_tokenizer_is_an_error_of_the_system(tmp_path: Path, monkeypatch) -> None:
    """tokenizers and safetensors, which are written in Rust, raise errors of their own."""
    tokenizer = load_tokenizer("tiny")
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda _: tokenizer.backend_tokenizer.save("/dev/full"))
    with pytest.raises(OSError, match="No space left on device") as failed:
        save_hf(make_model(), tokenizer, tmp_path / "hf")
    assert failed.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="No space left on device"), _new_folder(tmp_path / "adapter", tmp_path) as out:
        tokenizer.save_pretrained(out)
    with pytest.raises(ValueError, match="of the program"), system_errors():
        raise ValueError("of the program")


def test_what_killed_writers_left_goes_and_nothing_else(tmp_path: Path) -> None:
    writers = [atomic_file(tmp_path / "a.txt"), atomic_folder(tmp_path / "model")]
    _, half = (writer.__enter__() for writer in writers)  # killed here
    (half / "weights").touch()
    kept = [tmp_path / name for name in (".hydra", "a.tmp", ".notes.tmp", ".lock")]
    for path in kept:
        path.touch()
    assert len(list(tmp_path.iterdir())) == len(kept) + 2
    drop_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    drop_leftovers(tmp_path / "nowhere")


def test_an_export_removes_what_a_killed_export_to_the_same_folder_left(tmp_path: Path) -> None:
    for name in (".hf.0a.old", ".hf.0b.tmp", ".verl.0c.tmp"):  # killed before the new folder took its place
        (tmp_path / "export" / name).mkdir(parents=True)
    with _new_folder(tmp_path / "export" / "hf", tmp_path) as folder:
        (folder / "new").touch()
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [".verl.0c.tmp", "hf"]


def test_a_users_file_is_compiled_as_it_is_written(tmp_path: Path) -> None:
    """Without the ``__future__`` imports of the module that executes it."""
    (tmp_path / "mine.py").write_text("def answer(number: int): ...\n")
    assert run_python(tmp_path / "mine.py").answer.__annotations__ == {"number": int}
    assert not (tmp_path / "__pycache__").exists()


def test_the_options_of_an_engine_do_not_show_its_key() -> None:
    assert "secret" not in repr(EngineOptions("model", eos_token_ids=[1], api_key="secret"))
