"""Laws of RL training, checked on the loss and advantage functions of many trainers (``python -m benchmarks.laws``)."""
