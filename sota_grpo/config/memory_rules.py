"""Rules for options of devices, memory and engines; see :mod:`.validators`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sota_grpo.config import Config, InferenceModelConfig, RefModelConfig, TrainModelConfig, has_reference
from sota_grpo.engines import ENGINES, is_server
from sota_grpo.policy.optimizers import OPTIMIZERS

SHARED = "shared"  # value of inference_model.num_devices: engines on the learner's devices
MICRO_BATCH_TOKENS = 16384  # train.micro_batch_tokens=auto on a CPU


def shares_devices(config: Config) -> bool:
    """Whether ``inference_model.num_devices=shared``: engines on the learner's devices, alternating with it."""
    return config.inference_model.num_devices == SHARED


def device_count(role: TrainModelConfig | InferenceModelConfig | RefModelConfig) -> int | None:
    """Return the number of devices that the config requests for a role; None if it requests none or ``shared``."""
    if role.devices is not None:
        return len(role.devices)
    return None if isinstance(role.num_devices, str) else role.num_devices


def devices_option(name: str, role: TrainModelConfig | InferenceModelConfig, count: int) -> str:
    """Return the option that gives the role ``name`` ``count`` devices, or a phrase for it if the role names fewer.

    >>> devices_option("train_model", TrainModelConfig(num_devices=3), 1)
    'train_model.num_devices=1'
    >>> devices_option("train_model", TrainModelConfig(devices=[4, 5]), 1)
    'train_model.devices=[4]'
    """
    if role.devices is None:
        return f"{name}.num_devices={count}"
    if count > len(role.devices):
        return f"{count} devices in {name}.devices"
    return f"{name}.devices=[{','.join(map(str, role.devices[:count]))}]"


def micro_batch_tokens(config: Config) -> int:
    """Return ``train.micro_batch_tokens``; for ``auto`` the value on a CPU (on CUDA the run has replaced ``auto``).

    >>> micro_batch_tokens(Config())
    16384
    """
    tokens = config.train.micro_batch_tokens
    return tokens if isinstance(tokens, int) else MICRO_BATCH_TOKENS


def learner_ranks(config: Config) -> int:
    """Return the number of learner ranks, one per device."""
    return device_count(config.train_model) or 1


def wants_workers(config: Config) -> bool:
    """Whether options ask for workers (one GPU runs none): mode=async, Ray, several ranks, references or engines."""
    one_engine = config.inference_model.tensor_parallel_size
    several = learner_ranks(config) > 1 or (device_count(config.ref_model) or 1) > 1
    several = several or (device_count(config.inference_model) or one_engine) > one_engine
    return several or config.mode == "async" or config.ray.address is not None


def devices_are_counted_or_named(config: Config) -> Iterator[str]:
    for name in ("train_model", "inference_model", "ref_model"):
        role = getattr(config, name)
        if role.num_devices is not None and role.devices is not None:
            yield f"<{name}.num_devices> and <{name}.devices>: set only one."
        if role.devices is not None and len(role.devices) == 0:
            yield f"<{name}.devices> names no device; give one or leave it out."


def the_learners_devices_are_a_product(config: Config) -> Iterator[str]:
    learner, ranks = config.train_model, learner_ranks(config)
    parallel, size = learner.tensor_parallel_size, learner.fsdp_size or 1
    if min(parallel, size) > 0 and ranks % (parallel * size):  # else the limits of numbers are broken
        option, least = ("tensor_parallel_size", parallel) if ranks % parallel else ("fsdp_size", parallel * size)
        of = f" of tensor_parallel_size={parallel}" if option == "fsdp_size" and parallel > 1 else ""
        fix = devices_option("train_model", learner, max(1, ranks // least) * least)
        yield f"<train_model.{option}> does not divide the learner's {ranks} devices{of}; use {fix}."


def engines_fill_their_devices(config: Config) -> Iterator[str]:
    size, shared = config.inference_model.tensor_parallel_size, shares_devices(config)
    count = learner_ranks(config) if shared else device_count(config.inference_model) or size
    if size > 0 and count % size:
        other = devices_option("inference_model", config.inference_model, max(1, count // size) * size)
        fix = f"inference_model.tensor_parallel_size={math.gcd(count, size)}" if shared else other
        yield f"<inference_model.tensor_parallel_size> does not divide the {count} devices of the engines; use {fix}."


def shared_devices_are_used_in_turn(config: Config) -> Iterator[str]:
    shared, fix = "<inference_model.num_devices>", "give inference_model.num_devices a number"
    if not shares_devices(config):
        return
    if config.mode == "async":
        turns = f"{shared} alternates engines and learner, but <mode> (<train.max_policy_age>) runs them concurrently"
        yield f"{turns}; use mode=sync, or {fix}."
    if config.engine.name == "sglang_server":
        yield f"engine=sglang_server keeps its weights on the devices of {shared}; use engine=vllm, or {fix}."
    if config.engine.url is not None:
        yield f"{shared} starts engines, but <engine.url> is a running one; leave one of them out."


def a_url_is_one_running_server(config: Config) -> Iterator[str]:
    """Refuse engine.url without a server engine or with devices set, and starting servers on GPUs that Ray manages."""
    engine, count = config.engine, device_count(config.inference_model)
    if engine.url is not None and not is_server(engine.name):
        yield f"engine.url has no effect on engine={engine.name}; use engine=vllm_server or leave engine.url out."
    if engine.url is not None and count is not None:
        devices = f"inference_model starts engines on {count} devices"
        yield f"<engine.url> is one running server, but {devices}; leave num_devices and devices out."
    if is_server(engine.name) and config.ray.address is not None and engine.url is None and config.device != "cpu":
        servers = f"engine={engine.name} starts servers on this machine, but <ray.address> manages its GPUs"
        yield f"{servers}; use engine=vllm, engine.url of a server on GPUs that Ray does not have, or device=cpu."


def engine_arguments_go_to_a_vllm_that_is_started_here(config: Config) -> Iterator[str]:
    option, name = "inference_model.engine_kwargs has no effect on", config.engine.name
    if config.inference_model.engine_kwargs and name in ENGINES and not ENGINES[name].takes_kwargs:
        others = ", ".join(engine for engine, spec in ENGINES.items() if spec.takes_kwargs)
        yield f"{option} engine={name}; leave it out or use {others}."
    if config.inference_model.engine_kwargs and config.engine.url is not None:
        yield f"{option} a running server (engine.url); leave it out."


def an_optimizer_trains_what_it_can(config: Config) -> Iterator[str]:
    optimizer, ranks = OPTIMIZERS[config.optimizer.name], learner_ranks(config)
    if config.train_model.lora.enabled and not optimizer.trains_adapters:
        factors = "but <train_model.lora.enabled> trains factors"
        yield f"<optimizer.name> orthogonalises whole matrices, {factors}; use optimizer.name=adamw."
    if ranks > 1 and not optimizer.over_ranks:
        fix = f"use optimizer.name=adamw or {devices_option('train_model', config.train_model, 1)}"
        yield f"<optimizer.name> does not shard its moments, but the learner has {ranks} devices; {fix}."


def matrices_are_divided_where_that_is_tested(config: Config) -> Iterator[str]:
    learner, option = config.train_model, "<train_model.tensor_parallel_size>"
    if learner.tensor_parallel_size == 1:
        return
    if config.optimizer.name == "muon":
        yield f"<optimizer.name> orthogonalises whole matrices, but {option} shards them; use adamw."
    if config.train.precision == "fp16" and learner.lora.enabled:
        whole = "needs the whole adapter on each device, to notice gradients that overflow"
        yield f"<train.precision> {whole}, but {option} shards it; use train.precision=bf16."
    if learner.compile:
        yield f"<train_model.compile> is untested with {option}; leave it out."
    if learner.lora.enabled and learner.lora.dropout:
        fix = "use train_model.lora.dropout=0"
        yield f"<train_model.lora.dropout> would use a different mask on each device of {option}; {fix}."


def only_frozen_weights_are_in_4_bits(config: Config) -> Iterator[str]:
    option, ranks, ref = "<model.quantization>", learner_ranks(config), config.ref_model
    if config.model.quantization is None:
        return
    if not config.train_model.lora.enabled:
        yield f"{option} quantises weights to 4 bits, which cannot be trained; add train_model.lora.enabled=true."
    if ranks > 1:
        fix = devices_option("train_model", config.train_model, 1)
        yield f"{option} is for a learner of one device, but it has {ranks}; use {fix} or model.quantization=null."
    apart = wants_workers(config) or ref.num_devices is not None or ref.devices is not None
    if apart and has_reference(config) and ref.name is None:
        yield (
            f"{option} changes the base weights, but a reference in another process or on other devices has "
            "unquantised ones, so the KL would not start at 0; use policy.kl_coef=0, or mode=sync on one device, "
            "without ray.address, ref_model.num_devices and ref_model.devices."
        )
    if config.train_model.compile:
        yield f"<train_model.compile> cannot compile the 4-bit layers of {option}; leave it out."


def an_adapter_is_served_by_a_synchronous_vllm(config: Config) -> Iterator[str]:
    option, name = "<inference_model.serve_adapter>", config.engine.name
    if not config.inference_model.serve_adapter:
        return
    if not config.train_model.lora.enabled:
        yield f"{option} needs an adapter; add train_model.lora.enabled=true."
    if name not in ("auto", "vllm"):
        yield f"{option} has no effect on engine={name}, which gets merged weights; use engine=vllm."
    if wants_workers(config) or config.inference_model.tensor_parallel_size > 1:
        workers = "but <mode>, several devices or ray.address start workers, which merge the adapter"
        yield f"{option} is for one engine in mode=sync, {workers}; leave it out."
    if config.model.quantization is not None:
        quantised = "but <model.quantization> trains on quantised ones"
        yield f"{option} serves the base weights without quantisation, {quantised}; leave one of these options out."
