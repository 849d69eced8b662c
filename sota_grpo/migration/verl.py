"""Translate a run for verl 0.9.0: options to a command line, data to Parquet, and the grader to a reward function.

verl's options are those of its tag v0.9.0, in ``verl/trainer/config``, which 0.9.1 has with the same names and meaning;
its losses and advantages are in ``verl/trainer/ppo/core_algos.py``.
"""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import PROJECT, AlgorithmConfig, Config, max_support
from sota_grpo.config.memory_rules import learner_ranks, micro_batch_tokens
from sota_grpo.config.mixture import READERS, longest_response
from sota_grpo.config.spelling import quoted, walk
from sota_grpo.engines import ENGINES, is_server
from sota_grpo.errors import UserError
from sota_grpo.files import file_reference
from sota_grpo.functional.loss_terms import SURROGATES
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.records import Example, total_reward
from sota_grpo.rl.task import Task

VERSION = "0.9.0"
ACTOR = "actor_rollout_ref.actor"
NEVER_BINDS = 1e9  # verl's ratio is at most exp(20)

_ROLLOUT, _REF, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_DTYPES = {"auto": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ENGINE_DTYPES, _SAVED = dict.fromkeys(("auto", "native"), "bfloat16"), ["model", "optimizer", "extra"]
#: verl's option: our option of the same value, or our option and a function of its value; None: verl's default.
_TABLE: dict[str, str | tuple[str, Callable[[Any], Any]]] = {
    "++data.apply_chat_template_kwargs": ("env.chat_template_kwargs", lambda given: given or None),
    "data.max_response_length": "inference_model.max_tokens",
    "data.shuffle": "env.shuffle",
    "data.seed": "seed",
    "data.trust_remote_code": "model.trust_remote_code",
    "reward.num_workers": ("env.reward_workers", lambda count: max(1, count)),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.scale", lambda scale: scale != "none"),
    f"{_MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{_MODEL}.enable_gradient_checkpointing": "train_model.gradient_checkpointing",
    f"+{_MODEL}.override_config.attn_implementation": "model.attn_implementation",
    f"{ACTOR}.loss_agg_mode": ("algorithm.aggregation", _AGGREGATIONS.get),
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{ACTOR}.ppo_epochs": "train.epochs",
    f"{ACTOR}.shuffle": ("train.epochs", lambda epochs: epochs > 1),
    f"{ACTOR}.optim.lr": "optimizer.lr",
    f"{ACTOR}.optim.weight_decay": "optimizer.weight_decay",
    f"{ACTOR}.optim.clip_grad": ("optimizer.clip_grad_norm", lambda norm: norm or NEVER_BINDS),
    f"{ACTOR}.optim.lr_scheduler_type": ("optimizer.schedule", lambda one: "cosine" if one == "cosine" else "constant"),
    f"{ACTOR}.optim.override_optimizer_config": ("optimizer.eps", lambda eps: None if eps == 1e-8 else {"eps": eps}),
    f"{ACTOR}.fsdp_config.model_dtype": ("train_model.torch_dtype", _DTYPES.get),
    f"{ACTOR}.fsdp_config.fsdp_size": ("train_model.fsdp_size", lambda size: size or -1),
    f"{ACTOR}.checkpoint.save_contents": ("train.export_hf", lambda is_on: _SAVED + ["hf_model"] * is_on),
    f"{_ROLLOUT}.n": "env.repeats",
    f"{_ROLLOUT}.temperature": "inference_model.temperature",
    f"{_ROLLOUT}.top_p": "inference_model.top_p",
    f"{_ROLLOUT}.top_k": ("inference_model.top_k", lambda count: count or -1),
    f"{_ROLLOUT}.seed": "seed",
    f"{_ROLLOUT}.dtype": ("inference_model.torch_dtype", lambda one: _ENGINE_DTYPES.get(one, one)),
    f"{_ROLLOUT}.tensor_model_parallel_size": "inference_model.tensor_parallel_size",
    f"{_ROLLOUT}.gpu_memory_utilization": "inference_model.gpu_memory_utilization",
    f"{_ROLLOUT}.max_num_seqs": "env.num_envs",
    f"{_ROLLOUT}.max_model_len": "inference_model.max_model_len",
    "trainer.max_actor_ckpt_to_keep": "train.keep_checkpoints",
    "trainer.resume_mode": ("train.resume", lambda resume: "disable" if resume is None else "auto"),
    "trainer.logger": ("logging.wandb", lambda mode: ["console"] + ["wandb"] * (mode != "disabled")),
    "trainer.project_name": ("logging.wandb_kwargs", lambda arguments: (arguments or {}).get("project", PROJECT)),
}
#: Our option, the values for which verl differs, and how verl differs.
_DIFFERENCES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("algorithm.dynamic_sampling", bool, "verl's trainer samples on without a limit; ours at most 10 times."),
    ("algorithm.top_entropy_quantile", lambda share: share < 1, "verl has no such mask: it trains on every token."),
    ("algorithm.entropy_target", lambda target: target is not None, "verl's coefficient stays constant."),
    ("algorithm.drop_truncated", bool, "verl trains on truncated responses."),
    (
        "optimizer.schedule",
        lambda name: name == "linear",
        "verl's FSDP learner has constant and cosine; exported as constant.",
    ),
    ("optimizer.weight_decay", bool, "verl decays norms and biases, too."),
    ("optimizer.warmup_steps", bool, "verl's warm-up starts at 0 and counts iterations, not optimizer steps."),
    ("env.max_steps", lambda turns: turns > 1, "verl's dialogs need your own agent loop; exported with one turn."),
    ("env.reasoning", bool, "verl does not ask the policy to think again."),
    ("eval.avg_at_k", bool, "verl's validation is exported as greedy (see rollout.val_kwargs)."),
    ("device", lambda device: device == "cpu", "verl needs accelerators."),
    ("mode", lambda mode: mode == "async", "exported as synchronous, so no response is older than its weights."),
)
_KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_ESTIMATORS = {
    ("group_mean", "group_std"): "grpo",
    ("group_mean", "none"): "grpo",
    ("leave_one_out", "none"): "rloo",
    ("batch_mean", "batch_std"): "reinforce_plus_plus",
    ("group_mean", "batch_std"): "reinforce_plus_plus_baseline",
    ("group_mean", "advantage_std"): "reinforce_plus_plus_baseline",
    ("length_weighted", "none"): "opo",
    ("best_of_others", "none"): "grpo_passk",
    ("best_of_others", "group_std"): "grpo_passk",
}
_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_BY_ROWS = ("gspo", "sapo", "geo_mean")  # losses that aggregate by sequence and ignore loss_agg_mode
#: Options that the exported data and reward files contain.
FILES = (
    *("env.dataset", "env.max_samples", "env.num_heldout", *READERS),
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "eval.num_samples"),
)


@dataclass(frozen=True)
class Facts:
    """Inputs of :func:`verl_options` besides the config."""

    model: str  # path or hub name of the policy
    name: str  # name of the run
    longest_prompt: int  # tokens of the longest prompt
    num_train: int  # number of training problems


class ScriptPath(str):
    """A path below the folder of the exported script (``$HERE``)."""


class Report:
    """The state of each option: mapped (read by ``report[option]``), commented (differs in verl) or unsupported.

    >>> report = Report(Config())
    >>> report["env.repeats"], "env.repeats" in report.unsupported(), "optimizer.lr" in report.unsupported()
    (8, False, True)
    """

    def __init__(self, config: Config) -> None:
        self.values = {name: value for name, _, value in walk(config)}
        self.mapped = set(FILES)
        self.comments: dict[str, str] = {}

    def __getitem__(self, option: str) -> Any:
        """Return the value of an option and mark the option as mapped."""
        self.mapped.add(option)
        return self.values[option]

    def comment(self, option: str, text: str) -> None:
        """Append a sentence on how an option differs in verl to the comment on this option."""
        self.comments[option] = " ".join(filter(None, [self.comments.get(option), text]))

    def unsupported(self) -> list[str]:
        """Return options that were neither read (mapped) nor given a :meth:`comment`, in the order of the schema."""
        return [option for option in self.values if option not in self.mapped and option not in self.comments]

    def lines(self) -> list[str]:
        """Return lines of text: options that are commented, unsupported, or contained in the data and reward files."""
        defaults = {name: value for name, _, value in walk()}
        changed = [name for name in self.unsupported() if self.values[name] != defaults[name]]
        unchanged = [name for name in self.unsupported() if name not in changed]
        lines = ["Different in verl, or unsupported (verl has no such option, or it is off):"]
        for name in [*sorted(self.comments), *changed]:
            text = f"- {name}={self.values[name]}: {self.comments.get(name, 'unsupported.')}"
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)
        for title, names in (("Unsupported, at their defaults:", unchanged), ("In the data and reward files:", FILES)):
            lines += [title, *textwrap.wrap(", ".join(names), 118)]
        return lines


def verl_options(config: Config, facts: Facts) -> tuple[dict[str, Any], Report]:
    """Return verl's options by name, and the report on how sota_grpo's options were translated.

    >>> options, report = verl_options(Config(), Facts("tiny", "demo", longest_prompt=100, num_train=8192))
    >>> options["actor_rollout_ref.rollout.n"], options["data.train_batch_size"]
    (8, 32)
    """
    ours = Report(config)
    for option, differs, text in _DIFFERENCES:
        if differs(ours.values[option]):
            ours.comment(option, text)
    options: dict[str, Any] = {}
    for name, source in _TABLE.items():
        value = ours[source] if isinstance(source, str) else source[1](ours[source[0]])
        options |= {} if value is None else {name: value}
    options |= _advantage(config, ours) | _policy_loss(config, ours) | _correction(config, ours)
    options |= _reference(ours) | _model(ours, facts) | _amounts(config, ours, facts) | _trainer(config, ours, facts)
    return options, ours


def verl_script(options: Mapping[str, Any], report: Report, heading: Sequence[str]) -> str:
    """Return a shell script: heading and report as comments, then verl's main_ppo with options and script arguments."""

    def word(name: str, value: Any) -> str:
        """Return ``name=value`` as one shell word, with the value in Hydra's syntax."""
        return f"{name}=\"'{value}'\"" if isinstance(value, ScriptPath) else shlex.quote(f"{name}={quoted(value)}")

    comment = [*heading, "", *report.lines()]
    lines = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in comment), "set -euo pipefail"]
    lines += ['HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', "exec python3 -m verl.trainer.main_ppo \\"]
    lines += [f"    {word(name, value)} \\" for name, value in sorted(options.items())]
    return "\n".join([*lines, '    "$@"', ""])


def _advantage(config: Config, ours: Report) -> dict[str, Any]:
    """Translate the advantage estimator, dynamic sampling and the length penalty."""
    baseline, scale = ours["algorithm.baseline"], ours["algorithm.scale"]
    estimator = _ESTIMATORS.get((baseline, scale), "grpo")
    if (baseline, scale) not in _ESTIMATORS:
        ours.comment("algorithm.baseline", f"verl has none with algorithm.scale={scale}; exported as a group mean.")
    elif estimator.startswith("reinforce"):
        ours.comment("algorithm.scale", "verl whitens over tokens, so long responses weigh more; ours over responses.")
    options: dict[str, Any] = {"algorithm.adv_estimator": estimator}
    if ours["algorithm.dynamic_sampling"]:
        options |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"}
    if buffer := ours["algorithm.overlong_buffer"]:
        penalty = {"enable": True, "len": buffer, "penalty_factor": 1.0, "log": True}
        options |= {"reward.reward_manager.name": "dapo", "+reward.reward_kwargs.overlong_buffer_cfg": penalty}
        options["+reward.reward_kwargs.max_resp_len"] = longest_response(config)
    return options


def _policy_loss(config: Config, ours: Report) -> dict[str, Any]:
    """Translate the surrogate to verl's loss with the same gradient.

    verl's CISPO also clips the ratio from below; the exported bound is 0, which no ratio reaches.
    """
    algorithm, ratio, name = config.algorithm, ours["algorithm.ratio"], ours["algorithm.objective"]
    low, high = ours["algorithm.clip_low"], ours["algorithm.clip_high"]
    losses = surrogate(name).verl
    if not losses:
        losses, default = SURROGATES["clipped"].verl, AlgorithmConfig()
        ours.comment("algorithm.objective", "verl has no such loss; exported as the clipped one.")
        if name in SURROGATES and (low, high) != (default.clip_low, default.clip_high):
            for option in ("algorithm.clip_low", "algorithm.clip_high"):
                ours.comment(option, f"of {name}; the clipped loss has its own default.")
        low, high = (default.clip_low, default.clip_high) if name in SURROGATES else (low, high)
    elif ratio not in losses:
        ours.comment("algorithm.ratio", f"verl's {name} takes the ratio per token.")
    loss = losses.get(ratio, losses["token"])
    if loss in _BY_ROWS and algorithm.aggregation != "sequence":
        now = "; 0.9.1 reads it" if loss == "gspo" else ""
        ours.comment("algorithm.aggregation", f"verl 0.9.0's {loss} weighs by sequence and ignores loss_agg_mode{now}.")
    bound = 20.0 if loss == "dppo_tv" else ours["algorithm.dual_clip"]  # dppo_surrogate's ratio_cap
    if loss in ("gspo", "geo_mean") and algorithm.dual_clip is not None:
        ours.comment("algorithm.dual_clip", f"verl's {loss} has no dual clip.")
    options = {
        f"{ACTOR}.policy_loss.loss_mode": loss,
        f"{ACTOR}.clip_ratio": low,
        f"{ACTOR}.clip_ratio_low": 1.0 if loss == "cispo" else low,
        f"{ACTOR}.clip_ratio_high": high,
        f"{ACTOR}.clip_ratio_c": bound or NEVER_BINDS,
    }
    if loss == "sapo":  # sapo_surrogate's temperatures
        options |= {f"{ACTOR}.tau_pos": 1.0, f"{ACTOR}.tau_neg": 1.05}
    if algorithm.aggregation == "constant":
        options[f"{ACTOR}.loss_scale_factor"] = longest_response(config)
    return options


def _correction(config: Config, ours: Report) -> dict[str, Any]:
    """Translate the choice of behaviour log-probs and the importance weights for the engine's mismatch."""
    algorithm, bypass = config.algorithm, f"{_CORRECTION}.bypass_mode"
    if ours["algorithm.correction"] == "none":
        objective = surrogate(algorithm.objective)
        is_plain = objective.verl.get(algorithm.ratio) == "vanilla"
        used_once = ours["train.epochs"] == 1
        if used_once and not is_plain and objective.reads("log_ratio"):
            ours.comment(
                "algorithm.correction",
                "verl's learner recomputes the ratio's old log-probs; sota_grpo uses the engine's, which verl offers "
                "for its plain clipped loss only (bypass_mode).",
            )
        return {bypass: used_once and is_plain}
    cap, floor, mode = ours["algorithm.correction_cap"], algorithm.correction_floor, ours["algorithm.correction_mode"]
    if mode == "reject":  # verl bounds the inverse of our weight
        bounds = f"{1 / cap}_{1 / ours['algorithm.correction_floor'] if floor else NEVER_BINDS}"
        level = _REJECTIONS[algorithm.correction]
        return {bypass: False, f"{_CORRECTION}.rollout_rs": level, f"{_CORRECTION}.rollout_rs_threshold": bounds}
    if algorithm.correction == "geometric":
        ours.comment("algorithm.correction", "verl has only a rejection at this level, no weight; exported as none.")
        return {bypass: False}
    if floor and mode == "truncate":
        ours.comment("algorithm.correction_floor", "verl truncates above only.")
    else:
        ours.mapped.add("algorithm.correction_floor")
    threshold = f"{floor or '1e-9'}_{cap}" if mode == "mask" else cap  # a range: outside is 0
    level = algorithm.correction
    return {bypass: False, f"{_CORRECTION}.rollout_is": level, f"{_CORRECTION}.rollout_is_threshold": threshold}


def _reference(ours: Report) -> dict[str, Any]:
    """Translate the KL term in the loss or in the reward; with coefficient 0 verl loads no reference either."""
    coef, in_loss, estimator = ours["policy.kl_coef"], ours["train.kl_coef_in_loss"], ours["algorithm.kl_estimator"]
    options = {f"{ACTOR}.use_kl_loss": coef > 0 and in_loss, "algorithm.use_kl_in_reward": coef > 0 and not in_loss}
    if coef > 0 and in_loss:
        options |= {
            f"{ACTOR}.kl_loss_coef": coef,
            f"{ACTOR}.kl_loss_type": _KL_TYPES[estimator.removesuffix("_unbiased")],
        }
        if estimator.endswith("_unbiased"):
            ours.comment("algorithm.kl_estimator", "verl does not multiply the KL by the ratio.")
    elif coef > 0:
        options |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": coef}
        text = "in a zero-advantage group, verl divides the KL differences by their standard deviation; ours does not."
        ours.comment("train.kl_coef_in_loss", text)
    return options


def _model(ours: Report, facts: Facts) -> dict[str, Any]:
    """Translate the model, its adapter, its precision and the engine."""
    ours.mapped.update(["model.name", "model.size"])
    options: dict[str, Any] = {f"{_MODEL}.path": facts.model}
    if ours["train_model.lora.enabled"]:
        options |= {
            f"{_MODEL}.lora_rank": ours["train_model.lora.r"],
            f"{_MODEL}.lora_alpha": ours["train_model.lora.alpha"],
            f"{_MODEL}.target_modules": ours["train_model.lora.target_modules"] or "all-linear",
            f"{_ROLLOUT}.load_format": "safetensors",
        }
        if ours["train_model.lora.dropout"]:
            ours.comment("train_model.lora.dropout", "the adapters of verl's FSDP learner have no dropout.")
    if (precision := ours["train.precision"]) in ("fp32", "fp16"):  # verl's default is bf16
        kinds = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        options |= {f"+{role}.fsdp_config.mixed_precision": kinds for role in (ACTOR, _REF)}
    if (rows := ours["inference_model.max_num_seqs"]) is not None:
        options[f"{_ROLLOUT}.max_num_seqs"] = rows
    engine = ours["engine.name"]
    known = None if engine == "auto" else ENGINES[engine].verl
    if known is None and engine != "auto":
        ours.comment("engine.name", "verl samples with vllm or sglang; exported as vllm.")
    elif is_server(engine):
        ours.comment("engine.name", "verl starts the engine itself.")
    return options | {f"{_ROLLOUT}.name": known or "vllm"}


def _amounts(config: Config, ours: Report, facts: Facts) -> dict[str, Any]:
    """Translate batch sizes, micro-batches and warm-up, which verl counts in prompts, tokens and iterations."""
    ours.mapped |= {"train.dialog_turns_per_batch", "train.micro_batch_tokens"}
    repeats, size, per_step = config.env.repeats, ours["train.optim_batch_size"], config.train.dialog_turns_per_batch
    if size % repeats:
        ours.comment("train.optim_batch_size", f"verl counts prompts: {max(1, size // repeats)} of them per step.")
    if max_support(config):
        text = "verl computes log-probs over the whole vocabulary, so its ratio is biased."
        ours.comment("inference_model.top_p", text)
    longest, budget = facts.longest_prompt + longest_response(config), micro_batch_tokens(config)
    if budget < longest:
        text = f"raised to the longest sequence, {longest} tokens; verl counts each row's prompt."
        ours.comment("train.micro_batch_tokens", text)
    warmup, steps_per_publish = ours["optimizer.warmup_steps"], config.train.epochs * per_step // size
    return {
        "data.train_batch_size": per_step // repeats,
        "data.max_prompt_length": facts.longest_prompt,
        f"{ACTOR}.ppo_mini_batch_size": max(1, size // repeats),
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(budget, longest),
        f"{ACTOR}.optim.betas": ours["optimizer.betas"],
        f"{ACTOR}.optim.lr_warmup_steps": math.ceil(warmup / max(1, steps_per_publish)) if warmup else -1,
    }


def _trainer(config: Config, ours: Report, facts: Facts) -> dict[str, Any]:
    """Translate file paths, run length and devices."""
    ours.mapped |= {"mode", "train_model.devices", "train_model.num_devices"}
    per_step = config.train.dialog_turns_per_batch
    steps = ours["train.total_dialog_turns"] // per_step
    mode, every = ours["eval.mode"], ours["eval.every"]
    return {
        "data.train_files": ScriptPath("$HERE/train.parquet"),
        "data.val_files": ScriptPath("$HERE/heldout.parquet"),
        "reward.custom_reward_function.path": ScriptPath("$HERE/reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": math.ceil(steps / max(1, facts.num_train // (per_step // config.env.repeats))),
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": learner_ranks(config),
        "trainer.save_freq": ours["train.checkpoint_frequency"] or steps,
        "trainer.val_before_train": mode == "on",
        "trainer.test_freq": -1 if mode == "off" else every or steps,
        "trainer.experiment_name": (ours["logging.wandb_kwargs"] or {}).get("name") or facts.name,
        "trainer.default_local_dir": ScriptPath("$HERE/checkpoints"),
        "trainer.v1.trainer_mode": "sync",
    }


def example_columns(example: Example) -> dict[str, str]:
    """Return an example as three columns of text.

    >>> example = Example("2 + 2?", "4", {"level": 1})
    >>> example_columns(example)
    {'query': '2 + 2?', 'answer': '4', 'extra': '{"level": 1}'}
    >>> example_of(example_columns(example)) == example
    True
    """
    return {"query": example.query, "answer": example.answer, "extra": json.dumps(dict(example.extra))}


def example_of(columns: Mapping[str, str]) -> Example:
    """Return the example from its columns, as :func:`example_columns` returns them; other columns are ignored."""
    return Example(columns["query"], columns["answer"], json.loads(columns["extra"]))


def verl_rows(task: Task, examples: Sequence[Example], split: str) -> Iterator[dict[str, Any]]:
    """Yield a row with verl's five columns per example; ``extra_info`` has the example for sota_grpo's grader."""
    for index, example in enumerate(examples):
        yield {
            "data_source": task.name,
            "prompt": task.messages(example),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.answer},
            "extra_info": {"index": index, "split": split, **example_columns(example)},
        }


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write the rows to a Parquet file; raise UserError if there are none."""
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    if not listed:
        raise UserError(f"No rows for {path.name}: the task has no problems in this split; export another run.")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), path)


def verl_reward(config_file: str | Path) -> Callable[..., dict[str, float]]:
    """Return verl's ``compute_score``; its result has the reward as ``score`` and the success (0 or 1) as ``acc``.

    A response at which the grader fails has a reward of 0, as in training. ``config_file`` is the ``config.yaml`` of an
    export; the code that it names is executed, and its relative paths start at its folder.
    """
    folder = Path(config_file).parent
    config = load_config(folder, trust=True)
    if config.reward.path is not None:
        config.reward.path = str(folder / config.reward.path)
    if (reference := file_reference(config.env.dataset)) is not None:
        config.env.dataset = f"{folder / reference[0]}:{reference[1]}"
    task = task_of(config, bare=True)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
    ) -> dict[str, float]:
        (score,) = guarded_scores(task.score, task.term_weights, [(solution_str, example_of(extra_info))])
        return {"score": total_reward(score.terms, task.term_weights), "acc": float(score.success)}

    return compute_score
