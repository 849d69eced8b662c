"""Build the components that train: model, policy, objective, learner (or one rank of it), reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from sota_grpo.assembly.devices import Placement, device_name, reference_has_own_weights
from sota_grpo.config import Config, has_reference, kl_is_unbiased, model_name, num_steps, reference_name
from sota_grpo.config.memory_rules import micro_batch_tokens
from sota_grpo.config.mixture import longest_response
from sota_grpo.engines import ENGINES
from sota_grpo.engines.transformers_engine import require_cache
from sota_grpo.functional.log_probs import automatic_precision, builds_kernels
from sota_grpo.policy.causal import AdapterOffReference, CausalPolicy, Context, FrozenReference, ReferencePolicy
from sota_grpo.policy.load import (
    from_pretrained,
    load_model,
    load_tokenizer,
    model_digest,
    require_causal,
    require_rows,
    require_whole,
    resolve_model_path,
)
from sota_grpo.policy.lora import add_lora, quantize
from sota_grpo.policy.model_sizes import require_dense
from sota_grpo.policy.sharding import Ranks, join_ranks, require_divisible, shard
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.transforms import GroupAdvantage, OverlongPenalty, ReferenceKL
from sota_grpo.source.replay_buffer import Timed
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import LearnerWorker

MOST_TOKENS = 65_536  # per micro-batch, if its size is chosen automatically: more is no faster
_TIMES_WITHOUT_GRADIENT = 4  # a forward pass without gradients takes less than a tenth of the memory


def trainable_tokenizer(config: Config, engine: str) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer; UserError if policy or reference cannot be used. ``engine``: its resolved name."""
    name = model_name(config)
    loaded = from_pretrained(AutoConfig.from_pretrained, name, trust_remote_code=config.model.trust_remote_code)
    require_causal(name, loaded)
    require_dense(name, loaded.to_dict())
    require_whole(name, resolve_model_path(name))
    if (other := config.ref_model.name) is not None:
        option, trust = "ref_model.name", config.model.trust_remote_code
        theirs = from_pretrained(AutoConfig.from_pretrained, other, option, trust_remote_code=trust)
        require_causal(other, theirs, option)
        require_whole(other, resolve_model_path(other), option)
    if engine == "transformers":
        require_cache(loaded)
    if config.train_model.tensor_parallel_size > 1:
        require_divisible(name, loaded, config.train_model.tensor_parallel_size)
    tokenizer = load_tokenizer(name, trust_remote_code=config.model.trust_remote_code)
    require_rows(name, loaded.get_text_config().vocab_size, tokenizer)
    return tokenizer


def model_digests(config: Config) -> dict[str, str | None]:
    """Return {option: digest} of the policy's files and, if there is one, the reference's (:func:`model_digest`)."""
    names = {"model.name": model_name(config)}
    if has_reference(config):
        names["ref_model.name"] = reference_name(config)
    return {option: model_digest(name) for option, name in names.items()}


def make_model(config: Config, device: torch.device, *, weights: bool = True) -> PreTrainedModel:
    """Load the policy in training mode on ``device``, on the CPU if it is to be quantised; see :func:`load_model`."""
    options: Any = config.train_model
    return load_model(
        model_name(config),
        dtype=learner_dtype(config),
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=options.gradient_checkpointing,
        device="cpu" if config.model.quantization else device,  # it moves as it is quantised
        weights=weights,
        load_kwargs=config.model.load_kwargs,
    )


def add_adapter(config: Config, model: PreTrainedModel, device: torch.device | None = None) -> nn.Module:
    """Return ``model``; with ``train_model.lora`` it is frozen, in place, and has a new adapter, drawn from the seed.

    With ``model.quantization``, too, the frozen weights are quantised to 4 bits and moved to ``device`` (None: stay).
    """
    lora = config.train_model.lora
    if not lora.enabled:
        return model
    if config.model.quantization is not None:
        model = quantize(model, config.model.quantization, device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return add_lora(model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules)


def make_policy(
    config: Config, base: PreTrainedModel, device_type: str, device: torch.device | None = None
) -> CausalPolicy:
    """Return the policy: ``base``, changed in place by :func:`add_adapter`, with the sampling temperature."""
    return CausalPolicy(
        add_adapter(config, base, device),
        temperature=config.inference_model.temperature,
        entropy_grad=config.algorithm.entropy_coef > 0,
        shared_prompt=config.model.attn_implementation is None,
        fused=wants_fused_layers(config, device_type),
    )


def wants_fused_layers(config: Config, device_type: str) -> bool:
    """Whether learner and reference compile their layers: both or neither, so that they compute alike."""
    option = config.train_model.compile
    if config.model.quantization is not None or config.train_model.tensor_parallel_size > 1:
        return False  # not tried
    return device_type == "cuda" and builds_kernels() if option is None else option


def make_reference(
    config: Config, policy: CausalPolicy, placement: Placement, device_type: str, autocast: Context = nullcontext
) -> ReferencePolicy | None:
    """Return the reference for this process: the policy without its adapter, or another model; None if not needed."""
    if not has_reference(config):
        return None
    if not reference_has_own_weights(config):
        return AdapterOffReference(policy, autocast=autocast)
    options = reference_options(config, device_name(device_type, placement.ref))
    model = load_model(reference_name(config), **options["model"])
    settings = {name: options[name] for name in ("temperature", "shared_prompt", "fused")}
    return FrozenReference(model, autocast=autocast, **settings)


def reference_options(config: Config, device: str) -> dict[str, Any]:
    """Return the options of :func:`sota_grpo.workers.reference.reference_worker` that follow from the config."""
    device_type = device.partition(":")[0]
    return {
        "model": {
            "dtype": reference_dtype(config),
            "attn_implementation": config.model.attn_implementation,
            "trust_remote_code": config.model.trust_remote_code,
            "load_kwargs": config.model.load_kwargs,
            "device": device,
            "option": "model.name" if config.ref_model.name is None else "ref_model.name",
        },
        "shared_prompt": config.model.attn_implementation is None,
        "temperature": config.inference_model.temperature,
        "precision": trainer_precision(config, device_type),
        "token_budget": forward_tokens(micro_batch_tokens(config), device_type),
        "fused": wants_fused_layers(config, device_type),
    }


def forward_tokens(tokens: int, device_type: str) -> int:
    """Return the tokens of a forward-only micro-batch, given those of one in training: on a GPU up to 4 times as many.

    >>> [forward_tokens(tokens, "cuda") for tokens in (4096, 32768, 131072)], forward_tokens(4096, "cpu")
    ([16384, 65536, 131072], 4096)
    """
    return tokens if device_type == "cpu" else max(tokens, min(_TIMES_WITHOUT_GRADIENT * tokens, MOST_TOKENS))


def learner_dtype(config: Config) -> Any:
    """Return the name of the learner's dtype: ``train_model.torch_dtype``, for ``auto`` float32."""
    dtype = config.train_model.torch_dtype
    return "float32" if dtype == "auto" else dtype


def reference_dtype(config: Config) -> Any:
    """Return the name of the reference's dtype: ``ref_model.torch_dtype``, for ``auto`` the learner's."""
    dtype = config.ref_model.torch_dtype
    return learner_dtype(config) if dtype == "auto" else dtype


def trainer_precision(config: Config, device_type: str) -> str:
    """Return the autocast precision of learner and reference (``train.precision``, with ``auto`` resolved)."""
    return automatic_precision(config.train.precision, device_type)


def make_learner(
    config: Config,
    policy: CausalPolicy,
    tokenizer: PreTrainedTokenizerBase,
    device_type: str,
    run_dir: Path,
    ranks: Ranks | None = None,
) -> Learner:
    """Return the learner of this process; ``ranks`` is its process group, if several ranks train the policy.

    The batch of a step with a NaN or infinite loss or gradient is saved in ``run_dir``.
    """
    return Learner(
        policy,
        make_loss(config, policy),
        make_settings(config, device_type),
        pad_token_id=tokenizer.pad_token_id,
        dump_dir=run_dir,
        seed=config.seed,
        ranks=ranks,
        tokenizer=tokenizer,
    )


def make_loss(config: Config, actor: nn.Module) -> GRPOLoss:
    """Return the loss module of the config for the network ``actor``."""
    algorithm: Any = config.algorithm  # its strings are validated choices
    reads_dual_clip = kl_is_unbiased(config) or surrogate(algorithm.objective).reads("dual_clip")
    return GRPOLoss(
        actor,
        clip_epsilon=(algorithm.clip_low, algorithm.clip_high),
        kl_to_ref_coeff=config.policy.kl_coef if config.train.kl_coef_in_loss and config.policy.kl_coef else None,
        entropy_bonus=algorithm.entropy_coef > 0,
        entropy_coeff=algorithm.entropy_coef,
        objective=algorithm.objective,
        ratio=algorithm.ratio,
        dual_clip=algorithm.dual_clip if reads_dual_clip else None,
        off_policy_threshold=algorithm.off_policy_threshold,
        kl_estimator=algorithm.kl_estimator.removesuffix("_unbiased"),
        kl_unbiased=kl_is_unbiased(config),
        correction=None if algorithm.correction == "none" else algorithm.correction,
        correction_mode=algorithm.correction_mode,
        correction_cap=algorithm.correction_cap,
        correction_floor=algorithm.correction_floor,
        distill_coeff=algorithm.distill_coef,
        advantage_coeff=algorithm.advantage_coef,
    )


def make_settings(config: Config, device_type: str) -> LearnerSettings:
    """Return the learner's settings from the config's options, for a ``device_type`` of ``cpu`` or ``cuda``."""
    algorithm: Any = config.algorithm
    train, optimizer = config.train, config.optimizer
    per_collection = train.epochs * (train.dialog_turns_per_batch // train.optim_batch_size)
    return LearnerSettings(
        optimizer=optimizer.name,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        clip_grad_norm=optimizer.clip_grad_norm,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=per_collection * num_steps(config),
        optim_batch_size=train.optim_batch_size,
        epochs=train.epochs,
        micro_batch_tokens=micro_batch_tokens(config),
        forward_tokens=forward_tokens(micro_batch_tokens(config), device_type),
        aggregation=algorithm.aggregation,
        max_response_tokens=longest_response(config),
        drop_truncated=algorithm.drop_truncated,
        top_entropy_quantile=algorithm.top_entropy_quantile,
        entropy_target=algorithm.entropy_target,
        recompute=train.epochs > 1 or algorithm.correction != "none",
        precision=trainer_precision(config, device_type),
    )


def make_transforms(
    config: Config,
    reference: ReferencePolicy | None,
    pad_token_id: int,
    term_weights: Mapping[str, float],
    device_type: str,
) -> list[Timed]:
    """Return the transforms of a batch in order."""
    transforms = make_overlong(config)  # before the reference, so that the graded reward includes it
    if reference is not None:
        transform = ReferenceKL(
            reference,
            in_reward_coeff=kl_in_reward(config),
            pad_token_id=pad_token_id,
            token_budget=forward_tokens(micro_batch_tokens(config), device_type),
            shared_prompt=reference.shared_prompt,
        )
        transforms.append(Timed("ref", transform))
    return transforms + make_advantage(config, term_weights)


def kl_in_reward(config: Config) -> float | None:
    """Return the coefficient of the KL penalty in the reward; None if the penalty is in the loss or is 0."""
    return None if config.train.kl_coef_in_loss else config.policy.kl_coef or None


def make_overlong(config: Config) -> list[Timed]:
    """Return the transform of the overlong penalty in a list, ``[]`` if it is off."""
    buffer = config.algorithm.overlong_buffer
    return [Timed("score", OverlongPenalty(longest_response(config), buffer))] if buffer else []


def make_advantage(config: Config, term_weights: Mapping[str, float] | None = None) -> list[Timed]:
    """Return the transform that computes advantages in a list.

    ``term_weights``: weight of each reward term, for ``decouple_terms``; None: the weights in the rows.
    """
    algorithm: Any = config.algorithm
    options = {"decouple_terms": algorithm.decouple_terms, "term_weights": term_weights}
    return [Timed("score", GroupAdvantage(algorithm.baseline, algorithm.scale, **options))]


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads any of them


def use_expandable_segments(config: Config | None = None) -> None:
    """Set ``PYTORCH_ALLOC_CONF=expandable_segments:True``, unless the user has set options of torch's allocator.

    CUDA memory is then less fragmented. Child processes inherit the variable. It is not set if the run of ``config``
    has an engine that fails with it: vLLM under tensor parallelism, as its all-reduce shares buffers by handles that
    such segments lack (vllm-project/vllm#42609), or SGLang, whose memory saver refuses it.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR):
        return
    if config is not None and (
        config.inference_model.tensor_parallel_size > 1
        or (config.engine.name != "auto" and not ENGINES[config.engine.name].expandable_segments)
    ):
        return
    os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


_LONGEST_START_S = 3600.0  # until rank 0 has loaded the model; a rank without a heartbeat is ended much sooner


def learner_worker(
    *,
    config: Config,
    rank: int,
    size: int,
    init_method: str,
    device_type: str,
    num_threads: int,
    run_dir: str,
) -> LearnerWorker:
    """Return the worker of learner rank ``rank`` of ``size``; on ``cuda`` it uses this process's first visible GPU."""
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    device = torch.device("cuda:0" if device_type == "cuda" else "cpu")
    if device_type == "cuda":
        use_expandable_segments()

    def make() -> Learner:
        if device_type == "cpu":
            torch.set_num_threads(num_threads)
        loads_on = torch.device("cpu") if size > 1 else device
        base = make_model(config, loads_on, weights=rank == 0)  # the others receive theirs
        policy = make_policy(config, base, device_type, loads_on)
        ranks = join_ranks(
            rank,
            size,
            init_method=init_method,
            device=device,
            timeout_s=max(60.0, config.ray.timeout_s),
            start_timeout_s=_LONGEST_START_S,
            reduce_once=not config.train_model.shard_gradients,
            tensor_parallel=config.train_model.tensor_parallel_size,
            fsdp_size=config.train_model.fsdp_size,
        )
        if ranks.size > 1:
            shard(policy, ranks)
        return make_learner(config, policy, tokenizer, device_type, Path(run_dir), ranks)

    return LearnerWorker(make)
