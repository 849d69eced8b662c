"""Tokens, which are only in the environment of this process and its workers, not in a config or file.

``HF_TOKEN`` is the hub's, for gated models; ``SOTA_GRPO_API_KEY`` that of the server at ``engine.url``;
``SOTA_GRPO_JUDGE_KEY`` that of the judge; W&B has its own variables. Overrides ``model.hub_token=TOKEN`` and
``engine.api_key=TOKEN`` become variables before Hydra sees them. ``ps`` and Ray's list of jobs still show them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sota_grpo.errors import UserError

VARIABLE, API_KEY, JUDGE_KEY = "HF_TOKEN", "SOTA_GRPO_API_KEY", "SOTA_GRPO_JUDGE_KEY"
WHAT = {VARIABLE: "the hub's token", API_KEY: "the server's key", JUDGE_KEY: "the judge's key"}
TOKENS = {"model.hub_token": VARIABLE, "engine.api_key": API_KEY}
_GIVEN = re.compile(rf"\+{{0,2}}({'|'.join(map(re.escape, TOKENS))})=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"(hub_token|api_key)['\"]?\s*[:=@]")
_TOKEN = re.compile(r"[\w.~+/=-]+", re.ASCII)


def without_tokens(overrides: Sequence[str]) -> list[str]:
    """Move tokens from the overrides to the environment and return the others; null keeps the variable.

    Raises:
        UserError: a token, also one in the environment, is malformed; the sentence does not repeat it.

    >>> without_tokens(["seed=1", "model.hub_token=null"])
    ['seed=1']
    """
    others = []
    for override in overrides:
        if match := _GIVEN.fullmatch(override):
            token = match[2].strip().strip("'\"")
            if token.lower() not in ("", "null"):
                os.environ[TOKENS[match[1]]] = _checked(TOKENS[match[1]], token)
        elif elsewhere := _ELSEWHERE.search(override):
            option = next(option for option in TOKENS if option.endswith(elsewhere[1]))
            variable = TOKENS[option]
            raise UserError(f"give {WHAT[variable]} as {option}=TOKEN and in no other form, or set {variable}.")
        else:
            others.append(override)
    require_tokens()
    return others


def require_tokens() -> None:
    """Check the tokens of the environment, since a client's error would print a malformed one.

    Raises:
        UserError: a token is malformed; the sentence does not repeat it.
    """
    for variable in (VARIABLE, API_KEY):
        if token := os.environ.get(variable, "").strip():
            os.environ[variable] = _checked(variable, token)


def key_of(variable: str) -> str | None:
    """Return the key in :data:`API_KEY` or :data:`JUDGE_KEY`, or None; UserError for a malformed one."""
    key = os.environ.get(variable, "").strip()
    return _checked(variable, key) if key else None


def _checked(variable: str, token: str) -> str:
    """Return ``token`` if it is well-formed (RFC 6750, section 2.1)."""
    if not _TOKEN.fullmatch(token):
        raise UserError(f"{WHAT[variable]} ({variable}) has a character that no token has; give the token alone.")
    return token
