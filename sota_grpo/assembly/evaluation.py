"""Evaluate a model, or the model that a run trained, on any task; or run only the start-up checks of a config."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sota_grpo.assembly.build import build, make_evaluator, make_weight_sync, with_dialogs
from sota_grpo.assembly.compose import UNUSED_WITHOUT_LOSS, compose, load_config, no_run_or_model
from sota_grpo.assembly.devices import resolve_device
from sota_grpo.assembly.learning import add_adapter, make_model
from sota_grpo.assembly.sampling import heldout_task, open_env, require_heldout, start_engine
from sota_grpo.config import AlgorithmConfig, Config, ModelConfig, model_name
from sota_grpo.config.mixture import a_mixture_names_tasks_and_their_options, task_configs
from sota_grpo.config.secrets import require_tokens
from sota_grpo.config.spelling import changed_options, overrides_of, walk
from sota_grpo.config.validators import READERS, validate
from sota_grpo.envs.prompts import Rollouts
from sota_grpo.errors import RunFailed, UserError, without_exit, writing
from sota_grpo.files import file_reference
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import SMOLLM2, TINY, ModelNotFoundError, load_tokenizer, resolve_model_path
from sota_grpo.policy.tensor_files import in_memory
from sota_grpo.recording import run_files
from sota_grpo.recording.progress import starting
from sota_grpo.rewards.grading import GradingPool, task_grader
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.gate import Check, run_gate, write_gate

PRESET_OF = {
    **{"gsm8k": "grpo_gsm8k", "math": "grpo_math", "ifeval": "grpo_ifeval", "reasoning": "grpo_reasoning"},
    "instructions": "smollm_ifeval",
}
_PRESET_OF_SMOLLM2 = {"gsm8k": "smollm_gsm8k", "ifeval": "smollm_ifeval"}
_PRESET_OF_MODEL = {TINY: "grpo_cpu", SMOLLM2: "smollm_ifeval"}
BEST = "best"  # in place of a step
_OF_ONE_TASK = (  # options that have no meaning for another task
    *READERS,
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "env.reasoning", "env.max_steps"),
    *("env.tools", "env.environment", "env.agent", "env.mixture"),
    *(name for name, _, _ in walk() if name.startswith("reward.judge.")),
)


@dataclass(frozen=True)
class Target:
    """A model to evaluate, with its config and weights."""

    name: str  # as the user wrote it
    config: Config  # of the task, sampling and engine
    checkpoint: Path | None = None  # whose weights are evaluated; None: those of model.name
    steps: int | None = None  # training steps that produced the weights; None: not of a run


def find_target(
    name: str,
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    task: str | None = None,
    step: int | str | None = None,
    trust: bool = False,
) -> Target:
    """Find the model or run ``name``; return its validated config, with ``overrides`` applied, and its weights' path.

    A run is evaluated on its held-out problems, with its seed and engine: its exported model if there is one, else its
    newest checkpoint. A model is evaluated with the options of a preset. UserError if an argument or override is wrong.

    Args:
        name: directory of a run, folder of a model, name of a model on the hub, ``tiny`` or ``smollm2``.
        config_name: preset for a model; None: the preset of the task, else of the model, else ``grpo_gsm8k``.
        task: task to evaluate on, or the name of a mixture's entry; None: that of the run or preset. For another task
            than the run's, options of the run's task are dropped.
        step: evaluate the checkpoint of the run after this many training steps, or ``best`` (train.keep_best).
        trust: allow the code and the servers that the run's config names.
    """
    run_dir = Path(name).expanduser()
    if (run_dir / run_files.CONFIG_FILE).is_file():
        if config_name is not None:
            raise UserError(f"{name} is a run, which has its own config; leave out --config-name.")
        target = _run_target(name, run_dir, overrides, task, step, trust)
    elif trust:
        raise UserError(f"--trust-run is for runs, and {name} is not one; leave it out.")
    elif step is not None:
        raise UserError(
            f"--step {step} needs a run, and {name} is not one ({run_files.CONFIG_FILE} is missing); leave it out."
        )
    else:
        try:
            is_here = Path(resolve_model_path(name)).is_dir()
        except ModelNotFoundError as error:
            raise UserError(f"{no_run_or_model(name)}; give one of these, or a model of the hub.") from error
        of_tasks = PRESET_OF | (_PRESET_OF_SMOLLM2 if name == SMOLLM2 else {})
        preset = config_name or of_tasks.get(task or "", _PRESET_OF_MODEL.get(name, "grpo_gsm8k"))
        _require_unset(overrides, name, "model.name", "model.size")
        config = compose(preset, [*([] if task is None else [f"env.dataset={task}"]), *overrides])
        config.model.name, config.model.size = name, ModelConfig().size
        if config.device == "auto" and not torch.cuda.is_available() and not is_here:
            raise UserError(
                f"{no_run_or_model(name)}; if it is a model of the hub, it needs a GPU, which this machine does not "
                "have; set device=cpu to use the CPU."
            )
        target = Target(name, config)
    algorithm = target.config.algorithm  # nothing is trained: the files that it names need not exist
    algorithm.objective = AlgorithmConfig().objective
    algorithm.baseline = "none" if file_reference(algorithm.baseline) else algorithm.baseline
    validate(target.config)
    return target


def _run_target(
    name: str, run_dir: Path, overrides: Sequence[str], task: str | None, step: int | str | None, trust: bool
) -> Target:
    config = load_config(run_dir, trust=True)  # only to read the names of its tasks
    is_entry = task in (config.env.mixture or ())
    is_task_of_run = task == config.env.dataset and config.env.mixture is None
    if task is not None and not is_task_of_run and not is_entry:  # the options of the run's own task are dropped
        stale = {name: default for name, (_, default) in changed_options(config).items() if name in _OF_ONE_TASK}
        overrides = [f"env.dataset={task}", *overrides_of(stale), *overrides]
    config = load_config(run_dir, overrides, trust=trust, unused=UNUSED_WITHOUT_LOSS)
    if is_entry:
        for sentence in a_mixture_names_tasks_and_their_options(config):
            raise UserError(sentence)
        config = task_configs(config)[str(task)]
    steps = exported_steps(run_dir, config) if step is None else None
    if steps is None:
        steps, checkpoint = find_checkpoint(run_dir, step)
        return Target(name, config, checkpoint, steps)
    _require_unset(overrides, f"that of {name}", "model.name", "model.size", "model.quantization", "model.load_kwargs")
    config.model.name, config.model.size = str(run_dir / run_files.EXPORTED), ModelConfig().size
    config.model.quantization = config.model.load_kwargs = None  # of the model that was trained
    return Target(name, config, steps=steps)


def _require_unset(overrides: Sequence[str], model: str, *options: str) -> None:
    for override in overrides:
        if override.lstrip("+~").partition("=")[0] in options:
            raise UserError(f"{override} has no effect: the evaluated model is {model}; leave it out.")


def exported_steps(run_dir: Path, config: Config) -> int | None:
    """Return the training steps of a finished run's exported model; None if it is not finished or exported none.

    UserError if its record is damaged.
    """
    record = run_files.read_record(run_dir) or {}
    is_whole = (
        record.get("finished") and config.train.export_hf and (run_dir / run_files.EXPORTED / "config.json").is_file()
    )
    reached = record.get("reached") or {"step": record.get("num_steps")}
    return _step_of(reached, run_dir / run_files.RUN_FILE) if is_whole else None


def _step_of(record: Any, path: Path) -> int:
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int):
        raise UserError(f"{path} is damaged: it has no number of steps; give one with --step.")
    return step


def find_checkpoint(run_dir: Path, step: int | str | None = None) -> tuple[int, Path]:
    """Return (training steps, path) of a run's newest checkpoint, of ``step``, or the ``best``; UserError if none."""
    if step == BEST:
        best = run_files.read_json(run_dir / run_files.BEST_FILE)
        if not best:
            raise UserError(
                f"{run_dir} has no {run_files.BEST_FILE}, which train.keep_best=METRIC writes; give a step instead."
            )
        step = _step_of(best, run_dir / run_files.BEST_FILE)
    paths = CheckpointStore(run_dir / run_files.CHECKPOINTS).paths()
    if not paths:
        raise UserError(f"{run_dir} has no checkpoint; resume the run if it is unfinished, or give another run.")
    chosen = [(steps, path) for steps, path in paths if step in (None, steps)]
    if not chosen:
        there = ", ".join(str(steps) for steps, _ in reversed(paths))
        raise UserError(f"{run_dir} has no checkpoint after {step} steps; choose from {there}.")
    return chosen[0]


def load_trained(checkpoint: Path, model: nn.Module) -> None:
    """Copy a checkpoint's trainable weights to ``model``; UserError if it is unreadable, or names or shapes differ."""
    saved = CheckpointStore.load(checkpoint, ["learner"])["learner"]["model"]
    scorer = CausalPolicy(model, shared_prompt=False).scorer  # its names are those of checkpoints
    mine = {name: value for name, value in scorer.named_parameters() if value.requires_grad}
    odd = mine.keys() ^ saved.keys()
    odd |= {name for name in mine.keys() & saved.keys() if mine[name].shape != saved[name].shape}
    if odd:
        raise UserError(
            f"{checkpoint} does not fit the model: {len(odd)} trainable parameters differ, such as {min(odd)}; leave "
            "model.name and train_model.lora as they are in the run."
        )
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(in_memory(saved[name]))


@contextmanager
def open_evaluator(target: Target) -> Iterator[Evaluator]:
    """Start engine and graders with the target's weights and yield an evaluator; leaving the block closes them."""
    config = target.config
    device = resolve_device(config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    task = heldout_task(config)
    require_heldout(config, task)
    with without_exit(), ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_")))  # logs of servers
        env, instances = open_env(config, task, tokenizer, opened)
        is_as_stored = target.checkpoint is None and config.model.quantization is None
        base = None if is_as_stored else make_model(config, torch.device("cpu"))
        engine = start_engine(config, device, tokenizer, base, scratch)  # copies base before an adapter is added
        opened.callback(engine.close)
        if base is not None:
            model = add_adapter(config, base)
            if target.checkpoint is not None:
                load_trained(target.checkpoint, model)
            make_weight_sync(config, model, engine).send(version=target.steps or 0)
        grader = task_grader(env.grader)
        if isinstance(grader, GradingPool):
            grader.wait_ready()
        try:
            yield make_evaluator(config, env.task, Rollouts(env, with_dialogs(config, env, engine, instances, opened)))
        except UnusableValues as error:
            raise RunFailed(f"{target.name} cannot be evaluated: {error}") from error


def check(
    config: Config, *, run_dir: Path | None = None, on_check: Callable[[Check], object] = lambda check: None
) -> list[Check]:
    """Run all start-up checks on ``config``, whatever its ``check.mode``; return all, failed ones too.

    Each check is passed to ``on_check`` when done. ``gate.json`` and the engines' logs are written to ``run_dir``,
    which must not have a run (None: only the logs, to a temporary folder). W&B is disabled in ``config``. UserError if
    a component cannot be built or ``run_dir`` cannot be used.
    """
    require_tokens()
    validate(config)
    config.logging.wandb = "disabled"  # nothing is logged

    with without_exit(), ExitStack() as opened:
        folder = run_dir or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_check_")))
        if run_dir is not None and (run_dir / run_files.RUN_FILE).exists():
            raise UserError(f"--run-dir {run_dir} has a run, whose gate.json would be replaced; give another folder.")
        with writing(f"--run-dir {run_dir}", "use another"):
            folder.mkdir(parents=True, exist_ok=True)
        components = opened.enter_context(closing(build(config, folder)))
        starting("Checking before training")
        components.weight_sync.send(version=components.learner.version)
        checks = run_gate(components, "warn", on_check=on_check)
        if run_dir is not None:
            write_gate(run_dir, "warn", checks)
        return checks
