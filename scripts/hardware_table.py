"""Print the table of docs/hardware.md: what ``sota-grpo estimate`` says of common models on one GPU.

Usage: ``python scripts/hardware_table.py``; no weights, no data, no GPU.
"""

from __future__ import annotations

import os

MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
)
MEMORIES_GIB = (24, 48, 80)
PROMPT_TOKENS = 512
WEIGHTS = {"all": (), "LoRA": ("train_model.lora.enabled=true",)}


def table() -> str:
    """A row per model and kind of training, a column per size of GPU: how full it is, else the smallest change."""
    lines = ["| model | trained | " + " | ".join(f"{size} GiB" for size in MEMORIES_GIB) + " |"]
    lines += ["|---|---|" + "---|" * len(MEMORIES_GIB)]
    for model in MODELS:
        for kind, overrides in WEIGHTS.items():
            cells = [_cell(model, overrides, size) for size in MEMORIES_GIB]
            lines.append(f"| {model} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(model: str, overrides: tuple[str, ...], memory_gib: int) -> str:
    from sota_grpo.assembly.compose import compose
    from sota_grpo.assembly.estimate import estimate
    from sota_grpo.config.spelling import overrides_of

    config = compose("grpo_gsm8k", [f"model.name={model}", "device=auto", *overrides])
    measured = estimate(config, memory_gib=memory_gib, prompt_tokens=PROMPT_TOKENS)
    if measured.fits:
        return f"{max(device.peak / device.capacity for device in measured.devices):.0%}".replace("%", " %")
    change = measured.other_change if not overrides and measured.other_change else measured.change
    if change is None:
        return "no"
    return f"`{' '.join(overrides_of(change))}`"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(table(), end="")
