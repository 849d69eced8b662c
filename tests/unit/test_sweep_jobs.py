"""The notice of a scheduler, and what jobs tell the command that waits for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sota_grpo.run.sweep_jobs import (
    Outcome,
    clear_outcomes,
    launch_error,
    read_outcomes,
    save_before_requeue,
    write_outcome,
)
from sota_grpo.stopping import StopRequest

NOTICE = signal.SIGUSR2


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What submitit's handlers, as it sets them before a job, were called for: SIGTERM only writes a line."""
    calls: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, NOTICE)}
    signal.signal(signal.SIGTERM, lambda *_: calls.append("bypassed"))

    def requeue(*_: object) -> None:
        calls.append("requeued")
        raise SystemExit

    signal.signal(NOTICE, requeue)
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [NOTICE, signal.SIGTERM])
def test_a_run_that_trains_saves_before_it_is_requeued(first: int, told: list[str]) -> None:
    """A run that was stopped ends by an interrupt when it has saved."""

    def train() -> None:
        with save_before_requeue():
            with StopRequest() as stop:
                signal.raise_signal(first)
                signal.raise_signal(NOTICE)
                signal.raise_signal(NOTICE)  # does not give the step up
                assert stop.requested
                told.append("saved")
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        train()
    assert told == ["saved", "requeued"]


def test_a_run_that_does_not_train_yet_is_requeued_at_once(told: list[str]) -> None:
    with pytest.raises(SystemExit), save_before_requeue():
        signal.raise_signal(NOTICE)
    assert told == ["requeued"]


def test_a_run_that_ends_with_that_step_is_not_requeued(told: list[str]) -> None:
    with save_before_requeue(), StopRequest():
        signal.raise_signal(NOTICE)
    assert told == []


def test_an_interrupt_without_notice_stays_one(told: list[str]) -> None:
    handler = signal.getsignal(NOTICE)
    with pytest.raises(KeyboardInterrupt), save_before_requeue():
        raise KeyboardInterrupt
    assert told == []
    assert signal.getsignal(NOTICE) == handler


def test_where_nobody_requeues_nothing_is_changed() -> None:
    with save_before_requeue():
        assert signal.getsignal(NOTICE) == signal.SIG_DFL


def test_jobs_tell_how_they_ended_in_their_order(tmp_path: Path) -> None:
    outcomes = {"2": Outcome(0), "10": Outcome(2, ("optimizer.lr=-1 is negative.",))}
    for number, outcome in reversed(outcomes.items()):
        write_outcome(tmp_path, int(number), outcome)
    assert list(read_outcomes(tmp_path).items()) == list(outcomes.items())
    clear_outcomes(tmp_path)
    assert read_outcomes(tmp_path) == {}


def test_a_job_without_an_answer_is_one_sentence(tmp_path: Path) -> None:
    failed = launch_error(RuntimeError("\nJob 7_0 has not produced any output.\nTraceback"), tmp_path)
    assert str(failed).startswith(
        "A job of the sweep gave no answer (Job 7_0 has not produced any output); its output "
    )
