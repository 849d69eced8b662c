"""What a run takes along to verl 0.9.0: its options as a command line, its data, and its grader.

Names, choices and defaults of verl's options are those of the tag v0.9.0 of verl-project/verl, ``verl/trainer/config``;
what its losses and advantages compute is in ``verl/trainer/ppo/core_algos.py`` there. verl counts batches in prompts,
ours in responses. The options of 0.9.1 that are used here have the same names and meaning.

An exported ``reward.py`` calls the grader with the ``config.yaml`` beside it, so that a run that has moved is rewarded
as before; ``query``, ``answer`` and ``extra`` in the exported data hold the example.
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
from sota_grpo.config import AlgorithmConfig, Config, most_kept, responses_per_step
from sota_grpo.config.algorithm_rules import has_no_ratio
from sota_grpo.config.memory_rules import SHARED, micro_batch_tokens
from sota_grpo.config.mixture import longest_response
from sota_grpo.config.spelling import quoted, walk
from sota_grpo.config.validators import READERS
from sota_grpo.engines import ENGINES, is_server
from sota_grpo.errors import UserError
from sota_grpo.functional.surrogates import SURROGATES
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.objective_files import surrogate
from sota_grpo.rl.records import Example, total_reward
from sota_grpo.rl.task import Task

VERSION = "0.9.0"
ACTOR = "actor_rollout_ref.actor"
NEVER_BINDS = 1e9  # verl's ratio is at most exp(20)

_ROLLOUT, _REF, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_DTYPES = {"auto": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
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
_BY_ROWS = ("gspo", "sapo", "geo_mean")  # losses that weigh by sequence whatever loss_agg_mode says


_WIDTH = 118
#: Options that the data and the reward beside the translation stand for.
FILES = (
    *("env.dataset", "env.max_samples", "env.num_heldout", *READERS),
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "eval.num_samples"),
)


@dataclass(frozen=True)
class Facts:
    """What a translation needs beside the config."""

    model: str  # path or hub name of the policy
    name: str  # of the run
    longest_prompt: int  # tokens
    num_train: int  # problems that are trained on


class Beside(str):
    """A path below the script's folder, which the script itself calls ``$HERE``; no text of a config is one."""


class Account:
    """The options of a config as they are translated: each is carried over, noted, or left behind.

    Attributes:
        carried: options that the translation was made from.
        notes: why others mean something else there, or nothing.

    >>> account = Account(Config())
    >>> account["env.repeats"]
    8
    >>> account.note("policy.kl_coef", "there is no reference here.")
    >>> "env.repeats" in account.left(), "policy.kl_coef" in account.left(), "optimizer.lr" in account.left()
    (False, False, True)
    """

    def __init__(self, config: Config) -> None:
        self._values = {name: value for name, _, value in walk(config)}
        self.notes: dict[str, str] = {}
        self.carried = set(FILES)

    def __getitem__(self, option: str) -> Any:
        """The value of an option, which counts as carried over."""
        self.carried.add(option)
        return self._values[option]

    def num_devices(self, role: str) -> int:
        """Devices of ``train_model`` or ``inference_model``: those that are listed, else so many, else one."""
        devices, count = self[f"{role}.devices"], self[f"{role}.num_devices"]
        if count == SHARED:
            return self.num_devices("train_model")
        return len(devices) if devices else count or 1

    def note(self, option: str, text: str) -> None:
        """Add to what is said of an option."""
        self.notes[option] = " ".join(filter(None, [self.notes.get(option), text]))

    def left(self) -> list[str]:
        """Options that were neither carried over nor noted, in the order of the schema."""
        return [option for option in self._values if option not in self.carried and option not in self.notes]

    def comment(self) -> list[str]:
        """The account as lines without a comment sign: notes first, then what is left behind."""
        values, defaults = self._values, {name: value for name, _, value in walk()}
        changed = [option for option in self.left() if values[option] != defaults[option]]
        unchanged = [option for option in self.left() if option not in changed]
        notes = [f"{option}={values[option]}: {self.notes[option]}" for option in values if option in self.notes]
        others = [f"{option}={values[option]}" for option in changed]
        item = textwrap.TextWrapper(_WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        lines = []
        for title, texts in (
            ("Not the same there:", notes),
            ("Left behind (no counterpart, or off), and not at their defaults here:", others),
        ):
            lines += [title] if texts else []
            for text in texts:
                lines += item.wrap(text)
        for title, names in (
            ("Left behind, at their defaults:", unchanged),
            ("In the data and reward files beside this one:", FILES),
        ):
            lines += [title, *textwrap.wrap(", ".join(names), _WIDTH)] if names else []
        return lines


def verl_options(config: Config, facts: Facts) -> tuple[dict[str, Any], Account]:
    """verl's options by name, in the order of the script, and the account of ours.

    >>> options, ours = verl_options(Config(), Facts("tiny", "demo", longest_prompt=100, num_train=8192))
    >>> options["actor_rollout_ref.rollout.n"], options["data.train_batch_size"]
    (8, 32)
    """
    ours = Account(config)
    options = _data(config, ours, facts)
    for section in (_advantage, _policy_loss, _correction, _reference, _optimizer):
        options |= section(config, ours)
    options |= _model(ours, facts) | _actor(config, ours, facts) | _rollout(config, ours)
    return options | _trainer(config, ours, facts), ours


def verl_script(options: Mapping[str, Any], ours: Account, heading: Sequence[str]) -> str:
    """A shell script around ``python3 -m verl.trainer.main_ppo``; what is given to it is added to the command."""

    def word(name: str, value: Any) -> str:
        """``name=value`` as one word of the shell, the value as Hydra reads it."""
        return f"{name}=\"'{value}'\"" if isinstance(value, Beside) else shlex.quote(f"{name}={quoted(value)}")

    comment = [*heading, "", *ours.comment()]
    lines = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in comment), "set -euo pipefail"]
    lines += ['HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', "exec python3 -m verl.trainer.main_ppo \\"]
    lines += [f"    {word(name, value)} \\" for name, value in options.items()]
    return "\n".join([*lines, '    "$@"', ""])


def _advantage(config: Config, ours: Account) -> dict[str, Any]:
    """The estimator, fresh groups for zero-advantage ones, and the penalty on length."""
    baseline, scale = ours["algorithm.baseline"], ours["algorithm.scale"]
    estimator = _ESTIMATORS.get((baseline, scale), "grpo")
    if (baseline, scale) not in _ESTIMATORS:
        ours.note("algorithm.baseline", f"verl has none with algorithm.scale={scale}; this is grpo's, a group mean.")
    elif estimator.startswith("reinforce"):
        ours.note("algorithm.scale", "verl whitens over tokens, so long responses weigh more; ours over responses.")
    options: dict[str, Any] = {
        "algorithm.adv_estimator": estimator,
        "algorithm.norm_adv_by_std_in_grpo": scale != "none",
    }
    if ours["algorithm.dynamic_sampling"]:
        options |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"}
        ours.note("algorithm.dynamic_sampling", "verl's trainer draws on without a limit; ours 10 collections.")
    buffer = ours["algorithm.overlong_buffer"]
    if buffer:
        penalty = {"enable": True, "len": buffer, "penalty_factor": 1.0, "log": True}
        options |= {
            "reward.reward_manager.name": "dapo",
            "+reward.reward_kwargs.max_resp_len": longest_response(config),
            "+reward.reward_kwargs.overlong_buffer_cfg": penalty,
        }
    return options


def _policy_loss(config: Config, ours: Account) -> dict[str, Any]:
    """verl's loss of the same gradient. Its CISPO clips the ratio from below too: at 0 here, where it never is."""
    algorithm, ratio, name = config.algorithm, ours["algorithm.ratio"], ours["algorithm.objective"]
    low, high = ours["algorithm.clip_low"], ours["algorithm.clip_high"]
    losses = surrogate(name).verl
    if not losses:
        losses, default = SURROGATES["clipped"].verl, AlgorithmConfig()
        ours.note("algorithm.objective", "there is no such loss; this is the clipped one.")
        if name in SURROGATES:
            if (low, high) != (default.clip_low, default.clip_high):
                for option in ("algorithm.clip_low", "algorithm.clip_high"):
                    ours.note(option, f"of {name}; the clipped loss has its own default.")
            low, high = default.clip_low, default.clip_high
    elif ratio not in losses:
        ours.note("algorithm.ratio", f"verl's {name} takes the ratio per token.")
    loss = losses.get(ratio, losses["token"])
    if loss in _BY_ROWS and algorithm.aggregation != "sequence":
        later = "; 0.9.1 heeds it" if loss == "gspo" else ""
        text = f"verl 0.9.0's {loss} weighs by sequence whatever loss_agg_mode says{later}."
        ours.note("algorithm.aggregation", text.replace("gspo", "GSPO"))
    bound = 20.0 if loss == "dppo_tv" else ours["algorithm.dual_clip"]  # dppo_surrogate's ratio_cap
    if loss in ("gspo", "geo_mean") and algorithm.dual_clip is not None:
        ours.note("algorithm.dual_clip", f"verl's {loss} has no dual clip.")
    options = {
        f"{ACTOR}.policy_loss.loss_mode": loss,
        f"{ACTOR}.clip_ratio": low,
        f"{ACTOR}.clip_ratio_low": 1.0 if loss == "cispo" else low,
        f"{ACTOR}.clip_ratio_high": high,
        f"{ACTOR}.clip_ratio_c": bound or NEVER_BINDS,
        f"{ACTOR}.loss_agg_mode": _AGGREGATIONS[ours["algorithm.aggregation"]],
        f"{ACTOR}.entropy_coeff": ours["algorithm.entropy_coef"],
    }
    if loss == "sapo":  # sapo_surrogate's temperatures
        options |= {f"{ACTOR}.tau_pos": 1.0, f"{ACTOR}.tau_neg": 1.05}
    if algorithm.top_entropy_quantile < 1:
        ours.note("algorithm.top_entropy_quantile", "verl has no such mask: every token takes part.")
    if algorithm.entropy_target is not None:
        ours.note("algorithm.entropy_target", "verl's coefficient stays as it begins.")
    if algorithm.aggregation == "constant":
        options[f"{ACTOR}.loss_scale_factor"] = longest_response(config)
    if algorithm.drop_truncated:
        ours.note("algorithm.drop_truncated", "verl trains on truncated responses.")
    return options


def _correction(config: Config, ours: Account) -> dict[str, Any]:
    """Which log-probs the ratio is taken to, and how the engine's mismatch is weighed."""
    algorithm, prefix = config.algorithm, "algorithm.rollout_correction"
    if ours["algorithm.correction"] == "none":
        used_once = ours["train.epochs"] == 1
        is_plain = surrogate(algorithm.objective).verl.get(algorithm.ratio) == "vanilla"
        if used_once and not (is_plain or has_no_ratio(config)):
            ours.note(
                "algorithm.correction",
                "the ratio is taken to log-probs that verl's learner computes again; ours are the engine's own, which "
                "verl offers for its plain clipped loss only (bypass_mode).",
            )
        return {f"{prefix}.bypass_mode": used_once and is_plain}
    cap, floor, mode = algorithm.correction_cap, algorithm.correction_floor, algorithm.correction_mode
    ours.carried.update(["algorithm.correction_mode", "algorithm.correction_cap"])
    if mode == "reject":  # verl bounds the inverse of our weight
        ours.carried.add("algorithm.correction_floor")
        return {
            f"{prefix}.bypass_mode": False,
            f"{prefix}.rollout_rs": _REJECTIONS[algorithm.correction],
            f"{prefix}.rollout_rs_threshold": f"{1 / cap}_{1 / floor if floor else NEVER_BINDS}",
        }
    if algorithm.correction == "geometric":
        ours.note("algorithm.correction", "verl has no weight of this level, only a rejection, so there is none.")
        return {f"{prefix}.bypass_mode": False}
    if floor and mode == "truncate":
        ours.note("algorithm.correction_floor", "verl truncates above only.")
    else:
        ours.carried.add("algorithm.correction_floor")
    return {
        f"{prefix}.bypass_mode": False,
        f"{prefix}.rollout_is": algorithm.correction,
        f"{prefix}.rollout_is_threshold": f"{floor or '1e-9'}_{cap}"
        if mode == "mask"
        else cap,  # a range: outside is 0
    }


def _reference(config: Config, ours: Account) -> dict[str, Any]:
    """The KL to the reference, in the loss or in the reward; at coefficient 0 neither builds one."""
    coef, estimator = ours["policy.kl_coef"], ours["algorithm.kl_estimator"]
    in_loss = ours["train.kl_coef_in_loss"]
    options = {f"{ACTOR}.use_kl_loss": coef > 0 and in_loss, "algorithm.use_kl_in_reward": coef > 0 and not in_loss}
    if coef > 0 and in_loss:
        options |= {f"{ACTOR}.kl_loss_coef": coef, f"{ACTOR}.kl_loss_type": _KL_TYPES[estimator]}
    elif coef > 0:
        options |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": coef}
        ours.note(
            "train.kl_coef_in_loss",
            "in a group that is graded alike, verl divides the differences of KL by their spread; ours leaves them.",
        )
    return options


def _optimizer(config: Config, ours: Account) -> dict[str, Any]:
    """AdamW; verl's schedule counts iterations, ours optimizer steps."""
    prefix = f"{ACTOR}.optim"
    steps_per_publish = config.train.epochs * responses_per_step(config) // config.train.optim_batch_size
    schedule, warmup = ours["optimizer.schedule"], ours["optimizer.warmup_steps"]
    if schedule == "linear":
        ours.note("optimizer.schedule", "verl's FSDP learner knows constant and cosine; this is constant.")
    if ours["optimizer.weight_decay"]:
        ours.note("optimizer.weight_decay", "verl's is one of norms and biases, too.")
    if warmup:
        ours.note("optimizer.warmup_steps", "verl begins at 0 and counts iterations, not optimizer steps.")
    options: dict[str, Any] = {
        f"{prefix}.lr": ours["optimizer.lr"],
        f"{prefix}.weight_decay": ours["optimizer.weight_decay"],
        f"{prefix}.betas": [ours["optimizer.beta1"], ours["optimizer.beta2"]],
        f"{prefix}.clip_grad": ours["optimizer.clip_grad_norm"] or NEVER_BINDS,
        f"{prefix}.lr_scheduler_type": "cosine" if schedule == "cosine" else "constant",
        f"{prefix}.lr_warmup_steps": math.ceil(warmup / max(1, steps_per_publish)) if warmup else -1,
    }
    eps = ours["optimizer.eps"]
    if eps != 1e-8:  # torch's own default
        options[f"{prefix}.override_optimizer_config"] = {"eps": eps}
    return options


def _data(config: Config, ours: Account, facts: Facts) -> dict[str, Any]:
    ours.carried.add("train.dialog_turns_per_batch")
    if config.mode == "async":
        ours.carried.add("train.weight_update_frequency")
    if config.env.max_steps > 1:
        ours.note("env.max_steps", "verl's dialogs need an agent loop of your own; each response is one turn here.")
    if ours["env.reasoning"]:
        ours.note("env.reasoning", "nobody is asked to think again there.")
    template = ours["env.chat_template_kwargs"]
    return {
        **({"++data.apply_chat_template_kwargs": template} if template else {}),
        "data.train_files": Beside("$HERE/train.parquet"),
        "data.val_files": Beside("$HERE/heldout.parquet"),
        "data.train_batch_size": responses_per_step(config) // ours["env.repeats"],
        "data.max_prompt_length": facts.longest_prompt,
        "data.max_response_length": ours["inference_model.max_tokens"],
        "data.shuffle": ours["env.shuffle"],
        "data.seed": ours["seed"],
        "reward.custom_reward_function.path": Beside("$HERE/reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": max(1, ours["env.reward_workers"]),
    }


def _model(ours: Account, facts: Facts) -> dict[str, Any]:
    ours.carried.update(["model.name", "model.size"])
    trusted = ours["model.trust_remote_code"]
    options: dict[str, Any] = {
        f"{_MODEL}.path": facts.model,
        f"{_MODEL}.trust_remote_code": trusted,
        "data.trust_remote_code": trusted,
        f"{_MODEL}.enable_gradient_checkpointing": ours["train_model.gradient_checkpointing"],
    }
    attention = ours["model.attn_implementation"]
    if attention is not None:
        options[f"+{_MODEL}.override_config.attn_implementation"] = attention
    if ours["train_model.lora.enabled"]:
        options |= {
            f"{_MODEL}.lora_rank": ours["train_model.lora.r"],
            f"{_MODEL}.lora_alpha": ours["train_model.lora.alpha"],
            f"{_MODEL}.target_modules": ours["train_model.lora.target_modules"] or "all-linear",
            f"{_ROLLOUT}.load_format": "safetensors",
        }
        if ours["train_model.lora.dropout"]:
            ours.note("train_model.lora.dropout", "the adapters of verl's FSDP learner have no dropout.")
    return options


def _actor(config: Config, ours: Account, facts: Facts) -> dict[str, Any]:
    repeats, size = config.env.repeats, ours["train.optim_batch_size"]
    if size % repeats:
        ours.note("train.optim_batch_size", f"verl cuts between prompts: {max(1, size // repeats)} of them a step.")
    longest = facts.longest_prompt + longest_response(config)
    ours.carried.add("train.micro_batch_tokens")
    budget = micro_batch_tokens(config)
    if budget < longest:
        ours.note("train.micro_batch_tokens", f"raised to the longest sequence, {longest}; it counts every prompt.")
    saved = ["model", "optimizer", "extra", *(["hf_model"] if ours["train.export_hf"] else [])]
    options: dict[str, Any] = {
        f"{ACTOR}.ppo_mini_batch_size": max(1, size // repeats),
        f"{ACTOR}.ppo_epochs": ours["train.epochs"],
        f"{ACTOR}.shuffle": config.train.epochs > 1,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(budget, longest),
        f"{ACTOR}.fsdp_config.model_dtype": _DTYPES[ours["train_model.torch_dtype"]],
        f"{ACTOR}.fsdp_config.fsdp_size": ours["train_model.fsdp_size"] or -1,
        f"{ACTOR}.checkpoint.save_contents": saved,
    }
    precision = ours["train.precision"]
    if precision in ("fp32", "fp16"):  # verl's default is bf16
        kinds = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        options |= {f"+{role}.fsdp_config.mixed_precision": kinds for role in (ACTOR, _REF)}
    return options


def _rollout(config: Config, ours: Account) -> dict[str, Any]:
    engine, dtype = ours["engine.name"], ours["inference_model.torch_dtype"]
    known = None if engine == "auto" else ENGINES[engine].verl
    if known is None and engine != "auto":
        ours.note("engine.name", "verl samples with vllm or sglang; this is vllm.")
    elif is_server(engine):
        ours.note("engine.name", "verl starts the engine itself.")
    if most_kept(config):
        ours.note("inference_model.top_p", "verl takes log-probs over the whole vocabulary, so its ratio is biased.")
    options = {
        f"{_ROLLOUT}.name": known or "vllm",
        f"{_ROLLOUT}.n": config.env.repeats,
        f"{_ROLLOUT}.temperature": ours["inference_model.temperature"],
        f"{_ROLLOUT}.top_p": ours["inference_model.top_p"],
        f"{_ROLLOUT}.top_k": ours["inference_model.top_k"] or -1,
        f"{_ROLLOUT}.seed": config.seed,
        f"{_ROLLOUT}.dtype": "bfloat16" if dtype in ("auto", "native") else dtype,
        f"{_ROLLOUT}.tensor_model_parallel_size": ours["inference_model.tensor_parallel_size"],
        f"{_ROLLOUT}.gpu_memory_utilization": ours["inference_model.gpu_memory_utilization"],
        f"{_ROLLOUT}.max_num_seqs": ours["env.num_envs"],
    }
    context = ours["inference_model.max_model_len"]
    return options if context is None else options | {f"{_ROLLOUT}.max_model_len": context}


def _trainer(config: Config, ours: Account, facts: Facts) -> dict[str, Any]:
    steps = ours["train.total_dialog_turns"] // responses_per_step(config)
    prompts = responses_per_step(config) // config.env.repeats
    is_on, every = ours["eval.mode"] == "on", ours["eval.every"]
    if is_on and ours["eval.avg_at_k"]:
        ours.note("eval.avg_at_k", "verl's validation is greedy here (rollout.val_kwargs chooses).")
    if ours["device"] == "cpu":
        ours.note("device", "verl needs accelerators.")
    options: dict[str, Any] = {
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": math.ceil(steps / max(1, facts.num_train // prompts)),
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ours.num_devices("train_model"),
        "trainer.save_freq": ours["train.checkpoint_frequency"] or steps,
        "trainer.max_actor_ckpt_to_keep": ours["train.keep_checkpoints"],
        "trainer.resume_mode": "disable" if ours["train.resume"] is None else "auto",
        "trainer.val_before_train": is_on,
        "trainer.test_freq": (every or steps) if is_on else -1,
        "trainer.logger": ["console", *(["wandb"] if ours["logging.wandb"] != "disabled" else [])],
        "trainer.project_name": ours["logging.project"],
        "trainer.experiment_name": ours["logging.run_name"] or facts.name,
        "trainer.default_local_dir": Beside("$HERE/checkpoints"),
    }
    if ours["mode"] == "sync":
        return options | {"trainer.v1.trainer_mode": "sync"}
    ours.note("train.max_policy_age", "verl drops what became older, or waits for it; ours never samples it.")
    return options | {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": responses_per_step(config) // config.train.optim_batch_size,
        "trainer.v1.sampler.max_off_policy_threshold": max(1, ours["train.max_policy_age"]),
        f"{_ROLLOUT}.nnodes": 1,
        f"{_ROLLOUT}.n_gpus_per_node": ours.num_devices("inference_model"),
        f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
    }


def example_columns(example: Example) -> dict[str, str]:
    """An example as three columns of text, which every table can hold.

    >>> example = Example("2 + 2?", "4", {"level": 1})
    >>> example_columns(example)
    {'query': '2 + 2?', 'answer': '4', 'extra': '{"level": 1}'}
    >>> example_of(example_columns(example)) == example
    True
    """
    return {"query": example.query, "answer": example.answer, "extra": json.dumps(dict(example.extra))}


def example_of(columns: Mapping[str, str]) -> Example:
    """The example of :func:`example_columns`."""
    return Example(columns["query"], columns["answer"], json.loads(columns["extra"]))


def verl_rows(task: Task, examples: Sequence[Example], split: str) -> Iterator[dict[str, Any]]:
    """verl's five columns; the example is in ``extra_info``, where our grader reads it.

    >>> from sota_grpo.tasks import make_task
    >>> task = make_task("arithmetic", num_train=1, num_heldout=1)
    >>> list(next(verl_rows(task, task.train, "train")))
    ['data_source', 'prompt', 'ability', 'reward_model', 'extra_info']
    """
    for index, example in enumerate(examples):
        yield {
            "data_source": task.name,
            "prompt": task.messages(example),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.answer},
            "extra_info": {"index": index, "split": split, **example_columns(example)},
        }


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """All rows in one file; it is an error when there are none."""
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    if not listed:
        raise UserError(f"There is nothing to write to {path.name}: the task has no such problems.")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), path)


def verl_reward(config_file: str | Path) -> Callable[..., dict[str, float]]:
    """``compute_score`` for verl: the reward as ``score``, and whether the response is right as ``acc``.

    A response at which the grader fails earns 0, as in training.

    Args:
        config_file: of the run; its folder holds what it names.
    """
    folder = Path(config_file).parent
    config = load_config(folder, trust=True)
    if config.reward.path is not None:  # the functions stand beside the config, and beside the script that calls this
        config.reward.path = str(folder / config.reward.path)
    task = task_of(config, bare=True)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
    ) -> dict[str, float]:
        (score,) = guarded_scores(task.score, task.term_weights, [(solution_str, example_of(extra_info))])
        return {"score": total_reward(score.terms, task.term_weights), "acc": float(score.success)}

    return compute_score
