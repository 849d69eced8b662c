"""Exports of a run: the model with a model card, or the files to train the same with verl."""
