"""The rules about amounts, sampling, the objective and the task."""

from __future__ import annotations

from sota_grpo.config import Config, longest_response, turn_size, walk


def every_choice_is_one_of_its_values(config: Config) -> str | None:
    for name, item, value in walk(config):
        choices = item.metadata["choices"]
        if choices and value not in choices and (value is not None or item.default is not None):
            return f"{name}={value} is not one of {', '.join(choices)}."
    return None


def every_amount_is_positive(config: Config) -> str | None:
    amounts = {
        "env.num_envs": config.env.num_envs,
        "env.repeats": config.env.repeats,
        "inference_model.max_tokens": config.inference_model.max_tokens,
        "train.total_dialog_turns": config.train.total_dialog_turns,
        "train.dialog_turns_per_batch": config.train.dialog_turns_per_batch,
        "train.optim_batch_size": config.train.optim_batch_size,
        "train.epochs": config.train.epochs,
        "train.micro_batch_tokens": config.train.micro_batch_tokens,
        "train.keep_checkpoints": config.train.keep_checkpoints,
        "env.num_heldout": config.env.num_heldout,
        "eval.num_samples": config.eval.num_samples,
        "algorithm.dynamic_sampling_max_draws": config.algorithm.dynamic_sampling_max_draws,
        "optimizer.lr": config.optimizer.lr,
        "train_model.lora.r": config.train_model.lora.r,
        "ref_model.timeout_s": config.ref_model.timeout_s,
        "algorithm.correction_cap": config.algorithm.correction_cap,
        "env.max_samples": config.env.max_samples,
        "inference_model.max_num_seqs": config.inference_model.max_num_seqs,
        "inference_model.max_model_len": config.inference_model.max_model_len,
        "train_model.num_devices": config.train_model.num_devices,
        "inference_model.num_devices": config.inference_model.num_devices,
        "ref_model.num_devices": config.ref_model.num_devices,
        "inference_model.tensor_parallel_size": config.inference_model.tensor_parallel_size,
        "train.weight_update_frequency": config.train.weight_update_frequency,
        "env.reward_timeout_s": config.env.reward_timeout_s,
        "env.max_steps": config.env.max_steps,
        "train_model.timeout_s": config.train_model.timeout_s,
        "inference_model.timeout_s": config.inference_model.timeout_s,
        "ray.start_timeout_s": config.ray.start_timeout_s,
    }
    for name, value in amounts.items():
        if value is not None and value <= 0:
            return f"{name}={value} must be above 0."
    return None


_MAY_BE_NEGATIVE = ("seed", "reward.correct", "reward.wrong", "reward.no_answer", "reward.success_above")


def every_coefficient_is_not_negative(config: Config) -> str | None:
    for name, _, value in walk(config):
        if isinstance(value, (int, float)) and value < 0 and name not in _MAY_BE_NEGATIVE:
            return f"{name}={value} must not be negative."
    return None


def a_collection_is_made_of_whole_groups(config: Config) -> str | None:
    repeats = config.env.repeats
    for name, value in (
        ("train.dialog_turns_per_batch", config.train.dialog_turns_per_batch),
        ("env.num_envs", config.env.num_envs),
    ):
        if value % repeats and not (name.startswith("train") and config.train.weight_update_frequency):
            nearest = max(repeats, round(value / repeats) * repeats)
            return f"{name}={value} is not divisible by the group size env.repeats={repeats}; use {name}={nearest}."
    return None


def a_collection_is_made_of_whole_optimizer_steps(config: Config) -> str | None:
    turns, size = turn_size(config), config.train.optim_batch_size
    if turns % size:
        return (
            f"train.dialog_turns_per_batch={turns} is not divisible by train.optim_batch_size={size}; "
            f"use train.optim_batch_size={turns}."
        )
    return None


def the_run_has_at_least_one_turn(config: Config) -> str | None:
    total, turns = config.train.total_dialog_turns, turn_size(config)
    if total < turns:
        return (
            f"train.total_dialog_turns={total} is less than one turn of the loop, {turns} responses; "
            f"use train.total_dialog_turns={turns} or a smaller collection."
        )
    return None


def sampling_is_the_policys_own_distribution(config: Config) -> str | None:
    """top-p and top-k below their neutral values sample from another distribution than the one that is trained."""
    sampling = config.inference_model
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        return (
            f"inference_model.top_p={sampling.top_p} and top_k={sampling.top_k} sample from a truncated distribution, "
            "which biases the importance ratio of every token; use top_p=1.0 and top_k=0."
        )
    if sampling.temperature == 0:
        return "inference_model.temperature=0 gives every sibling the same response; use a temperature above 0."
    return None


def a_group_baseline_has_siblings(config: Config) -> str | None:
    group_terms = {config.algorithm.baseline, config.algorithm.scale} & {"group_mean", "leave_one_out", "group_std"}
    if config.env.repeats < 2 and group_terms:
        return (
            f"algorithm {config.algorithm.name} compares siblings ({', '.join(sorted(group_terms))}), but env.repeats="
            f"{config.env.repeats} gives none; use env.repeats=2 or more."
        )
    return None


def dynamic_sampling_has_group_signal(config: Config) -> str | None:
    if config.algorithm.dynamic_sampling and config.env.repeats < 2:
        return f"algorithm.dynamic_sampling needs groups of 2 or more, and env.repeats={config.env.repeats}."
    return None


def overlong_buffer_fits_the_response(config: Config) -> str | None:
    buffer, longest = config.algorithm.overlong_buffer, longest_response(config)
    if buffer > longest:
        turns = f" times env.max_steps={config.env.max_steps}" if config.env.max_steps > 1 else ""
        return (
            f"algorithm.overlong_buffer={buffer} is longer than inference_model.max_tokens="
            f"{config.inference_model.max_tokens}{turns}."
        )
    return None


def the_kl_in_the_loss_has_a_gradient(config: Config) -> str | None:
    """The gradient of k1 has mean 0, so as a loss it pulls nowhere (k2 and k3 do)."""
    in_loss = config.train.kl_coef_in_loss and config.policy.kl_coef > 0
    if in_loss and config.algorithm.kl_estimator == "k1":
        return (
            f"policy.kl_coef={config.policy.kl_coef} with algorithm.kl_estimator=k1 in the loss pulls nowhere: its "
            "gradient has mean 0; use k2 or k3, or train.kl_coef_in_loss=false."
        )
    return None


def difficulty_is_one_to_four(config: Config) -> str | None:
    if not 1 <= config.env.difficulty <= 4:
        return f"env.difficulty={config.env.difficulty} must be 1, 2, 3 or 4."
    return None


def probabilities_are_shares(config: Config) -> str | None:
    for name, value in (
        ("inference_model.gpu_memory_utilization", config.inference_model.gpu_memory_utilization),
        ("inference_model.top_p", config.inference_model.top_p),
    ):
        if not 0 <= value <= 1:
            return f"{name}={value} must lie between 0 and 1."
    return None


def decays_and_dropout_leave_something(config: Config) -> str | None:
    """At 1 a moving average never moves, and a dropout drops everything."""
    for name, value in (
        ("train_model.lora.dropout", config.train_model.lora.dropout),
        ("optimizer.beta1", config.optimizer.beta1),
        ("optimizer.beta2", config.optimizer.beta2),
    ):
        if not 0 <= value < 1:
            return f"{name}={value} must be at least 0 and below 1."
    return None


def the_dual_clip_bounds_a_clipped_ratio(config: Config) -> str | None:
    bound, objective = config.algorithm.dual_clip, config.algorithm.objective
    if bound is None:
        return None
    if objective != "clipped":
        return (
            f"algorithm.dual_clip={bound} bounds the ratio of objective=clipped and has no effect on "
            f"algorithm.objective={objective}; use algorithm.dual_clip=null."
        )
    if bound <= 1:
        return f"algorithm.dual_clip={bound} must be above 1, the ratio of an unchanged policy; use 3.0 or null."
    return None


def reinforce_has_no_ratio(config: Config) -> str | None:
    if config.algorithm.objective == "reinforce" and config.algorithm.ratio != "token":
        return (
            f"algorithm.ratio={config.algorithm.ratio} has no effect on algorithm.objective=reinforce, which has no "
            "ratio; leave algorithm.ratio=token or use algorithm.objective=clipped."
        )
    return None


def reinforce_steps_once_per_collection(config: Config) -> str | None:
    """After the first step the rest of a collection is off-policy, and REINFORCE has no ratio that would say so.

    A correction does not help: it weighs from the behaviour policy to the one *before* the first step.
    """
    train = config.train
    several = train.epochs > 1 or train.optim_batch_size < turn_size(config)
    if config.algorithm.objective == "reinforce" and several:
        return (
            f"algorithm.objective=reinforce is on-policy, but train.epochs={train.epochs} and train.optim_batch_size="
            f"{train.optim_batch_size} make several steps of a collection of {turn_size(config)}; use "
            f"train.epochs=1 and train.optim_batch_size={turn_size(config)}, or algorithm.objective=cispo, "
            "which weighs by the ratio."
        )
    return None


def the_loss_scaler_has_float32_gradients(config: Config) -> str | None:
    """fp16 autocast scales the loss, and gradients are unscaled in float32; an adapter's weights are float32 anyway."""
    dtype = config.train_model.torch_dtype
    trains_half = dtype in ("float16", "bfloat16") and not config.train_model.lora.enabled
    if config.train.precision == "fp16" and trains_half:
        return (
            f"train.precision=fp16 scales the loss and needs float32 gradients, but train_model.torch_dtype={dtype}; "
            "use train_model.torch_dtype=float32 or train.precision=bf16."
        )
    return None
