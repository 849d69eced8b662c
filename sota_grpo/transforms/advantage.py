"""The advantage of every response over its siblings."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from sota_grpo import keys
from sota_grpo.functional.advantages import constant_groups, group_advantages
from sota_grpo.transforms.base import RowTransform


class GroupAdvantage(RowTransform):
    """Advantage of every response over its siblings: ``A_i = (r_i - b_i) / s_i``, exactly 0 in a constant group.

    Reads ``("next", "reward")`` ``[N, 1]`` and ``group_id`` ``[N]``, writes ``advantage`` ``[N, 1, 1]``. Give it whole
    groups: as a collector's ``postproc``, or as a ``ReplayBuffer`` transform, where ``extend`` computes.

    Where the KL is part of the reward, a group whose graded rewards are all equal is not divided by its scale.

    Args:
        baseline, scale, eps: see :func:`sota_grpo.functional.advantages.group_advantages`.
        group_size: refuse a batch in which a group has another number of responses; None accepts any.
        in_keys: reward and group id.
        out_keys: advantage.

    Raises:
        ValueError: on a group that is not ``group_size`` long, and as ``group_advantages``.
        RuntimeError: inside an env, which sees one step and not the groups.

    Source: Shao et al. 2024 (arXiv:2402.03300, section 4.1.2).

    >>> from tensordict import TensorDict
    >>> rows = TensorDict({"next": {"reward": torch.tensor([[1.0], [0.0]])}, "group_id": torch.tensor([7, 7])}, [2])
    >>> GroupAdvantage(scale="none")(rows)["advantage"].flatten().tolist()
    [0.5, -0.5]
    """

    def __init__(
        self,
        baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean",
        scale: Literal["group_std", "batch_std", "none"] = "group_std",
        eps: float = 1e-6,
        *,
        group_size: int | None = None,
        in_keys: tuple[NestedKey, NestedKey] = (keys.REWARD, keys.GROUP_ID),
        out_keys: tuple[NestedKey] = (keys.ADVANTAGE,),
    ) -> None:
        super().__init__(in_keys=list(in_keys), out_keys=list(out_keys))
        self.baseline, self.scale, self.eps, self.group_size = baseline, scale, eps, group_size

    @property
    def written_key(self) -> NestedKey:  # type: ignore[override]
        return self.out_keys[0]

    def _write(self, rows: TensorDictBase) -> None:
        reward, group_ids = (rows.get(key) for key in self.in_keys)
        reward, group_ids = reward.reshape(-1), group_ids.reshape(-1)
        if self.group_size is not None:
            ids, counts = group_ids.unique(return_counts=True)
            odd = (counts != self.group_size).nonzero().flatten()
            if odd.numel():
                raise ValueError(
                    f"group {ids[odd[0]].item()} has {counts[odd[0]].item()} responses in this batch instead of "
                    f"{self.group_size}; its baseline would be wrong, so pass whole groups."
                )
        values = group_advantages(reward, group_ids, baseline=self.baseline, scale=self.scale, eps=self.eps)
        graded = rows.get(keys.GRADED_REWARD, None)
        if graded is not None:
            values = self._unscaled_where_graded_alike(values, reward, graded.reshape(-1), group_ids)
        rows.set(self.out_keys[0], values.reshape(-1, 1, 1))

    def _unscaled_where_graded_alike(self, values: Tensor, reward: Tensor, graded: Tensor, group_ids: Tensor) -> Tensor:
        """A group whose rewards differ by their KL alone keeps those differences as they are.

        Divided by their own std they would become full-size advantages, however small: at the first step, where the
        policy is the reference, out of rounding alone.
        """
        unscaled = group_advantages(reward, group_ids, baseline=self.baseline, scale="none")
        return torch.where(constant_groups(graded, group_ids), unscaled, values)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(tensordict)

    def transform_output_spec(self, output_spec: Any) -> Any:
        raise RuntimeError(
            "GroupAdvantage compares the finished responses of a group, which an env step does not have; "
            "use it as a collector's postproc or as a ReplayBuffer transform."
        )
