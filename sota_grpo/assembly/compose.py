"""A config outside ``grpo.py``: what Hydra would give that script for the same preset and overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sota_grpo.config import Config, flat, register, walk
from sota_grpo.config.hub_token import use_config_token, without_token
from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import CONFIG_FILE, INPUTS

_PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGED = _PACKAGE / "presets"
#: The presets: in an installed package ``sota_grpo/presets``, which pyproject.toml makes of ``config`` of a checkout.
CONFIG_DIR = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent / "config"
DEFAULT_CONFIG = "grpo_gsm8k"
PATH_OPTIONS = ("model.name", "env.dataset_path", "env.eval_path", "reward.path")  # of files, of folders, or of a hub
_UNKNOWN = re.compile(r"Could not override '([^']+)'. To append")  # what Hydra proposes there, our schema refuses
_NO_PRIMARY = re.compile(r"primary config '([^']+)'")
_UNPARSED = re.compile(r"(mismatched|extraneous) input|Error parsing override|no viable alternative|token recognition")
_BARE = re.compile(r"override '(\w+)' missing EQUAL")
_NO_PRESET = re.compile(r"Could not find '(\w+)/([^']+)'")
_GLOBAL_PACKAGE = "@package _global_"  # a group whose options stand outside its own section


def compose(config_name: str = DEFAULT_CONFIG, overrides: Sequence[str] = ()) -> Config:
    """The config called ``config_name`` under ``overrides``, written as on the command line of ``grpo.py``.

    It is composed, not validated: see :func:`sota_grpo.config.validators.validate`. A hub token moves to ``HF_TOKEN``,
    as it does there, and is not in what is returned. Options of Hydra's own (``hydra.run.dir=...``) are accepted and
    have no effect; ``hydra.searchpath=[file://DIR]`` adds a folder of configs. A Hydra that is already at work in this
    process, around a notebook or a program of your own, is left as it was.

    Args:
        config_name: of a preset, with or without ``.yaml``.
        overrides: such as ``["env.repeats=4", "algorithm=dapo"]``.

    Raises:
        UserError: no such config, an option that does not exist, or a value that it does not take.

    >>> config = compose("grpo_cpu", ["env.repeats=4", "algorithm=dapo"])
    >>> config.env.repeats, config.algorithm.name, config.model.name
    (4, 'dapo', 'tiny')
    >>> compose("grpo_cpu", ["env.repeat=4"])
    Traceback (most recent call last):
    sota_grpo.errors.UserError: There is no option env.repeat; did you mean env.repeats?
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kept = without_token(overrides)
    register()
    try:
        with _no_other_hydra(), hydra.initialize_config_dir(str(CONFIG_DIR), "sota_grpo", version_base="1.3"):
            composed = hydra.compose(config_name, overrides=kept)
            require_known(composed)
            config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence_of(error)) from None
    assert isinstance(config, Config)
    use_config_token(config)
    return config


@contextmanager
def _no_other_hydra() -> Iterator[None]:
    """Hydra knows one primary config at a time; the one that there is comes back afterwards."""
    from hydra.core.global_hydra import GlobalHydra

    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = before


def sentence_of(error: Exception) -> str:
    """What Hydra or OmegaConf found wrong with a config or an override, in one sentence."""
    text = " ".join(re.split("Config search path:|See https://hydra.cc", str(error))[0].split())
    primary, preset, unknown = (pattern.search(text) for pattern in (_NO_PRIMARY, _NO_PRESET, _UNKNOWN))
    if primary is not None:
        return f"There is no config {primary[1]}; the presets are {', '.join(preset_names())}."
    if preset is not None and (CONFIG_DIR / preset[1]).is_dir():
        return _no_preset(preset[1], preset[2])
    if unknown is not None:
        return _no_option(unknown[1])
    bare = _BARE.search(text)
    if bare is not None and (CONFIG_DIR / f"{bare[1]}.yaml").is_file():
        return f"{bare[1]} is a preset; give it as --config-name {bare[1]}."
    if _UNPARSED.search(text):
        return f"{text.rstrip('.')}: an override is OPTION=VALUE, and a value with =, {{ or [ in it stands in quotes."
    if text.startswith("Error merging override") and error.__cause__ is not None:
        return f"{text}: {' '.join(str(error.__cause__).partition('full_key')[0].split()).rstrip('.')}."
    return text


def preset_names(folder: Path = CONFIG_DIR) -> list[str]:
    """The presets, or those of the group in ``folder``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _no_preset(group: str, name: str) -> str:
    return f"There is no {group}={name}; the presets are {', '.join(preset_names(CONFIG_DIR / group))}."


def require_known(composed: Any) -> None:
    """What is added with a plus (``+name=1``) has to be an option as well.

    Args:
        composed: what Hydra made.

    Raises:
        UserError: it is none.
    """
    from omegaconf import OmegaConf

    known = {name for name, _, _ in walk()}
    for name in flat(OmegaConf.to_container(composed)):  # type: ignore[arg-type]
        if name not in known and not any(name.startswith(f"{option}.") for option in known):
            raise UserError(_no_option(name))


def _no_option(name: str) -> str:
    options = [option for option, _, _ in walk()]
    groups = sorted({option.partition(".")[0] for option in options if "." in option})
    near = get_close_matches(name, options if "." in name else [*groups, *options], n=1)
    return f"There is no option {name}" + (f"; did you mean {near[0]}?" if near else ".")


def load_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of the run in ``run_dir``, its ``config.yaml``, under ``overrides`` as ``grpo.py`` takes them.

    A group (``algorithm=dapo``, ``engine=transformers``) replaces its whole section, as it does there. An option that
    is newer than the run has its default. Not validated, as with :func:`compose`.

    Raises:
        UserError: there is no run, its config has an option that no longer exists, or an override does not fit.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.yaml").write_text("env: {repeats: 4}\\nalgorithm: {name: mine, clip_low: 0.1}")
    >>> config = load_config(folder, ["algorithm=dapo", "seed=3"])
    >>> config.env.repeats, config.seed, config.algorithm.name, config.algorithm.clip_low
    (4, 3, 'dapo', 0.2)
    >>> load_config(folder, ["env.repeat=4"])
    Traceback (most recent call last):
    sota_grpo.errors.UserError: There is no option env.repeat; did you mean env.repeats?
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"There is no run in {run_dir} ({CONFIG_FILE} is missing); give the directory of a run.")
    kept = without_token(overrides)
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        for key, value in sorted(_parsed(kept), key=lambda one: not (CONFIG_DIR / one[0]).is_dir()):  # groups first
            node = _overridden(node, key, value)
        config = OmegaConf.to_object(node)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    assert isinstance(config, Config)
    use_config_token(config)
    _find_inputs(config, run_dir)
    return config


def no_run_or_model(name: str) -> str:
    """Of a folder that was to hold one of them: the sentence, without its end."""
    return f"There is neither a run ({CONFIG_FILE}) nor a model (config.json) in {name}"


def anchor_paths(config: Config) -> None:
    """Write the files and folders that ``config`` names in full, so that it means the same in any current directory."""
    from sota_grpo.policy.load import SMOLLM2, TINY  # brings transformers

    for section, option, value in _paths(config):
        path = Path(value).expanduser()
        is_here = (
            (path / "config.json").is_file() and value not in (TINY, SMOLLM2) if option == "name" else path.exists()
        )
        if is_here:
            setattr(section, option, str(path.absolute()))


def _find_inputs(config: Config, run_dir: Path) -> None:
    """What was passed in Python moves with the directory of the run."""
    for section, option, value in _paths(config):
        moved = run_dir.absolute() / INPUTS / Path(value).name
        if Path(value).parent.name == INPUTS and not Path(value).exists() and moved.is_file():
            setattr(section, option, str(moved))


def _paths(config: Config) -> Iterator[tuple[Any, str, str]]:
    for name in PATH_OPTIONS:
        section, _, option = name.partition(".")
        value = getattr(getattr(config, section), option)
        if value is not None:
            yield getattr(config, section), option, value


def _parsed(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Name and value of each override, without Hydra's own."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    odd = [one.input_line for one in parsed if one.is_delete() or one.is_add() or one.is_sweep_override()]
    if odd:
        raise UserError(f"{odd[0]} does not go with a run that there is; give option=value.")
    return [(one.key_or_group, one.value()) for one in parsed if not one.key_or_group.startswith("hydra.")]


def _overridden(node: Any, key: str, value: Any) -> Any:
    from omegaconf import OmegaConf

    group = CONFIG_DIR / key
    if not group.is_dir():
        if not any(f"{option}.".startswith(f"{key}.") for option, _, _ in walk()):
            raise UserError(_no_option(key))
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
