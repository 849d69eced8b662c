"""A dry run: where the parts of a run would be, and what they would hold. Nothing is loaded or trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import psutil
import torch

from sota_grpo.assembly.device_memory import GIB, Machine, RunMemory, disk_of
from sota_grpo.assembly.devices import Plan, describe
from sota_grpo.assembly.learning import make_settings
from sota_grpo.assembly.sampling import kwargs_of_tasks, start_instances, task_of
from sota_grpo.config import Config, model_name, num_steps
from sota_grpo.config.memory_rules import micro_batch_tokens
from sota_grpo.config.mixture import has_dialogs, longest_response, mean_responses_per_step, task_configs
from sota_grpo.config.spelling import overrides_of, with_options
from sota_grpo.config.validators import validate
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.policy.load import find_architecture, load_tokenizer, resolve_model_path
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.rl.task import Task
from sota_grpo.tasks.dataset import DatasetError

logger = logging.getLogger(__name__)

ASSUMED_GIB = 80  # of a GPU that is not here
ASSUMED_PROMPT = 512  # tokens of the longest prompt where neither tokenizer nor data are here
_MOST_CHANGES = 3  # options that a proposal may touch


@dataclass(frozen=True)
class Estimate(RunMemory):
    """What is known of a run before it starts."""

    places: dict[str, str]  # where the facts come from: model, prompt, machine, one phrase each
    num_problems: int | None  # of the training split; None where the data is not here
    change: dict[str, Any] | None = None  # the smallest one that makes it fit; None where it fits, or nothing helps
    other_change: dict[str, Any] | None = None  # the smallest one that trains all weights, where change does not

    @property
    def refusal(self) -> str | None:
        """Why the run is not to be started, and what to change; None where it fits."""
        if self.fits:
            return None
        worst = self.worst
        reason = worst.problem or f"it needs {worst.peak / GIB:.1f} GiB and has {worst.capacity / GIB:.1f} GiB"
        fix = "no change of memory options that is known here is enough; take a smaller model or larger devices"
        if self.change is not None:
            peak = self.with_options(self.change).worst.peak
            fix = f"use {' '.join(overrides_of(self.change))} ({peak / GIB:.1f} GiB)"
        if self.other_change is not None:
            fix += f", or, to train all weights, {' '.join(overrides_of(self.other_change))}"
        return f"The run does not fit on {worst.name}: {reason}; {fix}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values, sizes in bytes."""
        (prompt, response), plan, disk = self.largest_sample, self.plan, disk_of(self.config, self.model)
        return {
            "fits": self.fits,
            "refusal": self.refusal,
            "change": self.change,
            "model": {"name": model_name(self.config), "parameters": self.model.parameters},
            "places": self.places,
            "placement": describe(plan.placement, plan.device_type),
            "engine": plan.engine,
            "largest_sample": {"prompt_tokens": prompt, "response_tokens": response},
            "problems": self.num_problems,
            "responses_per_step": mean_responses_per_step(self.config),
            "steps": num_steps(self.config),
            "optimizer_steps": make_settings(self.config, plan.device_type).total_steps,
            "micro_batch_tokens": self.micro_batch_tokens,
            "micro_batches_per_step": len(self.micro_batches(self.row_shares)),
            "disk": asdict(disk) | {"total": disk.total},
            "devices": [asdict(device) | {"peak": device.peak} for device in self.devices],
        }


def estimate(
    config: Config, *, memory_gib: float | None = None, gpus: int | None = None, prompt_tokens: int | None = None
) -> Estimate:
    """Plan the run of a valid ``config`` and add up its memory; what is None is measured, or assumed.

    Args:
        memory_gib: of each GPU, or of the machine on a CPU.
        gpus: that there are, for the run and for what is proposed.
        prompt_tokens: of the longest prompt.

    Raises:
        UserError: its devices cannot be shared out, its model or data cannot be read, or a prompt is too long.
    """
    (model, model_place), teacher = _architectures(config)
    machine, machine_place = _machine(config, memory_gib, gpus)
    context = RunMemory(config, model, prompt_tokens or 0, machine).context
    longest, prompt_place, problems = _prompts(config, prompt_tokens, context)
    places = {"model": model_place, "prompt": prompt_place, "machine": machine_place}
    run = Estimate(config, model, longest, machine, places, problems, teacher=teacher)
    change = None if run.fits else _smallest_change(run)
    trains_less = change is not None and "train_model.lora.enabled" in change
    return replace(run, change=change, other_change=_smallest_change(run, with_lora=False) if trains_less else None)


def _architectures(config: Config) -> tuple[tuple[Architecture, str], Architecture | None]:
    """The shapes of policy (and how it is known) and of a reference that is another model."""
    trusts, other = config.model.trust_remote_code, config.ref_model.name
    model = find_architecture(model_name(config), trust_remote_code=trusts)
    return model, find_architecture(other, trust_remote_code=trusts)[0] if other is not None else None


def _machine(config: Config, memory_gib: float | None = None, gpus: int | None = None) -> tuple[Machine, str]:
    """Where the run would be, and how that is known; a model that is not here is for GPUs, perhaps elsewhere."""
    memory = None if memory_gib is None else int(memory_gib * GIB)
    elsewhere = config.ray.address is not None
    has_gpu = torch.cuda.is_available() and not elsewhere
    is_local = Path(resolve_model_path(model_name(config))).is_dir() and not elsewhere
    if config.device == "cpu" or (config.device == "auto" and is_local and not has_gpu):
        libraries = psutil.Process().memory_info().rss  # this process has those of a run loaded and nothing else
        return Machine("cpu", memory or machine_bytes(), libraries), "the CPU of this machine"
    if has_gpu:
        gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        machine = Machine("cuda", memory or gpu.total_memory, count=gpus or count)
        return machine, f"{machine.count} x {gpu.name}, of {count} on this machine"
    size, source = memory_gib or ASSUMED_GIB, "as" if memory_gib else "assumed unless"
    machine = Machine("cuda", int(size * GIB), count=gpus, is_here=False)
    return machine, f"GPUs of {size:g} GiB, none of them here, {source} --memory-gb says"


def with_micro_batches(config: Config, plan: Plan, prompt_tokens: int) -> Config:
    """The config of a run with its micro-batches; of ``train.micro_batch_tokens=auto`` on CUDA the estimate's."""
    tokens = micro_batch_tokens(config)
    if config.train.micro_batch_tokens == "auto" and plan.device_type == "cuda":
        machine, _ = _machine(config)
        sentence = f"train.micro_batch_tokens=auto is {tokens:,}: the learner's GPUs are not on this machine, so their "
        sentence += "memory is not known; sota-grpo estimate --memory-gb says how many tokens fill it."
        if machine.is_here:
            (model, _), teacher = _architectures(config)
            run = RunMemory(config, model, prompt_tokens, machine, teacher=teacher)
            vars(run)["plan"] = plan
            tokens, sentence = run.micro_batch_tokens, run.micro_batches_sentence
        logger.info(sentence)
    return with_options(config, {"train.micro_batch_tokens": tokens})


def machine_bytes() -> int:
    """Memory of this machine, or what its container may take of it."""
    limits = [psutil.virtual_memory().total]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit
            limits.append(int(Path(name).read_text()))
    return min(limits)


def _prompts(config: Config, prompt_tokens: int | None, context: int) -> tuple[int, str, int | None]:
    """Tokens of the longest prompt, how they are known, and how many problems are trained on; a hub may be away."""
    task: Task | None = None
    tokenizer: Any = None
    try:
        task = task_of(config)
    except DatasetError:
        if any((each.env.dataset_path, each.env.eval_path) != (None, None) for each in task_configs(config).values()):
            raise
    count = None if task is None else len(task.train)
    if prompt_tokens is not None:
        if prompt_tokens >= context:
            leaves = f"A prompt of {prompt_tokens:,} tokens leaves no room for a response"
            raise UserError(f"{leaves} in a context of {context:,}.")
        return prompt_tokens, "as --prompt-tokens says", count
    try:
        tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    except UserError:
        if Path(resolve_model_path(model_name(config))).is_dir():
            raise
    if task is None or tokenizer is None:
        guess = min(ASSUMED_PROMPT, max(context - longest_response(config), context // 2))
        missing = "data" if task is None else "tokenizer"
        return guess, f"assumed, the {missing} is not here; --prompt-tokens says otherwise", count
    lacks = ""
    with ExitStack() as opened:  # the prompts say which tools there are, and what they are for
        try:
            instances = start_instances(config, opened)
        except UserError as error:  # a server that is not up yet, or runs where training will
            instances, lacks = {}, f", without their tools: {error}"
        kwargs = kwargs_of_tasks(config, instances)
    env = TaskEnv(task, tokenizer, multi_turn=has_dialogs(config), max_prompt_tokens=context - 1, **kwargs)
    longest = env.check_prompts(skip=config.env.skip_unreadable)
    return longest, f"the longest of {len(task.train) + len(task.heldout):,} prompts{lacks}", count


def _smallest_change(run: RunMemory, *, with_lora: bool = True) -> dict[str, Any] | None:
    """Options of the change that asks least among those with which every device has room; None where none does.

    Each candidate is judged by the same arithmetic as the run itself, and must keep the rules of a config. What
    changes nothing but memory and time comes before what trains other weights, and that before more devices.
    """
    levers = [lever for lever in _levers(run, with_lora) if lever[1]]
    sets = [chosen for count in range(1, _MOST_CHANGES + 1) for chosen in combinations(levers, count)]
    for chosen in sorted(sets, key=lambda chosen: sum(price for price, _ in chosen)):
        moves = product(*(enumerate(settings) for _, settings in chosen))
        for move in sorted(moves, key=lambda move: sum(index for index, _ in move)):  # that move least in all first
            options = {name: value for _, setting in move for name, value in setting.items()}
            with suppress(UserError):  # it breaks a rule, or its devices cannot be shared out
                if (changed := run.with_options(options)).fits:
                    validate(changed.config)
                    return options
    return None


def _levers(run: RunMemory, with_lora: bool) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """What can be changed: how much each asks of the user, and its settings, the mildest first."""
    train, inference = run.config.train_model, run.config.inference_model
    kind = OPTIMIZERS[run.config.optimizer.name]
    longest, sizes = sum(run.largest_sample), [run.micro_batch_tokens]
    while sizes[-1] > longest:  # halved down to one that holds the longest sample: below that nothing changes
        sizes.append(sizes[-1] // 2)
    yield 1, [{"train.micro_batch_tokens": size} for size in sizes[1:]]
    yield 2, [] if train.gradient_checkpointing else [{"train_model.gradient_checkpointing": True}]
    if run.machine.device_type == "cuda":
        now = inference.gpu_memory_utilization
        shares = [share for share in (round(0.05 * step, 2) for step in range(2, 19)) if share != now]
        shares.sort(key=lambda share: (abs(share - now), share))
        yield 2, [{"inference_model.gpu_memory_utilization": share} for share in shares]
        tight = -(-longest // 256) * 256  # a context that holds the largest sample and little more
        yield 3, [{"inference_model.max_model_len": tight}] if tight < run.context else []
        divides = kind.over_ranks and run.config.model.quantization is None
        yield 16, [{"train_model.num_devices": n} for n in (2, 4, 8) if divides and n > (train.num_devices or 1)]
        yield 16, [{"inference_model.num_devices": 1}] if inference.num_devices is None else []
        yield 18, [{"inference_model.tensor_parallel_size": n, "inference_model.num_devices": n} for n in (2, 4, 8)]
        yield 3, [] if train.shard_gradients else [{"train_model.shard_gradients": True}]
    # for frozen weights: trained ones should not be in half precision
    halves = [{"train_model.torch_dtype": "bfloat16"}] if train.torch_dtype in ("auto", "float32") else []
    if train.lora.enabled:
        yield 4, halves
    elif with_lora and kind.trains_adapters:
        adapter = {"train_model.lora.enabled": True}
        yield 8, [adapter, *(adapter | half for half in halves)]
