"""LoRA adapters that vLLM computes with unmerged: ``W x + (alpha / r) B A x``, the base weights as they were loaded."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sota_grpo.errors import UserError
from sota_grpo.policy.lora import AdapterPack

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 makes room for


def adapter_arguments(rank: int) -> dict[str, Any]:
    """What vLLM is started with to serve one adapter of ``rank``.

    Raises:
        UserError: vLLM has no room for such a rank.

    >>> adapter_arguments(12)
    {'enable_lora': True, 'max_loras': 1, 'max_lora_rank': 16}
    """
    room = next((most for most in RANKS if most >= rank), None)
    if room is None:
        raise UserError(f"train_model.lora.r={rank} is above {RANKS[-1]}, the highest rank that vLLM serves.")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


class Adapters:
    """The newest adapter as the folder that vLLM reads, in memory where the system has files there (``/dev/shm``)."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="sota_grpo_adapter_", dir=memory if memory.is_dir() else None))
        self._is_there = False

    def loading(self, adapter: AdapterPack) -> Any:
        """The request that makes vLLM read ``adapter`` in place of the one before."""
        write_adapter(adapter, self._folder)
        self._is_there = True
        return self._request(load_inplace=True)

    def request(self) -> Any:
        """The adapter of a request; None before the first."""
        return self._request() if self._is_there else None

    def _request(self, **options: Any) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, str(self._folder), **options)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def write_adapter(adapter: AdapterPack, folder: Path) -> None:
    """``adapter`` as PEFT saves one, with the names and the config that PEFT's loader and vLLM's ask for."""
    tensors, ranks = {}, set()
    for name, tensor in adapter.pack.tensors():
        weight, _, factor = name.rpartition(":")
        tensors[f"base_model.model.{weight.removesuffix('weight')}lora_{factor}.weight"] = tensor.contiguous()
        ranks.add(tensor.shape[0] if factor == "A" else tensor.shape[1])
    (rank,), (scale,) = ranks, set(adapter.scales.values())
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({weight.split(".")[-2] for weight in adapter.scales}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
