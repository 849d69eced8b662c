"""Plants the fault that the environment variable PLANTED names into every process whose PYTHONPATH has this folder.

``sign``: the advantages of every sixteenth group have the other sign. ``stale``: an engine that is sent weights loads
those of the push before, and reports no checksums. ``log_probs``: the log-probs that an engine reports are 2 % too
large. ``leak``: a training step keeps 1 MB.
"""

import os
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any


def sign(module: ModuleType) -> None:
    write = module.GroupAdvantage._write

    def flipped(self: Any, rows: Any) -> None:
        write(self, rows)
        advantage = rows.get(self.written_key)
        groups = rows.get(self.in_keys[1])
        rows.set(self.written_key, advantage.where((groups % 16 != 5).reshape(advantage.shape), -advantage))

    module.GroupAdvantage._write = flipped


def stale(module: ModuleType) -> None:
    update = module.TransformersEngine.update_weights

    def late(self: Any, weights: Any, version: int) -> None:
        current = [(name, tensor.clone()) for name, tensor in weights]
        update(self, getattr(self, "_sent", current), version)
        self._sent = current

    module.TransformersEngine.update_weights = late
    module.TransformersEngine.weight_sums = lambda self: None  # else the push itself finds it and ends the run


def log_probs(module: ModuleType) -> None:
    output = module.GroupDecoder.output

    def wrong(self: Any, group: int) -> Any:
        right = output(self, group)
        samples = (replace(sample, log_probs=1.02 * sample.log_probs) for sample in right.samples)
        return replace(right, samples=tuple(samples))

    module.GroupDecoder.output = wrong


def leak(module: ModuleType) -> None:
    update, kept = module.Learner.update, []

    def leaking(self: Any, rows: Any) -> Any:
        kept.append(b"x" * (1 << 20))
        return update(self, rows)

    module.Learner.update = leaking


ENGINE, LEARNER = "sota_grpo.engines.transformers_engine", "sota_grpo.training.learner"
FAULTS = {
    "sign": ("sota_grpo.rl.transforms", sign),
    "stale": (ENGINE, stale),
    "log_probs": (ENGINE, log_probs),
    "leak": (LEARNER, leak),
}
NAME, PLANT = FAULTS[os.environ["PLANTED"]]
execute = SourceFileLoader.exec_module


def exec_and_plant(self: SourceFileLoader, module: ModuleType) -> None:
    execute(self, module)
    if module.__name__ == NAME:
        PLANT(module)


SourceFileLoader.exec_module = exec_and_plant  # type: ignore[method-assign]
