"""Choose the devices of learner, engines and reference, and whether they are in this process or in workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sota_grpo.assembly.preflight import needs_a_gpu
from sota_grpo.assembly.sampling import engine_rows
from sota_grpo.config import Config, has_reference, model_name
from sota_grpo.config.memory_rules import micro_batch_tokens, shares_devices, wants_workers
from sota_grpo.config.mixture import longest_response
from sota_grpo.engines import resolve_engine_name
from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import builds_kernels
from sota_grpo.policy.load import resolve_model_path

FEW_ROWS = 64  # sequences decoded at once: with fewer, a GPU takes longer to read weights than to compute


@dataclass(frozen=True)
class Role:
    """The devices that the config requests for one role: a count, explicit indices, or neither (``default`` many)."""

    name: str
    num_devices: int | None = None
    devices: Sequence[int] | None = None
    default: int = 1
    shared: bool = False  # the engines use all devices of the learner

    @property
    def requested(self) -> bool:
        """Whether the config requests devices; a role without a request may share those of another role."""
        return self.num_devices is not None or self.devices is not None

    @property
    def option(self) -> str:
        """Name of the option that requests the devices; ``num_devices`` if none does."""
        return f"{self.name}.{'devices' if self.devices is not None else 'num_devices'}"

    @property
    def count(self) -> int:
        return len(self.devices) if self.devices is not None else (self.num_devices or self.default)


@dataclass(frozen=True)
class Placement:
    """Device indices of each role, from 0; on a CPU they only count the role's workers."""

    train: tuple[int, ...]
    inference: tuple[int, ...]
    ref: tuple[int, ...]
    colocated: bool  # engine and learner share a device; on a CPU always True


def place(train: Role, inference: Role, ref: Role | None, *, available: int, concurrent: bool = False) -> Placement:
    """Assign devices to the roles: the learner and each role that requests devices get different ones, others share.

    An engine without a request shares the learner's devices, unless they run at the same time (``concurrent``) and it
    is not ``shared``: then it gets its own. A reference without a request gets the first free device, else the
    learner's first. If there is only one device, and no role requests several, all roles share it. ``available`` is the
    number of GPUs; 0: the CPU, where the indices of a role only count its workers. UserError if a request cannot be
    met.

    Example:
        >>> place(Role("train_model"), Role("inference_model"), Role("ref_model"), available=2)
        Placement(train=(0,), inference=(0,), ref=(1,), colocated=True)
        >>> place(Role("train_model"), Role("inference_model", num_devices=1), None, available=4)
        Placement(train=(1,), inference=(0,), ref=(), colocated=False)
        >>> place(Role("train_model", num_devices=2), Role("inference_model", num_devices=2), None, available=0)
        Placement(train=(0, 1), inference=(0, 1), ref=(), colocated=True)
        >>> place(Role("train_model", num_devices=2), Role("inference_model", shared=True), None, available=2)
        Placement(train=(0, 1), inference=(0, 1), ref=(), colocated=True)
    """
    if available == 0:
        counted = [tuple(role.devices or range(role.count)) if role else () for role in (train, inference, ref)]
        return Placement(counted[0], counted[0 if inference.shared else 1], counted[2], colocated=True)
    # The engine chooses first: vLLM inside this process can only take the first device.
    roles = [role for role in (inference, train, ref) if role is not None]
    taken_by: dict[int, str] = {}
    for role in roles:
        for index in role.devices or ():
            if not 0 <= index < available:
                raise UserError(
                    f"{role.name}.devices has device {index}, but devices are numbered 0 to {available - 1}; use "
                    f"{role.name}.devices=[{available - 1}] or leave it out."
                )
            if index in taken_by and available > 1:
                raise UserError(f"{taken_by[index]}.devices and {role.name}.devices both have {index}; change one.")
            taken_by[index] = role.name
    if available == 1 and all(role.count == 1 for role in roles):
        return Placement((0,), (0,), (0,) if ref else (), colocated=True)
    apart = concurrent and not inference.shared
    needed = [role for role in roles if role.requested or role is train or (apart and role is inference)]
    _check_amount(needed, available)
    taken = {index for role in needed for index in role.devices or ()}
    free = [index for index in range(available) if index not in taken]
    devices: dict[str, tuple[int, ...]] = {}
    for role in needed:
        devices[role.name] = tuple(role.devices) if role.devices is not None else tuple(free[: role.count])
        free = [index for index in free if index not in devices[role.name]]
    learner = devices[train.name]
    engine = devices.get(inference.name, learner)
    reference = () if ref is None else devices.get(ref.name, tuple(free[:1]) or learner[:1])
    return Placement(learner, engine, reference, colocated=bool(set(engine) & set(learner)))


def describe(placement: Placement, device_type: str) -> str:
    """Return the placement as one line for the log.

    >>> describe(Placement((0, 1), (0, 1), (0,), colocated=True), "cpu")
    '2 learner ranks, 2 engines, 1 reference worker on the CPU'
    """
    roles = (placement.train, placement.inference, placement.ref)
    if device_type == "cpu":
        names = ("learner rank", "engine", "reference worker")
        counts = [(len(indices), name) for name, indices in zip(names, roles) if indices]
        return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts) + " on the CPU"
    names = ("learner", "engines", "reference")
    return ", ".join(
        f"{name} {' '.join(f'cuda:{i}' for i in indices)}" for name, indices in zip(names, roles) if indices
    )


def _check_amount(needed: Sequence[Role], total: int) -> None:
    num_devices = sum(role.count for role in needed)
    if num_devices <= total:
        return
    counts = ", ".join(f"{role.name}={role.count}" for role in needed)
    largest = max(needed, key=lambda role: role.count)
    if largest.count > 1:
        fix = f"{'lower' if largest.devices is None else 'shorten'} {largest.option}"
    else:
        shared = next((role for role in needed if role.requested), largest)
        fix = f"leave {shared.option} out, so that {shared.name} shares a device"
    raise UserError(f"{num_devices} devices are needed ({counts}), and {total} can be used; {fix}.")


@dataclass(frozen=True)
class Plan:
    """The devices and processes of a run."""

    device_type: str
    placement: Placement
    engine: str
    workers: bool  # engines, reference and several learner ranks are worker processes
    notes: tuple[str, ...] = ()  # sentences for the log
    shared: bool = False  # engines in workers share the learner's devices, and sleep while it trains


def resolve_device(config: Config) -> str:
    """Return the device type of the run, ``cuda`` or ``cpu``; UserError if its model or a necessary GPU is missing."""
    model = resolve_model_path(model_name(config))  # a mistyped folder is not a model from the hub
    if config.device == "cpu":
        return "cpu"
    of_cluster = config.device == "cuda" and config.ray.address is not None  # this machine may have none
    if of_cluster or torch.cuda.is_available():
        return "cuda"
    if config.device == "cuda" or not Path(model).is_dir():
        raise UserError(needs_a_gpu(config))
    return "cpu"


def reference_has_own_weights(config: Config) -> bool:
    """Whether the run loads weights for a reference: not for the policy without its adapter in the same process."""
    options = config.ref_model
    is_apart = options.num_devices is not None or options.devices is not None or wants_workers(config)
    is_the_base = config.train_model.lora.enabled and options.name is None
    return has_reference(config) and (is_apart or not is_the_base)


def make_plan(config: Config, device_type: str, num_gpus: int | None = None, engine: str | None = None) -> Plan:
    """Choose the engine, the devices and the processes of the run; UserError if a request cannot be met.

    If engine and learner have only one GPU, they alternate on it in this process, with ``mode=async`` too. ``num_gpus``
    None: all GPUs that this process sees. ``engine`` None: resolved from ``engine.name`` and the installed packages.
    """
    train, inference = config.train_model, config.inference_model
    shared, workers = shares_devices(config), wants_workers(config)
    notes: list[str] = []
    count = None if shared else inference.num_devices
    assert not isinstance(count, str)  # the rules have refused it
    learner = Role("train_model", train.num_devices, train.devices)
    engines = Role("inference_model", count, inference.devices, inference.tensor_parallel_size, shared)
    ref = Role("ref_model", config.ref_model.num_devices, config.ref_model.devices)
    reference = ref if reference_has_own_weights(config) else None
    engine = engine or resolve_engine_name(config.engine.name, device=device_type)
    available = 0
    if device_type == "cuda":
        available = torch.cuda.device_count() if num_gpus is None else num_gpus
    placement = place(learner, engines, reference, available=available, concurrent=workers)
    if engines.default > 1 and device_type == "cpu":
        raise UserError(
            f"inference_model.tensor_parallel_size={engines.default} needs GPUs; on a CPU leave it at 1, and use "
            f"inference_model.num_devices={engines.default} for as many engines."
        )
    taken = [*placement.train, *(() if shared else placement.inference), *placement.ref]
    if config.ray.address is not None and device_type == "cuda" and len(set(taken)) < len(taken):
        raise UserError(  # Ray gives each GPU to one process
            f"On a Ray cluster each role needs its own GPUs: {len(taken)} in all, and this one has {available}; add "
            f"nodes{', train without a reference' if reference else ''}, or leave ray.address out."
        )
    if workers and device_type == "cuda" and placement.colocated and not shared:
        notes.append("There is one GPU: sampling and training alternate on it, as in mode=sync.")
        workers = False
    if not workers and device_type == "cuda" and placement.inference[0] and engine == "vllm":
        raise UserError(
            f"engine=vllm in this process can only use the first visible GPU (0), but inference_model is placed on GPU "
            f"{placement.inference[0]}; use inference_model.devices=[0] with CUDA_VISIBLE_DEVICES in "
            f"another order, or engine=transformers."
        )
    if ref.requested and not has_reference(config):
        notes.append(f"{ref.option} has no effect: with policy.kl_coef=0 no reference is built.")
    if workers:
        turns = "; engines sleep while the learner computes" if shared else ""
        notes.append(f"Placement: {describe(placement, device_type)}{turns}.")
    plan = Plan(device_type, placement, engine, workers, tuple(notes), shared and workers)
    return replace(plan, notes=(*notes, *_idle_notes(config, plan))) if device_type == "cuda" else plan


def num_engines(config: Config, plan: Plan) -> int:
    """Return the number of engines of the run: 1 in this process, else one per ``tensor_parallel_size`` devices."""
    if not plan.workers:
        return 1
    return max(1, len(plan.placement.inference) // config.inference_model.tensor_parallel_size)


def _idle_notes(config: Config, plan: Plan) -> list[str]:
    """Return a message for each reason why GPUs would be partly idle."""
    shares = len(plan.placement.train) // config.train_model.tensor_parallel_size
    notes, engines = [], num_engines(config, plan)
    if config.train_model.compile is None and not builds_kernels():
        notes.append("Layers are not compiled, which is slow: compilation needs Triton and a C compiler; install them.")
    responses = config.train.dialog_turns_per_batch * (1 + config.train.max_policy_age) // engines
    rows = min(responses, engine_rows(config, plan.engine, "cuda", engines))
    if rows < FEW_ROWS:
        each = "The engine samples" if engines == 1 else f"Each of {engines} engines samples"
        width = "inference_model.max_num_seqs" if config.inference_model.max_num_seqs else "env.num_envs"
        fix = "train.dialog_turns_per_batch" if rows == responses else width
        notes.append(f"{each} at most {rows} responses at once; below {FEW_ROWS} a GPU is mostly idle: raise {fix}.")
    of_share = config.train.optim_batch_size // max(1, shares)
    if shares > 1 and of_share * longest_response(config) <= micro_batch_tokens(config):
        notes.append(
            f"Each of {shares} learner ranks gets {of_share} responses of an optimizer step, at most one micro-batch: "
            "raise train.optim_batch_size, or lower train_model.num_devices."
        )
    return notes


def device_name(device_type: str, indices: tuple[int, ...]) -> str:
    """Return torch's name of a role's first GPU, such as ``cuda:0``, or ``cpu``; ``indices``: its GPUs'."""
    return device_type if device_type == "cpu" else f"{device_type}:{indices[0]}"
