"""The records that cross a boundary between rooms: plain values, no behaviour (docs/design.md)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # named in annotations only: a grader's process lives without torch
    import torch


@dataclass(frozen=True)
class Example:
    """One problem: the raw question, the raw gold answer, and other inputs of the scorer (JSON-serialisable).

    ``place`` names its file and row in messages.
    """

    query: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False, repr=False)


#: In ``Example.extra`` of a mixture of tasks: the name of the example's task.
TASK = "mixture/task"
#: In ``Example.extra`` of a task that is several itself (reasoning-gym): the name of the one that made the example.
SUBTASK = "mixture/subtask"
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def task_of_example(extra: Mapping[str, Any]) -> str | None:
    """The task of a mixture that an example belongs to, by its ``extra``; None outside of mixtures."""
    return extra.get(TASK)


def metric_tasks(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks that an example counts for in the metrics: its entry of a mixture, and its subtask.

    A subtask whose name is no metric's name is left out: it comes from data.

    >>> metric_tasks({TASK: "gym", SUBTASK: "chain_sum"}), metric_tasks({SUBTASK: "chain_sum"}), metric_tasks({})
    (('gym', 'gym/chain_sum'), ('chain_sum',), ())
    """
    task, subtask = task_of_example(extra), extra.get(SUBTASK)
    names: tuple[str, ...] = () if task is None else (task,)
    if isinstance(subtask, str) and _NAME.fullmatch(subtask):
        names = (*names, "/".join((*names, subtask)))
    return names


VERDICTS = ("success", "acc", "correct")  # fields of a reward function's result that say whether the response is right
LARGEST = 3.4028234663852886e38  # of float32, in which rewards are kept


@dataclass(frozen=True)
class Score:
    """The graded response.

    Args:
        terms: reward terms by name; None is a term that does not apply to this response and weighs nothing.
        success: whether the response is right.
        error: why the grader failed, if it did.
        info: further results (JSON-serialisable); numbers are logged as metrics, all of it is in the rollouts.
        reply: the turn (``role``, ``content``) that answers the response where a dialog continues; None ends it.
    """

    terms: Mapping[str, float | None]
    success: bool
    error: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    reply: Mapping[str, str] | None = None


def total_reward(terms: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """``sum_k weight_k * term_k`` over the terms that apply; 0 where none does.

    >>> total_reward({"right": 1.0, "brief": None, "form": 0.5}, {"right": 2.0, "brief": 9.0, "form": -1.0})
    1.5
    """
    return sum((weights[name] * value for name, value in terms.items() if value is not None), 0.0)


def rewarded(score: Score) -> Score:
    """The score; an error where no term applies, since a reward of 0 would be a verdict."""
    reason = "NoReward: no term of the reward applies to the response (its functions returned None)"
    return replace(score, error=score.error or reason) if {*score.terms.values()} == {None} else score


class SampledText(str):
    """A response's text with the ids that it was decoded from, for a grader that counts tokens; else a plain text.

    Of a dialog with tools it is the last turn, and ``record`` describes the whole (:class:`Sample`).

    >>> text = SampledText("4", [52, 2])
    >>> import pickle
    >>> text == "4", list(pickle.loads(pickle.dumps(text)).token_ids)
    (True, [52, 2])
    """

    token_ids: array[int]
    record: Mapping[str, Any] | None

    def __new__(
        cls, text: str, token_ids: Iterable[int] | bytes = (), record: Mapping[str, Any] | None = None
    ) -> SampledText:
        made = super().__new__(cls, text)
        made.token_ids, made.record = array("i", token_ids), record
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledText, (str(self), self.token_ids.tobytes(), self.record)


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn.

    Args:
        max_tokens: most tokens of one response, EOS included.
        temperature: logits are divided by it; 0 means greedy.
        top_p: nucleus mass, 1 keeps every token.
        top_k: number of most likely tokens kept, 0 keeps every token.
        min_p: least probability of a token that is kept, as a share of that of the most likely one; 0 keeps every one.
        ignore_eos: keep sampling to ``max_tokens`` even after EOS (benchmarks).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary; greedy is a choice of its own."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to be sampled ``num_samples`` times.

    Sample ``i`` is drawn from the random stream ``sample_seed(seed, first_sample + i)``, so that it depends on no other
    request, and a group may be sampled in parts. ``example`` grades an episode between its turns; engines do not read
    it.
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int
    example: Example | None = None
    first_sample: int = 0


#: Most tokens of a sampling support, 4 KiB of ids: larger supports would take more than the rest of a sample.
MAX_SUPPORT = 1024


class SamplingSupport(NamedTuple):
    """The sampling support of each token of a response, where sampling was truncated.

    ``ids`` int32 ``[K]``, set after set, each with the token that was drawn; ``counts`` int32 ``[R]``, tokens of each
    set, 0 for a token that the policy did not draw.
    """

    ids: torch.Tensor
    counts: torch.Tensor

    def first(self, num_tokens: int) -> SamplingSupport:
        """Those of the first tokens of the response."""
        counts = self.counts[:num_tokens].clone()
        return SamplingSupport(self.ids[: int(counts.sum())].clone(), counts)


@dataclass(frozen=True)
class Sample:
    """One response: ids ``[R]`` (EOS included), log-probs ``[R]`` f32, policy version of each token ``[R]``.

    ``truncated`` is True when the engine stopped for length, never inferred from the ids. In an episode of several
    turns ``assistant_mask`` ``[R]`` is False on the tokens of user and tool turns, of log-prob 0 and version -1; None
    means that the policy produced every token. ``record`` (JSON-serialisable) is what an episode with tools passes to
    its grader (:class:`~sota_grpo.envs.dialogs.ToolEpisode`); of another dialog of several turns it is ``replies``, the
    environment's turns (``role``, ``content``). ``support`` is set where sampling was truncated and the engine reports
    it; log-probs are then those over the supports. ``text`` is the response without end tokens and padding, where a
    rollout worker has decoded it.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    versions: torch.Tensor
    truncated: bool
    assistant_mask: torch.Tensor | None = None
    record: Mapping[str, Any] | None = None
    support: SamplingSupport | None = None
    text: str | None = None


@dataclass(frozen=True)
class GroupOutput:
    """The finished group: ``samples[i]`` is sample ``first_sample + i`` of the request.

    ``prompt_ids`` is what its samples follow, None where that is the request's.
    """

    group_id: int
    samples: tuple[Sample, ...]
    prompt_ids: tuple[int, ...] | None = None


TURNS = "turns"  #: How a dialog with tools ends whose last turn (``env.max_steps``) still called


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def sample_seed(*numbers: int) -> int:
    """Mix integers into one 62-bit seed (splitmix64's finaliser over each part in turn; Steele et al. 2014).

    Deterministic, order-sensitive, and without collisions on small inputs.

    >>> sample_seed(0, 7, 1) == sample_seed(0, 7, 1), sample_seed(0, 7, 1) == sample_seed(0, 1, 7)
    (True, False)
    """
    state = 0
    for number in numbers:
        state = (state + _GOLDEN_GAMMA + (number & _MASK_64)) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state & ((1 << 62) - 1)


class GradientGap(NamedTuple):
    """Two gradients of the same rows: the norm of the first, and of their difference over it.

    ``single``: both were computed in float32.
    """

    norm: float
    relative: float
    single: bool
