"""Whether two answers to a mathematics problem are the same (the boxed answers of MATH and its kin).

Answers are tidied, read into trees (:mod:`sota_grpo.rewards.maths.parse`) and compared: what is ordered, what is not,
which sets of numbers they describe. The conventions are those of the MATH data set and of its usual graders (Hendrycks
et al. 2021, arXiv:2103.03874; Lightman et al. 2023, arXiv:2305.20050; Math-Verify).

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

from sota_grpo.rewards.maths.parse import INFINITY, Node, Unreadable, parse_answer, variables, walk, without_sign
from sota_grpo.rewards.maths.values import FLIPPED, Measure, NoNumber, NoValue, RealSets, TooCostly, Values, split_unit

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
        (r"&(?= ?(?:[=<>]|\\(?:[lg]eq?|approx)(?![A-Za-z])))", ""),  # aligned lines: no cell begins with a sign
        (r"\.\.\.|\\(?:dots|cdots|dotsc)(?![A-Za-z])", r"\\ldots "),
        (r"(?<!\\)\\[,;: >]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:(?:display|text|script)style|(?:no)?limits|mathstrut|[lL]arge|small|bf|rm)(?![A-Za-z])", " "),
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
    **dict.fromkeys(("nosolution", "nosolutions", "emptyset", "none"), "\\emptyset"),
    **dict.fromkeys(("norealsolution", "norealsolutions"), "\\emptyset"),
}
_LEADING = re.compile(r"\A(?:=|\\approx|\\therefore|\\#| )+(?![A-Za-z])")  # \#7 is number 7
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
        depths = _depths(_BRACE.findall(inside[1]), "{", "}")
        if "\\choose" in text or min(depths, default=0) < 0:  # a brace is closed that was not opened
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


def _depths(tokens: Iterable[str], opening: str, closing: str) -> Iterator[int]:
    """How many brackets are open after each token."""
    return accumulate((token in opening) - (token in closing) for token in tokens)


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
    deepest = max(_depths(tokens, "{([", "})]"), default=0)
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


MAX_MEMBERS = 60  # of a list or set whose order does not matter
LEAST_DECIMALS = 6  # of a decimal that may stand for a number it is rounded from

_FUNCTION_NAMES = frozenset("fghpqrstuvwFGHPQRSTVAC")
_COLLECTIONS = ("list", "set", "seq", "matrix", "union", "inter", "minus", "reals")


class Comparison:
    """Compares the trees of a gold answer and of an answer.

    >>> from sota_grpo.rewards.maths.parse import parse_answer
    >>> def same(gold, answer): return Comparison().same(parse_answer(gold), parse_answer(answer))
    >>> same("1,2", "2,1"), same("(1,2)", "(2,1)"), same("x=5", "5"), same("x=5", "y=5"), same("50\\\\%", "0.5")
    (True, False, True, False, True)
    """

    def __init__(self) -> None:
        self._values = Values()
        self._sets = RealSets(self._values)

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether they are the same answer.

        Raises:
            NoNumber: something in them is neither a number nor anything else that is compared here.
            TooCostly: they cannot be compared within the budget.
        """
        return self._same(_expanded(_with_names(gold)), _expanded(_with_names(answer)))

    def _same(self, gold: Node, answer: Node) -> bool:
        self._values.spend(1)
        if gold == answer:
            return True
        if (as_sets := self._sets.equal(gold, answer)) is not None:
            return as_sets
        if "rel" in (gold.kind, answer.kind):
            return self._same_relation(gold, answer)
        if gold.kind == "text" or answer.kind == "text":
            return False
        if gold.kind in _COLLECTIONS or answer.kind in _COLLECTIONS:
            return self._same_collection(gold, answer)
        if gold.kind == "ratio" and answer.kind == "ratio":
            return self._same_ratio(gold.parts, answer.parts)
        if gold.kind == "base" or answer.kind == "base":
            return gold.parts == (answer,)  # the problem has said in which base: 101_2 may be answered by 101
        if INFINITY in (without_sign(gold), without_sign(answer)):
            return False
        return self._same_number(gold, answer)

    def _same_number(self, gold: Node, answer: Node) -> bool:
        if (gold.kind == "pct") != (answer.kind == "pct"):  # 50% is written as 50 and as 0.5
            percentage, other = (gold, answer) if gold.kind == "pct" else (answer, gold)
            return self._same_number(percentage.parts[0], other) or self._values.equal(percentage, other)
        return self._values.equal(gold, answer) or self._rounded(gold, answer) or self._rounded(answer, gold)

    def _rounded(self, exact: Node, decimal: Node) -> bool:
        """Whether a decimal with enough places is the rounded value of a number that has no finite decimal."""
        literal = without_sign(decimal)
        if literal.kind != "num" or literal.data[1] < LEAST_DECIMALS or variables(exact) or exact.kind == "num":
            return False
        try:
            value = self._values.value(exact)
            written = self._values.value(decimal)
        except NoValue:
            return False
        ulp = Fraction(1, 10 ** literal.data[1])
        if isinstance(value, Fraction) and (value / ulp).denominator == 1:
            return False
        error = abs(self._values.inexact(self._values.add([value, -written])))
        return bool(error < self._values.inexact(ulp))

    def _same_ratio(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        if len(gold) != len(answer):
            return False
        if all(map(self._same, gold, answer)):
            return True
        zero = Node("num", (), (Fraction(0), 0))
        if any(self._values.equal(part, zero) for part in (*gold, *answer)):
            return False
        pairs = [(Node("mul", (g, answer[0])), Node("mul", (a, gold[0]))) for g, a in zip(gold[1:], answer[1:])]
        return all(self._values.equal(left, right) for left, right in pairs)

    def _same_collection(self, gold: Node, answer: Node) -> bool:
        if gold.kind == "matrix" or answer.kind == "matrix":
            return self._same_matrix(gold, answer)
        for one, other in ((gold, answer), (answer, gold)):
            if one.kind in ("list", "set") and one.parts and other.kind not in _COLLECTIONS:
                return all(self._same(member, other) for member in one.parts)  # one answer, written in several ways
        kinds = {gold.kind, answer.kind}
        if not kinds <= {"list", "set", "seq"}:
            return False
        if kinds == {"seq"}:
            long = len(gold.parts) > 2
            same_brackets = gold.data == answer.data or (long and {gold.data, answer.data} == {"()", "[]"})
            return same_brackets and self._in_order(gold.parts, answer.parts)
        members = _by_name(gold), _by_name(answer)
        if "seq" in kinds:
            sequence, other = (gold, answer) if gold.kind == "seq" else (answer, gold)
            bracketed = sequence.data == "()" or (sequence.data == "[]" and len(sequence.parts) > 2)
            return other.kind == "list" and bracketed and _may_be_point(other) and self._in_order(*members)
        if _names_differ(gold) != _names_differ(answer):  # x=1, y=2 against 1, 2
            return self._in_order(*members)
        return self._in_any_order(gold, answer)

    def _same_matrix(self, gold: Node, answer: Node) -> bool:
        if any(side.kind != "matrix" and _contains(side, "matrix") for side in (gold, answer)):
            raise NoNumber("matrices are not added or multiplied here")
        first, second = _rows(gold), _rows(answer)
        return len(first) == len(second) > 0 and all(map(self._in_order, first, second))

    def _in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(map(self._same, gold, answer))

    def _in_any_order(self, gold: Node, answer: Node) -> bool:
        """Whether the members can be paired; in sets, each may come several times."""
        if max(len(gold.parts), len(answer.parts)) > MAX_MEMBERS:
            return False
        if gold.kind == "set" and answer.kind == "set":
            return all([self._covers(answer.parts, gold.parts), self._covers(gold.parts, answer.parts)])
        if len(gold.parts) != len(answer.parts):
            return False
        left = list(answer.parts)
        for member in gold.parts:
            match = next((index for index, other in enumerate(left) if self._same(member, other)), None)
            if match is None:
                return False
            left.pop(match)
        return True

    def _covers(self, members: Sequence[Node], others: Sequence[Node]) -> bool:
        return all(any(self._same(other, member) for member in members) for other in others)

    def _same_relation(self, gold: Node, answer: Node) -> bool:
        (gold_name, gold_value), (answer_name, answer_value) = _sides(gold), _sides(answer)
        if gold_value is not None and answer_value is not None:
            if gold_name is None or answer_name is None or gold_name == answer_name:
                return self._same(gold_value, answer_value)
            of_y = {gold_name.kind, answer_name.kind} == {"var", "mul"} and "y" in (gold_name.data, answer_name.data)
            if of_y and variables(gold_value):  # y and f(x) name the same thing
                return self._same(gold_value, answer_value)
        if gold.kind != answer.kind:
            return self._same_identity(gold, answer)
        if _is_solved(gold_value) != _is_solved(answer_value):
            return False  # 2x = 6 does not answer what x is
        if self._sets.find(gold) is not None or self._sets.find(answer) is not None:
            return False  # nor does 2x < 6
        return self._same_conditions(gold, answer)

    def _same_identity(self, gold: Node, answer: Node) -> bool:
        """An equation that always holds says its last side: ``x^2 - 1 = (x - 1)(x + 1)``."""
        equation, other = (gold, answer) if gold.kind == "rel" else (answer, gold)
        first, *others = equation.parts
        holds = set(equation.data) == {"="} and all(self._values.equal(first, part) for part in others)
        return holds and self._same(others[-1], other)

    def _same_conditions(self, gold: Node, answer: Node) -> bool:
        """Equations up to a factor, inequalities up to a positive one, chains part by part."""
        for flipped in (False, True):
            parts = answer.parts[::-1] if flipped else answer.parts
            signs = tuple(FLIPPED.get(s, s) for s in answer.data[::-1]) if flipped else answer.data
            if signs != gold.data:
                continue
            if len(parts) > 2:
                if self._in_order(gold.parts, parts):
                    return True
            elif gold.data[0] in ("=", *FLIPPED):
                differences = [Node("add", (pair[0], Node("neg", (pair[1],)))) for pair in (gold.parts, parts)]
                ordered = gold.data[0] not in ("=", "!=")
                return self._values.proportional(differences[0], differences[1], same_sign=ordered)
        return False


def _sides(node: Node) -> tuple[Node | None, Node | None]:
    """The name and the value that a tree gives it: ``x = 5``, ``5 = x``, ``x \\in (1,2)``, ``AB = 3+4 = 7``, or just 5.

    The value is None where a relation says something else: an equation such as ``2x + y = 1``, an inequality.
    """
    if node.kind != "rel":
        return None, node
    parts, signs = list(node.parts), list(node.data)
    if "~" in signs:  # an approximation counts only where nothing exact stands before it
        cut = signs.index("~")
        keep = cut + 2 if cut == 0 and _is_name(parts[0]) else cut + 1
        parts, signs = parts[:keep], ["="] * (keep - 1) if keep > 1 else []
        if len(parts) == 1:
            return None, parts[0]
    if any(sign not in ("=", "in") for sign in signs):
        return None, None
    if _is_name(parts[0]):
        return parts[0], parts[-1]
    if _is_name(parts[-1]) and len(parts) == 2 and signs == ["="]:
        return parts[-1], parts[0]
    if all(not variables(part) for part in parts):
        return None, parts[-1]
    return None, None


def _is_name(node: Node) -> bool:
    """Whether a tree only names something: ``x``, ``AB``, ``f(x)``, ``f(2)``, ``|AB|``, ``(x, y)``, ``a:b``, words."""
    if node.kind in ("var", "text"):
        return True
    if node.kind == "mul" and len(node.parts) == 2 and node.parts[0].kind in ("var", "pow"):
        function = node.parts[0] if node.parts[0].kind == "var" else node.parts[0].parts[0]
        if function.kind == "var" and function.data.strip("'")[:1] in _FUNCTION_NAMES:
            return node.parts[1].kind in ("num", "neg", "seq") or _is_name(node.parts[1])
    return node.kind in ("mul", "div", "abs", "seq", "ratio") and all(map(_is_name, node.parts))


def _with_names(node: Node) -> Node:
    """The tree with what an inequality is about as one variable: the ``f(x)`` of ``0 < f(x) < 1``."""
    parts = tuple(map(_with_names, node.parts)) if node.kind == "list" else node.parts
    if node.kind == "rel" and any(sign in FLIPPED for sign in node.data):
        parts = tuple(Node("var", (), str(part)) if part.parts and _is_name(part) else part for part in parts)
    return node._replace(parts=parts)


def _is_solved(value: Node | None) -> bool:
    """Whether a name is given a value without variables."""
    return value is not None and not variables(value)


def _names_differ(node: Node) -> bool:
    """Whether the members of a list are given different names; ``x_1`` and ``x_2`` are one: roots have no order."""
    names = [_sides(part)[0] for part in node.parts]
    return None not in names and len({str(name).partition("_")[0] for name in names}) == len(names) > 1


def _may_be_point(node: Node) -> bool:
    """Whether the members of a list may be coordinates: not what one name may be, ``x=1 or x=2``."""
    names = [str(name) for name, _ in map(_sides, node.parts) if name is not None]
    return node.data != "or" and len(set(names)) == len(names)


def _by_name(node: Node) -> Sequence[Node]:
    """The members; those of letters with a value in the order of the alphabet: ``y=2, x=3`` is the point ``(3,2)``."""
    names = [_sides(part)[0] for part in node.parts]
    letters = [name.data for name in names if name and name.kind == "var" and len(name.data) == 1]
    if len(letters) < len(names) or len(set(letters)) < len(names):
        return node.parts
    return [part for _, part in sorted(zip(letters, node.parts))]


def _contains(node: Node, kind: str) -> bool:
    return any(part.kind == kind for part in walk(node))


def _rows(node: Node) -> list[tuple[Node, ...]]:
    """The rows of a matrix, of a list of lists, or of a vector, which is a column; none of anything else."""
    if node.kind != "matrix" and (node.kind != "seq" or node.data not in ("()", "[]")):
        return []
    return [part.parts if part.kind in ("row", "seq") else (part,) for part in node.parts]


def _expanded(node: Node) -> Node:
    """The tree with each plus-minus written out: a member with one becomes two members."""
    if not _contains(node, "pm"):
        return node
    if node.kind in ("list", "set"):
        return node._replace(parts=tuple(member for part in node.parts for member in _both_signs(part)))
    return Node("list", _both_signs(node), ",")


def _both_signs(node: Node) -> tuple[Node, ...]:
    return (_signed(node, 1), _signed(node, -1)) if _contains(node, "pm") else (node,)


def _signed(node: Node, sign: int) -> Node:
    parts = tuple(_signed(part, sign) for part in node.parts)
    if node.kind == "pm":
        return parts[0] if sign * node.data > 0 else Node("neg", parts)
    return node._replace(parts=parts)


_WORDS = re.compile(r"[A-Za-z(][A-Za-z ().,'-]*")
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]*")
_LABELLED = re.compile(r"(?:\\text ?\{ ?)?\(?([A-Z])[).:](?: ?\}| ).+")  # \text{(B)} 42
_COMMA = re.compile(r"\d,\d{3}(?!\d)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3}")
_NAME = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_LETTER_TAIL = re.compile(r"(?<=[\d}]) ?([mgsLlh])\Z")


def math_equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` is the same mathematical answer as ``gold``. Total: it returns for any two texts.

    Compared are, in this order: the words; the units, where both have a known one; the two answers as the grammar of
    :mod:`sota_grpo.rewards.maths.parse` reads them; and, only where that grammar cannot read them, what Math-Verify
    makes of them. Nothing is evaluated as code, and large numbers, deep nesting and long texts end the comparison
    instead of being worked out.

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
    measures = _measures(*texts)
    units = measures[0].units, measures[1].units
    if not (units[0] <= units[1] or units[1] <= units[0]):  # 5 km for 5 km/h is let pass
        return False
    try:
        return _same_trees(*measures)
    except TooCostly:
        return False
    except (Unreadable, NoNumber, NoValue):
        return verified(measures[0].text, measures[1].text)


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
    if not _letters(answer_measure.text):
        gold_measure = _without_letter(gold_measure)
    if not _letters(gold_measure.text):
        answer_measure = _without_letter(answer_measure)
    return gold_measure, answer_measure


def _without_letter(measure: Measure) -> Measure:
    tail = _LETTER_TAIL.search(measure.text)
    if tail is None:
        return measure
    return Measure(measure.text[: tail.start()], measure.units | {tail[1].lower()}, measure.factor)


def _letters(text: str) -> set[str]:
    """The letters that stand in a text, those of commands aside."""
    return {name for name in _NAME.findall(text) if name[0] != "\\"}


def _same_trees(gold: Measure, answer: Measure) -> bool:
    texts = [f"({one.text})\\cdot {one.factor}" if one.factor != 1 else one.text for one in (gold, answer)]
    letters = list(map(_letters, texts))
    if not any(one.islower() and one.upper() in each for each in letters for one in each):  # R and r are two things
        texts = [_NAME.sub(lambda name: name[0] if name[0][0] == "\\" else name[0].lower(), t) for t in texts]
    readings = (True, False) if any(map(_COMMA.search, texts)) else (True,)  # 100,200 is a number or a list
    return any(Comparison().same(*(parse_answer(text, thousands=reading) for text in texts)) for reading in readings)
