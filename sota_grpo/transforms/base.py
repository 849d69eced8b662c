"""What the row transforms share: write once, on a batch or on an env's step."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from sota_grpo.collate import row_list


class RowTransform(Transform):
    """``_write(rows)`` on every batch whose first row lacks ``written_key``."""

    written_key: NestedKey

    def _write(self, rows: TensorDictBase) -> None:
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if row_list(tensordict)[0].get(self.written_key, None) is None:
            self._write(tensordict)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict.copy().set("next", next_tensordict)
        self._write(rows)
        return next_tensordict.update(rows.get("next"))

    def transform_output_spec(self, output_spec: Any) -> Any:
        return output_spec  # rewards keep their spec; the rest exists after a step only, never after a reset
