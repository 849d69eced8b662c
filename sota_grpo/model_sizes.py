"""The models behind ``model.size``: one instruction-tuned Qwen for each size of the reasoning preset."""

from __future__ import annotations

from sota_grpo.errors import UserError

_MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "4B": "Qwen/Qwen3-4B",  # Qwen2.5 has no model of this size
}
SIZES = tuple(_MODELS)


def model_of_size(size: str) -> str:
    """The hub name of the model with about ``size`` parameters, written as in :data:`SIZES`.

    Raises:
        UserError: there is none of that size.

    >>> model_of_size("0.5B")
    'Qwen/Qwen2.5-0.5B-Instruct'
    >>> model_of_size("0.5b")
    Traceback (most recent call last):
    sota_grpo.errors.UserError: model.size=0.5b is not one of 0.5B, 1.5B, 3B, 4B; for another model give model.name.
    """
    name = _MODELS.get(size)
    if name is None:
        raise UserError(f"model.size={size} is not one of {', '.join(SIZES)}; for another model give model.name.")
    return name
