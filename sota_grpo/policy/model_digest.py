"""Which model a name stands for: the digest of its files, so that a resumed run notices that they were replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from sota_grpo.policy.load import resolve_model_path

_WEIGHTS = ("*.safetensors", "*.bin")
_FILES = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", *_WEIGHTS)
WHOLE_BYTES, BLOCKS, BLOCK_BYTES = 64 << 20, 256, 64 << 10


def model_digest(name: str) -> str | None:
    """Return the digest of a model's configuration, tokenizer and weights; None where no weights are on this machine.

    Of a file above 64 MiB its length and 256 blocks of 64 KiB, spread evenly, are read: 16 MiB of each.

    Args:
        name: as in :func:`~sota_grpo.policy.load.resolve_model_path`; of a hub id the cached snapshot is read.

    >>> model_digest("tiny") == model_digest("tiny"), model_digest("nobody/never-heard-of-it")
    (True, None)
    """
    folder = Path(resolve_model_path(name))
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for block in range(BLOCKS):
                file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
