"""What becomes of each command of the documents: how it is run, or why it is not. What no rule knows fails its test."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from functools import cache

from scripts.gpu_proof import STAGES
from sota_grpo.assembly.compose import compose
from sota_grpo.config import Config, model_name
from tests.docs.markdown import ROOT, Command

# A run of one step. Only sizes: what a command says beside them stays as it is written.
SIZES = {
    "env.num_envs": "16",
    "train.dialog_turns_per_batch": "16",
    "train.optim_batch_size": "16",
    "train.total_dialog_turns": "16",
    "inference_model.max_tokens": "32",
    "eval.num_samples": "4",
    "eval.avg_at_k": "1",
    "env.max_samples": "64",
    "env.num_heldout": "16",
}
#: The checks before training do not depend on how a command is written: ``WHOLE`` and ``sota-grpo check`` make them.
UNCHECKED = "check.mode=off"
#: The desk of a run of four steps, in which others' work on pushed weights is seen.
WHOLE = "reference_async"
#: Folders that replace a model of the reader's own; the desk has the embedded policy there.
OWN_MODELS = ("path/to/your/model", "checkpoints/your_sft_checkpoint")
#: What a block may need that no test has; its configs are estimated all the same.
ELSEWHERE = {"cluster", "docker", "server"}
_SCRIPTS = ("grpo.py", "grpo-async.py")
_OF_THE_SHELL = re.compile(r"\||\$\(|^python -c|^echo |^eval ")
_TRAINS_NOTHING = ("--help", "--cfg", "--info")


def is_training(command: Command) -> bool:
    """Whether it is ``grpo.py``, ``grpo-async.py`` or ``sota-grpo train``."""
    words = command.words
    return (words[:1] == ("python",) and words[1] in _SCRIPTS) or words[:2] == ("sota-grpo", "train")


def is_async(command: Command) -> bool:
    return "grpo-async.py" in command.words or "--async" in command.words or "mode=async" in command.words


def is_tool(command: Command) -> bool:
    """Whether it is another command of ``sota-grpo``."""
    return command.words[:1] == ("sota-grpo",) and not is_training(command)


def is_of_the_shell(command: Command) -> bool:
    """Whether the shell itself has to read it: pipes, substitutions, and what writes files for later commands."""
    return not is_training(command) and _OF_THE_SHELL.search(command.text) is not None


def starts_workers(command: Command) -> bool:
    """Whether it starts Ray or vLLM."""
    words = command.words
    several = any(".num_devices=" in word and not word.endswith("=1") for word in words)
    wants_vllm = any(word.startswith("engine=") and "vllm" in word for word in words)
    return is_training(command) and (is_async(command) or several or wants_vllm)


def is_slow(command: Command) -> bool:
    """Whether it starts Ray or vLLM, or several runs, or makes the problems of many tasks."""
    many = any("mixture=" in word and "reasoning_gym" in word for word in command.words)
    return starts_workers(command) or (is_training(command) and ("--multirun" in command.words or many))


def overrides_of(command: Command) -> list[str]:
    """Of a training command its options and overrides, without the program."""
    return [word for word in command.words[2:] if word not in ("--async", "&")]


def small(command: Command) -> list[str]:
    """Its options and overrides with the sizes of a test, and the embedded policy where it names a model of the hub.

    Nothing is added to what prints something and ends (``--help``, ``--cfg``).
    """
    overrides = overrides_of(command)
    if set(_TRAINS_NOTHING) & set(overrides):
        return overrides
    sizes = [f"{name}={value}" for name, value in SIZES.items()]
    sizes += ["train.total_dialog_turns=64" if command.block.document.name == WHOLE else UNCHECKED]
    own = any(word == f"model.name={folder}" for word in overrides for folder in OWN_MODELS)
    hub = [] if own else ["model.name=tiny"]
    return [*(word for word in overrides if own or not word.startswith("model.size=")), *sizes, *hub]


def small_block(text: str) -> str:
    """A block of Python whose runs have the sizes of a test, but for those that it gives itself behind the length."""
    sizes = ", ".join(f'"{one}"' for one in (*(f"{name}={value}" for name, value in SIZES.items()), UNCHECKED))
    return re.sub(r'"train\.total_dialog_turns=\d+"', sizes, text)


def small_tool(command: Command) -> list[str]:
    """The same for another command of ``sota-grpo``: what samples gets the sizes, the others stay as they are."""
    words = list(command.words[1:])
    if words[0] == "check":
        return [*words, *(f"{name}={value}" for name, value in SIZES.items()), "model.name=tiny"]
    if words[0] == "eval":
        names = ("inference_model.max_tokens", *(("eval.num_samples",) if "--num-samples" not in words else ()))
        return [*words, *(f"{name}={SIZES[name]}" for name in names)]
    return words


def estimated(command: Command) -> list[str]:
    """What ``sota-grpo estimate`` is given to say whether the run would fit as it is written: of a sweep, its first."""
    overrides = [f"mode={'async' if is_async(command) else 'sync'}"]
    for word in overrides_of(command):
        if word in ("--multirun", "-m") or word.startswith(("hydra", "train.resume")):
            continue
        name, _, value = word.partition("=")
        if value and "--multirun" in command.words:
            value = re.sub(r"^(?:choice\(|tag\(log, interval\()", "", value)
            word = f"{name}={value if value[:1] in '[{' else value.partition(',')[0]}"
        overrides.append(word)
    return overrides


@cache
def config_of(command: Command) -> Config:
    """The config that a command that trains names, as it is written."""
    assumed = estimated(command)
    name, overrides = "grpo_gsm8k", []
    while assumed:
        word = assumed.pop(0)
        if word in ("--config-name", "-cn"):
            name = assumed.pop(0)
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
    return compose(name, overrides)


def needs_gpu(command: Command) -> bool:
    """Whether its config is one for a GPU: neither the CPU nor the embedded policy."""
    config = config_of(command)
    return config.device != "cpu" and model_name(config) != "tiny"


def why_not_run(command: Command) -> str:
    """The reason why a command is only looked at, after a look at what it names.

    Raises:
        AssertionError: no rule knows the command, or what it names does not exist.
    """
    for need in ELSEWHERE & set(command.block.needs):
        return f"needs a {need}"
    for start, (reason, look) in _NOT_RUN.items():
        if command.words[: len(start)] == start:
            look(command)
            return reason
    raise AssertionError(f"{command}: no rule knows what becomes of {command.text!r}; give it one in {__name__}")


def _is_target(command: Command) -> None:
    for target in (word for word in command.words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target} does not exist"


def _is_installable(command: Command) -> None:
    named = {extra for word in command.words for some in re.findall(r"\[(.*)\]", word) for extra in some.split(",")}
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named <= there.keys(), f"{command}: {named - there.keys()} is no extra of pyproject.toml"


def _has_options(command: Command) -> None:
    """The script or module is there, and every ``--option`` and subcommand is in its source."""
    words = command.words[1:]
    path = ROOT / (words[1].replace(".", "/") if words[0] == "-m" else words[0])
    path = path if path.suffix else (path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    folder = path.parent if path.name == "__main__.py" else None
    texts = [one.read_text() for one in (sorted(folder.glob("*.py")) if folder else [path])]
    strings = {
        node.value
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    missing = [option for option in options if option not in strings]
    assert not missing, f"{command}: {path.relative_to(ROOT)} has no {', '.join(missing)}"


def _is_stage(command: Command) -> None:
    assert command.words[2] in STAGES, f"{command}: {command.words[2]} is no stage of the proof"
    _has_options(command)


#: Reason, and the look at what the command names; ``id`` where there is nothing to look at.
_NOT_RUN: dict[tuple[str, ...], tuple[str, Callable[[Command], object]]] = {
    ("make",): ("sets up a virtual environment, or takes minutes; its target exists", _is_target),
    ("pip", "install"): ("installs packages; its extras exist", _is_installable),
    ("python3", "-m", "venv"): ("Python's own", id),
    ("python", "scripts/train_tiny.py"): ("takes half an hour; its options exist", _has_options),
    ("python", "-m", "benchmarks.peers"): ("takes half an hour; its options exist", _has_options),
    ("python", "-m", "benchmarks.scale"): ("takes minutes; its options exist", _has_options),
    ("python", "scripts/gpu_proof.py"): ("needs a GPU; its stages and options exist", _is_stage),
    ("bash", "scripts/gpu_wheels.sh"): ("downloads packages", id),
    ("wandb", "sync"): ("needs an account of Weights & Biases", id),
    ("tensorboard",): ("a server that does not end", id),
}
