"""Where the loop gets its batches from: a collector, and the replay buffer that it fills."""
