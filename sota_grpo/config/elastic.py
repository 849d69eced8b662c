"""Engines that come and go, ``inference_model.num_devices=MIN:MAX``: what it says, and the rules that it must keep."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sota_grpo.config import Config, InferenceModelConfig, RefModelConfig, TrainModelConfig
from sota_grpo.engines import is_server

SHARED = "shared"  # the learner's devices (:mod:`sota_grpo.config.shared`)
_RANGE = re.compile(r"(\d+):(\d+)", re.ASCII)


def engine_range(config: Config) -> tuple[int, int] | None:
    """Fewest and most devices of engines that come and go; None where their number is fixed.

    >>> config = Config()
    >>> config.inference_model.num_devices = "2:6"
    >>> engine_range(config), engine_range(Config())
    ((2, 6), None)
    """
    match = _RANGE.fullmatch(str(config.inference_model.num_devices))
    return None if match is None else (int(match[1]), int(match[2]))


def device_count(role: TrainModelConfig | InferenceModelConfig | RefModelConfig) -> int | None:
    """Devices that a role asks for, of ``MIN:MAX`` the most; None where it asks for none of its own.

    >>> device_count(InferenceModelConfig(num_devices="2:6")), device_count(TrainModelConfig(devices=[0, 3]))
    (6, 2)
    """
    if role.devices is not None:
        return len(role.devices)
    if isinstance(role.num_devices, str):
        match = _RANGE.fullmatch(role.num_devices)
        return None if match is None else int(match[2])
    return role.num_devices


def a_range_of_engines_is_two_numbers(config: Config) -> Iterator[str]:
    option, value, ends = "inference_model.num_devices", config.inference_model.num_devices, engine_range(config)
    if ends is None:
        if isinstance(value, str) and value != SHARED:
            yield (
                f"{option}={value} is neither a number nor MIN:MAX nor {SHARED}; write it like {option}=2 or "
                f"{option}=1:4."
            )
        return
    least, most = ends
    if least < 1:
        yield f"{option}={value} would go on with {least} devices, which sample nothing; use {option}=1:{max(1, most)}."
    elif least > most:
        yield f"{option}={value} has {least} devices at least and {most} at most; use {option}={most}:{least}."


def a_range_of_engines_stands_beside_the_learner(config: Config) -> Iterator[str]:
    if config.mode == "sync" and (ends := engine_range(config)) is not None:
        yield (
            f"inference_model.num_devices={config.inference_model.num_devices} lets engines come and go while the "
            "learner learns, and in mode=sync the two take turns; run grpo-async.py, or use "
            f"inference_model.num_devices={ends[1]}."
        )


def a_range_of_engines_has_no_servers(config: Config) -> Iterator[str]:
    name = config.engine.name
    if is_server(name) and (ends := engine_range(config)) is not None:
        yield (
            f"inference_model.num_devices={config.inference_model.num_devices} is for engines in Ray's workers, and "
            f"engine={name} talks to servers that stay; use engine=vllm, or inference_model.num_devices={ends[1]}."
        )
