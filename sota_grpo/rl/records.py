"""Plain records that the packages exchange: examples, requests, samples, scores (docs/design.md)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # annotations only: grading processes do not import torch
    import torch


@dataclass(frozen=True)
class Example:
    """One problem: question, gold answer, further JSON inputs of the scorer (``extra``), file and row (``place``)."""

    query: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False, repr=False)


#: Key in ``Example.extra``: the name of the example's task in a mixture.
TASK = "mixture/task"
#: Key in ``Example.extra``: the name of the subtask that made the example (reasoning-gym).
SUBTASK = "mixture/subtask"
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def metric_tasks(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the tasks whose metrics an example counts for: its task in a mixture, and its subtask.

    A subtask is omitted if its name, which comes from the data, is not a valid metric name.

    >>> metric_tasks({TASK: "gym", SUBTASK: "chain_sum"}), metric_tasks({SUBTASK: "chain_sum"}), metric_tasks({})
    (('gym', 'gym/chain_sum'), ('chain_sum',), ())
    """
    task, subtask = extra.get(TASK), extra.get(SUBTASK)
    names: tuple[str, ...] = () if task is None else (task,)
    if isinstance(subtask, str) and _NAME.fullmatch(subtask):
        names = (*names, "/".join((*names, subtask)))
    return names


VERDICTS = ("success", "acc", "correct")  # entries of a reward function's dict that decide success
LARGEST = 3.4028234663852886e38  # largest float32, the dtype of stored rewards


@dataclass(frozen=True)
class Score:
    """The grade of a response.

    Args:
        terms: reward terms by name; None: the term does not apply to this response and does not count.
        success: whether the response is right.
        error: why grading failed; None if it did not.
        info: further results (JSON-serialisable), stored with the rollouts; numbers are logged as metrics.
        reply: the turn (``role``, ``content``) that answers the response in a multi-turn dialog; None ends the dialog.
    """

    terms: Mapping[str, float | None]
    success: bool
    error: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    reply: Mapping[str, str] | None = None


def total_reward(terms: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Return ``sum_k weight_k * term_k`` over the terms that apply; 0 if none does; KeyError if one has no weight.

    >>> total_reward({"right": 1.0, "brief": None, "form": 0.5}, {"right": 2.0, "brief": 9.0, "form": -1.0})
    1.5
    """
    return sum((weights[name] * value for name, value in terms.items() if value is not None), 0.0)


def rewarded(score: Score) -> Score:
    """Return the score, with an error if every term is None: such a response must not count as reward 0."""
    reason = "NoReward: no term of the reward applies to the response (its functions returned None)"
    return replace(score, error=score.error or reason) if {*score.terms.values()} == {None} else score


class SampledText(str):
    """A response's text as a ``str`` that also has its token ids, for graders that count tokens.

    In a multi-turn dialog text and ids are those of the last turn; ``record`` describes all turns (:class:`Sample`).
    ``thinks``: the prompt ends in an opened thinking block, in which the response begins.

    >>> text = SampledText("4", [52, 2])
    >>> import pickle
    >>> text == "4", list(pickle.loads(pickle.dumps(text)).token_ids)
    (True, [52, 2])
    """

    token_ids: array[int]
    record: Mapping[str, Any] | None
    thinks: bool

    def __new__(
        cls,
        text: str,
        token_ids: Iterable[int] | bytes = (),
        record: Mapping[str, Any] | None = None,
        thinks: bool = False,
    ) -> SampledText:
        made = super().__new__(cls, text)
        made.token_ids, made.record, made.thinks = array("i", token_ids), record, thinks
        return made


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        max_tokens: maximum number of tokens of a response (in a dialog: of one turn), EOS included.
        temperature: divisor of the logits; 0 means greedy decoding. A loop's loss and reference need the same one:
            ``GRPOLoss(CausalPolicy(model, temperature=0.7))``.
        top_p: nucleus probability; 1 keeps all tokens.
        top_k: number of most likely tokens kept; 0 keeps all tokens.
        min_p: minimum probability of a kept token, relative to the most likely token; 0 keeps all tokens.
        ignore_eos: continue to ``max_tokens`` after EOS (for benchmarks).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether top_p, top_k or min_p restricts the vocabulary; False for greedy decoding."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class GroupRequest:
    """Request for ``num_samples`` responses to one prompt.

    The random stream of sample ``i`` depends only on ``seed`` and ``first_sample + i``, so a group can be sampled in
    several requests. ``example`` is needed by engines that run dialogs or agents; engines of one response ignore it.
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int
    example: Example | None = None
    first_sample: int = 0


#: Maximum size of the sampling support of a token (4 KiB of ids), to limit memory per sample.
MAX_SUPPORT = 1024


class SamplingSupport(NamedTuple):
    """The sampling support of each token of a response: the tokens that top_p, top_k and min_p kept.

    ``counts`` int32 ``[R]``: size of each support, 0 for a token that the policy did not sample. ``ids`` int32 ``[K]``,
    ``K = sum(counts)``: the supports concatenated; each includes the sampled token.
    """

    ids: torch.Tensor
    counts: torch.Tensor

    def first(self, num_tokens: int) -> SamplingSupport:
        """Return a copy of the supports of the first ``num_tokens`` tokens."""
        counts = self.counts[:num_tokens].clone()
        return SamplingSupport(self.ids[: int(counts.sum())].clone(), counts)


@dataclass(frozen=True)
class Sample:
    """One response: ids ``[R]`` (EOS included), log-probs ``[R]`` f32, policy version of each token ``[R]``.

    ``truncated``: the engine stopped at the length limit (in a :class:`~sota_grpo.envs.TaskEnv`: there is no end
    token), or the context had no room for the dialog's next turn. ``assistant_mask`` ``[R]`` is False on tokens that
    the policy did not sample (other turns, or the part of the prompt that the group does not share), which have
    log-prob 0 and version -1; None: the policy sampled every token. ``record`` (JSON-serialisable): with tools, see
    :class:`~sota_grpo.envs.dialogs.ToolEpisode`; of an agent, see :class:`~sota_grpo.envs.agents.GroupEpisodes`; in
    other multi-turn dialogs, ``replies``, the turns (``role``, ``content``) that answered the policy. ``support``: the
    sampling support, if top_p, top_k or min_p restrict sampling and the engine returns it; the log-probs are then
    normalised over it. ``text``: the decoded response (of a dialog: the last turn) without end tokens and padding, if
    a rollout worker has decoded it. ``parents`` int64 ``[R]``, of an agent's sample, whose requests form a tree: the
    position of each token's predecessor, counted in prompt + response; -1: the token begins another prompt.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    versions: torch.Tensor
    truncated: bool
    assistant_mask: torch.Tensor | None = None
    record: Mapping[str, Any] | None = None
    support: SamplingSupport | None = None
    text: str | None = None
    parents: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupOutput:
    """The responses to a :class:`GroupRequest`: ``samples[i]`` is its sample ``first_sample + i``.

    ``prompt_ids`` is the prompt that the samples continue; None: the request's.
    """

    group_id: int
    samples: tuple[Sample, ...]
    prompt_ids: tuple[int, ...] | None = None


TURNS = "turns"  #: ``ended`` of a dialog whose last allowed turn (``env.max_steps``) called a tool


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def sample_seed(*numbers: int) -> int:
    """Hash integers to one 62-bit seed (splitmix64's finaliser over each in turn; Steele et al. 2014).

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
    """Difference of two gradients g, h of the same rows: ``norm`` = |g|, ``relative`` = |h - g| / |g|.

    ``single``: both were computed in float32 (single precision).
    """

    norm: float
    relative: float
    single: bool
