"""Train while workers collect: ``python grpo-async.py [--config-name NAME] [key=value ...]``; ``--help`` shows more.

What runs, put together by :func:`sota_grpo.assembly.build.build`::

    buffer = GroupReplayBuffer(..., transform=GroupAdvantage())   # a TorchRL ReplayBuffer: whole groups, oldest first
    collector = PromptGroupCollector(env, engines, replay_buffer=buffer, max_policy_age=1,
                                     graded_transforms=[...])     # yours: env.transforms=[FILE.py:NAME]
    learner = Learner(policy, GRPOLoss(policy, ...), ...)         # a TorchRL LossModule; AdamW, micro-batches
    weight_sync.send(version=learner.version)                     # the first weights
    collector.start()                                             # engines, graders and reference fill the buffer
    for batch in buffer:                                          # sota_grpo/loop.py
        learner.update(batch)
        collector.update_policy_weights_(version=learner.version)  # to every engine, while it generates

On one GPU sampling and training alternate, as in grpo.py, and there is no buffer.
"""

import os

# OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sota_grpo.run.entry import entry

if __name__ == "__main__":
    entry(mode="async")
