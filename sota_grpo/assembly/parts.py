"""What a run is made of, however it was put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv
from sota_grpo.evaluate import Evaluator
from sota_grpo.loop import Source
from sota_grpo.publish import Publisher
from sota_grpo.records import Sampling
from sota_grpo.tasks.base import Task


class Closable(Protocol):
    """What lives in another process or holds a device; closing it twice is fine."""

    def close(self) -> None: ...


class SavedSource(Source, Protocol):
    """A source that can be continued."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Parts:
    """Everything a run is made of.

    Attributes:
        learner: a :class:`~sota_grpo.learner.Learner`, or its facade when it spans several processes.
        transforms: what a batch goes through before it is trained on, by phase, for the gate.
        export: writes the trained model to a folder.
        exact: engine and trainer both compute in float32, so that their log-probs differ by rounding only.
        opened: closed at the end, the last one first.
    """

    task: Task
    env: TaskEnv
    tokenizer: Any
    engine: Generates
    learner: Any
    publisher: Publisher
    source: SavedSource
    evaluator: Evaluator
    sampling: Sampling
    transforms: Sequence[tuple[str, Any]]
    export: Callable[[Path], object]
    exact: bool
    opened: Sequence[Closable]

    def close(self) -> None:
        """End what lives in other processes or holds a device, each even if another fails; idempotent."""
        with ExitStack() as closing:  # the last one added is closed first
            for part in self.opened:
                closing.callback(part.close)
