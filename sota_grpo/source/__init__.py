"""Where the loop gets its batches from: a collector in step with the learner, or rollouts that run beside it."""
