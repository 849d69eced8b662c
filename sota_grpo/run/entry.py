"""The command line: Hydra in front of :func:`sota_grpo.run.app.train`, and what the program says when it ends.

Nothing heavy is imported before Hydra has read the command line: ``--help`` is quick, and Ctrl-C is heeded from the
start.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sota_grpo.assembly.compose import CONFIG_DIR
from sota_grpo.config import register
from sota_grpo.config.hub_token import protect_token
from sota_grpo.errors import UserError
from sota_grpo.sweeps.command import continued

INTERRUPTED, CRASHED = 130, 1
_TAKE_A_VALUE = ("-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "--experimental-rerun")


def entry(mode: str, command: str | None = None) -> None:
    """Command line of ``grpo.py`` (``sync``) and ``grpo-async.py`` (``async``), called ``command`` in its help.

    Hydra composes the config; mistakes of the user are one sentence and exit code 2, an interrupt is one and 130.
    """
    try:
        given = protect_token(sys.argv[1:])
        if {"-h", "--help"} & set(given):
            print(help_heading(command or _program()))
            given = _as_cfg(given)
        sys.argv[1:] = continued(with_mode(given, mode))  # Hydra saves what it is given
        code = _run()
    except UserError as error:
        print(f"{_program()}: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt as stop:  # its text says what is left
        print(f"{_program()}: interrupted; {str(stop) or 'nothing was saved'}.", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has had enough
        sys.stderr.close()
        code = CRASHED
    sys.exit(code)


def help_heading(command: str) -> str:
    """What ``--help`` says before it shows every option with its value.

    >>> print(help_heading("grpo.py").splitlines()[0])
    grpo.py [--config-name PRESET] [GROUP=NAME ...] [OPTION=VALUE ...] [--multirun]
    """
    folders = [folder for folder in sorted(CONFIG_DIR.iterdir()) if folder.is_dir() and folder.name != "hydra"]
    named = {"PRESET": CONFIG_DIR} | {folder.name: folder for folder in folders}
    names = {name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) for name, folder in named.items()}
    return "\n".join(
        [
            f"{command} [--config-name PRESET] [GROUP=NAME ...] [OPTION=VALUE ...] [--multirun]",
            "",
            "Presets and groups:",
            *(f"  {name}: {choices}" for name, choices in names.items()),
            "",
            "Every option with the value that this command gives it (--hydra-help: Hydra's own):",
        ]
    )


def _as_cfg(arguments: Sequence[str]) -> list[str]:
    """Hydra's ``--cfg job`` instead of its ``--help``, which looks through all of Hydra's own groups for a second."""
    kept = [one for one in arguments if one not in ("-h", "--help", "-m", "--multirun")]
    return [*kept, "--cfg", "job"]


def with_mode(arguments: Sequence[str], mode: str) -> list[str]:
    """``arguments`` with ``mode=...`` where it is not given, and all overrides first: Hydra wants them in one place.

    >>> with_mode(["--config-name", "grpo_cpu", "seed=1", "--multirun", "env.repeats=4,8"], "async")
    ['mode=async', 'seed=1', 'env.repeats=4,8', '--config-name', 'grpo_cpu', '--multirun']
    >>> with_mode(["mode=sync"], "async"), with_mode(["--config-dir", "a=b"], "async")
    (['mode=sync'], ['mode=async', '--config-dir', 'a=b'])
    """
    overrides: list[str] = []
    options: list[str] = []
    for before, given in zip(["", *arguments], arguments):
        is_override = given[:1] == "~" or (given[:1] != "-" and "=" in given)
        (overrides if is_override and before not in _TAKE_A_VALUE else options).append(given)
    if not any(override.startswith("mode=") for override in overrides):
        overrides.insert(0, f"mode={mode}")
    return [*overrides, *options]


def _run() -> int:
    """The exit code of the command: the highest of its runs."""
    import hydra
    from omegaconf import DictConfig

    from sota_grpo.run.jobs import Jobs

    register()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # this module prints the sentence itself
    if os.environ.get("VLLM_USE_V1") == "0":
        print("VLLM_USE_V1=0 is accepted and has no effect: this vLLM has one engine.", file=sys.stderr)

    jobs = Jobs(sys.argv[1:], program=_program())

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def job(composed: DictConfig) -> float | None:
        quiet_console()
        return jobs.run(composed)

    return jobs.all(job)


def quiet_console() -> None:
    """Our own sentences on stderr; of the libraries, only warnings, each once, and no progress bars."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it too, when it is imported
    console = logging.StreamHandler()
    console.setLevel(logging.INFO)  # logging.level is that of training.log
    console.addFilter(lambda record: not getattr(record, "file_only", False))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[console])
    logging.getLogger("sota_grpo").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself


def _program() -> str:
    return Path(sys.argv[0]).name
