"""The learner of a run, the checks before training, evaluations, checkpoints and the run directory."""
