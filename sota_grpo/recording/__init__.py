"""The records of a run: metrics, responses, logs, stored steps, the progress line, and copies to W&B and others."""
