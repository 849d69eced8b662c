"""Extract and grade answers in untrusted responses: built-in graders, a user's reward functions, an LLM judge.

``extract`` finds answers and compares numbers and words, ``maths`` compares mathematical answers.
"""
