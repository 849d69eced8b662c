"""Files of tensors of a run of untrusted origin: none runs anything."""

from __future__ import annotations

import io
import os
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from sota_grpo.errors import UserError
from sota_grpo.recording.stored_steps import read_step
from sota_grpo.training.checkpoint import CheckpointError, CheckpointStore

WEIGHT = torch.arange(3, dtype=torch.float32)


def saved(state: object, **options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def with_pickle(content: bytes) -> bytes:
    """An archive of torch's with other instructions."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(WEIGHT))) as old, zipfile.ZipFile(file, "w") as new:
        for one in old.infolist():
            new.writestr(one.filename, content if one.filename.endswith("data.pkl") else old.read(one))
    return file.getvalue()


OTHERS = {
    "code": lambda: saved([os.system]),
    "half an archive": lambda: saved(WEIGHT)[:-100],
    "a pickle that ends in a number": lambda: with_pickle(b"\x80\x02J\x01"),
    "no archive": lambda: b"weights",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_file_is_a_sentence_and_runs_nothing(name: str, tmp_path: Path) -> None:
    archive = OTHERS[name]()
    step = tmp_path / "steps" / "step_000000.pt"
    step.parent.mkdir()
    step.write_bytes(archive)
    with pytest.raises(UserError, match="damaged or not a stored step"):
        read_step(step)
    step.write_bytes(archive + b"SGRPOck1" + sha256(archive).digest())
    with pytest.raises(CheckpointError, match=r"has unexpected content \(.*; no code in it was run"):
        CheckpointStore.load(step)


def test_whatever_a_run_saves_is_read_as_it_was(tmp_path: Path) -> None:
    """Views, tied weights, empty tensors, transposed ones, every dtype."""
    whole = torch.randn(40)
    state = {
        "views": list(whole.split(7)),
        "tied": [whole, whole],
        "turned": torch.randn(3, 5).T,
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "dtypes": [torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.int64)],
    }
    loaded = CheckpointStore.load(CheckpointStore(tmp_path / "checkpoints").save(3, state))
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)


def test_a_file_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "checkpoint_000001.pt"
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="it is a sparse file"):
        CheckpointStore.load(path)
