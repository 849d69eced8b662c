"""Dialogs of several turns over any engine: the policy speaks, is graded, is answered, and speaks again."""

from sota_grpo.dialogs.engine import DialogEngine

__all__ = ["DialogEngine"]
