"""A dry run: where the parts of a run would stand, what they would hold, how long it would take. Nothing is trained.

How fast a device is comes from a probe: a few real passes of a model of the run's widths and few layers, timed. The
learner's rate is in floating-point operations per second, as :mod:`sota_grpo.functional.flops` counts them, and so
carries over to the whole model and to rows of any length. The engine's is the time of one token of all rows, which is
scaled by the weights that it reads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.benchmark import Timer

from sota_grpo.assembly.device_memory import GIB, THRESHOLD, TRAIN, Disk, Machine, RunMemory, disk_of
from sota_grpo.assembly.devices import Plan, describe
from sota_grpo.assembly.learning import make_settings
from sota_grpo.assembly.sampling import engine_dtype, kwargs_of_tasks, start_instances, task_of
from sota_grpo.config import Config, has_reference, model_name, num_steps
from sota_grpo.config.memory_rules import micro_batch_tokens
from sota_grpo.config.mixture import (
    groups_per_step,
    has_dialogs,
    longest_response,
    mean_group_size,
    mean_responses_per_step,
    task_configs,
)
from sota_grpo.config.spelling import overrides_of, with_options
from sota_grpo.config.validators import validate
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.functional.flops import ModelShape, forward_flops, recomputed_flops, shared_load, step_flops
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import MODEL_LOCK, find_architecture, load_tokenizer, resolve_model_path
from sota_grpo.policy.lora import add_lora
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.rl.records import GroupRequest, Sampling
from sota_grpo.rl.task import Task
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.training.subject import NUM_PROMPTS, NUM_SAMPLES

logger = logging.getLogger(__name__)

ASSUMED_GIB = 80  # of a GPU that is not here
ASSUMED_PROMPT = 512  # tokens of the longest prompt where neither tokenizer nor data are here
_BYTES_PER_TOKEN = 3  # of prompts whose tokenizer is not here; English text has four
_MOST_CHANGES = 3  # options that a proposal may touch
# the probe
_MOST_WEIGHTS, _MOST_VOCAB = 150_000_000, 16_384  # of the model that is timed, where its widths allow
_PROMPT, _RESPONSE, _GROUP = 64, 64, 8
_WORK, _MOST_GROUPS = 2e10, 16  # operations of a pass of the learner, and the groups that it takes at most
_TOKENS, _MOST_ROWS = 16, 128  # that the engine samples for each row; rows
_SECONDS = 2.0  # of the learner's passes, once warm


@dataclass(frozen=True)
class Times:
    """Seconds of a training step at full length, and what they were computed from."""

    learn_s: float
    sample_s: float
    response_s: float  # of one response in each of an engine's rows
    reference_s: float
    flops_per_s: float
    sampled_tokens_per_s: float

    @property
    def step_s(self) -> float:
        return self.learn_s + self.sample_s + self.reference_s


@dataclass(frozen=True)
class Estimate(RunMemory):
    """What is known of a run before it starts.

    Args:
        places: where the facts come from: ``model``, ``prompt``, ``machine``, one phrase each.
        num_problems, num_heldout: of the training split, and held out; None where the data is not here.
        change: the options of the smallest one that makes it fit; None where it fits, or where nothing helps.
        other_change: those of the smallest one that still trains all weights, where ``change`` does not.
        times: None where nothing was measured.
    """

    places: dict[str, str]
    num_problems: int | None
    num_heldout: int | None = None
    change: dict[str, Any] | None = None
    other_change: dict[str, Any] | None = None
    times: Times | None = None

    @property
    def refusal(self) -> str | None:
        """Why the run is not to be started, and what to change; None where it fits."""
        if self.fits:
            return None
        worst = self.worst
        reason = worst.problem or f"it needs {worst.peak / GIB:.1f} GiB and has {worst.capacity / GIB:.1f} GiB"
        if self.change is None:
            fix = "no change of memory options that is known here is enough; take a smaller model or larger devices"
        else:
            peak = self.with_options(self.change).worst.peak
            fix = f"use {' '.join(overrides_of(self.change))} ({peak / GIB:.1f} GiB)"
        if self.other_change is not None:
            fix += f", or, to train all weights, {' '.join(overrides_of(self.other_change))}"
        if worst.moments.get(TRAIN, {}).get("lost in the heap"):
            fix += f" ({THRESHOLD}=1048576 in the environment saves memory too, and costs time)"
        return f"The run does not fit on {worst.name}: {reason}; {fix}."

    @property
    def num_evaluations(self) -> int:
        """At the start, every ``eval.every`` steps, and at the end."""
        every = self.config.eval.every
        between = (num_steps(self.config) - 1) // every if every else 0
        return 2 + between if self.config.eval.mode == "on" else 0

    @property
    def responses(self) -> dict[str, int]:
        """Responses that the run samples: to train on, in all evaluations, and for the checks before training."""
        options = self.config.eval
        measured = options.num_samples if self.num_heldout is None else min(options.num_samples, self.num_heldout)
        return {
            "training": num_steps(self.config) * mean_responses_per_step(self.config),
            "evaluation": self.num_evaluations * measured * (1 + options.avg_at_k),
            "checks": NUM_PROMPTS * NUM_SAMPLES if self.config.check.mode != "off" else 0,
        }

    @property
    def seconds(self) -> dict[str, float] | None:
        """At full length, of what :attr:`responses` counts; None where nothing was measured.

        The checks sample once, and pass their rows through the learner about four times.
        """
        times = self.times
        if times is None:
            return None
        many, size = self.responses, mean_responses_per_step(self.config)
        return {
            "training": num_steps(self.config) * times.step_s,
            "evaluation": many["evaluation"] / size * times.sample_s,
            "checks": times.response_s + 4 * many["checks"] / size * times.learn_s if many["checks"] else 0.0,
        }

    @property
    def disk(self) -> Disk:
        """What is written to the run's directory."""
        return disk_of(self.config, self.model)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values, sizes in bytes."""
        prompt, response = self.largest_sample
        plan, disk = self.plan, self.disk
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
            "evaluations": self.num_evaluations,
            "responses": self.responses,
            "optimizer_steps": make_settings(self.config, plan.device_type).total_steps,
            "micro_batch_tokens": self.micro_batch_tokens,
            "micro_batches_per_step": len(self.micro_batches(self.row_shares)),
            "host_memory": self.host,
            "disk": asdict(disk) | {"total": disk.total},
            "devices": [asdict(device) | {"peak": device.peak} for device in self.devices],
            "seconds": asdict(self.times) | {"step_s": self.times.step_s, "in_all": self.seconds}
            if self.times
            else None,
        }


def estimate(
    config: Config,
    *,
    memory_gib: float | None = None,
    gpus: int | None = None,
    prompt_tokens: int | None = None,
    probe: bool = True,
) -> Estimate:
    """Plan the run of ``config``, add up its memory, and time a few passes where its device is here.

    Args:
        memory_gib: of each GPU, or of the machine on a CPU; None measures it, or assumes :data:`ASSUMED_GIB` GiB for
            a GPU that is not here.
        gpus: that there are, for the run and for what is proposed; None: those of this machine, or, where it has none,
            as many as the config asks for.
        prompt_tokens: of the longest prompt; None measures it.
        probe: whether to time anything, if it fits.

    Raises:
        UserError: the config breaks a rule, its devices cannot be shared out, its model or data cannot be read, or a
            prompt is longer than the context.
    """
    validate(config)
    (model, model_place), teacher = _architectures(config)
    machine, machine_place = _find_machine(config, memory_gib, gpus)
    run = RunMemory(config, model, prompt_tokens or 0, machine)
    longest, prompt_place, problems = _prompts(config, prompt_tokens, run.context)
    places = {"model": model_place, "prompt": prompt_place, "machine": machine_place}
    num_problems, num_heldout = problems or (None, None)
    run = Estimate(config, model, longest, machine, places, num_problems, num_heldout, teacher=teacher)
    if run.fits:
        return replace(run, times=_times(run)) if probe and machine.is_here else run
    change = smallest_change(run)
    trains_less = change is not None and "train_model.lora.enabled" in change
    return replace(run, change=change, other_change=smallest_change(run, with_lora=False) if trains_less else None)


def _architectures(config: Config) -> tuple[tuple[Architecture, str], Architecture | None]:
    """The shapes of policy (and how it is known) and of a reference that is another model."""
    trusts, other = config.model.trust_remote_code, config.ref_model.name
    model = find_architecture(model_name(config), trust_remote_code=trusts)
    return model, find_architecture(other, trust_remote_code=trusts)[0] if other is not None else None


def _find_machine(config: Config, memory_gib: float | None, gpus: int | None) -> tuple[Machine, str]:
    """Where the run would be, and how that is known.

    A config that says neither ``device`` nor a model of this machine is for GPUs, here or elsewhere.
    """
    memory = None if memory_gib is None else int(memory_gib * GIB)
    is_local = Path(resolve_model_path(model_name(config))).is_dir()
    elsewhere = config.ray.address is not None
    has_gpu = torch.cuda.is_available() and not elsewhere
    if config.device == "cpu" or (config.device == "auto" and is_local and not has_gpu and not elsewhere):
        libraries = psutil.Process().memory_info().rss  # this process has those of a run loaded and nothing else
        return Machine("cpu", memory or machine_bytes(), None, libraries), "the CPU of this machine"
    if has_gpu:
        gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        said = "" if gpus is None else f", {gpus} as --gpus says"
        return Machine(
            "cuda", memory or gpu.total_memory, gpus or count, 0
        ), f"{count} x {gpu.name} on this machine{said}"
    size, many = memory_gib or ASSUMED_GIB, "GPUs" if gpus is None else f"{gpus} GPU{'s' * (gpus > 1)}"
    source = "as --memory-gb says" if memory_gib else "assumed; --memory-gb says otherwise"
    machine = Machine("cuda", int(size * GIB), gpus, 0, is_here=False)
    return machine, f"{many} of {size:g} GiB, none of them here ({source})"


def with_micro_batches(config: Config, plan: Plan, prompt_tokens: int) -> Config:
    """The config of a run with its micro-batches: of ``train.micro_batch_tokens=auto`` on CUDA those of this estimate.

    Args:
        plan: of the run.
        prompt_tokens: of the longest prompt.
    """
    tokens = micro_batch_tokens(config)
    machine, _ = _find_machine(config, None, None)
    is_open = config.train.micro_batch_tokens == "auto" and plan.device_type == "cuda"
    if is_open and machine.is_here:
        model, teacher = _architectures(config)
        run = RunMemory(config, model[0], prompt_tokens, machine, teacher=teacher)
        vars(run)["plan"] = plan
        tokens = run.micro_batch_tokens
        logger.info(run.micro_batches_sentence)
    elif is_open:
        logger.info(
            "train.micro_batch_tokens=auto is %s: the learner's GPUs are not on this machine, so their memory is not "
            "known; sota-grpo estimate --memory-gb says how many tokens fill it.",
            f"{tokens:,}",
        )
    return with_options(config, {"train.micro_batch_tokens": tokens})


def machine_bytes() -> int:
    """Memory of this machine, or what its container may take of it."""
    limits = [psutil.virtual_memory().total]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit
            limits.append(int(Path(name).read_text()))
    return min(limits)


def _prompts(config: Config, prompt_tokens: int | None, context: int) -> tuple[int, str, tuple[int, int] | None]:
    """Tokens of the longest prompt, how they are known, and how many problems are for training and held out.

    What cannot be reached is assumed, but only of a hub: a path that is wrong is a mistake.
    """
    task: Task | None = None
    try:
        task = task_of(config)
    except DatasetError:
        named = ((each.env.dataset_path, each.env.eval_path) for each in task_configs(config).values())
        if any(paths != (None, None) for paths in named):
            raise
    count = None if task is None else (len(task.train), len(task.heldout))
    if prompt_tokens is not None:
        if prompt_tokens >= context:
            leaves = f"A prompt of {prompt_tokens:,} tokens leaves no room for a response"
            raise UserError(f"{leaves} in a context of {context:,}.")
        return prompt_tokens, "as --prompt-tokens says", count
    if task is None:
        guess = min(ASSUMED_PROMPT, max(context - longest_response(config), context // 2))
        return guess, "assumed, the data is not here; --prompt-tokens says otherwise", None
    try:
        tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    except UserError:
        if Path(resolve_model_path(model_name(config))).is_dir():
            raise
        texts = ("".join(message["content"] for message in task.messages(e)) for e in [*task.train, *task.heldout])
        guess = max(len(text.encode()) for text in texts) // _BYTES_PER_TOKEN + 32
        return guess, "from the length of its text, the tokenizer is not here", count
    lacks = ""
    with ExitStack() as opened:  # the prompts say which tools there are, and what they are for
        try:
            instances = start_instances(config, opened)
        except UserError as error:  # a server that is not up yet, or runs where training will
            instances, lacks = {}, f", without their tools: {error}"
        kwargs = kwargs_of_tasks(config, instances)
    limit = context - 1
    env = TaskEnv(task, tokenizer, multi_turn=has_dialogs(config), max_prompt_tokens=limit, **kwargs)
    longest = env.check_prompts(skip=config.env.skip_unreadable)
    return longest, f"the longest of {len(task.train) + len(task.heldout):,} prompts{lacks}", count


def smallest_change(run: RunMemory, *, with_lora: bool = True) -> dict[str, Any] | None:
    """Options of the change that asks least among those with which every device has room; None where none does.

    Each candidate is judged by the same arithmetic as the run itself, and must keep the rules of a config. What
    changes nothing but memory and time comes before what trains other weights, and that before more devices.

    Args:
        with_lora: whether training an adapter instead of all weights may be proposed.
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


def _times(run: RunMemory) -> Times:
    config, how, per_step = run.config, run.how, mean_responses_per_step(run.config)
    rows = min(per_step, run.engine_rows, _MOST_ROWS)
    flops_per_s, token_s = _measure(run, rows)
    (prompt, response), group = run.largest_sample, math.ceil(mean_group_size(config))
    shape = model_shape(run.model, how.rank)
    load = shared_load(prompt, [response] * group).times(groups_per_step(config))
    settings = make_settings(config, run.plan.device_type)
    learn = settings.epochs * (step_flops(shape, load) + recomputed_flops(shape, load, checkpointing=how.checkpointing))
    passes = int(settings.recompute) + (settings.epochs if settings.top_entropy_quantile < 1 else 0)
    learn += passes * forward_flops(shape, load)
    sample_s = per_step / (rows * run.num_engines) * response * token_s
    return Times(
        learn_s=learn / flops_per_s / run.num_ranks,
        sample_s=sample_s,
        response_s=response * token_s,
        reference_s=forward_flops(model_shape(run.teacher or run.model, 0), load) / flops_per_s
        if has_reference(config)
        else 0.0,
        flops_per_s=flops_per_s,
        sampled_tokens_per_s=per_step * response / sample_s,
    )


def _measure(run: RunMemory, rows: int) -> tuple[float, float]:
    """Time the learner and the embedded engine with a model of the same widths, made quickly for its few layers.

    Returns:
        Operations per second of the learner's passes, what they compute twice counted twice, and seconds in which the
        engine samples one token for each of ``rows`` rows of the whole model.
    """
    vocab, device = min(run.model.vocab, _MOST_VOCAB), run.plan.device_type
    room = max(0, _MOST_WEIGHTS - vocab * run.model.hidden) // run.model.layer_matrices
    small = replace(run.model, vocab=vocab, layers=min(run.model.layers, max(1, room)), tied=True, other=0)
    net = _random_model(small, device, torch.float32 if run.how.weight_bytes == 4 else torch.bfloat16)
    dtype = getattr(torch, engine_dtype(run.config.inference_model.torch_dtype, device))
    token_s = _token_seconds(net, small, rows, dtype) * _decode_weights(run.model) / _decode_weights(small)
    shape, one = model_shape(small, run.how.rank), shared_load(_PROMPT, [_RESPONSE] * _GROUP)
    groups = min(_MOST_GROUPS, 1 + int(_WORK / step_flops(shape, one)))
    load = one.times(groups)
    work = step_flops(shape, load) + recomputed_flops(shape, load, checkpointing=False)
    return work / _learn_seconds(net, small, run, groups), token_s


def model_shape(model: Architecture, rank: int) -> ModelShape:
    """What the operations of a model are counted from; ``rank`` of its adapter, 0 without."""
    matrices = model.layers * model.layer_matrices
    return ModelShape(
        trainable_weights=model.adapter_parameters(rank) if rank else matrices,
        frozen_weights=matrices if rank else 0,
        attention_width=model.layers * model.query_width,
        head_weights=model.head_weights,
        head_trainable=not rank,
    )


def _decode_weights(model: Architecture) -> int:
    """Weights that are read for every token: all layers' matrices and the head."""
    return model.layers * model.layer_matrices + model.head_weights


def _random_model(model: Architecture, device: str, dtype: torch.dtype) -> Any:
    """Weights that are all alike: they take no time to draw, and products do not depend on what is multiplied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    options: dict[str, Any] = {"head_dim": model.head_dim}  # not in its signature
    config = Qwen2Config(
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.intermediate,
        vocab_size=model.vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **options,
    )
    with MODEL_LOCK, torch.device("meta"):
        net: Any = Qwen2ForCausalLM(config)
    net = net.to(dtype).to_empty(device=device)
    net.tie_weights()
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.fill_(0.01)
    return net


def _learn_seconds(net: Any, model: Architecture, run: RunMemory, groups: int) -> float:
    """Of one forward and backward pass over so many groups, the fastest of some."""
    how, device = run.how, run.plan.device_type
    net = add_lora(net, r=how.rank, alpha=how.rank) if how.rank else net
    policy = CausalPolicy(net.train(), shared_prompt=not how.repeats_keys)
    rows = groups * _GROUP
    tokens = torch.arange(rows * (_PROMPT + _RESPONSE), device=device).view(rows, -1) % model.vocab
    tokens[:, :_PROMPT] = tokens[::_GROUP, :_PROMPT].repeat_interleave(_GROUP, 0)
    completion_mask = (torch.arange(_PROMPT + _RESPONSE, device=device) >= _PROMPT).expand(rows, -1)

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=how.product_bytes < how.weight_bytes):
            log_probs, _ = policy.log_probs(tokens, torch.ones_like(completion_mask), completion_mask)
        log_probs.sum().backward()
        policy.zero_grad(set_to_none=True)

    timer = Timer("once()", globals={"once": once}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_SECONDS).times)


def _token_seconds(net: Any, model: Architecture, rows: int, dtype: torch.dtype) -> float:
    """Of one token of all rows: the difference between a short and a longer response, which both have the prompt."""
    engine = TransformersEngine(
        net, eos_token_ids=[0], pad_token_id=0, max_model_len=1024, max_rows=rows, device=net.device, dtype=dtype
    )
    group = min(_GROUP, rows)
    prompt = tuple(1 + index % (model.vocab - 1) for index in range(_PROMPT))
    requests = [GroupRequest(index, prompt, group, index) for index in range(max(1, rows // group))]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        list(engine.generate(requests, Sampling(max_tokens=tokens, ignore_eos=True)))
        return time.perf_counter() - began

    seconds(2)  # the first call of everything
    short, long = seconds(1), seconds(1 + _TOKENS)
    engine.close()
    return max(long - short, 1e-6) / _TOKENS
