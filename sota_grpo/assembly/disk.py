"""Bytes that a run writes to its directory, counted from the config before anything is loaded, and whether they fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.assembly.device_memory import GIB, Facts, dtype_bytes, learning_of
from sota_grpo.assembly.devices import Plan
from sota_grpo.assembly.rollout import engine_dtype
from sota_grpo.config import Config, model_name, turn_size, with_options
from sota_grpo.errors import UserError
from sota_grpo.policy.load import find_architecture
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.recording.run_record import CHECKPOINTS
from sota_grpo.training.checkpoint import CheckpointStore


@dataclass(frozen=True)
class Disk:
    """What a run writes.

    Args:
        checkpoint: bytes of one: the trained weights and the optimizer's two moments of each.
        checkpoints: that are there at once: those that are kept and the one that is being written.
        export: bytes of the trained model at the end.
    """

    checkpoint: int
    checkpoints: int
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export

    @property
    def sentence(self) -> str:
        """For people, in GiB."""
        several = f"{self.checkpoints} checkpoints" if self.checkpoints > 1 else "1 checkpoint"
        text = f"{self.total / GIB:.3g} GiB: {several} of {self.checkpoint / GIB:.3g} GiB"
        text += ", one of them being written" if self.checkpoints > 1 else ""
        return text + (f", and {self.export / GIB:.3g} GiB of the trained model" if self.export else "")


def disk_of(config: Config, model: Architecture) -> Disk:
    """What the run of ``config`` writes, but for its logs and its stored turns.

    >>> config = Config()
    >>> model = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> model.parameters, disk_of(config, model)
    (1448, Disk(checkpoint=17376, checkpoints=4, export=5792))
    """
    part, train = config.train_model, config.train
    own = dtype_bytes(part.torch_dtype)
    trained = 4 * model.adapter_parameters(part.lora.r) if part.lora.enabled else own * model.parameters
    turns = train.total_dialog_turns // turn_size(config)
    saves = -(-turns // train.checkpoint_frequency) if train.checkpoint_frequency else 1
    return Disk(3 * trained, min(train.keep_checkpoints + 1, saves), own * model.parameters * train.export_hf)


def require_disk(config: Config, run_dir: Path) -> None:
    """Refuse a run that the disk will end later, hours after it began.

    Raises:
        UserError: too little is free, with the smallest change that helps.
    """
    model, _ = find_architecture(model_name(config), trust_remote_code=config.model.trust_remote_code)
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    saved = sum(path.stat().st_size for _, path in CheckpointStore(run_dir / CHECKPOINTS).paths())  # they make room
    free = shutil.disk_usage(there).free + saved
    needed = disk_of(config, model)
    if needed.total <= free:
        return
    fix = "free space there, or choose another hydra.run.dir"
    for options in _changes(config):
        changed = disk_of(with_options(config, options), model)
        if changed.total <= free:
            written = " ".join(f"{name}={str(value).lower()}" for name, value in options.items())
            fix = f"use {written} ({changed.total / GIB:.3g} GiB), or {fix}"
            break
    raise UserError(f"The run writes {needed.sentence}; {run_dir} has {free / GIB:.3g} GiB for it; {fix}.")


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Options that write less, the mildest first."""
    fewer = [{"train.keep_checkpoints": count} for count in range(config.train.keep_checkpoints - 1, 0, -1)]
    yield from fewer
    least = (fewer[-1] if fewer else {}) | ({"train.export_hf": False} if config.train.export_hf else {})
    yield least
    if not config.train_model.lora.enabled:
        yield {"train_model.lora.enabled": True}
        yield least | {"train_model.lora.enabled": True}


# of a state that several ranks save: gathered, packed for its way, in the store, and in the process that writes it
COPIES_OF_RANKS = 4


@dataclass(frozen=True)
class HostMemory:
    """Bytes by moment on the machine of the learner, beside the programs themselves and their data."""

    moments: Mapping[str, int]

    @property
    def sentence(self) -> str:
        """The worst moment, for people."""
        name, size = max(self.moments.items(), key=lambda item: item[1])
        return f"at least {size / GIB:.3g} GiB on the machine of the learner, for {name}"


def host_memory_of(config: Config, facts: Facts, plan: Plan) -> HostMemory | None:
    """What a run on GPUs holds beside them; None on a CPU, where all is counted in one.

    Of several ranks only rank 0 loads the model, and its machine is counted as if the others were there too.
    """
    if plan.device_type == "cpu":
        return None
    how, model = learning_of(config, plan), facts.model
    trained = how.trainable(model) * how.trained_bytes
    engine = model.parameters * dtype_bytes(engine_dtype(config.inference_model.torch_dtype, "cuda"))
    asleep = engine if plan.placement.colocated and not plan.workers else 0
    moments = {
        "loading the model": model.parameters * how.weight_bytes,
        "the checks": asleep + (trained if config.check.mode != "off" else 0),
        "a checkpoint on its way to the disk": asleep + 3 * trained * (COPIES_OF_RANKS if how.ranks > 1 else 1),
    }
    return HostMemory(moments)
