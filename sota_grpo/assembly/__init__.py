"""Build the components of a run from its config."""
