"""miles: ``loss_function`` of a micro-batch (backends/training_utils/loss.py:972) with given log-probs.

It selects by the loss mask and replaces what is not finite (loss.py:670), adds the means of the responses and divides
by the global batch size. Advantages are those of ``RolloutManager._post_process_rewards`` (ray/rollout.py:640).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.laws.adapter import CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root

_FAR = (
    "A ratio with a negative advantage has no upper bound: compute_policy_loss has eps_clip_c, the loss function "
    "does not pass it on. By default the old log-probs are recomputed, so the ratio of the first step is 1; with "
    "use_rollout_logprobs a stale or faulty log-prob of the engine is met in it. Steps of a gradient norm that is "
    "not finite are skipped."
)


def make(folder: Path) -> Adapter:
    package = root("miles", folder) / "miles"
    one = SimpleNamespace(size=1, rank=0, group=None)
    state = {"get_parallel_state": lambda: SimpleNamespace(cp=one, intra_dp=one, intra_dp_cp=one)}
    ppo = members(package / "utils/ppo_utils.py", "compute_approx_kl", "compute_gspo_kl", "compute_policy_loss")
    parallel = members(
        package / "backends/training_utils/cp_utils.py",
        *("get_sum_of_sample_mean", "get_local_response_loss_masks", "slice_loss_masks_for_local_cp"),
        **state,
    )
    given: dict[str, list[Tensor]] = {}
    losses = members(
        package / "backends/training_utils/loss.py",
        *("compute_ess_ratio_contribution", "policy_loss_function", "loss_function"),
        get_log_probs_and_entropy=lambda logits, **_: {"log_probs": given["log_probs"]},
        all_gather_with_cp=lambda values, total, response: values,
        **(vars(ppo) | vars(parallel) | state),
    )
    rollout = members(package / "ray/rollout.py", "RolloutManager._post_process_rewards")

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        args = SimpleNamespace(
            use_rollout_logprobs=False, entropy_coef=0.0, use_opsm=False, get_mismatch_metrics=False, use_tis=False,
            advantage_estimator="gspo" if objective == "gspo" else "grpo", qkv_format="thd", eps_clip=CLIP,
            eps_clip_high=CLIP, calculate_per_token_loss=False, use_kl_loss=rows.ref is not None, kl_loss_coef=1.0,
            use_unbiased_kl=False, kl_loss_type="k3", loss_type="policy_loss", recompute_loss_function=False,
            use_dynamic_global_batch_size=False, global_batch_size=len(rows.mask), allgather_cp=False,
        )  # fmt: skip
        total = rows.log_prob.new_zeros(())
        for part in rows.parts(split):
            lengths = part.response.sum(-1).tolist()

            def samples(values: Tensor, lengths: list[int] = lengths) -> list[Tensor]:
                return [row[:length] for row, length in zip(values, lengths, strict=True)]

            given["log_probs"] = samples(part.log_prob)
            batch = {
                "advantages": samples(part.advantage[:, None].expand(part.mask.shape)),
                "log_probs": samples(part.old),
                "loss_masks": samples(part.mask.double()),
                "unconcat_tokens": None,
                "total_lengths": lengths,
                "response_lengths": lengths,
            }
            if part.ref is not None:
                batch["ref_log_probs"] = samples(part.ref)
            total = total + losses.loss_function(args, batch, len(split), part.log_prob)[0]
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        args = SimpleNamespace(
            advantage_estimator="grpo", rewards_normalization=True,
            grpo_std_normalization=group_size > 1,  # utils/arguments.py:2153
            n_samples_per_prompt=group_size, rollout_batch_size=len(rewards) // group_size,
        )  # fmt: skip
        this = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        samples = [SimpleNamespace(get_reward_value=lambda _, reward=reward: reward) for reward in rewards.tolist()]
        return torch.tensor(rollout._post_process_rewards(this, samples)[1])

    def kl(name: str):
        return lambda log_prob, ref: ppo.compute_approx_kl(log_prob, ref, name)

    return Adapter(
        step,
        weighting={"clipped": "sequence", "gspo": "sequence"},
        kl={"k1": kl("k1"), "k2": kl("k2"), "k3": kl("k3")},
        kl_in_loss="k3",
        advantages=advantages,
        absent={"dual_clip": "its loss does not pass a dual clip on (loss.py:681)", "cispo": "it has no CISPO"},
        notes={
            "far_token": _FAR,
            "overflow": _FAR,
            "equal_rewards": "Equal float32 rewards can have a mean that differs from them by rounding and a "
            "standard deviation of exactly 0, and the difference is divided by 1e-6. It is met with rewards that are "
            "no sums of powers of 2 (0.1, 0.7, a model's score); 0 and 1 are exact. Its filter "
            "check_reward_nonzero_std avoids it.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are. The loss replaces "
            "advantages that are not finite by 0, so the other responses of that group are lost for the step, and "
            "nothing else.",
        },
    )
