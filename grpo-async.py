"""Train while workers collect: ``python grpo-async.py [--config-name NAME] [key=value ...]``; ``--help`` shows more.

What runs, put together by :func:`sota_grpo.assembly.build.build`::

    buffer = GroupReplayBuffer(..., transform=GroupAdvantage())   # a TorchRL ReplayBuffer: whole groups, oldest first
    collector = PromptGroupCollector(env, engines, replay_buffer=buffer, max_policy_age=1, ...)
    learner = Learner(policy, GRPOLoss(policy, ...), ...)         # a TorchRL LossModule; AdamW, micro-batches
    collector.start()                                             # engines, graders and reference fill the buffer
    for batch in buffer:                                          # sota_grpo/loop.py
        learner.update(batch)
        collector.update_policy_weights_()                        # to every engine, while it generates
"""

import os

# OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sota_grpo.run.entry import entry

if __name__ == "__main__":
    entry(mode="async")
