"""One run from the command line or from Python, from its first word to its exit code."""
