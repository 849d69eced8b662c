"""Finding the answer in a response and grading it: untrusted text, functions of a user, a judge.

Numbers and words are read in ``extract``, mathematical answers of every kind in ``maths``.
"""
