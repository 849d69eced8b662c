"""A reference in other processes answers what a reference here answers, and survives its workers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.policy.causal import CausalPolicy, FrozenReference
from sota_grpo.policy.load import save_hf
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import ReferenceKL
from sota_grpo.workers.base import ThreadLauncher, WorkerSpec, starter
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.reference import ReferenceService, ReferenceWorker, reference_worker
from tests.builders import generator, random_rows
from tests.unit.tiny_models import make_model, make_rows, make_tokenizer

BUDGET = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module]:
    model = make_model("llama", vocab_size=64)
    return str(save_hf(model, make_tokenizer(), tmp_path_factory.mktemp("model") / "llama")), model


def service_of(launcher: Any, path: str, num_workers: int, **settings: Any) -> ReferenceService:
    threads = torch.get_num_threads()
    options = {"model": {"name": path}, "temperature": 0.7, "token_budget": BUDGET, "num_threads": threads}
    start = starter(launcher, "reference", WorkerSpec("sota_grpo.workers.reference:reference_worker", options))
    fleet = Fleet("reference", start, num_workers, capacity=2, silence_s=60.0)
    return ReferenceService(fleet, num_workers=num_workers, **settings)


def groups_of_rows(count: int) -> list[list[TensorDictBase]]:
    """Groups of 4 siblings, graded, without what the reference writes."""
    rows = [row.exclude(keys.REF_LOG_PROBS, "advantage") for row in random_rows(generator(), 4 * count, group_size=4)]
    return [RowTable.of(rows[start : start + 4]) for start in range(0, len(rows), 4)]


@pytest.fixture
def in_threads() -> Iterator[ThreadLauncher]:
    launcher = ThreadLauncher()
    yield launcher
    launcher.close()


@pytest.mark.parametrize("gives_back", [True, False])
def test_a_worker_keeps_nothing_in_reserve_where_engines_sleep(gives_back: bool, monkeypatch) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    model = make_model("llama", vocab_size=64)
    worker = ReferenceWorker(model, temperature=1.0, token_budget=BUDGET, gives_back=gives_back)
    (rows,) = groups_of_rows(1)
    worker.run(rows)
    assert emptied == [True] * gives_back


def written_here(model: torch.nn.Module, groups: list[RowTable], coeff: float | None = None):
    """Copies of the rows after the transform of the synchronous loop, all in one batch."""
    here = FrozenReference(deepcopy(model), temperature=0.7)
    return ReferenceKL(here, in_reward_coeff=coeff, pad_token_id=0, token_budget=1000)(RowTable.cat(groups))


def assert_equal_rows(rows: RowTable, expected: RowTable) -> None:
    for row, copy in zip(rows, expected, strict=True):
        assert row.keys() == copy.keys()
        for key in (keys.REF_LOG_PROBS, keys.REWARD, keys.KL_TERM, keys.GRADED_REWARD):
            if key in copy:
                torch.testing.assert_close(row[key], copy[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("coeff", [None, 0.3])
def test_submitted_groups_equal_the_transform(saved, in_threads, coeff) -> None:
    path, model = saved
    service = service_of(in_threads, path, 2, in_reward_coeff=coeff)
    groups = groups_of_rows(7)
    expected = written_here(model, groups, coeff)
    for rows, future in zip(groups, [service.submit(rows) for rows in groups], strict=True):
        assert future.result(60) is rows
    assert_equal_rows(RowTable.cat(groups), expected)
    again = service.submit(groups[0])
    assert again.done(), "rows that have reference log-probs pass at once"
    service.close()


def test_a_call_equals_the_reference_here_in_any_order_of_the_rows(saved, in_threads) -> None:
    path, model = saved
    service = service_of(in_threads, path, 3)
    rows = make_rows([5, 12, 1, 8, 2], width=14, holes=True)
    actual = service(rows)
    expected = FrozenReference(deepcopy(model), temperature=0.7)(rows)
    assert actual.shape == rows[keys.FULL_TOKENS].shape
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert (service(rows[2:3]) == 0).all(), "a prompt alone has nothing to answer"
    service.close()


def test_a_worker_computes_in_the_precision_of_the_policy(saved) -> None:
    """Bit for bit where the padding is the same, so that every estimator of the KL is exactly 0."""
    path, model = saved
    worker = reference_worker(model={"name": path}, temperature=0.7, precision="bf16", token_budget=BUDGET)
    rows = make_rows([8, 5, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = CausalPolicy(model, temperature=0.7)(rows)[keys.LOG_PROBS].detach()
    cut = [row[:length] for row, length in zip(rows.auto_batch_size_(2).unbind(0), (8, 5, 3))]
    actual = worker.run(RowTable.of(cut))
    for values, row, length in zip(actual, expected, (8, 5, 3), strict=True):
        assert values.tolist() == row[:length].tolist()
    assert not torch.equal(expected, CausalPolicy(model, temperature=0.7)(rows)[keys.LOG_PROBS])


class NanWorker:
    """A reference whose weights are broken."""

    def run(self, rows: RowTable) -> list[Any]:
        return [torch.full((length,), torch.nan).numpy() for length in rows.lengths(keys.FULL_TOKENS)]

    def ping(self) -> float:
        return 0.0


def test_what_is_wrong_with_rows_or_weights_reaches_the_waiting_thread(saved, in_threads) -> None:
    service = service_of(in_threads, saved[0], 1)
    bad, good = groups_of_rows(2)
    bad[1][keys.ASSISTANT_MASK][0] = True
    futures = service.submit(bad), service.submit(good)
    with pytest.raises(ValueError, match=r"row \d begins with an assistant token"):
        futures[0].result(60)
    assert futures[1].result(60) is not None
    service.close()

    start = starter(in_threads, "reference", WorkerSpec(f"{__name__}:NanWorker"))
    service = ReferenceService(Fleet("reference", start, 1, capacity=1), num_workers=1, in_reward_coeff=0.3)
    with pytest.raises(ValueError, match="not finite"):
        service.submit(good := groups_of_rows(1)[0]).result(60)
    assert not good.has(keys.REF_LOG_PROBS)
    service.close()
