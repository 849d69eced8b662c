"""From a config to the parts of a run: one function per part, each giving its room plain values only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sota_grpo.collectors import RolloutCollector, SyncSource
from sota_grpo.config import Config
from sota_grpo.engines import make_engine, resolve_engine_name
from sota_grpo.engines.base import Engine
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.evaluate import Evaluator
from sota_grpo.learner import Learner, LearnerSettings
from sota_grpo.objectives import GRPOLoss
from sota_grpo.placement import Placement, Role, place
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import load_model, load_tokenizer, resolve_model_path
from sota_grpo.policy.lora import add_lora, engine_weights
from sota_grpo.policy.reference import AdapterOffReference, FrozenReference, ProcessReference, ReferencePolicy
from sota_grpo.publish import Publisher
from sota_grpo.records import Sampling
from sota_grpo.tasks import make_task
from sota_grpo.tasks.base import Task
from sota_grpo.transforms import GroupAdvantage, OverlongPenalty, ReferenceKL

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """Everything a run is made of."""

    task: Task
    env: TaskEnv
    tokenizer: Any
    model: nn.Module
    engine: Engine
    reference: ReferencePolicy | None
    learner: Learner
    publisher: Publisher
    source: SyncSource
    evaluator: Evaluator
    sampling: Sampling
    exact: bool

    def close(self) -> None:
        """End what lives in other processes or holds a device; idempotent."""
        self.engine.close()
        if self.reference is not None:
            self.reference.close()


def resolve_device(config: Config) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        UserError: no GPU, and a model from the hub that nobody asked to train on the CPU.
    """
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise UserError("device=cuda, and this machine has no CUDA device; use device=cpu.")
        return "cuda"
    local = config.model.name == "tiny" or Path(config.model.name).is_dir()
    if config.device == "auto" and not local:
        raise UserError(
            f"Training {config.model.name} needs a CUDA GPU and this machine has none; "
            "`python grpo.py --config-name grpo_cpu` trains the embedded policy here (device=cpu insists)."
        )
    return "cpu"


def build(config: Config, run_dir: Path) -> Parts:
    """Assemble the run. What is cheap and can be wrong (data, prompts, devices) comes before what is slow."""
    device_type = resolve_device(config)
    placement = _placement(config, device_type)
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    task = _task(config)
    env = _env(config, task, tokenizer)
    torch.manual_seed(config.seed)
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", placement.train[0])
    model = _policy_model(config, device)
    policy = CausalPolicy(model, temperature=config.inference_model.temperature)
    sampling = _sampling(config)
    reference = _reference(config, policy, placement, device_type)
    engine = _engine(config, device_type, tokenizer, run_dir)
    try:
        learner = _learner(config, policy, tokenizer.pad_token_id, device_type, run_dir)
        collector = RolloutCollector(
            env,
            engine,
            sampling=sampling,
            dialog_turns_per_batch=config.train.dialog_turns_per_batch,
            total_dialog_turns=config.train.total_dialog_turns,
            seed=config.seed,
        )
        source = SyncSource(
            collector,
            _transforms(config, reference, tokenizer.pad_token_id),
            num_groups=config.train.dialog_turns_per_batch // config.env.repeats,
            refill=config.algorithm.dynamic_sampling,
            max_draws=config.algorithm.dynamic_sampling_max_draws,
            max_policy_age=config.train.max_policy_age,
        )
    except BaseException:
        engine.close()
        if reference is not None:
            reference.close()
        raise
    return Parts(
        task=task,
        env=env,
        tokenizer=tokenizer,
        model=model,
        engine=engine,
        reference=reference,
        learner=learner,
        publisher=Publisher(lambda: engine_weights(model), [engine]),
        source=source,
        evaluator=Evaluator(
            env,
            engine,
            task.heldout[: config.eval.num_samples],
            max_tokens=config.inference_model.max_tokens,
            avg_at_k=config.eval.avg_at_k,
            seed=config.seed,
        ),
        sampling=sampling,
        exact=_dtype(config.inference_model.torch_dtype, device_type) == "float32"
        and learner.settings.precision == "fp32"
        and config.train_model.torch_dtype in ("auto", "float32"),
    )


def _placement(config: Config, device_type: str) -> Placement:
    shares_weights = config.train_model.lora.enabled and config.ref_model.devices is None
    wants_reference = config.policy.kl_coef > 0 and not shares_weights
    roles = [
        Role(name, part.num_devices, part.devices)
        for name, part in (
            ("train_model", config.train_model),
            ("inference_model", config.inference_model),
            ("ref_model", config.ref_model),
        )
    ]
    several = [role for role in roles if role.count > 1]
    if several:
        raise UserError(
            f"{several[0].name} asks for {several[0].count} devices; the lockstep mode gives every role one device."
        )
    available = torch.cuda.device_count() if device_type == "cuda" else 0
    return place(roles[0], roles[1], roles[2] if wants_reference else None, available=available)


def _task(config: Config) -> Task:
    env = config.env
    if env.dataset == "arithmetic":
        return make_task("arithmetic", seed=config.seed, max_steps=env.difficulty, num_heldout=env.num_heldout)
    return make_task(
        env.dataset,
        path=env.dataset_path,
        num_heldout=env.num_heldout,
        max_samples=env.max_samples,
        answer_format=env.answer_format,
        format_weight=env.format_weight,
        system_prompt=env.system_prompt,
        seed=config.seed,
    )


def _env(config: Config, task: Task, tokenizer: Any) -> TaskEnv:
    env = TaskEnv(
        task,
        tokenizer,
        num_envs=config.env.num_envs,
        repeats=config.env.repeats,
        shuffle=config.env.shuffle,
        seed=config.seed,
        max_prompt_tokens=_max_model_len(config) - 1,
    )
    env.check_prompts()
    return env


def _max_model_len(config: Config) -> int:
    """Context of the run: what the config says, at most what the model allows."""
    from transformers import AutoConfig

    name, trust = resolve_model_path(config.model.name), config.model.trust_remote_code
    allowed = AutoConfig.from_pretrained(name, trust_remote_code=trust).max_position_embeddings
    return min(config.inference_model.max_model_len or allowed, allowed)


def _policy_model(config: Config, device: torch.device) -> nn.Module:
    part = config.train_model
    model = load_model(
        config.model.name,
        dtype="float32" if part.torch_dtype == "auto" else part.torch_dtype,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=part.gradient_checkpointing,
        device=device,
    )
    if not part.lora.enabled:
        return model
    return add_lora(model, r=part.lora.r, alpha=part.lora.alpha, dropout=part.lora.dropout)


def _sampling(config: Config) -> Sampling:
    part = config.inference_model
    return Sampling(
        max_tokens=part.max_tokens,
        temperature=part.temperature,
        top_p=part.top_p,
        top_k=part.top_k,
        ignore_eos=part.ignore_eos,
    )


def _dtype(name: str, device_type: str) -> str:
    return name if name != "auto" else ("bfloat16" if device_type == "cuda" else "float32")


def _engine(config: Config, device_type: str, tokenizer: Any, run_dir: Path) -> Engine:
    part = config.inference_model
    return make_engine(
        resolve_engine_name(config.engine.name),
        model_path=resolve_model_path(config.model.name),
        dtype=_dtype(part.torch_dtype, device_type),
        device=device_type,
        max_model_len=_max_model_len(config),
        max_rows=config.env.num_envs,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        gpu_memory_utilization=part.gpu_memory_utilization,
        enforce_eager=part.enforce_eager if part.enforce_eager is not None else device_type == "cpu",
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
    )


def _reference(config: Config, policy: CausalPolicy, placement: Placement, device_type: str) -> ReferencePolicy | None:
    if config.policy.kl_coef == 0:
        return None
    part, lora, temperature = config.ref_model, config.train_model.lora.enabled, config.inference_model.temperature
    if lora and part.devices is None and not part.process:
        return AdapterOffReference(policy)
    index = placement.ref[0] if placement.ref else 0
    options: dict[str, Any] = {
        "dtype": part.torch_dtype
        if part.torch_dtype != "auto"
        else str(next(policy.parameters()).dtype)[len("torch.") :],
        "attn_implementation": config.model.attn_implementation,
        "trust_remote_code": config.model.trust_remote_code,
        "device": "cpu" if device_type == "cpu" else f"cuda:{index}",
    }
    if part.process:
        return ProcessReference(config.model.name, temperature=temperature, deadline_s=part.timeout_s, **options)
    return FrozenReference(load_model(config.model.name, **options), temperature=temperature)


def _learner(config: Config, policy: CausalPolicy, pad_token_id: int, device_type: str, run_dir: Path) -> Learner:
    algorithm, train, optimizer = config.algorithm, config.train, config.optimizer
    steps_per_turn = train.epochs * (train.dialog_turns_per_batch // train.optim_batch_size)
    loss = GRPOLoss(
        policy,
        clip_epsilon=(algorithm.clip_low, algorithm.clip_high),
        kl_to_ref_coeff=config.policy.kl_coef if train.kl_coef_in_loss and config.policy.kl_coef else None,
        entropy_bonus=algorithm.entropy_coef > 0,
        entropy_coeff=algorithm.entropy_coef,
        objective=algorithm.objective,
        ratio=algorithm.ratio,
        dual_clip=algorithm.dual_clip,
        kl_estimator=algorithm.kl_estimator,
        correction=None if algorithm.correction == "none" else algorithm.correction,
        correction_mode=algorithm.correction_mode,
        correction_cap=algorithm.correction_cap,
    )
    settings = LearnerSettings(
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        clip_grad_norm=optimizer.clip_grad_norm,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=steps_per_turn * (train.total_dialog_turns // train.dialog_turns_per_batch),
        optim_batch_size=train.optim_batch_size,
        epochs=train.epochs,
        micro_batch_tokens=train.micro_batch_tokens,
        aggregation=algorithm.aggregation,
        max_response_tokens=config.inference_model.max_tokens,
        drop_truncated=algorithm.drop_truncated,
        recompute=train.epochs > 1 or algorithm.correction != "none",
        precision={"auto": "bf16" if device_type == "cuda" else "fp32"}.get(train.precision, train.precision),
    )
    return Learner(policy, loss, settings, pad_token_id=pad_token_id, dump_dir=run_dir, seed=config.seed)


def _transforms(config: Config, reference: ReferencePolicy | None, pad_token_id: int) -> list[tuple[str, Any]]:
    """What happens to a batch between the env and the learner, each with the phase its seconds count to."""
    algorithm, found = config.algorithm, []
    if reference is not None:
        in_reward = None if config.train.kl_coef_in_loss else config.policy.kl_coef
        transform = ReferenceKL(
            reference,
            in_reward_coeff=in_reward,
            pad_token_id=pad_token_id,
            token_budget=config.train.micro_batch_tokens,
        )
        found.append(("ref", transform))
    if algorithm.overlong_buffer:
        found.append(("score", OverlongPenalty(config.inference_model.max_tokens, algorithm.overlong_buffer)))
    found.append(("score", GroupAdvantage(algorithm.baseline, algorithm.scale)))
    return found
