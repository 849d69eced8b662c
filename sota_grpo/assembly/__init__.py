"""From a config to the parts of a run, each room given plain values only; part of the one assembly with ``run/app.py``."""
