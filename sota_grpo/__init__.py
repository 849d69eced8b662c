"""GRPO post-training of language models, TorchRL-native."""
