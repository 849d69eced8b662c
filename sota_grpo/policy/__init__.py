"""The policy on the trainer's side: loading, LoRA, log-probabilities, the frozen reference, export."""
