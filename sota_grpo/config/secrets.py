"""Keep API tokens in environment variables of this process and its workers, out of configs and files.

``HF_TOKEN`` is the token of the hub, for gated models; ``SOTA_GRPO_API_KEY`` the key of the server at ``engine.url``;
``SOTA_GRPO_JUDGE_KEY`` that of the judge; ``SOTA_GRPO_AGENTS_KEY`` the key that agents outside of the run must send to
open sessions; W&B has its own variables. The overrides ``model.hub_token=TOKEN`` and ``engine.api_key=TOKEN`` are moved
to the variables before Hydra reads them; ``ps`` and Ray's job list still show them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sota_grpo.errors import UserError

VARIABLE, API_KEY, JUDGE_KEY = "HF_TOKEN", "SOTA_GRPO_API_KEY", "SOTA_GRPO_JUDGE_KEY"
AGENTS_KEY = "SOTA_GRPO_AGENTS_KEY"
WHAT = {VARIABLE: "the hub's token", API_KEY: "the server's key", JUDGE_KEY: "the judge's key"}
WHAT |= {AGENTS_KEY: "the agents' key"}
TOKENS = {"model.hub_token": VARIABLE, "engine.api_key": API_KEY}
_GIVEN = re.compile(rf"\+{{0,2}}({'|'.join(map(re.escape, TOKENS))})=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"(hub_token|api_key)['\"]?\s*[:=@]")
_TOKEN = re.compile(r"[\w.~+/=-]+", re.ASCII)


def take_tokens(arguments: Sequence[str]) -> list[str]:
    """Move ``model.hub_token`` and ``engine.api_key`` from arguments to environment variables; return the others.

    ``null`` keeps the variable. UserError, which shows no token, if one is malformed.

    >>> take_tokens(["seed=1", "model.hub_token=null"])
    ['seed=1']
    """
    others = []
    for argument in arguments:
        if match := _GIVEN.fullmatch(argument):
            token = match[2].strip().strip("'\"")
            if token.lower() not in ("", "null"):
                os.environ[TOKENS[match[1]]] = _checked(TOKENS[match[1]], token)
        else:
            others.append(argument)
    return others


def without_tokens(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those of :func:`take_tokens`; UserError also if another override sets a token."""
    others = take_tokens(overrides)
    for override in others:
        if _ELSEWHERE.search(override):
            given = [f"{WHAT[variable]} as {option}=TOKEN or in {variable}" for option, variable in TOKENS.items()]
            ways = ", ".join([*given, f"{WHAT[JUDGE_KEY]} in {JUDGE_KEY}"])
            option = re.split("[=:@{]", override)[0]
            raise UserError(f"The option {option} would save a token or key in the run's files; give {ways}.")
    require_tokens()
    return others


def require_tokens() -> None:
    """Strip spaces around ``HF_TOKEN`` and ``SOTA_GRPO_API_KEY``; UserError, not quoting it, if one is malformed."""
    for variable in (VARIABLE, API_KEY):
        if token := os.environ.get(variable, "").strip():
            os.environ[variable] = _checked(variable, token)


def key_of(variable: str) -> str | None:
    """Return the key in ``variable``, one of :data:`WHAT`; None if it is unset or blank, UserError if malformed."""
    key = os.environ.get(variable, "").strip()
    return _checked(variable, key) if key else None


def _checked(variable: str, token: str) -> str:
    """Return ``token`` if it is well-formed (RFC 6750, section 2.1), else raise UserError."""
    if not _TOKEN.fullmatch(token):
        raise UserError(f"{WHAT[variable]} ({variable}) has a character that no token has; set it to the token alone.")
    return token
