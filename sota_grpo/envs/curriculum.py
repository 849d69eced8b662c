"""A curriculum: prompts drawn by pass rate, between the levels of a task or between its examples.

The levels are what the task's ``level(example)`` says (a number, a name); under ``by=example`` each example is a level
of its own. Every draw is of the level at which a low-discrepancy sequence stands, on a line that the levels share as
:func:`sampling_probabilities` says, and within a level of its next example. So the draws are a pure function of the
seed and of what was observed before each :meth:`CurriculumStream.update`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sota_grpo.envs.task_env import PromptStream
from sota_grpo.errors import UserError
from sota_grpo.rl.records import Example, sample_seed

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_ODD = re.compile(r"[^\w-]", re.ASCII)


def sampling_probabilities(passes: Tensor, trials: Tensor, floor: float) -> Tensor:
    """The share of the draws that each of ``K`` levels gets: in proportion to the variance of its success, and a floor.

    With the pass rate ``p_k = passes_k / trials_k``, 1/2 where there were no trials, and ``w_k = p_k (1 - p_k)``::

        share_k = floor / K + (1 - floor) w_k / sum_j w_j,        1 / K where every w_j is 0.

    ``w_k`` is the variance of one response's success: what a group of siblings differs by, and so what its advantages
    are made of. It is 0 for what is solved (p = 1) and for what is out of reach (p = 0): both are left with the floor,
    ``floor / K``, by which they are looked at again. What was never tried counts as p = 1/2, the most of all.
    From ``n`` trials ``p (1 - p)`` is estimated as ``(1 - 1 / n)`` times itself on average, so no prior is needed.

    Args:
        passes, trials: ``[K]`` float64, ``0 <= passes <= trials``; decayed sums need not be whole.
        floor: share of the draws that is spread evenly, in (0, 1].

    Returns:
        ``[K]`` float64, above 0, of sum 1.

    Source: Bae et al. 2025 (arXiv:2504.03380): ``p (1 - p)`` bounds the expected improvement from below; Foster et al.
    2025 (arXiv:2502.12272) draw by it, under the name of learnability; Chen et al. 2025 (arXiv:2505.14970) draw levels.

    >>> passes, trials = torch.tensor([8.0, 4.0, 0.0, 0.0]), torch.tensor([8.0, 8.0, 8.0, 0.0])
    >>> sampling_probabilities(passes, trials, floor=0.2).tolist()
    [0.05, 0.45, 0.05, 0.45]
    """
    rates = torch.where(trials > 0, passes / trials.clamp(min=torch.finfo(torch.float64).tiny), 0.5).double()
    weights = rates * (1 - rates)
    total = weights.cumsum(0)[-1]  # of the same bits under any number of threads
    even = torch.full_like(weights, 1 / len(weights))
    return torch.where(total > 0, floor * even + (1 - floor) * weights / total, even)


@dataclass(frozen=True)
class Curriculum:
    """The options of a curriculum.

    Args:
        by: what has a pass rate: each ``level`` of the task, or each ``example``.
        floor: share of the draws that is spread evenly, in (0, 1]; at 1 all levels are drawn alike.
        decay: what older responses count, in [0, 1), whenever new ones come.
    """

    by: str
    floor: float = 0.2
    decay: float = 0.5


def level_name(level: Any) -> str:
    """A level as metrics name it.

    >>> level_name(3), level_name("Level 3"), level_name(None)
    ('3', 'Level_3', 'none')
    """
    return _ODD.sub("_", "" if level is None else str(level)) or "none"


def point(seed: int, draw: int) -> float:
    """Where draw ``draw`` stands in [0, 1): multiples of the golden ratio, begun at a point of the seed.

    Of any ``n`` draws in a row an interval of length ``s`` has ``n s`` to within ``3 + 3.53 ln n`` (Kuipers and
    Niederreiter 1974, chapter 2, theorem 3.4: the partial quotients are all 1 here); in 300 random intervals and 1,500
    draws it was within 2.9. In a batch of 16 groups a level of one half has about eight, where chance would now and
    then give it three.

    >>> [round((point(0, draw) - point(0, 0)) % 1, 3) for draw in range(4)]
    [0.0, 0.618, 0.236, 0.854]
    """
    return ((4 * sample_seed(seed) + draw * _GOLDEN) % (1 << 64)) / (1 << 64)


class PassRates:
    """The decayed counts of passes and trials of ``K`` levels, and which of them a draw is of.

    Where ``S`` of ``N`` new responses to a level passed, ``passes = decay * passes + S`` and
    ``trials = decay * trials + N``. A level without new responses keeps what it has.

    Args:
        count: of levels.
        rule: floor and decay.
        seed: of the sequence of draws, and of the order in which the levels share the line.

    >>> rates = PassRates(2, Curriculum("level", floor=0.2, decay=0.5), seed=0)
    >>> rates.add({0: (8, 8), 1: (2, 8)})
    >>> rates.add({1: (4, 8)})                       # (0.5 * 2 + 4) / (0.5 * 8 + 8)
    >>> rates.rates().tolist(), rates.shares().tolist()
    ([1.0, 0.4166666666666667], [0.1, 0.9])
    """

    def __init__(self, count: int, rule: Curriculum, seed: int):
        self.rule, self.seed = rule, seed
        self.passes, self.trials = torch.zeros(2, count, dtype=torch.float64).unbind()
        generator = torch.Generator().manual_seed(sample_seed(seed, 1))
        self._order = torch.randperm(count, generator=generator)
        self._ends: Tensor | None = None  # of the levels on the line, in that order

    def rates(self) -> Tensor:
        """The pass rates ``[K]``; nan where nothing was tried."""
        return self.passes / self.trials

    def shares(self) -> Tensor:
        """The share of the draws that each level has now, ``[K]``."""
        return sampling_probabilities(self.passes, self.trials, self.rule.floor)

    def drawn(self, draw: int) -> int:
        """The level of draw ``draw``."""
        if self._ends is None:
            self._ends = self.shares()[self._order].cumsum(0)
        at = int(torch.searchsorted(self._ends, point(self.seed, draw), right=True))
        return int(self._order[min(at, len(self._order) - 1)])  # the last end may be below 1 by rounding

    def add(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """New passes and trials, by level."""
        for level, (passes, trials) in counts.items():
            self.passes[level] = self.rule.decay * self.passes[level] + passes
            self.trials[level] = self.rule.decay * self.trials[level] + trials
        self._ends = None

    def state_dict(self) -> dict[str, Tensor]:
        """The levels that were tried, with their counts."""
        tried = self.trials.nonzero()[:, 0]
        return {"levels": tried, "passes": self.passes[tried], "trials": self.trials[tried]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken."""
        self.passes, self.trials = torch.zeros(2, len(self._order), dtype=torch.float64).unbind()
        self.passes[state["levels"]], self.trials[state["levels"]] = state["passes"], state["trials"]
        self._ends = None


class _Part:
    """The examples of one task: their levels, and how often each level was drawn."""

    def __init__(self, rule: Curriculum, seed: int, num_examples: int, levels: Iterable[str]):
        self.seed = seed
        self.members: dict[str, list[int]] | None = None  # the examples of each level; None: one each
        if rule.by == "level":
            by_level: dict[str, list[int]] = {}
            for index, name in enumerate(levels):
                by_level.setdefault(name, []).append(index)
            self.members = dict(sorted(by_level.items()))
        self.names = list(self.members or ())
        self.num_drawn = [0] * len(self.names)
        self.rates = PassRates(num_examples if self.members is None else len(self.names), rule, seed)
        self.num_learned: Counter[int] = Counter()  # groups of the last update, by level

    def metrics(self) -> dict[str, float]:
        num_groups = self.num_learned.total()
        rates = self.rates.rates().tolist() if len(self.names) > 1 else []
        metrics: dict[str, float] = {}
        for level, (name, rate) in enumerate(zip(self.names, rates)):
            metrics |= {f"{name}/pass_rate": rate} if rate == rate else {}
            metrics |= {f"{name}/share": self.num_learned[level] / num_groups} if num_groups else {}
        if self.members is None:
            tried = self.rates.trials > 0
            seen, passes, trials = int(tried.sum()), self.rates.passes[tried], self.rates.trials[tried]
            metrics["seen"] = seen / len(tried)
            metrics["solved"] = int((passes == trials).sum()) / len(tried)
            metrics["unsolved"] = int((passes == 0).sum()) / len(tried)
            metrics |= {"pass_rate": float((passes / trials).mean())} if seen else {}
        return metrics


class CurriculumStream(PromptStream):
    """Draws prompts by pass rate; of a mixture so within each task, whose draws stay those that its weight gives it.

    A level's own examples come each once per epoch of that level, in the order of the seed. Which example a group has
    can no longer be computed from its id, so it is kept (and saved) while the group may still be asked for.

    Contract. Consumes: :meth:`observe`, the responses of one graded group, those that dynamic sampling dropped
    included. They count from the next :meth:`update` on, which the source calls once per released batch; so draws
    between two updates do not depend on the order in which groups are graded. A group that was at the reference when a
    run was cut off is sampled and graded again, and may count again.

    Args:
        examples, seed: of :class:`~sota_grpo.envs.task_env.PromptStream`.
        rule: the options.
        level: of an example; None where the task has none.

    Raises:
        UserError: there is but one level.
        ValueError: no examples.

    >>> examples = [Example(f"{i} + 1?", str(i + 1), {"level": i % 2}) for i in range(6)]
    >>> stream = CurriculumStream(examples, Curriculum("level"), level=lambda example: example.extra["level"])
    >>> for group_id, example in stream.draw(8):
    ...     stream.observe(group_id, passes=8 if example.extra["level"] else 4, trials=8)
    >>> stream.update(held=())
    >>> sum(example.extra["level"] for _, example in stream.draw(100))   # solved: half of the floor of 0.2
    10
    >>> stream.metrics()
    {'curriculum/0/pass_rate': 0.5, 'curriculum/0/share': 0.5, 'curriculum/1/pass_rate': 1.0, 'curriculum/1/share': 0.5}
    """

    def __init__(
        self,
        examples: Sequence[Example],
        rule: Curriculum,
        *,
        level: Callable[[Example], Any] | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        super().__init__(examples, seed=seed, shuffle=shuffle)
        self.rule, self._level = rule, level or (lambda _: None)
        self._groups: dict[int, tuple[str, int, int]] = {}  # task, level and example of groups that may be asked for
        self._observed: dict[int, tuple[int, int]] = {}  # passes and trials since the last update
        self._parts = self._make_parts()
        if rule.by == "level" and all(len(levels.names) < 2 for levels in self._parts.values()):
            raise UserError(
                "env.curriculum=level draws between the levels of a task, and this one has a single one; choose "
                "problems of several levels, or use env.curriculum=example."
            )

    def _make_parts(self) -> dict[str, _Part]:
        made = {}
        for name, examples in self.parts.items():
            levels = (level_name(self._level(self._example(name, index))) for index in range(len(examples)))
            made[name] = _Part(self.rule, self._seed_of(name), len(examples), levels)
        return made

    def draw(self, num_groups: int) -> list[tuple[int, Example]]:
        """The next ``num_groups`` prompts, each with a group id that no other draw has."""
        for group_id in range(self.next_group_id, self.next_group_id + num_groups):
            name, draw = self._task_of(group_id)
            levels = self._parts[name]
            level = index = levels.rates.drawn(draw)
            if levels.members is not None:
                members = levels.members[levels.names[level]]
                index = members[self._index(levels.num_drawn[level], len(members), sample_seed(levels.seed, 2, level))]
                levels.num_drawn[level] += 1
            self._groups[group_id] = (name, level, index)
        return super().draw(num_groups)

    def example_of(self, group_id: int) -> Example:
        """The example that was drawn as ``group_id``; changes nothing.

        Raises:
            ValueError: no such prompt was drawn, or nobody can ask for it again.
        """
        if group_id not in self._groups:
            raise ValueError(f"group {group_id} is not of this stream, or its batch was released.")
        name, _, index = self._groups[group_id]
        return self._example(name, index)

    def reseed(self, seed: int) -> None:
        """Start over with another seed; group ids go on, so that they stay unique, and nothing was observed."""
        super().reseed(seed)
        self._groups, self._observed, self._parts = {}, {}, self._make_parts()

    def observe(self, group_id: int, passes: int, trials: int) -> None:
        """Of the responses of a group ``passes`` were right; ``trials`` leaves out those whose grader failed."""
        if trials and group_id in self._groups:
            self._observed[group_id] = (passes, trials)

    def update(self, held: Collection[int]) -> None:
        """Learn from what was observed; groups that are not ``held`` will not be asked for again."""
        sums: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self._parts}
        for levels in self._parts.values():
            levels.num_learned.clear()
        for group_id, (passes, trials) in self._observed.items():
            name, level, _ = self._groups[group_id]
            before = sums[name].get(level, (0, 0))
            sums[name][level] = (before[0] + passes, before[1] + trials)
            self._parts[name].num_learned[level] += 1
        for name, counts in sums.items():
            self._parts[name].rates.add(counts)
        self._observed = {}
        self._groups = {group_id: drawn for group_id, drawn in self._groups.items() if group_id in held}

    def metrics(self) -> dict[str, float]:
        """Of each level its pass rate and its share of the groups learned from; of examples, what is solved or not."""
        metrics: dict[str, float] = {}
        for name, levels in self._parts.items():
            place = f"curriculum/{name}" if name else "curriculum"
            metrics |= {f"{place}/{key}": value for key, value in levels.metrics().items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: counts of the levels that were tried, and groups that may still be asked for."""
        return super().state_dict() | {
            "groups": [[group_id, *drawn] for group_id, drawn in self._groups.items()],
            "observed": [[group_id, *counts] for group_id, counts in self._observed.items()],
            "num_drawn": {name: list(levels.num_drawn) for name, levels in self._parts.items()},
            "pass_rates": {name: levels.rates.state_dict() for name, levels in self._parts.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: the state is of a stream over other examples, with another seed or another curriculum.
        """
        super().load_state_dict(state_dict)
        self._groups = {group_id: (name, level, index) for group_id, name, level, index in state_dict["groups"]}
        self._observed = {group_id: (passes, trials) for group_id, passes, trials in state_dict["observed"]}
        for name, levels in self._parts.items():
            levels.num_drawn = list(state_dict["num_drawn"][name])
            levels.rates.load_state_dict(state_dict["pass_rates"][name])

    def _identity(self) -> dict[str, Any]:
        levels = {
            name: {level: len(members) for level, members in (one.members or {}).items()}
            for name, one in self._parts.items()
        }
        return super()._identity() | {"curriculum": asdict(self.rule) | {"levels": levels}}
