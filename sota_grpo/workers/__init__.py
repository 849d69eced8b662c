"""Processes that work for a run: how they are started, spoken to, watched, replaced and ended."""
