"""What mathematical answers are dressed in: delimiters, spaces, sizes, fonts, separators, in LaTeX and in Unicode."""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000  # of an answer that is compared; the longest gold answer of MATH has 159

_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\t\n\r", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad\u202a\u202b\u202c\u202d\u202e", ""),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **dict(zip("\uff08\uff09\uff0c\uff1a\uff1b\u3002\uff05\uff1d", "(),:;.%=")),
        **{char: f"^{{{digit}}}" for digit, char in enumerate(_SUPERSCRIPTS)},
        **{chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)},
        **{"\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}", "\u2153": "\\frac{1}{3}"},
        **{"\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "\\div ", "\u2217": "*"},
        **{"\u03c0": "\\pi ", "\u03b8": "\\theta ", "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma "},
        **{"\u221e": "\\infty ", "\u221a": "\\sqrt ", "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u00b0": "\\degree "},
        **{"\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ", "\u2208": "\\in "},
        **{"\u222a": "\\cup ", "\u2229": "\\cap ", "\u2216": "\\setminus ", "\u2205": "\\emptyset ", "\u211d": "\\R "},
        **{"\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\u2026": "\\ldots ", "\u20ac": "$", "\u00a3": "$"},
    }
)  # fmt: skip
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s?\.?", ""),
        (r"(?<=\d)\s?(?:\{\s?,\s?\}|,\\[!,;: ]|\\[!,])\s?(?=\d{3}(?!\d))", ""),  # thousands: 1{,}000 and 1,\!000
        (r"\\!", ""),
        (r"\.\.\.|\\(?:dots|cdots|dotsc)(?![A-Za-z])", r"\\ldots "),
        (r"(?<!\\)\\[,;: >]|~|\\q?quad(?![A-Za-z])", " "),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|large|Large|small|bf|rm)(?![A-Za-z])",
            " ",
        ),
        (r"\\(?:text)?color\s?\{[^{}]*\}", ""),
        (r"(?:\^\s?\{?\s?\\(?:circ|degree)|\\degree)(?![A-Za-z])\s?\}?", r"\\degree "),
        (r"(?<=\\degree ) ?(?:\\text ?\{ ?[CF] ?\}|[CF](?![A-Za-z]))", ""),
        (r"\\(?:mathrm|mbox|textrm|textbf|textit|textnormal|mathit|mathsf|operatorname\*?)\s?(?=\{)", r"\\text"),
        (r"(?<=[\d}) ]) ?(?:\\text\s?\{\s?(?:percent|percentage|pct)\s?\}|(?:percentage|percent|pct)\b)", r"\\%"),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<![\d.])(\d{1,9}) {1,2}(\d{1,9}) ?/ ?(\d{1,9})(?![\d.])", r"(\1+\\frac{\2}{\3})"),  # 1 1/2
        (r"(?<=[\d ])([aApP])\.\s?([mM])\.?(?![A-Za-z])", r"\1\2"),
        (r"\\([dtc]frac|[dt]binom)(?![A-Za-z])", lambda found: "\\" + found[1][1:]),
    )
)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}])")
_SPACES = re.compile(r" {2,}")
_SET_BUILDER = re.compile(r"\\\{ ?[a-zA-Z](?: ?\\in ?\\(?:mathbb ?\{?|Bbb ?\{?|)R\}?)? ?(?:\\mid|\||:) ?(.*)\\\}")
_PHRASES = {
    **dict.fromkeys(("allrealnumbers", "allreals", "realnumbers", "allrealx"), "\\R"),
    **dict.fromkeys(
        ("nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "none"), "\\emptyset"
    ),
}
_LEADING = re.compile(r"\A(?:=|\\approx|\\therefore| )+(?![A-Za-z])")
_GROUP = re.compile(r"(?:\\(?:boxed|fbox) ?)?\{(.*)\}", re.DOTALL)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ONLY_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"))


def tidy(text: str) -> str:
    """The answer without delimiters, spacing commands, sizes, fonts, thousands separators and a full stop at its end.

    >>> tidy("$\\\\left( 1{,}000,\\\\ \\\\dfrac{1}{2} \\\\right).$"), tidy("\\u22123\\u00b0")
    ('( 1000, \\\\frac{1}{2} )', '-3\\\\degree')
    """
    text = text.translate(_UNICODE).strip()
    for begin, end in _DELIMITERS:
        if text.startswith(begin) and text.endswith(end):
            text = text[2:-2].strip()
    while inside := _GROUP.fullmatch(text):
        if "\\choose" in text or not _is_balanced(inside[1]):
            break
        text = inside[1].strip()
    if "\\begin" not in text:  # no rows to keep apart: backslashes that were escaped once too often
        text = _DOUBLED.sub(r"\\", text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.replace("\\$", "").replace("$", "").strip(" *`")
    text = _SPACES.sub(" ", text).rstrip(" .,;:\\")
    text = _LEADING.sub("", text)
    if (words := _ONLY_TEXT.fullmatch(text)) and any(char.isdigit() for char in words[1]):
        text = words[1].strip()
    if builder := _SET_BUILDER.fullmatch(text):
        text = builder[1].strip()
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    return _PHRASES.get(plain(text).lower(), text)


def _is_balanced(text: str) -> bool:
    """Whether no brace is closed that was not opened."""
    depth = 0
    for brace in _BRACE.findall(text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return True


_WRAPPER = re.compile(r"\\(?:text|mathbf|boldsymbol|mathcal|underline)\s?|[{}\s]|\\ ")


def plain(text: str) -> str:
    """A tidy answer as bare characters: no spaces, braces or text commands; for comparing answers in words.

    >>> plain("\\\\text{I and II} "), plain("(\\\\text{A})")
    ('IandII', '(A)')
    """
    return _WRAPPER.sub("", text)
