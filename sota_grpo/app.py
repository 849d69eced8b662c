"""The assembly: from one config to the parts of a run, and the run itself. Only this room reads the whole config."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from sota_grpo.assembly import Parts, build
from sota_grpo.checkpoint import CheckpointStore, rng_state, set_rng_state
from sota_grpo.config import Config, register
from sota_grpo.errors import UserError
from sota_grpo.gate import Subject, run_gate
from sota_grpo.loop import run
from sota_grpo.policy.export import save_hf
from sota_grpo.recording.progress import Progress, closing_table
from sota_grpo.recording.run_log import METRICS_FILE, RunLog, setup_logging
from sota_grpo.recording.sinks import WandbSink
from sota_grpo.runs import CHECKPOINTS, RunDir, open_run
from sota_grpo.step_log import StepLog
from sota_grpo.stopping import StopRequest
from sota_grpo.validators import validate

logger = logging.getLogger(__name__)

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
USER_MISTAKE, INTERRUPTED = 2, 130


def num_steps(config: Config) -> int:
    """Turns of the loop: whole collections that fit into ``train.total_dialog_turns``."""
    return config.train.total_dialog_turns // config.train.dialog_turns_per_batch


class Run:
    """One training run in one directory.

    Args:
        config: validated.
        place: where everything is written, locked by the caller for the life of the run.
    """

    def __init__(self, config: Config, place: RunDir):
        self.config = config
        self.place, self.run_dir = place, place.path
        self.began = time.perf_counter()
        setup_logging(self.run_dir, config.logging.level)
        self.checkpoints = CheckpointStore(self.run_dir / CHECKPOINTS, keep=config.train.keep_checkpoints)
        self.parts: Parts = build(config, self.run_dir)

    def train(self) -> int:
        """Gate, loop, last evaluation, export, closing table. Returns the number of turns done."""
        first = self._restore()
        parts, total = self.parts, num_steps(self.config)
        parts.publisher.publish(parts.learner.version)
        with self._run_log() as self.run_log, Progress(total, first_step=first) as progress, StopRequest() as stop:
            self._check()
            self.run_log.rewind(first)
            self.place.start(_as_yaml(self.config))  # not before: a first start that fails leaves no run behind
            self.log = StepLog(self.run_log, progress, parts.tokenizer, lambda: parts.publisher.seconds)
            done = run(
                parts.source,
                parts.learner,
                parts.publisher,
                self.log,
                first_step=first,
                num_steps=total,
                before=self._before,
                after=lambda turns: self._after(turns, stop),
            )
            if done >= total:
                self._finish(done)
        return done

    def _restore(self) -> int:
        """Load the newest checkpoint of a resumed run; returns the first step to do."""
        found = self.checkpoints.latest() if self.place.resumed else None
        if found is None:
            if self.config.train.resume is not None:
                logger.info("Nothing to continue: starting afresh in %s.", self.run_dir)
            return 0
        step, state = found
        self.parts.learner.load_state_dict(state["learner"])
        self.parts.source.load_state_dict(state["source"])
        set_rng_state(state["rng"])
        logger.info("Continuing %s after %d turns.", self.run_dir, step)
        before, now = state["num_threads"], torch.get_num_threads()
        if before != now:
            logger.warning("The run had %d CPU threads and has %d now: equal up to rounding only.", before, now)
        return step

    def _save(self, turns: int) -> None:
        began = time.perf_counter()
        state = {
            "learner": self.parts.learner.state_dict(),
            "source": self.parts.source.state_dict(),
            "rng": rng_state(),
            "num_threads": torch.get_num_threads(),
            "config": asdict(self.config),
        }
        self.checkpoints.save(turns, state)
        self.log.add_seconds("time/checkpoint_s", time.perf_counter() - began)

    def _before(self, step: int) -> None:
        """Evaluate at the start and every ``eval.every`` turns."""
        every = self.config.eval.every
        if self.config.eval.mode == "on" and (step == 0 or (every and step % every == 0)):
            self._evaluate(step)
        self.log.begin(step)

    def _evaluate(self, step: int) -> None:
        found = self.parts.evaluator.measure()
        self.run_log.write_step(step, found)
        self.log.add_seconds("time/eval_s", found["time/eval_s"])
        logger.info("Held-out accuracy after %d turns: %.1f %%", step, 100 * found["eval/accuracy"])

    def _after(self, turns: int, stop: StopRequest) -> bool:
        frequency = self.config.train.checkpoint_frequency
        if (frequency and turns % frequency == 0) or turns == num_steps(self.config) or stop.asked:
            self._save(turns)
        if stop.asked:
            logger.warning("Stopped after %d turns; train.resume=auto continues.", turns)
        return not stop.asked

    def _finish(self, turns: int) -> None:
        if self.config.eval.mode == "on":
            self._evaluate(turns)
        if self.config.train.export_hf:
            self._export(self.run_dir / "hf")
        self.place.finish()
        evaluations = _evaluations(self.run_dir / METRICS_FILE)
        text = closing_table(
            evaluations.get(0, {}),
            evaluations.get(turns, {}),
            {name[len("time/") : -len("_s")]: s for name, s in self.log.phase_seconds.items() if name != "time/step_s"},
            avg_at_k=self.config.eval.avg_at_k,
            wall_s=time.perf_counter() - self.began,
        )
        logger.info("\n%s", text, extra={"file_only": True})  # the console has it already
        print(f"Run directory: {self.run_dir}")

    def _export(self, folder: Path) -> None:
        try:
            save_hf(self.parts.model, self.parts.tokenizer, folder)
        except OSError as error:
            raise UserError(
                f"The model cannot be written to {folder} ({error.strerror or error}); free space there, "
                "train.resume=auto then writes it again."
            ) from error

    def _check(self) -> None:
        parts, began = self.parts, time.perf_counter()
        exact = parts.exact
        subject = Subject(
            task=parts.task,
            env=parts.env,
            engine=parts.engine,
            learner=parts.learner,
            publisher=parts.publisher,
            sampling=parts.sampling,
            seed=self.config.seed,
            tolerance=1e-4 if exact else 5e-2,
            transforms=[transform for _, transform in parts.source.transforms],
        )
        checks = run_gate(subject, self.config.check.mode)
        if checks:
            passed = sum(check.passed for check in checks)
            print(f"Checks before training: {passed} of {len(checks)} passed in {time.perf_counter() - began:.1f} s")

    def _run_log(self) -> RunLog:
        config = self.config.logging
        sinks = []
        if config.wandb != "disabled":
            sinks.append(
                WandbSink(
                    mode=config.wandb,
                    project=config.project,
                    name=config.run_name,
                    tags=config.tags,
                    config=asdict(self.config),
                    run_dir=self.run_dir,
                )
            )
        return RunLog(self.run_dir, sinks=sinks)

    def close(self) -> None:
        """Free the engine and the reference; idempotent."""
        self.parts.close()


def train(config: Config, run_dir: Path) -> int:
    """Validate, assemble, train, close. Returns the number of turns done.

    ``run_dir`` is where everything is written; under ``train.resume`` perhaps an older one is continued instead.
    """
    validate(config)
    with open_run(run_dir, asdict(config), config.train.resume, num_steps=num_steps(config)) as place:
        if place.finished:
            print(f"The run in {place.path} is already finished.")
            return num_steps(config)
        job = Run(config, place)
        try:
            return job.train()
        finally:
            job.close()


def entry() -> None:
    """Command line of ``grpo.py``: Hydra composes the config, mistakes of the user are one sentence and exit code 2."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # this function prints the sentence itself
    _quiet_console()
    if os.environ.get("VLLM_USE_V1") == "0":
        print("VLLM_USE_V1=0 is accepted and has no effect: this vLLM has one engine.", file=sys.stderr)

    mistakes = (UserError, HydraException, OmegaConfBaseException)
    codes: list[int] = []
    began = False

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def job(composed: DictConfig) -> None:
        nonlocal began
        began = True
        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        codes.append(_exit_code(lambda: _train_or_interrupt(config, run_dir), mistakes))

    try:
        codes.append(_exit_code(job, mistakes))
    except OSError as error:  # before the job, Hydra failed to make its directory; inside, it is a bug: a traceback
        if began:
            raise
        print(f"grpo.py: {error}; set hydra.run.dir to a directory that can be written.", file=sys.stderr)
        codes.append(USER_MISTAKE)
    sys.exit(max(codes))


def _train_or_interrupt(config: Config, run_dir: Path) -> None:
    """A run that was asked to stop ends the whole command, a sweep's other runs included."""
    if train(config, run_dir) < num_steps(config):
        raise KeyboardInterrupt


def _exit_code(job: Callable[[], None], mistakes: tuple[type[Exception], ...]) -> int:
    """Run ``job``; a mistake of the user is one sentence and 2, an interrupt ends the program with 130."""
    try:
        job()
    except mistakes as error:
        print(f"grpo.py: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        print("grpo.py: interrupted; train.resume=auto continues from the last checkpoint.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    return 0


def _quiet_console() -> None:
    """Our own sentences on stderr; of the libraries, only warnings and no progress bars."""
    from transformers.utils import logging as transformers_logging

    console = logging.StreamHandler()
    console.setLevel(logging.INFO)  # logging.level is that of training.log
    console.addFilter(lambda record: not getattr(record, "file_only", False))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[console])
    logging.getLogger("sota_grpo").setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()


def _evaluations(path: Path) -> dict[int, dict[str, float]]:
    """The evaluations written so far, by step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row for row in rows if "eval/accuracy" in row}


def _as_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))
