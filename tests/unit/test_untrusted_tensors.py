"""Files of tensors of a run that somebody else made: none takes more memory than it has bytes, none runs anything."""

from __future__ import annotations

import copy
import io
import os
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from sota_grpo.errors import UserError
from sota_grpo.recording.stored_steps import read_step
from sota_grpo.training.checkpoint import CheckpointError, CheckpointStore, rng_state
from sota_grpo.untrusted import TensorFileError, load_tensors

WEIGHT = torch.arange(3, dtype=torch.float32)
HUGE = 1 << 28


def saved(state: object, **options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def rewritten(archive: bytes, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """The same entries, each as ``change`` makes it of its name and content."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", method) as new:
        for one in old.infolist():
            new.writestr(one.filename, change(one.filename.partition("/")[2], old.read(one)))
    return file.getvalue()


def with_pickle(old: bytes, new: bytes) -> bytes:
    def change(name: str, content: bytes) -> bytes:
        if name != "data.pkl":
            return content
        assert content.count(old) == 1
        return content.replace(old, new)

    return rewritten(saved(WEIGHT), change)


def overlapping() -> bytes:
    """Fifty entries whose bytes are the same ones."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", bytes(10_000))
        for number in range(50):
            archive.filelist.append(copy.copy(archive.filelist[0]))
            archive.filelist[-1].filename = f"a/data/{number}"
    return file.getvalue()


HOSTILE = {
    "compressed": (
        lambda: rewritten(saved(torch.zeros(1 << 20)), lambda _, content: content, zipfile.ZIP_DEFLATED),
        "it is compressed",
    ),
    "a storage that is not there": (
        lambda: with_pickle(b"K\x03t", b"J" + HUGE.to_bytes(4, "little") + b"t"),
        f"a storage claims {4 * HUGE} bytes and has 12",
    ),
    "one number for ever": (
        lambda: saved(WEIGHT[:1].expand(10**12)),
        "a tensor claims 4000000000000 bytes and its storage has 12",
    ),
    "one storage for many": (lambda: saved(views(1 << 14, 100)), "its tensors claim"),
    "a shape below zero": (
        lambda: with_pickle(b"K\x03\x85", b"J\xff\xff\xff\xff\x85"),
        "a tensor claims -4 bytes",
    ),
    "bytes in another order": (
        lambda: rewritten(saved(WEIGHT), lambda name, content: b"big" if name == "byteorder" else content),
        "order of bytes",
    ),
    "two entries of one place": (overlapping, "its entries overlap"),
    "something before it": (lambda: b"x" * 100 + saved(WEIGHT), "something stands before the archive"),
    "a comment behind it": (lambda: saved(WEIGHT)[:-2] + b"\x04\x00abcd", "does not end as"),
    "the format before archives": (lambda: saved(WEIGHT, _use_new_zipfile_serialization=False), "does not end as"),
    "code": (lambda: saved([os.system]), r"it asks for posix.system"),
    "a function of torch that is allowed elsewhere": (lambda: saved(torch.zeros(2).to_sparse()), "no part of a tensor"),
    "nothing": (lambda: b"", "does not end as"),
}


def views(count: int, times: int) -> list[torch.Tensor]:
    whole = torch.zeros(count)
    return [whole.view(-1) for _ in range(times)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_claims_more_than_it_has_is_a_sentence(name: str, tmp_path: Path) -> None:
    make, reason = HOSTILE[name]
    archive = make()
    with pytest.raises(TensorFileError, match=reason):
        load_tensors(io.BytesIO(archive))
    step = tmp_path / "steps" / "step_000000.pt"
    step.parent.mkdir()
    step.write_bytes(archive)
    with pytest.raises(UserError, match=rf"no stored step of this program: .*{reason}"):
        read_step(step)
    step.write_bytes(archive + b"SGRPOck1" + sha256(archive).digest())
    with pytest.raises(CheckpointError, match=rf"is no checkpoint of this program: .*{reason}"):
        CheckpointStore.load(step)


def test_whatever_a_run_saves_is_read_as_it_was(tmp_path: Path) -> None:
    """Views, tied weights, empty tensors, transposed ones, every dtype, the states of generators."""
    whole = torch.randn(40)
    state = {
        "views": list(whole.split(7)),
        "tied": [whole, whole],
        "turned": torch.randn(3, 5).T,
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "dtypes": [torch.ones(2, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.int64)],
        "rng": rng_state(),
        "others": [b"\xff\x00", "text", 1 << 70, None, (1.5, True)],
    }
    loaded = CheckpointStore.load(CheckpointStore(tmp_path / "checkpoints").save(3, state))
    torch.testing.assert_close(
        [loaded[name] for name in ("views", "tied", "turned", "empty", "dtypes")],
        [state[name] for name in ("views", "tied", "turned", "empty", "dtypes")],
        rtol=0,
        atol=0,
    )
    assert torch.equal(loaded["parameter"], state["parameter"])
    assert torch.equal(loaded["rng"]["torch"], state["rng"]["torch"])
    assert loaded["others"] == state["others"]


def test_a_file_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "checkpoint_000001.pt"
    path.parent.mkdir()
    path.write_bytes(b"x")
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="almost all of them are holes"):
        CheckpointStore.load(path)
