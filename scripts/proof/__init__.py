"""The stages of :mod:`scripts.gpu_proof`."""
