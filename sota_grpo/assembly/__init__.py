"""From a config to the parts of a run, each room given plain values only; with ``run/app.py`` the one assembly."""
