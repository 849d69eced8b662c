"""Execute one run: start-up checks, training loop, evaluations, checkpoints, export of the model."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from sota_grpo.assembly.build import RunComponents, build
from sota_grpo.assembly.compose import anchor_paths
from sota_grpo.assembly.devices import resolve_device
from sota_grpo.assembly.estimate import require_disk
from sota_grpo.assembly.learning import model_digests
from sota_grpo.assembly.python_inputs import PythonInputs
from sota_grpo.config import Config, num_steps
from sota_grpo.config.secrets import require_tokens
from sota_grpo.config.spelling import with_options
from sota_grpo.config.validators import validate
from sota_grpo.errors import RunFailed, UserError, collect_garbage_rarely, without_exit, writing
from sota_grpo.files import write_json
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.loop import run
from sota_grpo.recording import run_files
from sota_grpo.recording.metrics import METRICS, is_number, known
from sota_grpo.recording.progress import Progress, closing_lines, started, starting
from sota_grpo.recording.run_log import RunLog, StepLog, setup_logging
from sota_grpo.recording.sinks import make_sinks
from sota_grpo.recording.stored_steps import StoredSteps
from sota_grpo.report import report_of
from sota_grpo.rewards.functions import Functions
from sota_grpo.stopping import Interrupted, StopRequest
from sota_grpo.text import GREEN, RED, os_reason, say
from sota_grpo.training.checkpoint import BackgroundSaves, CheckpointStore, host_copy, rng_state, set_rng_state
from sota_grpo.training.gate import Check, run_gate, write_gate
from sota_grpo.training.learner import Learner
from sota_grpo.training.runs import CHECKPOINTS, RunDir, open_run

logger = logging.getLogger(__name__)

MEMORY = "train.micro_batch_tokens"
CONTINUES = "train.resume=auto continues from the last checkpoint"


def as_planned(config: Config, directory: RunDir) -> Config:
    """Return ``config``; in a resumed run, ``train.micro_batch_tokens=auto`` becomes the number recorded before."""
    if isinstance(config.train.micro_batch_tokens, int) or not directory.resumed:
        return config
    planned = run_files.read_config(directory.path).get("train", {}).get("micro_batch_tokens")
    if not isinstance(planned, int):
        logger.warning(
            "%s does not record what %s=auto was: it is chosen anew.", directory.path / run_files.CONFIG_FILE, MEMORY
        )
        return config
    logger.info("%s=auto is %s tokens, the number that the last start of this run used.", MEMORY, planned)
    return with_options(config, {MEMORY: planned})


def target_line(reached: Mapping[str, float]) -> str:
    """Return a clause (without a period) on a run that has reached its target.

    >>> target_line({"step": 40, "accuracy": 0.3031, "target": 0.3})
    'eval.target=0.3 was reached after 40 steps: 30.3 %'
    """
    steps, percent = reached["step"], 100 * reached["accuracy"]
    after = "1 step" if steps == 1 else f"{steps} steps"
    return f"eval.target={reached['target']:g} was reached after {after}: {percent:.1f} %"


class Run:
    """One training run in a locked directory; the constructor builds its components, and :meth:`close` ends them."""

    def __init__(self, config: Config, directory: RunDir, functions: Functions | None = None):
        self.directory, self.run_dir = directory, directory.path
        self.began = time.perf_counter()
        setup_logging(self.run_dir)
        device = resolve_device(config)  # before the disk: a missing GPU is the first error
        require_disk(config, self.run_dir)
        self.checkpoints = CheckpointStore(self.run_dir / CHECKPOINTS, keep=config.train.keep_checkpoints)
        self.saves = BackgroundSaves(self.checkpoints)
        self.stop = StopRequest(grace_s=config.train.grace_s)
        self.steps, self.total = 0, num_steps(config)  # done so far, and in all
        self.saved: int | None = None  # the step of the last checkpoint
        self.reached: dict[str, float] | None = None  # step, accuracy and target once eval.target is reached
        self.gc_thresholds = gc.get_threshold()
        self.components: RunComponents = build(config, self.run_dir, lambda: self.stop.requested, functions)
        self.config = with_options(config, {MEMORY: self.components.learner.settings.micro_batch_tokens})
        self.stored = StoredSteps(
            self.components.collector,
            self.components.learner,
            self.run_dir,
            self.components.tokenizer,
            device=device,
            enabled=config.logging.store_steps,
        )

    def train(self) -> int:
        """Check, train, evaluate and export; return the number of completed steps, including those before a resume."""
        self.directory.require_models(model_digests(self.config))
        first = self.first = self.steps = self._restore()
        self._find_best(first)
        components = self.components
        starting("Sending the weights to the engine")
        is_checked = self.config.check.mode != "off"  # the checks compare these weights
        components.weight_sync.send(version=components.learner.version, verify=not is_checked)
        began = time.perf_counter()
        self._check()  # an interrupt ends it at once: there is nothing to save yet
        until_now = {"time/start_s": began - self.began, "time/checks_s": time.perf_counter() - began}
        progress = Progress(self.total, by_reward=components.evaluator.success_above is not None)
        # contexts end in reverse order: signal handling ends first, so no grace time ends while a checkpoint is written
        with (
            RunLog(
                self.run_dir,
                sinks=make_sinks(self.config, self.run_dir),
                num_examine=self.config.logging.num_examine,
                term_weights=components.task.term_weights,
            ) as self.run_log,
            self.saves,
            self.stop,
        ):
            self.run_log.phase_seconds |= until_now
            gc.collect()
            gc.freeze()  # objects that live as long as the run
            collect_garbage_rarely()
            self.run_log.rewind(first)
            # not earlier: a first start that fails leaves no run
            self.directory.start(OmegaConf.to_yaml(OmegaConf.structured(self.config)))
            publish_s = lambda: components.weight_sync.seconds  # noqa: E731
            self.log = StepLog(self.run_log, progress, self.stored, components.tokenizer, components.task, publish_s)
            buffer = components.collector.replay_buffer
            batches = components.collector if buffer is None else buffer
            try:
                with progress:
                    done = run(
                        iter(batches),
                        components.learner,
                        components.collector,
                        self.log,
                        first_step=first,
                        num_steps=self.total,
                        before=self._before,
                        after=self._after,
                    )
                if done >= self.total or self.reached is not None:
                    self._finish(done)
            except Interrupted:  # between two steps: nothing of the next one has been trained on
                self._after(self.steps)
                return self.steps
            except UnusableValues as error:  # nor here, or in an evaluation
                if self.steps > first:
                    self._save(self.steps)
                steps, saved = self.steps, " The steps before are saved." if self.steps else ""
                raise RunFailed(f"The run cannot continue after {steps} training steps: {error}{saved}") from error
        return done

    def _restore(self) -> int:
        """Load the newest checkpoint if the run is resumed; return the number of the first step to train."""
        entries = ("learner", "collector", "rng", "num_threads")
        newest = self.checkpoints.latest(entries) if self.directory.resumed else None
        if newest is None:
            if self.directory.has_ended:
                raise UserError(
                    f"The run in {self.run_dir} is finished, but has no checkpoint to continue from; restore one, or "
                    "start another run in another hydra.run.dir."
                )
            if self.config.train.resume is not None:
                begins = f"There is no checkpoint to resume: starting a new run in {self.run_dir}"
                rows = run_files.read_rows(self.run_dir / run_files.METRICS_FILE)
                lost = max((row["step"] + 1 for row in rows if run_files.EVALUATED not in row), default=0)
                if lost:
                    remedy = "to keep them, stop this command now and restore a checkpoint"
                    logger.warning("%s, where %d trained steps are deleted; %s.", begins, lost, remedy)
                else:
                    logger.info("%s.", begins)
            return 0
        step, state = newest
        self.saved = step
        schedule, shorter = self.config.optimizer.schedule, self.directory.shorter
        if shorter is not None and schedule != "constant":
            logger.info(
                "The %s schedule of the learning rate now ends after %d steps, instead of %d.",
                *(schedule, num_steps(self.config), shorter),
            )
        self.components.learner.load_state_dict(state["learner"])
        self.components.collector.load_state_dict(state["collector"])
        set_rng_state(state["rng"])
        logger.info("Continuing %s after %d steps.", self.run_dir, step)
        before, now = state["num_threads"], torch.get_num_threads()
        if before != now:
            logger.warning(
                "The run had %d CPU threads and has %d now: numbers are rounded differently, so sampled tokens can "
                "differ from those of an uninterrupted run.",
                *(before, now),
            )
        return step

    def _save(self, steps: int) -> None:
        """Save a checkpoint; training continues meanwhile, but not on a CPU: a copy needs memory and writing a core."""
        began = time.perf_counter()
        self.saves.wait()  # one copy of the state at a time
        learner, shards, on_cpu = self.components.learner, None, False
        if isinstance(learner, Learner):
            on_cpu = learner.device.type == "cpu"
            learned = learner.state_dict() if on_cpu else host_copy(learner.state_dict())
        else:
            learned, shards = learner.begin_save(self.checkpoints.folder(steps))
        state = {
            "learner": learned,
            "collector": host_copy(self.components.collector.state_dict()),
            "rng": rng_state(),
            "num_threads": torch.get_num_threads(),
            "config": asdict(self.config),
        }
        self.saves.save(steps, state, shards)
        self.saved = steps
        if on_cpu:
            self.saves.wait()
        self.stored.after_checkpoint()
        self.run_log.phase_seconds["time/checkpoint_s"] += time.perf_counter() - began

    def _before(self, step: int) -> bool:
        """Evaluate if an evaluation is due before ``step``; return False if ``eval.target`` is reached."""
        if self.saves.saving is not None:
            self.saves.check()
        every = self.config.eval.every
        had_ended = step == self.first == self.directory.shorter
        is_due = had_ended or (every and step % every == 0 if step else self.config.eval.mode == "on")
        if self.config.eval.mode != "off" and is_due:
            self._evaluate(step, self.config.eval.target)
            if self.reached is not None:
                return False
        if step == self.first:
            starting(f"The first step: {self.config.train.dialog_turns_per_batch} responses")
        self.log.begin()
        if step == self.first and self.components.collector.replay_buffer is not None:  # filled from now on
            self.components.collector.start()
        return True

    def _evaluate(self, step: int, subset_for: float | None = None) -> None:
        """Evaluate and log; on all problems, also decide about ``eval.target`` and the best checkpoint."""
        evaluator, target = self.components.evaluator, self.config.eval.target
        if step == self.first:
            starting(f"Evaluating on {len(evaluator.examples)} held-out problems")
        metrics = evaluator.measure(subset_for)
        self.run_log.write_step(step, metrics)
        self.run_log.phase_seconds["time/eval_s"] += metrics["time/eval_s"]
        logger.info("%s", evaluator.sentence(step, metrics))
        if metrics["eval/num_samples"] < len(evaluator.examples):
            return
        name = self.config.train.keep_best
        if name is not None and name not in metrics and self.best is None:  # else nothing was to be measured this time
            if step > self.first and self.saved != step:
                self._save(step)
            logged = ", ".join(one for one in metrics if one.startswith("eval/"))
            raise UserError(f"train.keep_best={name} is no metric of this run's evaluations; use one of {logged}.")
        if target is not None and metrics["eval/accuracy"] >= target:
            self.reached = {"step": step, "accuracy": metrics["eval/accuracy"], "target": target}
        self._keep_best(step, metrics)

    def _find_best(self, step: int) -> None:
        """Read which checkpoint is the best so far; forget it if it is of another metric, of a later step, or gone.

        UserError: no metric has the name train.keep_best.

        Without ``train.keep_best`` the best checkpoint of before stays, and no other becomes it.
        """
        path, name = self.run_dir / run_files.BEST_FILE, self.config.train.keep_best
        if name is not None and known(name) is None:
            logged = ", ".join(one for one in METRICS if one.startswith("eval/") and known(one))
            raise UserError(f"train.keep_best={name} is no metric of evaluations; use one of {logged}.")
        best = run_files.read_json(path) or {}
        there = [saved for saved, _ in self.checkpoints.paths() if saved <= step]
        if name is None:
            self.checkpoints.best = best.get("step")
            return
        is_known = best.get("metric") == name and best.get("step") in there and is_number(best.get("value"))
        self.best = best["value"] if is_known else None
        self.checkpoints.best = None if self.best is None else best["step"]
        if self.best is None:
            path.unlink(missing_ok=True)

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the checkpoint of ``step`` and name it in ``best.json`` if its ``train.keep_best`` is the highest."""
        name = self.config.train.keep_best
        if name is None or name not in metrics or (self.best is not None and metrics[name] <= self.best):
            return
        if self.saved != step:
            self._save(step)
        self.saves.wait()  # on disk before it is named; the checkpoint that was the best goes with the next save
        path = self.run_dir / run_files.BEST_FILE
        fix = "free disk space, then continue from the last checkpoint with train.resume=auto"
        with writing(path, fix, RunFailed):
            write_json(path, {"step": step, "metric": name, "value": metrics[name]})
        self.best, self.checkpoints.best = metrics[name], step

    def _after(self, steps: int) -> bool:
        self.steps = steps
        if steps == self.first + 1:
            started()
        frequency = self.config.train.checkpoint_frequency
        if self.stop.requested:
            self.stop.step_is_over()
        if (frequency and steps % frequency == 0) or steps == self.total or self.stop.requested:
            self._save(steps)
        if self.stop.requested and steps < self.total:
            self._report()
            logger.warning("Stopped after %d steps; train.resume=auto continues the run.", steps)
        return not self.stop.requested

    def _report(self) -> None:
        if self.config.logging.report:
            self.run_log.phase_seconds["time/report_s"] += report_of(self.run_dir)

    def _finish(self, steps: int) -> None:
        if self.reached is not None and self.saved != steps:
            self._save(steps)
        elif self.reached is None and self.config.eval.mode != "off":
            self._evaluate(steps)
        if self.config.train.export_hf:
            folder = self.run_dir / run_files.EXPORTED
            try:
                self.components.learner.export_hf(folder)
            except OSError as error:
                raise RunFailed(
                    f"The model cannot be written to {folder} ({os_reason(error)}); make room or make "
                    "the folder writable, then write it with train.resume=auto."
                ) from error
        self.saves.wait()
        self.directory.finish(self.reached)
        self._report()
        evaluations = {row["step"]: row for row in run_files.read_evaluations(self.run_dir)}
        spent = {name: seconds for name, seconds in self.run_log.phase_seconds.items() if name != "time/step_s"}
        before, after = evaluations.get(0, {}), evaluations.get(steps, {})
        is_same = before.get("eval/num_samples") == after.get("eval/num_samples")  # else one measured a subset
        lines = closing_lines(
            before if is_same else {},
            after,
            {name[len("time/") : -len("_s")]: seconds for name, seconds in spent.items()},
            avg_at_k=self.config.eval.avg_at_k,
            wall_s=time.perf_counter() - self.began,
        )
        if (target := self.config.eval.target) is not None and self.reached is None:
            lines.append(f"eval.target={target:g} was not reached in {steps} steps")
        elif self.reached is not None:
            lines.append(target_line(self.reached))
        for line in (*lines, f"Run directory: {self.run_dir}"):
            logger.info("%s", line, extra={"file_only": True})
            say(line)

    def _check(self) -> None:
        began = time.perf_counter()
        if self.config.check.mode != "off":
            starting("Checking before training")
        checks: list[Check] = []

        def note(check: Check) -> None:
            checks.append(check)
            say(f"{check.outcome:8}  {check.name}", colour={True: GREEN, False: RED, None: None}[check.passed])
            if check.passed is False and self.config.check.mode == "warn":
                logger.warning("check.mode=warn: %s: %s", check.name, check.sentence)

        try:
            run_gate(self.components, self.config.check.mode, on_check=note)
        finally:
            write_gate(self.run_dir, self.config.check.mode, checks)
        if checks:
            made = [check.passed for check in checks if check.passed is not None]
            say(
                f"Checks before training: {sum(made)} of {len(made)} passed in {time.perf_counter() - began:.1f} s, "
                f"on responses of up to {self.components.max_tokens} tokens"
            )

    def close(self) -> None:
        """Close all components (:meth:`RunComponents.close`) and restore the garbage collector; idempotent."""
        gc.unfreeze()
        gc.set_threshold(*self.gc_thresholds)
        self.components.close()


def train(
    config: Config,
    run_dir: Path,
    inputs: PythonInputs | None = None,
    *,
    on_locked: Callable[[Path], object] = lambda run_dir: None,
) -> int:
    """Validate the config, build the components, train and close them; return the number of completed training steps.

    The number includes steps before a resume. A finished run is not trained again. Paths of existing files, folders
    and models in ``config`` become absolute. When the run's directory (``run_dir``, or that of the run to resume) is
    locked, ``inputs.run_dir`` is set to it and ``on_locked`` is called with it; ``inputs.stopped`` is set at the end.
    Number of threads, random states and transformers' progress bars are restored.

    UserError: the run cannot start or continue. The first Ctrl-C during training saves a checkpoint, and this function
    returns. KeyboardInterrupt: Ctrl-C during start-up, or a second Ctrl-C during training.
    """
    require_tokens()
    validate(config)
    inputs, total = inputs or PythonInputs(), num_steps(config)
    threads, random_state, had_bars = torch.get_num_threads(), rng_state(), is_progress_bar_enabled()
    disable_progress_bar()
    try:
        anchor_paths(config)
        signed = asdict(config) | inputs.signature
        with open_run(run_dir, signed, config.train.resume, num_steps=total) as directory:
            on_locked(directory.path)
            inputs.write(directory.path, config)
            if directory.finished:
                end = f" {target_line(directory.reached)}." if directory.reached else ""
                say(f"The run in {directory.path} is already finished.{end}")
                return int(directory.reached["step"]) if directory.reached else total
            try:
                with without_exit(), closing(Run(as_planned(config, directory), directory, inputs.functions)) as job:
                    done = job.train()
                    inputs.stopped = job.stop.requested
                    return done
            except Exception as error:
                with suppress(OSError):
                    run_files.note_failure(directory.path, error)
                if isinstance(error, RunFailed) or not isinstance(error, UserError):  # the console may be gone
                    trace = not isinstance(error, UserError)
                    logger.error(
                        "The run ended: %s", run_files.reason(error), exc_info=trace, extra={"file_only": True}
                    )
                raise
            except KeyboardInterrupt:
                if CheckpointStore(directory.path / CHECKPOINTS).paths():
                    raise KeyboardInterrupt(CONTINUES) from None
                raise
    finally:
        torch.set_num_threads(threads)
        set_rng_state(random_state)
        if had_bars:
            enable_progress_bar()
