"""Invariants of the checkpoint store: durable, atomic, loud, and never wrong in silence."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch

from sota_grpo.training.checkpoint import (
    BackgroundSaves,
    CheckpointError,
    CheckpointStore,
    host_copy,
    rng_state,
    set_rng_state,
)
from tests.forked import ForkServer
from tests.process_rigs import is_gone


def _state(step: int, size: int = 500) -> dict:
    return {"step": step, "weights": torch.full((size,), float(step)), "note": "a run"}


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_allowed_type_survives_the_round_trip(tmp_path):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": [1, 2.5, None, True, b"\x00\xff", 2**130, -(2**70), ("nested", {3: "int key"})],
        "text": "naïve ✓",
    }
    path = CheckpointStore(tmp_path / "of a run" / "checkpoints").save(7, state)
    loaded = CheckpointStore.load(path)
    assert loaded["plain"] == state["plain"]
    assert loaded["text"] == state["text"]
    assert all(torch.equal(loaded["model"][key], value) for key, value in state["model"].items())
    fresh = torch.optim.AdamW(layer.parameters(), lr=1.0)
    fresh.load_state_dict(loaded["optimizer"])
    moments = zip(fresh.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(new[key], old[key]) for new, old in moments for key in old)
    assert torch.load(path, weights_only=True)["text"] == state["text"], "a plain torch.load reads the file as well"


@pytest.mark.parametrize("bad", [np.float64(1.0), Path("x"), np.zeros(2), object, threading.Lock(), lambda: 0])
def test_a_type_that_would_not_load_is_refused_and_nothing_is_left(tmp_path, bad):
    reason = r"not a tensor, dict.*\(.*(numpy|pathlib|builtins|pickle).*train.sampler is set"
    with pytest.raises(CheckpointError, match=reason):
        CheckpointStore(tmp_path).save(1, {"a": [0, bad]})
    assert _names(tmp_path) == []


def test_keeps_the_last_k_and_removes_leftovers_of_killed_writers(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is CheckpointStore(tmp_path / "never").latest() is None
    (tmp_path / ".checkpoint_000009.pt.123.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    for step in (3, 5, 8):
        store.save(step, _state(step))
    assert _names(tmp_path) == ["checkpoint_000005.pt", "checkpoint_000008.pt", "notes.txt"]
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        CheckpointStore.load(tmp_path / "checkpoint_000001.pt")
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_rewound_run_is_resumed_where_it_was_saved_last(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(10, _state(10))
    with caplog.at_level(logging.WARNING):
        store.save(4, {"step": "again"})
    assert store.latest() == (4, {"step": "again"})
    assert "checkpoint_000010.pt" in caplog.text


def test_truncation_and_any_flipped_bit_are_detected(tmp_path):
    path = CheckpointStore(tmp_path).save(1, _state(1))
    whole = path.read_bytes()
    ends = {0, 1, *(len(whole) - 38 - n for n in range(4)), *random.sample(range(len(whole)), 20)}
    damaged = [whole[:end] for end in ends]
    inside_a_tensor = whole.index(np.full(8, 1.0, dtype=np.float32).tobytes())
    for offset in [inside_a_tensor, len(whole) - 1, len(whole) - 40, *random.sample(range(len(whole)), 30)]:
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << random.randrange(8)
        damaged.append(flipped)
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"truncated|damaged"):
            CheckpointStore.load(path)


def test_a_damaged_newest_one_falls_back_and_says_so(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    paths = [store.save(step, {"step": step}) for step in (1, 2, 3)]
    paths[2].write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == (2, {"step": 2})
    assert "Skipping the checkpoint of step 3" in caplog.text
    for path in paths[:2]:
        path.write_bytes(b"junk" * 100)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        store.latest()


def test_a_disk_that_fills_up_while_writing_leaves_the_last_good_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, _state(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 .*too large.*checkpoint_000001\.pt is the last good"):
            store.save(2, _state(2, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert _names(tmp_path) == ["checkpoint_000001.pt"]


SAVES_FOR_EVER = """
import sys, torch
from pathlib import Path
from sota_grpo.training.checkpoint import BackgroundSaves, CheckpointStore
store, first = CheckpointStore(Path(sys.argv[1]), keep=2), int(sys.argv[2])
save = BackgroundSaves(store).save if sys.argv[3] == "True" else store.save
for step in range(first, first + 10_000):
    save(step, {"step": step, "weights": torch.full((1_000_000,), float(step))})
"""


@pytest.mark.parametrize("in_background", [False, True])
def test_kill_9_at_random_moments_always_leaves_a_loadable_checkpoint(in_background, tmp_path):
    script, folder = tmp_path / "writer.py", tmp_path / "of a run"
    script.write_text(SAVES_FOR_EVER)
    store, server = CheckpointStore(folder, keep=2), ForkServer(tmp_path, os.environ)
    store.save(0, _state(0))
    newest, killed_mid_save = 0, 0
    for attempt in range(60):
        if attempt >= 4 and killed_mid_save:
            break
        writer = server.start([str(script), str(folder), str(newest + 1), str(in_background)], cwd=tmp_path)
        while not is_gone(writer) and store.paths()[0][0] <= newest:  # a busy machine may start it late
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(writer, signal.SIGKILL)
        assert server.finish().code == -signal.SIGKILL
        killed_mid_save += any(folder.glob("*.tmp"))
        step, state = store.latest()
        assert step >= newest, "a checkpoint that was durable has gone"
        assert torch.equal(state["weights"], torch.full_like(state["weights"], float(step)))
        newest = step
    server.close()
    assert newest > 0
    assert killed_mid_save > 0, "no kill fell into a save: the test proves nothing"
    store.save(newest + 1, _state(newest + 1))  # each kill may have left something, and the next save clears it away
    assert len(_names(folder)) == 2


class _SlowStore(CheckpointStore):
    """Writes when it is let."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keep=2)
        self.let = threading.Event()

    def save(self, step: int, state: dict, shards: None = None) -> Path:
        assert self.let.wait(20)
        return super().save(step, state)


def test_training_continues_while_a_checkpoint_is_written_and_the_end_waits_for_it(tmp_path):
    store, weight = _SlowStore(tmp_path), torch.ones(3)
    with BackgroundSaves(store) as saves:
        saves.save(1, host_copy({"weight": weight}))
        weight.fill_(2.0)  # the next step
        saves.check()  # returns at once
        assert store.latest() is None
        store.let.set()
        saves.save(2, host_copy({"weight": weight}))  # after the first one
        assert store.latest()[0] >= 1
    assert store.latest()[0] == 2
    assert [CheckpointStore.load(path)["weight"].tolist() for _, path in store.paths()] == [[2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("told", ["check", "save", "wait", "end", "beside another"])
def test_a_checkpoint_that_could_not_be_written_ends_the_run_with_the_same_sentence(told, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    another = told == "beside another"

    def train() -> None:
        with BackgroundSaves(CheckpointStore(tmp_path / "file" / "run")) as saves:
            saves.save(1, _state(1))
            wait([saves.saving])
            if another:
                raise RuntimeError("another")
            if told != "end":
                getattr(saves, told)(*((2, _state(2)) if told == "save" else ()))

    with pytest.raises(RuntimeError, match="another" if another else "could not be written to") as raised:
        train()
    assert isinstance(raised.value, CheckpointError) != another
    assert ("could not be written" in caplog.text) == another


def _draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_the_random_state_survives_a_checkpoint_bit_for_bit(tmp_path):
    random.gauss(0, 1), np.random.randn()  # leaves a cached second value in both generators
    path = CheckpointStore(tmp_path).save(1, rng_state())
    expected = [_draw() for _ in range(3)]
    assert [_draw() for _ in range(3)] != expected
    set_rng_state(CheckpointStore.load(path))
    assert [_draw() for _ in range(3)] == expected


@pytest.mark.parametrize(("visible", "initialized"), [(3, True), (2, True), (3, False)])
def test_cuda_generators_are_continued_where_they_are_used_and_as_many(visible, initialized, monkeypatch, caplog):
    """With other GPUs, or where the learner lives in other processes, all else is continued."""
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}
    states = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("it would start CUDA on every GPU"))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states.append)
    if not initialized:
        assert "cuda" not in rng_state()
    torch.rand(3)
    set_rng_state(state)
    assert states == ([state["cuda"]] if (visible, initialized) == (3, True) else [])
    assert torch.equal(torch.get_rng_state(), state["torch"])
    assert ("3 CUDA devices, but 2 are visible" in caplog.text) == (visible == 2)
