"""Options as they are written: by dotted name, as overrides on a command line, and by what TRL or verl call them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from sota_grpo.config import Config


def walk(config: Any = None, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf option of a config or section (None: the defaults) as ``(dotted name, dataclass field, value)``.

    >>> [name for name, _, _ in walk()][:3]
    ['seed', 'mode', 'device']
    """
    section = Config() if config is None else config
    options: list[tuple[str, Any, Any]] = []
    for item in fields(section):
        name, value = prefix + item.name, getattr(section, item.name)
        options += walk(value, f"{name}.") if is_dataclass(value) else [(name, item, value)]
    return options


def changed_options(config: Config) -> dict[str, tuple[Any, Any]]:
    """Value and default of every option that is not at its default, by name."""
    options = zip(walk(config), walk())
    return {name: (value, default) for (name, _, value), (_, _, default) in options if value != default}


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """A copy of ``config`` with other values, by dotted name; sections without any of them are shared."""
    changed = copy.copy(config)
    for name, value in options.items():
        *sections, leaf = name.split(".")
        section: Any = changed
        for each in sections:
            copied = copy.copy(getattr(section, each))
            setattr(section, each, copied)
            section = copied
        setattr(section, leaf, value)
    return changed


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Options by dotted name, as they are written on the command line.

    >>> overrides_of({"train.resume": None, "train.export_hf": False, "reward.name": ["near", "brief"]})
    ['train.resume=null', 'train.export_hf=false', 'reward.name=[near,brief]']
    >>> overrides_of({"env.chat_template_kwargs": {"enable_thinking": False, "date": "1 May"}})
    ["env.chat_template_kwargs={enable_thinking:false,date:'1 May'}"]
    >>> overrides_of({"env.mixture": {"sums": {"dataset": "arithmetic", "system_prompt": "Think, then say it."}}})
    ["env.mixture={sums:{dataset:arithmetic,system_prompt:'Think, then say it.'}}"]
    """
    return [f"{name}={_word(value)}" for name, value in options.items()]


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{quoted(item)}' for name, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_NO_TEXTS = ("true", "false", "null", "nan", "inf")  # in Hydra's grammar


def quoted(value: Any) -> str:
    """A value within others; a text that would end there, or be something else, in quotes.

    >>> quoted([True, None, 1e-06, "a b", "1e9", {"len": 4}])
    "[true,null,1e-06,'a b','1e9',{len:4}]"
    """
    if not isinstance(value, str):
        return _word(value)
    if re.fullmatch(r"[A-Za-z_/][\w./@-]*", value) and value.lower() not in _NO_TEXTS:
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda at: 2 * at[1] + at[2].replace("'", "\\'"), value) + "'"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested config by their dotted names; an empty section is a value.

    >>> flat({"seed": 0, "train": {"epochs": 1, "resume": None}})
    {'seed': 0, 'train.epochs': 1, 'train.resume': None}
    """
    values: dict[str, Any] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        values |= flat(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return values


_CLOSE = 0.75  # of difflib: env.repeat is env.repeats, learning_rate is no train.grace_s
_BATCH, _STEP = "train.dialog_turns_per_batch (responses)", "train.optim_batch_size (responses, over all devices)"
_CLIP, _LENGTH = "algorithm.clip_low and algorithm.clip_high", "train.total_dialog_turns (responses in all)"
_LOSS = "algorithm=PRESET, or algorithm.objective and algorithm.aggregation"
#: Options of TRL's GRPOConfig and of verl's trainer by the last word of their name; docs/migration.md has the table.
THEIRS = {
    # TRL
    **{"learning_rate": "optimizer.lr", "lr_scheduler_type": "optimizer.schedule"},
    **{"warmup_ratio": "optimizer.warmup_steps", "max_grad_norm": "optimizer.clip_grad_norm"},
    **{"adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2", "adam_epsilon": "optimizer.eps"},
    **{"beta": "policy.kl_coef", "num_generations": "env.repeats", "num_iterations": "train.epochs"},
    **{"max_completion_length": "inference_model.max_tokens", "max_prompt_length": "inference_model.max_model_len"},
    **{"epsilon": _CLIP, "epsilon_high": "algorithm.clip_high", "delta": "algorithm.dual_clip", "loss_type": _LOSS},
    **{"multi_objective_aggregation": "algorithm.decouple_terms", "gdpo_reward_keys": "algorithm.decouple_terms"},
    **{"scale_rewards": "algorithm.scale", "importance_sampling_level": "algorithm.ratio"},
    **{"mask_truncated_completions": "algorithm.drop_truncated", "reward_weights": "reward.weights"},
    **{"reward_funcs": "reward.path and reward.name", "steps_per_generation": _BATCH, "generation_batch_size": _BATCH},
    **{"per_device_train_batch_size": _STEP, "gradient_accumulation_steps": _STEP},
    **{"max_steps": _LENGTH, "num_train_epochs": _LENGTH, "shuffle_dataset": "env.shuffle"},
    **{"bf16": "train.precision=bf16", "fp16": "train.precision=fp16", "dtype": "train_model.torch_dtype"},
    **{"use_vllm": "engine=vllm", "vllm_mode": "engine=vllm or engine=vllm_server"},
    **{"vllm_server_base_url": "engine.url", "vllm_max_model_length": "inference_model.max_model_len"},
    **{"vllm_gpu_memory_utilization": "inference_model.gpu_memory_utilization"},
    **{"vllm_tensor_parallel_size": "inference_model.tensor_parallel_size"},
    **{"vllm_importance_sampling_correction": "algorithm.correction"},
    **{"vllm_importance_sampling_mode": "algorithm.correction and algorithm.correction_mode"},
    **{"vllm_importance_sampling_clip_max": "algorithm.correction_cap"},
    **{"vllm_importance_sampling_clip_min": "algorithm.correction_floor"},
    **{
        "off_policy_mask_threshold": "algorithm.off_policy_threshold",
        "use_bias_correction_kl": "algorithm.kl_unbiased",
    },
    "use_adaptive_entropy": "algorithm.entropy_target",
    **{"model_name_or_path": "model.name", "output_dir": "hydra.run.dir", "report_to": "logging.wandb"},
    **{"save_steps": "train.checkpoint_frequency", "save_total_limit": "train.keep_checkpoints"},
    **{"resume_from_checkpoint": "train.resume", "eval_steps": "eval.every", "eval_strategy": "eval.mode"},
    **{"lora_r": "train_model.lora.r", "lora_alpha": "train_model.lora.alpha", "use_peft": "train_model.lora.enabled"},
    **{"teacher_model_name_or_path": "ref_model.name, with algorithm.distill_coef"},
    **{"model_init_kwargs": "model.load_kwargs", "optim": "optimizer.name", "num_generations_eval": "eval.avg_at_k"},
    **{"max_tool_calling_iterations": "env.max_steps, turns of the policy: one more than theirs"},
    **dict.fromkeys(("use_liger_kernel", "use_liger_loss"), "train_model.log_probs=liger"),
    **dict.fromkeys(("vllm_server_host", "vllm_server_port"), "engine.url=http://HOST:PORT"),
    **{"vllm_enable_sleep_mode": "inference_model.num_devices=shared"},
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "ds3_gather_for_generation"),
        "train_model.num_devices and train_model.fsdp_size (FSDP2)",
    ),
    **{"vllm_importance_sampling_cap": "algorithm.correction_cap", "vllm_server_timeout": "ray.timeout_s"},
    **{"vllm_model_impl": "inference_model.engine_kwargs={model_impl: ..}"},
    "generation_kwargs": "inference_model.temperature, inference_model.top_p, inference_model.top_k and "
    "inference_model.min_p",
    # verl
    **{"clip_ratio": _CLIP, "clip_ratio_low": "algorithm.clip_low", "clip_ratio_high": "algorithm.clip_high"},
    **{"clip_ratio_c": "algorithm.dual_clip", "adv_estimator": "algorithm=PRESET, or algorithm.baseline"},
    **{"norm_adv_by_std_in_grpo": "algorithm.scale", "loss_agg_mode": "algorithm.aggregation", "loss_mode": _LOSS},
    **{"rollout_is": "algorithm.correction", "rollout_is_threshold": "algorithm.correction_cap"},
    **{"rollout_rs": "algorithm.correction and algorithm.correction_mode=reject"},
    **{"rollout_rs_threshold": "algorithm.correction_floor and algorithm.correction_cap"},
    **{"entropy_coeff": "algorithm.entropy_coef", "use_kl_in_reward": "train.kl_coef_in_loss=false"},
    **dict.fromkeys(("kl_loss_coef", "use_kl_loss"), "policy.kl_coef"),
    **{"kl_loss_type": "algorithm.kl_estimator", "train_batch_size": _BATCH, "ppo_mini_batch_size": _STEP},
    **{"ppo_epochs": "train.epochs", "ppo_max_token_len_per_gpu": "train.micro_batch_tokens"},
    **{"ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens", "max_response_length": "inference_model.max_tokens"},
    **{"train_files": "env.dataset_path", "val_files": "env.eval_path", "n": "env.repeats"},
    **{"total_epochs": _LENGTH, "total_training_steps": _LENGTH, "n_gpus_per_node": "train_model.num_devices"},
    **{"tensor_model_parallel_size": "inference_model.tensor_parallel_size", "lora_rank": "train_model.lora.r"},
    **{"tensor_parallel_degree": "train_model.tensor_parallel_size"},
    **{"data_parallel_shard_degree": "train_model.fsdp_size"},
    **{"save_freq": "train.checkpoint_frequency", "test_freq": "eval.every", "resume_mode": "train.resume"},
    # prime-rl, slime
    **dict.fromkeys(("teacher_tau", "opd_kl_coef"), "algorithm.distill_coef, with ref_model.name"),
    **{"adv_tau": "algorithm.advantage_coef"},
    **{"project_name": "logging.project", "experiment_name": "logging.run_name", "default_local_dir": "hydra.run.dir"},
}
_PRESETS = ("cispo", "sapo", "vespo", "luspo", "gmpo", "gspo", "rloo", "opo", "gdpo")
#: The same where the value decides: a loss_type of TRL's is an aggregation, a preset of that name another algorithm.
THEIR_VALUES = {
    **{"loss_type=grpo": "algorithm.aggregation=sequence", "loss_type=dr_grpo": "algorithm.aggregation=constant"},
    **dict.fromkeys(("loss_type=dapo", "loss_type=bnpo"), "algorithm.aggregation=token"),
    **{f"{name}={preset}": f"algorithm={preset}" for name in ("loss_type", "loss_mode") for preset in _PRESETS},
    **{f"adv_estimator={preset}": f"algorithm={preset}" for preset in ("grpo", "rloo", "opo", "gdpo")},
    "adv_estimator=reinforce_plus_plus": "algorithm=reinforce_pp",
    "adv_estimator=reinforce_plus_plus_baseline": "algorithm=reinforce_pp_baseline",
    **{"scale_rewards=group": "algorithm.scale=group_std", "scale_rewards=batch": "algorithm.scale=batch_std"},
    **{"scale_rewards=none": "algorithm.scale=none", "eval_strategy=no": "eval.mode=off"},
    **{"loss_agg_mode=token-mean": "algorithm.aggregation=token"},
    **{"loss_agg_mode=seq-mean-token-mean": "algorithm.aggregation=sequence"},
    **{"loss_agg_mode=seq-mean-token-sum-norm": "algorithm.aggregation=constant"},
    **{"optim=adamw_8bit": "optimizer.name=adamw_8bit", "optim=adamw_bnb_8bit": "optimizer.name=adamw_8bit"},
}
_UPLOAD = "export the run with sota-grpo export and upload the folder with hf upload"
_FIXED = "the reference stays the policy at its start, or ref_model.name"
_OF_COMPLETIONS = ("log_completions_hub_repo", "log_multimodal", "log_unique_prompts")
_BATCHES = "engine=transformers batches and caches by itself"
_LOGGED = "the metrics of every step are logged"
_ADAPTED = "algorithm.entropy_target adapts the coefficient between 0 and 1, by 0.005 a step"
_OF_THE_PAPER = "it is that of the paper; algorithm.objective=FILE.py:FUNCTION is a surrogate of your own"
_OF_SURROGATES = ("sapo_temperature_pos", "sapo_temperature_neg", "tau_pos", "tau_neg", "vespo_k_pos", "vespo_k_neg")
#: Options of TRL's that have no counterpart, and what happens instead.
NOT_HERE = {
    **dict.fromkeys(("logging_steps", "logging_first_step", "logging_strategy"), _LOGGED),
    **dict.fromkeys(
        ("log_completions", "num_completions_to_print", *_OF_COMPLETIONS), "all completions are in rollouts.jsonl"
    ),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _FIXED),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_strategy"), _UPLOAD),
    "repetition_penalty": "responses are sampled from the policy's own distribution, which it would change",
    "vllm_structured_outputs_regex": "responses are sampled from the policy's own distribution, which it would change",
    "per_device_eval_batch_size": "the engine batches an evaluation by itself",
    "disable_dropout": "every dropout of the model is off",
    "cast_lm_head_to_fp32": "the head multiplies in the dtype of train.precision, and all that follows is float32",
    **dict.fromkeys((*_OF_SURROGATES, "vespo_lambda_pos", "vespo_lambda_neg"), _OF_THE_PAPER),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), _ADAPTED),
    "router_aux_loss_coef": "mixtures of experts are not trained",
    "vllm_group_port": "ports are chosen by themselves",
    **dict.fromkeys(
        (
            "cache_implementation",
            "pad_to_multiple_of",
            "use_transformers_paged",
            "use_transformers_continuous_batching",
        ),
        _BATCHES,
    ),
    "transformers_continuous_batching_config": _BATCHES,
    "load_best_model_at_end": "sota-grpo eval measures every checkpoint that train.keep_checkpoints keeps",
}


def no_option(name: str, value: Any = None) -> str:
    """The sentence about an option ``name`` that does not exist.

    Args:
        value: what it was to be set to, where that is known.

    >>> no_option("beta"), no_option("train.lr")
    ('There is no option beta; here it is policy.kl_coef.', 'There is no option train.lr; did you mean optimizer.lr?')
    >>> no_option("loss_type", "dapo")
    'There is no option loss_type; here loss_type=dapo is algorithm.aggregation=token.'
    >>> no_option("logging_steps", 1)
    'There is no option logging_steps; the metrics of every step are logged.'
    """
    last = name.rpartition(".")[2]
    if f"{last}={value}" in THEIR_VALUES:
        return f"There is no option {name}; here {last}={value} is {THEIR_VALUES[f'{last}={value}']}."
    if last in NOT_HERE:
        return f"There is no option {name}; {NOT_HERE[last]}."
    if last in THEIRS:
        return f"There is no option {name}; here it is {THEIRS[last]}."
    options = [option for option, _, _ in walk()]
    groups = sorted({option.partition(".")[0] for option in options if "." in option})
    near = [option for option in options if option.rpartition(".")[2] == last]
    near = near or get_close_matches(name, options if "." in name else [*groups, *options], n=1, cutoff=_CLOSE)
    return f"There is no option {name}" + (f"; did you mean {' or '.join(near[:2])}?" if near else ".")
