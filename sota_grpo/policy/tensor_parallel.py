"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): ranks that see the same rows divide every matrix::

    q k v, gate up     by outputs ("colwise"): each rank has some of the heads, some of the MLP's width
    o, down            by inputs ("rowwise"): each rank has a part of the sum, which is added over the ranks
    embedding, head    by ids: a token's embedding is one rank's; log-probs are joined
                       (:class:`sota_grpo.functional.log_probs.VocabShard`)
    norms              whole on every rank

Which matrix is which stands in transformers' own plan of the model (``base_model_tp_plan``). FSDP2 then divides what a
rank has left among those that see other rows (:mod:`sota_grpo.policy.sharding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedConfig, PreTrainedModel

from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import VocabShard

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose gradients are tested to be those of one rank


def require_divisible(name: str, config: PreTrainedConfig, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can divide the matrices of a model, by its ``config.json``.

    >>> from transformers import LlamaConfig
    >>> require_divisible("m", LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 16)
    Traceback (most recent call last):
    sota_grpo.errors.UserError: train_model.tensor_parallel_size=16 divides num_key_value_heads=8 of model.name=m, \
which is no multiple of it; use train_model.tensor_parallel_size=8.
    """
    text: Any = config.get_text_config()
    if text.model_type not in FAMILIES:
        raise UserError(
            f"train_model.tensor_parallel_size={size} is tested for {', '.join(FAMILIES)}, and model.name={name} is "
            f"{text.model_type}; use train_model.tensor_parallel_size=1."
        )
    heads = text.num_attention_heads
    numbers = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "intermediate_size": text.intermediate_size,
        "vocab_size": text.vocab_size,
    }
    for key, number in numbers.items():
        if number % size:
            fits = max(n for n in range(1, size) if not any(each % n for each in numbers.values()))
            raise UserError(
                f"train_model.tensor_parallel_size={size} divides {key}={number} of model.name={name}, which is no "
                f"multiple of it; use train_model.tensor_parallel_size={fits}."
            )


class WholeWeights(ParallelStyle):
    """A module whose weights every rank keeps whole, over inputs that are whole too, or divided by heads.

    Divided inputs give each rank a part of the gradient of the weights (norms of queries and keys), which is added.
    ``layout`` is that of its one input, and of its output.
    """

    def __init__(self, layout: Placement):
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_name: str, inner: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(inner.named_parameters(recurse=False)):
                setattr(inner, name, _cut(parameter, mesh, Replicate()))

        def annotated(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            known = isinstance(inputs[0], DTensor)
            return inputs[0] if known else DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

        return distribute_module(module, device_mesh, replicate, annotated, lambda _, outputs, mesh: outputs.to_local())


def _cut(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a parameter that every rank has whole; nothing is sent."""
    own = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def divide_layer(layer: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Leave this rank its shard of a decoder layer, in place; adapters are divided as the matrices under them.

    ``plan`` is transformers' ``base_model_tp_plan``.
    """
    styles: dict[str, ParallelStyle] = {}
    for path, kind in plan.items():
        name = path.removeprefix("layers.*.")
        if name != path:
            styles |= _styles(name, kind, layer)
    whole = {
        name: WholeWeights(Replicate())
        for name, module in layer.named_modules()
        if name not in styles and next(module.parameters(recurse=False), None) is not None
    }
    parallelize_module(layer, mesh, {**styles, **whole, **_INPUTS}, src_data_rank=None)


#: What several matrices read is annotated once, so that its gradient is added over the ranks once and not for each.
_WHOLE: dict[str, Placement] = {"hidden_states": Replicate()}
_INPUTS: dict[str, ParallelStyle] = {
    "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "self_attn": PrepareModuleInput(input_kwarg_layouts=_WHOLE, desired_input_kwarg_layouts=_WHOLE),
}


def _styles(name: str, kind: str, layer: nn.Module) -> dict[str, ParallelStyle]:
    """Of one module of the plan, or of the matrix and the two factors that it has become."""
    if kind == "replicated_with_grad_allreduce":
        return {name: WholeWeights(Shard(2))}  # [1, L, heads, width]
    if kind not in ("colwise", "rowwise"):
        raise NotImplementedError(f"transformers' plan divides {name} as {kind}, which is not known here")
    parallel = ColwiseParallel if kind == "colwise" else RowwiseParallel
    module: Any = layer.get_submodule(name)
    if not hasattr(module, "lora_A"):
        return {name: parallel()}
    (adapter,) = module.active_adapters
    first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
    divided, whole = (second, first) if kind == "colwise" else (first, second)
    return {f"{name}.base_layer": parallel(), divided: parallel(), whole: WholeWeights(Replicate())}


def divide_ends(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave this rank its ids of the embedding and of the head, in place; tied ones stay tied."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head.weight is embedding.weight
    by_ids = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh, by_ids, src_data_rank=None)
    head.weight = embedding.weight if tied else _cut(head.weight, mesh, Shard(0))
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if any(not isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(module, mesh, WholeWeights(Replicate()), src_data_rank=None)


def vocab_shard(weight: DTensor) -> tuple[torch.Tensor, VocabShard]:
    """The rows of a divided head that this rank has, and where they stand in the whole."""
    own, mesh = weight.to_local(), weight.device_mesh
    return own, VocabShard(mesh.get_local_rank() * len(own), mesh.get_group())
