"""Whether two answers to a mathematics problem are the same (the boxed answers of MATH and its kin).

Math-Verify is the last judge, over matrices that are added or multiplied, and the greatest and least of lists. It
parses LaTeX with a grammar (latex2sympy2_extended, which evaluates no code) and lets SymPy compare. Of it, the
extraction of plain expressions is left out, because that one hands text to ``sympy.parse_expr``, which is Python's
``eval``; its timeouts are left out too, because they are signals, which exist in the main thread alone. SymPy takes
minutes over many an innocent expression (products, integrals, high powers), so it is shown only what is small, flat and
of these few kinds.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable

from sota_grpo.rewards.maths.compare import Comparison
from sota_grpo.rewards.maths.parse import Unreadable, parse_answer
from sota_grpo.rewards.maths.values import (
    Measure,
    NoNumber,
    NoValue,
    TooCostly,
    split_letter,
    split_unit,
    units_conflict,
)

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
        (
            r"&(?= ?(?:[=<>]|\\(?:[lg]eq?|approx)(?![A-Za-z])))",
            "",
        ),  # lines are aligned at signs, no cell begins with one
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
        (r"\A\\text ?\{[^{}]*\bis:? ?\}", ""),  # \text{the answer is } 5
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
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")


def tidy(text: str) -> str:
    """The answer without delimiters, spacing commands, sizes, fonts, thousands separators and a full stop at its end.

    >>> tidy("$\\\\left( 1{,}000,\\\\ \\\\dfrac{1}{2} \\\\right).$"), tidy("\\u22123\\u00b0")
    ('( 1000, \\\\frac{1}{2} )', '-3\\\\degree')
    """
    text = _DELIMITER.sub("", text.translate(_UNICODE)).strip()
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


_MAX_CHARS, _MAX_TOKENS, _MAX_DEPTH, _MAX_POWERS, _MAX_DIGITS = 160, 80, 5, 2, 4

_OPERATORS = ("gcd", "lcm", "max", "min", "det")
_OURS_NOT = re.compile(r"\\(?:begin|gcd|lcm|max|min|det)\b|\\(?:operatorname|text) ?\{(?:gcd|lcm|max|min|det)\}")
_COMMANDS = {"frac", "sqrt", "pi", "cdot", "times", "div", *_OPERATORS, "begin", "end", "text", "operatorname"}
_NAMES = {*_OPERATORS, "pmatrix", "bmatrix"}
_NAMED = re.compile(r"\\(?:operatorname|text|begin|end) ?(?:\{([^{}]*)\})?")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|[A-Za-z]|\S")
_SLOW = re.compile(r"\^ ?(?!\d(?!\d)|\{ ?-?\d ?\})|\\sqrt ?\{[^}]*\\(?:begin|det)")  # large powers, roots of matrices


def verified(gold: str, answer: str) -> bool:
    """Whether Math-Verify calls two tidy answers equal; False where it is not asked.

    >>> verified("12", "\\\\gcd(24, 36)"), verified("12", "\\\\int_0^{12} dx")
    (True, False)
    """
    asked = _OURS_NOT.search(gold) or _OURS_NOT.search(answer)
    if not asked or not (_is_harmless(gold) and _is_harmless(answer)):
        return False
    read, compare = _math_verify()
    try:
        return bool(compare(read(f"${gold}$"), read(f"${answer}$")))
    except Exception:  # model text reaches two foreign libraries here; where they fail the answers are not equal
        return False


def _is_harmless(text: str) -> bool:
    """Whether a text is short and flat, has known commands only, small numbers and no powers but small ones."""
    tokens = _TOKEN.findall(text)
    commands = {token[1:] for token in tokens if token[0] == "\\" and token[1:].isalpha()}
    if len(text) > _MAX_CHARS or len(tokens) > _MAX_TOKENS or not commands <= _COMMANDS or "!" in tokens:
        return False
    if not set(_NAMED.findall(text)) <= _NAMES or tokens.count("^") > _MAX_POWERS or _SLOW.search(text):
        return False
    depth = deepest = 0
    for token in tokens:
        depth += (token in ("{", "(", "[")) - (token in ("}", ")", "]"))
        deepest = max(deepest, depth)
    return deepest <= _MAX_DEPTH and not any(len(token) > _MAX_DIGITS for token in tokens if token.isdigit())


@functools.cache
def _math_verify() -> tuple[Callable[[str], list[object]], Callable[[list[object], list[object]], bool]]:
    """Math-Verify's two functions, imported when first needed: SymPy takes a while."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    read = functools.partial(
        parse, extraction_config=(LatexExtractionConfig(),), fallback_mode="no_fallback", parsing_timeout=None
    )
    return read, functools.partial(verify, timeout_seconds=None)


_WORDS = re.compile(r"[A-Za-z(][A-Za-z ().,'-]*")
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]*")
_LABELLED = re.compile(r"(?:\\text ?\{ ?)?\(?([A-Z])[).:](?: ?\}| ).+")  # \text{(B)} 42
_COMMA = re.compile(r"\d,\d{3}(?!\d)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3}")
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def math_equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` is the same mathematical answer as ``gold``. Total: it returns for any two texts.

    Compared are, in this order: the words; the units, where both have a known one; the two answers as the grammar of
    :mod:`sota_grpo.rewards.maths.parse` reads them (:mod:`sota_grpo.rewards.maths.compare` has the conventions); and,
    only where that grammar cannot read them, what Math-Verify makes of them. Nothing is evaluated as code, and large
    numbers, deep nesting and long texts end the comparison instead of being worked out.

    Args:
        gold: the right answer, without its box.
        answer: the answer found in a response, at most ``MAX_ANSWER_CHARS`` characters; a longer one is not equal.

    >>> math_equal("\\\\frac{\\\\sqrt3}{2}", "\\\\sqrt{3}/2"), math_equal("x=5", "5"), math_equal("0.333", "1/3")
    (True, True, False)
    >>> math_equal("5\\\\text{ cm}", "5"), math_equal("\\\\text{(A)}", "A"), math_equal("[1,2)", "(1,2)")
    (True, True, False)
    >>> math_equal("10^{10^{10}}", "__import__('os').getcwd()")
    False
    """
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return False
    texts = tidy(gold), tidy(answer)
    if not all(texts):
        return False
    if _SPACE.sub("", texts[0]) == _SPACE.sub("", texts[1]) or _same_words(*texts):
        return True
    gold_measure, answer_measure = _measures(*texts)
    if units_conflict(gold_measure, answer_measure):
        return False
    try:
        return _same_trees(gold_measure, answer_measure)
    except TooCostly:
        return False
    except (Unreadable, NoNumber, NoValue):
        return verified(gold_measure.text, answer_measure.text)


def _same_words(gold: str, answer: str) -> bool:
    """Whether both are words, and the same; letter case matters only in what may be an expression: ``R-r``."""
    words = plain(gold), plain(answer)
    choices = [_CHOICE.fullmatch(word) or _LABELLED.fullmatch(text) for word, text in zip(words, (gold, answer))]
    if choices[0] and choices[1]:
        return choices[0][1].casefold() == choices[1][1].casefold()
    if not all(map(_WORDS.fullmatch, words)):
        return False
    return words[0] == words[1] or (_WORD.search(gold) is not None and words[0].casefold() == words[1].casefold())


def _measures(gold: str, answer: str) -> tuple[Measure, Measure]:
    """Both answers without their units; a bare letter is a unit only where the other answer has no letters."""
    gold_measure, answer_measure = split_unit(gold), split_unit(answer)
    if not _has_letters(answer_measure.text):
        gold_measure = split_letter(gold_measure)
    if not _has_letters(gold_measure.text):
        answer_measure = split_letter(answer_measure)
    return gold_measure, answer_measure


def _has_letters(text: str) -> bool:
    return any(found[0] != "\\" for found in _LETTERS.findall(text))


def _same_trees(gold: Measure, answer: Measure) -> bool:
    texts = [_scaled(measure) for measure in (gold, answer)]
    if not any(map(_mixes_cases, texts)):
        texts = [_LETTERS.sub(lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), t) for t in texts]
    readings = (True, False) if any(map(_COMMA.search, texts)) else (True,)  # 100,200 is a number or a list
    return any(Comparison().same(*(parse_answer(text, thousands=reading) for text in texts)) for reading in readings)


def _scaled(measure: Measure) -> str:
    return measure.text if measure.factor == 1 else f"({measure.text})\\cdot {measure.factor}"


def _mixes_cases(text: str) -> bool:
    """Whether a letter stands in a text both large and small, and so may mean two things."""
    letters = {found for found in _LETTERS.findall(text) if found[0] != "\\"}
    return any(letter.islower() and letter.upper() in letters for letter in letters)
