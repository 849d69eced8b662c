"""Two real ranks save and continue: what each needs for it beside its own state, and what none needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shards import save, started
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.workers.base import ProcessLauncher


@pytest.mark.slow
def test_a_rank_copies_its_shard_and_no_rank_has_more_than_that(tmp_path: Path) -> None:
    """25 million parameters, so that a share (150 MB with its moments) is far above what a process does anyway."""
    store = CheckpointStore(tmp_path)
    with started(ProcessLauncher(), 2, 512, 5) as (learner, memory):
        with memory.watched():
            save(learner, store)
        share = store.num_bytes / 2
        assert share > 60e6
        *ranks, driver = (own / share for own in memory.own)
        assert all(0.9 < rank <= 1.3 for rank in ranks)
        assert driver < 0.2
        with memory.watched():
            actual = store.latest()
            assert actual is not None
            learner.load_state_dict(actual[1]["learner"])
        assert all(own / share < 0.3 for own in memory.own)
