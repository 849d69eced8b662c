"""Train synchronously: ``python grpo.py [--config-name NAME] [key=value ...]``; ``--help`` lists every option.

What runs, put together by :func:`sota_grpo.assembly.build.build`::

    collector = PromptGroupCollector(env, engine, ...)      # a TorchRL BaseCollector: samples, rewards, advantages;
                                                            # your own transforms: env.transforms=[FILE.py:NAME]
    learner = Learner(policy, GRPOLoss(policy, ...), ...)   # a TorchRL LossModule; AdamW, micro-batches
    for batch in collector:                                 # sota_grpo/loop.py
        learner.update(batch)
        collector.update_policy_weights_(version=learner.version)    # a TorchRL WeightSyncScheme pushes the weights
"""

import os

# OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sota_grpo.run.entry import entry

if __name__ == "__main__":
    entry(mode="sync")
