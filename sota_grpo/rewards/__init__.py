"""Finding the answer in a response and comparing it: plain string functions, linear in the length of the text.

Numbers are compared here; mathematical answers of every kind in :mod:`sota_grpo.rewards.maths`.
"""

from sota_grpo.rewards.extract import (
    ANSWER_FORMATS,
    answers_equal,
    extract_answer,
    find_last_number,
    numbers_equal,
    parse_number,
)

__all__ = ["ANSWER_FORMATS", "answers_equal", "extract_answer", "find_last_number", "numbers_equal", "parse_number"]
