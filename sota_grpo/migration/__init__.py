"""Exports of a run: verl's command line, and the model card."""
