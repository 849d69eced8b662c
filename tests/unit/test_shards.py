"""Laws of checkpoints that ranks write in parts: whole or not there, read row by row, and no claim believed."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tensordict import lazy_stack

from sota_grpo import files
from sota_grpo.assembly.evaluation import load_trained
from sota_grpo.errors import UserError
from sota_grpo.policy import optimizers
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.tensor_files import Piece, StoredTensor, TensorFileError, in_memory, stored_tensors, write_tensors
from sota_grpo.policy.weight_pack import filled
from sota_grpo.training.checkpoint import CheckpointError, CheckpointStore, Shards, ShardWriter
from sota_grpo.training.remote_learner import LearnerWorker
from sota_grpo.workers.base import WorkerDied, WorkerThread
from tests.unit.test_learner import make_learner, make_rows
from tests.unit.tiny_models import make_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def split(folder: Path, whole: dict[str, torch.Tensor], cuts: dict[str, list[int]]) -> list[Path]:
    """Each tensor's rows over files, as ranks write them; a rank without rows of it leaves it out."""
    folder.mkdir()
    paths = [folder / f"rank_{rank:05d}.safetensors" for rank in range(len(next(iter(cuts.values()))) - 1)]
    for rank, path in enumerate(paths):
        spans = {name: slice(*own[rank : rank + 2]) for name, own in cuts.items() if own[rank] < own[rank + 1]}
        pieces = {name: whole[name][span] for name, span in spans.items()}
        layout = {name: Piece.of(own, (spans[name].start,), tuple(whole[name].shape)) for name, own in pieces.items()}
        write_tensors(path, layout, pieces.values(), durable=True)
    return paths


def random_tensors() -> dict[str, torch.Tensor]:
    rows = int(torch.randint(1, 9, ()))
    return {str(dtype): (torch.randn(rows, 3, 2) * 9).to(dtype) for dtype in DTYPES} | {"vector": torch.randn(5)}


def test_any_rows_of_a_tensor_come_back_from_however_many_files(tmp_path: Path) -> None:
    for number in range(5):
        whole = random_tensors()
        drawn = {name: sorted(torch.randint(0, len(value) + 1, (3,)).tolist()) for name, value in whole.items()}
        cuts = {name: [0, *own, len(whole[name])] for name, own in drawn.items()}
        stored = stored_tensors(split(tmp_path / str(number), whole, cuts))
        assert stored.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(stored[name].block(()), value)
            start, stop = sorted(torch.randint(0, len(value) + 1, (2,)).tolist())
            assert torch.equal(stored[name].block((slice(start, stop),)), value[start:stop])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_part_of_a_matrix_comes_back_from_rows_and_columns_in_files(tmp_path: Path) -> None:
    """As ranks of tensor parallelism write it, each some columns of some rows; torch reads the files too."""
    whole = torch.randn(5, 7)
    paths = [tmp_path / f"rank_{rank:05d}.safetensors" for rank in range(4)]
    for path, (top, left) in zip(paths, product((0, 3), (0, 4))):
        own = whole[top : 3 if top == 0 else 5, left : 4 if left == 0 else 7].contiguous()
        write_tensors(path, {"w": Piece.of(own, (top, left), (5, 7))}, [own])
    stored = stored_tensors(paths[::-1])["w"]
    for rows, columns in product((slice(0, 5), slice(1, 4), slice(3, 5)), (slice(0, 7), slice(2, 5), slice(4, 6))):
        assert torch.equal(stored.block((rows, columns)), whole[rows, columns])
        assert torch.equal(stored.block((rows,)), whole[rows])
    actual = {"w": torch.empty(5, 7)}
    dcp.load(actual, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(actual["w"], whole)
    for kept in (paths[:1], paths[:2], paths[::2]):  # the first block, its row of blocks, its column
        with pytest.raises(TensorFileError, match=r"slices of w make .*, but by rank_0000\d.* it has \[5, 7\]: a file"):
            stored_tensors(kept)


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


def with_metadata(**changes: str) -> Callable[[bytes], bytes]:
    return with_header(lambda header: header["__metadata__"].update(changes))


LIES = {
    "more bytes than the file has": with_header(lambda h: h["w"].update(shape=[10**9, 2], data_offsets=[0, 8 * 10**9])),
    "a shape that its bytes have not": with_header(lambda h: h["w"].update(shape=[10**9, 2])),
    "bytes of another one too": with_header(lambda h: h.update(v=dict(h["w"]))),
    "negative bytes": with_header(lambda h: h["w"].update(shape=[-4, -2])),
    "an odd dtype": with_header(lambda h: h["w"].update(dtype="OBJECT")),
    "rows that begin later": with_metadata(DCP_SHARDING_INFO='{"w": {"saved_offsets": [1, 0]}}'),
    "no list of offsets": with_metadata(DCP_SHARDING_INFO="[]1"),
    "another whole shape": with_metadata(whole_shapes='{"w": [5, 2]}'),
    "no list as its whole shape": with_metadata(whole_shapes='{"w": 5}'),
    "a header longer than the file": lambda content: (1 << 60).to_bytes(8, "little") + content[8:],
    "a header that is no object": lambda content: (2).to_bytes(8, "little") + b"[]",
    "a header nested for ever": lambda content: (10**5).to_bytes(8, "little") + b"[" * 10**5,
    "nothing": lambda content: b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_claims_more_than_it_has_is_refused_before_anything_is_made_of_it(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    write_tensors(path, {"w": Piece(torch.float32, (4, 2))}, [torch.ones(4, 2)])
    path.write_bytes(LIES[lie](path.read_bytes()))
    with pytest.raises(TensorFileError):
        stored_tensors([path])


@pytest.mark.parametrize(
    "second",
    [(0, 0), (2, 0), (4, 0), (0, 2), (0, 1), (0, 3)],
    ids=["the same rows twice", "an overlap", "a gap", "columns with too few rows", "their overlap", "their gap"],
)
def test_pieces_that_make_no_whole(second: tuple[int, int], tmp_path: Path) -> None:
    layouts = [Piece(torch.float32, (3, 2)), Piece(torch.float32, (2, 2), second)]
    paths = [tmp_path / f"rank_0000{rank}.safetensors" for rank in range(2)]
    for path, kept in zip(paths, layouts):
        write_tensors(path, {"w": kept}, [torch.ones(kept.shape)])
    with pytest.raises(TensorFileError, match="the stored slices of w have gaps, overlap"):
        stored_tensors(paths)
    paths[1].unlink()
    write_tensors(paths[1], {"w": Piece(torch.float32, (3, 2), (3, 0))}, [torch.zeros(3, 2)])
    # as files of earlier versions, which do not record the whole shape
    assert stored_tensors(paths)["w"].block(())[:, 0].tolist() == [1.0] * 3 + [0.0] * 3


@pytest.fixture
def writer() -> Iterator[ShardWriter]:
    one = ShardWriter(Ranks())
    yield one
    one.thread.close()


def saved(store: CheckpointStore, step: int, value: float = 1.0, state: Any = None) -> Path:
    """A checkpoint of one rank in a process of its own."""
    writer, weights = ShardWriter(Ranks()), {"w": torch.full((4, 2), value)}
    state = state or {"model": weights, "betas": (0.9, 0.99), 3: [torch.tensor(step), torch.empty(0)]}
    shards = Shards(store.folder(step), lambda: dict([writer.written.result()]))
    rest = writer.begin(shards.folder, state)
    path = store.save(step, {"learner": rest}, shards)
    writer.thread.close()
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] + ("/" if path.is_dir() else "") for path in folder.iterdir())


def test_a_state_in_parts_comes_back_and_old_ones_go_with_their_folders(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        saved(store, step, float(step))
    learner = store.latest()[1]["learner"]
    assert isinstance(learner["model"]["w"], StoredTensor)
    assert torch.equal(learner["model"]["w"].block(()), torch.full((4, 2), 3.0))
    assert learner["betas"] == (0.9, 0.99)
    assert (int(in_memory(learner[3][0])), learner[3][1].numel()) == (3, 0)
    assert names(tmp_path) == ["checkpoint_000002", "checkpoint_000002/", "checkpoint_000003", "checkpoint_000003/"]
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.save(2, {"step": 2})  # in one file, of a run that was rewound
    assert names(tmp_path) == ["checkpoint_000002"]


def test_a_writer_that_was_killed_leaves_the_checkpoint_of_the_same_step_and_is_cleaned_up(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = saved(store, 1, 1.0)
    half = store.folder(1)
    half.mkdir()
    (half / "rank_00000.safetensors").write_bytes(b"half")
    for value in (1.0, 2.0):
        assert float(CheckpointStore.load(path)["learner"]["model"]["w"].block(())[0, 0]) == value
        saved(store, 1, 2.0)
        assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000001/"]


def test_what_a_rank_wrote_of_8_bit_moments_is_loaded(writer: ShardWriter, tmp_path: Path, monkeypatch) -> None:
    """They lie a level deeper than others: a cluster's only rank writes them."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(optimizers, "MIN_8BIT", 16)  # so that a tiny model has them
    rows = lazy_stack(make_rows())
    learner, other = (make_learner(tmp_path, optimizer="adamw_8bit", seed=seed) for seed in (0, 3))
    learner.update(rows)
    folder = CheckpointStore(tmp_path).folder(1)
    rest = writer.begin(folder, learner.state_dict(lambda own: own))
    name, _ = writer.written.result()
    other.load_state_dict(filled(rest, stored_tensors([folder / name])))
    assert other.update(rows)["grad_norm"] == learner.update(rows)["grad_norm"]
    actual, expected = (each.state_dict()["model"] for each in (other, learner))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("step", [1, 2])
def test_ranks_that_died_while_they_wrote_leave_the_old_one_and_no_half(step: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept = saved(store, 1)
    before = names(tmp_path)

    shards = Shards(store.folder(step), Mock(side_effect=WorkerDied("learner-1 was ended by SIGKILL")))
    shards.folder.mkdir()
    (shards.folder / "rank_00000.safetensors").touch()
    with pytest.raises(CheckpointError, match=rf"step {step} .*SIGKILL; checkpoint_000001\.pt is the last good one$"):
        store.save(step, {}, shards)
    assert [path for _, path in store.paths()] == [kept]
    assert names(tmp_path) == before


def test_the_shard_of_one_rank_is_not_taken_for_the_whole(writer: ShardWriter, tmp_path: Path, monkeypatch) -> None:
    """The first of two ranks, whose rows begin at 0."""
    monkeypatch.setattr("sota_grpo.training.checkpoint.local_shard", lambda tensor, ranks: (tensor[:2], (0, 0)))
    folder = CheckpointStore(tmp_path).folder(1)
    writer.begin(folder, {"w": torch.ones(4, 2)})
    name, _ = writer.written.result(30)
    with pytest.raises(TensorFileError, match=r"the shape \[2, 2\], but by rank_00000.* it has \[4, 2\]"):
        stored_tensors([folder / name])


def test_a_name_whose_sync_fails_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename was done, so the new checkpoint is what a resumed run reads."""
    store, real = CheckpointStore(tmp_path), files.sync

    def refuse_the_name(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "I/O error")
        real(path)

    saved(store, 1, 1.0)
    monkeypatch.setattr(files, "sync", refuse_the_name)
    with pytest.raises(CheckpointError, match="step 2 could not be written"):
        saved(store, 2, 2.0)
    assert [path.name for _, path in store.paths()] == ["checkpoint_000002.pt", "checkpoint_000001.pt"]
    step, state = store.latest()
    assert step == 2
    assert torch.equal(state["learner"]["model"]["w"].block(()), torch.full((4, 2), 2.0))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [damage, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_damaged_part_falls_back_to_the_checkpoint_before(
    harm: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    saved(store, 2)
    (part,) = tmp_path.glob("checkpoint_000002.*/rank_00000.safetensors")
    harm(part)
    assert store.latest(["learner"])[0] == 1
    assert "Skipping the checkpoint of step 2" in caplog.text


def test_the_name_of_a_tensor_cannot_forge_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sota_grpo.training.checkpoint.local_shard", lambda tensor, ranks: (tensor, (1, 0)))
        saved(store, 2, state={"x\n2026-01-01 ERROR sota_grpo: forged": torch.ones(4, 2)})
    assert store.latest(["learner"])[0] == 1
    (message,) = caplog.messages
    assert "the stored slices of x\\n2026-01-01 ERROR" in message


def test_what_names_files_elsewhere_is_no_checkpoint(tmp_path: Path) -> None:
    folder = "checkpoint_000001.0123456789ab"
    changes = {"folder": f"../{folder}"}, {"folder": 1}, {"more": 1}
    changes += {"files": {"../../secret.safetensors": "0"}}, {"files": ["rank_00000.safetensors"]}
    for shards in (*({"folder": folder, "files": {}} | change for change in changes), "text"):
        path = CheckpointStore(tmp_path).save(1, {"learner": {}, "shards": shards})
        with pytest.raises(CheckpointError, match="lacks entries or has unexpected content"):
            CheckpointStore.load(path)


def test_a_step_waits_for_the_copy_and_not_for_the_write(writer: ShardWriter, tmp_path: Path, monkeypatch) -> None:
    go_on, weight = threading.Event(), torch.ones(3)
    write = write_tensors

    def slow(*args: Any, **options: Any) -> str:
        go_on.wait(30)
        return write(*args, **options)

    progress: list[str] = []
    monkeypatch.setattr("sota_grpo.training.checkpoint.write_tensors", slow)
    monkeypatch.setattr(WorkerThread, "progress", lambda thread: progress.append(thread.name))
    writer.begin(tmp_path / "a", {"w": weight})
    writer.wait_copied()
    assert len(progress) == 1  # the only copy
    weight.fill_(2.0)
    assert not writer.written.done()
    go_on.set()
    name, _ = writer.written.result(30)
    assert torch.equal(load_file(tmp_path / "a" / name)["w"], torch.ones(3))
    assert len(progress) == 3  # then the header and the only tensor


def test_a_copy_that_fails_is_reported_and_training_continues(writer: ShardWriter, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sota_grpo.training.checkpoint.copy_to_host", Mock(side_effect=MemoryError("no memory")))
    writer.begin(tmp_path / "a", {"w": torch.ones(3)})
    writer.wait_copied()
    with pytest.raises(MemoryError):
        writer.written.result(30)


def test_an_evaluation_reads_the_weights_of_a_state_in_parts(tmp_path: Path) -> None:
    trained, other = make_model(), make_model()
    weights = dict(CausalPolicy(trained, shared_prompt=False).scorer.named_parameters())
    state = {"model": {name: value.detach() for name, value in weights.items()}}
    load_trained(saved(CheckpointStore(tmp_path), 1, state=state), other)
    assert all(torch.equal(one, two) for one, two in zip(other.state_dict().values(), trained.state_dict().values()))


def test_a_rank_that_does_not_see_the_run_directory_says_so(tmp_path: Path) -> None:
    worker = LearnerWorker.__new__(LearnerWorker)
    worker.learner = SimpleNamespace(ranks=Ranks(rank=3, size=4))  # type: ignore[assignment]
    (tmp_path / "there").touch()
    worker.sees(str(tmp_path / "there"))
    with pytest.raises(UserError, match=r"Rank 3 of the learner, on .*, does not see or cannot .*hydra\.run\.dir"):
        worker.sees(str(tmp_path / "not there"))
