"""The hub's token for gated models: taken from the command line or a config, kept in the environment, saved nowhere.

The token lives in ``HF_TOKEN`` alone, where the hub's own client looks for it in this process and in the workers that
inherit its environment. Whoever sets ``HF_TOKEN`` (or logs in with ``hf auth login``) needs nothing of this. For
``model.hub_token=...`` three doors are watched, in the order in which a token comes by:

1. the command line (:func:`protect_token`): Hydra, W&B, Ray and ``ps`` would keep it;
2. the composed config (:func:`token_callback`): Hydra saves it before the run begins;
3. the config object (:func:`use_config_token`): checkpoints and W&B get a copy of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from sota_grpo.errors import UserError

VARIABLE = "HF_TOKEN"
_OPTION = "model.hub_token"
_OVERRIDE = re.compile(r"(\+{0,2}model\.hub_token)=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"hub_token['\"]?\s*[:=@]")
# Options of Hydra that print the composed config, --cfg, --info and --help, in each form that argparse knows: cut short
# (--inf), with the value attached (-cjob), behind options that have none (-mh). -cn, -cp and -cd are others.
_SHOWING = re.compile(r"--(?:cf|i|he)|-(?!c[npd])[rm]*[chi]")
_CALLBACK = "++hydra.callbacks.hub_token._target_=sota_grpo.config.hub_token.token_callback"


def protect_token(arguments: Sequence[str]) -> list[str]:
    """The command line that Hydra may see: without the token, and with the callback that keeps one out of its files.

    A token that stood there is in ``HF_TOKEN`` afterwards. So that ``ps`` and Ray, which copies the command line of
    its driver, do not show it either, the program starts again without it, in the same process, before it has done
    anything.

    Raises:
        UserError: the token is given in another form than ``model.hub_token=TOKEN``, or cannot be one; the sentence
            does not repeat it.

    >>> protect_token(["seed=1"])[1:]
    ['seed=1']
    """
    kept, token = split_token(arguments)
    if token is not None:
        os.environ[VARIABLE] = token
        before = sys.orig_argv[: -len(arguments)]
        if sys.executable and sys.orig_argv == [*before, *arguments]:  # else somebody else's program called this
            os.execv(sys.executable, [sys.executable, *before[1:], *kept])
    if any(_SHOWING.match(argument) for argument in kept):  # no run, so nothing that calls back
        kept = [f"{_OPTION}=null", *(argument for argument in kept if not _OVERRIDE.fullmatch(argument))]
    return [_CALLBACK, *kept]


def split_token(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments with null for the token, and the token; interpolations stay, since they are no secret.

    Null, not nothing: the command line outranks a token in a file.

    Raises:
        UserError: as :func:`protect_token`.

    >>> split_token(["seed=1", "model.hub_token=hf_abc"])
    (['seed=1', 'model.hub_token=null'], 'hf_abc')
    >>> split_token(["model.hub_token=${oc.env:MY_TOKEN}"])
    (['model.hub_token=${oc.env:MY_TOKEN}'], None)
    """
    kept, token = [], None
    for argument in arguments:
        override = _OVERRIDE.fullmatch(argument)
        if override is None:
            if _ELSEWHERE.search(argument):
                raise UserError(f"give the hub's token as {_OPTION}=TOKEN and in no other form, or set {VARIABLE}.")
            kept.append(argument)
            continue
        value = override[2].strip().strip("'\"")
        if value.startswith("${"):
            kept.append(argument)
        else:
            kept.append(f"{override[1]}=null")
            token = None if value.lower() in ("", "null") else _checked(value)
    return kept, token


def without_token(overrides: Sequence[str]) -> list[str]:
    """The overrides with null for the token, which is in ``HF_TOKEN`` afterwards."""
    kept, token = split_token(overrides)
    if token is not None:
        os.environ[VARIABLE] = token
    return kept


def token_callback() -> Any:
    """A Hydra callback that moves the token of a config file to ``HF_TOKEN`` before Hydra writes its first file.

    In a sweep Hydra composes the config of every run anew, so there the null is an override of each of them.
    """
    from hydra.experimental.callback import Callback
    from omegaconf import OmegaConf, read_write
    from omegaconf.errors import OmegaConfBaseException

    def take(config: Any) -> bool:
        try:
            token = OmegaConf.select(config, _OPTION)
        except OmegaConfBaseException:  # an interpolation of nothing: no secret, and told when the config is read
            return False
        if token is None:
            return False
        with read_write(config):
            OmegaConf.update(config, _OPTION, None)
        os.environ[VARIABLE] = str(token)  # checked in use_config_token: Hydra swallows what a callback raises
        return True

    class TokenCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            take(config)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            if take(config):
                with read_write(config.hydra):
                    config.hydra.overrides.hydra.append(f"{_OPTION}=null")

    return TokenCallback()


def use_config_token(config: Any) -> None:
    """Move ``config.model.hub_token``, where there is one, to ``HF_TOKEN``, and check that the hub can be given it.

    To be called before anything keeps a copy of the config. A token of the config outranks one of the environment.

    Raises:
        UserError: what is in ``HF_TOKEN`` then is no token; the sentence does not repeat it.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(model=SimpleNamespace(hub_token=None))
    >>> use_config_token(config)
    """
    token, config.model.hub_token = config.model.hub_token, None
    if token is not None:
        os.environ[VARIABLE] = token
    if os.environ.get(VARIABLE, "").strip():
        os.environ[VARIABLE] = _checked(os.environ[VARIABLE].strip())


def _checked(token: str) -> str:
    """``token``, if it is one (RFC 6750, section 2.1): the error of an HTTP client would print what cannot be sent."""
    if not re.fullmatch(r"[\w.~+/=-]+", token, re.ASCII):
        raise UserError(f"the hub's token ({_OPTION} or {VARIABLE}) has a character that no token has; copy it again.")
    return token
