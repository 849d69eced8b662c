"""Train while workers collect: ``python grpo-async.py [--config-name NAME] [key=value ...]``; ``--help`` shows more.

What runs, put together by :func:`sota_grpo.assembly.build.build`::

    buffer = GroupReplayBuffer(..., transform=GroupAdvantage())   # a TorchRL ReplayBuffer: whole groups, oldest first;
                                                                  # sample() applies the transform
    weight_sync = EngineWeightSync(...)                           # a TorchRL WeightSyncScheme
    collector = PromptGroupCollector(env, engines, replay_buffer=buffer, max_policy_age=1, weight_sync=weight_sync,
                                     graded_transforms=[...])     # yours: env.transforms=[FILE.py:NAME]
    learner = Learner(policy, GRPOLoss(policy, ...), ...)         # a TorchRL LossModule; AdamW, micro-batches
    weight_sync.send(version=learner.version)                     # the first weights
    collector.start()                                             # its thread puts graded groups into the buffer
    for batch in buffer:                                          # the loop of sota_grpo/loop.py
        learner.update(batch)
        collector.update_policy_weights_(version=learner.version)  # to every engine, also in the middle of a response

On one GPU the engine cannot sample while the learner trains: they alternate, as in grpo.py.
"""

import os

# OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sota_grpo.run.entry import entry

if __name__ == "__main__":
    entry(mode="async")
