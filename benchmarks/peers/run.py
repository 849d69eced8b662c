"""The order of things: processes started together, then asked one at a time, in another order each repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.floor import Floor
from benchmarks.peers.host import LEARN, STEP, Host, SystemFailed
from benchmarks.peers.results import WHOLE, CaseResult, Measured
from benchmarks.peers.systems import TRL, missing_packages
from benchmarks.peers.work import Case, Folder, prepare


@dataclass(frozen=True)
class Plan:
    """What is measured of a case.

    Args:
        case: the case.
        questions: of each system by name, ``learn``, ``step`` or both.
        repeats: most repetitions after the first run of everything, which warms up and is not counted.
        budget_s: what has taken longer by now is not repeated any more.
    """

    case: Case
    questions: Mapping[str, tuple[str, ...]]
    repeats: int = 3
    budget_s: float = 30.0


class Runner:
    """Runs the plan of one case.

    Args:
        plan: what.
        path: where its work is put; ``*.log`` there is what the systems printed.
        tell: takes a line of progress.
        host: makes the process of a system; tests have their own.

    Attributes:
        result: filled as it goes, so that an interrupted run has what there is.
    """

    def __init__(self, plan: Plan, path: Path, tell: Callable[[str], None], host: Callable[..., Any] = Host):
        self.plan, self.path, self.tell, self.host = plan, path, tell, host
        self.result = CaseResult(plan.case, {name: Measured(questions) for name, questions in plan.questions.items()})
        self.hosts: dict[str, Any] = {}
        self.spent: Counter[tuple[str, str]] = Counter()

    def run(self) -> CaseResult:
        """Everything; the processes are gone afterwards, whatever happened."""
        self.path.mkdir(parents=True, exist_ok=True)
        work = prepare(self.plan.case, self.path)
        floor = Floor(self.plan.case, [len(prompt) for prompt in work.load_rows()["prompts"]])
        try:
            self._start(work)
            self.result.floor.append(floor.measure())
            self._round(0, memory=True)
            self._compare_gradients()
            for repetition in range(self.plan.repeats):
                self.result.floor.append(floor.measure())
                self._round(repetition)
        except BaseException as error:
            for name, host in self.hosts.items():
                self.result.systems[name].failure = (
                    "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
                )
                host.kill()
            raise
        for host in self.hosts.values():
            host.close()
        return self.result

    def _start(self, work: Folder) -> None:
        """Every process at once: most of their start is reading files."""
        for name in self.plan.questions:
            if missing := missing_packages(name):
                self._fail(name, f"not installed: {', '.join(missing)}")
            else:
                self.hosts[name] = self.host(name, work, self.path / f"{slug(name)}.log")
        for name in list(self.hosts):
            try:
                self.hosts[name].ready()
            except SystemFailed as failure:
                self._fail(name, str(failure))

    def _round(self, repetition: int, *, memory: bool = False) -> None:
        """Each question to each system that still has time; the order turns with the repetitions."""
        names = list(self.plan.questions)
        turn = repetition % max(1, len(names))
        for question in (LEARN, STEP):
            for name in names[turn:] + names[:turn]:
                is_due = name in self.hosts and question in self.plan.questions[name]
                if is_due and self.spent[name, question] <= self.plan.budget_s:
                    self._ask(name, question, memory)

    def _ask(self, name: str, question: str, memory: bool) -> None:
        """One run. The first of all measures the memory, keeps the gradient, and does not count."""
        options: dict[str, Any] = {"memory": memory}
        if memory and question == LEARN:
            options["gradient"] = self._gradient(name)
        try:
            answer = self.hosts[name].ask(question, **options)
        except SystemFailed as failure:
            self._fail(name, str(failure))
            return
        measured, peak = self.result.systems[name], answer.pop("bytes")
        seconds = answer["seconds"] if question == LEARN else answer[WHOLE]
        if memory:
            setattr(measured, f"{question}_bytes", peak)
        else:
            if question == LEARN:
                measured.learn.append(seconds)
            else:
                measured.steps.append(answer)
            self.spent[name, question] += seconds
        self.tell(f"{self.plan.case.name}: {name}: {question} {seconds:.2f} s{' (first)' if memory else ''}")

    def _fail(self, name: str, reason: str) -> None:
        self.result.systems[name].failure = reason
        self.tell(f"{self.plan.case.name}: {name}: {reason}")
        if name in self.hosts:
            self.hosts.pop(name).kill()

    def _gradient(self, name: str) -> Path:
        return self.path / f"{slug(name)}.gradient.pt"

    def _compare_gradients(self) -> None:
        """The relative distance of every gradient from TRL's: only equal work is compared."""
        if not self._gradient(TRL).exists():
            return
        reference = torch.load(self._gradient(TRL), weights_only=True)
        for name, measured in self.result.systems.items():
            path = self._gradient(name)
            if path.exists():
                measured.gradient_distance = distance(torch.load(path, weights_only=True), reference)
                path.unlink()
                self.tell(f"{self.plan.case.name}: {name}: gradient {measured.gradient_distance:.1e} from TRL's")


def distance(own: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """``|g - g'| / |g'|`` over all parameters.

    Raises:
        ValueError: they are not gradients of the same parameters.

    >>> distance({"w": torch.tensor([3.0, 4.5])}, {"w": torch.tensor([3.0, 4.0])})
    0.1
    """
    if own.keys() != reference.keys():
        raise ValueError(f"gradients of different parameters, for example {min(own.keys() ^ reference.keys())}")
    gaps = torch.stack([(own[name] - value).double().norm() for name, value in reference.items()])
    norms = torch.stack([value.double().norm() for value in reference.values()])
    return float(gaps.norm() / norms.norm())


def slug(name: str) -> str:
    """A name as part of a file's.

    >>> slug("ours, vLLM")
    'ours_vllm'
    """
    return "_".join(name.lower().replace(",", " ").split())
