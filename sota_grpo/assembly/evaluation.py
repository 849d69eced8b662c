"""Evaluation outside training: of a model, or of what a run has trained, on any task with any engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sota_grpo.assembly.build import make_evaluator, make_publisher, make_rollouts
from sota_grpo.assembly.compose import compose, load_config, no_run_or_model
from sota_grpo.assembly.devices import resolve_device
from sota_grpo.assembly.learning import add_adapter, make_model
from sota_grpo.assembly.sampling import heldout_task, make_env, make_grader, start_engine
from sota_grpo.config import Config, ModelConfig, changed_options, model_name, overrides_of
from sota_grpo.config.validators import READERS, validate
from sota_grpo.errors import UserError
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import SMOLLM2, TINY, ModelNotFoundError, load_tokenizer, resolve_model_path
from sota_grpo.recording.run_files import CHECKPOINTS, CONFIG_FILE, read_record
from sota_grpo.rewards.grading import GradingPool
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.evaluate import (
    Accuracy,
    Counts,
    Evaluator,
    Response,
    accuracy,
    num_failed,
    num_right,
    pass_accuracy,
)

EXPORTED = "hf"
_PRESET_OF = {
    **{"gsm8k": "grpo_gsm8k", "math": "grpo_math", "ifeval": "grpo_ifeval", "reasoning": "grpo_reasoning"},
    "instructions": "smollm_ifeval",
}
_PRESET_OF_SMOLLM2 = {"gsm8k": "smollm_gsm8k", "ifeval": "smollm_ifeval"}
_PRESET_OF_MODEL = {TINY: "grpo_cpu", SMOLLM2: "smollm_ifeval"}
_OF_ONE_TASK = (  # options that mean nothing to another task
    *READERS,
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "env.reasoning", "env.max_steps"),
)


@dataclass(frozen=True)
class Target:
    """What is evaluated.

    Attributes:
        name: as the user gave it.
        config: the task, the sampling, and the model that the engine is started with.
        checkpoint: whose weights the engine is given; None: the model's own.
        turns: of the run, after which it had these weights; None where that is not known.
    """

    name: str
    config: Config
    checkpoint: Path | None = None
    turns: int | None = None


def find_target(
    name: str,
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    task: str | None = None,
    step: int | None = None,
) -> Target:
    """The model or run called ``name``, with its config under ``overrides``.

    A run is evaluated as it was trained: on its held-out problems, with its seed and its engine. Its exported model is
    taken where the run is finished, else its newest checkpoint. A model has the options of the task's preset.

    Args:
        name: a run directory, the folder of a model, its name on the hub, or ``tiny``.
        overrides: as ``grpo.py`` takes them.
        config_name: preset for a model; None: that of the task, else the model's own (``tiny``, ``smollm2``).
        task: what to evaluate on; None: the run's task, or the preset's. With another one than the run's, the options
            of the run's task are left behind.
        step: take the checkpoint that the run saved after so many turns.

    Raises:
        UserError: no such run, checkpoint or preset, or a config that contradicts itself.
    """
    run_dir = Path(name).expanduser()
    if (run_dir / CONFIG_FILE).is_file():
        if config_name is not None:
            raise UserError(f"{name} is a run, which has a config of its own; leave --config-name out.")
        target = _run_target(name, run_dir, overrides, task, step)
    elif step is not None:
        raise UserError(f"--step {step} chooses a checkpoint, and {name} is no run ({CONFIG_FILE} is missing there).")
    else:
        target = _model_target(name, overrides, config_name, task)
    validate(target.config)
    return target


def _model_target(name: str, overrides: Sequence[str], config_name: str | None, task: str | None) -> Target:
    try:
        resolve_model_path(name)
    except ModelNotFoundError as error:
        raise UserError(f"{no_run_or_model(name)}.") from error
    of_tasks = _PRESET_OF | (_PRESET_OF_SMOLLM2 if name == SMOLLM2 else {})
    preset = config_name or of_tasks.get(task or "", _PRESET_OF_MODEL.get(name, "grpo_gsm8k"))
    asked = [] if task is None else [f"env.dataset={task}"]
    config = compose(preset, [*asked, *overrides])
    config.model.name, config.model.size = name, ModelConfig().size
    if config.device == "auto" and not torch.cuda.is_available() and not Path(resolve_model_path(name)).is_dir():
        raise UserError(
            f"{no_run_or_model(name)}; if it is a model of the hub, it needs a GPU, which this machine has not, or "
            "device=cpu."
        )
    return Target(name, config)


def _run_target(name: str, run_dir: Path, overrides: Sequence[str], task: str | None, step: int | None) -> Target:
    config = load_config(run_dir)
    if task not in (None, config.env.dataset):  # the options of the run's own task are left behind
        stale = {name: default for name, (_, default) in changed_options(config).items() if name in _OF_ONE_TASK}
        overrides = [f"env.dataset={task}", *overrides_of(stale), *overrides]
    config = load_config(run_dir, overrides)
    exported = exported_turns(run_dir, config)
    if step is None and exported is not None:
        config.model.name, config.model.size = str(run_dir / EXPORTED), ModelConfig().size
        return Target(name, config, turns=exported)
    turns, checkpoint = find_checkpoint(run_dir, step)
    return Target(name, config, checkpoint, turns)


def exported_turns(run_dir: Path, config: Config) -> int | None:
    """Turns after which a run exported its model; None where there is none, or an older one than the run has come."""
    record = read_record(run_dir) or {}
    is_whole = record.get("finished") and config.train.export_hf and (run_dir / EXPORTED / "config.json").is_file()
    return int(record["num_steps"]) if is_whole else None


def find_checkpoint(run_dir: Path, step: int | None = None) -> tuple[int, Path]:
    """The newest checkpoint of a run, or the one after ``step`` turns, as (turns, path).

    Raises:
        UserError: there is none; the sentence names those that there are.
    """
    paths = CheckpointStore(run_dir / CHECKPOINTS).paths()
    if not paths:
        raise UserError(f"{run_dir} has saved no checkpoint and no model; train on, or give another run.")
    chosen = [(turns, path) for turns, path in paths if step in (None, turns)]
    if not chosen:
        there = ", ".join(str(turns) for turns, _ in reversed(paths))
        raise UserError(f"{run_dir} has no checkpoint after {step} turns; there are those after {there}.")
    return chosen[0]


def load_trained(checkpoint: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into ``model``, which is the run's own with its adapter; no optimizer is built.

    Raises:
        CheckpointError: the file is damaged.
        UserError: it is of another model.
    """
    saved = CheckpointStore.load(checkpoint)["learner"]["model"]
    scorer = CausalPolicy(model, shared_prompt=False).scorer  # its names are those of checkpoints
    mine = {name: value for name, value in scorer.named_parameters() if value.requires_grad}
    odd = mine.keys() ^ saved.keys()
    if odd:
        raise UserError(
            f"{checkpoint} and the model differ in {len(odd)} trainable parameters, for example {min(odd)}; leave "
            "model.name and train_model.lora as they are in the run."
        )
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(saved[name])


@contextmanager
def open_evaluator(target: Target) -> Iterator[Evaluator]:
    """What measures the target, with its engine started and its weights in place; closed again at the end.

    Raises:
        UserError: the model, the data or the engine cannot be used.
    """
    config = target.config
    device = resolve_device(config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    task = heldout_task(config)
    if not task.heldout:
        raise UserError(
            f"env.dataset={config.env.dataset} holds no problems out; give env.eval_path or env.num_heldout."
        )
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_")))  # logs of servers
        grader = make_grader(config, task)
        opened.callback(grader.close)
        env = make_env(config, task, tokenizer, grader)
        base = None if target.checkpoint is None else make_model(config, torch.device("cpu"))
        engine = start_engine(config, device, tokenizer, base, scratch)  # it copies the model before that is adapted
        opened.callback(engine.close)
        if base is not None:
            assert target.checkpoint is not None
            model = add_adapter(config, base)
            load_trained(target.checkpoint, model)
            make_publisher(model, engine).publish(target.turns or 0)
        if isinstance(grader, GradingPool):
            grader.wait_ready()
        yield make_evaluator(config, task, make_rollouts(config, env, engine))


def evaluate(
    evaluator: Evaluator,
    *,
    temperature: float = 1.0,
    on_graded: Callable[[bool, int, Sequence[Response]], None] = lambda greedy, problem, responses: None,
) -> dict[str, Any]:
    """Greedy accuracy, and with ``avg_at_k`` samples per problem avg@k and pass@1 to pass@k, each with its error.

    The responses are those of an evaluation during training, for the same policy, seed and temperature.

    Args:
        temperature: of the samples.
        on_graded: called with whether the responses are greedy, the index of their problem, and the responses.

    Returns:
        Plain values, as they are written to JSON; accuracies are shares with the standard error over problems.
        ``counts`` has hits and trials of the greedy accuracies problem by problem, for :func:`gains`.
    """
    problems = evaluator.responses(1, temperature=0.0, on_graded=lambda *graded: on_graded(True, *graded))
    own = evaluator.benchmark(problems)
    counts = {"accuracy": [(float(num_right(responses)), 1.0) for responses in problems], **own}
    result: dict[str, Any] = {"num_problems": len(problems), "greedy": _shares(problems), "counts": counts}
    result["greedy"] |= {name: _share(Accuracy.of_counts(own[name])) for name in own}
    failed, count = num_failed(problems), evaluator.avg_at_k
    if count:
        problems = evaluator.responses(
            count, temperature=temperature, on_graded=lambda *graded: on_graded(False, *graded)
        )
        failed += num_failed(problems)
        passes = {str(k): _share(pass_accuracy(problems, k)) for k in powers_of_two(count)}
        result |= {"k": count, "temperature": temperature, "sampled": _shares(problems), "pass_at_k": passes}
    return result | {"grader_errors": failed}


def gains(before: Mapping[str, Sequence[Counts]], after: Mapping[str, Sequence[Counts]]) -> dict[str, Any]:
    """By greedy accuracy, ``after`` less ``before`` on the same problems, and the standard error of the difference.

    Args:
        before: ``counts`` of :func:`evaluate`.
        after: the same of another model.
    """
    shared = [name for name in after if name in before]
    return {name: _share(Accuracy.of_gain(before[name], after[name])) for name in shared}


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and ``largest`` itself: the k for which pass@k is given.

    >>> powers_of_two(1), powers_of_two(6)
    ([1], [1, 2, 4, 6])
    """
    return sorted({*(1 << power for power in range(largest.bit_length())), largest})


def _shares(problems: Sequence[Sequence[Response]]) -> dict[str, Any]:
    responses = [response for part in problems for response in part]
    return _share(accuracy(problems)) | {
        "truncated": sum(response.truncated for response in responses) / len(responses),
        "response_tokens": sum(response.num_tokens for response in responses) / len(responses),
    }


def _share(measured: Any) -> dict[str, float]:
    return {"accuracy": measured.mean, "stderr": measured.stderr}
