"""The source of the training loop's batches: a collector, the replay buffer that it fills, and the weight sync."""
