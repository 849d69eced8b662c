"""A LoRA adapter on its way to engines that hold the base model: megabytes instead of gigabytes per publish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from sota_grpo.policy.lora import base_model
from sota_grpo.policy.weight_pack import WeightPack


@dataclass(frozen=True)
class AdapterPack:
    """``A [r, in]`` and ``B [out, r]`` of every adapted weight, and its scale ``alpha / r``.

    :meth:`merged` gives what :func:`~sota_grpo.policy.lora.engine_weights` gives, bit for bit: ``W + scale * B A``,
    computed in float32 one layer at a time and rounded to the dtype of ``W`` (Hu et al. 2021, arXiv:2106.09685, eq. 3).
    """

    pack: WeightPack
    scales: Mapping[str, float]

    @classmethod
    def of(cls, model: nn.Module) -> AdapterPack:
        """The adapter of a model of :func:`~sota_grpo.policy.lora.add_lora`.

        Raises:
            ValueError: the model has none.
        """
        tensors: list[tuple[str, torch.Tensor]] = []
        scales: dict[str, float] = {}
        for name, module in base_model(model).named_modules():
            if isinstance(module, LoraLinear):
                (adapter,) = module.active_adapters
                first: Any = module.lora_A[adapter]
                second: Any = module.lora_B[adapter]
                weight = f"{name}.weight"
                scales[weight] = float(module.scaling[adapter])
                tensors += [(f"{weight}:A", first.weight), (f"{weight}:B", second.weight)]
        if not scales:
            raise ValueError(f"{type(model).__name__} has no adapter; publish its weights instead")
        return cls(WeightPack.of(tensors), scales)

    def merged(self, base: WeightPack, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of ``base`` by name and on the CPU, the adapted ones merged.

        Args:
            base: of :func:`base_pack`.
            device: where the products are computed, one weight at a time: a thread of a CPU takes a minute for what a
                GPU does in a second.
        """
        adapter = {name: tensor.to(device) for name, tensor in self.pack.tensors()}
        for name, weight in base.tensors():
            scale = self.scales.get(name)
            if scale is None:
                yield name, weight
                continue
            delta = (adapter[f"{name}:B"] @ adapter[f"{name}:A"]) * scale
            wide = torch.promote_types(weight.dtype, torch.float32)
            merged = weight.to(device, wide) + delta.to(wide)
            yield name, merged.to(weight.dtype).cpu()


def base_pack(model: nn.Module) -> WeightPack:
    """The weights under the adapter of ``model``, under the base model's own names, for :meth:`AdapterPack.merged`."""
    inner = base_model(model)
    return WeightPack.of(
        (name.replace(".base_layer.", "."), value)
        for name, value in inner.state_dict().items()
        if ".lora_A." not in name and ".lora_B." not in name
    )
