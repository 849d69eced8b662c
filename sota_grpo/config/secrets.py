"""Tokens: in the environment of this process and of its workers, in no config and in no file.

``HF_TOKEN`` is the hub's, for gated models; ``SOTA_GRPO_API_KEY`` that of the server behind ``engine.url``;
``SOTA_GRPO_JUDGE_KEY`` that of the judge; W&B has variables of its own. ``model.hub_token=TOKEN`` and
``engine.api_key=TOKEN`` among overrides are moved there before Hydra sees them. ``ps`` and Ray's list of jobs still
show a command line.
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
    """The overrides but for tokens, which are in the environment afterwards; null leaves what is there.

    Those that are there already are checked, too: the error of a client would print one that it cannot send.

    Raises:
        UserError: a token has another form, or cannot be one; the sentence does not repeat it.

    >>> without_tokens(["seed=1", "model.hub_token=null"])
    ['seed=1']
    """
    kept = []
    for override in overrides:
        if given := _GIVEN.fullmatch(override):
            token = given[2].strip().strip("'\"")
            if token.lower() not in ("", "null"):
                os.environ[TOKENS[given[1]]] = _checked(TOKENS[given[1]], token)
        elif elsewhere := _ELSEWHERE.search(override):
            option = next(option for option in TOKENS if option.endswith(elsewhere[1]))
            variable = TOKENS[option]
            raise UserError(f"give {WHAT[variable]} as {option}=TOKEN and in no other form, or set {variable}.")
        else:
            kept.append(override)
    require_tokens()
    return kept


def require_tokens() -> None:
    """Check that a client can send the tokens of the environment.

    Raises:
        UserError: one cannot be sent; the sentence does not repeat it.
    """
    for variable in (VARIABLE, API_KEY):
        if token := os.environ.get(variable, "").strip():
            os.environ[variable] = _checked(variable, token)


def key_of(variable: str) -> str | None:
    """The key in :data:`API_KEY` or :data:`JUDGE_KEY`; None where there is none; UserError where it cannot be one."""
    key = os.environ.get(variable, "").strip()
    return _checked(variable, key) if key else None


def _checked(variable: str, token: str) -> str:
    """``token``, if it is one (RFC 6750, section 2.1)."""
    if not _TOKEN.fullmatch(token):
        raise UserError(f"{WHAT[variable]} ({variable}) has a character that no token has; give the token itself.")
    return token
