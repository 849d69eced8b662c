"""Values as the page holds them: few digits, no number that JSON lacks, no character that HTML reads."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

# What HTML or JavaScript could read as markup, what terminals and editors obey, and halves of surrogate pairs, which
# have no bytes in UTF-8; JSON takes any of it escaped.
_ODD = re.compile("[<>&\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HEAD, _TAIL = 16_000, 4_000  # characters that are kept of a longer text


def safe_json(value: Any) -> str:
    """``value`` as JSON that can stand in an HTML ``<script>`` element, whatever the texts in it hold.

    Raises:
        ValueError: a number is not finite; ``number`` lets none through.

    >>> safe_json({"text": "</script><b>&"})
    '{"text":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e\\\\u0026"}'
    >>> json.loads(safe_json("\\ud800</script>")) == "\\ud800</script>"
    True
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ODD.sub(lambda odd: f"\\u{ord(odd[0]):04x}", text)


def number(value: Any, digits: int = 5) -> float | int | None:
    """A finite number with so many significant digits; anything else is None. Integers stay exact.

    >>> number(0.1234567), number(40.0), number(123456789), number(float("nan")), number("1"), number(10**400)
    (0.12346, 40, 123456789, None, None, None)
    """
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def clipped(text: str) -> str | dict[str, Any]:
    """``text``, or of a very long one its beginning, its end, and how many characters are left out between them.

    >>> clipped("short")
    'short'
    >>> long = clipped("a" * 1_000_000)
    >>> len(long["head"]), long["left"], len(long["tail"])
    (16000, 980000, 4000)
    """
    if len(text) <= _HEAD + _TAIL:
        return text
    return {"head": text[:_HEAD], "left": len(text) - _HEAD - _TAIL, "tail": text[-_TAIL:]}


def shown(value: Any) -> str:
    """The value of an option or a note of a grader, as one writes it in a config.

    >>> shown(None), shown(True), shown("auto"), shown([1, 2]), shown(1e-6)
    ('null', 'true', 'auto', '[1, 2]', '1e-06')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
