"""Rules for options of the algorithm: which combinations are allowed (see :mod:`.validators`)."""

from __future__ import annotations

from collections.abc import Iterator

from sota_grpo.config import Config, has_reference, kl_is_unbiased, model_name, replaces_reward
from sota_grpo.config.mixture import READERS, longest_response
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.functional.loss_terms import OPTIONS, SURROGATES, readers
from sota_grpo.rl.custom_objectives import estimator, surrogate
from sota_grpo.tasks import parameters

_OF_SIBLINGS = {"group_mean", "leave_one_out", "length_weighted", "best_of_others", "group_std"}


def a_group_baseline_has_siblings(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    estimator(algorithm.baseline)  # raises a sentence on a function that does not exist
    terms = {algorithm.baseline, algorithm.scale} & _OF_SIBLINGS
    terms |= {"decouple_terms"} if algorithm.decouple_terms else set()
    if algorithm.distill_coef > 0 and algorithm.advantage_coef == 0:  # the reward is not in the loss
        terms = set()
    terms |= {"dynamic_sampling"} if algorithm.dynamic_sampling else set()
    if config.env.repeats < 2 and terms:
        names = ", ".join(sorted(terms))
        yield f"algorithm {algorithm.name} compares responses of a group ({names}), but env.repeats=1; use 2 or more."


def distillation_has_a_teacher(config: Config) -> Iterator[str]:
    """Refuse the initial policy as teacher, options that conflict with distillation, and its options without effect."""
    algorithm, name = config.algorithm, config.ref_model.name
    option = f"algorithm.distill_coef={algorithm.distill_coef}"
    if algorithm.distill_coef == 0:
        if algorithm.advantage_coef != 1:
            coef = f"algorithm.advantage_coef={algorithm.advantage_coef}"
            yield f"{coef} has no effect without a teacher (algorithm.distill_coef=0); leave it at 1.0."
        if name is not None and not has_reference(config):
            yield f"ref_model.name={name} has no effect; add algorithm.distill_coef=1 (a teacher) or policy.kl_coef."
        return
    if name is None or name == model_name(config):
        yield f"{option} needs another teacher than {model_name(config)}; use ref_model.name=TEACHER."
    if config.policy.kl_coef > 0:
        pull = f"policy.kl_coef={config.policy.kl_coef}"
        yield f"{option} and {pull} need two references, but a run has one; use policy.kl_coef=0."
    if algorithm.dynamic_sampling:
        text = f"algorithm.dynamic_sampling=true drops zero-advantage groups, which the teacher of {option} scores"
        yield f"{text}; use algorithm.dynamic_sampling=false."
    if surrogate(algorithm.objective).reads("mask"):
        text = f"algorithm.objective={algorithm.objective} weighs whole responses"
        yield f"{text}, but {option} scores single tokens; use algorithm.objective=clipped."


def overlong_buffer_fits_the_response(config: Config) -> Iterator[str]:
    buffer, longest = config.algorithm.overlong_buffer, longest_response(config)
    if buffer > longest:
        limit = f"inference_model.max_tokens={config.inference_model.max_tokens}"
        text = f"algorithm.overlong_buffer={buffer} exceeds the most tokens of a response, {longest} ({limit} per turn)"
        yield f"{text}; use algorithm.overlong_buffer={longest} or less."


def decoupled_terms_are_those_of_the_task(config: Config) -> Iterator[str]:
    """Refuse GDPO with a KL penalty in the reward, which it would rescale, or with a scale that divides by 0."""
    if config.algorithm.decouple_terms and config.policy.kl_coef > 0 and not config.train.kl_coef_in_loss:
        text = f"algorithm.decouple_terms=true would rescale policy.kl_coef={config.policy.kl_coef} in the reward"
        yield f"{text}; use train.kl_coef_in_loss=true."
    if config.algorithm.decouple_terms and config.algorithm.scale == "group_mean":
        text = "algorithm.scale=group_mean divides by 0 with algorithm.decouple_terms=true"
        yield f"{text}; use algorithm.scale=batch_std."


def a_mean_reward_that_divides_is_not_negative(config: Config) -> Iterator[str]:
    """Refuse ``scale=group_mean`` with a negative reward or with a penalty in the reward.

    Rewards of the user's functions and of mixtures are checked in training.
    """
    if config.algorithm.scale != "group_mean":
        return
    penalties = {
        "algorithm.overlong_buffer": config.algorithm.overlong_buffer,
        "policy.kl_coef": 0.0 if config.train.kl_coef_in_loss else config.policy.kl_coef,
    }
    has_task_reward = config.env.mixture is None and not replaces_reward(config)
    rewards = ("reward.correct", "reward.wrong", "reward.no_answer") if has_task_reward else ()
    values = {name: value for name, _, value in walk(config)}
    negative = [f"{name}={value}" for name, value in penalties.items() if value > 0]
    negative += [
        f"{name}={values[name]}"
        for name in rewards
        if READERS[name] in parameters(config.env.dataset) and values[name] < 0
    ]
    if negative:
        fix = f"use {negative[0].partition('=')[0]}=0 or algorithm.scale=group_std"
        yield f"algorithm.scale=group_mean divides by a mean reward that {negative[0]} can make negative; {fix}."


def the_kl_has_the_gradient_of_its_estimator(config: Config) -> Iterator[str]:
    """Refuse k1 in the loss, where its gradient has mean 0, and an unbiased estimator for a KL in the reward."""
    estimator, coef, in_loss = config.algorithm.kl_estimator, config.policy.kl_coef, config.train.kl_coef_in_loss
    if kl_is_unbiased(config) and not in_loss and coef > 0:
        text = f"algorithm.kl_estimator={estimator} has no effect on policy.kl_coef={coef} in the reward"
        yield f"{text}; use train.kl_coef_in_loss=true or algorithm.kl_estimator=k3."
    if in_loss and coef > 0 and estimator == "k1":
        text = f"policy.kl_coef={coef} with algorithm.kl_estimator=k1 in the loss has a gradient of mean 0"
        yield f"{text}; use algorithm.kl_estimator=k3 (or k2), or train.kl_coef_in_loss=false."


def options_that_the_objective_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    objective = config.algorithm.objective
    for name, (value, default) in changed_options(config).items():
        term = name.removeprefix("algorithm.")
        is_read = surrogate(objective).reads(term) or (term == "dual_clip" and kl_is_unbiased(config))
        if term in OPTIONS and not is_read:
            problem = f"{name}={'null' if value is None else value} has no effect on algorithm.objective={objective}"
            yield f"{problem}; use {name}={default} or algorithm.objective={readers(term)}."


def an_entropy_bonus_and_its_tokens_have_an_effect(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.entropy_target is not None and algorithm.entropy_coef > 1:
        option = f"algorithm.entropy_coef={algorithm.entropy_coef}"
        yield f"{option} is above 1, the largest value that algorithm.entropy_target sets; use 1 or less."
    if algorithm.top_entropy_quantile < 1 and surrogate(algorithm.objective).reads("mask"):
        text = f"algorithm.top_entropy_quantile={algorithm.top_entropy_quantile} keeps single tokens"
        other = f"algorithm.objective={algorithm.objective} weighs whole responses"
        yield f"{text}, but {other}; use algorithm.objective=clipped."


def a_correction_has_bounds_and_an_effect(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    floor, cap = algorithm.correction_floor, algorithm.correction_cap
    if floor > 0 and algorithm.correction == "none":
        option = f"algorithm.correction_floor={floor} has no effect on algorithm.correction=none"
        yield f"{option}; use algorithm.correction_floor=0 or algorithm.correction=token."
    if 0 < cap <= floor:
        fix = f"algorithm.correction_floor={1 / cap if cap > 1 else cap / 2:g}"
        yield f"algorithm.correction_floor={floor} is not below algorithm.correction_cap={cap}; use {fix}."
    if algorithm.correction != "none" and surrogate(algorithm.objective).weighs_rows:
        text = f"algorithm.objective={algorithm.objective} weighs responses by their own ratio"
        yield f"{text}, which algorithm.correction={algorithm.correction} multiplies; use algorithm.correction=none."


def has_no_ratio(config: Config) -> bool:
    """Whether the objective uses no importance ratio, so that every token must be on-policy."""
    return not surrogate(config.algorithm.objective).reads("log_ratio")


def an_objective_without_a_ratio_is_on_policy(config: Config) -> Iterator[str]:
    """Refuse off-policy training, or an ``algorithm.ratio`` of sequences, if the objective has no importance ratio.

    After the first optimizer step the rest of a batch is off-policy, and only a ratio corrects for that.
    ``algorithm.correction`` corrects only what is off-policy *before* that step.
    """
    train, ratio, objective = config.train, config.algorithm.ratio, f"algorithm.objective={config.algorithm.objective}"
    size = train.dialog_turns_per_batch
    if has_no_ratio(config) and ratio != "token":
        text = f"algorithm.ratio={ratio} has no effect on {objective}, which has no ratio"
        yield f"{text}; leave algorithm.ratio=token or use algorithm.objective=clipped."
    if has_no_ratio(config) and (train.epochs > 1 or train.optim_batch_size < size):
        yield (
            f"{objective} is on-policy, but train.epochs={train.epochs} and train.optim_batch_size="
            f"{train.optim_batch_size} make several steps of a batch of {size}; use train.epochs=1 and "
            f"train.optim_batch_size={size}, or algorithm.objective=cispo, which has a ratio."
        )
    if has_no_ratio(config) and train.max_policy_age > 0:
        text = f"{objective} is on-policy, but train.max_policy_age={train.max_policy_age} is not"
        yield f"{text}; use train.max_policy_age=0, or algorithm.objective=cispo, which has a ratio."


def an_objective_has_a_ratio_of_its_level(config: Config) -> Iterator[str]:
    ratio, objective = config.algorithm.ratio, config.algorithm.objective
    if not has_no_ratio(config) and ratio not in surrogate(objective).ratios:
        others = " or ".join(name for name, one in SURROGATES.items() if one.reads("log_ratio") and ratio in one.ratios)
        text = f"algorithm.objective={objective} takes the ratio per token, not algorithm.ratio={ratio}"
        yield f"{text}; use algorithm.ratio=token or algorithm.objective={others}."


def old_policies_are_corrected_in_several_epochs(config: Config) -> Iterator[str]:
    """Refuse several epochs on tokens of older policies without a correction: the ratio ignores the tokens' age."""
    train, algorithm = config.train, config.algorithm
    if train.max_policy_age > 0 and train.epochs > 1 and algorithm.correction == "none" and not has_no_ratio(config):
        fix = "" if surrogate(algorithm.objective).weighs_rows else "algorithm.correction=token or "
        yield (
            f"train.max_policy_age={train.max_policy_age} trains on tokens of older policies, and train.epochs="
            f"{train.epochs} takes the ratio to recomputed log-probs, which ignore their age; use {fix}train.epochs=1."
        )
