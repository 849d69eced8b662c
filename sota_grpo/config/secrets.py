"""Tokens: taken from the command line or a config, kept in the environment, saved nowhere.

The hub's, for gated models, lives in ``HF_TOKEN`` alone, where the hub's own client looks for it in this process and
in the workers that inherit its environment; the key of a server of one's own lives in ``SOTA_GRPO_API_KEY``. Whoever
sets these (or logs in with ``hf auth login``) needs nothing of this. For ``model.hub_token=...`` and
``engine.api_key=...`` three doors are watched, in the order in which a token comes by:

1. the command line (:func:`protect_token`): Hydra, W&B, Ray and ``ps`` would keep it;
2. the composed config (:func:`token_callback`): Hydra saves it before the run begins;
3. the config object (:func:`use_config_token`): checkpoints and W&B get a copy of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from sota_grpo.errors import UserError

VARIABLE, API_KEY, JUDGE_KEY = "HF_TOKEN", "SOTA_GRPO_API_KEY", "SOTA_GRPO_JUDGE_KEY"
#: Each secret option, its variable, and what it is.
TOKENS = {
    "model.hub_token": (VARIABLE, "the hub's token"),
    "engine.api_key": (API_KEY, "the server's key"),
}
_TOKEN = re.compile(r"[\w.~+/=-]+", re.ASCII)
_OVERRIDE = re.compile(rf"(\+{{0,2}}({'|'.join(map(re.escape, TOKENS))}))=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"(hub_token|api_key)['\"]?\s*[:=@]")
# Options of Hydra that print the composed config, --cfg, --info and --help, in each form that argparse knows: cut short
# (--inf), with the value attached (-cjob), behind options that have none (-mh). -cn, -cp and -cd are others.
_SHOWING = re.compile(r"--(?:cf|i|he)|-(?!c[npd])[rm]*[chi]")
_CALLBACK = "++hydra.callbacks.hub_token._target_=sota_grpo.config.secrets.token_callback"


def protect_token(arguments: Sequence[str]) -> list[str]:
    """The command line that Hydra may see: without tokens, and with the callback that keeps them out of its files.

    Raises:
        UserError: as :func:`hide_tokens`.

    >>> protect_token(["seed=1"])[1:]
    ['seed=1']
    """
    kept = hide_tokens(arguments)
    if any(_SHOWING.match(argument) for argument in kept):  # no run, so nothing that calls back
        nulls = [f"{option}=null" for option in TOKENS]
        kept = [*nulls, *(argument for argument in kept if not _OVERRIDE.fullmatch(argument))]
    return [_CALLBACK, *kept]


def hide_tokens(arguments: Sequence[str]) -> list[str]:
    """The command line of this program with null for tokens, which are in the environment afterwards.

    So that ``ps`` and Ray, which copies the command line of its driver, do not show them either, the program starts
    again without them, in the same process, before it has done anything.

    Raises:
        UserError: a token is given in another form than ``OPTION=TOKEN``, or cannot be one; the sentence does not
            repeat it.
    """
    kept, tokens = split_tokens(arguments)
    if tokens:
        os.environ.update(tokens)
        before = sys.orig_argv[: -len(arguments)]
        if sys.executable and sys.orig_argv == [*before, *arguments]:  # else somebody else's program called this
            os.execv(sys.executable, [sys.executable, *before[1:], *kept])
    return kept


def split_tokens(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments with null for the tokens, and those by variable; interpolations stay, since they are no secret.

    Null, not nothing: the command line outranks a token in a file.

    Raises:
        UserError: as :func:`hide_tokens`.

    >>> split_tokens(["seed=1", "model.hub_token=hf_abc"])
    (['seed=1', 'model.hub_token=null'], {'HF_TOKEN': 'hf_abc'})
    >>> split_tokens(["model.hub_token=${oc.env:MY_TOKEN}"])
    (['model.hub_token=${oc.env:MY_TOKEN}'], {})
    """
    kept, tokens = [], dict[str, str]()
    for argument in arguments:
        override = _OVERRIDE.fullmatch(argument)
        if override is None:
            elsewhere = _ELSEWHERE.search(argument)
            if elsewhere is not None:
                option = next(option for option in TOKENS if option.endswith(elsewhere[1]))
                variable, what = TOKENS[option]
                raise UserError(f"give {what} as {option}=TOKEN and in no other form, or set {variable}.")
            kept.append(argument)
            continue
        value = override[3].strip().strip("'\"")
        if value.startswith("${"):
            kept.append(argument)
            continue
        kept.append(f"{override[1]}=null")
        variable, _ = TOKENS[override[2]]
        tokens.pop(variable, None)
        if value.lower() not in ("", "null"):
            tokens[variable] = _checked(override[2], value)
    return kept, tokens


def without_token(overrides: Sequence[str]) -> list[str]:
    """The overrides with null for tokens, which are in the environment afterwards."""
    kept, tokens = split_tokens(overrides)
    os.environ.update(tokens)
    return kept


def token_callback() -> Any:
    """A Hydra callback that moves the tokens of a config file to the environment before Hydra writes its first file.

    In a sweep Hydra composes the config of every run anew, so there the null is an override of each of them.
    """
    from hydra.experimental.callback import Callback
    from omegaconf import OmegaConf, read_write
    from omegaconf.errors import OmegaConfBaseException

    def take(config: Any) -> list[str]:
        taken = []
        for option, (variable, _) in TOKENS.items():
            try:
                token = OmegaConf.select(config, option)
            except OmegaConfBaseException:  # an interpolation of nothing: no secret, and told when the config is read
                continue
            if token is not None:
                with read_write(config):
                    OmegaConf.update(config, option, None)
                os.environ[variable] = str(token)  # checked in use_config_token: Hydra swallows what a callback raises
                taken.append(option)
        return taken

    class TokenCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            take(config)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            nulls = [f"{option}=null" for option in take(config)]
            with read_write(config.hydra):
                config.hydra.overrides.hydra.extend(nulls)

    return TokenCallback()


def use_config_token(config: Any) -> None:
    """Move the tokens of a config, where there are any, to the environment, and check that a client can send them.

    To be called before anything keeps a copy of the config. A token of the config outranks one of the environment.

    Raises:
        UserError: what is in the environment then is no token; the sentence does not repeat it.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(model=SimpleNamespace(hub_token=None), engine=SimpleNamespace(api_key=None))
    >>> use_config_token(config)
    """
    for option, (variable, _) in TOKENS.items():
        *sections, leaf = option.split(".")
        section = reduce(getattr, sections, config)
        token = getattr(section, leaf)
        setattr(section, leaf, None)
        if token is not None:
            os.environ[variable] = token
        if os.environ.get(variable, "").strip():
            os.environ[variable] = _checked(option, os.environ[variable].strip())


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key of the server behind ``engine.url``, where there is one."""
    return environ.get(API_KEY) or None


def judge_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key of the judge at ``reward.judge.url``, where there is one; no option has it.

    Raises:
        UserError: it cannot be one; the sentence does not repeat it.

    >>> judge_key({"SOTA_GRPO_JUDGE_KEY": " sk-1\\n"})
    'sk-1'
    """
    key = environ.get(JUDGE_KEY, "").strip()
    if key and not _TOKEN.fullmatch(key):
        raise UserError(f"the judge's key ({JUDGE_KEY}) has a character that no token has; copy it again.")
    return key or None


def _checked(option: str, token: str) -> str:
    """``token``, if it is one (RFC 6750, section 2.1): the error of an HTTP client would print what cannot be sent."""
    if not _TOKEN.fullmatch(token):
        variable, what = TOKENS[option]
        raise UserError(f"{what} ({option} or {variable}) has a character that no token has; copy it again.")
    return token
