"""What strangers write: random options, tables, run directories, chat templates, instructions and answers.

Every target takes random input and either answers or raises a ``UserError``; anything else is a crash.
``python -m tests.fuzz --minutes 60 --seed 7`` runs all of them, each in a process of its own with bounded memory, and
prints how many inputs were tried, the longest time of one and the memory; ``make slow`` has ten seconds of it.
"""
