"""Engines on the learner's devices, ``inference_model.num_devices=shared``: the rules that it must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sota_grpo.config import Config, InferenceModelConfig, RefModelConfig, TrainModelConfig

SHARED = "shared"  # the learner's devices


def shares_devices(config: Config) -> bool:
    """Whether engines stand on the learner's devices and take turns with it."""
    return config.inference_model.num_devices == SHARED


def device_count(role: TrainModelConfig | InferenceModelConfig | RefModelConfig) -> int | None:
    """Devices that a role asks for; None where it asks for none of its own."""
    if role.devices is not None:
        return len(role.devices)
    return None if isinstance(role.num_devices, str) else role.num_devices


def engines_have_a_number_of_devices_or_the_learners(config: Config) -> Iterator[str]:
    option, value = "inference_model.num_devices", config.inference_model.num_devices
    if isinstance(value, str) and value != SHARED:
        yield f"{option}={value} is neither a number nor {SHARED}; write it like {option}=2."


def shared_devices_are_used_in_turn(config: Config) -> Iterator[str]:
    if shares_devices(config) and config.mode == "async":
        yield (
            "inference_model.num_devices=shared lets engines and learner take turns on the same devices, and mode="
            f"async lets both work at once (train.max_policy_age={config.train.max_policy_age}); use mode=sync "
            "(grpo.py), or give inference_model.num_devices a number."
        )


def shared_devices_are_those_of_whole_engines(config: Config) -> Iterator[str]:
    size, count = config.inference_model.tensor_parallel_size, device_count(config.train_model) or 1
    if shares_devices(config) and size > 0 and count % size:
        yield (
            f"inference_model.num_devices=shared stands on the learner's {count} devices, which engines of "
            f"inference_model.tensor_parallel_size={size} do not fill; use inference_model.tensor_parallel_size="
            f"{math.gcd(count, size)}."
        )


def sglang_keeps_its_weights_where_it_sleeps(config: Config) -> Iterator[str]:
    if shares_devices(config) and config.engine.name == "sglang_server":
        yield (
            "engine=sglang_server keeps its weights on the device while it sleeps; inference_model.num_devices=shared "
            "leaves that room to the learner: use engine=vllm, or give inference_model.num_devices a number."
        )


def a_running_server_shares_no_devices(config: Config) -> Iterator[str]:
    if shares_devices(config) and config.engine.url is not None:
        yield (
            f"engine.url={config.engine.url} is one running server on devices of its own, and "
            "inference_model.num_devices=shared starts engines on the learner's; leave inference_model.num_devices out."
        )
