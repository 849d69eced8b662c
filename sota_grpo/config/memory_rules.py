"""Rules of devices, of what saves memory, and of what vLLM alone has; see :mod:`.validators`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sota_grpo.config import Config, InferenceModelConfig, RefModelConfig, TrainModelConfig, has_reference
from sota_grpo.policy.optimizers import OPTIMIZERS

SHARED = "shared"  # the learner's devices
MICRO_BATCH_TOKENS = 16384  # of train.micro_batch_tokens=auto on a CPU


def shares_devices(config: Config) -> bool:
    """Whether engines stand on the learner's devices and take turns with it."""
    return config.inference_model.num_devices == SHARED


def device_count(role: TrainModelConfig | InferenceModelConfig | RefModelConfig) -> int | None:
    """Devices that a role asks for; None where it asks for none of its own."""
    if role.devices is not None:
        return len(role.devices)
    return None if isinstance(role.num_devices, str) else role.num_devices


def micro_batch_tokens(config: Config) -> int:
    """``train.micro_batch_tokens``; of ``auto`` that of a CPU, since a run on CUDA has put a number there before.

    >>> micro_batch_tokens(Config())
    16384
    """
    tokens = config.train.micro_batch_tokens
    return tokens if isinstance(tokens, int) else MICRO_BATCH_TOKENS


def micro_batches_have_a_number_of_tokens(config: Config) -> Iterator[str]:
    tokens = config.train.micro_batch_tokens
    if isinstance(tokens, str) and tokens != "auto":
        yield f"train.micro_batch_tokens={tokens} is no number of tokens; use auto or a number such as 16384."


def learner_ranks(config: Config) -> int:
    """Devices of the learner, an FSDP2 rank on each."""
    return device_count(config.train_model) or 1


def _has_workers(config: Config) -> bool:
    """Whether engines, references or ranks live in processes of their own."""
    roles = (config.train_model, config.inference_model, config.ref_model)
    several = any((device_count(role) or 1) > 1 for role in roles)
    return several or config.mode == "async" or config.ray.address is not None


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


def the_learners_devices_are_a_product(config: Config) -> Iterator[str]:
    learner, ranks = config.train_model, learner_ranks(config)
    parallel, size = learner.tensor_parallel_size, learner.fsdp_size or 1
    if min(parallel, size) < 1:
        return  # every_amount_is_positive says so
    if ranks % (parallel * size):
        option = "tensor_parallel_size" if ranks % parallel else "fsdp_size"
        least = parallel if ranks % parallel else parallel * size
        yield (
            f"train_model.{option}={getattr(learner, option)} does not divide the learner's {ranks} devices"
            f"{f' of tensor_parallel_size={parallel}' if option == 'fsdp_size' and parallel > 1 else ''}; use "
            f"train_model.num_devices={max(1, ranks // least) * least}."
        )


def matrices_are_divided_where_that_is_tested(config: Config) -> Iterator[str]:
    learner = config.train_model
    if learner.tensor_parallel_size == 1:
        return
    option = f"train_model.tensor_parallel_size={learner.tensor_parallel_size}"
    if config.optimizer.name == "muon":
        yield f"optimizer.name=muon makes steps of whole matrices orthogonal, and {option} divides them; use adamw."
    if learner.log_probs == "liger":
        yield f"train_model.log_probs=liger needs the whole head, and {option} divides it; use tiled."
    if config.train.precision == "fp16" and learner.lora.enabled:
        yield (
            f"train.precision=fp16 scales the loss by overflows that each device of {option} sees in its own "
            "columns of an adapter; use train.precision=bf16."
        )
    if learner.compile:
        yield f"train_model.compile=true has not been tried with {option}; leave it out."
    if learner.lora.enabled and learner.lora.dropout:
        yield (
            f"train_model.lora.dropout={learner.lora.dropout} would drop other inputs of an adapter on each device of "
            f"{option}; use train_model.lora.dropout=0."
        )


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
    ref = config.ref_model
    apart = _has_workers(config) or ref.num_devices is not None or ref.devices is not None
    if apart and has_reference(config) and ref.name is None:
        yield (
            f"model.quantization={kind} changes the base, and a reference that stands apart (mode=async, "
            "devices of its own) has the base as it is stored, so their KL would not begin at 0; use "
            "policy.kl_coef=0, or mode=sync on one device, where the reference is the base under the adapter."
        )
    if config.train_model.compile:
        yield f"train_model.compile=true cannot look into the products of model.quantization={kind}; leave it out."


def an_adapter_is_served_by_a_synchronous_vllm(config: Config) -> Iterator[str]:
    if not config.inference_model.serve_adapter:
        return
    option, name = "inference_model.serve_adapter=true", config.engine.name
    if not config.train_model.lora.enabled:
        yield f"{option} serves an adapter, and train_model.lora.enabled=false trains none; enable it."
    if name not in ("auto", "vllm"):
        yield f"{option} has no effect on engine={name}, which is given merged weights; use engine=vllm."
    if _has_workers(config) or config.inference_model.tensor_parallel_size > 1:
        yield (
            f"{option} is for one engine beside the learner in mode=sync, and mode={config.mode}, several devices of a "
            "role or ray.address have workers; leave it out: they merge the adapter."
        )
    if config.model.quantization is not None:
        yield (
            f"{option} leaves the engine's base as it is stored, and model.quantization={config.model.quantization} "
            "trains on another; leave one of them out."
        )


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
