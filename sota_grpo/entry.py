"""The command line: Hydra in front of :func:`sota_grpo.app.train`, and what the program says when it ends."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sota_grpo.app import num_steps, train
from sota_grpo.config import Config, register
from sota_grpo.errors import UserError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
USER_MISTAKE, INTERRUPTED = 2, 130


def entry(mode: str) -> None:
    """Command line of ``grpo.py`` (``sync``) and ``grpo-async.py`` (``async``).

    Hydra composes the config; mistakes of the user are one sentence and exit code 2.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register()
    if not any(argument.startswith("mode=") for argument in sys.argv[1:]):
        sys.argv.append(f"mode={mode}")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # this function prints the sentence itself
    _quiet_console()
    if os.environ.get("VLLM_USE_V1") == "0":
        print("VLLM_USE_V1=0 is accepted and has no effect: this vLLM has one engine.", file=sys.stderr)

    mistakes = (UserError, HydraException, OmegaConfBaseException)
    codes: list[int] = []
    began = False

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="grpo_gsm8k")
    def job(composed: DictConfig) -> None:
        nonlocal began
        began = True
        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        codes.append(_exit_code(lambda: _train_or_interrupt(config, run_dir), mistakes))

    try:
        codes.append(_exit_code(job, mistakes))
    except OSError as error:  # before the job, Hydra failed to make its directory; inside, it is a bug: a traceback
        if began:
            raise
        print(f"{_program()}: {error}; set hydra.run.dir to a directory that can be written.", file=sys.stderr)
        codes.append(USER_MISTAKE)
    sys.exit(max(codes))


def _train_or_interrupt(config: Config, run_dir: Path) -> None:
    """A run that was asked to stop ends the whole command, a sweep's other runs included."""
    if train(config, run_dir) < num_steps(config):
        raise KeyboardInterrupt


def _exit_code(job: Callable[[], None], mistakes: tuple[type[Exception], ...]) -> int:
    """Run ``job``; what the user can mend is one sentence and 2, a run that cannot go on is one and 1.

    An interrupt ends the program with 130.
    """
    try:
        job()
    except mistakes as error:
        print(f"{_program()}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", USER_MISTAKE)
    except KeyboardInterrupt:
        print(f"{_program()}: interrupted; train.resume=auto continues from the last checkpoint.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    return 0


def _quiet_console() -> None:
    """Our own sentences on stderr; of the libraries, only warnings and no progress bars."""
    from transformers.utils import logging as transformers_logging

    console = logging.StreamHandler()
    console.setLevel(logging.INFO)  # logging.level is that of training.log
    console.addFilter(lambda record: not getattr(record, "file_only", False))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[console])
    logging.getLogger("sota_grpo").setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()


def _program() -> str:
    return Path(sys.argv[0]).name
