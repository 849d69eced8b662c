"""The gate alone: the parts of a run are put together, checked and taken apart again; nothing is trained."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from transformers import AutoConfig

from sota_grpo.assembly.build import Parts, build
from sota_grpo.config import Config, model_name
from sota_grpo.config.hub_token import use_config_token
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.policy.load import from_pretrained
from sota_grpo.policy.packed import KNOWN_TO_PACK
from sota_grpo.recording.progress import starting
from sota_grpo.recording.run_files import RUN_FILE
from sota_grpo.training.gate import Check, Subject, run_gate, write_gate


def subject_of(config: Config, parts: Parts) -> Subject:
    """What the gate checks of a run that is put together."""
    return Subject(
        task=parts.task,
        rollouts=parts.rollouts,
        learner=parts.learner,
        publisher=parts.publisher,
        sampling=parts.sampling,
        seed=config.seed,
        exact=parts.exact,
        transforms=[transform for _, transform in parts.transforms],
        packs=config.model.attn_implementation is None and family_of(config) in KNOWN_TO_PACK,
    )


def family_of(config: Config) -> str:
    """What transformers calls the policy's architecture, as ``qwen2``."""
    trusts = config.model.trust_remote_code
    loaded = from_pretrained(AutoConfig.from_pretrained, model_name(config), trust_remote_code=trusts)
    return loaded.get_text_config().model_type


def check(
    config: Config, *, run_dir: Path | None = None, on_check: Callable[[Check], object] = lambda check: None
) -> list[Check]:
    """Make every check of the gate on ``config``, whatever its ``check.mode`` says.

    Args:
        run_dir: where engines write, and ``gate.json`` goes; None: a folder that is gone afterwards.
        on_check: told of each outcome as it comes.

    Raises:
        UserError: the config breaks a rule, or its parts cannot be put together.
    """
    use_config_token(config)
    validate(config)
    config.logging.wandb = "disabled"  # nothing is logged

    with ExitStack() as opened:
        folder = run_dir or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sota_grpo_check_")))
        if run_dir is not None and (run_dir / RUN_FILE).exists():
            raise UserError(f"--run-dir {run_dir} holds a run, whose gate.json would be replaced; give another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run-dir {run_dir} cannot be written ({error.strerror}).") from error
        parts = opened.enter_context(closing(build(config, folder)))
        starting("Checking before training")
        gate = logging.getLogger("sota_grpo.training.gate")
        opened.callback(gate.setLevel, gate.level)
        gate.setLevel(logging.CRITICAL)  # its own lines repeat what on_check is told
        parts.publisher.publish(parts.learner.version)
        checks = run_gate(subject_of(config, parts), "warn", on_check=on_check)
        if run_dir is not None:
            write_gate(run_dir, "warn", checks)
        return checks
