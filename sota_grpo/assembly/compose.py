"""Compose a config as Hydra does, or load that of a run after consent to the code that it executes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

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
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    others = checked_overrides(overrides)
    register()
    try:
        with _no_other_hydra(), hydra.initialize_config_dir(str(CONFIG_DIR), "sota_grpo", version_base="1.3"):
            composed = hydra.compose(config_name, overrides=others)
            require_known(composed)
            config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # what Hydra raises of odd values
        raise UserError(sentence_of(error, others)) from None
    assert isinstance(config, Config)
    return config


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides without tokens, and with the ``~/`` of paths expanded, which neither shells nor Hydra do.

    Tokens move to environment variables (:func:`sota_grpo.config.secrets.without_tokens`). UserError if an override has
    no option name (``=1``), at which Hydra fails with an assertion.

    >>> import os
    >>> below = checked_overrides(["env.eval_path=~/a.jsonl", "env.transforms=[~/a.py:A,~/b.py:B]", "seed=1"])
    >>> [text.replace(os.path.expanduser("~"), "HOME") for text in below]
    ['env.eval_path=HOME/a.jsonl', 'env.transforms=[HOME/a.py:A,HOME/b.py:B]', 'seed=1']
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


def require_known(composed: Any) -> None:
    """Raise UserError if a composed config has an unknown option, which the override ``+name=1`` can add."""
    from omegaconf import OmegaConf

    known = {name for name, _, _ in walk()}
    for name, value in flat(OmegaConf.to_container(composed)).items():  # type: ignore[arg-type]
        if name not in known and not any(name.startswith(f"{option}.") for option in known):
            raise UserError(no_option(name, value))


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
        _find_inputs(source, run_dir)
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
    acts = {}
    for name, value in _paths(config):
        if _run_option(name) == "reward.path":
            acts[name] = f"run {one_line(value)}"
        elif _run_option(name) in IN_FILES:
            acts[name] = f"run {one_line(str((file_reference(value) or [value])[0]))}"
    for name, environment in _values(config, "env.environment"):
        if (server := server_of(environment)) is not None:
            acts[name] = server.act()
    for name, agent in _values(config, "env.agent"):
        if file_reference(agent) is None and agent != SESSIONS:
            acts[name] = f"run the command {one_line(agent)}"
    if config.model.trust_remote_code:
        acts["model.trust_remote_code"] = "run the Python files of its model"
    for option, is_input in (
        ("inference_model.engine_kwargs", config.inference_model.engine_kwargs),
        ("model.load_kwargs", config.model.load_kwargs),
    ):
        if is_input:  # vLLM and transformers have arguments that name plugins, files and hosts
            acts[option] = f"load its model with {one_line(str(is_input))}"
    if config.engine.url is not None:
        acts["engine.url"] = f"send prompts and weights to {one_line(config.engine.url)}"
    for name, value in _values(config, "env.sandbox"):
        if is_url(value):
            acts[name] = f"send responses to {one_line(value)}"
    if (url := config.reward.judge.url) is not None:
        acts["reward.judge.url"] = f"send prompts and responses to {one_line(url)}"
    for name, rubric in _values(config, "reward.judge.rubric"):
        if rubric_file(rubric) is not None:
            acts[name] = f"send what is in {one_line(rubric)} to its judge"
    if config.ray.address is not None:
        acts["ray.address"] = f"join the Ray cluster {one_line(config.ray.address)}, which may run code here"
    return acts


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

    for name, value in list(_paths(config)):
        path, function = _path_of(name, value)
        is_here = bool(function) or path.exists()
        if name in _MODELS:
            is_here = (path / "config.json").is_file() and value not in (TINY, SMOLLM2)
        if is_here:
            set_option(config, name, f"{path.absolute()}{function}")


def _find_inputs(config: Config, run_dir: Path) -> None:
    """Correct the paths of saved Python inputs if the run's directory was moved."""
    for name, value in list(_paths(config)):
        path, function = _path_of(name, value)
        moved = run_dir.absolute() / INPUTS / path.name
        if path.parent.name == INPUTS and not path.exists() and moved.is_file():
            set_option(config, name, f"{moved}{function}")


def _run_option(name: str) -> str:
    """Return the option of a name: ``env.tools`` of ``env.mixture.a.tools``, the list of ``env.transforms[0]``."""
    return ENTRY_OPTIONS[name.rpartition(".")[2]] if name.startswith("env.mixture.") else name.partition("[")[0]


def _path_of(name: str, value: str) -> tuple[Path, str]:
    """Split an option's value into its file or folder and ``:FUNCTION`` (empty if it names none)."""
    reference = file_reference(value) if _run_option(name) in IN_FILES else None
    return (Path(value).expanduser(), "") if reference is None else (reference[0], f":{reference[1]}")


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option that names a file or folder, entries of mixtures included; not validated."""
    for name, value in _values(config, *PATH_OPTIONS):
        in_a_file = (file_reference(value) or value.endswith(PICKLED)) and server_of(value) is None
        if _run_option(name) not in IN_FILES or in_a_file:
            yield name, value
    yield from (pair for pair in _values(config, "reward.judge.rubric") if rubric_file(pair[1]) is not None)


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
        elif value is not None:
            yield name, str(value)


def set_option(config: Config, name: str, value: str | list[str]) -> None:
    """Set the option ``name``; ``env.mixture`` is replaced by a changed copy."""
    section, _, option = name.rpartition(".")
    option, _, number = option.partition("[")
    if number:
        attrgetter(f"{section}.{option}")(config)[int(number[:-1])] = value
    elif section.startswith("env.mixture."):
        task, mixture = section.removeprefix("env.mixture."), dict(config.env.mixture or {})
        config.env.mixture = mixture | {task: {**mixture[task], option: value}}
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
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


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
