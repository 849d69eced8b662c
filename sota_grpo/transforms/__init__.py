"""TorchRL transforms over rows of finished responses: their reward, the reference's log-probs, their advantage.

Each is a :class:`torchrl.envs.transforms.Transform` that reads and writes whole rows, ragged (a lazy stack) or dense.
Called on a batch (a collector's ``postproc``, or by hand) it writes in place. Each *writes once*: rows that already
carry its out key pass unchanged, because a response does not change after it was sampled. So in a ``ReplayBuffer``
:class:`GroupAdvantage` computes when the rows are written, where groups are whole, and leaves them alone when a random
subset is sampled. Those that write under ``"next"`` also run on an env's step (``TransformedEnv``); what they write
beside the reward is then not in the env's specs.
"""

from __future__ import annotations

from sota_grpo.transforms.advantage import GroupAdvantage
from sota_grpo.transforms.penalties import OverlongPenalty, ReferenceKL
from sota_grpo.transforms.score import ScoreResponse

__all__ = ["GroupAdvantage", "OverlongPenalty", "ReferenceKL", "ScoreResponse"]
