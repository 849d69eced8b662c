"""The card of a trained model: where it comes from, what it can do, how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import PATH_OPTIONS
from sota_grpo.config import SECRETS, Config, model_name, turn_size, walk
from sota_grpo.policy.load import TINY
from sota_grpo.policy.smollm2 import HUB_NAME, SMOLLM2
from sota_grpo.tasks import task_class

_SHOWN = ("algorithm.", "optimizer.", "policy.", "train_model.lora.")  # hyperparameters, defaults included
_AMOUNTS = (
    *("env.repeats", "train.dialog_turns_per_batch", "train.optim_batch_size", "train.epochs"),
    *("train.total_dialog_turns", "train.max_policy_age", "inference_model.max_tokens", "inference_model.temperature"),
    "seed",
)
_PRIVATE = (*SECRETS, "engine.url", "ray.address", "logging.project", "logging.run_name")
_PATHS = (*PATH_OPTIONS, "train.resume")

_TEXT = """---
# The licence is yours to choose (license: ...); that of the base model has to be kept.
{front}
---

# {title}

{base} after {turns} turns of {algorithm} on {task} ({responses:,} responses), trained with sota_grpo {version}.

## Results

Held-out problems of the training task, evaluated during training; means with the standard error over problems.

{results}

## How to load it

```python
{loading}
```

`vllm serve FOLDER` {serving}. It is measured again with
`sota-grpo eval FOLDER --task {dataset} inference_model.max_tokens={max_tokens}`.

## Training

| option | value |
|---|---|
{options}

<details><summary>The whole configuration</summary>

```yaml
{config}```

</details>

Versions: {versions}.
"""


@dataclass(frozen=True)
class Trained:
    """What is exported.

    Args:
        name: of the run.
        turns: after which the model was taken.
        is_adapter: the adapter alone, not merged.
        evaluations: rows of ``metrics.jsonl`` that hold ``eval/accuracy``.
    """

    name: str
    turns: int
    is_adapter: bool
    evaluations: Sequence[Mapping[str, Any]]


def model_card(config: Config, trained: Trained) -> str:
    """``README.md`` as the hub reads it: YAML between dashes, then text.

    Paths are shown without their folders, and keys and addresses not at all. Of the evaluations those up to the turn of
    the model are shown.
    """
    from omegaconf import OmegaConf

    public = published(config)
    base = public.model.name or model_name(public)
    shown = [(name, value) for name, _, value in walk(public) if name.startswith(_SHOWN) or name in _AMOUNTS]
    return _TEXT.format(
        front="\n".join(_front(config, trained)),
        title=f"{base.rpartition('/')[2]} trained by {config.algorithm.name} on {config.env.dataset}",
        base=base,
        turns=trained.turns,
        algorithm=config.algorithm.name,
        task=_task(public),
        dataset=config.env.dataset,
        max_tokens=config.inference_model.max_tokens,
        responses=trained.turns * turn_size(config),
        version=our_version(),
        results="\n".join(_results(config, trained)),
        loading=_ADAPTER if trained.is_adapter else _MERGED,
        serving="needs the merged model (`sota-grpo export --to hf`)" if trained.is_adapter else "serves it",
        options="\n".join(f"| `{name}` | {value} |" for name, value in shown),
        config=OmegaConf.to_yaml(OmegaConf.create(asdict(public))),
        versions=", ".join(f"{name} {found}" for name, found in _versions().items()),
    )


_MERGED = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto", device_map="auto")"""
_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoPeftModelForCausalLM.from_pretrained("FOLDER", dtype="auto", device_map="auto")"""


def published(config: Config) -> Config:
    """A copy that can be shown to everybody: no keys, addresses or names of projects, and files without their folders.

    >>> config = Config()
    >>> config.env.dataset_path, config.engine.api_key = "/home/me/data/train.jsonl", "secret"
    >>> published(config).env.dataset_path, published(config).engine.api_key
    ('train.jsonl', None)
    """
    from omegaconf import OmegaConf

    node = OmegaConf.structured(config)
    for name, item, value in walk(config):
        if name in _PRIVATE:
            OmegaConf.update(node, name, item.default)
        elif name in _PATHS and isinstance(value, str) and Path(value).is_absolute():
            OmegaConf.update(node, name, Path(value).name)
    found = OmegaConf.to_object(node)
    assert isinstance(found, Config)
    return found


def our_version() -> str:
    """Of the installed package.

    >>> our_version() != ""
    True
    """
    try:
        return version("sota-grpo")
    except PackageNotFoundError:  # run from its source folder
        return "(not installed)"


def _front(config: Config, trained: Trained) -> list[str]:
    name, data = model_name(config), getattr(task_class(config.env.dataset), "hub_name", None)
    lines = [
        f"library_name: {'peft' if trained.is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [grpo, reinforcement-learning, sota-grpo, torchrl]",
    ]
    base = HUB_NAME if name == SMOLLM2 else name
    if base != TINY and not Path(base).expanduser().is_dir():
        kind = "adapter" if trained.is_adapter else "finetune"
        lines += [f"base_model: {base}", f"base_model_relation: {kind}"]
    if data is not None and config.env.dataset_path is None:
        lines.append(f"datasets: [{data}]")
    return lines


def _task(config: Config) -> str:
    path = config.env.dataset_path
    return config.env.dataset if path is None else f"{config.env.dataset} ({path})"


def _results(config: Config, trained: Trained) -> list[str]:
    known = [row for row in trained.evaluations if row["step"] <= trained.turns]
    if not known:
        return ["The run made no evaluation."]
    count = config.eval.avg_at_k
    columns = ["turns", "problems", "greedy", *([f"avg@{count}"] if count else [])]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in known:
        shares = [_share(row, "eval/accuracy", "eval/stderr")]
        shares += [_share(row, "eval/avg_at_k", "eval/avg_at_k_stderr")] if count else []
        lines.append(f"| {row['step']} | {row.get('eval/num_samples') or '-'} | {' | '.join(shares)} |")
    return lines


def _share(row: Mapping[str, Any], mean: str, error: str) -> str:
    return f"{100 * row[mean]:.1f} ± {100 * row[error]:.1f} %" if row.get(mean) is not None else "-"


def _versions() -> dict[str, str]:
    found = {"sota_grpo": our_version()}
    for name in ("torch", "transformers", "torchrl", "peft", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
