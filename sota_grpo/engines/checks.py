"""What every engine checks before it works: the context has room, and pushed weights are the right ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from sota_grpo.records import GroupRequest, Sampling


def response_rooms(requests: Sequence[GroupRequest], sampling: Sampling, max_model_len: int) -> list[int]:
    """Most response tokens of each request: ``min(max_tokens, max_model_len - prompt tokens)``.

    Raises:
        ValueError: a prompt leaves no room for one token, a prompt is empty, or nothing is to be sampled.

    >>> request = GroupRequest(group_id=0, prompt_ids=(1, 2, 3), num_samples=1, seed=0)
    >>> response_rooms([request], Sampling(max_tokens=8), max_model_len=5)
    [2]
    """
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves nothing to sample; use at least 1.")
    for request in requests:
        if not request.prompt_ids or request.num_samples < 1:
            raise ValueError(
                f"Group {request.group_id} has {len(request.prompt_ids)} prompt tokens and num_samples="
                f"{request.num_samples}; both must be at least 1."
            )
        if len(request.prompt_ids) >= max_model_len:
            raise ValueError(
                f"The prompt of group {request.group_id} has {len(request.prompt_ids)} tokens and the context holds "
                f"max_model_len={max_model_len}: no room for a response; raise max_model_len or drop the prompt."
            )
    return [min(sampling.max_tokens, max_model_len - len(request.prompt_ids)) for request in requests]


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: Mapping[str, str],
    *,
    tied_required: bool,
) -> dict[str, torch.Tensor]:
    """The pushed weights by name, once it is certain that they replace every weight of the model.

    Args:
        weights: named tensors, names as in the ``state_dict()`` of the base model, adapters merged.
        shapes: name and shape of every weight of the model.
        tied: for each tied weight, the name of the weight it shares its values with.
        tied_required: the tied names must be given too (vLLM needs them).

    Raises:
        ValueError: an unknown name, a missing name, a wrong shape, or a tied pair with different values.

    >>> checked_weights([("a", torch.ones(2))], {"a": torch.Size([3])}, {}, tied_required=False)
    Traceback (most recent call last):
    ...
    ValueError: The pushed weight a has shape [2] and the engine's has [3]; push the weights of the same model.
    """
    given = dict(weights)
    if unknown := sorted(given.keys() - shapes.keys()):
        raise ValueError(
            f"{len(unknown)} of {len(given)} pushed weights are unknown to the engine, the first is {unknown[0]}; push "
            "the state_dict() of the base model, adapters merged."
        )
    optional = set() if tied_required else tied.keys()
    if missing := sorted(shapes.keys() - given.keys() - optional):
        hint = ""
        if missing[0] in tied:
            hint = f" ({missing[0]} is tied to {tied[missing[0]]}, yet without it the engine would keep the old one)"
        raise ValueError(
            f"{len(missing)} of {len(shapes)} weights are missing from the push, the first is {missing[0]}{hint}; "
            "push the whole state_dict(), not named_parameters()."
        )
    for name, tensor in given.items():
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"The pushed weight {name} has shape {list(tensor.shape)} and the engine's has {list(shapes[name])}; "
                "push the weights of the same model."
            )
    for name, partner in tied.items():
        if name in given and not _same_values(given[name], given[partner]):
            raise ValueError(f"{name} and {partner} are tied in the engine's model but differ in the push; untie it.")
    return given


def matrix_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all floating-point matrices among ``tensors``; None where they have several.

    >>> matrix, vector = torch.ones(2, 2), torch.ones(2)
    >>> matrix_dtype([matrix, vector.half()]), matrix_dtype([matrix, matrix.half()])
    (torch.float32, None)
    """
    of_matrices = [tensor for tensor in tensors if tensor.ndim > 1 or not tensor.numel()]  # vLLM empties what it packs
    found = {tensor.dtype for tensor in of_matrices if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Each name in the state dict that shares its parameter with an earlier one, and that earlier name.

    >>> embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    >>> head.weight = embed.weight
    >>> tied_names(torch.nn.ModuleDict({"embed": embed, "head": head}))
    {'head.weight': 'embed.weight'}
    """
    first_name: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied[name] = first_name[id(parameter)]
    return tied
