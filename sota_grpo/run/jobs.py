"""The runs of one command: a single one, or those of a sweep one after another, and what is said of them at the end."""

from __future__ import annotations

import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sota_grpo.config import Config, num_steps
from sota_grpo.errors import UserError
from sota_grpo.recording.run_record import note_failure, reason
from sota_grpo.sweeps import SUMMARY, as_text, mark_complete, note_command, objective, write_summary

if TYPE_CHECKING:
    from omegaconf import DictConfig

USER_MISTAKE, CRASHED = 2, 1
_NO_OPTUNA = re.compile(r"Could not (find|load) 'hydra/sweeper/optuna'")


class Jobs:
    """Runs what Hydra composes.

    In a sweep a run that fails leaves its reason in its directory and the next one begins; a run that is interrupted
    ends the sweep. The table of all runs is kept up to date in the sweep's directory and printed at the end.

    Args:
        arguments: of the command, as Hydra is given them; a sweep is found again by them.
        program: how messages begin.
    """

    def __init__(self, arguments: Sequence[str], program: str):
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        self._mistakes = (UserError, HydraException, OmegaConfBaseException)
        self._arguments, self._program = list(arguments), program
        self._codes: list[int] = []
        self._began = self._with_report = False
        self._sweep_dir: Path | None = None

    def all(self, command: Callable[[], object]) -> int:
        """Call ``command``, which calls :meth:`run` for each run; returns the exit code, the highest of all runs."""
        completed = False
        try:
            self._attempt(command)
            completed = True
        except OSError as error:  # before the first run Hydra failed to make its directory; inside one it is a bug
            if self._began or isinstance(error, BrokenPipeError):
                raise
            self._say(f"{error}; set hydra.run.dir to a directory that can be written.")
            self._codes.append(USER_MISTAKE)
        except ValueError:  # a sweeper that looks for the best run; where all of them failed, each has said why
            if self._sweep_dir is None or 0 in self._codes:
                raise
        except KeyboardInterrupt as stop:
            if self._sweep_dir is None or str(stop):
                raise
            raise KeyboardInterrupt("finished runs stay, train.resume=auto goes on with the others") from None
        finally:
            self._end_sweep(completed)
        return max(self._codes)

    def run(self, composed: DictConfig) -> float | None:
        """One run. Returns what a sweeper optimises: accuracy, else reward; None outside a sweep and for a failure."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self._began = True
        place = HydraConfig.get()
        run_dir = Path(place.runtime.output_dir)
        if place.mode == RunMode.MULTIRUN:
            return self._one_of_a_sweep(composed, run_dir, Path(place.runtime.cwd, place.sweep.dir))
        self._attempt(lambda: _train(composed, run_dir))
        return None

    def _attempt(self, action: Callable[[], object]) -> None:
        """What the user can mend is one sentence and 2, a run that cannot go on is one and 1."""
        try:
            action()
        except self._mistakes as error:
            self._tell(error)
        else:
            self._codes.append(0)

    def _one_of_a_sweep(self, composed: DictConfig, run_dir: Path, sweep_dir: Path) -> float | None:
        from sota_grpo.training.runs import RunRefused

        if self._sweep_dir is None:
            note_command(sweep_dir, self._arguments)
            self._sweep_dir = sweep_dir
        try:
            self._with_report = _train(composed, run_dir).logging.report
            self._codes.append(0)
            return objective(run_dir)
        except RunRefused as error:  # the directory is not this run's: nothing is to be written there
            self._tell(error)
        except Exception as error:  # whatever it was, the other runs of a sweep are not to blame
            if not isinstance(error, self._mistakes):
                traceback.print_exc()
            self._tell(error)
            with suppress(OSError):
                note_failure(run_dir, error)
        finally:
            with suppress(OSError, UserError):  # told at the end, where it still holds
                write_summary(sweep_dir)
        return None

    def _tell(self, error: Exception) -> None:
        mistake = isinstance(error, self._mistakes)
        if _NO_OPTUNA.search(str(error)):
            self._say("Optuna's plugin for Hydra is not installed: pip install 'sota-grpo[optuna]'.")
        else:
            self._say(self._sentence(error) if mistake else reason(error))
        self._codes.append(getattr(error, "exit_code", USER_MISTAKE if mistake else CRASHED))

    def _sentence(self, error: Exception) -> str:
        from sota_grpo.assembly.compose import sentence_of

        return str(error) if isinstance(error, UserError) else sentence_of(error)

    def _say(self, sentence: str) -> None:
        print(f"{self._program}: {sentence}", file=sys.stderr)

    def _end_sweep(self, completed: bool) -> None:
        """Print the table of the sweep, and leave it and the report beside its runs."""
        if self._sweep_dir is None:
            return
        try:
            if completed and not any(self._codes):
                mark_complete(self._sweep_dir)
            sweep = write_summary(self._sweep_dir)
        except (OSError, UserError) as error:
            self._say(f"the summary of the sweep cannot be written ({error}).")
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.write(f"\n{as_text(sweep, width=width)}")
        print(f"Summary: {self._sweep_dir / SUMMARY}.md and .json{self._report(self._sweep_dir)}", flush=True)

    def _report(self, sweep_dir: Path) -> str:
        """Write ``report.html`` of all runs, if the last one has one; returns what to add to the closing sentence."""
        if not self._with_report:
            return ""
        from sota_grpo.report import write_report

        try:
            return f", report: {write_report([sweep_dir], sweep_dir / 'report.html')}"
        except (OSError, UserError):  # a page more or less is no reason to end a sweep otherwise
            return ""


def _train(composed: DictConfig, run_dir: Path) -> Config:
    """Train to the end; a run that was asked to stop ends the whole command, a sweep's other runs included."""
    from omegaconf import OmegaConf

    from sota_grpo.assembly.compose import require_known
    from sota_grpo.assembly.preflight import announce, preflight
    from sota_grpo.recording.heartbeat import Heartbeat

    require_known(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    preflight(config, run_dir)
    with Heartbeat():
        announce(config)
        from sota_grpo.run.app import CONTINUES, train  # brings torch and all that stands on it

        done = train(config, run_dir)
    if done < num_steps(config):
        raise KeyboardInterrupt(CONTINUES)
    return config
