"""Processes that work for a run: how they are started, called, watched, replaced and ended."""
