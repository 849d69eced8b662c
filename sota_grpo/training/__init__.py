"""What a run trains with: the learner, its checks, its evaluations, its checkpoints and its directory."""
