"""The trainer's policy: loading, LoRA, log-probabilities, the frozen reference, sharding, optimizers, export."""

import logging

# peft imports bitsandbytes if it is installed, which warns about a faster 4-bit kernel that it could not download
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
