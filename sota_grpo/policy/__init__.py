"""The policy on the trainer's side: loading, LoRA, log-probabilities, the frozen reference, export."""

import logging

# peft imports bitsandbytes wherever it is installed, which warns of a faster 4-bit kernel that it could not download
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
