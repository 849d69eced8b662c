"""The metrics of a run: each is a name, a reduction, a sentence and a unit; nothing else may be written.

Names of values that depend on the clock or the machine begin with ``time/`` or ``system/`` or end in ``_per_s``, so
that two runs can be compared exactly on all others.
"""

from __future__ import annotations

import difflib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "max", "sum", "last"]


@dataclass(frozen=True)
class Metric:
    """One quantity of a run."""

    name: str  # key in metrics.jsonl
    reduction: Reduction  # how the values of one step's optimizer steps combine into the step's value
    sentence: str
    unit: str = ""  # empty for a pure number; a share is a number in [0, 1]


#: Metrics of each task: of a mixture, of reasoning-gym, or of reasoning-gym within an entry of a mixture.
OF_TASK = ("reward", "success", "truncated", "response_tokens", "responses")
_TASK = r"[A-Za-z_][\w-]*"
#: Patterns of the placeholders in names; in a mixture the name of the task precedes that of a term or number.
_PLACEHOLDERS = {
    "<term>": rf"({_TASK}/)?[A-Za-z_][\w.-]*",
    "<name>": rf"({_TASK}/)?[\w.-]+",
    "<task>": rf"{_TASK}(/{_TASK})?",
}

_DECLARED = (
    Metric("step", "last", "Training step, counted from 0."),
    Metric("version", "last", "Publishes so far: the version of the policy that the engines serve."),
    Metric("optimizer_steps", "last", "Optimizer steps since the run began."),
    Metric("skipped_steps", "sum", "Optimizer steps that the fp16 gradient scaler skipped; not in optimizer_steps."),
    Metric("packed", "last", "1 where the learner computes packed rows, each prompt once; 0 where it pads them."),
    Metric("loss_scale", "last", "Factor of the fp16 gradient scaler in the last optimizer step."),
    Metric("dialog_turns", "last", "Responses trained on since the run began.", "responses"),
    Metric("reward", "mean", "Mean reward of the batch's responses."),
    Metric("reward/std", "mean", "Standard deviation (ddof=0) of the batch's rewards."),
    Metric("reward/<term>", "mean", "Mean of one reward term before its weight."),
    Metric("success", "mean", "Share of responses with the right answer.", "share"),
    Metric(
        "grader/<name>",
        "mean",
        "Mean of a number that the grader returned besides the terms, over the responses that have it.",
    ),
    Metric("grader/tool_calls", "mean", "Calls of tools in a dialog.", "calls"),
    Metric("grader/tool_errors", "mean", "Calls of tools in a dialog that failed, or could not be made.", "calls"),
    Metric("grader/ended_by_turns", "mean", "Share of dialogs whose last turn still called (env.max_steps).", "share"),
    Metric("task/<task>/reward", "mean", "Mean reward of the responses to one task of a mixture, or of reasoning-gym."),
    Metric("task/<task>/success", "mean", "Share of its responses with the right answer.", "share"),
    Metric("task/<task>/truncated", "mean", "Share of its responses that the engine stopped for length.", "share"),
    Metric("task/<task>/response_tokens", "mean", "Mean length of its responses, their EOS included.", "tokens"),
    Metric("task/<task>/responses", "sum", "Its responses in the batch.", "responses"),
    Metric("reward_errors", "sum", "Responses whose grader failed or timed out.", "responses"),
    Metric("reward_timeouts", "sum", "Responses whose grader timed out.", "responses"),
    Metric("judge/requests", "sum", "Requests that the judge answered since the last step.", "requests"),
    Metric("judge/cached", "sum", "Questions that the judge had answered before, or that were open.", "questions"),
    Metric("judge/retries", "sum", "Requests to the judge that were made again.", "requests"),
    Metric("judge/latency_s", "mean", "Mean time of a request that the judge answered.", "s"),
    Metric("judge/prompt_tokens", "sum", "Tokens that the judge read, as it counts them.", "tokens"),
    Metric("judge/completion_tokens", "sum", "Tokens that the judge said, as it counts them.", "tokens"),
    Metric("advantage", "mean", "Mean absolute advantage of the batch's responses."),
    Metric("kl", "mean", "KL of the policy from the reference, per token, by the configured estimator.", "nats"),
    Metric(
        "distill/reverse_kl",
        "mean",
        "KL(policy that sampled, teacher), k1, per token: the mean is right, single steps may fall below 0.",
        "nats",
    ),
    Metric("entropy", "mean", "Entropy of the policy's next-token distribution, per token.", "nats"),
    Metric("entropy_coef", "mean", "Coefficient of the entropy bonus, where algorithm.entropy_target adapts it."),
    Metric("entropy_threshold", "mean", "Least entropy that algorithm.top_entropy_quantile keeps, per token.", "nats"),
    Metric("ess", "mean", "Effective sample size of the importance weights over the number of tokens.", "share"),
    Metric("clip_fraction", "mean", "Share of tokens whose gradient the clip removes.", "share"),
    Metric("correction_fraction", "mean", "Share of tokens whose correction weight exceeded its bounds.", "share"),
    Metric("off_policy_fraction", "mean", "Share of tokens that algorithm.off_policy_threshold leaves out.", "share"),
    Metric("kl_approx", "mean", "Mean of logp_behaviour - logp of the sampled tokens.", "nats"),
    Metric(
        "gradient_share/max_token",
        "max",
        "Largest share of one token in the squared derivatives of the loss by the tokens' log-probs.",
        "share",
    ),
    Metric("grad_norm", "mean", "Global gradient norm before clipping."),
    Metric("lr", "last", "Learning rate that the last optimizer step used."),
    Metric("loss/objective", "mean", "Policy term of the loss."),
    Metric("loss/kl", "mean", "KL term of the loss, its coefficient included."),
    Metric("loss/entropy", "mean", "Entropy term of the loss, its coefficient included."),
    Metric("policy_age/mean", "mean", "Mean age of the trained responses' oldest tokens.", "versions"),
    Metric("policy_age/max", "max", "Largest age of a trained token.", "versions"),
    Metric("response_tokens/mean", "mean", "Mean length of a response, its EOS included.", "tokens"),
    Metric("response_tokens/max", "max", "Longest response, its EOS included.", "tokens"),
    Metric("turns/mean", "mean", "Mean number of turns that the policy has in a dialog.", "turns"),
    Metric("turn_tokens/mean", "mean", "Mean length of one turn of the policy.", "tokens"),
    Metric("prompt_tokens/mean", "mean", "Mean length of a prompt.", "tokens"),
    Metric("kept_tokens", "mean", "Tokens that a sampled one was drawn from, with top_p, top_k or min_p.", "tokens"),
    Metric("truncated", "mean", "Share of responses that the engine stopped for length.", "share"),
    Metric("groups/zero_advantage", "sum", "Groups whose rewards are all equal.", "groups"),
    Metric("groups/refilled", "sum", "Zero-advantage groups that dynamic sampling replaced.", "groups"),
    Metric("groups/trained", "sum", "Groups in the batch.", "groups"),
    Metric(
        "groups/in_flight", "last", "Groups being sampled, graded or at the reference when a batch was taken.", "groups"
    ),
    Metric("groups/ready", "last", "Finished groups left in the buffer when a batch was taken.", "groups"),
    Metric("workers/restarts", "last", "Worker processes that were replaced since the run began.", "processes"),
    Metric("workers/requeued", "last", "Tasks given to another worker because theirs was lost.", "tasks"),
    Metric(
        "mismatch_kl",
        "mean",
        "KL(engine, trainer), no dropout, k3, per token; tokens of an older policy (policy_age) bring its drift along.",
        "nats",
    ),
    Metric("eval/accuracy", "last", "Held-out accuracy of the greedy answer.", "share"),
    Metric(
        "eval/first_turn_accuracy",
        "last",
        "Accuracy of the first turns, before a wrong answer gets another turn (env.reasoning).",
        "share",
    ),
    Metric("eval/stderr", "last", "Standard error of eval/accuracy over problems.", "share"),
    Metric("eval/avg_at_k", "last", "Held-out accuracy, mean of k samples at temperature 1.", "share"),
    Metric("eval/avg_at_k_stderr", "last", "Standard error of eval/avg_at_k over problems.", "share"),
    Metric("eval/reward", "last", "Mean reward of the greedy responses to held-out problems."),
    Metric("eval/reward_stderr", "last", "Standard error of eval/reward over problems."),
    Metric("eval/reward/<term>", "last", "Mean of one reward term of those responses, before its weight."),
    Metric(
        "eval/task/<name>",
        "last",
        "An accuracy of the task's benchmark, greedy (ifeval: prompts); of a mixture, a task's.",
        "share",
    ),
    Metric("eval/task_stderr/<name>", "last", "Standard error of that accuracy over problems.", "share"),
    Metric("eval/grader_errors", "sum", "Evaluated responses whose grader failed or timed out.", "responses"),
    Metric("eval/num_samples", "last", "Held-out problems measured.", "problems"),
    Metric("time/step_s", "sum", "Wall-clock time of the whole step.", "s"),
    Metric("time/generate_s", "sum", "Time in which responses were being sampled.", "s"),
    Metric("time/score_s", "sum", "Time in which rewards were waited for.", "s"),
    Metric("time/ref_s", "sum", "Time in which reference log-probs were being computed.", "s"),
    Metric("time/wait_s", "sum", "Time that the learner waited for a batch, during which other phases run.", "s"),
    Metric("time/learn_s", "sum", "Time of forward, backward and optimizer steps.", "s"),
    Metric("time/publish_s", "sum", "Time until every engine served the new weights.", "s"),
    Metric("time/checkpoint_s", "sum", "Time to write a checkpoint.", "s"),
    Metric("time/store_s", "sum", "Time to look at a step that is kept whole, and to write it.", "s"),
    Metric("time/eval_s", "sum", "Time of a held-out evaluation.", "s"),
    Metric("system/memory_gib", "last", "Resident memory of the run's own process.", "GiB"),
    Metric("system/host_memory", "last", "Memory of this machine that is in use.", "share"),
    Metric("system/cpu", "last", "Cores of this machine that were busy since the last step.", "share"),
    Metric("system/gpu_memory_gib", "last", "Most GPU memory that the run's own process has reserved so far.", "GiB"),
    Metric("system/gpu", "last", "Utilisation of the visible GPUs, their mean (NVML; where nvidia-ml-py is).", "share"),
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


def declared(name: str) -> Metric:
    """Return the metric of that name, or of its family, ``reward/<term>`` for example.

    Raises:
        ValueError: there is none; the message has a similar name.

    >>> declared("kl").reduction, declared("reward/format").name
    ('mean', 'reward/<term>')
    """
    if name not in _PATTERNS and name in METRICS:
        return METRICS[name]
    for family, pattern in _PATTERNS.items():
        if pattern.fullmatch(name):
            without_task = f"{name.partition('/')[0]}/{name.rpartition('/')[2]}"
            return METRICS.get(without_task if family == "grader/<name>" else family, METRICS[family])
    near = difflib.get_close_matches(name, METRICS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"The metric {name!r} is not declared in recording/metrics.py.{hint}")


def term_metric(term: str) -> str:
    """Return the metric's name for a reward term.

    Raises:
        ValueError: another metric has that name, or it has characters that no name may have.

    >>> term_metric("format")
    'reward/format'
    """
    name = f"reward/{term}"
    if name in METRICS or not _PATTERNS["reward/<term>"].fullmatch(name):
        raise ValueError(f"The reward term {term!r} cannot be logged as {name!r}: rename it (letters, digits, . _ -).")
    return name


def info_metric(name: str, task: str | None = None) -> str:
    """Return the metric's name for a number of a grader, in a ``task`` of a mixture or in none.

    >>> info_metric("acc"), info_metric("pass rate", "maths")
    ('grader/acc', 'grader/maths/pass_rate')
    """
    return ("grader/" if task is None else f"grader/{task}/") + (re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "_")


def is_number(value: object) -> bool:
    """Return whether a grader's value can be averaged; a truth value counts as 0 or 1.

    >>> is_number(True), is_number(0.5), is_number("0.5"), is_number(float("nan"))
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def reduce_updates(updates: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Combine the metrics of a step's optimizer steps by their reductions; None where no update measured one.

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
