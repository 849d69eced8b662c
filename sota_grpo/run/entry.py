"""Command line of training: Hydra composes the config of a run or of each run of a sweep; :func:`launch` trains.

torch is imported only after Hydra has read the command line, so that mistakes are reported quickly.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sota_grpo.assembly.compose import CONFIG_DIR, checked_overrides, preset_names, resumed_config, sentence_of, typed
from sota_grpo.config import Config, register
from sota_grpo.config.spelling import walk
from sota_grpo.errors import CRASHED, USER_MISTAKE, RunFailed, UserError, run_command
from sota_grpo.files import write_text
from sota_grpo.recording.run_files import OVERRIDES_FILE, has_begun, is_held, note_failure, reason
from sota_grpo.run import launch
from sota_grpo.sweeps import SUMMARY, as_text, continued, note_command, objective, write_summary
from sota_grpo.text import RED, ConsoleHandler, Output, readable, say
from sota_grpo.training.runs import RunRefused, drop_empty, writing_in

if TYPE_CHECKING:
    from omegaconf import DictConfig

_TAKE_A_VALUE = ("-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "--experimental-rerun")
_NO_FILES = "hydra.output_subdir=null"  # note_options writes them
_NO_PLUGIN = re.compile(r"Could not (?:find|load) 'hydra/(?:sweeper/(optuna)|launcher/(submitit)_)")
_EXTRAS = {"optuna": "optuna", "submitit": "slurm"}
_NO_SLURM = 'Could not detect "srun"'  # submitit
_KEEP_SWEEP = "++hydra.callbacks.sweep._target_=sota_grpo.run.entry.sweep_callback"

_sweep: list[DictConfig] = []  # config of the sweep that this process began


def entry(mode: str, command: str | None = None) -> None:
    """Run ``grpo.py`` (``mode="sync"``) or ``grpo-async.py`` (``"async"``) with ``sys.argv``, and exit.

    Exit code 2: a user's mistake; 1: the run cannot continue; 130: an interrupt. ``command``: the name in ``--help``.
    """

    def run() -> int:
        arguments = checked_overrides(sys.argv[1:])
        wants_help = not {"-h", "--help"}.isdisjoint(arguments)
        if wants_help:
            print(help_heading(command or _program()))
            # Hydra's own --help takes a second to read all of its groups
            arguments = [argument for argument in arguments if argument not in ("-h", "--help", "-m", "--multirun")]
            arguments += ["--cfg", "job"]
        # Hydra saves the command line, but must not write into a directory that may be another run's
        sys.argv[1:] = continued([_NO_FILES, _KEEP_SWEEP, *with_mode(arguments, mode)])
        if not wants_help:
            return _run()
        with redirect_stdout(io.StringIO()) as shown:
            code = _run()
        print(with_help(shown.getvalue()), end="")
        return code

    run_command(_program(), run, "nothing was saved")


def help_heading(command: str) -> str:
    """Return the beginning of the ``--help`` text, before the options.

    >>> print(help_heading("grpo.py").splitlines()[0])
    grpo.py [--config-name PRESET] [GROUP=NAME ...] [OPTION=VALUE ...] [--multirun]
    """
    folders = [folder for folder in sorted(CONFIG_DIR.iterdir()) if folder.is_dir() and folder.name != "hydra"]
    named = {"PRESET": CONFIG_DIR} | {folder.name: folder for folder in folders}
    return "\n".join(
        [
            f"{command} [--config-name PRESET] [GROUP=NAME ...] [OPTION=VALUE ...] [--multirun]",
            "",
            "Presets and groups:",
            *(f"  {name}: {', '.join(preset_names(folder))}" for name, folder in named.items()),
            "",
            "Every option with its value in this command and its help (--hydra-help: Hydra's own):",
        ]
    )


def with_help(shown: str) -> str:
    """Return the YAML ``shown`` with the help text and choices of each option as comments.

    >>> print(with_help("optimizer:\\n  schedule: linear\\n").splitlines()[1])
      schedule: linear  # learning rate schedule after the warm-up (constant, linear, cosine)
    """
    texts: dict[str, str] = {}
    for name, option, _ in walk():
        choices = option.metadata["choices"]
        texts[name] = option.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
    lines: list[str] = []
    path = [""]
    for line in shown.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        text = texts.get(".".join(path))
        lines.append(line if text is None else f"{line}  # {text}")
    return "".join(f"{line}\n" for line in lines)


def with_mode(arguments: Sequence[str], mode: str) -> list[str]:
    """Add ``mode=...`` to the arguments unless they set it, and move all overrides to the front, as Hydra requires.

    Nothing is added if ``grpo.py`` resumes a run by its directory: the run keeps its mode.

    >>> with_mode(["--config-name", "grpo_cpu", "seed=1", "--multirun", "env.repeats=4,8"], "async")
    ['mode=async', 'seed=1', 'env.repeats=4,8', '--config-name', 'grpo_cpu', '--multirun']
    >>> with_mode(["mode=sync"], "async"), with_mode(["--config-dir", "a=b"], "async")
    (['mode=sync'], ['mode=async', '--config-dir', 'a=b'])
    >>> with_mode(["train.resume=RUN"], "sync"), with_mode(["train.resume=auto"], "sync")
    (['train.resume=RUN'], ['mode=sync', 'train.resume=auto'])
    """
    overrides: list[str] = []
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments):
        is_override = argument[:1] == "~" or (argument[:1] != "-" and "=" in argument)
        (overrides if is_override and before not in _TAKE_A_VALUE else options).append(argument)
    names_a_run = any(re.match(r"\+{0,2}train\.resume=(?!auto$|null$)", override) for override in overrides)
    if not any(override.startswith("mode=") for override in overrides) and not (names_a_run and mode == "sync"):
        overrides.insert(0, f"mode={mode}")
    return [*overrides, *options]


def sweep_callback() -> Any:
    """Return a Hydra callback that keeps a sweep's config in ``_sweep``, for a process that only submits runs."""
    from hydra.experimental.callback import Callback

    class KeepSweep(Callback):
        def on_multirun_start(self, config: Any, **_: Any) -> None:
            _sweep[:] = [config]

    return KeepSweep()


def _run() -> int:
    """Run the command; return its exit code, the highest of its runs."""
    import hydra

    register()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # this module prints the sentence itself
    if os.environ.get("VLLM_USE_V1") == "0":
        print("VLLM_USE_V1=0 is accepted and has no effect: this vLLM has one engine.", file=sys.stderr)

    jobs = Jobs(sys.argv[1:], program=_program())

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def job(composed: DictConfig) -> float | None:
        quiet_console()
        return jobs.run(composed)

    return jobs.all(job)


def quiet_console() -> None:
    """Set up logging to stderr, of other libraries from warnings on; disable the Hugging Face hub's progress bars."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it too, when it is imported
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler()])
    logging.getLogger("sota_grpo").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself


def _program() -> str:
    return Path(sys.argv[0]).name


class Jobs:
    """Executes the runs of a command: one, or those of a sweep.

    In a sweep a failed run writes its reason to its directory and the next run starts; an interrupt ends the sweep. The
    summary of all runs is written to the sweep's directory and printed at the end. A Hydra launcher may pickle this
    object and call :meth:`run` in other processes. ``arguments`` identify a sweep; messages begin with ``program``.
    """

    def __init__(self, arguments: Sequence[str], program: str):
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        self._mistakes = (UserError, HydraException, OmegaConfBaseException)
        self._arguments, self._program = list(arguments), program
        self._codes: list[int] = []
        self._said = ""
        self._began = self._with_report = False
        self._sweep_dir: Path | None = None
        self._waits = self._is_job = False  # for runs in other processes; in one of these

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for a launcher that executes runs in other processes while this process waits."""
        if not self._waits and not self._is_job:
            composed = _sweep[0]
            self._open_sweep(Path(composed.hydra.runtime.cwd, composed.hydra.sweep.dir))
            self._began = self._waits = True
            self._with_report = composed.logging.report
            say(f"The runs are submitted as jobs; `sota-grpo sweep {self._sweep_dir}` shows them.", sys.stderr)
        return {**vars(self), "_waits": False, "_is_job": True}

    def all(self, command: Callable[[], object]) -> int:
        """Call ``command``, which calls :meth:`run` per run; return the highest code (1: failed, 2: user's mistake)."""
        completed = False
        try:
            self._attempt(command)
            completed = True
        except OSError as error:  # before the first run: Hydra cannot make its directory; inside one it is a bug
            if self._began or isinstance(error, BrokenPipeError):
                raise
            self._say(f"{error}; set hydra.run.dir to a directory that can be written.")
            self._codes.append(USER_MISTAKE)
        except (ValueError, TypeError) as error:
            if not self._began:  # Hydra, of a preset that is no name
                self._print_error(UserError(sentence_of(error)))
            elif isinstance(error, TypeError) or self._sweep_dir is None or 0 in self._codes:
                raise  # else a sweeper has found no best run: all failed, and each has printed its reason
        except RuntimeError as error:
            if self._waits and self._sweep_dir is not None:
                cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                output = f"its output is below {self._sweep_dir / '.submitit'}"
                self._print_error(RunFailed(f"A job of the sweep returned no result ({cause.rstrip('.')}); {output}."))
            elif _NO_SLURM in str(error):
                self._print_error(
                    UserError("There is no srun on this machine; start the sweep where jobs can be submitted to SLURM.")
                )
            else:
                raise
        except KeyboardInterrupt as stop:
            if self._sweep_dir is None or str(stop):
                raise
            rest = "submitted jobs continue" if self._waits else "train.resume=auto resumes the others"
            raise KeyboardInterrupt(f"finished runs are kept, {rest}") from None
        finally:
            self._end_sweep(completed)
        return max(self._codes)

    def run(self, composed: DictConfig) -> float | None:
        """Execute one run; return its objective in a sweep (accuracy, else reward), or None.

        A UserError is printed, in a sweep any error; in a launcher's job it is also raised.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self._began = True
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        if hydra.mode == RunMode.MULTIRUN:
            sweep_dir = Path(hydra.runtime.cwd, hydra.sweep.dir)
            measured = self._one_of_a_sweep(composed, run_dir, sweep_dir, hydra.overrides.task)
            if self._is_job and any(self._codes):  # for the command that waits
                failed = RunFailed if max(self._codes) == CRASHED else UserError
                raise failed(f"job {hydra.job.num}: {self._said}")
            return measured
        try:
            self._attempt(lambda: _train(composed, run_dir, hydra.overrides.task))
        finally:
            drop_empty(run_dir)  # Hydra's, of a refused command
        return None

    def _attempt(self, action: Callable[[], object]) -> None:
        """Call ``action`` and record its exit code: 0; 2 for a mistake of the user; 1 if a run cannot continue."""
        try:
            action()
        except self._mistakes as error:
            self._print_error(error)
        else:
            self._codes.append(0)

    def _one_of_a_sweep(
        self, composed: DictConfig, run_dir: Path, sweep_dir: Path, overrides: Sequence[str] = ()
    ) -> float | None:
        self._open_sweep(sweep_dir)
        say(f"Run {run_dir.name} of the sweep: {', '.join(overrides)}", sys.stderr)
        try:
            config, is_stopped = _train(composed, run_dir, overrides)
            self._with_report = config.logging.report
            self._codes.append(0)
            if is_stopped and not self._is_job:  # after its last step
                raise KeyboardInterrupt
            return objective(run_dir)
        except RunRefused as error:  # the directory is another run's
            self._print_error(error)
        except (Exception, KeyboardInterrupt) as error:  # of any kind: the other runs of the sweep still run
            with suppress(OSError, UserError):
                if not is_held(run_dir):  # by another process
                    note_options(run_dir, composed)
                    if isinstance(error, Exception):
                        note_failure(run_dir, error)
            if isinstance(error, KeyboardInterrupt):
                raise
            if not isinstance(error, self._mistakes):
                traceback.print_exc()
            self._print_error(error)
        finally:
            with suppress(OSError, UserError):  # printed at the end
                write_summary(sweep_dir)
        return None

    def _open_sweep(self, sweep_dir: Path) -> None:
        if self._sweep_dir is None:
            sweep_dir.mkdir(parents=True, exist_ok=True)
            note_command(sweep_dir, self._arguments)
            self._sweep_dir = sweep_dir

    def _print_error(self, error: Exception) -> None:
        mistake = isinstance(error, self._mistakes)
        missing = _NO_PLUGIN.search(str(error))
        if missing:
            plugin = missing[1] or missing[2]
            extra = _EXTRAS[plugin]
            self._say(f"Hydra's plugin for {plugin} is not installed: pip install 'sota-grpo[{extra}]'.")
        elif isinstance(error, UserError):
            self._say(str(error))
        else:
            self._say(sentence_of(error, self._arguments) if mistake else reason(error))
        self._codes.append(getattr(error, "exit_code", USER_MISTAKE if mistake else CRASHED))

    def _say(self, sentence: str) -> None:
        self._said = sentence
        say(f"{self._program}: {readable(sentence)}", sys.stderr, RED)

    def _end_sweep(self, completed: bool) -> None:
        """Print the summary of the sweep, and write the summary and the report to the sweep's directory."""
        if self._sweep_dir is None:
            return
        try:
            sweep = write_summary(self._sweep_dir)
            if self._waits:  # a sweeper continues after a failed job
                self._codes += [CRASHED for run in sweep.runs if run.state == "failed"]
            if completed and not any(self._codes):
                note_command(self._sweep_dir, self._arguments, complete=True)
        except (OSError, UserError) as error:
            self._say(f"the summary of the sweep cannot be written ({str(error).rstrip('.')}).")
            return
        width = shutil.get_terminal_size().columns if Output().isatty() else None
        say(f"\n{as_text(sweep, width)}".removesuffix("\n"))
        report = ""
        if self._with_report:  # if the last run has one
            from sota_grpo.report import write_report

            with suppress(OSError, UserError):  # a missing page is no failure of the sweep
                report = f", report: {write_report([self._sweep_dir], self._sweep_dir / 'report.html')}"
        say(f"Summary: {self._sweep_dir / SUMMARY}{report}")


def note_options(run_dir: Path, composed: DictConfig) -> None:
    """Write Hydra's config files to ``run_dir/.hydra``, unless the run has begun before; UserError if that fails."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    folder, hydra = (run_dir / OVERRIDES_FILE).parent, cast(Any, HydraConfig.instance().cfg)
    if has_begun(run_dir) or hydra is None:
        return
    with writing_in(run_dir):
        folder.mkdir(parents=True, exist_ok=True)
        for name, node in (("config", composed), ("hydra", hydra), ("overrides", hydra.hydra.overrides.task)):
            write_text(folder / f"{name}.yaml", OmegaConf.to_yaml(node))


def _train(composed: DictConfig, run_dir: Path, overrides: Sequence[str] = ()) -> tuple[Config, bool]:
    """Train one run to the end; return its config and whether an interrupt came, which ends a sweep's other runs."""
    config = resumed_config(typed(composed), overrides)
    return config, launch(config, run_dir, on_locked=lambda path: note_options(path, composed))
