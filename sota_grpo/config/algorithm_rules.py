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
    reads_reward = algorithm.distill_coef == 0 or algorithm.advantage_coef != 0
    terms = {algorithm.baseline, algorithm.scale} & _OF_SIBLINGS if reads_reward else set()
    terms |= {"decouple_terms"} if algorithm.decouple_terms and reads_reward else set()
    terms |= {"dynamic_sampling"} if algorithm.dynamic_sampling else set()
    if config.env.repeats < 2 and terms:
        names = ", ".join(sorted(terms))
        yield f"algorithm {algorithm.name} compares responses of a group ({names}), but <env.repeats>; use 2 or more."


def distillation_has_a_teacher(config: Config) -> Iterator[str]:
    """Refuse the initial policy as teacher, options that conflict with distillation, and its options without effect."""
    algorithm, name = config.algorithm, config.ref_model.name
    if algorithm.distill_coef == 0:
        if algorithm.advantage_coef != 1:
            yield "<algorithm.advantage_coef> has no effect with <algorithm.distill_coef>, no teacher; leave it at 1.0."
        if name is not None and not has_reference(config):
            yield "<ref_model.name> has no effect; add algorithm.distill_coef=1 (a teacher) or policy.kl_coef."
        return
    if name is None or name == model_name(config):
        yield f"<algorithm.distill_coef> needs another teacher than {model_name(config)}; use ref_model.name=TEACHER."
    if config.policy.kl_coef > 0:
        yield "<algorithm.distill_coef> and <policy.kl_coef> need two references: a run has one; use policy.kl_coef=0."
    if algorithm.dynamic_sampling:
        dropped = "zero-advantage groups, which the teacher of <algorithm.distill_coef> scores"
        yield f"<algorithm.dynamic_sampling> drops {dropped}; use algorithm.dynamic_sampling=false."
    if surrogate(algorithm.objective).reads("mask"):
        tokens = "but <algorithm.distill_coef> scores single tokens"
        yield f"<algorithm.objective> weighs whole responses, {tokens}; use algorithm.objective=clipped."


def overlong_buffer_fits_the_response(config: Config) -> Iterator[str]:
    longest = longest_response(config)
    if config.algorithm.overlong_buffer > longest:
        most = f"the most tokens of a response, {longest} (<inference_model.max_tokens> per turn)"
        yield f"<algorithm.overlong_buffer> exceeds {most}; use algorithm.overlong_buffer={longest} or less."


def decoupled_terms_are_those_of_the_task(config: Config) -> Iterator[str]:
    """Refuse GDPO with a KL penalty in the reward, which it would rescale, or with a scale that divides by 0."""
    if config.algorithm.decouple_terms and config.policy.kl_coef > 0 and not config.train.kl_coef_in_loss:
        yield "<algorithm.decouple_terms> would rescale <policy.kl_coef> in the reward; use train.kl_coef_in_loss=true."
    if config.algorithm.decouple_terms and config.algorithm.scale == "group_mean":
        yield "<algorithm.scale> divides by 0 with <algorithm.decouple_terms>; use algorithm.scale=batch_std."


def a_mean_reward_that_divides_is_not_negative(config: Config) -> Iterator[str]:
    """Refuse ``scale=group_mean`` with a negative reward or with a penalty in the reward.

    Rewards of the user's functions and of mixtures are checked in training.
    """
    if config.algorithm.scale != "group_mean":
        return
    values, read = {name: value for name, _, value in walk(config)}, parameters(config.env.dataset)
    penalties = ["algorithm.overlong_buffer", *([] if config.train.kl_coef_in_loss else ["policy.kl_coef"])]
    negative = [name for name in penalties if values[name] > 0]
    if config.env.mixture is None and not replaces_reward(config):
        rewards = ("reward.correct", "reward.wrong", "reward.no_answer")
        negative += [name for name in rewards if READERS[name] in read and values[name] < 0]
    if negative:
        fix = f"use {negative[0]}=0 or algorithm.scale=group_std"
        yield f"<algorithm.scale> divides by a mean reward that <{negative[0]}> can make negative; {fix}."


def the_kl_has_the_gradient_of_its_estimator(config: Config) -> Iterator[str]:
    """Refuse k1 in the loss, where its gradient has mean 0, and an unbiased estimator for a KL in the reward."""
    if config.policy.kl_coef == 0:
        return
    if kl_is_unbiased(config) and not config.train.kl_coef_in_loss:
        fix = "use train.kl_coef_in_loss=true or algorithm.kl_estimator=k3"
        yield f"<algorithm.kl_estimator> has no effect on <policy.kl_coef> in the reward; {fix}."
    if config.train.kl_coef_in_loss and config.algorithm.kl_estimator == "k1":
        fix = "use algorithm.kl_estimator=k3 (or k2), or train.kl_coef_in_loss=false"
        yield f"<policy.kl_coef> with <algorithm.kl_estimator> in the loss has a gradient of mean 0; {fix}."


def options_that_the_objective_does_not_read_keep_their_default(config: Config) -> Iterator[str]:
    for name, (_, default) in changed_options(config).items():
        term = name.removeprefix("algorithm.")
        is_read = surrogate(config.algorithm.objective).reads(term) or (term == "dual_clip" and kl_is_unbiased(config))
        if term in OPTIONS and not is_read:
            fix = f"use {name}={default} or algorithm.objective={readers(term)}"
            yield f"<{name}> has no effect on <algorithm.objective>; {fix}."


def an_entropy_bonus_and_its_tokens_have_an_effect(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.entropy_target is not None and algorithm.entropy_coef > 1:
        yield "<algorithm.entropy_coef> is above 1, the largest that algorithm.entropy_target sets; use 1 or less."
    if algorithm.top_entropy_quantile < 1 and surrogate(algorithm.objective).reads("mask"):
        whole = "but <algorithm.objective> weighs whole responses"
        yield f"<algorithm.top_entropy_quantile> keeps single tokens, {whole}; use algorithm.objective=clipped."


def a_correction_has_bounds_and_an_effect(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    floor, cap = algorithm.correction_floor, algorithm.correction_cap
    if floor > 0 and algorithm.correction == "none":
        fix = "use algorithm.correction_floor=0 or algorithm.correction=token"
        yield f"<algorithm.correction_floor> has no effect on <algorithm.correction>; {fix}."
    if 0 < cap <= floor:
        fix = f"use algorithm.correction_floor={1 / cap if cap > 1 else cap / 2:g}"
        yield f"<algorithm.correction_floor> is not below <algorithm.correction_cap>; {fix}."
    if algorithm.correction != "none" and surrogate(algorithm.objective).weighs_rows:
        ratio = "their own ratio, which <algorithm.correction> multiplies"
        yield f"<algorithm.objective> weighs responses by {ratio}; use algorithm.correction=none."


def an_objective_has_a_ratio_of_its_level_or_is_on_policy(config: Config) -> Iterator[str]:
    """Refuse a ratio per sequence that the objective does not take, or off-policy training without a ratio.

    After the first optimizer step the rest of a batch is off-policy, and only a ratio corrects for that.
    ``algorithm.correction`` corrects only what is off-policy *before* that step.
    """
    train, ratio, objective = config.train, config.algorithm.ratio, surrogate(config.algorithm.objective)
    if objective.reads("log_ratio"):
        if ratio not in objective.ratios:
            others = [name for name, one in SURROGATES.items() if one.reads("log_ratio") and ratio in one.ratios]
            fix = f"use algorithm.ratio=token or algorithm.objective={' or '.join(others)}"
            yield f"<algorithm.objective> takes the ratio per token, not <algorithm.ratio>; {fix}."
        return
    if ratio != "token":
        fix = "leave algorithm.ratio=token or use algorithm.objective=clipped"
        yield f"<algorithm.ratio> has no effect on <algorithm.objective>, which has no ratio; {fix}."
    has_one, size = "or algorithm.objective=cispo, which has a ratio", train.dialog_turns_per_batch
    if train.epochs > 1 or train.optim_batch_size < size:
        several = f"<train.epochs> and <train.optim_batch_size> make several steps of a batch of {size}"
        fix = f"use train.epochs=1 and train.optim_batch_size={size}, {has_one}"
        yield f"<algorithm.objective> is on-policy, but {several}; {fix}."
    if train.max_policy_age > 0:
        yield (
            "<algorithm.objective> is on-policy, but <train.max_policy_age> is not; use train.max_policy_age=0, "
            f"{has_one}."
        )


def old_policies_are_corrected_in_several_epochs(config: Config) -> Iterator[str]:
    """Refuse several epochs on tokens of older policies without a correction: the ratio ignores the tokens' age."""
    train, objective = config.train, surrogate(config.algorithm.objective)
    is_off_policy = train.max_policy_age > 0 and train.epochs > 1 and objective.reads("log_ratio")
    if is_off_policy and config.algorithm.correction == "none":
        fix = "" if objective.weighs_rows else "algorithm.correction=token or "
        ratio = "takes the ratio to recomputed log-probs, which ignore their age"
        yield f"<train.max_policy_age> trains on old tokens, and <train.epochs> {ratio}; use {fix}train.epochs=1."
