"""Train from Python: :func:`train` does what ``grpo.py`` does, with rows and reward functions as Python objects."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.assembly.compose import DEFAULT_CONFIG, compose, require_consent, resumed_config
from sota_grpo.assembly.python_inputs import take
from sota_grpo.errors import UserError
from sota_grpo.recording import run_files
from sota_grpo.recording.progress import in_notebook
from sota_grpo.run import launch
from sota_grpo.text import ConsoleHandler
from sota_grpo.untrusted import require_plain

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_ENDS = 10  # most steps in the means of the first and the last rewards


class Result:
    """Reads the metrics, responses and model of a run; returned by :func:`sota_grpo.train`.

    The run may be finished, interrupted or still training. Each access reads the files again, except the model and its
    tokenizer, which are loaded once. UserError: a file of the run is missing, damaged or refused.

    Args:
        trust: allow the model's Python files to run, if the config has ``model.trust_remote_code=true``.

    Example::

        result = Result("outputs/2026-01-31/10-00-00")
        result.metrics["reward"].plot()
        result.evaluations["eval/accuracy"]
        result.model.generate(...)
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, trust: bool = False) -> None:
        self.run_dir, self.trust = Path(run_dir).expanduser(), trust
        if not (self.run_dir / run_files.METRICS_FILE).is_file():
            raise UserError(
                f"There is no run in {self.run_dir} ({run_files.METRICS_FILE} is missing); give a run directory."
            )

    @property
    def metrics(self) -> DataFrame:
        """One row per training step, index ``step`` from 0, one column per metric (docs/logging.md); NaN if missing."""
        return _frame(
            [
                row
                for row in run_files.read_rows(self.run_dir / run_files.METRICS_FILE)
                if run_files.EVALUATED not in row
            ]
        )

    @property
    def evaluations(self) -> DataFrame:
        """One row per held-out evaluation; the index ``step`` is the number of training steps before it."""
        return _frame(run_files.read_evaluations(self.run_dir))

    @property
    def rollouts(self) -> DataFrame:
        """The best and worst response per group (one if rewards are equal), with prompt and rewards; index ``step``."""
        return _frame(run_files.read_rows(self.run_dir / run_files.ROLLOUTS_FILE))

    @property
    def config(self) -> dict[str, Any]:
        """All options of the run as nested dicts; UserError if it has not begun to train, or its file is damaged."""
        self._file(run_files.CONFIG_FILE, "the run has not begun to train")
        return run_files.read_config(self.run_dir)

    @property
    def finished(self) -> bool:
        """Whether the run has ended as requested: after all its training steps, or at ``eval.target``."""
        return bool((run_files.read_record(self.run_dir) or {}).get("finished"))

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model (adapter merged), on the CPU, in its saved dtype; UserError if missing or not trusted."""
        from transformers import AutoModelForCausalLM

        return self._exported(AutoModelForCausalLM)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with its chat template, cached; UserError as for :attr:`model`."""
        from transformers import AutoTokenizer

        return self._exported(AutoTokenizer)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the HTML report to ``out`` (None: ``report.html`` in the run directory) and return the file's path."""
        from sota_grpo.report import write_report

        return write_report([self.run_dir], Path(out) if out is not None else self.run_dir / "report.html")

    def __repr__(self) -> str:
        metrics, evaluations = self.metrics, self.evaluations
        lines = [
            f"Result({str(self.run_dir)!r})",
            f"steps      {len(metrics)}{'' if self.finished else ', unfinished'}",
        ]
        if "reward" in metrics:
            count = max(1, min(_ENDS, len(metrics) // 2))
            first, last = metrics["reward"].head(count).mean(), metrics["reward"].tail(count).mean()
            ends = "step" if count == 1 else f"{count} steps"
            lines.append(f"reward     {first:.3g} -> {last:.3g} (first and last {ends})")
        if len(evaluations):
            counts = evaluations["eval/num_samples"]
            is_pair = len(counts) > 1 and counts.iloc[0] == counts.iloc[-1]  # else one is of a subset
            compared = evaluations.iloc[[0, -1] if is_pair else [-1]]
            shown = " -> ".join(f"{100 * accuracy:.1f} %" for accuracy in compared[run_files.EVALUATED])
            lines.append(f"held out   {shown} right of {int(counts.iloc[-1])} problems, greedy")
            rewards = evaluations.get("eval/reward")
            if rewards is not None and not (rewards == evaluations[run_files.EVALUATED]).all():
                shown = " -> ".join(f"{reward:.3g}" for reward in compared["eval/reward"])
                lines.append(f"           {shown} mean reward")
        if (self.run_dir / run_files.EXPORTED).is_dir():
            lines.append(f"model      {self.run_dir / run_files.EXPORTED}")
        return "\n  ".join(lines)

    def _file(self, name: str, reason: str) -> Path:
        path = self.run_dir / name
        if not path.exists():
            raise UserError(f"The run in {self.run_dir} has no {name}: {reason}.")
        return path

    def _exported(self, kind: Any) -> Any:
        folder = self._file(run_files.EXPORTED, "it is written at the end of a run, unless train.export_hf=false")
        require_plain(folder, self.run_dir)
        runs_code = self.config.get("model", {}).get("trust_remote_code") is True
        if runs_code and not self.trust:
            require_consent(self.run_dir, [f"run the Python files in {folder} (model.trust_remote_code)"])
        return kind.from_pretrained(folder, trust_remote_code=runs_code)


def _frame(rows: list[dict[str, Any]]) -> DataFrame:
    import pandas

    return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")


_HYDRAS = ("hydra.run.dir", "hydra.sweep.dir")


def train(
    config_name: str = DEFAULT_CONFIG,
    *,
    reward: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    tools: Sequence[Any] | None = None,
    environment: Any = None,
    objective: Any = None,
    transforms: Sequence[Any] | None = None,
    overrides: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
) -> Result:
    """Train in this process and in worker processes, and return the run.

    Equivalent to ``grpo.py --config-name CONFIG_NAME OVERRIDES``: same checks, files (but Hydra's) and resume. Loggers,
    number of threads, random states and signal handlers are restored. After Ctrl-C the current step is finished and
    saved, the workers are closed, and KeyboardInterrupt is raised; a second Ctrl-C stops immediately.
    UserError: the run cannot start or continue.

    Args:
        reward: a reward function with verl's or TRL's signature (docs/tasks.md), a list of them, or a dict by name;
            they replace the task's reward, unless the list contains ``"builtin"``. They are pickled for grader
            processes; a function that cannot be pickled needs ``env.reward_workers=0``.
        dataset: training rows: a ``datasets.Dataset``, a list of dicts, a DataFrame, or the path of a file. The task is
            ``table``, which reads ``prompt`` (text or a chat), ``ground_truth`` or ``answer``, and the columns that the
            reward functions need; the override ``env.dataset=NAME`` chooses another task.
        eval_dataset: held-out rows, likewise; None: the task's, or a tenth, at most 512 rows (``env.num_heldout``).
        tools: functions that the policy may call, with type hints and docstrings (docs/tasks.md).
        environment: in place of tools, a factory (such as a class) with TRL's protocol, called for each response.
        objective: a surrogate function (docs/extending.md).
        transforms: TorchRL transforms of prompt groups, or their factories (docs/extending.md); they are copied.
        overrides: options as on the command line: ``["env.repeats=4", "mode=async", "train.resume=auto"]``.
        run_dir: the run directory; None: ``outputs/DATE/TIME``. A resumed run keeps its own.

    Example::

        def brevity(completions, **columns):
            return [1 / (1 + len(text)) for text in completions]

        result = sota_grpo.train("grpo_cpu", reward=brevity, dataset=[{"prompt": "2 + 2?", "answer": "4"}, ...])
    """
    objects = {"reward": reward, "dataset": dataset, "eval_dataset": eval_dataset, "tools": tools}
    objects |= {"environment": environment, "objective": objective, "transforms": transforms}
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts do: read by torch here and in the workers
    _require_overrides(overrides)
    config = resumed_config(compose(config_name, list(overrides)), list(overrides))
    with _own_console(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook without widgets
        inputs = take(config, overrides, **objects)
        try:
            is_stopped = launch(config, _fresh_dir() if run_dir is None else Path(run_dir).expanduser(), inputs)
        except KeyboardInterrupt as stop:
            if not str(stop):
                raise
            raise KeyboardInterrupt(f"{stop}; sota_grpo.Result({str(inputs.run_dir)!r}) has its metrics") from None
    assert inputs.run_dir is not None
    if is_stopped:  # after the last step
        raise KeyboardInterrupt(f"the run is finished; sota_grpo.Result({str(inputs.run_dir)!r}) has its metrics")
    return Result(inputs.run_dir, trust=True)  # of this very config


def _require_overrides(overrides: Any) -> None:
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    for override in overrides if is_list else [overrides]:
        if not is_list or not isinstance(override, str):
            kind = type(override).__name__  # the text itself could have a token
            raise UserError(
                f"overrides is or has an object of type {kind}; give a list of texts, as ['env.repeats=4']."
            )
        if (name := override.partition("=")[0].lstrip("+")) in _HYDRAS:
            raise UserError(f"{name} has no effect here; give run_dir=... instead.")


def _fresh_dir() -> Path:
    """Return ``outputs/DATE/TIME`` with the current time, or the next second for which there is no directory."""
    moment = datetime.now()
    while (path := Path("outputs") / f"{moment:%Y-%m-%d}" / f"{moment:%H-%M-%S}").exists():
        moment += timedelta(seconds=1)
    return path


@contextmanager
def _own_console() -> Iterator[None]:
    """Show the messages of sota_grpo, unless the caller has set a log handler; leave other loggers alone."""
    logger = logging.getLogger("sota_grpo")
    before, level = list(logger.handlers), logger.level
    if not logger.hasHandlers():
        # stderr is red in a notebook
        logger.addHandler(ConsoleHandler(sys.stdout if in_notebook(sys.stdout) else None))
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in [old for old in logger.handlers if old not in before]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
