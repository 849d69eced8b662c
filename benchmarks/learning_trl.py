"""TRL's GRPOTrainer under one of our configs, and how far the two agree: on the first batch, and on one step.

Taken over from the config, so that only the program differs: weights, tokenizer and chat template, the prompts in their
order, the reward and its length penalty, group size, rows per step, AdamW, the learning rate of every step (TRL's own
warm-up would begin with a step at rate 0), the largest norm of the gradient, clipping, no KL, the mean over each
response and then over the responses, division by the group's standard deviation, sampling, and the longest response,
autocast, and ``train.micro_batch_tokens``, of which TRL's micro-batches take no more where prompts are as long as
responses (in their mean its loss is that of the whole step). TRL generates with transformers.

What is left: TRL adds 1e-4 to a group's standard deviation, ours 1e-6; and the random numbers of sampling.

``python -m benchmarks.learning_trl --minutes 60 env.eval_path=input_data.jsonl`` runs TRL by the rules of
docs/speedrun.md: preset ``smollm_speedrun``, evaluated when a run of ours would be and at the end, which comes when
the score or the last step is reached, or after the minutes since the process's start.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import PrinterCallback, TrainerCallback

from sota_grpo import keys
from sota_grpo.assembly.build import RunComponents, build
from sota_grpo.assembly.learning import trainer_precision
from sota_grpo.config import Config, model_name, register
from sota_grpo.config.memory_rules import micro_batch_tokens
from sota_grpo.envs.prompts import PromptStream
from sota_grpo.policy.causal import end_token_ids
from sota_grpo.policy.load import load_model
from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.planner import learning_rate_factor
from sota_grpo.rl.records import Example, GroupRequest, Sampling, total_reward
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import Task
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.run.app import num_steps
from sota_grpo.run.entry import CONFIG_DIR
from sota_grpo.source.weight_sync import EngineWeightSync

PRESET = "grpo_cpu"
TRL_EPS = 1e-4  # what TRL adds to a group's standard deviation, which no option of it changes
# AdamW with a large eps is a step along the clipped gradient: it does not turn rounding into a change of sign
ALONG_THE_GRADIENT = ("optimizer.eps=1", "optimizer.lr=1", "optimizer.warmup_steps=0")


@dataclass(frozen=True)
class Curve:
    """By the number of samples trained on: held-out accuracy in [0, 1], its standard error over problems, and the
    seconds of all steps up to there, evaluations left out."""

    accuracy: dict[int, float]
    stderr: dict[int, float]
    seconds: dict[int, float]

    @property
    def train_s(self) -> float:
        """Seconds of all steps together."""
        return max(self.seconds.values())


@dataclass(frozen=True)
class Agreement:
    """How far TRL and ours agree where they must.

    Args:
        num_prompts: of the first batch; in ``equal_prompts`` of them both have the same token ids.
        equal_greedy: prompts to which both give the same greedy response, token for token, its end token included.
        end_tokens: that end a response, ours and TRL's.
        step_gap: ``|d_ours - d_trl| / |d_ours|`` of the weights' movements ``d`` in the first step on the same rows.
        step_gap_same_eps: the same with TRL's ``eps`` in our advantages.
    """

    num_prompts: int
    equal_prompts: int
    equal_greedy: int
    end_tokens: tuple[tuple[int, ...], tuple[int, ...]]
    step_gap: float
    step_gap_same_eps: float

    def __str__(self) -> str:
        return (
            f"First batch: {self.equal_prompts} of {self.num_prompts} prompts have equal token ids, "
            f"{self.equal_greedy} equal greedy responses; end tokens {self.end_tokens[0]} and {self.end_tokens[1]}.\n"
            f"First step on the same rows, along the gradient: the weights' movements differ by {self.step_gap:.1e} of "
            f"their norm, by {self.step_gap_same_eps:.1e} with TRL's eps in our advantages."
        )


def composed(*overrides: str, preset: str = PRESET) -> Config:
    """The preset with ``overrides``, as ``grpo.py`` would compose it."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = OmegaConf.to_object(compose(preset, overrides=list(overrides)))
    assert isinstance(config, Config)
    return config


def drawn_examples(config: Config, task: Task) -> list[Example]:
    """The problems that a whole run asks, in the order in which ours draws them."""
    stream = PromptStream(task.train, seed=config.seed, shuffle=config.env.shuffle)
    return [example for _, example in stream.draw(config.train.total_dialog_turns // config.env.repeats)]


def micro_batch_rows(config: Config) -> int:
    """Rows of TRL's micro-batches: the largest share of a step within the token budget, prompts as long as responses.

    >>> micro_batch_rows(composed(preset="grpo_cpu")), micro_batch_rows(composed(preset="smollm_ifeval"))
    (128, 4)
    """
    step, most = config.train.optim_batch_size, micro_batch_tokens(config)
    fits = [
        rows for rows in range(1, step + 1) if step % rows == 0 and 2 * rows * config.inference_model.max_tokens <= most
    ]
    return max(fits, default=1)


def trl_arguments(config: Config, folder: Path, max_steps: int) -> Any:
    """What TRL calls the options of ``config``."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        seed=config.seed,
        max_steps=max_steps,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        num_iterations=1,
        num_generations=config.env.repeats,
        per_device_train_batch_size=micro_batch_rows(config),
        gradient_accumulation_steps=config.train.optim_batch_size // micro_batch_rows(config),
        steps_per_generation=config.train.dialog_turns_per_batch // micro_batch_rows(config),
        max_completion_length=config.inference_model.max_tokens,
        temperature=config.inference_model.temperature,
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        max_grad_norm=config.optimizer.clip_grad_norm,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=trainer_precision(config, "cpu") == "bf16",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )


def trl_trainer(config: Config, parts: RunComponents, folder: Path, *, max_steps: int, rollout_func: Any = None) -> Any:
    """TRL's trainer of a fresh copy of the policy.

    Args:
        parts: of a run of ours, for its task, tokenizer and settings.
        max_steps: at which it stops; the learning rate follows the whole run.
        rollout_func: gives the responses in place of TRL's own generation.
    """
    from datasets import Dataset
    from trl import GRPOTrainer
    from trl.rewards import get_soft_overlong_punishment

    settings, task, examples = parts.learner.settings, parts.task, drawn_examples(config, parts.task)
    model = load_model(model_name(config))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))

    def reward(completions: list[list[dict[str, str]]], draw: list[int], **_: Any) -> list[float | None]:
        scores = (task.score(messages[0]["content"], examples[index]) for messages, index in zip(completions, draw))
        return [total_reward(score.terms, task.term_weights) for score in scores]

    buffer, longest = config.algorithm.overlong_buffer, config.inference_model.max_tokens
    penalty = [get_soft_overlong_punishment(longest, buffer)] if buffer else []
    prompts = {"prompt": [task.messages(example) for example in examples], "draw": list(range(len(examples)))}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward, *penalty],
        args=trl_arguments(config, folder, max_steps),
        train_dataset=Dataset.from_dict(prompts),
        processing_class=copy.deepcopy(parts.tokenizer),
        optimizers=(optimizer, schedule),
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Examiner(TrainerCallback):
    """Evaluates TRL's policy with our evaluator, at the steps at which a run of ours would; times the steps alone.

    What it has so far is in ``curve.json`` in ``folder``. Training ends with an evaluation that reaches ``eval.target``
    on all problems, and with the first step after ``deadline``, by the clock ``time.time``.
    """

    def __init__(self, config: Config, parts: RunComponents, model: Any, folder: Path, deadline: float):
        self.folder, self.deadline = folder, deadline
        self.target, self.starts = config.eval.target, config.eval.mode == "on"
        self.num_problems = len(parts.evaluator.examples)
        self.rows_per_step = config.train.optim_batch_size
        self.every = config.eval.every * config.train.dialog_turns_per_batch // self.rows_per_step
        self.evaluator = parts.evaluator
        self.weight_sync = EngineWeightSync(lambda: engine_weights(model), parts.rollouts.engine)
        self.curve = Curve({}, {}, {})
        self._spent_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.starts:
            self._evaluate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._spent_s += time.perf_counter() - self._began
        step, is_late = state.global_step, time.time() > self.deadline
        control.should_training_stop |= is_late
        is_last = step == state.max_steps or is_late
        if is_last or (self.every and step % self.every == 0):
            control.should_training_stop |= self._evaluate(step, None if is_last else self.target)

    def _evaluate(self, step: int, target: float | None = None) -> bool:
        """Record the accuracy, and return whether it reaches ``eval.target`` on all problems.

        With a ``target``, an evaluation that cannot reach it ends after a quarter of the problems.
        """
        self.weight_sync.send(version=step)
        measured, samples = self.evaluator.measure(target), step * self.rows_per_step
        self.curve.accuracy[samples], self.curve.stderr[samples] = measured["eval/accuracy"], measured["eval/stderr"]
        self.curve.seconds[samples] = self._spent_s
        (self.folder / "curve.json").write_text(json.dumps(asdict(self.curve)))  # a whole run may take hours
        count, accuracy = round(measured["eval/num_samples"]), measured["eval/accuracy"]
        told = f"accuracy {100 * accuracy:.1f} % of {count} problems"
        print(f"TRL after {samples} samples, {self._spent_s:.0f} s of steps: {told}", flush=True)
        return self.target is not None and count == self.num_problems and accuracy >= self.target


def train_trl(config: Config, folder: Path, threads: int = 1, deadline: float = math.inf) -> Curve:
    """A run of TRL under ``config`` until ``deadline``, evaluated when a run of ours would be (:class:`Examiner`)."""
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    with closing(build(config, folder)) as parts:
        steps = num_steps(config) * config.train.dialog_turns_per_batch // config.train.optim_batch_size
        trainer = trl_trainer(config, parts, folder, max_steps=steps)
        examiner = Examiner(config, parts, trainer.model, folder, deadline)
        trainer.add_callback(examiner)
        trainer.train()
    return examiner.curve


def agreement(changes: Sequence[str], folder: Path, preset: str = PRESET, threads: int = 1) -> Agreement:
    """Compare the first batch, and the first step along the gradient, of both from the same weights."""
    torch.set_num_threads(threads)
    config = composed(*changes, *ALONG_THE_GRADIENT, preset=preset)
    with closing(build(config, folder)) as parts:
        parts.weight_sync.send(version=0)
        rows = parts.collector.next_batch()
        prompts = [tuple(row[keys.PROMPT_TOKENS].tolist()) for row in rows[:: config.env.repeats]]
        trainer = trl_trainer(config, parts, folder, max_steps=1)
        # TRL's own steps of a rollout, which only its private methods give one by one
        theirs, *_ = trainer._tokenize_prompts(trainer.train_dataset[: len(prompts)]["prompt"])
        trainer.generation_config.do_sample = False
        greedy, _ = trainer._generate_single_turn(theirs, None, {}, 1)
        return Agreement(
            num_prompts=len(prompts),
            equal_prompts=sum(tuple(ids) == own for ids, own in zip(theirs, prompts, strict=True)),
            equal_greedy=sum(ids == own for ids, own in zip(greedy, _greedy(config, parts, len(prompts)), strict=True)),
            end_tokens=(
                end_token_ids(parts.tokenizer),
                tuple(sorted(trainer.eos_token_ids)),
            ),
            step_gap=step_gap(config, parts, rows, folder),
            step_gap_same_eps=step_gap(config, parts, with_trl_eps(config, rows), folder),
        )


def _greedy(config: Config, parts: RunComponents, count: int) -> list[list[int]]:
    """Our engine's greedy responses to the first ``count`` problems."""
    examples = drawn_examples(config, parts.task)[:count]
    prompt_ids = parts.rollouts.env.prompt_ids
    requests = [GroupRequest(index, prompt_ids(one), num_samples=1, seed=0) for index, one in enumerate(examples)]
    sampling = Sampling(max_tokens=config.inference_model.max_tokens, temperature=0.0)
    measured = {output.group_id: output.samples[0] for output in parts.rollouts.engine.generate(requests, sampling)}
    return [measured[index].token_ids.tolist() for index in range(count)]


def with_trl_eps(config: Config, rows: RowTable) -> RowTable:
    """``rows`` with the advantages that TRL computes."""
    algorithm: Any = config.algorithm
    return GroupAdvantage(algorithm.baseline, algorithm.scale, TRL_EPS)(rows.without(keys.ADVANTAGE))


def step_gap(config: Config, parts: RunComponents, rows: RowTable, folder: Path) -> float:
    """``|d_ours - d_trl| / |d_ours|``: how the first step moves the weights; the learner is put back afterwards.

    Args:
        rows: the first batch, with its advantages; TRL is given the tokens and finds rewards and advantages itself.
    """
    start, before = copy.deepcopy(parts.learner.state_dict()), _copied(parts.weight_sync.policy_weights())
    parts.learner.update(rows)
    after = _copied(parts.weight_sync.policy_weights())
    parts.learner.load_state_dict(start)

    def given(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        key_of = {"prompt_ids": keys.PROMPT_TOKENS, "completion_ids": keys.RESPONSE_TOKENS}
        sampled = {name: [row[key].tolist() for row in rows] for name, key in key_of.items()}
        return sampled | {"logprobs": None}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rollout_func is experimental in TRL
        trainer = trl_trainer(config, parts, folder, max_steps=1, rollout_func=given)
    trainer.train()
    theirs = dict(engine_weights(trainer.model))
    moved = math.hypot(*(_distance(after[name], weight) for name, weight in before.items()))
    if moved == 0:
        raise RuntimeError("no group of the first batch has rewards that differ, so there is no step to compare.")
    return math.hypot(*(_distance(after[name], theirs[name]) for name in before)) / moved


def _copied(weights: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in dict(weights).items()}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().double() - other.detach().double()).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the preset")
    parser.add_argument("--preset", default="smollm_speedrun")
    parser.add_argument("--minutes", type=float, default=60, help="since the process's start; then the step ends")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--out", type=Path, default=Path("outputs/speedrun_trl") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    options = parser.parse_intermixed_args()
    began = psutil.Process().create_time()
    config = composed(*options.overrides, preset=options.preset)
    curve = train_trl(config, options.out.resolve(), options.threads, began + 60 * options.minutes)
    steps = f"{curve.train_s:.0f} s of steps" if curve.seconds else "no step"
    print(f"The process took {(time.time() - began) / 60:.1f} minutes, of which {steps}.")


if __name__ == "__main__":
    main()
