"""What ``sota-grpo export`` writes: a folder that is complete under its name, or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.evaluation import EXPORTED, exported_turns, find_checkpoint, load_trained
from sota_grpo.assembly.learning import add_adapter, make_model
from sota_grpo.assembly.rollout import make_env, task_of
from sota_grpo.config import Config, model_name
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_folder
from sota_grpo.migration.account import Account, Facts
from sota_grpo.migration.card import Trained, model_card, our_version
from sota_grpo.migration.data import trl_rows, verl_rows, write_jsonl, write_parquet
from sota_grpo.migration.trl import VERSION as TRL_VERSION
from sota_grpo.migration.trl import trl_script
from sota_grpo.migration.verl import VERSION as VERL_VERSION
from sota_grpo.migration.verl import verl_options, verl_script
from sota_grpo.policy.load import load_tokenizer, resolve_model_path, save_hf
from sota_grpo.recording.run_record import CONFIG_FILE, read_evaluations
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.rl.task import Task

_VERL_REWARD = '''"""The reward of {name}: sota_grpo's own grader, as verl calls it."""

from pathlib import Path

from sota_grpo.migration.data import verl_reward

compute_score = verl_reward(Path(__file__).with_name("config.yaml"))
'''


def write_hf(run_dir: Path, out: Path, *, step: int | None = None, adapter: bool = False) -> int:
    """The trained model, merged or as a PEFT adapter, with its card. Returns the turns after which it is taken.

    The model that a finished run exported is copied; else it is made from a checkpoint.

    Raises:
        UserError: no run, no such checkpoint, an adapter of a run without LoRA, or a folder that is in use.
    """
    config = load_config(run_dir)
    if adapter and not config.train_model.lora.enabled:
        raise UserError(f"{run_dir} trained all weights, so there is no adapter; leave --adapter out.")
    exported = exported_turns(run_dir, config) if step is None and not adapter else None
    turns, checkpoint = (exported, None) if exported is not None else find_checkpoint(run_dir, step)
    with _new_folder(out, run_dir) as folder:
        if checkpoint is None:
            shutil.copytree(run_dir / EXPORTED, folder, dirs_exist_ok=True)
        else:
            model = add_adapter(config, make_model(config, torch.device("cpu")))
            load_trained(checkpoint, model)
            _save(config, model, folder, adapter)
        trained = Trained(_name(run_dir), turns, adapter, read_evaluations(run_dir))
        (folder / "README.md").write_text(model_card(config, trained), encoding="utf-8")
    return turns


def write_verl(run_dir: Path, out: Path) -> Account:
    """verl's command line, its data and its reward function.

    Raises:
        UserError: no run, data that cannot be loaded, or a folder that is in use.
    """
    config, task, facts = _opened(run_dir)
    options, account = verl_options(config, facts)
    heading = [
        f"{facts.name}, a run of sota_grpo {our_version()}, as a command of verl {VERL_VERSION}, whose options are in",
        f"verl/trainer/config at the tag v{VERL_VERSION} of github.com/verl-project/verl.",
        "reward.py is sota_grpo's grader: it has to be installed where verl runs (pip install --no-deps sota-grpo).",
    ]
    with _new_folder(out, run_dir) as folder:
        write_parquet(folder / "train.parquet", verl_rows(task, task.train, "train"))
        heldout = task.heldout[: config.eval.num_samples]
        write_parquet(folder / "heldout.parquet", verl_rows(task, heldout, "heldout"))
        _write_config(config, folder)
        (folder / "reward.py").write_text(_VERL_REWARD.format(name=facts.name), encoding="utf-8")
        script = folder / "run_verl.sh"
        script.write_text(verl_script(options, account, heading), encoding="utf-8")
        script.chmod(0o755)
    return account


def write_trl(run_dir: Path, out: Path) -> None:
    """TRL's script and its data.

    Raises:
        UserError: as :func:`write_verl`.
    """
    config, task, facts = _opened(run_dir)
    heading = [
        f"{facts.name}, a run of sota_grpo {our_version()}, as a script for TRL {TRL_VERSION}",
        f"(pip install 'trl>={TRL_VERSION},<{_next(TRL_VERSION)}'); the reward is sota_grpo's own grader.",
    ]
    with _new_folder(out, run_dir) as folder:
        write_jsonl(folder / "train.jsonl", trl_rows(task, task.train))
        _write_config(config, folder)
        (folder / "train.py").write_text(trl_script(config, facts, heading), encoding="utf-8")


def _next(release: str) -> str:
    """
    >>> _next("1.16")
    '1.17'
    """
    major, _, minor = release.partition(".")
    return f"{major}.{int(minor) + 1}"


def _opened(run_dir: Path) -> tuple[Config, Task, Facts]:
    """The config, the task with its data, and what else a translation asks for."""
    config = load_config(run_dir)
    task = task_of(config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    env = make_env(config, task, tokenizer, LocalGrader(task.score, task.term_weights))
    model = resolve_model_path(model_name(config))
    if Path(model).is_dir():
        model = str(Path(model).resolve())
    return config, task, Facts(model, _name(run_dir), env.check_prompts(), len(task.train))


def _name(run_dir: Path) -> str:
    return run_dir.resolve().name


def _save(config: Config, model: nn.Module, folder: Path, adapter: bool) -> None:
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    if not adapter:
        folder.rmdir()  # save_hf makes it
        save_hf(model, tokenizer, folder)
        return
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def _write_config(config: Config, folder: Path) -> None:
    """What the grader reads, without secrets; a file of reward functions comes along."""
    from omegaconf import OmegaConf

    plain = asdict(config)
    plain["engine"]["api_key"] = plain["engine"]["url"] = None
    path = config.reward.path
    if path is not None:
        source = Path(path).expanduser()
        shutil.copy(source, folder / source.name)
        plain["reward"]["path"] = source.name
    (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.create(plain)), encoding="utf-8")


@contextmanager
def _new_folder(out: Path, run_dir: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place at the end; only our own earlier export is replaced.

    Raises:
        UserError: ``out`` is in use, or cannot be written.
        RunFailed: the file system refused later.
    """
    is_ours = out.resolve().parent == (run_dir / "export").resolve()
    if out.exists() and not is_ours and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is not empty; give another folder, or empty it.")
    try:
        with ExitStack() as stack:
            try:
                partial = stack.enter_context(atomic_folder(out))
            except OSError as error:
                raise UserError(f"--out {out} cannot be written ({error.strerror}).") from error
            yield partial
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise RunFailed(f"--out {out} cannot be written ({error.strerror or error}).") from error
