"""Convert options between a config, dotted names and command line overrides; map names of TRL and verl to ours."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from sota_grpo.config import Config


def walk(config: Any = None, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return ``(dotted name, dataclass field, value)`` of every option of a config or section (None: default config).

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
    """Return {name: (value, default)} of the options that differ from their defaults."""
    options = zip(walk(config), walk())
    return {name: (value, default) for (name, _, value), (_, _, default) in options if value != default}


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """Return a copy of ``config`` with ``options``, {dotted name: value}, unchecked; it shares unchanged sections."""
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
    """Return options, {dotted name: value}, as command line overrides.

    >>> overrides_of({"train.resume": None, "train.export_hf": False, "reward.name": ["near", "brief"]})
    ['train.resume=null', 'train.export_hf=false', 'reward.name=[near,brief]']
    >>> overrides_of({"env.chat_template_kwargs": {"enable_thinking": False, "date": "1 May"}})
    ["env.chat_template_kwargs={enable_thinking:false,date:'1 May'}"]
    >>> overrides_of({"env.mixture": {"sums": {"dataset": "arithmetic", "system_prompt": "Think, then say it."}}})
    ["env.mixture={sums:{dataset:arithmetic,system_prompt:'Think, then say it.'}}"]
    """
    return [f"{name}={quoted(value)}" for name, value in options.items()]


_NO_TEXTS = ("true", "false", "null", "nan", "inf")  # words that Hydra does not read as text


def quoted(value: Any) -> str:
    """Return a value as text in Hydra's syntax; a string is quoted if Hydra would read something else.

    >>> quoted([True, None, 1e-06, "a b", "1e9", {"len": 4}])
    "[true,null,1e-06,'a b','1e9',{len:4}]"
    """
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{quoted(item)}' for name, item in value.items())}}}"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if re.fullmatch(r"(?a)[A-Za-z_/][\w./@:-]*", value) and value.lower() not in _NO_TEXTS:
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda at: 2 * at[1] + at[2].replace("'", "\\'"), value) + "'"


def filled(sentence: str, config: Config) -> str:
    """Return a sentence in which each ``<OPTION>`` is replaced by the option and its value.

    >>> filled("<seed> and <train.resume> <here>.", Config())
    'seed=0 and train.resume=null <here>.'
    """
    values = {name: value for name, _, value in walk(config)}

    def shown(match: re.Match[str]) -> str:
        name, value = match[1], values.get(match[1])
        return match[0] if name not in values else f"{name}={value if isinstance(value, str) else quoted(value)}"

    return re.sub(r"<([a-z_.]+)>", shown, sentence)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of a nested config; an empty section is a value.

    >>> flat({"seed": 0, "train": {"epochs": 1, "resume": None}})
    {'seed': 0, 'train.epochs': 1, 'train.resume': None}
    """
    values: dict[str, Any] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        values |= flat(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return values


_CLOSE = 0.75  # difflib similarity: env.repeat is near env.repeats, learning_rate not near train.grace_s
#: "Our option < names in TRL, verl, prime-rl and slime", of a dotted name the last word; docs/migration.md has the
#: table. _THEIR_VALUES also compares the value. _NOT_HERE has a sentence for names without a counterpart.
_THEIRS = """
optimizer.lr < learning_rate
optimizer.schedule < lr_scheduler_type
optimizer.warmup_steps < warmup_ratio
optimizer.clip_grad_norm < max_grad_norm
optimizer.betas < adam_beta1 adam_beta2 beta1 beta2
optimizer.eps < adam_epsilon
policy.kl_coef < beta kl_loss_coef use_kl_loss
env.repeats < num_generations n
train.epochs < num_iterations ppo_epochs
inference_model.max_tokens < max_completion_length max_response_length
inference_model.max_model_len < max_prompt_length vllm_max_model_length
algorithm.clip_low and algorithm.clip_high < epsilon clip_ratio
algorithm.clip_high < epsilon_high clip_ratio_high
algorithm.dual_clip < delta clip_ratio_c
algorithm=PRESET, or algorithm.objective and algorithm.aggregation < loss_type loss_mode
algorithm.decouple_terms < multi_objective_aggregation gdpo_reward_keys
algorithm.scale < scale_rewards norm_adv_by_std_in_grpo
algorithm.ratio < importance_sampling_level
algorithm.drop_truncated < mask_truncated_completions
reward.weights < reward_weights
reward.path and reward.name < reward_funcs
train.dialog_turns_per_batch (responses) < steps_per_generation generation_batch_size train_batch_size
train.optim_batch_size (responses, over all devices) < per_device_train_batch_size gradient_accumulation_steps
train.optim_batch_size (responses, over all devices) < ppo_mini_batch_size
train.total_dialog_turns (responses in all) < max_steps num_train_epochs total_epochs total_training_steps
env.shuffle < shuffle_dataset
train.precision=bf16 < bf16
train.precision=fp16 < fp16
train_model.torch_dtype < dtype
engine=vllm < use_vllm
engine=vllm or engine=vllm_server < vllm_mode
engine.url < vllm_server_base_url
inference_model.gpu_memory_utilization < vllm_gpu_memory_utilization
inference_model.tensor_parallel_size < vllm_tensor_parallel_size tensor_model_parallel_size
algorithm.correction < vllm_importance_sampling_correction rollout_is
algorithm.correction and algorithm.correction_mode < vllm_importance_sampling_mode
algorithm.correction_cap < vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold
algorithm.correction_floor < vllm_importance_sampling_clip_min
algorithm.off_policy_threshold < off_policy_mask_threshold
algorithm.kl_estimator (k3_unbiased for true) < use_bias_correction_kl kl_unbiased
algorithm.entropy_target < use_adaptive_entropy
model.name < model_name_or_path
hydra.run.dir < output_dir default_local_dir
logging.wandb < report_to
train.checkpoint_frequency < save_steps save_freq
train.keep_checkpoints < save_total_limit
train.keep_best=eval/accuracy < load_best_model_at_end metric_for_best_model
train.resume < resume_from_checkpoint resume_mode
eval.every < eval_steps test_freq
eval.mode < eval_strategy
train_model.lora.r < lora_r lora_rank
train_model.lora.alpha < lora_alpha
train_model.lora.enabled < use_peft
ref_model.name, with algorithm.distill_coef < teacher_model_name_or_path
model.load_kwargs < model_init_kwargs
optimizer.name < optim
eval.avg_at_k < num_generations_eval
env.max_steps, turns of the policy: one more than theirs < max_tool_calling_iterations
engine.url=http://HOST:PORT < vllm_server_host vllm_server_port
inference_model.num_devices=shared < vllm_enable_sleep_mode
train_model.num_devices and train_model.fsdp_size (FSDP2) < deepspeed fsdp fsdp_config ds3_gather_for_generation
ray.timeout_s < vllm_server_timeout
inference_model.engine_kwargs={model_impl: ..} < vllm_model_impl
inference_model.temperature, inference_model.top_p, inference_model.top_k and inference_model.min_p < generation_kwargs
algorithm.clip_low < clip_ratio_low
algorithm=PRESET, or algorithm.baseline < adv_estimator
algorithm.aggregation < loss_agg_mode
algorithm.correction and algorithm.correction_mode=reject < rollout_rs
algorithm.correction_floor and algorithm.correction_cap < rollout_rs_threshold
algorithm.entropy_coef < entropy_coeff
train.kl_coef_in_loss=false < use_kl_in_reward
algorithm.kl_estimator < kl_loss_type
train.micro_batch_tokens < ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu
env.dataset_path < train_files
env.eval_path < val_files
train_model.num_devices < n_gpus_per_node
train_model.tensor_parallel_size < tensor_parallel_degree
train_model.fsdp_size < data_parallel_shard_degree
algorithm.distill_coef, with ref_model.name < teacher_tau opd_kl_coef
algorithm.advantage_coef < adv_tau
logging.wandb_kwargs={project: ..} < project_name project
logging.wandb_kwargs={name: ..} < experiment_name run_name
logging.wandb_kwargs={tags: [..]} < tags
train.dialog_turns_per_batch (train.optim_batch_size times optimizer steps) < weight_update_frequency
"""
_THEIR_VALUES = """
algorithm.aggregation=sequence < loss_type=grpo loss_agg_mode=seq-mean-token-mean
algorithm.aggregation=constant < loss_type=dr_grpo loss_agg_mode=seq-mean-token-sum-norm
algorithm.aggregation=token < loss_type=dapo loss_type=bnpo loss_agg_mode=token-mean
algorithm=cispo < loss_type=cispo loss_mode=cispo
algorithm=sapo < loss_type=sapo loss_mode=sapo
algorithm=vespo < loss_type=vespo loss_mode=vespo
algorithm=luspo < loss_type=luspo loss_mode=luspo
algorithm=gmpo < loss_type=gmpo loss_mode=gmpo
algorithm=gspo < loss_type=gspo loss_mode=gspo
algorithm=rloo < loss_type=rloo loss_mode=rloo adv_estimator=rloo
algorithm=opo < loss_type=opo loss_mode=opo adv_estimator=opo
algorithm=gdpo < loss_type=gdpo loss_mode=gdpo adv_estimator=gdpo
algorithm=grpo < adv_estimator=grpo
algorithm=reinforce_pp < adv_estimator=reinforce_plus_plus
algorithm=reinforce_pp_baseline < adv_estimator=reinforce_plus_plus_baseline
algorithm.scale=group_std < scale_rewards=group
algorithm.scale=batch_std < scale_rewards=batch
algorithm.scale=none < scale_rewards=none
eval.mode=off < eval_strategy=no
optimizer.name=adamw_8bit < optim=adamw_8bit optim=adamw_bnb_8bit
"""
_NOT_HERE = """
the metrics of every step are logged < logging_steps logging_first_step logging_strategy
all completions are in rollouts.jsonl < log_completions num_completions_to_print log_completions_hub_repo
all completions are in rollouts.jsonl < log_multimodal log_unique_prompts
the reference stays the policy at its start, or ref_model.name < sync_ref_model ref_model_mixup_alpha
the reference stays the policy at its start, or ref_model.name < ref_model_sync_steps
export the run with sota-grpo export and upload the folder with hf upload < push_to_hub hub_model_id hub_token
export the run with sota-grpo export and upload the folder with hf upload < hub_strategy
responses are sampled from the policy's own distribution, which it would change < repetition_penalty
responses are sampled from the policy's own distribution, which it would change < vllm_structured_outputs_regex
the engine batches an evaluation by itself < per_device_eval_batch_size
every dropout of the model is off < disable_dropout
logits are always computed in chunks, with the loss's softmax < use_liger_kernel use_liger_loss log_probs
the head multiplies in the dtype of train.precision, and all that follows is float32 < cast_lm_head_to_fp32
it is that of the paper; algorithm.objective=FILE.py:FUNCTION is a surrogate of your own
  < sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg
algorithm.entropy_target adapts the coefficient between 0 and 1, by 0.005 a step < entropy_coef_min entropy_coef_max
algorithm.entropy_target adapts the coefficient between 0 and 1, by 0.005 a step < entropy_coef_delta
mixtures of experts are not trained < router_aux_loss_coef
ports are chosen by themselves < vllm_group_port
engine=transformers batches and caches by itself
  < cache_implementation pad_to_multiple_of use_transformers_paged
  < use_transformers_continuous_batching transformers_continuous_batching_config
"""


def _by_name(table: str) -> dict[str, str]:
    rows = [row.split("<") for row in re.split(r"\n(?! )", table.strip())]
    return {name: ours.strip() for ours, *others in rows for names in others for name in names.split()}


THEIRS, THEIR_VALUES, NOT_HERE = _by_name(_THEIRS), _by_name(_THEIR_VALUES), _by_name(_NOT_HERE)


def no_option(name: str, value: Any = None) -> str:
    """Return the message for an unknown option ``name``: our option for that name of TRL or verl, or similar names.

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
