"""Decide whether two answers to a mathematics problem are equivalent (boxed answers as in the MATH data set).

Answers are normalized (:func:`tidy`), parsed to trees (:mod:`sota_grpo.rewards.maths.parse`) and compared
(:mod:`sota_grpo.rewards.maths.compare`). The conventions are those of the MATH data set and of its usual graders
(Hendrycks et al. 2021, arXiv:2103.03874; Lightman et al. 2023, arXiv:2305.20050; Math-Verify).
"""

from __future__ import annotations

import re

from sota_grpo.rewards.maths.compare import Comparison
from sota_grpo.rewards.maths.parse import Incomparable, Node, parse_answer

MAX_ANSWER_CHARS = 1000  # longer answers are not compared; the longest gold answer of MATH has 159

_SIGNS = ("pi", "theta", "infty", "sqrt", "pm", "degree", "in", "cup", "cap", "emptyset", "approx")
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\t\n\r", " "),
        **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff", ""),
        **dict(zip("\u00d7\u00b7\u22c5\u00f7\u2264\u2265\u2260\u2019", (*"***/", "<=", ">=", "!=", "'"))),
        **dict(zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", map("^{{{}}}".format, range(10)))),
        **dict(zip("\u03c0\u03b8\u221e\u221a\u00b1\u00b0\u2208\u222a\u2229\u2205\u2248", map("\\{} ".format, _SIGNS))),
    }
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<!\\)\\[()\[\]]|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s?\.?", ""),
        (r"(?<=\d)\s?(?:\{\s?,\s?\}|,\\[!,;: ]|\\[!,])\s?(?=\d{3}(?!\d))", ""),  # thousands: 1{,}000 and 1,\!000
        (r"\A-?\d{1,3}(?: \d{3})+(?:\.\d+)?\Z", lambda number: number[0].replace(" ", "")),
        (r"\\!|&(?= ?[=<>])|\\(?:text)?color\s?\{[^{}]*\}", ""),  # a cell of aligned lines must not begin with a sign
        (r"\.\.\.|\\(?:dots|cdots)(?![A-Za-z])", r"\\ldots "),
        (r"(?<!\\)\\[,;: >]|~|\\q?quad(?![A-Za-z])|\\(?:displaystyle|textstyle|[lL]arge|bf|rm)(?![A-Za-z])", " "),
        (r"\\(?:mathrm|mbox|textrm|textnormal|textbf|textit|operatorname\*?)\s?(?=\{)", r"\\text"),
        (r"(?:\^\s?\{?\s?\\(?:circ|degree)|\\degree)(?![A-Za-z])\s?\}?(?:\s?\\text\s?\{\s?[CF]\s?\})?", r"\\degree "),
        (r"\\([dtc]frac|[dt]binom)(?![A-Za-z])", lambda match: "\\" + match[1][1:]),
        (r"(?<![\d.])(\d{1,9}) {1,2}(\d{1,9}) ?/ ?(\d{1,9})(?![\d.])", r"(\1+\\frac{\2}{\3})"),  # 1 1/2
        (r"(?<![\w.^}])(\d{1,9}) ?(\\frac ?(?:\{\d{1,9}\}|\d) ?(?:\{\d{1,9}\}|\d))", r"(\1+\2)"),  # 1\frac12
        (
            r"(?<=\d) ?(\\text ?\{ ?)?(thousand|million|billion|trillion)(?![A-Za-z])",
            lambda match: f"\\cdot 10^{{{_ZEROS[match[2]]}}}{match[1] or ''}",
        ),
        (r"(?<![\d.])\\(?:mathbf|vec|overline|bar|hat|boxed|fbox)(?![A-Za-z])", ""),  # only their argument counts
        (r"\\(?:mathbb|Bbb) ?\{? ?R ?\}?(?![A-Za-z])", r"\\R "),
        (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\(sin|cos|tan) ?\^ ?\{ ?-1 ?\}", r"\\arc\1 "),
        (r"(?<=[)\]}]) ?U ?(?=[(\[\\])", r"\\cup "),
        (r"\A\\text ?\{[^{}]*\bis:? ?\}", ""),  # \text{the answer is } 5
        (r"\\text ?\{([^{}\d]*\d[^{}]*)\}", r"\1"),  # \text{7 days}
        (r" ?\(?(?:\\[pb]?mod|\\text ?\{ ?mod ?\}) ?\{? ?(\d{1,9}) ?\}?\)?\Z", r"\\text{mod\1}"),
    )
)
_NOTHING = ("nosolution", "nosolutions", "norealsolutions", "none")
_PHRASES = {"allrealnumbers": "\\R", **dict.fromkeys(_NOTHING, "\\emptyset")}


def tidy(text: str) -> str:
    """Return the answer in one spelling without delimiters, spacing, fonts, thousands separators and a final period.

    >>> tidy("$\\\\left( 1{,}000,\\\\ \\\\dfrac{1}{2} \\\\right).$")
    '( 1000, \\\\frac{1}{2} )'
    """
    text = text.translate(_UNICODE).strip()
    if "\\begin" not in text:  # not rows of a matrix: backslashes that were escaped twice
        text = re.sub(r"\\\\(?=[A-Za-z{}])", r"\\", text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = re.sub(r" {2,}", " ", re.sub(r"\\?\$", "", text)).strip(" *`").rstrip(" .,;:\\")
    text = re.sub(r"\A(?:=|\\approx|\\therefore|\\#| )+(?![A-Za-z])", "", text)  # \#7 is number 7
    if builder := re.fullmatch(r"\\\{ ?[a-zA-Z](?: ?\\in ?\\R)? ?(?:\\mid|\||:) ?(.*)\\\}", text):
        return builder[1].strip()
    return _PHRASES.get(plain(text).lower(), text)


def plain(text: str) -> str:
    """Return a result of :func:`tidy` without spaces, braces and LaTeX text commands, to compare answers in words."""
    return re.sub(r"\\(?:text|underline)\s?|[{}\s]|\\ ", "", text)


_UNIT_NAMES = """cm centimeter centimetre; mm millimeter millimetre; km kilometer kilometre; m meter metre; ft foot feet
in inch inche; yd yard; mi mile; kg kilogram; g gram; lb pound; oz ounce; l liter litre; ml milliliter; s sec second
min minute; h hr hour; day; week; month; year yr; $ dollar usd buck; cent; deg degree; rad radian; am; pm"""  # singular
_UNITS = {name: names[0] for names in map(str.split, re.split("[;\n]", _UNIT_NAMES)) for name in names}
_OTHER_UNITS = {"square", "squared", "cubic", "cubed", "sq", "cu", "unit", "mph", "per"}
_NO_UNITS = {"and", "or", "if", "for", "when", "where", "is", "not"}
_TAIL = re.compile(  # words in \text or plain words, perhaps with a power
    r"\s?(?:\\text\s?\{(?P<text>[^{}]*)\}|(?<=[\d}) ])(?P<plain>[A-Za-z][A-Za-z./ ]{0,60}?))"
    r"(?:\s?\^\s?(?:\d|\{\s?-?\d\s?\}))?\Z"
)


def split_unit(text: str) -> tuple[str, set[str]]:
    """Split a result of :func:`tidy` into the answer without its unit and the set of its base units.

    An unknown unit (``apples``) gives an empty set. A final percent or degree sign stays in the answer, and the set has
    ``%`` or ``deg``. A plain letter (``5 m``) is not split off, nor is an unknown word after a word.

    >>> split_unit("5\\\\text{ cm}^2"), split_unit("7 apples")[0], split_unit("2 x")[0]
    (('5', {'cm'}), '7', '2 x')
    """
    tail = _TAIL.search(text)
    rest = text[: tail.start()].rstrip() if tail else ""
    if tail and rest and rest[-1] not in "=<>+-*/^_,;(:" and "\\text" not in rest:
        words = re.findall(r"[a-z]+\d*", (tail["text"] or tail["plain"] or "").replace(".", "").lower())
        words = [word.removesuffix("s") or word for word in words]
        is_known, is_long = {*words} <= {*_UNITS, *_OTHER_UNITS}, any(len(word) > 1 for word in words)
        if tail["text"] is not None:
            is_unit = is_known or (is_long and any(map(str.isdigit, rest)))
        else:
            is_apart = rest[-1].isdigit() and tail[0][0] == " " and all(len(word) > 2 for word in words)
            is_unit = is_apart or (is_known and (is_long or "/" in tail[0]))
        if is_unit and _NO_UNITS.isdisjoint(words):
            return rest, {_UNITS.get(word, word) for word in words if word in _UNITS or word.startswith("mod")}
    return text, {unit for sign, unit in (("\\degree", "deg"), ("%", "%")) if text.endswith(sign)}


_WORDS = re.compile(r"[A-Za-z(][A-Za-z ().,'-]*")
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]*")
_LABELLED = re.compile(r"(?:\\text ?\{ ?)?\(?([A-Z])[).:](?: ?\}| ).+")  # \text{(B)} 42
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
_NAME = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def math_equal(gold: str, answer: str) -> bool:
    """Return whether ``answer`` is mathematically equivalent to ``gold``; raises nothing for any two texts.

    It compares words, then known units (one answer may have fewer or none), then the parsed answers. Nothing is
    evaluated as code. Different answers with large numbers or deep nesting count as different, even if they are
    equivalent; so do answers of more than ``MAX_ANSWER_CHARS`` characters, and empty ones, even if they are equal.

    >>> math_equal("\\\\frac{\\\\sqrt3}{2}", "\\\\sqrt{3}/2"), math_equal("x=5", "5"), math_equal("[1,2)", "(1,2)")
    (True, True, False)
    """
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS or not all(texts := (tidy(gold), tidy(answer))):
        return False
    if _SPACE.sub("", texts[0]) == _SPACE.sub("", texts[1]) or _same_words(*texts):
        return True
    (gold, gold_units), (answer, answer_units) = map(split_unit, texts)
    if not (gold_units <= answer_units or answer_units <= gold_units):  # 5 km is accepted for 5 km/h
        return False
    try:
        return _same_trees(gold, answer)
    except Incomparable:
        return False


def _same_words(gold: str, answer: str) -> bool:
    """Return whether both are the same words; case counts only if they may be an expression, such as ``R-r``."""
    words = plain(gold), plain(answer)
    choices = [_CHOICE.fullmatch(word) or _LABELLED.fullmatch(text) for word, text in zip(words, (gold, answer))]
    if choices[0] and choices[1]:
        return choices[0][1].casefold() == choices[1][1].casefold()
    if not all(map(_WORDS.fullmatch, words)):
        return False
    is_word = re.search(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3}", gold) is not None
    return words[0] == words[1] or (is_word and words[0].casefold() == words[1].casefold())


def _same_trees(*texts: str) -> bool:
    letters = [set(_NAME.findall(text)) for text in texts]
    fold = not any(one.islower() and one.upper() in each for each in letters for one in each)  # R and r are two things
    readings = (True, False) if any("," in text for text in texts) else (True,)  # 100,200 is a number or a list
    return any(Comparison().same(*(_tree(text, fold, reading) for text in texts)) for reading in readings)


def _tree(text: str, fold: bool, thousands: bool) -> Node:
    if fold:
        text = _NAME.sub(lambda name: name[0] if name[0][0] == "\\" else name[0].lower(), text)
    if "\\pm" in text:  # the set of the values with plus and with minus
        inside = text[2:-2] if text.startswith("\\{") and text.endswith("\\}") else text
        text = "\\{" + inside.replace("\\pm", "+") + "," + inside.replace("\\pm", "-") + "\\}"
    if thousands and not re.search(r"[(\[]|\\\{", text):  # in brackets a comma separates a list
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return parse_answer(text)
