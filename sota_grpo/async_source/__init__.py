"""Batches from rollouts that run while the learner learns, with a proven bound on their age."""

from sota_grpo.async_source.source import AsyncSource

__all__ = ["AsyncSource"]
