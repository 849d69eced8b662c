"""Start a run: the scripts, ``sota-grpo train`` and ``sota_grpo.train`` all call :func:`launch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sota_grpo.assembly.preflight import announce, preflight
from sota_grpo.config import num_steps
from sota_grpo.recording.progress import Heartbeat
from sota_grpo.recording.run_files import read_record

if TYPE_CHECKING:
    from sota_grpo.assembly.python_inputs import PythonInputs
    from sota_grpo.config import Config


def launch(
    config: Config,
    run_dir: Path,
    inputs: PythonInputs | None = None,
    *,
    on_locked: Callable[[Path], object] = lambda run_dir: None,
) -> bool:
    """Check the config, import torch, train to the last step or ``eval.target``; return whether an interrupt came.

    ``on_locked`` is called with the run's directory once this process has locked it; ``inputs.run_dir`` is set to it.
    UserError: the run cannot start or continue. KeyboardInterrupt: an interrupt; the message may say how to resume.
    """
    preflight(config, run_dir)
    with Heartbeat():
        announce(config)
        from sota_grpo.assembly.python_inputs import PythonInputs
        from sota_grpo.run.app import CONTINUES, train

        inputs = inputs or PythonInputs()
        done = train(config, run_dir, inputs, on_locked=on_locked)
    is_finished = (read_record(inputs.run_dir or run_dir) or {}).get("finished")  # at its last step, or its target
    if done < num_steps(config) and not is_finished:
        raise KeyboardInterrupt(CONTINUES)
    return inputs.stopped
