"""IFEval: the 25 instructions that a program can check, each followed or not (Zhou et al. 2023, arXiv:2311.07911).

Outcomes equal those of the benchmark's own evaluator, and of TorchRL's checks, which carry it, wherever both are
defined; what is drawn at random there (a kwarg that is missing, a letter such as ``#``) is refused or taken as it
stands here. Every check is linear in the length of the text, whatever the text.
"""

from sota_grpo.rewards.ifeval.instructions import INSTRUCTIONS, answer_text, follow_lists, read_kwargs
from sota_grpo.rewards.ifeval.rows import read_instructions, read_prompt
from sota_grpo.rewards.ifeval.splitting import find_punkt

__all__ = [
    "INSTRUCTIONS",
    "answer_text",
    "find_punkt",
    "follow_lists",
    "read_instructions",
    "read_kwargs",
    "read_prompt",
]
