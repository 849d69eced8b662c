"""Print the table of presets in docs/algorithm.md: the terms of each, its source, and which peer computes the same.

Usage: ``python scripts/preset_table.py``; it reads ``config/algorithm/*.yaml``. That the peers named compute the
same is tested: ``tests/contract/test_trl_parity.py`` and ``test_verl_parity.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from sota_grpo.config import AlgorithmConfig
from sota_grpo.functional.loss_terms import SURROGATES

PRESETS = Path(__file__).resolve().parents[1] / "config" / "algorithm"
#: By preset the loss_type of trl.GRPOConfig.
TRL = {
    **{"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "gspo": "grpo", "cispo": "cispo", "clip_higher": "grpo"},
    **{"lite_ppo": "dapo", "luspo": "luspo", "sapo": "sapo", "vespo": "vespo", "gmpo": "gmpo", "deepseek_v32": "grpo"},
    **{"top_entropy": "dapo", "skywork_or1": "dapo"},
}
#: By preset the policy loss and the advantage estimator of verl.
VERL = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "clip_higher"), ("vanilla", "grpo")),
    **{"gspo": ("gspo", "grpo"), "cispo": ("cispo", "grpo"), "sapo": ("sapo", "grpo"), "dppo": ("dppo_tv", "grpo")},
    **{"gmpo": ("geo_mean", "grpo"), "rloo": ("gpg", "rloo"), "opo": ("gpg", "opo")},
    **{"pass_at_k": ("vanilla", "grpo_passk"), "reinforce_pp": ("vanilla", "reinforce_plus_plus")},
    "gdpo": ("vanilla", "gdpo"),
    "reinforce_pp_baseline": ("vanilla", "reinforce_plus_plus_baseline"),
    **dict.fromkeys(("icepop", "geometric_rejection"), ("vanilla", "grpo")),
}
#: Why a preset is in neither of the two.
WHY_NOT = {
    ("gdpo", "trl"): "has it, inside of its generation",
    ("luspo", "verl"): "no loss that weighs by length",
    ("vespo", "verl"): "no such loss",
    ("deepseek_v32", "verl"): "no such mask",
    ("top_entropy", "verl"): "no such mask",
    ("skywork_or1", "verl"): "a constant coefficient",
    ("lite_ppo", "verl"): "divides by the std of the advantages",
    ("maxrl", "verl"): "no such scale",
    ("maxrl", "trl"): "not in 1.16",
    ("dppo", "trl"): "not in 1.16",
    ("rloo", "trl"): "its own trainer has another loss",
    ("opo", "trl"): "no such baseline",
    ("pass_at_k", "trl"): "no such baseline",
    ("reinforce_pp", "trl"): "no such baseline",
    ("reinforce_pp_baseline", "trl"): "no such scale",
    ("icepop", "trl"): "has it, inside of its generation",
    ("geometric_rejection", "trl"): "no geometric mean",
}
_COLUMNS = (
    "`algorithm=`",
    "baseline",
    "scale",
    "objective",
    "aggregation",
    "besides",
    "source",
    "TRL 1.16",
    "verl 0.9",
)
_SHOWN = ("name", "baseline", "scale", "objective", "clip_low", "clip_high", "aggregation")


def table() -> str:
    """A row per preset, the oldest algorithm first."""
    rows = [_row(path) for path in sorted(PRESETS.glob("*.yaml"), key=_age)]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _age(path: Path) -> tuple[str, str]:
    measured = re.search(r"arXiv:(\d{4}\.\d{5})", path.read_text())
    return (measured.group(1) if measured else "9999", path.stem)


def _row(path: Path) -> tuple[str, ...]:
    settings = yaml.safe_load(path.read_text())
    part: Any = AlgorithmConfig(**settings)
    widths = f" {part.clip_low:g} / {part.clip_high:g}" if SURROGATES[part.objective].reads("clip_low") else ""
    widths = f" {part.clip_high:g}" if part.objective == "cispo" else widths
    besides = ", ".join(f"`{name}={str(value).lower()}`" for name, value in settings.items() if name not in _SHOWN)
    measured = re.search(r"arXiv:([\d.]+\d)", path.read_text())
    source = f"[{measured.group(1)}](https://arxiv.org/abs/{measured.group(1)})" if measured else "verl"
    terms = (_words(part.baseline), _words(part.scale), part.objective + widths, part.aggregation)
    return (f"`{path.stem}`", *terms, besides, source, _peer(path.stem, "trl"), _peer(path.stem, "verl"))


def _words(term: str) -> str:
    return "-" if term == "none" else term.replace("_", " ")


def _peer(name: str, peer: str) -> str:
    """What computes the same there, or why nothing does."""
    if (name, peer) in WHY_NOT:
        return WHY_NOT[name, peer]
    if peer == "trl":
        return f"`{TRL[name]}`"
    loss, estimator = VERL[name]
    return f"`{loss}`, `{estimator}`"


if __name__ == "__main__":
    print(table(), end="")
