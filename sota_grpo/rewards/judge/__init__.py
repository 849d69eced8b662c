"""A judge beside a grader: a model on a server that scores responses (docs/tasks.md).

``questions`` is what it is asked and how its verdict is read, ``client`` the HTTP and the kept answers, ``grader`` the
term of the reward.
"""
