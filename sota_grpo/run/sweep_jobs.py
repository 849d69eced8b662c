"""Runs of a sweep as jobs of a scheduler: Hydra's submitit launcher pickles each and starts it in another process.

The command then only waits: each job writes into the sweep's directory how it ended (:func:`write_outcome`), and the
command reads it there. SLURM may requeue a job, which begins again with the same arguments and goes on by
``train.resume=auto``; where it gives notice first, the run saves (:func:`save_before_requeue`).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import CRASHED, RunFailed, UserError
from sota_grpo.files import write_json
from sota_grpo.recording.run_files import natural, read_json
from sota_grpo.stopping import StopRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Override that has Hydra call :func:`sweep_callback`.
KEEP_SWEEP = "++hydra.callbacks.sweep._target_=sota_grpo.run.sweep_jobs.sweep_callback"
_OUTCOMES = ".outcomes"  # folder in a sweep's directory, with a file for each job
_NOTICE = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"  # as submitit reads it

_composed: list[DictConfig] = []  # of the sweep that this process began


def sweep_callback() -> Any:
    """A Hydra callback that keeps the config of a sweep: a process that only waits for its runs sees none of theirs."""
    from hydra.experimental.callback import Callback

    class SweepCallback(Callback):
        def on_multirun_start(self, config: Any, **_: Any) -> None:
            _composed[:] = [config]

    return SweepCallback()


def sweep_config() -> DictConfig:
    """The config of the sweep that this process began, without the values that differ between its runs."""
    return _composed[0]


def require_resume(composed: DictConfig) -> None:
    """A job that is requeued would find its own directory taken.

    Raises:
        UserError: ``train.resume=auto`` is not given.
    """
    if composed.train.resume != "auto":
        raise UserError("The runs of this sweep are jobs, which may be requeued; add train.resume=auto.")


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code of its run, and the sentences that it has for the user."""

    exit_code: int
    sentences: tuple[str, ...] = ()


def clear_outcomes(sweep_dir: Path) -> None:
    """Those of an earlier command count no more."""
    shutil.rmtree(sweep_dir / _OUTCOMES, ignore_errors=True)


def write_outcome(sweep_dir: Path, number: int, outcome: Outcome) -> None:
    """Tell the command that waits how job ``number`` ended.

    Raises:
        OSError: it cannot be written.
    """
    (sweep_dir / _OUTCOMES).mkdir(exist_ok=True)
    write_json(sweep_dir / _OUTCOMES / f"{number}.json", asdict(outcome))


def read_outcomes(sweep_dir: Path) -> dict[str, Outcome]:
    """By job; without those that have not ended."""
    outcomes = {}
    for path in sorted((sweep_dir / _OUTCOMES).glob("*.json"), key=natural):
        record = read_json(path) or {}
        sentences = tuple(map(str, record.get("sentences", ())))
        outcomes[path.stem] = Outcome(int(record.get("exit_code", CRASHED)), sentences)
    return outcomes


def launch_error(error: RuntimeError, sweep_dir: Path) -> RunFailed:
    """The sentence for what submitit raises: of a job that was not accepted, or died, or was cancelled."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return RunFailed(
        f"A job of the sweep gave no answer ({said.rstrip('.')}); its output is below {sweep_dir / '.submitit'}. "
        "Others may still be queued or at work; when none is, the same command goes on with the sweep."
    )


@contextmanager
def save_before_requeue() -> Iterator[None]:
    """The notice of a scheduler is taken as SIGTERM, then the job is requeued.

    submitit's own handler for the signal requeues the job and ends it at once. In here, a run that trains first
    finishes its step and saves, for which ``train.grace_s`` counts; one that does not train yet has nothing to save.
    Without such a handler nothing is changed.
    """
    number, before_training = signal.Signals[_NOTICE], signal.getsignal(signal.SIGTERM)
    requeue = signal.getsignal(number)
    if not callable(requeue):
        yield
        return
    noticed = False

    def handle(received: int, frame: FrameType | None) -> None:
        nonlocal noticed
        training = signal.getsignal(signal.SIGTERM)
        if training == before_training:
            requeue(received, frame)
        elif not noticed:
            noticed = True
            stop = getattr(training, "__self__", None)
            if not (isinstance(stop, StopRequest) and stop.requested):  # a second one would give the step up
                signal.raise_signal(signal.SIGTERM)

    signal.signal(number, handle)
    try:
        yield
    except KeyboardInterrupt:
        if noticed:
            requeue(number, None)
        raise
    finally:
        signal.signal(number, requeue)
