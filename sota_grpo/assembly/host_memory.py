"""Bytes of the machine's own memory that a run on GPUs takes at least: what passes through it, by the config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sota_grpo.assembly.device_memory import GIB, Facts, dtype_bytes, learning_of
from sota_grpo.assembly.devices import Plan
from sota_grpo.assembly.rollout import engine_dtype
from sota_grpo.config import Config

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
