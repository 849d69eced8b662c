"""A judge beside a grader: a model that says what responses are worth (docs/tasks.md).

From what is asked (``prompts``, ``endpoints``) over who asks (``client``, ``cache``) to the term of the reward
(``rules``, ``grader``); a model that the reward workers load is ``classifier``.
"""
