"""CUDA before anything uses it: why torch sees no GPU, and how torch allocates on one."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

from sota_grpo.config import Config, model_name
from sota_grpo.engines import ENGINES

NEEDED_DRIVERS = {12: 525, 13: 580}  # the oldest of each major version of CUDA (its release notes, table 3)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")  # the device of its driver
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads any of them


def why_no_gpu() -> str | None:
    """One sentence on a machine that has an NVIDIA driver and whose GPUs torch does not see; None where it has none."""
    driver = driver_version()
    if driver is None:
        return None
    import torch

    built_for = torch.version.cuda
    if built_for is None:
        return (
            f"This machine has the NVIDIA driver {driver}, and PyTorch {torch.__version__} is built without CUDA; "
            "install PyTorch for CUDA."
        )
    needed = NEEDED_DRIVERS.get(int(built_for.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < needed:
        return (
            f"This machine has the NVIDIA driver {driver}, and PyTorch {torch.__version__} is built for CUDA "
            f"{built_for}, which needs driver {needed} or newer; update the driver."
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"This machine has the NVIDIA driver {driver}, and PyTorch sees none of its GPUs; " + (
        "give the container its GPUs." if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} may hide them."
    )


def has_no_gpu() -> bool:
    """Whether it is certain that torch has no GPU here, without importing it: the library of a driver is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")  # what torch loads
    except OSError:
        return not _AMD.exists()
    return False


def needs_a_gpu(config: Config) -> str:
    """Why ``config`` cannot run on a machine without a GPU, in one sentence."""
    reason = why_no_gpu()
    if config.device == "cuda":
        return reason or "device=cuda, and this machine has no CUDA device; use device=cpu."
    if reason is not None:
        return f"{model_name(config)} is trained on a GPU (device=cpu insists). {reason}"
    return (
        f"{model_name(config)} is no folder here, and a model from the hub needs a CUDA GPU, which this machine "
        "has not; `python grpo.py --config-name grpo_cpu` trains the embedded policy here (device=cpu insists)."
    )


def driver_version() -> str | None:
    """Of the NVIDIA driver of this machine, for example ``550.54.15``; None without one."""
    with suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", _DRIVER_FILE.read_text())
        if found:
            return found[1]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    try:
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
            return None
    except AttributeError:  # a stub of the library
        return None
    return text.value.decode() or None


def use_expandable_segments(config: Config | None = None) -> None:
    """Have torch grow its segments on the GPU, so that less memory lies unused between them.

    torch reads it when it first allocates there. What the user has set stays. Processes that are started from here
    inherit it, and two kinds of engine cannot have it: vLLM's all-reduce under tensor parallelism hands its buffers to
    the other processes by handles that such segments have not (vllm-project/vllm#42609), and SGLang's memory saver
    refuses it. vLLM's sleep mode switches it off for its own pool (``vllm/device_allocator/cumem.py``).

    Args:
        config: of the run, in the process that starts its engines.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR):
        return
    if config is not None and (
        config.inference_model.tensor_parallel_size > 1
        or (config.engine.name != "auto" and not ENGINES[config.engine.name].expandable_segments)
    ):
        return
    os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
