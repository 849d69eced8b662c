"""A language or reward model on a server that scores responses (docs/tasks.md).

``questions`` has the requests and the reading of verdicts, ``client`` the client, its cache and the grader.
"""
