"""What a run leaves behind: metrics, rollouts, the log, the progress line, W&B."""
