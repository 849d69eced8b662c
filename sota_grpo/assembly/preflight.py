"""Check a config before torch is imported: rules, installed packages, paths, a missing GPU."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from sota_grpo.config import Config, model_name, num_steps, rubric_file
from sota_grpo.config.mixture import task_configs, tasks_named
from sota_grpo.config.secrets import require_tokens
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.files import file_reference, require_file
from sota_grpo.policy.model_sizes import is_on_the_hub, missing_folder
from sota_grpo.policy.optimizers import require_installed, require_package
from sota_grpo.policy.smollm2 import SMOLLM2, require_smollm2
from sota_grpo.recording.progress import starting
from sota_grpo.recording.sinks import require_sinks
from sota_grpo.rewards.functions import PASSED
from sota_grpo.tasks import dataset
from sota_grpo.tasks.servers import server_of
from sota_grpo.training.runs import require_free

logger = logging.getLogger(__name__)

NEEDED_DRIVERS = {12: 525, 13: 580}  # {major version of CUDA: oldest driver} (CUDA release notes, table 3)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")  # device file of the AMD driver


def preflight(config: Config, run_dir: Path | None = None) -> None:
    """Raise UserError with the first reason, of those found without torch, why the run cannot start.

    ``run_dir`` None: the run directory, and that only one process starts the run, are not checked.
    """
    require_tokens()
    validate(config)
    if run_dir is not None:
        processes = os.environ.get("WORLD_SIZE", "1")
        if "LOCAL_RANK" in os.environ and processes != "1":
            raise UserError(
                f"torchrun or another launcher has started this command {processes} times (WORLD_SIZE), and each would "
                f"train a whole run; start it once, without the launcher, with train_model.num_devices={processes}."
            )
        require_free(run_dir, config.train.resume)
    require_sinks(config)
    require_package(config.optimizer.name)
    if config.model.quantization is not None:
        require_installed("bitsandbytes", f"model.quantization={config.model.quantization}", "model.quantization=null")
    for option, name in (("model.name", model_name(config)), ("ref_model.name", config.ref_model.name)):
        sentence = name and missing_folder(name, option)
        if sentence:
            raise UserError(sentence)
        if name == SMOLLM2:
            require_smollm2()
    # the first half of assembly.devices.resolve_device, where torch need not be asked
    wants_gpu = config.device == "cuda" or (config.device == "auto" and is_on_the_hub(model_name(config)))
    if wants_gpu and config.ray.address is None and has_no_gpu():
        raise UserError(needs_a_gpu(config))
    for task in task_configs(config).values():
        _require_files(task)


def _require_files(config: Config) -> None:
    for path in (config.env.dataset_path, config.env.eval_path):
        if path not in (None, PASSED) and dataset.is_file(path):
            dataset.require_file(Path(path).expanduser())
    if config.reward.path not in (None, PASSED):
        require_file(Path(config.reward.path).expanduser(), "reward.path")
    named = [("env.transforms", value) for value in config.env.transforms]
    for option, value in (*named, ("train.sampler", config.train.sampler or "")):
        if (place := file_reference(value)) is not None:
            require_file(place[0], option)
    if (rubric := rubric_file(config.reward.judge.rubric)) is not None:
        require_file(rubric.expanduser(), "reward.judge.rubric")
    if (server := server_of(config.env.environment)) is not None:
        server.require()


def announce(config: Config) -> None:
    """Log the model, data and size of the run, and begin the stage of the slow imports."""
    logger.info(
        "Policy %s, task %s (mode=%s, engine=%s, device=%s): %d steps of %d responses.",
        *(model_name(config), tasks_named(config), config.mode, config.engine.name, config.device),
        *(num_steps(config), config.train.dialog_turns_per_batch),
    )
    starting("Importing PyTorch and the libraries on it")


def why_no_gpu() -> str | None:
    """Return the message why torch sees no GPU though there is an NVIDIA driver; None if there is no driver."""
    driver = driver_version()
    if driver is None:
        return None
    import torch

    here, built_for = f"This machine has the NVIDIA driver {driver}, and PyTorch", torch.version.cuda
    if built_for is None:
        return f"{here} {torch.__version__} is built without CUDA; install PyTorch for CUDA."
    needed = NEEDED_DRIVERS.get(int(built_for.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < needed:
        needs = f"which needs driver {needed} or newer; update the driver."
        return f"{here} {torch.__version__} is built for CUDA {built_for}, {needs}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    fix = "give the container its GPUs." if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} may hide them."
    return f"{here} sees none of its GPUs; {fix}"


def has_no_gpu() -> bool:
    """Whether this machine has neither NVIDIA's driver library nor AMD's driver, so no GPU; does not import torch."""
    try:
        ctypes.CDLL("libcuda.so.1")  # what torch loads
    except OSError:
        return not _AMD.exists()
    return False


def needs_a_gpu(config: Config) -> str:
    """Return the message why ``config`` cannot run on this machine, which has no GPU, and the fix."""
    reason = why_no_gpu()
    if config.device == "cuda":
        return reason or "device=cuda, and this machine has no CUDA device; use device=cpu."
    if reason is not None:
        return f"model.name={model_name(config)} needs a GPU, unless device=cpu is set. {reason}"
    return (
        f"model.name={model_name(config)} is not a folder, and a model of the hub needs a CUDA GPU, which this machine "
        "does not have; use device=cpu all the same, or `python grpo.py --config-name grpo_cpu` to train a tiny model."
    )


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, for example ``550.54.15``; None if no driver reports one."""
    with suppress(OSError):
        version = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", _DRIVER_FILE.read_text())
        if version:
            return version[1]
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
