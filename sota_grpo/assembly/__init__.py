"""Build the components of a run from its config; :class:`~sota_grpo.errors.UserError` says why one cannot be built."""
