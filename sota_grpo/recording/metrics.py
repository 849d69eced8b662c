"""The list of all metrics of a run: name, reduction, sentence and unit. A name that is not listed cannot be logged.

Metrics that begin with ``time/`` or ``system/`` or end in ``_per_s`` depend on the clock or the machine.
"""

from __future__ import annotations

import difflib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reduction = Literal["mean", "max", "sum", "last"]


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric, or of a family of metrics; docs/logging.md lists them."""

    name: str  # key in metrics.jsonl
    reduction: Reduction  # how the values of one step's optimizer steps combine into the step's value
    sentence: str
    unit: str = ""  # empty for a pure number; a fraction is in [0, 1]


_TASK = r"[A-Za-z_][\w-]*"
#: Patterns of the placeholders in names; in a mixture the task's name precedes the name of a term or number.
_PLACEHOLDERS = {
    "<term>": rf"({_TASK}/)?[A-Za-z_][\w.-]*",
    "<name>": rf"({_TASK}/)?(?u:[\w.-])+",
    "<task>": rf"{_TASK}(/{_TASK})?",
}

_DECLARED = (
    Metric("step", "last", "Training step, counted from 0."),
    Metric("version", "last", "Weight syncs since the run began: the policy version that the engines serve."),
    Metric("optimizer_steps", "last", "Optimizer steps since the run began."),
    Metric("skipped_steps", "sum", "Optimizer steps that the fp16 gradient scaler skipped; not in optimizer_steps."),
    Metric("packed", "last", "1 if the learner packs rows and computes a shared prompt once; 0 if it pads rows."),
    Metric("loss_scale", "last", "Factor of the fp16 gradient scaler in the last optimizer step."),
    Metric("dialog_turns", "last", "Responses trained on since the run began.", "responses"),
    Metric("reward", "mean", "Mean reward of the batch's responses."),
    Metric("reward/std", "mean", "Standard deviation (ddof=0) of the batch's rewards."),
    Metric("reward/<term>", "mean", "Mean of one reward term before its weight."),
    Metric("success", "mean", "Fraction of responses with the right answer.", "fraction"),
    Metric("grader/<name>", "mean", "Mean of a further number of the grader, over the responses that have it."),
    Metric("grader/tool_calls", "mean", "Mean number of tool calls in a dialog.", "calls"),
    Metric("grader/tool_errors", "mean", "Mean number of failed or invalid tool calls in a dialog.", "calls"),
    Metric("grader/ended_by_turns", "mean", "Fraction of dialogs ended by env.max_steps at a tool call.", "fraction"),
    Metric("task/<task>/reward", "mean", "Mean reward of the responses to one task of a mixture, or of reasoning-gym."),
    Metric("task/<task>/success", "mean", "Fraction of the task's responses with the right answer.", "fraction"),
    Metric("task/<task>/truncated", "mean", "Fraction of the task's responses cut at a length limit.", "fraction"),
    Metric("task/<task>/response_tokens", "mean", "Mean length of the task's responses, EOS included.", "tokens"),
    Metric("task/<task>/responses", "sum", "Number of the task's responses in the batch.", "responses"),
    Metric("reward_errors", "sum", "Responses whose grader failed or timed out.", "responses"),
    Metric("reward_timeouts", "sum", "Responses whose grader timed out.", "responses"),
    Metric("judge/requests", "sum", "Requests that the judge answered since the last step.", "requests"),
    Metric("judge/cached", "sum", "Questions whose verdict was cached or already requested.", "questions"),
    Metric("judge/retries", "sum", "Repeated requests to the judge.", "requests"),
    Metric("judge/latency_s", "mean", "Mean time of a request that the judge answered.", "s"),
    Metric("judge/prompt_tokens", "sum", "Prompt tokens, as the judge's server counts them.", "tokens"),
    Metric("judge/completion_tokens", "sum", "Generated tokens, as the judge's server counts them.", "tokens"),
    Metric("advantage", "mean", "Mean absolute advantage of the batch's responses."),
    Metric("kl", "mean", "KL(policy, reference) per token, by the estimator algorithm.kl_estimator.", "nats"),
    Metric("distill/reverse_kl", "mean", "KL(sampling policy, teacher) per token, k1: noisy, may be negative.", "nats"),
    Metric("entropy", "mean", "Entropy of the policy's next-token distribution, per token.", "nats"),
    Metric("entropy_coef", "mean", "Coefficient of the entropy bonus, if algorithm.entropy_target adapts it."),
    Metric("entropy_threshold", "mean", "Smallest token entropy that algorithm.top_entropy_quantile keeps.", "nats"),
    Metric("ess", "mean", "Effective sample size of importance weights over the number of tokens.", "fraction"),
    Metric("clip_fraction", "mean", "Fraction of tokens whose gradient is removed by clipping.", "fraction"),
    Metric("correction_fraction", "mean", "Fraction of tokens with a correction weight out of bounds.", "fraction"),
    Metric("off_policy_fraction", "mean", "Fraction of tokens excluded by algorithm.off_policy_threshold.", "fraction"),
    Metric("kl_approx", "mean", "Mean of logp_behaviour - logp of the sampled tokens.", "nats"),
    Metric(
        "gradient_share/max_token", "max", "Largest share of one token in the sum of (d loss / d logp)^2.", "fraction"
    ),
    Metric("grad_norm", "mean", "Global gradient norm before clipping."),
    Metric("lr", "last", "Learning rate that the last optimizer step used."),
    Metric("loss/objective", "mean", "Policy term of the loss."),
    Metric("loss/kl", "mean", "KL term of the loss, its coefficient included."),
    Metric("loss/entropy", "mean", "Entropy term of the loss, its coefficient included."),
    Metric("policy_age/mean", "mean", "Mean over responses of the age of their oldest token.", "versions"),
    Metric("policy_age/max", "max", "Largest age of a trained token.", "versions"),
    Metric("response_tokens/mean", "mean", "Mean length of a response, EOS included.", "tokens"),
    Metric("response_tokens/max", "max", "Longest response, EOS included.", "tokens"),
    Metric("turns/mean", "mean", "Mean number of turns of the policy in a dialog.", "turns"),
    Metric("turn_tokens/mean", "mean", "Mean length of one turn of the policy.", "tokens"),
    Metric("prompt_tokens/mean", "mean", "Mean length of a prompt.", "tokens"),
    Metric("kept_tokens", "mean", "Mean sampling support: tokens left by top_p, top_k or min_p.", "tokens"),
    Metric("truncated", "mean", "Fraction of responses that were cut at a length limit.", "fraction"),
    Metric("groups/zero_advantage", "sum", "Groups whose rewards are all equal.", "groups"),
    Metric("groups/refilled", "sum", "Zero-advantage groups that dynamic sampling replaced.", "groups"),
    Metric("groups/trained", "sum", "Groups in the batch.", "groups"),
    Metric("groups/in_flight", "last", "Groups being sampled, graded or scored when a batch was taken.", "groups"),
    Metric("groups/ready", "last", "Finished groups left in the buffer when a batch was taken.", "groups"),
    Metric("workers/restarts", "last", "Worker processes that were replaced since the run began.", "processes"),
    Metric("workers/requeued", "last", "Tasks moved to another worker because their worker was lost.", "tasks"),
    Metric("mismatch_kl", "mean", "KL(engine, trainer) per token, k3, no dropout; policy_age > 0 adds to it.", "nats"),
    Metric("eval/accuracy", "last", "Accuracy of the greedy responses to held-out problems.", "fraction"),
    Metric("eval/first_turn_accuracy", "last", "Greedy accuracy of the first turns alone (env.reasoning).", "fraction"),
    Metric("eval/stderr", "last", "Standard error of eval/accuracy over problems.", "fraction"),
    Metric("eval/avg_at_k", "last", "Held-out accuracy, mean of k responses at temperature 1.", "fraction"),
    Metric("eval/avg_at_k_stderr", "last", "Standard error of eval/avg_at_k over problems.", "fraction"),
    Metric("eval/reward", "last", "Mean reward of the greedy responses to held-out problems."),
    Metric("eval/reward_stderr", "last", "Standard error of eval/reward over problems."),
    Metric("eval/reward/<term>", "last", "Mean of one reward term of the greedy responses, before its weight."),
    Metric("eval/task/<name>", "last", "Greedy accuracy of a benchmark (ifeval: 4) or a mixture's task.", "fraction"),
    Metric("eval/task_stderr/<name>", "last", "Standard error of eval/task/<name> over problems.", "fraction"),
    Metric("eval/grader_errors", "sum", "Evaluated responses whose grader failed or timed out.", "responses"),
    Metric("eval/num_samples", "last", "Number of held-out problems that were evaluated.", "problems"),
    Metric("time/step_s", "sum", "Wall-clock time of the whole step.", "s"),
    Metric("time/generate_s", "sum", "Time in which responses were being sampled.", "s"),
    Metric("time/score_s", "sum", "Time in which some rewards were pending.", "s"),
    Metric("time/ref_s", "sum", "Time in which reference log-probs were being computed.", "s"),
    Metric("time/wait_s", "sum", "Time in which the learner waited for a batch; other phases run concurrently.", "s"),
    Metric("time/learn_s", "sum", "Time of forward, backward and optimizer steps.", "s"),
    Metric("time/publish_s", "sum", "Time until every engine served the new weights.", "s"),
    Metric("time/eval_s", "sum", "Time of a held-out evaluation.", "s"),
    Metric("system/memory_gib", "last", "Resident memory of the run's own process.", "GiB"),
    Metric("system/host_memory", "last", "Fraction of this machine's memory in use.", "fraction"),
    Metric("system/cpu", "last", "Fraction of this machine's cores that were busy since the last step.", "fraction"),
    Metric("system/gpu_memory_gib", "last", "Most GPU memory that the run's own process has reserved so far.", "GiB"),
    Metric("system/gpu", "last", "Mean utilisation of the visible GPUs (NVML; needs nvidia-ml-py).", "fraction"),
    Metric("tokens_per_s", "mean", "Response tokens of the batch over the time of the step.", "tokens/s"),
)

METRICS: dict[str, Metric] = {item.name: item for item in _DECLARED}
_PATTERNS = {
    name: re.compile(re.sub("<.*>", lambda match: _PLACEHOLDERS[match[0]], name), re.ASCII)
    for name in METRICS
    if "<" in name
}

_REDUCE: dict[Reduction, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "sum": sum,
    "last": lambda values: values[-1],
}


def known(name: str) -> Metric | None:
    """Return the metric ``name``, or its family, such as ``reward/<term>``; None for a family, or if neither is listed.

    >>> known("kl").reduction, known("reward/format").name, known("eval/acuracy")
    ('mean', 'reward/<term>', None)
    """
    if name in METRICS:
        return None if name in _PATTERNS else METRICS[name]
    family = next((family for family, pattern in _PATTERNS.items() if pattern.fullmatch(name)), "")
    without_task = f"{name.partition('/')[0]}/{name.rpartition('/')[2]}" if family == "grader/<name>" else family
    return METRICS.get(without_task, METRICS.get(family))


def declared(name: str) -> Metric:
    """Return the metric ``name`` or its family (:func:`known`); ValueError if there is none."""
    if (metric := known(name)) is not None:
        return metric
    if name in _PATTERNS:
        raise ValueError(f"The metric {name!r} is a family, which has no values; log one with a name for <..>.")
    near = difflib.get_close_matches(name, METRICS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"The metric {name!r} is not declared in sota_grpo/recording/metrics.py.{hint}")


def term_metric(term: str) -> str:
    """Return the metric's name for the reward term ``term``.

    ValueError if another metric has that name, or ``term`` has or begins with a character that is not allowed.

    >>> term_metric("format")
    'reward/format'
    """
    name = f"reward/{term}"
    fault = "another metric has that name" if name in METRICS else ""
    if not _PATTERNS["reward/<term>"].fullmatch(name):
        fault = "a term has ASCII letters, digits, . _ and -, and begins with a letter or _"
    if fault:
        raise ValueError(f"The reward term {term!r} cannot be logged as {name!r}: {fault}; rename it.")
    return name


def info_metric(name: str, task: str | None = None) -> str:
    """Return the metric of a grader's number ``name`` (of ``task`` in a mixture), with ``_`` for odd characters.

    Letters and digits of all alphabets are kept.

    >>> info_metric("长度"), info_metric("pass rate", "maths")
    ('grader/长度', 'grader/maths/pass_rate')
    """
    return ("grader/" if task is None else f"grader/{task}/") + (re.sub(r"[^\w.-]", "_", name) or "_")


def is_number(value: object) -> bool:
    """Return whether a grader's value is an int or float that can be averaged; a bool counts as 0 or 1.

    NaN cannot, nor can numbers from 1e300 on, whose sum may be too large for a float.

    >>> is_number(True), is_number(0.5), is_number("0.5"), is_number(float("nan")), is_number(1e308)
    (True, True, False, False, False)
    """
    return isinstance(value, (int, float)) and abs(value) < 1e300


def responses_trained(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of responses trained on since the run began: the largest ``dialog_turns`` in ``rows``, or 0."""
    return int(max((row["dialog_turns"] for row in rows if is_number(row.get("dialog_turns"))), default=0))


def reduce_updates(updates: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Combine metrics of a step's optimizer steps by their reductions (:func:`declared`); None for one without values.

    >>> reduce_updates([{"kl": 1.0, "policy_age/max": 2}, {"kl": 3.0, "policy_age/max": 1, "lr": 0.1}])
    {'kl': 2.0, 'policy_age/max': 2, 'lr': 0.1}
    """
    measured: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values = measured.setdefault(name, [])
            if value is not None:
                values.append(value)
    return {name: _REDUCE[declared(name).reduction](values) if values else None for name, values in measured.items()}
