"""What is set once in a process: the answers of ``torch.cuda``, modules that move, checkpoints, threads."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pretended_cuda import guard, imports
from tests.pretended_cuda.counters import MEMORY, note_wait
from tests.pretended_cuda.tensor import CUDA, DEFAULT_GENERATOR, PretendedTensor, answer_for_cuda

PROPERTIES = SimpleNamespace(**guard.H100)

_kept: list[Any] = []


class _Done:
    """A stream whose work is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.at, self.priority = 0.0, options.get("priority", 0)

    def query(self) -> bool:
        return True

    def wait(self, other: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        note_wait(f"{type(self).__name__}.synchronize")


class Event(_Done):
    """``torch.cuda.Event``; it keeps the host's clock."""

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Stream(_Done):
    """``torch.cuda.Stream``."""

    device, device_type = CUDA, 1
    device_index = stream_id = cuda_stream = 0
    wait_event = wait_stream = _Done.wait

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def install() -> None:
    """Set the device of the process.

    The guard must be loaded (:func:`tests.pretended_cuda.guard.load`). There is no way back.
    """
    _kept.extend(answer_for_cuda())
    _answer_queries()
    _answer_memory()
    _answer_random()
    _compile_nothing()
    _profile_the_cpu()
    # a parameter that moves stays the same object, as its data would on CUDA: tied weights stay tied
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils._foreach_utils._foreach_supported_types.append(PretendedTensor)  # as for plain tensors on CUDA
    _join_with_gloo()
    imports.around("sota_grpo.training.checkpoint", after=_save_plain_tensors)
    imports.around("sota_grpo.functional.tile_kernels", after=_interpret_kernels)
    imports.around("triton.runtime.interpreter", after=_pass_floats)
    imports.around("triton.language.extra.libdevice", after=_find_square_roots)


def _interpret_kernels(module: ModuleType) -> None:
    """Triton's interpreter (TRITON_INTERPRET=1) works on CPU tensors, in place."""

    def on_the_cpu(launch: Callable[..., None]) -> Callable[..., None]:
        def launched(*args: Any, **options: Any) -> None:
            everything = [*args, *options.values()]
            if len({tensor.device for tensor in everything if isinstance(tensor, Tensor)}) > 1:
                raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            launch(*(_inner(each) for each in args), **{name: _inner(each) for name, each in options.items()})

        return launched

    for name in ("scan", "pull"):
        setattr(module, name, on_the_cpu(getattr(module, name)))


def _pass_floats(interpreter: ModuleType) -> None:
    """A float reaches a kernel as an fp32 scalar, as compiled kernels have it, and not as Python's."""
    convert = interpreter._implicit_cvt

    def as_scalar(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        language = interpreter.tl
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = as_scalar


def _find_square_roots(libdevice: ModuleType) -> None:
    """``rsqrt``, which norms of other houses take from CUDA's own library, is the interpreter's."""
    from triton.language.math import rsqrt
    from triton.runtime.interpreter import interpreter_semantic

    libdevice.rsqrt = functools.partial(rsqrt, _semantic=interpreter_semantic)  # type: ignore[attr-defined]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PretendedTensor) else value


def _answer(module: ModuleType, answers: Mapping[str, Any]) -> None:
    for name, answer in answers.items():
        setattr(module, name, answer)


def _answer_queries() -> None:
    stream = Stream()
    answers: dict[str, Callable[..., Any] | type] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "can_device_access_peer": lambda device, peer: False,
        "synchronize": lambda device=None: note_wait("torch.cuda.synchronize"),
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    _answer(torch.cuda, answers)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # requested when libraries are imported
    for name in ("init", "_lazy_init", "set_device", "ipc_collect", "set_stream"):
        setattr(torch.cuda, name, lambda *args, **options: None)  # a function each: torch compares identities


def _answer_memory() -> None:
    def stats(device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": MEMORY.allocated,
            "allocated_bytes.all.peak": MEMORY.peak,
            "reserved_bytes.all.current": MEMORY.reserved,
            "reserved_bytes.all.peak": MEMORY.peak_reserved,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    answers: dict[str, Callable[..., Any]] = {
        "memory_allocated": lambda device=None: MEMORY.allocated,
        "max_memory_allocated": lambda device=None: MEMORY.peak,
        "memory_reserved": lambda device=None: MEMORY.reserved,
        "max_memory_reserved": lambda device=None: MEMORY.peak_reserved,
        "reset_peak_memory_stats": lambda device=None: MEMORY.reset_peak(),
        "reset_max_memory_allocated": lambda device=None: MEMORY.reset_peak(),
        "empty_cache": lambda: MEMORY.release_cached(),
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory - MEMORY.reserved, PROPERTIES.total_memory),
        "memory_stats": stats,
        "memory_summary": lambda device=None, abbreviated=False: str(stats()),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }
    _answer(torch.cuda, answers)
    _answer(torch.cuda.memory, {name: answer for name, answer in answers.items() if hasattr(torch.cuda.memory, name)})


def _answer_random() -> None:
    generator = DEFAULT_GENERATOR
    answers: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(*states),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), generator.manual_seed),
        **dict.fromkeys(("seed", "seed_all"), generator.seed),
        "initial_seed": generator.initial_seed,
    }
    _answer(torch.cuda, answers)
    _answer(torch.cuda.random, answers)
    torch.cuda.default_generators = (DEFAULT_GENERATOR,)


def _compile_nothing() -> None:
    """``torch.compile`` would require Triton and a GPU: the function itself is what it must equal."""

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = compile_nothing
    torch.nn.Module.compile = lambda self, *args, **options: None


def _profile_the_cpu() -> None:
    """The profiler would complain of every operation that it has no CUDA event; the device's columns stay 0."""
    profiler = torch.profiler.profiler._KinetoProfile
    original = profiler.__init__

    @functools.wraps(original)
    def init(self: Any, *, activities: Any = None, **options: Any) -> None:
        original(self, activities={torch.profiler.ProfilerActivity.CPU}, **options)

    profiler.__init__ = init


def _join_with_gloo() -> None:
    """NCCL is not in a CPU build; gloo carries what the pretended tensors hold."""
    original = dist.init_process_group

    @functools.wraps(original)
    def init(backend: str | None = None, *args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        original("cpu:gloo,cuda:gloo" if backend in ("nccl", None) else backend, *args, **options)

    dist.init_process_group = init
    dist.distributed_c10d.init_process_group = init


def _save_plain_tensors(checkpoint: ModuleType) -> None:
    """Checkpoints hold plain tensors only; on CUDA these are plain."""
    original = checkpoint.CheckpointStore.save

    @functools.wraps(original)
    def save(self: Any, step: int, state: Any, shards: Any = None) -> Any:
        return original(self, step, plain(state), shards)

    checkpoint.CheckpointStore.save = save


def plain(value: Any) -> Any:
    """Pretended tensors in dicts, lists and tuples as CPU tensors."""
    if isinstance(value, PretendedTensor):
        return value.inner.detach().clone()
    if isinstance(value, dict):
        return type(value)((name, plain(item)) for name, item in value.items())
    return type(value)(plain(item) for item in value) if type(value) in (list, tuple) else value
