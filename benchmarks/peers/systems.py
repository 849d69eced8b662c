"""The systems by name. One is built in its own process, and only there are its packages imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch

from benchmarks.peers.work import Folder

PHASES = ("generate", "score", "ref", "learn", "publish")
TRL_DEFAULT_BATCH = "TRL, 8 rows a pass"
OURS_VLLM, OURS, TRL, TORCHRL = "ours, vLLM", "ours, transformers", "TRL", "TorchRL, vLLM"
TORCHRL_TRANSFORMERS, TORCHRL_TRAINER = "TorchRL, transformers", "TorchRL GRPOTrainer"
TORCHRL_AS_IT_COMES = "TorchRL, as it comes"


class System(Protocol):
    """What is measured.

    ``learn`` goes from the rows of the work to the end of an optimizer step; ``step`` does everything, and returns the
    seconds of :data:`PHASES` that it has and of the ``whole``.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def named_parameters(self) -> dict[str, torch.nn.Parameter]: ...

    def learn(self) -> None: ...

    def step(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def _ours(engine: str) -> Callable[[Folder], System]:
    def make(folder: Folder) -> System:
        from benchmarks.peers.ours import Ours

        return Ours(folder, engine)

    return make


def _trl(folder: Folder) -> System:
    from benchmarks.peers.trl import Trl

    return Trl(folder)


def _trl_default_batch(folder: Folder) -> System:
    from benchmarks.peers.trl import DEFAULT_BATCH, Trl

    return Trl(folder, DEFAULT_BATCH)


def _torchrl(engine: str) -> Callable[[Folder], System]:
    def make(folder: Folder) -> System:
        from benchmarks.peers.torchrl import TorchRL

        return TorchRL(folder, engine)

    return make


def _torchrl_as_it_comes(folder: Folder) -> System:
    from benchmarks.peers.torchrl import TorchRL

    return TorchRL(folder, "transformers", entropy=True)


def _torchrl_trainer(folder: Folder) -> System:
    from benchmarks.peers.torchrl_trainer import TorchRLTrainer

    return TorchRLTrainer(folder)


#: Name: the packages that it needs beyond ours, and how it is built.
SYSTEMS: dict[str, tuple[tuple[str, ...], Callable[[Folder], System]]] = {
    OURS_VLLM: (("vllm",), _ours("vllm")),
    OURS: ((), _ours("transformers")),
    TRL: (("trl", "accelerate"), _trl),
    TRL_DEFAULT_BATCH: (("trl", "accelerate"), _trl_default_batch),
    TORCHRL: (("vllm",), _torchrl("vllm")),
    TORCHRL_TRANSFORMERS: ((), _torchrl("transformers")),
    TORCHRL_AS_IT_COMES: ((), _torchrl_as_it_comes),
    TORCHRL_TRAINER: (("vllm",), _torchrl_trainer),
}


def missing_packages(name: str) -> list[str]:
    """Packages that ``name`` needs and that are not installed."""
    return [package for package in SYSTEMS[name][0] if find_spec(package) is None]
