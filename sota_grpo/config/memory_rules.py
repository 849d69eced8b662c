"""Rules of what saves memory (optimizers), each named as the rule it states; see :mod:`.validators`."""

from __future__ import annotations

from collections.abc import Iterator

from sota_grpo.config import Config, OptimizerConfig
from sota_grpo.policy.optimizers import OPTIMIZERS


def learner_ranks(config: Config) -> int:
    """Devices of the learner, an FSDP2 rank on each."""
    part = config.train_model
    return len(part.devices) if part.devices else part.num_devices or 1


def an_optimizer_trains_what_it_can(config: Config) -> Iterator[str]:
    name, lora, ranks = config.optimizer.name, config.train_model.lora, learner_ranks(config)
    kind = OPTIMIZERS[name]
    if lora.enabled and not kind.trains_adapters:
        yield (
            f"optimizer.name={name} makes the step of a whole matrix orthogonal, and train_model.lora.enabled=true "
            "trains two factors of one; use optimizer.name=adamw."
        )
    if ranks > 1 and not kind.over_ranks:
        yield (
            f"optimizer.name={name} keeps its moments in blocks that one process holds whole, and the learner has "
            f"{ranks} devices, which divide AdamW's among them; use optimizer.name=adamw or train_model.num_devices=1."
        )
    if name != "muon" and config.optimizer.momentum != (default := OptimizerConfig().momentum):
        yield f"optimizer.momentum={config.optimizer.momentum} belongs to optimizer.name=muon; leave it at {default}."


def only_frozen_weights_are_in_4_bits(config: Config) -> Iterator[str]:
    kind, ranks = config.model.quantization, learner_ranks(config)
    if kind is None:
        return
    if not config.train_model.lora.enabled:
        yield (
            f"model.quantization={kind} keeps weights in 4 bits, which cannot be trained, and train_model.lora.enabled="
            "false trains them; add train_model.lora.enabled=true."
        )
    if ranks > 1:
        yield (
            f"model.quantization={kind} is for a learner of one device, and it has {ranks}, which divide whole weights "
            "among them; use train_model.num_devices=1 or model.quantization=null."
        )
    if config.train_model.compile:
        yield f"train_model.compile=true cannot look into the products of model.quantization={kind}; leave it out."
