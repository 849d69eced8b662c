"""Weights for another process of this machine: a safetensors file in shared memory, deleted after it was read."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from sota_grpo.engines.checks import tied_names

logger = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")


def expected_weights(model_path: str, *, trust_remote_code: bool) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Names and shapes of the model's ``state_dict()``, and its tied names, without allocating it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sota_grpo.policy.load import MODEL_LOCK

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with MODEL_LOCK, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}, tied_names(model)


class WeightFolder:
    """A folder that only this user can read, in shared memory where that has room, else in the temporary folder.

    Args:
        shapes: of all weights that one push writes.
        dtype: in which they are written, that of the server; None: as they come.

    >>> folder = WeightFolder({"w": torch.Size([2])}, torch.float32)
    >>> push = folder.write({"w": torch.zeros(2)})
    >>> [file.name for file in push.iterdir()]
    ['model.safetensors']
    >>> folder.close()
    >>> push.exists()
    False
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype | None):
        self.dtype = dtype
        num_bytes = sum(math.prod(shape) for shape in shapes.values()) * (dtype or torch.float32).itemsize
        free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
        roomy = free is not None and free > num_bytes
        if free is not None and not roomy:
            logger.warning(
                "%s has %.2f GiB free and a push of weights takes %.2f GiB, so it goes through %s: start the container "
                "with a larger --shm-size (or --ipc=host).",
                _SHARED_MEMORY,
                free / 2**30,
                num_bytes / 2**30,
                tempfile.gettempdir(),
            )
        self.path = Path(tempfile.mkdtemp(prefix="sota-grpo-", dir=_SHARED_MEMORY if roomy else None))
        # also when the process ends while the thread that owns this is busy
        self._delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, weights: Mapping[str, torch.Tensor]) -> Path:
        """A new folder with all weights in ``model.safetensors``, as a model's folder has them; yours to delete.

        Raises:
            OSError: no room.
        """
        folder = Path(tempfile.mkdtemp(prefix="push-", dir=self.path))
        tensors: dict[str, torch.Tensor] = {}
        written: set[int] = set()
        for name, weight in weights.items():
            tensor = weight.detach().to("cpu", self.dtype).contiguous()
            # safetensors takes no two names of one memory, and readers need a tied weight under both its names
            tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        save_file(tensors, folder / "model.safetensors")
        return folder

    def close(self) -> None:
        """Delete everything; idempotent, and done at the end of this process too."""
        self._delete()
