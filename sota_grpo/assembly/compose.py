"""Compose a config as Hydra does, or load that of a run after consent to the code that it executes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from sota_grpo.config import IN_FILES, Config, register, rubric_file
from sota_grpo.config.mixture import ENTRY_OPTIONS
from sota_grpo.config.secrets import without_tokens
from sota_grpo.config.spelling import flat, no_option, walk
from sota_grpo.errors import UserError
from sota_grpo.files import file_reference
from sota_grpo.recording.run_files import CONFIG_FILE, EXPORTED, INPUTS, unreadable
from sota_grpo.rewards.functions import PICKLED
from sota_grpo.rewards.sandbox import is_url
from sota_grpo.tasks.agents import SESSIONS
from sota_grpo.tasks.servers import server_of
from sota_grpo.text import one_line
from sota_grpo.untrusted import read_yaml, require_plain

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGED = _PACKAGE / "presets"
#: Folder of the presets: ``config`` of a checkout, which is ``sota_grpo/presets`` in an installed package.
CONFIG_DIR = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent / "config"
DEFAULT_CONFIG = "grpo_gsm8k"
_MODELS = ("model.name", "ref_model.name")
PATH_OPTIONS = (*_MODELS, "env.dataset_path", "env.eval_path", "reward.path", *IN_FILES)  # or names on the hub
#: Options of :func:`needs_consent` without effect if no loss is computed, or if nothing is sampled or graded.
UNUSED_WITHOUT_LOSS = ("ray.address", "train.sampler", "env.transforms", "algorithm.objective", "algorithm.baseline")
UNUSED_WITHOUT_SAMPLES = (
    *("ray.address", "reward.path", "engine.url", "inference_model.engine_kwargs"),
    *("env.tools", "env.environment", "env.agent", "env.sandbox", "env.transforms", "train.sampler"),
    *("reward.judge.url", "reward.judge.rubric"),
)
_UNKNOWN = re.compile(r"Could not override '([^']+)'. To append")  # Hydra proposes +, which our schema refuses
_NO_PRIMARY = re.compile(r"primary config '([^']+)'")
_UNPARSED = re.compile(r"(mismatched|extraneous) input|Error parsing override|no viable alternative|token recognition")
_BARE = re.compile(r"override '(\w+)' missing EQUAL")
_NAMELESS = re.compile(r"[+~\s]*=")
_NO_PRESET = re.compile(r"Could not find '(?!hydra/)(\w+)/([^']+)'")
_TRUST = "add --trust-run (in Python trust=True), or repeat the option with the same value on the command line"
_NO_NAME = "Config group override must be a string"
_GLOBAL_PACKAGE = "@package _global_"  # marks a group that sets options of other sections too


def compose(config_name: str = DEFAULT_CONFIG, overrides: Sequence[str] = ()) -> Config:
    """Return the preset ``config_name`` with ``overrides`` applied, as the command line of ``grpo.py`` does.

    The config is not validated: see :func:`sota_grpo.config.validators.validate`. Tokens among the overrides move to
    environment variables (:func:`sota_grpo.config.secrets.without_tokens`). Hydra's own options are ignored, except
    ``hydra.searchpath=[file://DIR]``, which adds a folder of configs. UserError if a name or value is not valid.

    >>> config = compose("grpo_cpu", ["env.repeats=4", "algorithm=dapo"])
    >>> config.env.repeats, config.algorithm.name, config.model.name
    (4, 'dapo', 'tiny')
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    others = checked_overrides(overrides)
    register()
    try:
        with _no_other_hydra(), hydra.initialize_config_dir(str(CONFIG_DIR), "sota_grpo", version_base="1.3"):
            composed = hydra.compose(config_name, overrides=others)
            return typed(composed)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # what Hydra raises of odd values
        raise UserError(sentence_of(error, others)) from None


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides without tokens, and with the ``~/`` of paths expanded, which neither shells nor Hydra do.

    Tokens move to environment variables (:func:`sota_grpo.config.secrets.without_tokens`). UserError if an override has
    no option name (``=1``), at which Hydra fails with an assertion.

    >>> import os
    >>> below = checked_overrides(["env.eval_path=~/a.json", "env.transforms=[~/a.py:A,~/b.py:B]", "env.agent='~/c d'"])
    >>> [text.replace(os.path.expanduser("~"), "HOME") for text in below]
    ['env.eval_path=HOME/a.json', 'env.transforms=[HOME/a.py:A,HOME/b.py:B]', "env.agent='~/c d'"]
    """
    overrides = without_tokens(overrides)
    for override in overrides:
        if _NAMELESS.match(override):
            raise UserError(f"The override {one_line(override)} has no option name; write OPTION=VALUE.")
    home = os.path.expanduser("~/")
    pairs = [override.partition("=") for override in overrides]
    # not in a quoted text
    return [name + mark + re.sub(r"^~/|(?<=[\[,])~/(?=[^'\"]*$)", lambda _: home, value) for name, mark, value in pairs]


@contextmanager
def _no_other_hydra() -> Iterator[None]:
    """Clear Hydra's global state, of which a process has one, and restore it afterwards."""
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = before


def sentence_of(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Return the message for an error that Hydra or OmegaConf raised when it applied ``overrides``."""
    text = " ".join(re.split("Config search path:|See https://hydra.cc", str(error))[0].split())
    primary, preset, unknown = (pattern.search(text) for pattern in (_NO_PRIMARY, _NO_PRESET, _UNKNOWN))
    if primary is not None:
        return f"There is no config {primary[1]}; use one of {', '.join(preset_names())}."
    if preset is not None and (CONFIG_DIR / preset[1]).is_dir():
        return _no_preset(preset[1], preset[2])
    if unknown is not None:
        values = {name.lstrip("+"): value for name, _, value in (override.partition("=") for override in overrides)}
        return no_option(unknown[1], values.get(unknown[1]))
    bare = _BARE.search(text)
    if bare is not None and (CONFIG_DIR / f"{bare[1]}.yaml").is_file():
        return f"{bare[1]} is a preset; give it as --config-name {bare[1]}."
    if text.startswith(_NO_NAME) or isinstance(error, TypeError):
        groups = sorted({path.parent.name for path in CONFIG_DIR.glob("*/*.yaml")} - {"hydra"})
        return f"{', '.join(groups)} take the name of a preset, such as algorithm=dapo."
    if _UNPARSED.search(text):
        return f"{text.rstrip('.')}: write OPTION=VALUE; a value that contains =, {{ or [ needs quotes."
    if text.startswith("Error merging override") and error.__cause__ is not None:
        return f"{text}: {' '.join(str(error.__cause__).partition('full_key')[0].split()).rstrip('.')}."
    return text


def preset_names(folder: Path = CONFIG_DIR) -> list[str]:
    """Return the sorted names of the presets in ``folder``: whole configs (default folder), or those of a group."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _no_preset(group: str, name: str) -> str:
    return f"There is no {group}={name}; use one of {', '.join(preset_names(CONFIG_DIR / group))}."


def typed(composed: Any) -> Config:
    """Return a composed config as a :class:`Config`.

    UserError if it has an unknown option, which the override ``+name=1`` can add, or is not a whole config.
    """
    from omegaconf import OmegaConf

    if OmegaConf.get_type(composed) is not Config:
        presets = ", ".join(preset_names())
        raise UserError(f"This config is not of a run: its defaults do not begin with schema; use one of {presets}.")
    known = {name for name, _, _ in walk()}
    for name, value in flat(OmegaConf.to_container(composed)).items():  # type: ignore[arg-type]
        if name not in known and not any(name.startswith(f"{option}.") for option in known):
            raise UserError(no_option(name, value))
    return cast(Config, OmegaConf.to_object(composed))


def load_config(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    trust: bool = False,
    unused: Collection[str] = (),
    remedy: str = _TRUST,
) -> Config:
    """Return the config of a run, read from ``run_dir/config.yaml``, with ``overrides`` in the syntax of ``grpo.py``.

    A preset of one section (``algorithm=dapo``) replaces that section; one of several (``hardware=one_gpu``) sets only
    its own options. Options that the file lacks have their defaults. The config is not validated, and tokens are moved,
    as in :func:`compose`. The run may be another user's: unless ``trust`` is true, options that execute code or contact
    servers (:func:`needs_consent`) are refused, except if an override sets the same value, or they are in ``unused``,
    the options without effect in the caller. UserError if there is no valid run, an override is wrong or consent is
    missing; ``remedy`` is the end of that message: how the user consents.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.yaml").write_text("env: {repeats: 4}\\nalgorithm: {name: mine, clip_low: 0.1}")
    >>> config = load_config(folder, ["algorithm=dapo", "seed=3"])
    >>> config.env.repeats, config.seed, config.algorithm.name, config.algorithm.clip_low
    (4, 3, 'dapo', 0.2)
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"There is no run in {run_dir} ({CONFIG_FILE} is missing); give the directory of a run.")
    config, hf_folder = _saved(path, checked_overrides(overrides))
    for folder in (EXPORTED, INPUTS):
        require_plain(run_dir / folder, run_dir)
    for source in (config, hf_folder):
        for name, path, function in _paths(source):
            moved = run_dir.absolute() / INPUTS / path.name  # a Python input, if the run's directory was moved
            if path.parent.name == INPUTS and not path.exists() and moved.is_file():
                set_option(source, name, f"{moved}{function}")
    if not trust:
        missing = sorted(needs_consent(config).items() - needs_consent(hf_folder).items())
        acts = [f"{act} ({one_line(option)})" for option, act in missing if _run_option(option) not in unused]
        require_consent(run_dir, acts, remedy)
    return config


def _saved(path: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """Return (the config in ``path``, the default config), each with ``overrides`` applied."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        saved = read_yaml(path)
        content: Any = OmegaConf.to_container(saved)
        for name, value in flat(content).items() if isinstance(content, dict) else ():
            if "${" in str(value):  # it would be resolved in the reader's environment
                raise UserError(f"{path}: {name} has an interpolation (${{..}}), which no run saves; write its value.")
        default = OmegaConf.structured(Config)
        config = _with_overrides(OmegaConf.merge(default, saved), overrides)
        return config, _with_overrides(default, overrides)
    except OSError as error:
        raise unreadable(path, error) from error
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{path}: {reason}; correct this file or the overrides.") from None


def needs_consent(config: Config) -> dict[str, str]:
    """Return {option: phrase} for options that execute code, or name a file to send or a server (not the hub or W&B).

    >>> config = Config()
    >>> needs_consent(config)
    {}
    >>> config.reward.path = "reward.py"
    >>> needs_consent(config)
    {'reward.path': 'run reward.py'}
    """
    values = _values(config, *(name for name, _, _ in walk()))
    acts = ((name, _act(_run_option(name), value, one_line(value))) for name, value in values)
    return {name: act for name, act in acts if act is not None}


def _act(option: str, value: str, shown: str) -> str | None:
    """Return the phrase of :func:`needs_consent` for a value of an option; None if it needs no consent."""
    reference = file_reference(value)
    match option:
        case "env.environment" if (server := server_of(value)) is not None:
            return server.act()
        case "env.agent" if reference is None:
            return None if value == SESSIONS else f"run the command {shown}"
        case "reward.path":
            return f"run {shown}"
        case "model.trust_remote_code":
            return "run the Python files of its model"
        case "inference_model.engine_kwargs" | "model.load_kwargs":  # they may name plugins, files and hosts
            return f"load its model with {shown}"
        case "engine.url":
            return f"send prompts and weights to {shown}"
        case "env.sandbox" if is_url(value):
            return f"send responses to {shown}"
        case "reward.judge.url":
            return f"send prompts and responses to {shown}"
        case "reward.judge.rubric" if rubric_file(value) is not None:
            return f"send what is in {shown} to its judge"
        case "ray.address":
            return f"join the Ray cluster {shown}, which may run code here"
    if option in IN_FILES and (reference or value.endswith(PICKLED)):
        return f"run {one_line(str((reference or [value])[0]))}"
    return None


def require_consent(run_dir: Path, acts: Sequence[str], remedy: str = _TRUST) -> None:
    """Raise UserError unless ``acts`` is empty; it lists them (of :func:`needs_consent`) and ends with ``remedy``."""
    if acts:
        raise UserError(f"The config of {run_dir} asks to {' and to '.join(acts)}; if you trust its author, {remedy}.")


def resumed_config(config: Config, overrides: Sequence[str]) -> Config:
    """Return :func:`load_config` of the run in ``train.resume``; ``config`` if that is null, ``auto`` or no run."""
    if config.train.resume in (None, "auto"):
        return config
    run_dir = Path(config.train.resume).expanduser()
    if not (run_dir / CONFIG_FILE).is_file():
        return config
    logger.info("Options that this command does not set are taken from %s.", run_dir / CONFIG_FILE)
    return load_config(run_dir, overrides, remedy="repeat each of these options")  # it has no --trust-run


def no_run_or_model(name: str) -> str:
    """Return the message, without its period, that the folder ``name`` has neither a run nor a model."""
    return f"There is neither a run ({CONFIG_FILE}) nor a model (config.json) in {name}"


def anchor_paths(config: Config) -> None:
    """Make the paths of existing files, folders and models, and of any ``FILE.py:NAME``, in ``config`` absolute."""
    from sota_grpo.policy.load import SMOLLM2, TINY  # brings transformers

    for name, path, function in _paths(config):
        is_here = bool(function) or path.exists()
        if name in _MODELS:
            is_here = (path / "config.json").is_file() and str(path) not in (TINY, SMOLLM2)
        if is_here:
            set_option(config, name, f"{path.absolute()}{function}")


def _run_option(name: str) -> str:
    """Return the option of a name: ``env.tools`` of ``env.mixture.a.tools``, the list of ``env.transforms[0]``."""
    section, dot, option = name.rpartition(".")
    option = option.partition("[")[0]
    return ENTRY_OPTIONS[option] if section.startswith("env.mixture.") else f"{section}{dot}{option}"


def _paths(config: Config) -> list[tuple[str, Path, str]]:
    """Return (name, file or folder, ``:FUNCTION`` or "") of each option that names one; mixtures are not validated."""
    paths = []
    for name, value in _values(config, *PATH_OPTIONS, "reward.judge.rubric"):
        option, path, function = _run_option(name), Path(value).expanduser(), ""
        if option in IN_FILES and (reference := file_reference(value)) is not None:
            path, function = reference[0], f":{reference[1]}"
        if option in IN_FILES:
            names_one = (function or value.endswith(PICKLED)) and server_of(value) is None
        else:
            names_one = option != "reward.judge.rubric" or rubric_file(value) is not None
        if names_one:
            paths.append((name, path, function))
    return paths


def _values(config: Config, *options: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of these options if the run or an entry of a mixture sets them; lists by element."""
    named = {option: attrgetter(option)(config) for option in options}
    mixture = config.env.mixture
    for task, entry in mixture.items() if isinstance(mixture, dict) else ():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if ENTRY_OPTIONS.get(name) in options:
                named[f"env.mixture.{task}.{name}"] = value
    for name, value in named.items():
        if isinstance(value, list):
            yield from ((f"{name}[{number}]", str(item)) for number, item in enumerate(value))
        elif value:
            yield name, str(value)


def set_option(config: Config, name: str, value: str | list[str]) -> None:
    """Set the option ``name``; ``env.mixture`` is replaced by a changed copy."""
    section, _, option = name.rpartition(".")
    listed, _, number = option.partition("[")
    if section.startswith("env.mixture."):
        task, mixture = section.removeprefix("env.mixture."), dict(config.env.mixture or {})
        config.env.mixture = mixture | {task: {**mixture[task], option: value}}
    elif number:
        attrgetter(f"{section}.{listed}")(config)[int(number[:-1])] = value
    else:
        setattr(attrgetter(section)(config), option, value)


def _with_overrides(node: Any, overrides: Sequence[str]) -> Config:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    odd = [item.input_line for item in parsed if item.is_delete() or item.is_add() or item.is_sweep_override()]
    if odd:
        raise UserError(f"{odd[0]} cannot change a saved config; write OPTION=VALUE, with one value, without + or ~.")
    for item in sorted(parsed, key=lambda item: not (CONFIG_DIR / item.key_or_group).is_dir()):  # groups first
        if not item.key_or_group.startswith("hydra."):
            node = _overridden(node, item.key_or_group, item.value())
    return cast(Config, OmegaConf.to_object(node))


def _overridden(node: Any, key: str, value: Any) -> Any:
    from omegaconf import OmegaConf

    group = CONFIG_DIR / key
    if not group.is_dir():
        known = any(f"{option}.".startswith(f"{key}.") for option, _, _ in walk())
        if not known and not key.startswith("env.mixture."):
            raise UserError(no_option(key, value))
        OmegaConf.update(node, key, value, merge=True)
        return node
    preset = group / f"{value}.yaml"
    if preset not in group.glob("*.yaml"):
        raise UserError(_no_preset(key, value))
    chosen = OmegaConf.load(preset)
    if _GLOBAL_PACKAGE in preset.read_text():
        return OmegaConf.merge(node, chosen)
    default = getattr(OmegaConf.structured(Config), key)
    setattr(node, key, OmegaConf.merge(default, chosen))
    return node
