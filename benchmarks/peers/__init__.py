"""Ours, TRL and TorchRL on identical work, alternating in one process tree (``python -m benchmarks.peers``)."""
