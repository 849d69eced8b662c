"""Write the folders of ``sota-grpo export``: the model with a model card, or files for verl."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sota_grpo.assembly.compose import UNUSED_WITHOUT_LOSS, UNUSED_WITHOUT_SAMPLES, load_config, require_consent
from sota_grpo.assembly.evaluation import exported_steps, find_checkpoint, load_trained
from sota_grpo.assembly.learning import add_adapter, make_model
from sota_grpo.assembly.sampling import make_env, task_of
from sota_grpo.config import Config, model_name
from sota_grpo.config.mixture import task_configs, tasks_named
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.errors import UserError
from sota_grpo.files import atomic_folder, drop_leftovers, file_reference, system_errors
from sota_grpo.migration.verl import VERSION as VERL_VERSION
from sota_grpo.migration.verl import Facts, Report, verl_options, verl_rows, verl_script, write_parquet
from sota_grpo.policy.load import TINY, DType, load_tokenizer, resolve_model_path, save_hf
from sota_grpo.policy.smollm2 import HUB_NAME, SMOLLM2
from sota_grpo.recording.machine import installed_versions
from sota_grpo.recording.metrics import responses_trained
from sota_grpo.recording.progress import percent
from sota_grpo.recording.run_files import CONFIG_FILE, EVALUATED, EXPORTED, METRICS_FILE, read_rows
from sota_grpo.rewards.grading import LocalGrader
from sota_grpo.tasks import task_class
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)

_VERL_REWARD = '''"""The reward of {name}: sota_grpo's grader with verl's signature."""

from pathlib import Path

from sota_grpo.migration.verl import verl_reward

compute_score = verl_reward(Path(__file__).with_name("config.yaml"))
'''


def write_hf(
    run_dir: Path,
    out: Path,
    *,
    step: int | str | None = None,
    adapter: bool = False,
    dtype: DType | None = None,
    trust: bool = False,
) -> int:
    """Write the trained model, merged or as a PEFT adapter, with a model card to ``out``; return its training steps.

    By default the exported model of a finished run is copied. With ``step``, ``adapter`` or ``dtype``, or without an
    exported model, a checkpoint is loaded (the newest if ``step`` is None). ``trust``: as in ``compose.load_config``.
    UserError if there is no such model, or ``out`` is neither new nor empty; an export in RUN/export is replaced.
    """
    config = load_config(run_dir, trust=trust, unused=(*UNUSED_WITHOUT_LOSS, *UNUSED_WITHOUT_SAMPLES))
    if adapter and not config.train_model.lora.enabled:
        raise UserError(f"{run_dir} trained all weights, so it has no adapter; export it without --adapter.")
    copies = step is None and dtype is None and not adapter
    exported = exported_steps(run_dir, config) if copies else None
    steps, checkpoint = (exported, None) if exported is not None else find_checkpoint(run_dir, step)
    merges = checkpoint is not None and config.train_model.lora.enabled and not adapter
    if merges and Path(model_name(config)).expanduser().is_dir():
        _copy(config, run_dir, trust, "weights", "model.name")
    with _new_folder(out, run_dir) as folder:
        if checkpoint is None:
            shutil.copytree(run_dir / EXPORTED, folder, dirs_exist_ok=True)
        else:
            model = add_adapter(config, make_model(config, torch.device("cpu")))
            load_trained(checkpoint, model)
            tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
            if adapter:
                model.save_pretrained(folder)  # type: ignore[operator]
                tokenizer.save_pretrained(folder)
            else:
                folder.rmdir()  # save_hf creates it
                save_hf(model, tokenizer, folder, dtype=dtype)
        card = model_card(config, steps, read_rows(run_dir / METRICS_FILE), is_adapter=adapter)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return steps


def write_verl(run_dir: Path, out: Path, *, trust: bool = False) -> Report:
    """Write the data, a reward function, and a script (verl's command line, the report as comments); return the report.

    ``out`` and ``trust`` are as for :func:`write_hf`. UserError for a mixture of tasks or a split without problems.
    """
    from omegaconf import OmegaConf

    config = load_config(run_dir, trust=trust, unused=UNUSED_WITHOUT_LOSS)
    _copy(config, run_dir, trust, "rows", "env.dataset_path", "env.eval_path")
    if config.env.mixture is not None:
        mixture = f"{run_dir} trained on a mixture ({tasks_named(config)})"
        raise UserError(f"{mixture}; verl has no sampling weights or token limits per task, so export it with --to hf.")
    task = task_of(config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    env = make_env(config, task, tokenizer, LocalGrader(task.score, task.term_weights))
    model = resolve_model_path(model_name(config))
    if Path(model).is_dir():
        model = str(Path(model).resolve())
    facts = Facts(model, script_name(run_dir), env.check_prompts(), len(task.train))
    options, report = verl_options(config, facts)
    heading = [
        f"{facts.name}, a run of sota_grpo {_versions()['sota_grpo']}, as a command for verl {VERL_VERSION}. verl's",
        f"options are in verl/trainer/config at the tag v{VERL_VERSION} of github.com/verl-project/verl.",
        "reward.py is sota_grpo's grader: install it where verl runs (pip install --no-deps . in a checkout of it).",
    ]
    plain = asdict(config)
    plain["engine"]["url"] = None  # it may contain a secret
    with _new_folder(out, run_dir) as folder:
        write_parquet(folder / "train.parquet", verl_rows(task, task.train, "train"))
        heldout = task.heldout[: config.eval.num_samples]
        write_parquet(folder / "heldout.parquet", verl_rows(task, heldout, "heldout"))
        if config.reward.path is not None:
            plain["reward"]["path"] = _copied(Path(config.reward.path).expanduser(), folder)
        if (reference := file_reference(config.env.dataset)) is not None:
            plain["env"]["dataset"] = f"{_copied(reference[0], folder)}:{reference[1]}"
        (folder / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.create(plain)), encoding="utf-8")
        (folder / "reward.py").write_text(_VERL_REWARD.format(name=facts.name), encoding="utf-8")
        script = folder / "run_verl.sh"
        script.write_text(verl_script(options, report, heading), encoding="utf-8")
        script.chmod(0o755)
    return report


def _copied(source: Path, folder: Path) -> str:
    """Copy a user's file to ``folder`` under a name that no other file of the export has; return that name."""
    name = source.name if source.name != "reward.py" and not (folder / source.name).exists() else f"own_{source.name}"
    shutil.copy(source, folder / name)
    return name


def _copy(config: Config, run_dir: Path, trust: bool, what: str, *options: str) -> None:
    """Require consent to copy files from outside the run directory, which an untrusted config may name."""
    home = run_dir.resolve()
    acts = [
        f"copy the {what} of {one_line(path)} into the export ({name})"
        for name, _, path in walk(config)
        if name in options and path and not Path(path).expanduser().resolve().is_relative_to(home)
    ]
    if not trust:
        require_consent(run_dir, acts)
    for act in acts:
        logger.info("--trust-run allows the run's config to %s.", act)


def script_name(run_dir: Path) -> str:
    """Return the name of a run directory with characters that are special to shells replaced by ``_``.

    >>> script_name(Path("runs/10-00-00; touch $HOME"))
    '10-00-00_ touch _HOME'
    """
    return re.sub(r"[^\w .,:+@=-]", "_", run_dir.resolve().name)


@contextmanager
def _new_folder(out: Path, run_dir: Path) -> Iterator[Path]:
    """Yield a new folder that becomes ``out`` at the end; only an earlier export in RUN/export is replaced.

    An empty folder is filled at the end, ``config.json`` last; what a killed export to ``out`` left is removed.
    """
    is_ours = out.resolve().parent == run_dir.resolve() / "export"  # not the target of a link of that name
    leftovers = [*out.glob(f"{_PARTIAL}*")] if out.is_dir() else []
    if out.exists() and not is_ours and (not out.is_dir() or {*out.iterdir()} - {*leftovers}):
        raise UserError(f"--out {out} is not an empty folder; name a new one, or empty it.")
    try:
        drop_leftovers(out.resolve().parent, out.resolve().name)
        if is_ours or not out.is_dir():
            with atomic_folder(out.resolve()) as folder, system_errors():
                yield folder
            return
        for leftover in leftovers:  # the folder may be the working directory or a mount, which nothing can replace
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=out) as partial:
            with system_errors():
                yield Path(partial)
            for path in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(out / path.name)
    except OSError as error:
        raise UserError(f"The export to {out} failed ({error}); correct this, or name another folder.") from error


_SHOWN = ("algorithm.", "optimizer.", "policy.", "train_model.lora.")  # hyperparameters, defaults included
_AMOUNTS = (
    *("env.repeats", "train.dialog_turns_per_batch", "train.optim_batch_size", "train.epochs"),
    *("train.total_dialog_turns", "train.max_policy_age", "inference_model.max_tokens", "inference_model.temperature"),
    "seed",
)
_PRIVATE = ("reward.judge.url", "reward.judge.rubric")  # not in the card
_PARTIAL = ".sota_grpo_export_"  # begins the name of the folder of an unfinished export

_TEXT = """---
# Choose a licence (license: ...); that of the base model applies, too.
{front}
---

# {title}

{base} after {steps} steps of {algorithm} on {task}{responses}, trained with sota_grpo {version}.

## Results

Held-out problems of the training task, evaluated during training; means with the standard error over problems.

{results}

## How to load it

```python
{loading}
```

`vllm serve FOLDER` {serving}.

## Training

| option | value |
|---|---|
{options}

Versions: {versions}.
"""
_MERGED = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto", device_map="auto")"""
_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoPeftModelForCausalLM.from_pretrained("FOLDER", dtype="auto", device_map="auto")"""


def model_card(config: Config, steps: int, metrics: Sequence[Mapping[str, Any]], *, is_adapter: bool = False) -> str:
    """Return the text of the model card (``README.md`` of the Hugging Face hub): YAML front matter, then Markdown.

    Paths are shown without their folders. From ``metrics`` (the rows of ``metrics.jsonl``) it has the number of
    responses in the first ``steps`` training steps, and the evaluations up to then.
    """
    base, data, tasks = map(_public, (model_name(config), config.env.dataset_path, tasks_named(config)))
    named = {*_AMOUNTS, *(name for name in changed_options(config) if name.startswith("reward."))} - {*_PRIVATE}
    responses = responses_trained(row for row in metrics if row["step"] < steps)
    shown = [(name, _public(value)) for name, _, value in walk(config) if name.startswith(_SHOWN) or name in named]
    return _TEXT.format(
        front="\n".join(_front(config, is_adapter)),
        title=f"{base.rpartition('/')[2]} trained by {config.algorithm.name} on {tasks}",
        base=base,
        steps=steps,
        algorithm=config.algorithm.name,
        task=tasks + (f" ({data})" if config.env.mixture is None and data is not None else ""),
        responses=f" ({responses:,} responses)" if responses else "",
        version=_versions()["sota_grpo"],
        results="\n".join(_results(config, [row for row in metrics if EVALUATED in row and row["step"] <= steps])),
        loading=_ADAPTER if is_adapter else _MERGED,
        serving="needs the merged model (`sota-grpo export --to hf`)" if is_adapter else "serves it",
        options="\n".join(f"| `{name}` | {value} |" for name, value in shown),
        versions=", ".join(f"{name} {release}" for name, release in _versions().items()),
    )


def _public(value: Any) -> Any:
    """Return a value with the names of files and folders in place of their absolute paths."""
    if isinstance(value, list):
        return list(map(_public, value))
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _front(config: Config, is_adapter: bool) -> list[str]:
    name, configs = model_name(config), task_configs(config).values()
    data = [getattr(task_class(one.env.dataset), "hub_name", None) for one in configs if one.env.dataset_path is None]
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += ["tags: [grpo, reinforcement-learning, sota-grpo, torchrl]"]
    base = HUB_NAME if name == SMOLLM2 else name
    if base != TINY and not Path(base).is_absolute() and not Path(base).expanduser().is_dir():
        lines += [f"base_model: {base}", f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"]
    if any(data):
        lines.append(f"datasets: [{', '.join(dict.fromkeys(filter(None, data)))}]")
    return lines


def _results(config: Config, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    if not evaluations:
        return ["The run made no evaluation."]
    count = config.eval.avg_at_k

    def share(row: Mapping[str, Any], mean: str, error: str) -> str:
        return percent(row.get(mean), row.get(error)).replace("+/-", "±")

    rewarded = any(row.get("eval/reward", row["eval/accuracy"]) != row["eval/accuracy"] for row in evaluations)
    columns = ["steps", "problems", "greedy", *([f"avg@{count}"] if count else []), *(["reward"] if rewarded else [])]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in evaluations:
        cells = [str(row["step"]), str(row.get("eval/num_samples") or "-"), share(row, "eval/accuracy", "eval/stderr")]
        if count:
            cells.append(share(row, "eval/avg_at_k", "eval/avg_at_k_stderr"))
        if rewarded:
            reward, error = row.get("eval/reward"), row.get("eval/reward_stderr")
            cells.append("-" if reward is None else f"{reward:.3g}" + ("" if error is None else f" ± {error:.2g}"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _versions() -> dict[str, str]:
    """Return the versions of the installed packages that trained the model."""
    here = {"sota_grpo": "(not installed)"}  # run from its source folder
    return here | installed_versions(("sota_grpo", "torch", "transformers", "torchrl", "peft", "vllm"))
