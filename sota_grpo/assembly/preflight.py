"""What can be wrong with a run and is told at once, before torch is imported: rules, packages, paths, a missing GPU.

What takes torch to find out (a damaged model, prompts that are too long) is told when the run is put together.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sota_grpo.assembly.cuda import has_no_gpu, needs_a_gpu
from sota_grpo.assembly.passed import PASSED
from sota_grpo.config import Config, model_name, num_steps, turn_size
from sota_grpo.config.hub_token import use_config_token
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.policy.model_sizes import is_on_the_hub, missing_folder
from sota_grpo.policy.smollm2 import SMOLLM2, require_smollm2
from sota_grpo.recording.heartbeat import starting
from sota_grpo.recording.sinks import require_sinks
from sota_grpo.rewards import function_file
from sota_grpo.tasks import dataset, parameters
from sota_grpo.training.runs import require_free

logger = logging.getLogger(__name__)


def preflight(config: Config, run_dir: Path | None = None) -> None:
    """Judge the config, and what it names, as far as that needs nothing heavy.

    Args:
        run_dir: where the run would be written; None: nowhere.

    Raises:
        UserError: the run cannot start; the first reason.
    """
    use_config_token(config)
    validate(config)
    if run_dir is not None:
        require_free(run_dir, config.train.resume)
    require_sinks(config)
    sentence = missing_folder(model_name(config))
    if sentence is not None:
        raise UserError(sentence)
    if model_name(config) == SMOLLM2:
        require_smollm2()
    _require_gpu(config)
    for path in (config.env.dataset_path, config.env.eval_path):
        is_file = "source" in parameters(config.env.dataset) or Path(path or "").suffix in dataset.SUFFIXES
        if path not in (None, PASSED) and is_file:
            dataset.require_file(Path(path).expanduser())
    if config.reward.path not in (None, PASSED):
        function_file.require_file(Path(config.reward.path).expanduser())


def announce(config: Config) -> None:
    """The first words of a run that may start, before what takes longest to import is imported."""
    size = turn_size(config)
    logger.info(
        "Starting to train %s on %s (mode=%s, engine=%s, device=%s): %d turns of %d responses.",
        *(model_name(config), config.env.dataset, config.mode, config.engine.name, config.device),
        *(num_steps(config), size),
    )
    starting("Importing PyTorch and the libraries on it")


def _require_gpu(config: Config) -> None:
    """A part of what :func:`~sota_grpo.assembly.devices.resolve_device` says, where torch need not be asked."""
    wants_one = config.device == "cuda" or (config.device == "auto" and is_on_the_hub(model_name(config)))
    if wants_one and config.ray.address is None and has_no_gpu():
        raise UserError(needs_a_gpu(config))
