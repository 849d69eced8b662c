"""Which loss of TRL 1.16 and which function of verl 0.9 computes what a preset does, or why none.

The table of docs/algorithm.md is made from it (``scripts/preset_table.py``). Losses and gradients are compared by
``test_trl_parity.py`` and ``test_verl_parity.py``, advantages by the latter.
"""

from __future__ import annotations

from torch import nn

from sota_grpo.assembly.learning import surrogate_options
from sota_grpo.config import Config
from sota_grpo.rl.objectives import GRPOLoss

#: By preset the loss_type of trl.GRPOConfig.
TRL = {
    **{"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "gspo": "grpo", "cispo": "cispo", "clip_higher": "grpo"},
    **{"lite_ppo": "dapo", "luspo": "luspo", "sapo": "sapo", "vespo": "vespo", "gmpo": "gmpo", "deepseek_v32": "grpo"},
}
#: By preset the policy loss and the advantage estimator of verl.
VERL = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "clip_higher"), ("vanilla", "grpo")),
    **{"gspo": ("gspo", "grpo"), "cispo": ("cispo", "grpo"), "sapo": ("sapo", "grpo"), "dppo": ("dppo_tv", "grpo")},
    **{"gmpo": ("geo_mean", "grpo"), "rloo": ("gpg", "rloo"), "opo": ("gpg", "opo")},
    **{"pass_at_k": ("vanilla", "grpo_passk"), "reinforce_pp": ("vanilla", "reinforce_plus_plus")},
    "reinforce_pp_baseline": ("vanilla", "reinforce_plus_plus_baseline"),
    **dict.fromkeys(("icepop", "geometric_rejection"), ("vanilla", "grpo")),
}
#: Why a preset is in neither of the two.
WHY_NOT = {
    ("luspo", "verl"): "no loss that weighs by length",
    ("vespo", "verl"): "no such loss",
    ("deepseek_v32", "verl"): "no such mask",
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


def loss_of(config: Config, actor: nn.Module, *, beta: float = 0.0) -> GRPOLoss:
    """The objective of a config, with a KL to the reference of its own coefficient."""
    algorithm = config.algorithm
    return GRPOLoss(
        actor,
        objective=algorithm.objective,
        ratio=algorithm.ratio,
        clip_epsilon=(algorithm.clip_low, algorithm.clip_high),
        dual_clip=algorithm.dual_clip,
        surrogate_options=surrogate_options(config),
        off_policy_threshold=algorithm.off_policy_threshold,
        kl_estimator=algorithm.kl_estimator,
        kl_unbiased=algorithm.kl_unbiased,
        kl_to_ref_coeff=beta,
        correction=None if algorithm.correction == "none" else algorithm.correction,
        correction_mode=algorithm.correction_mode,
        correction_cap=algorithm.correction_cap,
        correction_floor=algorithm.correction_floor,
        entropy_bonus=False,
    )
