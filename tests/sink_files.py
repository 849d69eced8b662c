"""What W&B and TensorBoard left on disk, read with their own formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _chunks_of(path: Path) -> list[bytes]:
    """The records of a W&B file: LevelDB's log format after a header of 7 bytes."""
    data, at, actual, open_chunk = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no record starts in the last bytes of a block
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        open_chunk += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            actual.append(open_chunk)
            open_chunk = b""
    return actual


def _records_of(run_dir: Path) -> list[list[Any]]:
    """The records of each offline file of a run directory, the oldest file first."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [list(map(Record.FromString, _chunks_of(path))) for path in files]


def wandb_history(run_dir: Path) -> list[tuple[str, list[dict]]]:
    """For each offline file of a run directory: the run id and the history rows."""
    actual = []
    for records in _records_of(run_dir):
        run_id, history = "", []
        for record in records:
            run_id = record.run.run_id or run_id
            if record.HasField("history"):
                items = record.history.item
                history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        actual.append((run_id, history))
    return actual


def wandb_run(run_dir: Path) -> Any:
    """The run as the newest offline file describes it."""
    return next(record.run for record in _records_of(run_dir)[-1] if record.HasField("run"))


def wandb_config(run_dir: Path) -> dict:
    """The config of the newest offline file, without W&B's own entries."""
    updates = [update for record in _records_of(run_dir)[-1] for update in record.run.config.update]
    return {update.key: json.loads(update.value_json) for update in updates if not update.key.startswith("_")}


def event_files(folder: Path) -> Any:
    """All event files of a folder, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()
