"""A model's digest follows its weights, its configuration and its tokenizer, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sota_grpo.policy import model_digest as module
from sota_grpo.policy.load import resolve_model_path
from sota_grpo.policy.model_digest import model_digest


@pytest.mark.parametrize("whole", [True, False])
def test_it_follows_what_a_model_is(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:  # 3.4 MB of weights, of which 32 blocks of 4 KiB are read
        monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 20)
        monkeypatch.setattr(module, "BLOCKS", 32)
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 << 10)
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    first = model_digest(str(folder))
    assert first == model_digest("tiny")
    (folder / "README.md").write_text("a card")
    assert model_digest(str(folder)) == first
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        path, data = folder / name, bytearray((folder / name).read_bytes())
        path.write_bytes(bytes(byte ^ (index % 2) for index, byte in enumerate(data)))  # as other weights differ
        assert model_digest(str(folder)) != first, name
        path.write_bytes(data)
    assert model_digest(str(folder)) == first


def test_a_model_whose_weights_are_elsewhere_has_none(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert model_digest(str(folder)) is None
