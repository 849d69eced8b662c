"""Rules that a config must keep, each named as the rule it states.

A rule returns None, or one sentence that gives the values involved and the smallest fix. None of them edits anything.
"""

from __future__ import annotations

from collections.abc import Callable

from sota_grpo.config import Config
from sota_grpo.errors import UserError
from sota_grpo.validators import processes, rules, tasks

Rule = Callable[[Config], str | None]

RULES: tuple[Rule, ...] = (
    rules.every_choice_is_one_of_its_values,
    rules.every_amount_is_positive,
    rules.every_coefficient_is_not_negative,
    rules.probabilities_are_shares,
    rules.decays_and_dropout_leave_something,
    rules.a_collection_is_made_of_whole_groups,
    rules.a_collection_is_made_of_whole_optimizer_steps,
    rules.the_run_has_at_least_one_turn,
    rules.sampling_is_the_policys_own_distribution,
    rules.a_group_baseline_has_siblings,
    rules.dynamic_sampling_has_group_signal,
    rules.overlong_buffer_fits_the_response,
    rules.the_kl_in_the_loss_has_a_gradient,
    rules.difficulty_is_one_to_four,
    rules.the_dual_clip_bounds_a_clipped_ratio,
    rules.reinforce_has_no_ratio,
    rules.reinforce_steps_once_per_collection,
    rules.the_loss_scaler_has_float32_gradients,
    tasks.options_that_the_task_does_not_read_keep_their_default,
    tasks.reward_functions_replace_the_tasks_own_terms,
    tasks.a_size_chooses_a_model_that_has_no_name,
    tasks.a_table_has_a_place,
    tasks.several_turns_have_something_to_say,
    tasks.every_reward_function_has_a_weight,
    processes.devices_are_counted_or_named,
    processes.lockstep_has_no_age,
    processes.lockstep_publishes_after_every_collection,
    processes.a_publish_is_made_of_whole_groups,
    processes.an_old_policy_needs_a_ratio,
    processes.a_copy_of_the_model_fills_its_devices,
    processes.a_url_belongs_to_a_server,
    processes.a_url_is_one_engine,
    processes.a_server_started_here_has_gpus_of_its_own,
    processes.a_broadcast_of_weights_has_whole_engines,
)


class ConfigError(UserError, ValueError):
    """The config cannot be run; the message says why and what to change."""


def validate(config: Config) -> None:
    """Raise :class:`ConfigError` with the sentence of the first rule that ``config`` breaks."""
    for rule in RULES:
        sentence = rule(config)
        if sentence:
            raise ConfigError(sentence)
