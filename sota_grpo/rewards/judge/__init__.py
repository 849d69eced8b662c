"""Score responses with a language or reward model on a server (docs/tasks.md).

``questions`` builds the requests and parses the verdicts; ``client`` has the client, its cache and the grader.
"""
