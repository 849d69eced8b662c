"""Keywords as regular expressions, which is what they are to the benchmark."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=4096)
def pattern_of(keyword: str, before: str = "", after: str = "", *, ignore_case: bool = True) -> re.Pattern[str]:
    r"""``before + keyword + after`` as a regular expression; the keyword as plain text where it is not a valid one.

    >>> bool(pattern_of("colou?r").search("COLOR")), bool(pattern_of("c++").search("I like C++"))
    (True, True)
    >>> bool(pattern_of("art", r"\b", r"\b").search("party"))
    False
    """
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    try:
        return re.compile(before + keyword + after, flags)
    except (re.error, RecursionError, OverflowError):
        return re.compile(before + re.escape(keyword) + after, flags)
