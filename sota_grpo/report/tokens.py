"""What is known of each token of a stored response: ratio, entropy, KL to the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sota_grpo.report.encode import number

_HEAD, _TAIL = 2_500, 500  # tokens that are kept of a longer response
_DIGITS = 3
_OVERFLOW = 700.0  # exp of more is no float

Values = Sequence[float | None]


def token_columns(row: Mapping[str, Any], estimator: str) -> dict[str, Any] | None:
    """The tokens after the prompt with what is known of each, or None where the row has no tokens.

    ``pieces`` is the text; ``said`` is missing where the policy wrote every token, else 1 for those it wrote;
    ``ratio``, ``kl`` and ``entropy`` are missing where they were not stored, and null for tokens it did not write;
    ``gap`` is the place and the number of the tokens left out of a very long response.

    >>> row = {"pieces": ["4", "2"], "assistant": [True, True], "log_probs": [-1.0, -2.0],
    ...        "policy_log_probs": [-1.0, -1.5], "ref_log_probs": None, "entropy": [0.5, 1.0]}
    >>> token_columns(row, "k3")
    {'pieces': ['4', '2'], 'ratio': [1, 1.65], 'entropy': [0.5, 1]}
    """
    pieces, said = row.get("pieces"), row.get("assistant")
    if not pieces or said is None:
        return None
    behaviour, policy = row.get("log_probs"), row.get("policy_log_probs")
    reference = row.get("ref_log_probs")
    columns: dict[str, list[Any] | None] = {
        "pieces": list(pieces),
        "said": None if all(said) else [int(one) for one in said],
        "ratio": _each(_ratio, policy, behaviour, said),
        "entropy": _each(lambda entropy, _: entropy, row.get("entropy"), row.get("entropy"), said),
        "kl": _each(_KL.get(estimator, _k3), policy or behaviour, reference, said),
    }
    found: dict[str, Any] = {name: _ends(column) for name, column in columns.items() if column is not None}
    left = len(pieces) - _HEAD - _TAIL
    return found | ({"gap": [_HEAD, left]} if left > 0 else {})


def _ends(column: list[Any]) -> list[Any]:
    return column if len(column) <= _HEAD + _TAIL else column[:_HEAD] + column[-_TAIL:]


def _each(
    measure: Callable[[float, float], float], first: Values | None, second: Values | None, said: Sequence[bool]
) -> list[float | int | None] | None:
    if first is None or second is None:
        return None
    return [
        number(measure(a, b), _DIGITS) if wrote and a is not None and b is not None else None
        for a, b, wrote in zip(first, second, said)
    ]


def _ratio(log_prob: float, behaviour: float) -> float:
    return math.exp(min(log_prob - behaviour, _OVERFLOW))


def _k1(log_prob: float, reference: float) -> float:
    return log_prob - reference


def _k2(log_prob: float, reference: float) -> float:
    return 0.5 * (log_prob - reference) ** 2


def _k3(log_prob: float, reference: float) -> float:
    gap = reference - log_prob
    return math.expm1(min(gap, _OVERFLOW)) - gap


#: The estimators of :mod:`sota_grpo.functional.divergences`, for one token, without torch.
_KL = {"k1": _k1, "k2": _k2, "k3": _k3}
