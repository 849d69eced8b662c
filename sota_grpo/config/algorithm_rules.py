"""Rules of the algorithm: which of its terms go together, and with what around them (see :mod:`.validators`)."""

from __future__ import annotations

from collections.abc import Iterator

from sota_grpo.config import Config, has_reference, model_name, responses_per_step, reward_names
from sota_grpo.config.mixture import READERS, longest_response
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.functional.surrogates import OPTIONS, SURROGATES, readers
from sota_grpo.rl.objective_files import estimator, surrogate
from sota_grpo.tasks import parameters

_OF_SIBLINGS = {"group_mean", "leave_one_out", "length_weighted", "best_of_others", "group_std"}


def a_group_baseline_has_siblings(config: Config) -> Iterator[str]:
    estimator(config.algorithm.baseline)  # raises a sentence on a function that does not exist
    group_terms = {config.algorithm.baseline, config.algorithm.scale} & _OF_SIBLINGS
    group_terms |= {"decouple_terms"} if config.algorithm.decouple_terms else set()
    if config.env.repeats < 2 and group_terms and not learns_from_a_teacher_alone(config):
        yield (
            f"algorithm {config.algorithm.name} compares siblings ({', '.join(sorted(group_terms))}), but env.repeats="
            f"{config.env.repeats} gives none; use env.repeats=2 or more."
        )


def learns_from_a_teacher_alone(config: Config) -> bool:
    """Whether the task's advantage, and so its reward, takes no part in the loss."""
    return config.algorithm.distill_coef > 0 and config.algorithm.advantage_coef == 0


def distillation_has_a_teacher(config: Config) -> Iterator[str]:
    """The policy at its start, which is the base under an adapter too, pulls the policy back and teaches nothing."""
    algorithm, name = config.algorithm, config.ref_model.name
    if algorithm.distill_coef == 0:
        if algorithm.advantage_coef != 1:
            yield (
                f"algorithm.advantage_coef={algorithm.advantage_coef} weighs the task's advantage beside a teacher's, "
                "and algorithm.distill_coef=0 has none; leave it at 1.0."
            )
        if name is not None and not has_reference(config):
            yield (
                f"ref_model.name={name} is read by nothing; add algorithm.distill_coef=1 to learn from it, or "
                "policy.kl_coef to stay near it."
            )
        return
    if name is None or name == model_name(config):
        yield (
            f"algorithm.distill_coef={algorithm.distill_coef} needs another teacher than {model_name(config)}, the "
            "policy at its start; use ref_model.name=TEACHER."
        )


def a_teacher_is_the_only_reference(config: Config) -> Iterator[str]:
    distill, pull = config.algorithm.distill_coef, config.policy.kl_coef
    if distill > 0 and pull > 0:
        yield (
            f"algorithm.distill_coef={distill} learns from ref_model.name and policy.kl_coef={pull} pulls to the "
            "policy at its start, and a run has one reference; use policy.kl_coef=0."
        )


def groups_that_a_teacher_judges_are_kept(config: Config) -> Iterator[str]:
    if config.algorithm.dynamic_sampling and config.algorithm.distill_coef > 0:
        yield (
            "algorithm.dynamic_sampling=true replaces groups whose rewards are all equal, of which a teacher "
            f"(algorithm.distill_coef={config.algorithm.distill_coef}) has as much to say as of others; use "
            "algorithm.dynamic_sampling=false."
        )


def a_teacher_judges_tokens_one_by_one(config: Config) -> Iterator[str]:
    """A surrogate that sees whole rows, and says so by reading the mask, asks for one advantage of a response."""
    objective, coef = config.algorithm.objective, config.algorithm.distill_coef
    if coef > 0 and surrogate(objective).reads("mask"):
        yield (
            f"algorithm.objective={objective} weighs whole responses, and algorithm.distill_coef={coef} gives every "
            "token an advantage of its own; use algorithm.objective=clipped."
        )


def dynamic_sampling_has_groups(config: Config) -> Iterator[str]:
    if config.algorithm.dynamic_sampling and config.env.repeats < 2:
        yield f"algorithm.dynamic_sampling needs groups of 2 or more, and env.repeats={config.env.repeats}."


def overlong_buffer_fits_the_response(config: Config) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, longest_response(config)
    if buffer > longest:
        turns = f" times env.max_steps={config.env.max_steps}" if config.env.max_steps > 1 else ""
        yield (
            f"algorithm.overlong_buffer={buffer} is longer than inference_model.max_tokens="
            f"{config.inference_model.max_tokens}{turns}."
        )


_REWARDS = ("reward.correct", "reward.wrong", "reward.no_answer")


def decoupled_terms_are_those_of_the_task(config: Config) -> Iterator[str]:
    """Compared within its group, a KL of rounding errors would weigh as much as an answer does."""
    if not config.algorithm.decouple_terms:
        return
    if config.policy.kl_coef > 0 and not config.train.kl_coef_in_loss:
        yield (
            f"algorithm.decouple_terms=true would scale policy.kl_coef={config.policy.kl_coef} in the reward to the "
            "size of the other terms; use train.kl_coef_in_loss=true."
        )
    if config.algorithm.scale == "group_mean":
        yield (
            "algorithm.scale=group_mean has a mean of 0 to divide by beside algorithm.decouple_terms=true; use "
            "algorithm.scale=batch_std."
        )


def a_mean_reward_that_divides_is_not_negative(config: Config) -> Iterator[str]:
    """What a user's own functions give is looked at when it is there."""
    if config.algorithm.scale != "group_mean":
        return
    penalties = {
        "algorithm.overlong_buffer": config.algorithm.overlong_buffer,
        "policy.kl_coef": 0.0 if config.train.kl_coef_in_loss else config.policy.kl_coef,
    }
    own = config.env.mixture is None and (config.reward.path is None or "builtin" in reward_names(config))
    values = {name: value for name, _, value in walk(config)}
    read = [name for name in _REWARDS if own and READERS[name] in parameters(config.env.dataset)]
    taken = [f"{name}={value}" for name, value in penalties.items() if value > 0]
    taken += [f"{name}={values[name]}" for name in read if values[name] < 0]
    if taken:
        yield (
            f"algorithm.scale=group_mean divides by the mean reward of a group, which {taken[0]} can make negative; "
            f"use {taken[0].partition('=')[0]}=0 or algorithm.scale=group_std."
        )


def an_unbiased_kl_stands_in_the_loss_and_is_not_squared(config: Config) -> Iterator[str]:
    """``E[rho k2']`` is not the gradient of the KL, ``E[rho k1']`` and ``E[rho k3']`` are, ``rho`` included."""
    algorithm = config.algorithm
    if algorithm.kl_unbiased and algorithm.kl_estimator == "k2":
        yield "algorithm.kl_unbiased=true with algorithm.kl_estimator=k2 is not unbiased; use k1 or k3."
    if algorithm.kl_unbiased and not config.train.kl_coef_in_loss and config.policy.kl_coef > 0:
        yield (
            f"algorithm.kl_unbiased=true has no effect on policy.kl_coef={config.policy.kl_coef} in the reward; use "
            "train.kl_coef_in_loss=true or algorithm.kl_unbiased=false."
        )


def the_kl_in_the_loss_has_a_gradient(config: Config) -> Iterator[str]:
    """The gradient of k1 has mean 0, so as a loss it pulls nowhere (k2 and k3 do, and k1 times the ratio)."""
    in_loss = config.train.kl_coef_in_loss and config.policy.kl_coef > 0
    if in_loss and config.algorithm.kl_estimator == "k1" and not config.algorithm.kl_unbiased:
        yield (
            f"policy.kl_coef={config.policy.kl_coef} with algorithm.kl_estimator=k1 in the loss pulls nowhere: its "
            "gradient has mean 0; use k2 or k3, or train.kl_coef_in_loss=false."
        )


def options_that_the_objective_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    objective = config.algorithm.objective
    for name, (value, default) in changed_options(config).items():
        term = name.removeprefix("algorithm.")
        is_read = surrogate(objective).reads(term) or (term == "dual_clip" and config.algorithm.kl_unbiased)
        if term in OPTIONS and not is_read:
            yield (
                f"{name}={'null' if value is None else value} has no effect on algorithm.objective={objective}, which "
                f"does not read it; use {name}={default} or algorithm.objective={readers(term)}."
            )


def an_entropy_bonus_begins_within_its_bounds(config: Config) -> Iterator[str]:
    coef = config.algorithm.entropy_coef
    if config.algorithm.entropy_target is not None and coef > 1:
        yield f"algorithm.entropy_coef={coef} is above 1, the most that algorithm.entropy_target adapts it to; use 0."


def tokens_of_high_entropy_are_chosen_one_by_one(config: Config) -> Iterator[str]:
    """A surrogate that sees whole rows gives every token the weight of its row, the others' included."""
    objective, share = config.algorithm.objective, config.algorithm.top_entropy_quantile
    if share < 1 and surrogate(objective).reads("mask"):
        yield (
            f"algorithm.top_entropy_quantile={share} keeps single tokens, and algorithm.objective={objective} weighs "
            "whole responses; use algorithm.objective=clipped."
        )


def a_bound_of_the_ratio_lies_above_that_of_an_unchanged_policy(config: Config) -> Iterator[str]:
    bound = config.algorithm.dual_clip
    if bound is not None and bound <= 1:
        yield f"algorithm.dual_clip={bound} must be above 1, the ratio of an unchanged policy; use 3.0 or null."


def the_bounds_of_a_correction_leave_room_between_them(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    floor, cap = algorithm.correction_floor, algorithm.correction_cap
    if floor > 0 and algorithm.correction == "none":
        yield (
            f"algorithm.correction_floor={floor} has no effect on algorithm.correction=none; use "
            "algorithm.correction_floor=0 or algorithm.correction=token."
        )
    if 0 < cap <= floor:
        yield (
            f"algorithm.correction_floor={floor} is not below algorithm.correction_cap={cap}; use a smaller floor, "
            f"such as algorithm.correction_floor={1 / cap if cap > 1 else cap / 2:g}."
        )


def an_objective_that_weighs_rows_is_corrected_by_itself(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.correction != "none" and surrogate(algorithm.objective).weighs_rows:
        yield (
            f"algorithm.objective={algorithm.objective} weighs every response by its own ratio, which algorithm."
            f"correction={algorithm.correction} would multiply; use algorithm.correction=none."
        )


def has_no_ratio(config: Config) -> bool:
    """Whether the surrogate weighs every token as if the newest policy had sampled it."""
    return not surrogate(config.algorithm.objective).reads("log_ratio")


def a_level_of_the_ratio_needs_a_ratio(config: Config) -> Iterator[str]:
    ratio, objective = config.algorithm.ratio, config.algorithm.objective
    if has_no_ratio(config) and ratio != "token":
        yield (
            f"algorithm.ratio={ratio} has no effect on algorithm.objective={objective}, which has no ratio; leave "
            "algorithm.ratio=token or use algorithm.objective=clipped."
        )
    elif ratio not in surrogate(objective).ratios:
        others = " or ".join(name for name, one in SURROGATES.items() if one.reads("log_ratio") and ratio in one.ratios)
        yield (
            f"algorithm.objective={objective} takes the ratio per token, not algorithm.ratio={ratio}; use "
            f"algorithm.ratio=token or algorithm.objective={others}."
        )


def several_steps_of_a_collection_need_a_ratio(config: Config) -> Iterator[str]:
    """After the first step the rest of a collection is off-policy, and only a ratio would say so.

    A correction does not help: it weighs from the behaviour policy to the one *before* the first step.
    """
    train, size = config.train, responses_per_step(config)
    if has_no_ratio(config) and (train.epochs > 1 or train.optim_batch_size < size):
        yield (
            f"algorithm.objective={config.algorithm.objective} is on-policy, but train.epochs={train.epochs} and "
            f"train.optim_batch_size={train.optim_batch_size} make several steps of a collection of {size}; use "
            f"train.epochs=1 and train.optim_batch_size={size}, or algorithm.objective=cispo, which has a ratio."
        )


def an_old_policy_is_weighed_where_its_log_probs_are_computed_again(config: Config) -> Iterator[str]:
    """Several epochs take the ratio to recomputed log-probs; without a correction nothing reads the engine's own."""
    train, algorithm = config.train, config.algorithm
    if train.max_policy_age > 0 and train.epochs > 1 and algorithm.correction == "none" and not has_no_ratio(config):
        weighed = "" if surrogate(algorithm.objective).weighs_rows else "algorithm.correction=token or "
        yield (
            f"train.max_policy_age={train.max_policy_age} trains on tokens of older policies, and train.epochs="
            f"{train.epochs} computes their log-probs again, so that nothing says which policy sampled them; use "
            f"{weighed}train.epochs=1."
        )


def an_old_policy_needs_a_ratio(config: Config) -> Iterator[str]:
    age = config.train.max_policy_age
    if has_no_ratio(config) and age > 0:
        yield (
            f"algorithm.objective={config.algorithm.objective} is on-policy and train.max_policy_age={age} trains on "
            "tokens of older policies; use train.max_policy_age=0, or algorithm.objective=cispo, which weighs by the "
            "ratio."
        )
