"""The rules about modes, devices and the processes that a run is made of."""

from __future__ import annotations

from sota_grpo.config import Config, turn_size


def devices_are_counted_or_named(config: Config) -> str | None:
    for name in ("train_model", "inference_model", "ref_model"):
        part = getattr(config, name)
        if part.num_devices is not None and part.devices is not None:
            return (
                f"{name}.num_devices={part.num_devices} and {name}.devices={list(part.devices)} say the same thing "
                f"twice; drop one of them."
            )
        if part.devices is not None and len(part.devices) == 0:
            return f"{name}.devices=[] names no device; name one or leave it out."
    return None


def lockstep_has_no_age(config: Config) -> str | None:
    if config.mode == "sync" and config.train.max_policy_age != 0:
        return (
            f"train.max_policy_age={config.train.max_policy_age} has no meaning in lockstep, where every token comes "
            "from the newest policy; leave it at 0 or run grpo-async.py."
        )
    return None


def lockstep_publishes_after_every_collection(config: Config) -> str | None:
    if config.mode == "sync" and config.train.weight_update_frequency is not None:
        return (
            f"train.weight_update_frequency={config.train.weight_update_frequency} has no meaning in lockstep, which "
            "publishes after every collection; leave it out or run grpo-async.py."
        )
    return None


def a_publish_is_made_of_whole_groups(config: Config) -> str | None:
    frequency, size, repeats = config.train.weight_update_frequency, config.train.optim_batch_size, config.env.repeats
    if config.mode == "async" and frequency is not None and turn_size(config) % repeats:
        nearest = max(repeats, round(size / repeats) * repeats)
        return (
            f"train.weight_update_frequency={frequency} times train.optim_batch_size={size} is not divisible by the "
            f"group size env.repeats={repeats}; use train.optim_batch_size={nearest}."
        )
    return None


def an_old_policy_needs_a_ratio(config: Config) -> str | None:
    """REINFORCE weighs every token as if the newest policy had sampled it."""
    age = config.train.max_policy_age
    if config.algorithm.objective == "reinforce" and age > 0:
        return (
            f"algorithm.objective=reinforce is on-policy and train.max_policy_age={age} trains on tokens of older "
            "policies; use train.max_policy_age=0, or algorithm.objective=cispo, which weighs by the ratio."
        )
    return None


def a_copy_of_the_model_fills_its_devices(config: Config) -> str | None:
    part = config.inference_model
    size = part.tensor_parallel_size
    count = len(part.devices) if part.devices is not None else (part.num_devices or size)
    if count % size:
        return (
            f"inference_model takes {count} devices and one copy of the model takes tensor_parallel_size={size}; "
            f"use inference_model.num_devices={max(1, count // size) * size}."
        )
    return None


def a_url_belongs_to_a_server(config: Config) -> str | None:
    servers = ("vllm_server", "sglang_server")
    for name, value in (("url", config.engine.url), ("api_key", config.engine.api_key)):
        if value is not None and config.engine.name not in servers:
            return (
                f"engine.{name} is set and engine.name={config.engine.name} is no server; use engine=vllm_server or "
                f"leave engine.{name} out."
            )
    if config.engine.api_key is not None and config.engine.url is None:
        return "engine.api_key is set without engine.url; a server started here gets a key of its own."
    return None


def a_url_is_one_engine(config: Config) -> str | None:
    part = config.inference_model
    count = len(part.devices) if part.devices is not None else part.num_devices
    if config.engine.url is not None and count is not None:
        return (
            f"engine.url={config.engine.url} is one running server, and inference_model asks for {count} devices to "
            "start engines on; leave inference_model.num_devices and devices out."
        )
    return None


def a_server_started_here_has_gpus_of_its_own(config: Config) -> str | None:
    """A server is a child of this process, and on a cluster the GPUs are Ray's to give, to actors only."""
    server, address = config.engine.name in ("vllm_server", "sglang_server"), config.ray.address
    if server and address is not None and config.engine.url is None and config.device != "cpu":
        return (
            f"engine={config.engine.name} starts its servers on this machine, whose GPUs the cluster of ray.address="
            f"{address} gives to others; use engine=vllm there, engine.url of a server on GPUs that Ray does not have, "
            "device=cpu, or leave ray.address out."
        )
    return None


def a_broadcast_of_weights_has_whole_engines(config: Config) -> str | None:
    """Members of the broadcast are the learner and one process per engine, and full weights travel."""
    return obstacle_to_a_broadcast(config) if config.inference_model.weight_transfer == "collective" else None


def obstacle_to_a_broadcast(config: Config) -> str | None:
    """Why ``inference_model.weight_transfer=collective`` would be refused; None where it would not."""
    part = config.inference_model
    if config.engine.name in ("vllm_server", "sglang_server"):
        return f"inference_model.weight_transfer=collective does not reach engine={config.engine.name}; leave it out."
    if config.train_model.lora.enabled:
        return "inference_model.weight_transfer=collective sends whole weights; an adapter is small: leave it out."
    if part.tensor_parallel_size > 1:
        return (
            f"inference_model.weight_transfer=collective sends to engines of one device, and tensor_parallel_size="
            f"{part.tensor_parallel_size}; leave it out."
        )
    if config.train_model.timeout_s <= part.timeout_s:
        return (
            f"train_model.timeout_s={config.train_model.timeout_s} must be above inference_model.timeout_s="
            f"{part.timeout_s}, the longest that a rank waits for an engine in a broadcast."
        )
    return None
